"""Computes the optimum of the communication model: each machine's share of the sums, and the time of a step.

With n machines with ranks and k helpers, M bytes a step, s_m of them owned by machine m, one direction of a NIC carries

    machine with ranks    M - s_i (its own, not kept) + (n-1) s_i (as an owner)  =  M + (n-2) s_i
    helper                n s_j

Minimising the worst machine's time gives, with B_W and B_C the rates of all machines with ranks and of all helpers,

    t* = max( M / min b_i ,  2n(n-1) M / (n B_W + (n-2) B_C) )

A machine whose summation takes at most c_m bytes/s of input (spare cores of a busy one) adds a row n s_m <= c_m t, a
machine with limited memory a bound on s_m. Tests check all of it against a linear program. Source: BytePS (OSDI'20)
section 4.1, extended to unequal NICs; no aggregation along trees (rings included) can be faster.
"""
from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import CapacityError, ConfigError

_NEVER = float("inf")


class Machine(NamedTuple):
    """One node as placement sees it.

    `rate`: bytes/s of the slower direction of its NIC, 0 if unknown. `sum_rate`: bytes/s of input that it can sum, 0 if
    that is not a limit; it counts only where the NICs' rates are known, because else there is no unit. `most_nbytes`:
    what it may own, for want of memory; None: anything.
    """

    has_ranks: bool
    rate: float = 0.0
    sum_rate: float = 0.0
    most_nbytes: float | None = None

    @property
    def limit_nbytes(self) -> float:
        """`most_nbytes`, infinity for None."""
        return _NEVER if self.most_nbytes is None else self.most_nbytes


class Shares(NamedTuple):
    """The optimum: `time_s` of one step, bytes owned by each machine (seconds only if the rates are bytes/s)."""

    time_s: float
    owned: tuple[float, ...]


def rates_of(machines: Sequence[Machine]) -> list[float]:
    """Return the machines' rates; all 1.0 unless every rate is known: known and unknown ones cannot be compared."""
    if all(machine.rate > 0 for machine in machines):
        return [float(machine.rate) for machine in machines]
    return [1.0] * len(machines)


def sum_rates_of(machines: Sequence[Machine]) -> list[float]:
    """Return how fast each machine sums, infinity where that is no limit or where not every NIC's rate is known."""
    known = all(machine.rate > 0 for machine in machines)
    return [float(machine.sum_rate) if known and machine.sum_rate > 0 else float("inf") for machine in machines]


def optimal_shares(machines: Sequence[Machine], nbytes: float) -> Shares:
    """Return the shortest step for *nbytes* and the bytes that each machine should own.

    When the slowest machine with ranks sets the time there is slack: then each machine owns bytes in proportion to its
    rate, up to what it can carry within t*. So the slowest owns least (nothing, for n > 2). Raises `ConfigError` if no
    machine has ranks; `CapacityError` if all machines together may not own so much.
    """
    time_s = least_time_s(machines, nbytes)
    return Shares(time_s, _fill(capacities(machines, nbytes, time_s), rates_of(machines), nbytes))


def capacities(machines: Sequence[Machine], nbytes: float, time_s: float) -> list[float]:
    """Return the bytes that each machine can own in a step of *nbytes* that takes *time_s*."""
    n = sum(machine.has_ranks for machine in machines)
    if n == 1:
        return [float(nbytes) if machine.has_ranks else 0.0 for machine in machines]
    return [min(nbytes, _capacity(*each, nbytes, n, time_s))
            for each in zip(machines, rates_of(machines), sum_rates_of(machines))]


def _capacity(machine: Machine, rate: float, sum_rate: float, nbytes: float, n: int, time_s: float) -> float:
    if not machine.has_ranks:
        return min(min(rate, sum_rate) * time_s / n, machine.limit_nbytes)
    # with n == 2 any share costs the same: M + 0 * s
    by_nic = float("inf") if n == 2 else max(0.0, (rate * time_s - nbytes) / (n - 2))
    return min(by_nic, sum_rate * time_s / n, machine.limit_nbytes)


def least_time_s(machines: Sequence[Machine], nbytes: float) -> float:
    """Return t*: the first time at which all machines with ranks have sent M and all together can own M."""
    n = sum(machine.has_ranks for machine in machines)
    if n == 0:
        raise ConfigError("placement needs at least one machine with ranks, got none")
    if n == 1 or nbytes == 0:
        return 0.0
    rows = list(zip(machines, rates_of(machines), sum_rates_of(machines)))
    floor_s = nbytes / min(rate for machine, rate, _ in rows if machine.has_ranks)
    bends = {bend for row in rows for bend in _bends(*row, nbytes, n)}
    if not bends:
        worker_rate = sum(rate for machine, rate, _ in rows if machine.has_ranks)
        helper_rate = sum(min(rate, most) for machine, rate, most in rows if not machine.has_ranks)
        return max(floor_s, 2 * n * (n - 1) * nbytes / (n * worker_rate + (n - 2) * helper_rate))
    wanted = nbytes * (1 - 1e-12)  # machines that are all full own it but for rounding
    if sum(machine.limit_nbytes for machine in machines) < wanted:
        raise CapacityError(f"{nbytes:.0f} bytes of gradients do not fit: the machines may own "
                            f"{sum(machine.limit_nbytes for machine in machines):.0f} bytes of them together")

    # From the floor on, what can be owned grows with time along straight lines between the bends, and ever slower.
    def owned(time_s: float) -> float:
        return sum(_capacity(*row, nbytes, n, time_s) for row in rows)

    times = [floor_s, *sorted(bend for bend in bends if bend > floor_s)]
    behind = bisect.bisect_left(times, wanted, key=owned)
    if behind == 0:
        return floor_s
    begin = times[behind - 1]
    end = times[behind] if behind < len(times) else begin * 2
    growth = (owned(end) - owned(begin)) / (end - begin)
    return begin + (wanted - owned(begin)) / growth


def _bends(machine: Machine, rate: float, sum_rate: float, nbytes: float, n: int) -> list[float]:
    """Return the times at which a machine's capacity changes its slope (and some more, which do no harm)."""
    limit, never = machine.limit_nbytes, _NEVER
    if not machine.has_ranks:
        found = [limit * n / min(rate, sum_rate)]
    else:
        lead = rate - sum_rate * (n - 2) / n  # of the NIC, which starts later, over the summation
        found = [nbytes / lead if lead > 0 else never, limit * n / sum_rate if limit < never else never]
        if n > 2:
            found.append((limit * (n - 2) + nbytes) / rate)
    return [bend for bend in found if bend < never]


def _fill(most: Sequence[float], rates: Sequence[float], nbytes: float) -> tuple[float, ...]:
    """Pour *nbytes* into vessels of *most* bytes whose levels rise as *rates*; full ones stay full."""
    owned = [0.0] * len(most)
    left = float(nbytes)
    filling = sorted(range(len(most)), key=lambda m: most[m] / rates[m])
    while filling:
        level = left / sum(rates[m] for m in filling)
        first = filling[0]
        if most[first] >= level * rates[first]:
            for m in filling:
                owned[m] = level * rates[m]
            break
        owned[first] = most[first]
        left -= most[first]
        filling = filling[1:]
    return tuple(owned)
