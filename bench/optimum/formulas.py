"""What the model says a step takes, in seconds: each strategy on machines of given rates, bytes as if cut at will.

Source: BytePS (OSDI'20) Table 1 and section 4.1; with unequal links, the same accounts machine by machine.
"""
from __future__ import annotations

from collections.abc import Sequence

from bpsfast.orchestration import placement
from bpsfast.orchestration.placement import Machine


def time_s(strategy: str, nbytes: int, machines: Sequence[Machine]) -> float:
    """Return the time of one step of *nbytes* a worker. *strategy*: a key of `FORMULAS`; rates in bytes/s."""
    return FORMULAS[strategy](nbytes, [m.rate for m in machines if m.has_ranks],
                              [m.rate for m in machines if not m.has_ranks])


def _optimal(nbytes: int, workers: list[float], helpers: list[float]) -> float:
    machines = [Machine(True, rate) for rate in workers] + [Machine(False, rate) for rate in helpers]
    return placement.optimal_shares(machines, nbytes).time_s


def _ring(nbytes: int, workers: list[float], helpers: list[float]) -> float:
    """Every machine passes on 2(n-1)/n of the bytes; the slowest sets the pace. Also: all workers own equal shares."""
    n = len(workers)
    return 2 * (n - 1) / n * nbytes / min(workers)


def _ps(nbytes: int, workers: list[float], helpers: list[float]) -> float:
    """Workers send everything; each of k helpers receives 1/k of it from each."""
    return max(nbytes / min(workers), len(workers) * nbytes / (len(helpers) * min(helpers)))


def _equal(nbytes: int, workers: list[float], helpers: list[float]) -> float:
    """The optimum for machines that are all alike, on these: the paper's own split."""
    shares = placement.optimal_shares([Machine(True)] * len(workers) + [Machine(False)] * len(helpers), nbytes)
    n = len(workers)
    owned_here, owned_there = shares.owned[:n], shares.owned[n:]
    return max([(nbytes + (n - 2) * s) / rate for s, rate in zip(owned_here, workers)]
               + [n * s / rate for s, rate in zip(owned_there, helpers)])


FORMULAS = {"optimal": _optimal, "colocated": _ring, "gloo": _ring, "ps": _ps, "equal": _equal}
