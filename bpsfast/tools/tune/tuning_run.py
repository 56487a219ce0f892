"""One run of ``bpsfast tune rdma`` on the driving side: its tunables, measurements, card counters and report."""
from __future__ import annotations

import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from ...base.output import columns
from ...base.settings import Settings
from ...hardware.host import Host
from ...hardware.nic_counters import CounterDelta
from ...orchestration.errors import BpsError, ConfigError
from ..doctor.examination import CHECKS, examine
from ..doctor.facts import Facts
from ..doctor.finding import Outcome as Reading, Status
from ..perf.perf_plan import Plan
from . import tunables
from .search import Config, ConfigRefusedError, Outcome, Search, TuneStep, describe, spread
from .testbed import RailPair, TuneTestbed
from .tunables import INCAST, LATENCY, NAMES, ONE_WAY, TWO_WAY, plan_of, rails_of

#: Samples per budget; a search needs some hundreds.
_SHARE = 400
_SHORTEST_S, _LONGEST_S = 0.1, 1.0


class TuningRun:
    """Machines and measurements. One thread. Raises `BpsError` or `OSError` for an unusable machine."""

    def __init__(self, testbed: TuneTestbed, towards: str, loaded: Settings, goal: str | None, budget_s: float,
                 timeout_s: float, traffic_classes: Sequence[int] = (), service_levels: Sequence[int] = (),
                 only: Sequence[str] = ()) -> None:
        self.budget_s, self._timeout_s = budget_s, timeout_s
        self.sample_s = min(_LONGEST_S, max(_SHORTEST_S, budget_s / _SHARE))
        self._testbed = testbed
        self.own = tunables.gather(testbed.own, loaded, towards)
        self.own.require()
        self.partners = testbed.ask("facts")
        for partner in self.partners:
            partner.require()
        self.start: Config = {name: getattr(loaded, name) for name in NAMES}
        several = len(self.partners) > 1
        self.loads = (ONE_WAY, TWO_WAY, *((INCAST,) if several else ()), LATENCY)
        self.goal = goal or TWO_WAY
        if self.goal not in self.loads:
            raise ConfigError(f"--goal {self.goal} needs several sending hosts; name two or more")
        self.choice = tunables.choose(self.start, self.own, self.partners, self.goal, traffic_classes, service_levels,
                                      only)
        if not self.choice.tunables:
            raise ConfigError("there is nothing to try: " + "; ".join(
                f"{name}: {reason}" for name, reason in self.choice.untried.items()))
        #: (settings, load, {(host, device/port): counters}) of every measurement
        self._counted: list[tuple[Config, str, dict[tuple[str, str], dict[str, int]]]] = []

    def search(self, report: Callable[[TuneStep], None], seed: int) -> Outcome:
        """Search, with *report* of each step; raise `BpsError` if a machine is gone or current settings fail."""
        search = Search(self.start, self.choice.tunables, self.loads, self.measure, clock=time.monotonic,
                        budget_s=self.budget_s, rng=random.Random(seed), effective=self.effective, report=report)
        try:
            return search.run()
        except ConfigRefusedError as exc:
            raise BpsError(f"the current settings cannot be measured, so there is nothing to compare with: {exc}") \
                from exc

    def ways(self, config: Config, load: str) -> list[RailPair]:
        """Return the pairs of rails of a measurement: all rails to the first machine, for incast to all machines.

        A partner uses the rails of its own settings, unless another choice of rails is being tried, which then has the
        same names on all machines.
        """
        own = rails_of(self.own, config["rdma_devices"])
        named = "" if config["rdma_devices"] == self.start["rdma_devices"] else config["rdma_devices"]
        found = []
        for number, partner in enumerate(self.partners if load == INCAST else self.partners[:1]):
            pairs = list(zip(own, rails_of(partner, named)))
            found += [RailPair(number, *pair) for pair in (pairs[:1] if load == LATENCY else pairs)]
        return found

    def effective(self, config: Config, load: str) -> tuple[Plan, tuple[RailPair, ...]]:
        """Return a key of what is measured with these settings; equal keys mean no difference in effect."""
        ways = self.ways(config, load)
        rails = [rail for way in ways for rail in (way.own, way.their)]
        n_rails = sum(way.partner == 0 for way in ways)
        return plan_of(config, load, rails, n_rails, self.sample_s, self._timeout_s), tuple(ways)

    def measure(self, config: Config, load: str) -> float:
        """Return the bandwidth of all ways together in bytes per second, or the inverse of a latency (1/s)."""
        plan, ways = self.effective(config, load)
        rows = self._testbed.measure(plan, ways)
        self._counted.append((config, load, self._counters(ways, rows)))
        if load == LATENCY:
            return 1.0 / rows[0]["typical_s"] if rows[0]["typical_s"] > 0 else 0.0
        seconds = max(row["seconds"] for row in rows)
        return sum(row["messages"] * row["nbytes"] for row in rows) / seconds if seconds > 0 else 0.0

    def _counters(self, ways: Sequence[RailPair],
                  rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], dict[str, int]]:
        """Return what each port counted; all ways of a port counted the same."""
        found: dict[tuple[str, str], dict[str, int]] = {}
        for way, row in zip(ways, rows):
            for side, host in (("client", self.own.host), ("server", self.partners[way.partner].host)):
                for port in row["counters"][side]:
                    into = found.setdefault((host, f"{port['device']}/{port['port']}"), {})
                    for name, value in port["changes"].items():
                        into[name] = max(into.get(name, 0), value)
        return found

    def counted(self, config: Config, load: str) -> list[CounterDelta]:
        """Return the changes of the ports' counters in all measurements of *load* with these settings."""
        total: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for measured, under, ports in self._counted:
            if (measured, under) == (config, load):
                for where, changes in ports.items():
                    total[where].update(changes)
        return [CounterDelta(f"{host} {device}", int(port), 0.0, changes, False, False)
                for (host, name), changes in total.items() for device, _, port in [name.partition("/")]]


