"""Who sums what: the exact optimum of the communication model, and a placement of partitions that comes close.

With n machines with ranks and k helpers, M bytes a step, s_m of them owned by machine m, one direction of a NIC carries

    machine with ranks    M - s_i (its own, not kept) + (n-1) s_i (as an owner)  =  M + (n-2) s_i
    helper                n s_j

Minimising the worst machine's time gives, with B_W and B_C the rates of all machines with ranks and of all helpers,

    t* = max( M / min b_i ,  2n(n-1) M / (n B_W + (n-2) B_C) )

A machine whose summation takes no more than c_m bytes/s of input (spare cores of a busy one) has a row n s_m <= c_m t
besides, one that may use only so much memory a bound on s_m. Tests check all of it against a linear program. Source:
BytePS (OSDI'20) section 4.1, extended to unequal NICs; no aggregation along trees (rings included) can be faster. Pure:
same input, same answer, on any machine.
"""
from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from . import hashes
from .errors import CapacityError, ConfigError

_NEVER = float("inf")


class Machine(NamedTuple):
    """One node as placement sees it.

    `rate`: bytes/s of the slower direction of its NIC, 0 if unknown. `sum_rate`: bytes/s of input that its summation
    takes, 0 if that never binds; it is looked at only where the NICs' rates are known, for else there is no unit.
    `most_nbytes`: what it may own at all, for want of memory; None: anything.
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


class WireBytes(NamedTuple):
    """Payload bytes that one machine's NIC sends and receives in one step."""

    tx: int
    rx: int


def rates_of(machines: Sequence[Machine]) -> list[float]:
    """Return the machines' rates; all 1.0 unless every one is known: half a table says nothing about the rest."""
    if all(machine.rate > 0 for machine in machines):
        return [float(machine.rate) for machine in machines]
    return [1.0] * len(machines)


def sum_rates_of(machines: Sequence[Machine]) -> list[float]:
    """Return how fast each machine sums, infinity where that does not bind or where not every NIC's rate is known."""
    known = all(machine.rate > 0 for machine in machines)
    return [float(machine.sum_rate) if known and machine.sum_rate > 0 else float("inf") for machine in machines]


