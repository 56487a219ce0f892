"""One trial of `bench chaos`: a real job on this machine, its faults, and a verdict on the histories of its ranks."""
from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bpsfast.base.exit_codes import LEFT_BEHIND
from bpsfast.launch.namespaces import FaultyLink, faulty_link
from bpsfast.orchestration.errors import StallError
from bpsfast.orchestration.messages import VERSION, Refuse
from bpsfast.orchestration.scheduler_client import SchedulerClient

from . import elastic_trial
from .history import HANG_S, PARTITION_NBYTES, STOP, RankHistory, read, wrong_sums
from .processes import LINK_PORT, Processes
from .scenario import (
    FOREIGNER,
    HELPER_LEASE_S,
    LEASE_S,
    LINK,
    LOST_WORKER,
    MAY_RAISE,
    MOVED,
    ON_A_LINK,
    SURVIVED,
    Fault,
    Scenario,
)

#: The longest time from when a loss can be known (a death at once, silence after the lease) to the errors of all ranks.
_DETECTED_S = 2.0
#: A connection is reset once it has carried this many bytes in one direction: within payloads, and while it reconnects.
_RESET_NBYTES = 30_000
#: The timeout of a start for which a helper is missing; a job waits for helpers for half of it.
_SHORT_START_S = 16.0
#: A helper of another version is refused within this time.
_REFUSAL_S = 20.0
_PROGRAM = "bpsfast.bench.chaos.rank"
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


