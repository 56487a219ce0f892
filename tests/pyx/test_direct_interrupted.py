"""What happens to a direct sum in whose waits signal handlers run: forks, interrupts, changes of the caller's state."""
from __future__ import annotations

import os
import signal
import threading
import time
import weakref

import numpy as np
import pytest

from bpsfast.pyx import direct, ring
from bpsfast.pyx.pages import Segment
from bpsfast.pyx.port import Port
from tests.pyx.test_direct import FIRST, Ranks

LATE_S = 0.25


class Waits:
    """What a unit does while its call waits, as far as these tests need it."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.owner = os.getpid()

    def look(self, _began_ns):
        pass

    def end(self, outcome, _began_ns):
        assert outcome in (direct.DONE, direct.DECLINED), outcome

    def failed(self, error):
        self.failures.append(repr(error))

    def refusal(self):
        return RuntimeError(f"refused after {self.failures}")

    def start_deferred(self):
        pass

    def timeout_s(self):
        return 20.0

    def sum_by_node(self, *_arguments):
        pass


def port() -> Port:
    """A port of a rank without a node."""
    lane, board, bell = Segment(ring.LANE_NBYTES), Segment(ring.BOARD_NBYTES, populate=False), Segment(
        ring.DOORBELL_NBYTES)
    ring.format_lane(lane)
    ring.format_board(board)
    ring.format_doorbell(bell)
    return Port(lane, board, bell, -1)


def tensor(channel, waits, nbytes, rounds=None):
    return direct.DirectTensor(channel, rounds or direct.Rounds(None, 0), port(), waits, {}, 0, "float32", nbytes, 1)


def total(summed, x):
    summed.all_reduce(x.ctypes.data, x.ctypes.data)
    return x


def soon(handler, delay_s=0.05):
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, delay_s)


@pytest.mark.parametrize("delay_s", [0.0007, 0.15])
@pytest.mark.parametrize("nbytes", [1000, 100_000])
def test_a_fork_in_a_handler_takes_no_part_in_its_parents_sum(nbytes, delay_s):
    def run(channel, me, _n):
        os.register_at_fork(after_in_child=lambda: setattr(channel, "refuses", True))
        children = []
        x = np.full(nbytes // 4, 1.0 + me, np.float32)
        summed = tensor(channel, Waits(), nbytes)

        def fork(*_):
            children.append(os.fork())

        if me == 0:
            soon(fork, delay_s)
        else:
            time.sleep(LATE_S)
        try:
            total(summed, x)
        except RuntimeError as error:
            os._exit(7 if "refused" in str(error) and children == [0] else 1)
        if me == 0:
            assert len(children) == 1 and os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 7
        assert (x == 3).all()

    assert Ranks(2, nbytes).run(run) == [0, 0]


@pytest.mark.parametrize("nbytes", [1000, 100_000])
def test_an_interrupt_after_the_sum_loses_no_round(nbytes):
    class Interrupted(Waits):
        def end(self, outcome, began_ns):
            super().end(outcome, began_ns)
            raise KeyboardInterrupt

    def run(channel, me, _n):
        waits = Interrupted() if me == 0 else Waits()
        summed = tensor(channel, waits, nbytes)
        x = np.full(nbytes // 4, 1.0 + me, np.float32)
        if me == 0:
            with pytest.raises(KeyboardInterrupt):
                total(summed, x)
        else:
            time.sleep(LATE_S)  # long enough for the other to look
            total(summed, x)
        assert (x == 3).all() and not waits.failures and not channel.is_broken
        assert (total(summed, x) == 6).all() and summed.n_sums == 2

    assert Ranks(2, nbytes).run(run) == [0, 0]


def test_an_interrupt_before_the_node_sums_is_told():
    """When another rank declines, the round is not lost without a word."""
    class Interrupted(Waits):
        def timeout_s(self):
            raise KeyboardInterrupt

    def run(channel, me, _n):
        waits = Interrupted() if me == 0 else Waits()
        summed = tensor(channel, waits, 1000)
        if me == 1:
            assert summed.begin(1000) == 1
            return
        with pytest.raises(KeyboardInterrupt):
            total(summed, np.ones(250, np.float32))
        assert waits.failures == ["KeyboardInterrupt()"]

    assert Ranks(2, 1000).run(run) == [0, 0]


@pytest.mark.parametrize("nbytes", [64, 100_000])
@pytest.mark.parametrize("was_flushing", [False, True])
def test_a_handler_that_changes_the_floating_point_environment_changes_no_bit(nbytes, was_flushing):
    torch = pytest.importorskip("torch")

    def run(channel, me, _n):
        tiny = np.full(nbytes // 4, 1e-40, np.float32)
        expected = (tiny.view(np.uint32) * 2).tolist()
        if me == 0:
            torch.set_flush_denormal(was_flushing)
            soon(lambda *_: torch.set_flush_denormal(not was_flushing))
        else:
            time.sleep(LATE_S)
        status = channel.all_reduce(tiny.ctypes.data, tiny.ctypes.data, nbytes, 0, 0, 1, 3, 20.0)
        assert status == direct.DONE and tiny.view(np.uint32).tolist() == expected
        if me == 0:  # and the handler's choice stays
            assert (torch.tensor([1e-38]) / 100 == 0).item() is not was_flushing
            torch.set_flush_denormal(False)

    assert Ranks(2, nbytes).run(run) == [0, 0]


def test_a_tensor_is_held_while_it_is_summed():
    torch = pytest.importorskip("torch")

    class Options:
        reduceOp = 1
        asyncOp = False

    class Turn:
        is_idle = True

    class What(Waits):
        def known(self, operation, dtype, sizes, root):
            assert (operation, dtype, sizes, root) == ("all_reduce", "float32", (4000,), -1)
            return 5, "a sum"

        def timeout_s(self, _options):
            return 20.0

        def end(self, outcome, began_ns, _text):
            super().end(outcome, began_ns)

        def failed(self, error, _text):
            return error

        def close(self):
            pass

    def run(channel, me, _n):
        tensors = [torch.ones(4000)]
        options = direct.CallOptions(Options, [1])
        kinds = dict.fromkeys(("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "alltoall",
                               "barrier"), options)
        calls = direct.DirectCalls(channel, port(), {}, range(2), torch.Tensor, kinds, Turn, threading.RLock(),
                                   direct.CallCount(), What())
        is_alive = weakref.ref(tensors[0])
        seen = []

        def clear(*_):
            tensors.clear()
            seen.append(is_alive() is not None)

        if me == 0:
            soon(clear)
        else:
            time.sleep(LATE_S)
        assert calls.allreduce(tensors, Options()) is True
        assert seen == ([True] if me == 0 else []) and (is_alive() is None) == (me == 0)

    assert Ranks(2, direct.ANY_NBYTES).run(run) == [0, 0]


def test_a_root_is_followed_by_its_own_count():
    """A rank that only sends has a `reduced` that looks at no call as one of the future, once the numbers wrap."""
    n_calls, line = 530_000, 128

    def run(channel, me, n):
        x = np.zeros(2100, np.uint8)
        assert channel.broadcast(0, x.ctypes.data, 8, 1, 20.0) == direct.DONE  # after it the box is an even number
        for _ in range(n_calls):
            assert channel.broadcast(0, x.ctypes.data, x.nbytes, 1, 20.0) == direct.DONE
        if me == 0:
            words = np.frombuffer(ranks.memory, np.uint32)
            published, reduced = int(words[line * n // 4]), int(words[(line * n + 64) // 4])
            assert (published - FIRST) % (1 << 32) > 1 << 20 > (published - reduced) % (1 << 32) > 0

    ranks = Ranks(2, 4096)
    assert ranks.run(run) == [0, 0]