def optimal_shares(machines: Sequence[Machine], nbytes: float) -> Shares:
    """Return the shortest step for *nbytes* and the bytes that each machine should own.

    When the slowest machine with ranks sets the time there is slack: it is spent by giving everybody bytes in
    proportion to its rate, up to what it can carry within t*. So the slowest owns least (nothing, for n > 2).

    Raises
    ------
    ConfigError
        If no machine has ranks.
    CapacityError
        If all machines together may not own so much.
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
    """Return t*: the first time at which everybody with ranks has sent M and all together can own M."""
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
    """Pour *nbytes* into vessels of *most* bytes whose levels rise as *rates*; those that are full stay full."""
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


def check_policy(policy: str) -> None:
    """Raise ConfigError unless *policy* is one of "optimal", "colocated", "ps", "hash:NAME" with a known name."""
    if policy in ("optimal", "colocated", "ps"):
        return
    if policy.startswith("hash:") and policy[5:] in hashes.NAMES:
        return
    raise ConfigError(
        f"placement {policy!r} is unknown; use optimal, colocated, ps or hash:NAME with NAME one of "
        f"{', '.join(hashes.NAMES)}"
    )


def assign(nbytes_of: Sequence[int], machines: Sequence[Machine], policy: str = "optimal",
           owned: Sequence[int] | None = None, keys: Sequence[int] | None = None) -> list[int]:
    """Return the owner (node index) of each new partition.

    Parameters
    ----------
    nbytes_of : sizes of the new partitions, in bytes.
    machines : all nodes, in node order, those with ranks first.
    policy : "optimal", "colocated" (nodes with ranks only), "ps" (helpers only), "hash:NAME".
    owned : bytes that each node owns already; those partitions stay where they are.
    keys : tensor number << 16 | partition number, for hash policies; default: the position.

    Raises
    ------
    ConfigError
        If the policy is unknown, or is "ps" and there is no helper.
    """
    check_policy(policy)
    workers = [m for m, machine in enumerate(machines) if machine.has_ranks]
    helpers = [m for m, machine in enumerate(machines) if not machine.has_ranks]
    if not workers:
        raise ConfigError("placement needs at least one machine with ranks, got none")
    if policy == "ps":
        if not helpers:
            raise ConfigError("placement ps puts all sums on helper nodes, but the job has none; "
                              "start helpers (num_helpers) or use placement optimal")
        return _greedy(nbytes_of, machines, helpers, owned)
    if len(workers) == 1:
        return [workers[0]] * len(nbytes_of)  # everything is local: any other owner would put bytes on a wire
    if policy.startswith("hash:"):
        keys = range(len(nbytes_of)) if keys is None else keys
        return [hashes.server(policy[5:], key, len(workers), len(helpers)) for key in keys]
    return _greedy(nbytes_of, machines, workers + helpers if policy == "optimal" else workers, owned)


def _greedy(nbytes_of: Sequence[int], machines: Sequence[Machine], candidates: Sequence[int],
            owned: Sequence[int] | None) -> list[int]:
    """Place the largest first, each where the worst time grows least; of equals where least is owned for the rate.

    Of machines that are alike the one that owns least is the best, so one of each kind is looked at.
    """
    rates = rates_of(machines)
    own = list(owned) if owned is not None else [0] * len(machines)
    total = sum(own) + sum(nbytes_of)
    times = _Times(machines, total)
    worst = max(times.of(m, own[m]) for m in range(len(machines)))
    kinds: dict[Machine, list[tuple[int, int]]] = {}
    for m in candidates:
        kinds.setdefault(machines[m], []).append((own[m], m))
    heaps = list(kinds.values())
    for heap in heaps:
        heapq.heapify(heap)
    owners = [-1] * len(nbytes_of)
    for position in sorted(range(len(nbytes_of)), key=lambda p: (-nbytes_of[p], p)):
        nbytes = nbytes_of[position]
        heap = min(heaps, key=lambda heap: (max(worst, times.of(heap[0][1], heap[0][0] + nbytes)),
                                            (heap[0][0] + nbytes) / rates[heap[0][1]], heap[0][1]))
        before, best = heap[0]
        heapq.heapreplace(heap, (before + nbytes, best))
        if times.of(best, before + nbytes) < _NEVER:  # where it fits nowhere, bounds go on to count for the others
            worst = max(worst, times.of(best, before + nbytes))
        owners[position] = best
    return _interleaved(nbytes_of, owners)


def _interleaved(nbytes_of: Sequence[int], owners: Sequence[int]) -> list[int]:
    """Return *owners* exchanged among partitions of equal size so that each has its share of every stretch.

    Partitions go out in about this order. Where first all have as many and then only some get more, each NIC is the
    bottleneck for a part of the step and idle for another; this costs the optimum up to a quarter of its time.
    """
    classes: dict[int, list[int]] = {}
    for position, nbytes in enumerate(nbytes_of):
        classes.setdefault(nbytes, []).append(position)
    found = list(owners)
    for positions in classes.values():
        n_of: dict[int, int] = {}
        for position in positions:
            n_of[owners[position]] = n_of.get(owners[position], 0) + 1
        turns = sorted(((2 * i + 1) / n, m) for m, n in n_of.items() for i in range(n))
        for position, (_, m) in zip(positions, turns):
            found[position] = m
    return found


class _Times:
    """The model's time of each machine, by the bytes it owns, in a step of *nbytes*."""

    def __init__(self, machines: Sequence[Machine], nbytes: float) -> None:
        self._n = sum(machine.has_ranks for machine in machines)
        self._rows = [
            (nbytes if machine.has_ranks else 0, self._n - 2 if machine.has_ranks else self._n, rate, most,
             machine.limit_nbytes)
            for machine, rate, most in zip(machines, rates_of(machines), sum_rates_of(machines))]

    def of(self, m: int, owned: float) -> float:
        """Return the time of machine *m*: its NIC's or its summation's; infinity for more than it may own."""
        fixed, slope, rate, most, limit = self._rows[m]
        if owned > limit:
            return _NEVER
        return max((fixed + slope * owned) / rate, self._n * owned / most)


def predict_wire(parts: Iterable[tuple[int, int]], machines: Sequence[Machine]) -> list[WireBytes]:
    """Return what each node's NIC sends and receives in one step that pushes all *parts*, given as (nbytes, owner).

    Every node with ranks that is not the owner sends its partial sum and receives the result: both directions of every
    node carry the same. Payload only: a 32-byte header a partition, TCP/IP and control messages come on top.
    """
    n = sum(machine.has_ranks for machine in machines)
    own = owned_by(parts, len(machines))
    total = sum(own)
    return [WireBytes(nbytes, nbytes) for nbytes in (
        total + (n - 2) * owned if machine.has_ranks else n * owned for machine, owned in zip(machines, own))]


def owned_by(parts: Iterable[tuple[int, int]], n_machines: int) -> list[int]:
    """Return the bytes that each machine owns of *parts*, given as (nbytes, owner)."""
    own = [0] * n_machines
    for nbytes, owner in parts:
        own[owner] += nbytes
    return own


def ring_wire(nbytes: int, machines: Sequence[Machine]) -> list[WireBytes]:
    """Return what a ring all-reduce of *nbytes* over the nodes with ranks would carry, for comparison."""
    n = sum(machine.has_ranks for machine in machines)
    share = 2 * (n - 1) * nbytes // n
    return [WireBytes(share, share) if machine.has_ranks else WireBytes(0, 0) for machine in machines]


def step_time_s(parts: Iterable[tuple[int, int]], machines: Sequence[Machine]) -> float:
    """Return the model's time of the worst machine (seconds if the rates are known, else bytes at rate 1)."""
    return max(machine_times_s(owned_by(parts, len(machines)), machines))


def machine_times_s(owned: Sequence[float], machines: Sequence[Machine], nbytes: float | None = None) -> list[float]:
    """Return the model's time of every machine by the bytes it owns, in a step of *nbytes* (None: what is owned)."""
    times = _Times(machines, sum(owned) if nbytes is None else nbytes)
    return [times.of(m, owned[m]) for m in range(len(machines))]
