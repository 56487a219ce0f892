"""Direct sums of processes that share memory: the bits of the reference in random calls; copies; how waits end."""
from __future__ import annotations

import mmap
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest

from bpsfast.base.dtypes import TABLE
from bpsfast.base.reference_sum import reduce
from bpsfast.kernels import fused_sum
from bpsfast.pyx import direct

#: Chunks are numbered from here on: the numbers wrap within a few calls.
FIRST = (1 << 32) - 5
INTEGER_OPS = direct.OPS
FLOAT_OPS = direct.OPS[:4]


def test_names_are_those_of_the_tables():
    from bpsfast.base.dtypes import NAMES
    from bpsfast.orchestration.placement.partition import OPS

    assert direct.DTYPES == NAMES and direct.OPS == OPS


class Ranks:
    """Processes that share one channel. `run(function)` calls ``function(channel, me, n)`` in each."""

    def __init__(self, n: int, most_nbytes: int) -> None:
        self.n, self.most = n, most_nbytes
        self.memory = mmap.mmap(-1, direct.channel_nbytes(n, most_nbytes))
        self.address = np.frombuffer(self.memory, np.uint8).ctypes.data
        direct.format_channel(self.address, n, FIRST)

    def open(self, me: int) -> direct.Channel:
        return direct.Channel(self.memory, self.n, me, self.most)

    def start(self, function: Callable[[direct.Channel, int, int], None]) -> list[multiprocessing.Process]:
        fork = multiprocessing.get_context("fork")
        started = [fork.Process(target=self._serve, args=(function, me)) for me in range(self.n)]
        for each in started:
            each.start()
        return started

    def _serve(self, function: Callable[[direct.Channel, int, int], None], me: int) -> None:
        function(self.open(me), me, self.n)

    def run(self, function: Callable[[direct.Channel, int, int], None]) -> list[int | None]:
        """Return the exit codes."""
        started = self.start(function)
        for each in started:
            each.join(60)
        return [each.exitcode for each in started]


def bits(seed: int, name: str, n: int) -> np.ndarray:
    """Random bits (NaN of every kind, subnormals, infinities), or ordinary numbers."""
    draw = np.random.default_rng(seed)
    row = TABLE[name]
    if row.is_float and seed % 2:
        return draw.normal(size=n).astype(row.numpy)
    return draw.integers(0, 256, n * row.itemsize, dtype=np.uint8).view(row.numpy)


def expected(xs: list[np.ndarray], op: str, average: bool) -> np.ndarray:
    if op == "sum":
        return reduce([xs], average)
    out = np.empty_like(xs[0])
    fused_sum(out, [], xs, [], op=op)  # the engine's
    return out


def test_a_broadcast_beyond_the_channel_is_refused():
    channel = Ranks(2, 1000).open(0)
    x = np.zeros(5000, np.uint8)
    with pytest.raises(ValueError, match="5000 bytes in a channel for 1000"):
        channel.broadcast(0, x.ctypes.data, x.nbytes, 1, 1.0)
    channel.close()


def at_an_odd_address(x: np.ndarray, offset: int) -> np.ndarray:
    memory = np.empty(x.nbytes + 64, np.uint8)
    placed = memory[offset:offset + x.nbytes]
    placed[:] = x.view(np.uint8)
    return placed


