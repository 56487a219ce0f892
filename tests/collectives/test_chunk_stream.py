"""Chunk streams: how loads are split into chunks, and which partition, round and memory each takes."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.collectives.chunk_stream import (
    FINGERPRINTS,
    SMALL,
    TINY,
    WIDE_BETWEEN,
    WIDE_WITHIN,
    ChunkSize,
    ChunkStream,
    chunk_sizes,
    spec_of,
    split,
)
from bpsfast.orchestration.messages import TensorSpec
from bpsfast.orchestration.placement.partition import plan_units
from bpsfast.pyx.port import FINGERPRINT
from bpsfast.trainer import process


@pytest.mark.parametrize("wide", [WIDE_WITHIN, WIDE_BETWEEN])
@settings(max_examples=200, deadline=None)
@given(st.integers(0, 64 << 20) | st.integers(0, 300 << 10))
def test_chunks_cover_a_load_and_are_few(wide, nbytes):
    found = split(nbytes, wide)
    names = [chunk_size.name for chunk_size, _ in found]
    assert names == [name for name in ("wide", "small", "tiny") if name in names], "each once, widest first"
    assert all(n > 0 for _, n in found)
    capacity = sum(n * chunk_size.chunk_nbytes for chunk_size, n in found)
    if not nbytes:
        assert not found
        return
    last, _ = found[-1]
    assert nbytes <= capacity < nbytes + last.chunk_nbytes, "only the last chunk is short"
    whole = sum(n for chunk_size, n in found if chunk_size == wide)
    assert whole == nbytes // wide.chunk_nbytes
    small, tiny = (sum(n for chunk_size, n in found if chunk_size == each) for each in (SMALL, TINY))
    assert small <= wide.chunk_nbytes // SMALL.chunk_nbytes and tiny <= 4


@pytest.mark.parametrize("chunk_size", [WIDE_WITHIN, WIDE_BETWEEN, SMALL, TINY, FINGERPRINTS])
@pytest.mark.parametrize("dtype", ["float32", "uint8", "float64"])
def test_each_chunk_has_a_partition_of_its_own(chunk_size, dtype):
    (unit,) = plan_units([spec_of("g", (), dtype, "sum", chunk_size)], 0, 0, 4 << 20, 4 << 20)
    assert [part.nbytes for part in unit.parts] == [chunk_size.chunk_nbytes] * chunk_size.n_chunks


def test_what_a_pipe_is_declared_as():
    assert spec_of("g/0", (1, 3), "bfloat16", "avg", SMALL) == TensorSpec(
        name="g/0/bfloat16.avg.small", dtype="bfloat16", shape=(512 << 10,), average=True, op="sum", ranks=(1, 3),
        priority=1 << 20, partition_nbytes=64 << 10, separate=True)
    assert spec_of("g/0", (), "int8", "bor", TINY).op == "bor"
    names = {spec_of("g", (), "int64", "band", chunk_size).name for chunk_size in (*chunk_sizes(True), FINGERPRINTS)}
    assert len(names) == 4, "fingerprints go a way of their own"


def turns():
    """Chunks of one pipe, some taken: partitions in turn, rounds that count how often, memory of each partition."""
    session = process.current()
    chunk_size = ChunkSize("few", 4096, 4)
    pipe = ChunkStream(session, spec_of(f"turns/{session.size}", (), "uint8", "sum", chunk_size), 20.0)
    unit, region = pipe.unit, pipe.unit.staging
    assert unit.n_parts == 4 and unit.stride == 4096
    chunks = np.concatenate([pipe.chunks(3), pipe.chunks(0), pipe.chunks(6), pipe.chunks(1)])
    assert list(chunks["part"]) == [unit.first_part + c % 4 for c in range(10)]
    assert list(chunks["round"]) == [c // 4 + 1 for c in range(10)]
    assert list(chunks["staging"]) == [region.address + c % 4 * 4096 for c in range(10)]
    assert list(chunks["offset"]) == [region.offset + c % 4 * 4096 for c in range(10)]
    assert set(chunks["segment"]) == {region.segment} and not chunks["source"].any() and not chunks["flags"].any()
    assert list(chunks["result"]) == [unit.result_address((c // 4 + 1) % 2, c % 4 * 4096) for c in range(10)]
    words = np.array([5, ~5], np.int64)
    (fingerprint,) = pipe.fingerprint(words)
    assert (fingerprint["part"], fingerprint["round"]) == (unit.first_part + 2, 3)
    assert (fingerprint["source"], fingerprint["nbytes"], fingerprint["flags"]) == (words.ctypes.data, 16, FINGERPRINT)
    pipe.close()


def test_turns_of_a_pipe(two, three):
    two.run(turns)
    three.run(turns)


def memory_comes_back():
    """What many pipes used one after another is no more than what few did."""
    session = process.current()
    seen = []
    for i in range(12):
        pipe = ChunkStream(session, spec_of(f"again/{i}", (), "float32", "sum", SMALL), 20.0)
        seen.append((pipe.unit.first_part, pipe.unit.staging.offset))
        pipe.close()
        session.barrier()
    assert len(set(seen)) <= 3, seen


def test_a_closed_pipe_gives_back_what_it_used(two):
    two.run(memory_comes_back)
