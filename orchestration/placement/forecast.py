"""Computes by formula a step's communication time for each placement and a ring; warns of ones that cannot win. Pure.

What a job prints at its start and what ``bpsfast plan`` explains come from here. Source: BytePS (OSDI'20) section 4.1.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

from .shares import Machine, least_time_s, rates_of, sum_rates_of

_SAME = 1 + 1e-9


def ring_s(machines: Sequence[Machine], nbytes: float) -> float:
    """Return the time of a ring all-reduce over the machines with ranks: the slowest NIC's."""
    workers = _as_known(machines, _workers(machines))
    return 2 * (len(workers) - 1) / len(workers) * nbytes / min(rates_of(workers))


def ps_s(machines: Sequence[Machine], nbytes: float) -> float:
    """Return the time if helpers alone own partitions, by their rates; infinity without helpers."""
    n = len(_workers(machines))
    if n == len(machines):
        return float("inf")
    rates = list(zip(machines, rates_of(machines), sum_rates_of(machines)))
    floor_s = nbytes / min(rate for machine, rate, _ in rates if machine.has_ranks)
    return max(floor_s, n * nbytes / sum(min(rate, most) for machine, rate, most in rates if not machine.has_ranks))


def colocated_s(machines: Sequence[Machine], nbytes: float) -> float:
    """Return the time if the machines with ranks alone own partitions, by their rates."""
    return least_time_s(_as_known(machines, _workers(machines)), nbytes)


def policy_s(machines: Sequence[Machine], policy: str, nbytes: float) -> float | None:
    """Return the time of placement *policy*; None for a hash, whose balance depends on names."""
    if policy == "ps":
        return ps_s(machines, nbytes)
    if policy == "colocated":
        return colocated_s(machines, nbytes)
    return least_time_s(machines, nbytes) if policy == "optimal" else None


def with_helpers(machines: Sequence[Machine], k: int) -> list[Machine]:
    """Return *machines* with the first *k* helpers; where it has fewer, with more like the last one.

    Without any helper, more are like the slowest machine with ranks.
    """
    workers = _workers(machines)
    helpers = [machine for machine in machines if not machine.has_ranks]
    model = helpers[-1] if helpers else Machine(False, min(machine.rate for machine in workers))
    return workers + helpers[:k] + [model] * (k - len(helpers))


def last_helper_that_pays(machines: Sequence[Machine], most: int = 1 << 16) -> int:
    """Return how many helpers shorten the optimal step (see `with_helpers`); one more would not.

    *most* bounds the search.
    """
    def time_s(k: int) -> float:
        return least_time_s(with_helpers(machines, k), 1.0)

    least_s = 1.0 / min(rates_of(_as_known(machines, _workers(machines))))  # every byte leaves its machine
    if len(_workers(machines)) == 1 or time_s(0) <= least_s * _SAME:
        return 0
    return _first(most, lambda k: time_s(k) <= least_s * _SAME)


def helpers_to_match_ring(machines: Sequence[Machine]) -> int:
    """Return how many helpers placement "ps" needs to be no slower than a ring (see `with_helpers`)."""
    ring = ring_s(machines, 1.0)
    return _first(1 << 20, lambda k: ps_s(with_helpers(machines, k), 1.0) <= ring * _SAME)


def _first(most: int, holds: Callable[[int], bool]) -> int:
    """Return the least number from 1 to *most* from which on *holds* is true; *most* if there is none."""
    low, high = 0, 1
    while high < most and not holds(high):
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def warnings(machines: Sequence[Machine], policy: str) -> list[str]:
    """Return, in words, why this layout cannot win; empty if it can."""
    n = len(_workers(machines))
    k = len(machines) - n
    found = []
    if n == 1:
        return [f"one node with ranks has nobody to exchange gradients with: its {_count(k, 'helper')} "
                f"{'have' if k > 1 else 'has'} nothing to do"] if k and policy != "ps" else []
    if policy == "ps" and k:
        ps, ring = ps_s(machines, 1.0), ring_s(machines, 1.0)
        if ps > ring * _SAME:
            enough = helpers_to_match_ring(machines)
            found.append(
                f"placement ps cannot win: {_count(k, 'server')} for {_count(n, 'node')} with ranks takes "
                f"{ps / ring:.2f} times as long as a ring, and {_count(enough, 'server')} would be needed to be "
                f"as fast; placement optimal takes {least_time_s(machines, 1.0) / ring:.2f} times a ring's time")
    elif k and policy == "colocated":
        found.append(f"placement colocated leaves {_count(k, 'helper')} idle; placement optimal uses "
                     f"{'them' if k > 1 else 'it'}")
    elif k and policy == "optimal":
        last = last_helper_that_pays(machines, k + 1)
        if last == 0 and n == 2:
            found.append("helpers cannot help two nodes with ranks: each must send and receive all its gradients "
                         "once, and two that sum for each other do no more")
        elif last == 0:
            found.append("helpers cannot help here: the slowest node's own NIC sets the time")
        elif last < k:
            found.append(f"{_count(k - last, 'helper')} of {k} cannot help: from the {_nth(last + 1)} on the slowest "
                         "node's own NIC sets the time")
    return found


def first_line(machines: Sequence[Machine], policy: str) -> str:
    """Return one line: the layout, and the bound; as times of M bytes at rate B where a NIC's rate is unknown."""
    n = len(_workers(machines))
    k = len(machines) - n
    who = f"placement {policy}: {_count(n, 'node')} with ranks, {_count(k, 'helper')}"
    known = all(machine.rate > 0 for machine in machines)
    if n == 1 and policy != "ps":
        return f"{who}; all sums are local"
    time_s, ring = policy_s(machines, policy, 1.0), ring_s(machines, 1.0)

    def shown(per_byte_s: float) -> str:
        return f"{per_byte_s * 1e12:.4g} ms/GB" if known else f"{per_byte_s:.3f} M/B"

    if time_s is None:
        return (f"{who}; no bound, for a hash does not balance (placement optimal: "
                f"{shown(least_time_s(machines, 1.0))}, a ring: {shown(ring)})")
    return f"{who}; a step of M bytes takes at least {shown(time_s)} (a ring: {shown(ring)})"


def _workers(machines: Sequence[Machine]) -> list[Machine]:
    return [machine for machine in machines if machine.has_ranks]


def _as_known(machines: Sequence[Machine], some: Sequence[Machine]) -> list[Machine]:
    """Return *some* of *machines* with the rates that they have among all: equal ones if any is unknown."""
    if all(machine.rate > 0 for machine in machines):
        return list(some)
    return [Machine(machine.has_ranks) for machine in some]


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _nth(n: int) -> str:
    suffix = "th" if 10 <= n % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"
