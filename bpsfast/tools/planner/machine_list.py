"""Parses and prints machines of ``bpsfast plan``: a count ``8``, or Gbit/s ``4x25,4x10``, ``7x10,2.5``, ``4x25/8``."""
from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from ...orchestration.errors import ConfigError
from ...orchestration.placement.shares import Machine

#: Most machines; more are a typing error.
MOST_MACHINES = 4096
#: Fastest NIC in Gbit/s.
MOST_GBPS = 10_000.0

_GROUP = re.compile(r"(?:(?P<count>-?\d+)x)?(?P<rate>[^/x]+)(?:/(?P<sum>.+))?")


def parse(text: str, has_ranks: bool, nic_gbps: float) -> list[Machine]:
    """Return the machines of *text*: their number, all with *nic_gbps*, or rates in Gbit/s, each ``[COUNTx]RATE``.

    ``/RATE`` after a rate limits the input that the machine sums (for a helper on a busy machine). Raises `ConfigError`
    if *text* cannot be parsed, or numbers are not positive or too large.
    """
    option = "--workers" if has_ranks else "--helpers"
    nic_rate = _rate(nic_gbps, "--nic")
    if re.fullmatch(r"-?\d+", text.strip()):
        return _several(int(text), Machine(has_ranks, nic_rate), option, least=1 if has_ranks else 0)
    machines: list[Machine] = []
    for word in text.split(","):
        match = _GROUP.fullmatch(word.strip())
        if match is None:
            raise ConfigError(f"{option} {text!r}: {word!r} is not a rate; expected a number of machines, or rates in "
                              "Gbit/s such as 4x25,4x10 (25/8: a NIC of 25, sums of 8)")
        rate = _rate(match["rate"], f"{option} {text!r}")
        sum_rate = _rate(match["sum"], f"{option} {text!r}") if match["sum"] else 0.0
        machines += _several(int(match["count"] or 1), Machine(has_ranks, rate, sum_rate), option, 1)
        if len(machines) > MOST_MACHINES:
            break
    return _several(1, machines, option, 1)


def _several(count: int, machines: Machine | list[Machine], option: str, least: int) -> list[Machine]:
    found = machines if isinstance(machines, list) else [machines] * max(0, min(count, MOST_MACHINES + 1))
    if count < least:
        raise ConfigError(f"{option}: {count} machines are impossible: there must be at least {least}")
    if len(found) > MOST_MACHINES:
        raise ConfigError(f"{option}: more than {MOST_MACHINES} machines exceed the limit of a plan")
    return found


def describe(machines: Sequence[Machine], what: str) -> str:
    """Return "7 workers at 10 Gbit/s, 1 worker at 2.5 Gbit/s"."""
    runs = ((machine, len(list(group))) for machine, group in groupby(machines))
    return ", ".join(f"{count} {what}{'' if count == 1 else 's'} at {rate_of(machine)}"
                     for machine, count in runs) or f"no {what}s"


def rate_of(machine: Machine) -> str:
    """Return "25 Gbit/s", with the rate of its sums if that is limited."""
    text = f"{machine.rate * 8 / 1e9:g} Gbit/s"
    return f"{text} (sums {machine.sum_rate * 8 / 1e9:g} Gbit/s)" if machine.sum_rate else text


def _rate(gbps: str | float, what: str) -> float:
    """Return a NIC's rate in bytes/s."""
    try:
        rate = float(gbps)
    except ValueError:
        raise ConfigError(f"{what}: {gbps!r} is not a rate in Gbit/s") from None
    if not 0 < rate <= MOST_GBPS:
        raise ConfigError(f"{what}: a rate of {rate:g} Gbit/s is impossible: it must be above 0 and at most "
                          f"{MOST_GBPS:g}")
    return rate * 1e9 / 8