@dataclass(frozen=True)
class Verdict:
    """The result of one trial. `outcome`: "recovered", "raised", "late", "wrong", "crashed", "hung" or "skipped"."""

    seed: int
    kind: str
    outcome: str
    words: str
    seconds: float
    raised_after_s: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether trials of this kind may have this outcome."""
        return self.outcome in ("recovered", "skipped") or (self.outcome == "raised" and self.kind in MAY_RAISE)


def run(scenario: Scenario, folder: Path) -> Verdict:
    """Run the trial; histories and outputs are in *folder*. All its processes have ended when this returns."""
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    if scenario.kind in LOST_WORKER:
        outcome, words = elastic_trial.run(scenario, folder)
        return Verdict(scenario.seed, scenario.kind, outcome, words, time.monotonic() - begin)
    lacking = faulty_link.missing() if scenario.kind in ON_A_LINK else None
    if lacking is not None:
        return Verdict(scenario.seed, scenario.kind, "skipped", lacking, 0.0)
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(FaultyLink("a", "b", mtu=9000)) if scenario.kind in ON_A_LINK else None
        processes = stack.enter_context(Processes(
            folder, scenario.ranks, scenario.n_helpers, _values(scenario), _PROGRAM, folder / STOP,
            scenario.n_recoveries, link=link, machine_of=scenario.machine_of, absent=scenario.absent,
            moves=scenario.kind in MOVED))
        struck: dict[str, float] = {}
        for fault in scenario.faults:
            _await(processes, fault.step)
            time.sleep(fault.delay_s)
            if fault.role == FOREIGNER:
                _await_refusal(processes)
            elif link is None:
                struck[fault.role] = _strike(processes, fault)
            else:
                struck[fault.role] = _strike_link(link, fault)
            for name in scenario.killed if fault.for_good else ():
                processes[name].kill()
        _await(processes, scenario.n_steps)
        (folder / STOP).touch()
        codes = processes.wait(begin + HANG_S)
        if link is not None and not (link.carried.dropped or link.carried.resets or link.carried.refused):
            return Verdict(scenario.seed, scenario.kind, "wrong", "nothing happened to the link", 0.0)
    histories = {rank: read(processes.path(rank)) for rank in range(sum(scenario.ranks))}
    outcome, words, after_s = judge(scenario, histories, codes, struck)
    return Verdict(scenario.seed, scenario.kind, outcome, words, time.monotonic() - begin, after_s)


def judge(scenario: Scenario, histories: dict[int, RankHistory], codes: Mapping[str, int | None],
          struck: Mapping[str, float]) -> tuple[str, str, float]:
    """Return outcome, words, and how long after the last fault the last error was raised.

    *codes*: exit codes by process, None of those that hang; *struck*: when each fault was (CLOCK_MONOTONIC), by role.
    """
    killed = scenario.killed
    hung = [name for name, code in codes.items() if code is None]
    if hung:
        return "hung", f"{', '.join(hung)} did not end within {HANG_S:g} s", 0.0
    lost = scenario.lost_ranks if scenario.kind in SURVIVED else set()
    wrong = wrong_sums(histories, scenario.machines, lost)
    if wrong:
        return "wrong", "; ".join(wrong[:3]), 0.0
    crashed = [f"{name} ended with {signal.Signals(-code).name}" for name, code in codes.items()
               if code is not None and code < 0 and -code in _CRASHES]
    if crashed:
        return "crashed", "; ".join(crashed), 0.0
    alive = {rank: each for rank, each in histories.items() if f"rank {rank}" not in killed and rank not in lost}
    n_steps = {len(each.steps) for each in alive.values()}
    if all(each.end == "ok" for each in alive.values()) and len(n_steps) == 1 and min(n_steps) >= scenario.n_steps:
        odd = {name: code for name, code in codes.items() if code and name not in killed
               and scenario.kind not in MAY_RAISE and not _may_be_left(name, code, scenario)}
        if odd:
            return "wrong", f"the job is done, but exit codes are {odd}", 0.0
        # of two that are lost, the second may have ended because of the first
        lived = {name: codes[name] for name in killed
                 if codes.get(name) != -signal.SIGKILL and scenario.kind != "survived several"}
        few = {rank: each.recoveries for rank, each in alive.items() if each.recoveries < scenario.n_recoveries}
        if scenario.n_recoveries and (lived or few):
            return "wrong", (f"the job is done, but has not gone on without anybody: ranks count {few} recoveries, and "
                             f"of what was killed {lived} ended by itself"), 0.0
        return "recovered", "", 0.0
    silent = [rank for rank, each in alive.items() if not each.end]
    if silent:
        return "crashed", f"ranks {silent} ended without a word", 0.0
    errors = {each.end for each in alive.values()} - {"ok"}
    if not errors:
        return "wrong", f"ranks have ended in order after {sorted(n_steps)} steps, not {scenario.n_steps}", 0.0
    texts = sorted({each.text for each in alive.values() if each.text})
    after_s = max(each.at_s for each in alive.values()) - max(struck.values(), default=0.0)
    # silence is a loss only after the lease, and a stopped process sees the end when it continues
    allowed_s = _DETECTED_S + max((fault.seconds + LEASE_S for fault in scenario.faults if fault.seconds), default=0.0)
    names = [name for role in struck if role != LINK for name in scenario.names_of(role)]
    nameless = [text for text in texts if names and not any(re.search(rf"\b{name}\b", text) for name in names)]
    if errors <= {"PeerLostError"} and nameless:
        return "wrong", f"an error names none of {names}: {nameless[0][:200]}", after_s
    if errors <= {"PeerLostError"} and after_s <= allowed_s:
        return "raised", texts[0][:200], after_s
    return ("late" if errors <= {"PeerLostError"} else "wrong"), f"{sorted(errors)}: {texts[0][:200]}", after_s


def _may_be_left(name: str, code: int, scenario: Scenario) -> bool:
    """Whether a stopped process may end so: the job goes on without it, or kills it for that."""
    if scenario.kind in SURVIVED:
        return name in scenario.lost_nodes and code in (LEFT_BEHIND, -signal.SIGKILL)
    return scenario.kind == "hung helper" and name.startswith("helper") and code in (LEFT_BEHIND, -signal.SIGKILL)


def _values(scenario: Scenario) -> dict[str, object]:
    return {"transport": scenario.transport, "placement": scenario.placement, "lease_s": LEASE_S,
            "helper_lease_s": HELPER_LEASE_S if scenario.kind in ("hung helper", "lost host") else 0,
            "heartbeat_s": LEASE_S / 6, "partition_bytes": PARTITION_NBYTES, "timeout_s": 60,
            "start_timeout_s": _SHORT_START_S if scenario.absent else 240,
            "on_worker_loss": "continue" if scenario.kind in SURVIVED else "abort"}


def _await(processes: Processes, n_steps: int) -> None:
    """Wait until some rank has made *n_steps*, or has ended."""
    deadline = time.monotonic() + HANG_S
    ranks = [name for name in processes if name.startswith("rank")]
    paths = [processes.path(int(name.split()[1])) for name in ranks]
    while max(len(read(path).steps) for path in paths) < n_steps and time.monotonic() < deadline:
        if all(processes[name].poll() is not None for name in ranks):
            return  # their histories say why
        time.sleep(0.002)


def _strike(processes: Processes, fault: Fault) -> float:
    """Kill, stop, restart or replace a process; return when (CLOCK_MONOTONIC)."""
    process, at_s = processes[fault.role], time.monotonic()
    is_stopped = fault.seconds and not (fault.restarts or fault.moves)
    process.send_signal(signal.SIGSTOP if is_stopped else signal.SIGKILL)
    time.sleep(fault.seconds)
    if fault.restarts:
        processes.restart(fault.role)
    elif fault.moves:
        processes.start_next_scheduler()
    elif fault.seconds:
        process.send_signal(signal.SIGCONT)
    return at_s


def _strike_link(link: FaultyLink, fault: Fault) -> float:
    """Disturb the link; return when (CLOCK_MONOTONIC)."""
    at_s = time.monotonic()
    if fault.n_resets:
        link.spare(LINK_PORT)
        link.reset(fault.n_resets, _RESET_NBYTES)
        return at_s
    if fault.for_good:
        link.cut()
        return at_s
    if fault.refused == "data":
        link.spare(LINK_PORT)
        link.refuse()
    elif fault.refused:
        link.refuse(LINK_PORT)
    else:
        link.cut(*fault.senders)
    time.sleep(fault.seconds)
    link.mend()
    link.spare()
    return at_s


def _await_refusal(processes: Processes) -> None:
    """Join as a helper of another version; raise `StallError` if that is not refused."""
    deadline = time.monotonic() + _REFUSAL_S
    member = SchedulerClient(*processes.scheduler, bytes.fromhex(processes.key), now=time.monotonic())
    try:
        member.sockets[0].send(msgspec.msgpack.encode(
            {"type": "Join", "version": VERSION + 1, "package": "9", "host": "foreign", "pid": "1:1", "ranks": []}))
        while not any(isinstance(message, Refuse) for message in member.recv_nowait(time.monotonic())):
            if time.monotonic() >= deadline:
                raise StallError(f"a helper of another version was not refused within {_REFUSAL_S:g} s")
            member.sockets[0].poll(100)
            member.tick(time.monotonic())
    finally:
        member.close(0.0)