def random_calls(seed: int, n_calls: int, most_nbytes: int) -> Callable[[direct.Channel, int, int], None]:
    def calls(channel: direct.Channel, me: int, n: int) -> None:
        draw = random.Random(seed)
        for number in range(n_calls):
            kind = draw.choice(("sum", "sum", "sum", "broadcast", "all_gather", "reduce_scatter", "all_to_all",
                                "barrier"))
            nbytes = int(2 ** draw.uniform(0, np.log2(most_nbytes)))
            root, offset, in_place, late = draw.randrange(n), draw.randrange(64), draw.random() < 0.5, draw.randrange(n)
            if late == me and number % 7 == 0:
                time.sleep(0.001)
            if kind == "sum":
                name = draw.choice(direct.DTYPES)
                op = draw.choice(FLOAT_OPS if TABLE[name].is_float else INTEGER_OPS)
                average = op == "sum" and draw.random() < 0.4
                size = max(1, nbytes // TABLE[name].itemsize)
                xs = [bits(seed + 31 * number + rank, name, size) for rank in range(n)]
                own = at_an_odd_address(xs[me], offset)
                out = own if in_place else np.empty_like(own)
                status = channel.all_reduce(out.ctypes.data, own.ctypes.data, own.nbytes, direct.DTYPES.index(name),
                                            direct.OPS.index(op), n if average else 1, number, 30.0)
                assert status == direct.DONE
                assert out.tobytes() == expected(xs, op, average).tobytes(), (number, name, op, average, size)
                assert in_place or own.tobytes() == xs[me].tobytes(), "the input stays as it is"
            elif kind == "broadcast":
                theirs = bits(seed + number, "uint8", nbytes)
                x = theirs.copy() if me == root else np.zeros_like(theirs)
                assert channel.broadcast(root, x.ctypes.data, x.nbytes, number, 30.0) == direct.DONE
                assert np.array_equal(x, theirs)
            elif kind == "all_gather":
                most = nbytes if most_nbytes > 256 << 10 and number % 2 else channel.cell_nbytes
                sizes = [draw.choice((0, draw.randrange(most + 1))) for _ in range(n)]
                xs = [bits(seed + 17 * number + rank, "uint8", size) for rank, size in enumerate(sizes)]
                outs = [np.zeros_like(x) for x in xs]
                wanted = [out.ctypes.data if rank != me or in_place else 0 for rank, out in enumerate(outs)]
                assert channel.all_gather(wanted, sizes, xs[me].ctypes.data, number, 30.0) == direct.DONE
                assert all(np.array_equal(x, out) for rank, (x, out) in enumerate(zip(xs, outs)) if wanted[rank])
            elif kind == "reduce_scatter" and most_nbytes > 256 << 10:
                name = draw.choice(direct.DTYPES)
                op = draw.choice(FLOAT_OPS if TABLE[name].is_float else INTEGER_OPS)
                average = op == "sum" and draw.random() < 0.4
                sizes = [draw.choice((0, draw.randrange(1 + nbytes // TABLE[name].itemsize))) for _ in range(n)]
                xs = [[bits(seed + 31 * number + rank + 7 * to, name, size) for to, size in enumerate(sizes)]
                      for rank in range(n)]
                own = [at_an_odd_address(x, offset) for x in xs[me]]
                out = own[me] if in_place else np.empty_like(own[me])
                status = channel.reduce_scatter(
                    [(x.ctypes.data if x.nbytes else 0, x.nbytes) for x in own], out.ctypes.data,
                    direct.DTYPES.index(name), direct.OPS.index(op), n if average else 1, number, 30.0)
                assert status == direct.DONE
                wanted = expected([row[me] for row in xs], op, average) if sizes[me] else out
                assert out.tobytes() == wanted.tobytes(), (number, name, op, average, sizes)
                assert all(x.tobytes() == xs[me][to].tobytes() for to, x in enumerate(own) if to != me or not in_place)
            elif kind == "all_to_all" and most_nbytes > 256 << 10:
                sizes = [[int(2 ** draw.uniform(0, np.log2(nbytes))) if draw.random() < 0.7 else 0 for _ in range(n)]
                         for _ in range(n)]
                xs = [[bits(seed + 13 * number + 100 * source + to, "uint8", size) for to, size in enumerate(row)]
                      for source, row in enumerate(sizes)]
                outs = [np.zeros_like(row[me]) for row in xs]
                expect = [out.nbytes for out in outs]
                other = root if draw.random() < 0.2 else me  # this rank expects another size of that one
                expect[other] += other != me
                offered = []
                assert channel.all_to_all(
                    [(x.ctypes.data, x.nbytes) for x in xs[me]],
                    [(out.ctypes.data, nbytes) for out, nbytes in zip(outs, expect)], offered, number, 30.0
                ) == direct.DONE
                assert offered == [row[me] for row in sizes]
                assert all(np.array_equal(out, row[me]) for source, (out, row) in enumerate(zip(outs, xs))
                           if source == me or source != other), (number, sizes)
                assert other == me or not outs[other].any(), "nothing is copied that does not fit"
            else:
                assert channel.barrier(number, 30.0) == direct.DONE

    return calls


@pytest.mark.parametrize("n, most_nbytes", [(1, 5000), (2, 64), (2, 5000), (2, 200_000), (2, 3 << 20), (3, 5000),
                                            (3, 2 << 20), (4, 1 << 20), (7, 300_000)])
def test_any_calls_in_any_order_have_the_bits_of_the_reference(n, most_nbytes):
    assert Ranks(n, most_nbytes).run(random_calls(n * most_nbytes, 40, most_nbytes)) == [0] * n


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(20))
def test_many_more_calls(seed):
    n, most_nbytes = 2 + seed % 4, (5000, 400_000, 5 << 20)[seed % 3]
    assert Ranks(n, most_nbytes).run(random_calls(1000 + seed, 300, most_nbytes)) == [0] * n


def test_the_floating_point_environment_of_a_caller_does_not_count():
    torch = pytest.importorskip("torch")

    def calls(channel: direct.Channel, me: int, n: int) -> None:
        assert torch.set_flush_denormal(me == 1)
        x = np.full(20_000, 71_362, np.uint32)  # the bits of 1e-40
        assert channel.all_reduce(x.ctypes.data, x.ctypes.data, x.nbytes, 0, 0, 1, 1, 30.0) == direct.DONE
        assert (x == 2 * 71_362).all()

    assert Ranks(2, 1 << 20).run(calls) == [0, 0]


@pytest.mark.parametrize("nbytes", [64, 100_000])
def test_a_rank_that_needs_no_result_gets_none(nbytes):
    def calls(channel: direct.Channel, me: int, n: int) -> None:
        x = np.full(nbytes // 4, me + 1.0, np.float32)
        for number in range(3):
            out = np.zeros_like(x)
            place = out.ctypes.data if me == number else 0
            assert channel.all_reduce(place, x.ctypes.data, x.nbytes, 0, 0, 1, number, 30.0) == direct.DONE
            assert (out == (6 if me == number else 0)).all()

    assert Ranks(3, nbytes).run(calls) == [0, 0, 0]


def test_other_calls_are_noticed_by_all():
    def calls(channel: direct.Channel, me: int, n: int) -> None:
        x = np.zeros(50_000, np.float32)
        what = 7 if me != 1 else 8
        assert channel.all_reduce(x.ctypes.data, x.ctypes.data, x.nbytes, 0, 0, 1, what, 30.0) == direct.DIFFERENT

    assert Ranks(3, 1 << 20).run(calls) == [0, 0, 0]

    def sizes(channel: direct.Channel, me: int, n: int) -> None:
        x = np.zeros(50_000, np.float32)
        nbytes = 64 if me else x.nbytes
        assert channel.all_reduce(x.ctypes.data, x.ctypes.data, nbytes, 0, 0, 1, 7, 30.0) == direct.DIFFERENT

    assert Ranks(2, 1 << 20).run(sizes) == [0, 0]


def test_a_wait_ends_at_its_deadline_and_names_who_is_missing():
    ranks = Ranks(3, 4096)
    channel = ranks.open(0)
    x = np.zeros(8, np.float32)
    begin = time.monotonic()
    assert channel.all_reduce(x.ctypes.data, x.ctypes.data, x.nbytes, 0, 0, 1, 1, 0.3) == direct.TIMED_OUT
    assert 0.25 <= time.monotonic() - begin < 30
    assert channel.missing() == (1, 2) and channel.n_waits == 1
    channel.close()
    with pytest.raises(ValueError, match="closed"):
        channel.barrier(2, 1.0)


def test_after_a_call_that_has_failed_none_begins():
    channel = Ranks(2, 4096).open(0)
    assert channel.barrier(1, 0.05) == direct.TIMED_OUT and channel.is_broken
    with pytest.raises(RuntimeError, match="its ranks are out of step"):
        channel.barrier(2, 1.0)


@pytest.mark.parametrize("timeout_s", [1e300, float("inf"), 1e12])
def test_a_deadline_may_be_as_late_as_you_like(timeout_s):
    assert Ranks(1, 4096).open(0).barrier(1, timeout_s) == direct.DONE


def test_who_has_copied_is_not_missing():
    def calls(channel: direct.Channel, me: int, n: int) -> None:
        x = np.full(2 << 20, me, np.uint8)
        assert channel.broadcast(0, x.ctypes.data, x.nbytes, 1, 30.0) == direct.DONE
        assert not x.any() and (me != 0 or channel.missing() == ())

    assert Ranks(3, 1 << 20).run(calls) == [0, 0, 0]


def test_pieces_may_be_exchanged_in_place():
    """Also while some ranks' pieces fit into their cells, and others' do not."""
    sizes = [[0, 8, 200_000], [8, 0, 16], [200_000, 16, 0]]  # as much back as forth

    def calls(channel: direct.Channel, me: int, n: int) -> None:
        for number in range(5):
            places = [np.full(size, 10 * me + rank + number, np.uint8) for rank, size in enumerate(sizes[me])]
            pieces = [(x.ctypes.data, x.nbytes) for x in places]
            offered = []
            assert channel.all_to_all(pieces, pieces, offered, number, 30.0) == direct.DONE
            assert offered == sizes[me]
            assert all((x == 10 * rank + me + number).all() for rank, x in enumerate(places))

    assert Ranks(3, 1 << 20).run(calls) == [0, 0, 0]


def test_what_is_looked_at_meanwhile_may_end_a_wait():
    channel = Ranks(2, 4096).open(0)
    looks = []

    def look() -> None:
        looks.append(channel.missing())
        if len(looks) == 2:
            raise LookupError("seen enough")

    with pytest.raises(LookupError, match="seen enough"):
        channel.barrier(1, 30.0, look)
    assert looks == [(1,), (1,)]


def test_a_signal_ends_a_wait():
    channel = Ranks(2, 4096).open(0)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            channel.barrier(1, 30.0)
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def test_an_abort_of_the_node_ends_a_wait():
    from bpsfast.pyx import ring
    from bpsfast.pyx.pages import Segment

    ranks = Ranks(2, 4096)
    board = Segment(ring.BOARD_NBYTES, name="board", huge=False)
    ring.format_board(board)
    memoryview(board)[4] = 1  # its state
    channel = direct.Channel(ranks.memory, 2, 0, 4096, board=board)
    assert channel.barrier(1, 30.0) == direct.ABORTED
    channel.close()
    board.close()


def test_the_end_of_the_node_ends_a_wait():
    ranks = Ranks(2, 4096)
    child = os.fork()
    if child == 0:
        signal.pause()
    pidfd = os.pidfd_open(child)
    os.kill(child, signal.SIGKILL)
    channel = direct.Channel(ranks.memory, 2, 0, 4096, node_pidfd=pidfd)
    assert channel.barrier(1, 30.0) == direct.NODE_DIED
    os.waitpid(child, 0)
    os.close(pidfd)


def test_a_rank_that_is_stopped_is_waited_for():
    def calls(channel: direct.Channel, me: int, n: int) -> None:
        x = np.full(300_000, 1.0, np.float32)
        for number in range(200):
            x[:] = me
            assert channel.all_reduce(x.ctypes.data, x.ctypes.data, x.nbytes, 0, 0, 1, number, 30.0) == direct.DONE
            assert (x == 1).all()

    started = Ranks(2, 2 << 20).start(calls)
    os.kill(started[1].pid, signal.SIGSTOP)
    os.kill(started[1].pid, signal.SIGCONT)
    for each in started:
        each.join(60)
    assert [each.exitcode for each in started] == [0, 0]


def test_memory_that_is_too_small_and_ranks_that_are_none_are_refused():
    small = mmap.mmap(-1, 4096)
    with pytest.raises(ValueError, match="4096 bytes for a channel of 4 ranks, which needs"):
        direct.Channel(small, 4, 0, 1 << 20)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        direct.Channel(small, 2, 2, 64)
    with pytest.raises(ValueError, match="65 ranks"):
        direct.channel_nbytes(65, 64)
    channel = Ranks(2, 64).open(0)
    with pytest.raises(ValueError, match="65 bytes in a channel for 64"):
        channel.all_reduce(1, 1, 65, 0, 0, 1, 1, 1.0)
    with pytest.raises(ValueError, match="this channel is for sums of 64 bytes"):
        channel.all_to_all([(0, 0)] * 2, [(0, 0)] * 2, [], 1, 1.0)
    with pytest.raises(ValueError, match="this channel is for sums of 64 bytes"):
        channel.all_gather([0, 0], [65, 0], 0, 1, 1.0)
    with pytest.raises(ValueError, match="this channel is for sums of 64 bytes"):
        channel.reduce_scatter([(0, 0)] * 2, 0, 0, 0, 1, 1, 1.0)
    with pytest.raises(ValueError, match="no sum of dtype 0 by op 4"):
        channel.all_reduce(1, 1, 64, 0, direct.OPS.index("band"), 1, 1, 1.0)


def test_the_processors_level_is_one_of_those_compiled():
    assert direct.level() in direct.LEVELS
