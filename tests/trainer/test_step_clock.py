"""Steps: they end where a name is pushed again, the first is left out, and their times add up."""
from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from bpsfast.pyx import ring
from bpsfast.pyx.port import DONE, TIMED_OUT, Port
from bpsfast.trainer.step_clock import StepClock, StepTimes


@pytest.fixture
def lane():
    made = bytearray(256 + 32 * 8)
    ring.format_lane(made)
    return made


@pytest.fixture
def board():
    made = bytearray(4096 + 2 * 64)
    ring.format_board(made)
    return made


@pytest.fixture
def port(lane, board):
    bell = bytearray(ring.DOORBELL_NBYTES)
    ring.format_doorbell(bell)
    made = Port(lane, board, bell, -1)
    yield made
    made.close()


def publish(board, part, round_, time_ns):
    """Write on the board what the engine does."""
    at = 4096 + 64 * part
    board[at + 8 : at + 16] = time_ns.to_bytes(8, "little")
    board[at : at + 4] = round_.to_bytes(4, "little")


def test_a_step_is_divided_into_what_was_exposed_and_the_rest(port, board, lane):
    clock = StepClock(port, lambda: 0)
    assert clock.read() == (0, StepTimes(), StepTimes())
    clock.begin(0)
    clock.begin(1)  # what was before is the first step, which is not counted
    assert clock.read()[0] == 0
    begin_ns = time.monotonic_ns()
    assert port.wait(0, 1, 1, 0.05) == TIMED_OUT
    published_ns = time.monotonic_ns() + 30_000_000
    publish(board, 0, 1, published_ns)
    assert port.wait(0, 1, 1, 1.0) == DONE
    while time.monotonic_ns() < published_ns:
        pass  # the trainer computes
    clock.begin(2)
    n_steps, mean, last = clock.read()
    assert n_steps == 1 and mean == last
    assert 0.05 <= last.exposed_s < last.communication_s < last.step_s
    assert last.communication_s == pytest.approx((published_ns - begin_ns) / 1e9, abs=0.01)
    assert last.compute_s == pytest.approx(last.step_s - last.exposed_s)
    assert last.overlap == pytest.approx(1 - last.exposed_s / last.communication_s, abs=1e-6)
    clock.begin(3)
    n_steps, mean, empty = clock.read()
    assert n_steps == 2 and mean.step_s == pytest.approx((last.step_s + empty.step_s) / 2)
    assert empty.communication_s == 0.0 == empty.overlap, "nothing was waited for"
    tally = ring.tally(lane)
    assert (tally["steps"], tally["stalls"]) == (2, 0)
    assert tally["step_ns"] / 1e9 == pytest.approx(2 * mean.step_s)


def test_threads_that_begin_the_same_step_begin_it_once(port):
    clock = StepClock(port, lambda: 0)
    together = threading.Barrier(8)

    def begin():
        together.wait(20)
        clock.begin(0)

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert clock.step == 1


def test_a_port_that_was_closed_counts_nothing(port):
    clock = StepClock(port, lambda: 0)
    clock.begin(0)
    port.close()
    clock.begin(1)
    port.count_stall()


def test_the_speed_has_a_point_for_ten_seconds(port, monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr("bpsfast.trainer.step_clock.time", SimpleNamespace(
        monotonic_ns=lambda: int(now_s[0] * 1e9), time_ns=lambda: int(now_s[0] * 1e9)))
    nbytes = [0]
    clock = StepClock(port, lambda: nbytes[0])
    assert clock.speed() == (0, -5.0), "as BytePS, where there is none"
    now_s[0], nbytes[0] = 109.0, 9_000_000
    assert clock.speed() == (0, -5.0)
    now_s[0], nbytes[0] = 120.0, 40_000_000
    assert clock.speed() == (120_000, 2.0)
    assert clock.speed() == (0, -5.0)
    now_s[0] = 140.0
    assert clock.speed() == (0, -5.0), "nothing was pushed"
    now_s[0], nbytes[0] = 150.0, 41_000_000
    assert clock.speed() == (150_000, 0.1)
