"""What a run of ``bpsfast tune rdma`` found: a table of before and after, what was tried, what the cards counted."""
from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ...base.output import columns
from ..doctor.finding import Outcome as Reading, Status
from .comparison import spread
from .perf_options import LATENCY
from .search import Config, Outcome, TuneStep, describe
from .tuning_run import TuningRun


def head(session: TuningRun) -> str:
    """Return who measures with whom, what may be tried and what not."""
    lines = [f"bpsfast tune rdma: {session.own.host} with {', '.join(side.host for side in session.partners)}, "
             f"budget {session.budget_s:g} s, {session.sample_s:g} s a sample, judged by {session.goal}"]
    for way in session.ways(session.start, session.loads[-2]):
        their = session.partners[way.partner]
        lines.append(f"  {session.own.host} {way.own.name} -> {their.host} {way.their.name}: {way.own.reason}")
    lines.append("to try: " + ", ".join(knob.name for knob in session.choice.knobs))
    lines += [f"not tried: {name}: {reason}" for name, reason in session.choice.untried.items()]
    return "\n".join(lines)


def step(tried: TuneStep) -> str:
    """Return one value that was tried."""
    return f"  {tried.knob} {shown(tried.was)} -> {shown(tried.value)}: {tried.words}"


def text(session: TuningRun, outcome: Outcome, reading: Reading, changes: Sequence[str]) -> str:
    """Return the result; *changes*: what was done about it, in words."""
    rows = [("", "before", "", "after", "", "change")]
    for load in session.loads:
        comparison = outcome.comparisons.get(load)
        after = outcome.after.get(load)
        rows.append((load, *_cells(load, outcome.before[load]), *(_cells(load, after) if after else ("", "")),
                     f"{comparison}: {comparison.verdict}" if comparison else ""))
    lines = [columns(rows, right=(1, 3)), f"{outcome.n_measured} samples in {outcome.seconds:.0f} s: {outcome.words}"]
    if outcome.untried:
        lines.append(f"the budget did not last for: {', '.join(outcome.untried)}")
    for name, value in describe(outcome.best, outcome.start).items():
        lines.append(f"  {name} = {shown(outcome.start[name])} -> {shown(value)}")
    for which, config in _series(outcome):
        for load in session.loads:
            for delta in session.counted(config, load):
                lines.append(f"{delta.line()}   ({load}, {which})")
                lines += [f"   {verdict}" for verdict in delta.verdicts()]
    return "\n".join([*lines, *_network(reading, _troubled(session, outcome)), *changes])


def data(session: TuningRun, outcome: Outcome, reading: Reading, profile: dict[str, Any] | None) -> dict[str, Any]:
    """Return what JSON shows; bandwidths in bytes per second, latencies in seconds."""
    loads = {}
    for load in session.loads:
        comparison = outcome.comparisons.get(load)
        loads[load] = {
            "unit": "s" if load == LATENCY else "bytes/s", "before": _series_data(load, outcome.before[load]),
            "after": _series_data(load, outcome.after[load]) if load in outcome.after else None,
            "gain": comparison.gain if comparison else None, "noise": comparison.noise if comparison else None,
            "verdict": comparison.verdict if comparison else None,
            "counters": {which: [{"port": f"{delta.device}/{delta.port}", "changes": dict(delta.changes),
                                  "verdicts": delta.verdicts()} for delta in session.counted(config, load)]
                         for which, config in _series(outcome)},
        }
    return {
        "host": session.own.host, "partners": [side.host for side in session.partners], "goal": session.goal,
        "budget_s": session.budget_s, "seconds": outcome.seconds, "samples": outcome.n_measured,
        "changed": outcome.changed, "verdict": outcome.words, "start": outcome.start, "best": outcome.best,
        "changes": describe(outcome.best, outcome.start), "loads": loads,
        "steps": [each._asdict() for each in outcome.steps],
        "not_tried": session.choice.untried | {name: "the budget did not last" for name in outcome.untried},
        "network": {"status": reading.status.value, "found": reading.found, "troubled": _troubled(session, outcome),
                    "actions": [{"where": action.where, "command": action.command} for action in reading.actions]},
        "profile": profile,
    }


def shown(value: Any) -> str:
    """Return a setting's value for people."""
    return "(empty)" if value == "" else str(value)


def _series(outcome: Outcome) -> list[tuple[str, Config]]:
    return [("before", outcome.start), *((("after", outcome.best),) if outcome.changed else ())]


def _troubled(session: TuningRun, outcome: Outcome) -> bool:
    return any(not delta.is_clean for _, config in _series(outcome) for load in session.loads
               for delta in session.counted(config, load))


def _network(reading: Reading, troubled: bool) -> list[str]:
    """Return the doctor's words on flow control: all of them where the cards counted loss or congestion."""
    if reading.status is Status.SKIP and not troubled:
        return []
    lines = [f"network (RD09): {reading.found}".replace("\n", "\n  ")]
    if troubled and reading.actions:
        lines += [f"  {action.where + ':':<8} {action.command}" for action in reading.actions]
    return lines


def _natural(load: str, values: Sequence[float]) -> list[float]:
    return [1 / value for value in values] if load == LATENCY else list(values)


def _cells(load: str, values: Sequence[float]) -> tuple[str, str]:
    natural = _natural(load, values)
    factor, unit = (1e6, "us") if load == LATENCY else (8e-9, "Gb/s")
    return f"{statistics.median(natural) * factor:.3f}", f"+- {spread(natural) * factor:.3f} {unit}"


def _series_data(load: str, values: Sequence[float]) -> dict[str, Any]:
    natural = _natural(load, values)
    return {"median": statistics.median(natural), "spread": spread(natural), "samples": natural}
