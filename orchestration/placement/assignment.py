"""Assigns partitions to owners, close to the optimal shares (`shares`), and predicts the cost. Pure."""
from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..errors import ConfigError
from ..placement_policy import check_policy, server
from .shares import Machine, rates_of, sum_rates_of

_NEVER = float("inf")


class WireBytes(NamedTuple):
    """Payload bytes that one machine's NIC sends and receives in one step."""

    tx: int
    rx: int


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
        return [server(policy[5:], key, len(workers), len(helpers)) for key in keys]
    return _greedy(nbytes_of, machines, workers + helpers if policy == "optimal" else workers, owned)


def assign_among(nbytes_of: Sequence[int], machines: Sequence[Machine], owned: Sequence[int],
                 candidates_of: Callable[[int], Sequence[int]], is_wanted: Callable[[int], bool]) -> list[int]:
    """Return the owner of each new partition where not every node can be: of position p one of ``candidates_of(p)``.

    The largest first, each to a machine that may own so much; of those to one that *is_wanted*; of those where it is
    done first beside what is *owned* already; of equals where least is owned.
    """
    own = list(owned)
    times = _Times(machines, sum(own) + sum(nbytes_of))
    owners = [-1] * len(nbytes_of)
    for position in sorted(range(len(nbytes_of)), key=lambda p: (-nbytes_of[p], p)):
        nbytes = nbytes_of[position]
        _, _, _, _, best = min((time >= _NEVER, not is_wanted(m), time, own[m], m) for m in candidates_of(position)
                               for time in (times.of(m, own[m] + nbytes),))
        own[best] += nbytes
        owners[position] = best
    return owners


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
    return interleaved(nbytes_of, owners)


def interleaved(nbytes_of: Sequence[int], owners: Sequence[int]) -> list[int]:
    """Return *owners* exchanged among partitions of equal size (or kind) so that each has its share of every stretch.

    Partitions are sent in about this order. If first all owners had as many and then only some got more, each NIC would
    be the bottleneck for a part of the step and idle for another; this costs up to a quarter of the optimum's time.
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


def times_of(machines: Sequence[Machine], nbytes: float) -> Callable[[int, float], float]:
    """Return a function that gives the model's time of a machine for the bytes that it owns, in a step of *nbytes*."""
    return _Times(machines, nbytes).of


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
