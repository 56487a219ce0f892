"""Stalls: told once by every rank that waits, with tensor, stage and who is missing; the sums are what they were."""
from __future__ import annotations

import hashlib
import logging
import math
import os
import signal
import socket
import threading
import time

import numpy as np
import pytest

import bpsfast
from bpsfast.orchestration.messages import StallAnswer
from bpsfast.trainer.stall_inspector import StallInspector, Subject

LIMIT_S = 0.7
SUBJECT = Subject.of("w", ["a", "b", "c", "d"], 2, 5, 7)


def answer(**fields):
    return StallAnswer(**{"rank": 0, "question": 1, "missing": "missing: rank 3", "stage": "push", "ranks": (3,)}
                       | fields)


# -- on a clock of its own --------------------------------------------------------------------------------

@pytest.fixture
def clock(monkeypatch):
    """The inspector's monotonic clock: set `clock[0]`."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_stall_is_told_at_doubling_intervals_and_its_end_once(clock, caplog):
    counted = []
    inspector = StallInspector("rank 0", 60.0, lambda: counted.append(1))
    due = inspector.due(100.0)
    told = []
    for now in range(100, 600, 5):  # a wait looks again and again
        clock[0] = float(now)
        if now >= due:
            due = inspector.tell(SUBJECT, answer(), 100.0)
            told.append(now - 100)
    assert told == [60, 120, 240, 480] and len(caplog.messages) == 4 and len(counted) == 1
    assert caplog.messages[0] == (
        "rank 0 has waited 60 s for round 7 of 'w' (partition 2 of 5, which is 'a', 'b', 'c' and 1 more fused). Stage "
        "push: not all ranks have pushed; missing: rank 3")
    clock[0] = 650.0
    (stall,) = inspector.stalls()
    assert (stall.tensor, stall.partition, stall.stage, stall.missing_ranks) == ("w", 2, "push", (3,))
    assert (stall.waited_s, stall.over) == (550.0, False)
    inspector.end(SUBJECT, went_on=True)
    inspector.end(SUBJECT, went_on=True)
    assert caplog.messages[4:] == ["rank 0 goes on: it has waited 550 s for round 7 of 'w' (partition 2 of 5, which is "
                                   "'a', 'b', 'c' and 1 more fused)"]
    assert [(each.over, each.went_on) for each in inspector.stalls()] == [(True, True)]


def test_threads_that_wait_for_the_same_tell_it_once(caplog):
    counted = []
    inspector = StallInspector("rank 0", 60.0, lambda: counted.append(1))
    begin = time.monotonic() - 61
    threads = [threading.Thread(target=inspector.tell, args=(SUBJECT, answer(), begin)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(caplog.messages) == 1 and len(counted) == 1


def test_a_stall_that_ends_in_an_error_does_not_go_on(caplog):
    inspector = StallInspector("rank 0", 1.0, lambda: None)
    inspector.tell(Subject("barrier:4"), answer(stage="barrier"), time.monotonic() - 1)
    inspector.end(Subject("barrier:4"), went_on=False)
    assert len(caplog.messages) == 1 and "for 'barrier:4'. Stage barrier: not all ranks have entered it" in caplog.text
    assert [(each.over, each.went_on) for each in inspector.stalls()] == [(True, False)]


def test_off_means_never():
    assert StallInspector("rank 0", 0.0, lambda: None).due(5.0) == math.inf


# -- a rank that is stopped -------------------------------------------------------------------------------

class Told(logging.Handler):
    """Sends what a rank logs to the test."""

    def __init__(self, address):
        super().__init__()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.connect(address)

    def emit(self, record):
        self.socket.send(record.getMessage().encode())


def listen(address):
    logging.getLogger("bpsfast.trainer").addHandler(Told(address))


@pytest.fixture
def ears(tmp_path):
    """A socket that hears what ranks log, once they `listen` to its name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.bind(str(tmp_path / "ears"))
        found.settimeout(30.0)
        yield found


def heard(ears):
    return ears.recv(4096).decode()


def step(number):
    rank = bpsfast.rank()
    gradients = {f"layer {i}": np.random.default_rng([number, rank, i]).standard_normal(3_000 + i, np.float32)
                 for i in range(4)}
    handles = [bpsfast.push_pull_async(gradient, True, name) for name, gradient in gradients.items()]
    return b"".join(bpsfast.synchronize(handle).tobytes() for handle in handles)


def steps(numbers):
    return hashlib.sha256(b"".join(step(number) for number in numbers)).hexdigest()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_stopped_rank_is_named_by_all_others_and_nothing_is_lost(job, ears, transport):
    undisturbed = job(ranks=(2, 2), transport=transport)
    expected = undisturbed.run(steps, range(3)), undisturbed.run(steps, range(3, 6))
    started = job(ranks=(2, 2), transport=transport, stall_warn_s=LIMIT_S)
    assert started.run(steps, range(3)) == expected[0]
    started.run(listen, ears.getsockname())
    victim = started.ranks[3]
    victim.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, victim.pid, os.WSTOPPED)
    try:
        started.begin(steps, range(3, 6))
        lines = [heard(ears) for _ in range(3)]
    finally:
        victim.send_signal(signal.SIGCONT)
    for rank in range(3):
        (line,) = [line for line in lines if line.startswith(f"rank {rank} has waited ")]
        assert float(line.split()[4]) < LIMIT_S + 5.0
        assert "for round 4 of 'layer 0' (partition 0 of 1). Stage push: not all ranks have pushed; missing: rank 3 " \
               "(node 1, host " in line and line.endswith("has not pushed"), line
    assert [each.value for each in started.outcomes()] == expected[1]
    for stalls in started.call("stalls")[:3]:
        (stall,) = [each for each in stalls if each.tensor == "layer 0" and each.round == 4]
        assert (stall.stage, stall.missing_ranks, stall.missing_nodes) == ("push", (3,), ())
        assert stall.over and stall.went_on and stall.waited_s >= LIMIT_S
    ends = [heard(ears) for _ in range(3)]
    assert sum("goes on: it has waited" in line and "'layer 0'" in line for line in ends) == 3, ends


def enter(address):
    listen(address)
    bpsfast.barrier()
    return bpsfast.stalls()


def test_a_barrier_that_not_all_enter_is_told(job, ears):
    started = job(ranks=(1, 1), transport="tcp", stall_warn_s=0.3)
    started.begin(enter, ears.getsockname(), only=(0,))
    line = heard(ears)
    assert line.startswith("rank 0 has waited 0.") and (
        "for 'barrier:1'. Stage barrier: not all ranks have entered it; missing: rank 1 (node 1" in line), line
    started.begin(enter, ears.getsockname(), only=(1,))
    (outcome,) = started.outcomes(only=(0,))
    (stall,) = outcome.value
    assert (stall.tensor, stall.stage, stall.missing_ranks, stall.went_on) == ("barrier:1", "barrier", (1,), True)
    started.outcomes(only=(1,))


def only_mine():
    with pytest.raises(bpsfast.StallError, match="missing: rank 1"):
        bpsfast.push_pull_async(np.ones(4, np.float32), True, "only mine").wait(0.6)
    return bpsfast.stalls()


def test_a_stall_that_ends_at_the_deadline_is_over(job):
    started = job(ranks=(1, 1), transport="tcp", stall_warn_s=0.2)
    started.begin(only_mine, only=(0,))
    (outcome,) = started.outcomes(only=(0,))
    (stall,) = outcome.value
    assert (stall.tensor, stall.stage, stall.missing_ranks) == ("only mine", "declare", (1,))
    assert stall.over and not stall.went_on
    started.kill()
