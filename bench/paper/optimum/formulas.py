"""What the model says a step takes on a cell's machines, bytes cut at will: `forecast`, and the split of the paper."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bpsfast.orchestration.placement import forecast
from bpsfast.orchestration.placement.assignment import machine_times_s
from bpsfast.orchestration.placement.shares import Machine, least_time_s, optimal_shares


def time_s(contestant: str, nbytes: int, machines: Sequence[Machine]) -> float | None:
    """Return the time of one step of *nbytes* a worker; rates in bytes/s. None: where bytes land depends on names."""
    formula = _FORMULAS.get(contestant)
    return formula(machines, nbytes) if formula else None


def _equal(machines: Sequence[Machine], nbytes: float) -> float:
    """What is optimal if all machines were alike, on these: the split of the paper."""
    alike = [Machine(machine.has_ranks) for machine in machines]
    return max(machine_times_s(optimal_shares(alike, nbytes).owned, machines, nbytes))


_FORMULAS: Mapping[str, Callable[[Sequence[Machine], float], float]] = {
    "optimal": least_time_s, "colocated": forecast.colocated_s, "ps": forecast.ps_s,
    "gloo": forecast.ring_s, "equal": _equal,
}
