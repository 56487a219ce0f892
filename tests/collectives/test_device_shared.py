"""Halves of the windows of an island that shares a device, and what it says when members differ or one is gone."""
from __future__ import annotations

import queue
import threading

import numpy as np
from hypothesis import given, strategies as st

import bpsfast
from bpsfast.base.dtypes import TABLE
from bpsfast.base.reference_sum import reduce
from bpsfast.collectives.island_routes import island_group
from bpsfast.gpu.communicator import DTYPES, IslandRange
from bpsfast.gpu.host import host_device
from bpsfast.gpu.shared_device import SharedCommunicator, half_ranges
from bpsfast.orchestration.errors import BpsError
from bpsfast.trainer import process


@given(st.lists(st.integers(0, 5000), max_size=20), st.integers(1, 8))
def test_halves_hold_every_byte_once_and_apart(sizes: list[int], half: int) -> None:
    runs = [IslandRange(0, 0, 8 * n, 0) for n in sizes]
    seen = {id(run): 0 for run in runs}
    for lot in half_ranges(runs, half * 1024):
        end = 0
        for part in lot:
            assert part.offset >= end and part.offset % 256 == 0 and part.nbytes > 0 and part.nbytes % 8 == 0
            assert part.at == seen[id(part.range)]
            seen[id(part.range)] += part.nbytes
            end = part.offset + part.nbytes
        assert 0 < end <= half * 1024
    assert all(seen[id(run)] == run.nbytes for run in runs)


class Heard:
    """What a communicator's thread says: how its calls end, or that it cannot go on."""

    def __init__(self):
        self._said = queue.SimpleQueue()
        self.put = self._said.put

    def next(self):
        said = self._said.get(timeout=30)
        if isinstance(said, BpsError):
            raise said
        return said


def made(what, heard):
    session = process.current()
    return SharedCommunicator(host_device(), island_group(session, range(session.size), what), heard.put)


def sums_of(dtypes, sizes):
    """Any bits, from all to each root and back, of more than a half: bits of the reference on all members."""
    session, heard, stream = process.current(), Heard(), host_device().stream()
    calls = made("sums", heard)
    is_right = []
    for dtype in dtypes:
        row = TABLE[dtype]
        inputs = [[np.random.default_rng(100 * rank + i).integers(0, 256, n * row.itemsize, np.uint8).view(row.numpy)
                   for i, n in enumerate(sizes)] for rank in range(session.size)]
        own, outs = inputs[session.rank], [np.zeros(n, row.numpy) for n in sizes]
        runs = [IslandRange(x.ctypes.data, y.ctypes.data, x.nbytes, i % session.size)
                for i, (x, y) in enumerate(zip(own, outs))]
        calls.reduce(stream, [], runs, dtype, heard.put)
        calls.broadcast(stream, [], runs, dtype, heard.put)
        assert heard.next().wait(20) and heard.next().wait(20)
        is_right.append(all(y.tobytes() == reduce([list(xs)], False).tobytes() for y, xs in zip(outs, zip(*inputs))))
    calls.close()
    stream.close()
    return is_right


def differ():
    rank, heard, stream = bpsfast.rank(), Heard(), host_device().stream()
    calls = made("differ", heard)
    x = np.ones(1000 + rank, np.float32)
    calls.reduce(stream, [], [IslandRange(x.ctypes.data, x.ctypes.data, x.nbytes, 0)], "float32", heard.put)
    try:
        heard.next()
        return ""
    except BpsError as exc:
        return f"{type(exc).__name__}: {exc}"
    finally:
        calls.close()
        stream.close()


def close_while_others_are_awaited():
    """Rank 0 calls, and closes before rank 1 comes: in whatever order members close, windows and threads are gone."""
    rank, heard, stream = bpsfast.rank(), Heard(), host_device().stream()
    calls = made("closed early", heard)
    x = np.ones(1000, np.float32)
    if rank == 0:
        calls.reduce(stream, [], [IslandRange(x.ctypes.data, x.ctypes.data, x.nbytes, 0)], "float32", heard.put)
    calls.close()
    stream.close()
    return not [each for each in threading.enumerate() if each.name == "bpsfast-island-sums"]


def test_islands_of_one_device(shared_job):
    """Sums of every dtype in one job, then what members differ in, then closing."""
    job = shared_job(ranks=(3,), host_device=True, timeout_s=20)
    assert job.run(sums_of, list(DTYPES), [0, 1, 3001, 1000]) == [[True] * len(DTYPES)] * 3
    assert job.run(close_while_others_are_awaited) == [True] * 3


def test_more_than_a_window_holds(shared_job):
    job = shared_job(ranks=(2,), host_device=True, timeout_s=20)
    assert job.run(sums_of, ["float32"], [5_000_001, 7, 2_100_000]) == [[True]] * 2


def test_members_that_differ_are_told_who_called_what(shared_job):
    for said in shared_job(ranks=(2,), host_device=True, timeout_s=20).run(differ):
        assert said.startswith("MismatchError") and "4000" in said and "4004" in said, said
