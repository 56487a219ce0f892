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


def step(rounds):
    """Push a unit, which begins a step if it was pushed in the present one, and wait for it."""
    rounds.finish(rounds.begin(8))


def test_rounds_are_counted_one_after_another(port):
    rounds = StepClock(port, lambda: 0).rounds(0)
    assert rounds.round == (1 << 32) - 1 and not rounds.has_begun and not rounds.in_flight
    assert rounds.begin(100) == 0 and rounds.in_flight
    assert rounds.begin(100) is None, "it was not waited for"
    rounds.finish(5)
    assert rounds.in_flight, "another round"
    rounds.finish(0)
    assert rounds.begin(1) == 1 and (rounds.pushed_nbytes, rounds.n_begun) == (101, 2)
    rounds.finish(1)
    rounds.is_retired = True
    assert rounds.begin(1) is None and not rounds.in_flight


def test_a_step_is_divided_into_what_was_exposed_and_the_rest(port, board, lane):
    clock = StepClock(port, lambda: 0)
    assert clock.read() == (0, StepTimes(), StepTimes())
    step(rounds := clock.rounds(1))
    step(rounds)  # what was before is the first step, which is not counted
    assert clock.read()[0] == 0
    begin_ns = time.monotonic_ns()
    assert port.wait(0, 1, 1, 0.05) == TIMED_OUT
    published_ns = time.monotonic_ns() + 30_000_000
    publish(board, 0, 1, published_ns)
    assert port.wait(0, 1, 1, 1.0) == DONE
    while time.monotonic_ns() < published_ns:
        pass  # the trainer computes
    step(rounds)
    n_steps, mean, last = clock.read()
    assert n_steps == 1 and mean == last
    assert 0.05 <= last.exposed_s < last.communication_s < last.step_s
    assert last.communication_s == pytest.approx((published_ns - begin_ns) / 1e9, abs=0.01)
    assert last.compute_s == pytest.approx(last.step_s - last.exposed_s)
    assert last.overlap == pytest.approx(1 - last.exposed_s / last.communication_s, abs=1e-6)
    step(rounds)
    n_steps, mean, empty = clock.read()
    assert n_steps == 2 and mean.step_s == pytest.approx((last.step_s + empty.step_s) / 2)
    assert empty.communication_s == 0.0 == empty.overlap, "nothing was waited for"
    tally = ring.tally(lane)
    assert (tally["steps"], tally["stalls"]) == (2, 0)
    assert tally["step_ns"] / 1e9 == pytest.approx(2 * mean.step_s)


def test_units_that_threads_push_in_one_step_begin_it_once(port):
    clock = StepClock(port, lambda: 0)
    step(first := clock.rounds(1))
    step(first)
    together = threading.Barrier(8)

    def begin():
        rounds = clock.rounds(1)
        together.wait(20)
        step(rounds)

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    step(first)
    assert clock.read()[0] == 1, "the step that the first unit began twice, and ended"


def test_a_port_that_was_closed_counts_nothing(port):
    rounds = StepClock(port, lambda: 0).rounds(1)
    step(rounds)
    port.close()
    step(rounds)
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


def test_a_signal_handler_may_push_while_the_speed_is_taken(port, monkeypatch):
    """What it pushes takes no other sample, and waits for none."""
    now_s = [100.0]
    monkeypatch.setattr("bpsfast.trainer.step_clock.time", SimpleNamespace(
        monotonic_ns=lambda: int(now_s[0] * 1e9), time_ns=lambda: int(now_s[0] * 1e9)))
    rounds = []

    def pushed_nbytes():
        if rounds:
            handler()
        return 8_000_000

    def handler(*_):
        clock._sample(int(now_s[0] * 1e9))

    clock = StepClock(port, pushed_nbytes)
    rounds.append(clock.rounds(1))
    now_s[0] = 120.0
    assert clock.speed() == (120_000, 0.4) and clock.speed() == (0, -5.0)