def network(loaded: Settings, origins: dict[str, str]) -> Reading:
    """Return the doctor's outcome on flow control of this machine: PFC, ECN, DCQCN, and advice (check RD09)."""
    return examine(Facts(Host(), loaded, origins), [each for each in CHECKS if each.code == "RD09"])[0].outcome


def head(session: TuningRun) -> str:
    """Return the heading: which machines take part, which settings are tried, and which are not."""
    lines = [f"bpsfast tune rdma: {session.own.host} with {', '.join(side.host for side in session.partners)}, "
             f"budget {session.budget_s:g} s, {session.sample_s:g} s a sample, judged by {session.goal}"]
    for way in session.ways(session.start, session.loads[-2]):
        their = session.partners[way.partner]
        lines.append(f"  {session.own.host} {way.own.name} -> {their.host} {way.their.name}: {way.own.reason}")
    lines.append("to try: " + ", ".join(tunable.name for tunable in session.choice.tunables))
    lines += [f"not tried: {name}: {reason}" for name, reason in session.choice.untried.items()]
    return "\n".join(lines)


def step(tried: TuneStep) -> str:
    """Return the line about one value that was tried."""
    return f"  {tried.knob} {shown(tried.was)} -> {shown(tried.value)}: {tried.words}"


def text(session: TuningRun, outcome: Outcome, reading: Reading, changes: Sequence[str]) -> str:
    """Return the result as text; *changes* says what was done with it."""
    rows = [("", "before", "", "after", "", "change")]
    for load in session.loads:
        comparison = outcome.comparisons.get(load)
        after = outcome.after.get(load)
        rows.append((load, *_cells(load, outcome.before[load]), *(_cells(load, after) if after else ("", "")),
                     f"{comparison}: {comparison.verdict}" if comparison else ""))
    lines = [columns(rows, right=(1, 3)), f"{outcome.n_measured} samples in {outcome.seconds:.0f} s: {outcome.words}"]
    if outcome.untried:
        lines.append(f"the budget did not suffice for: {', '.join(outcome.untried)}")
    for name, value in describe(outcome.best, outcome.start).items():
        lines.append(f"  {name} = {shown(outcome.start[name])} -> {shown(value)}")
    for which, config in _series(outcome):
        for load in session.loads:
            for delta in session.counted(config, load):
                lines.append(f"{delta.line()}   ({load}, {which})")
                lines += [f"   {verdict}" for verdict in delta.verdicts()]
    return "\n".join([*lines, *_network(reading, _troubled(session, outcome)), *changes])


def data(session: TuningRun, outcome: Outcome, reading: Reading, profile: dict[str, Any] | None) -> dict[str, Any]:
    """Return the JSON data: bandwidths in bytes per second, latencies in seconds."""
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
        "not_tried": session.choice.untried | {name: "the budget did not suffice" for name in outcome.untried},
        "network": {"status": reading.status.value, "found": reading.found, "troubled": _troubled(session, outcome),
                    "actions": [{"where": action.where, "command": action.command} for action in reading.actions]},
        "profile": profile,
    }


def shown(value: Any) -> str:
    """Return the value of a setting as text."""
    return "(empty)" if value == "" else str(value)


def _series(outcome: Outcome) -> list[tuple[str, Config]]:
    return [("before", outcome.start), *((("after", outcome.best),) if outcome.changed else ())]


def _troubled(session: TuningRun, outcome: Outcome) -> bool:
    return any(not delta.is_clean for _, config in _series(outcome) for load in session.loads
               for delta in session.counted(config, load))


def _network(reading: Reading, troubled: bool) -> list[str]:
    """Return the doctor's text on flow control; all of it if the cards counted loss or congestion."""
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
