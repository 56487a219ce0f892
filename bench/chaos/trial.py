"""One trial: a real job on this machine, its faults, and a verdict on what its ranks have seen."""
from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from bpsfast.launch.daemons import LEFT_BEHIND

from .gradients import PARTITION_NBYTES
from .history import RankHistory, read, wrong_sums
from .processes import Processes
from .scenario import LEASE_S, MAY_RAISE, Fault, Scenario

#: Nobody may wait for longer: a job that has not ended by then hangs.
_HANG_S = 120.0
#: From the moment that a loss can be known (a death at once, silence after the lease) to the error on every rank.
_DETECTED_S = 2.0
_PROGRAM = "bpsfast.bench.chaos.rank"
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


@dataclass(frozen=True)
class Verdict:
    """What became of one trial: `outcome` is "recovered", "raised", "late", "wrong", "crashed" or "hung"."""

    seed: int
    kind: str
    outcome: str
    words: str
    seconds: float
    raised_after_s: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether that may be of trials of this kind."""
        return self.outcome == "recovered" or (self.outcome == "raised" and self.kind in MAY_RAISE)

    def row(self) -> dict[str, object]:
        """Return it for a result file."""
        return asdict(self)


def run(scenario: Scenario, folder: Path) -> Verdict:
    """Run the trial; *folder* keeps histories and outputs. Everything it starts has ended when this returns."""
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with Processes(folder, scenario.ranks, scenario.n_helpers, _values(scenario), _PROGRAM,
                   scenario.n_steps) as processes:
        struck: dict[str, float] = {}
        for fault in scenario.faults:
            _await(processes, fault)
            struck[fault.role] = _strike(processes, fault)
        codes = processes.wait(begin + _HANG_S)
    histories = {rank: read(processes.path(rank)) for rank in range(sum(scenario.ranks))}
    outcome, words, after_s = judge(scenario, histories, codes, struck)
    return Verdict(scenario.seed, scenario.kind, outcome, words, time.monotonic() - begin, after_s)


def judge(scenario: Scenario, histories: dict[int, RankHistory], codes: Mapping[str, int | None],
          struck: Mapping[str, float]) -> tuple[str, str, float]:
    """Return outcome, words, and how long after the last fault the last error was raised.

    *codes*: exit codes by process, None of those that hang; *struck*: when each fault was (CLOCK_MONOTONIC), by role.
    """
    killed = {fault.role for fault in scenario.faults if not fault.seconds}
    hung = [name for name, code in codes.items() if code is None]
    if hung:
        return "hung", f"{', '.join(hung)} did not end within {_HANG_S:g} s", 0.0
    wrong = wrong_sums(histories, scenario.machines)
    if wrong:
        return "wrong", "; ".join(wrong[:3]), 0.0
    crashed = [f"{name} ended with {signal.Signals(-code).name}" for name, code in codes.items()
               if code is not None and code < 0 and -code in _CRASHES]
    if crashed:
        return "crashed", "; ".join(crashed), 0.0
    alive = {rank: each for rank, each in histories.items() if f"rank {rank}" not in killed}
    if all(each.end == "ok" and len(each.steps) == scenario.n_steps for each in alive.values()):
        odd = {name: code for name, code in codes.items() if code and name not in killed
               and scenario.kind not in MAY_RAISE and not _may_be_left(name, code, scenario)}
        return ("wrong", f"the job is done, but exit codes are {odd}", 0.0) if odd else ("recovered", "", 0.0)
    silent = [rank for rank, each in alive.items() if not each.end]
    if silent:
        return "crashed", f"ranks {silent} ended without a word", 0.0
    errors = {each.end for each in alive.values()} - {"ok"}
    texts = sorted({each.text for each in alive.values() if each.text})
    after_s = max(each.at_s for each in alive.values()) - max(struck.values(), default=0.0)
    # Silence is a loss after the lease only, and who was stopped sees the end when it goes on.
    allowed_s = _DETECTED_S + max((fault.seconds + LEASE_S for fault in scenario.faults if fault.seconds), default=0.0)
    if errors <= {"PeerLostError"} and after_s <= allowed_s:
        return "raised", texts[0][:200], after_s
    return ("late" if errors <= {"PeerLostError"} else "wrong"), f"{sorted(errors)}: {texts[0][:200]}", after_s


def _may_be_left(name: str, code: int, scenario: Scenario) -> bool:
    """Whether a process that was stopped may end so: the job has gone on without it, or killed it for that."""
    return scenario.kind == "hung helper" and name.startswith("helper") and code in (LEFT_BEHIND, -signal.SIGKILL)


def _values(scenario: Scenario) -> dict[str, object]:
    return {"transport": scenario.transport, "placement": scenario.placement, "lease_s": LEASE_S,
            "heartbeat_s": LEASE_S / 6, "partition_bytes": PARTITION_NBYTES, "timeout_s": 60, "start_timeout_s": 60}


def _await(processes: Processes, fault: Fault) -> None:
    """Wait until rank 0 has ended the step before the fault's, and then for its delay."""
    deadline = time.monotonic() + _HANG_S
    while len(read(processes.path(0)).steps) < fault.step and time.monotonic() < deadline:
        if processes["rank 0"].poll() is not None:
            return  # what it has seen says why
        time.sleep(0.002)
    time.sleep(fault.delay_s)


def _strike(processes: Processes, fault: Fault) -> float:
    """Do it; return when (CLOCK_MONOTONIC)."""
    process, at_s = processes[fault.role], time.monotonic()
    if not fault.seconds:
        process.kill()
        return at_s
    process.send_signal(signal.SIGSTOP)
    time.sleep(fault.seconds)
    process.send_signal(signal.SIGCONT)
    return at_s
