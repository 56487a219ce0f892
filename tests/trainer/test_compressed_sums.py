"""Compressed tensors of real jobs: the bits are those of the plain reading, whatever transport and shape of the job."""
from __future__ import annotations

import re
import resource
from pathlib import Path

import numpy as np
import pytest

from bpsfast.base.dtypes import TABLE
from bpsfast.base.reference_sum import reduce
from bpsfast.compression import where_it_pays
from bpsfast.kernels.codecs.codec_reference import ReferenceJob, publish
from bpsfast.orchestration.codec import CodecSpec
from bpsfast.orchestration.messages import TensorSpec
from bpsfast.trainer import process

pytestmark = pytest.mark.matrix

PAGE = 4096
#: Three whole partitions of a page and a short one.
N = {"float32": 3500, "float64": 1750, "float16": 7000, "bfloat16": 7000}
CODECS = {
    "onebit": CodecSpec(kind="onebit"),
    "onebit, unscaled, error feedback, momentum": CodecSpec(kind="onebit", scaled=False, error_feedback=True,
                                                            momentum=0.9),
    "topk, error feedback": CodecSpec(kind="topk", k=0.05, error_feedback=True),
    "topk, momentum": CodecSpec(kind="topk", k=7, momentum=0.5),
    "randomk, error feedback": CodecSpec(kind="randomk", k=0.02, seed=2020, error_feedback=True),
    "dithering, error feedback": CodecSpec(kind="dithering", k=7, error_feedback=True),
    "dithering, natural, l2": CodecSpec(kind="dithering", k=5, natural=True, l2=True, seed=3),
    "float16": CodecSpec(kind="float16"),
    "bfloat16, error feedback": CodecSpec(kind="bfloat16", error_feedback=True),
    "int8, error feedback": CodecSpec(kind="int8", error_feedback=True),
}
SHAPES = {"1+1 tcp": {"ranks": (1, 1), "transport": "tcp"}, "1+1 shm": {"ranks": (1, 1)},
          "2+1 tcp": {"ranks": (2, 1), "transport": "tcp"}, "2+2 shm": {"ranks": (2, 2)},
          "1+1+1 tcp": {"ranks": (1, 1, 1), "transport": "tcp"}}


def gradient(rank, round_, n, dtype):
    values = np.random.default_rng([rank, round_]).standard_normal(n)
    return values.astype(TABLE[dtype].numpy)


def rounds(name, dtype, codec, n_rounds, average=True, rates=None, empties=()):
    """On a rank: push `n_rounds` gradients, but nothing in *empties* (rank, round); return the results' bytes."""
    session = process.current()
    n = N[dtype]
    session.tensors.declare([TensorSpec(name=name, dtype=dtype, shape=(n,), average=average, partition_nbytes=PAGE,
                                        codec=codec)])
    unit = session.tensors.unit(name, 20)
    results = []
    for round_ in range(1, n_rounds + 1):
        x = gradient(session.rank, round_, n, dtype)
        if rates is not None:
            unit.learning_rate = rates[round_ - 1]
        if (session.rank, round_) in empties:
            unit.push_nothing()
        else:
            unit.push(x.ctypes.data, x.nbytes)
        unit.wait(unit.round, 20)
        results.append(unit.view(unit.round).tobytes())
    return results


def expected(ranks, dtype, codec, n_rounds, average=True, rates=None, empties=()):
    """Replay the job by the plain reading."""
    n, width = N[dtype], TABLE[dtype].itemsize
    cuts = [(at, min(n, at + PAGE // width)) for at in range(0, n, PAGE // width)]
    jobs = [ReferenceJob(codec, end - begin, dtype, len(ranks)) for begin, end in cuts]
    firsts = np.cumsum([0, *ranks])
    results, last_rate = [], {}  # of each node, and of the owner (-1): the rate of what it has not sent
    for round_ in range(1, n_rounds + 1):
        partials = []
        for first, n_local in zip(firsts, ranks):
            given = [gradient(rank, round_, n, dtype) for rank in range(first, first + n_local)
                     if (rank, round_) not in empties]
            partials.append(reduce([given], average=False) if given else None)
        rate = rates[round_ - 1] if rates else 1.0
        takes_part = {node: partial for node, partial in enumerate(partials) if partial is not None}
        ratio = {who: last_rate.get(who, rate) / rate for who in (-1, *takes_part)}
        last_rate |= dict.fromkeys(ratio, rate)
        results.append(b"".join(
            publish(codec, job.owner.merge(
                [job.nodes[node].push(partial[begin:end], ratio[node]) for node, partial in takes_part.items()],
                sum(ranks) if average else 1, ratio[-1]), end - begin, dtype).tobytes()
            for job, (begin, end) in zip(jobs, cuts)))
    return results


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def shape(request, shared_job):
    return shared_job(**request.param), request.param["ranks"]


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_codec_on_every_shape(shape, dtype, codec):
    job, ranks = shape
    results = job.run(rounds, f"every {codec} {dtype}", dtype, codec, 4)
    assert all(each == results[0] for each in results), "all ranks have the same bits"
    assert results[0] == expected(ranks, dtype, codec, 4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("codec", ["onebit", "topk, error feedback", "dithering, natural, l2", "int8, error feedback"])
def test_narrow_tensors_are_widened(three, dtype, codec):
    results = three.run(rounds, f"narrow {codec} {dtype}", dtype, CODECS[codec], 3)
    assert all(each == results[0] for each in results)
    assert results[0] == expected((2, 1), dtype, CODECS[codec], 3)


def test_sums_are_not_divided(three):
    codec = CODECS["topk, error feedback"]
    results = three.run(rounds, "sums", "float32", codec, 3, False)
    assert results[2] == expected((2, 1), "float32", codec, 3, average=False)


def test_what_was_not_sent_follows_the_learning_rate(three):
    codec = CodecSpec(kind="topk", k=0.01, error_feedback=True)
    rates = (0.1, 0.1, 0.05, 0.0125, 0.2)
    results = three.run(rounds, "rates", "float32", codec, 5, True, rates)
    assert results[0] == expected((2, 1), "float32", codec, 5, rates=rates)
    assert results[0][1] != expected((2, 1), "float32", codec, 5)[1] or \
        results[0][2:] != expected((2, 1), "float32", codec, 5)[2:], "the rates make a difference"


@pytest.mark.parametrize("empties", [((0, 2),), ((2, 2),), ((0, 1), (1, 1)), ((0, 3), (1, 3))], ids=str)
def test_who_pushes_nothing_keeps_what_he_has(three, empties):
    codec = CODECS["randomk, error feedback"]
    results = three.run(rounds, f"empties {empties}", "float32", codec, 4, True, None, empties)
    assert results[0] == expected((2, 1), "float32", codec, 4, empties=empties)


def test_who_pushes_nothing_keeps_its_learning_rate_too(three):
    """Whoever owns the partition: what is left was computed for the rate of the last round that one pushed in."""
    codec, rates, empties = CODECS["randomk, error feedback"], (0.1, 0.05, 0.05, 0.2), ((2, 2), (0, 3), (1, 3))
    results = three.run(rounds, "rates and empties", "float32", codec, 4, True, rates, empties)
    assert results[0] == expected((2, 1), "float32", codec, 4, rates=rates, empties=empties)


def test_one_machine_compresses_nothing(two):
    results = two.run(rounds, "alone", "float32", CODECS["onebit"], 2)
    for round_, result in enumerate(results[0], start=1):
        given = [gradient(rank, round_, N["float32"], "float32") for rank in range(2)]
        assert result == reduce([given], average=True).tobytes()


def owners(name, codec):
    session = process.current()
    session.tensors.declare([TensorSpec(name=name, dtype="float32", shape=(100_000,), partition_nbytes=PAGE,
                                        codec=codec)])
    unit = session.tensors.unit(name, 20)
    return {part.owner for part in unit._parts}


def test_helpers_own_only_what_has_no_state(job):
    with_helper = job(ranks=(1, 1), helpers=1, transport="tcp")
    assert 2 in with_helper.run(owners, "stateless", CODECS["onebit"])[0]
    assert with_helper.run(owners, "with state", CODECS["topk, error feedback"])[0] == {0, 1}
    for name in ("onebit", "topk, error feedback"):
        results = with_helper.run(rounds, f"helper {name}", "float32", CODECS[name], 3)
        assert results[0] == results[1] == expected((1, 1), "float32", CODECS[name], 3)


@pytest.mark.parametrize(("gbits", "pays"), [(0.05, True), (400.0, False), (0.0, False)])
def test_where_it_does_not_pay_or_nobody_can_tell_sums_are_exact(job, gbits, pays):
    codec = where_it_pays(CODECS["topk, error feedback"])
    results = job(ranks=(1, 1), transport="tcp", nic_rate=gbits).run(rounds, "where it pays", "float32", codec, 3)
    assert results[0] == results[1]
    if pays:
        assert results[0] == expected((1, 1), "float32", codec, 3)
    else:
        given = [[gradient(rank, round_, N["float32"], "float32") for rank in range(2)] for round_ in (1, 2, 3)]
        assert results[0] == [reduce([[a], [b]], average=True).tobytes() for a, b in given]


def cannot_compress(name):
    """On a rank: push; the first rank leaves its node no memory for anything new meanwhile."""
    session = process.current()
    session.tensors.declare([TensorSpec(name=name, dtype="float32", shape=(1 << 24,), partition_nbytes=64 << 20,
                                        codec=CODECS["onebit"])])
    unit = session.tensors.unit(name, 20)
    assert unit.staging.array.nbytes == 64 << 20
    node = int(re.search(r"pid (\d+)", session._node_name)[1])
    limits = resource.prlimit(node, resource.RLIMIT_AS)
    if session.rank == 0:
        n_pages = int(Path(f"/proc/{node}/statm").read_text().split()[0])
        resource.prlimit(node, resource.RLIMIT_AS, (n_pages * resource.getpagesize() + (8 << 20), limits[1]))
    try:
        unit.wait(unit.push(), 30)
    finally:
        resource.prlimit(node, resource.RLIMIT_AS, limits)


def test_a_node_without_memory_to_compress_ends_the_job_for_all(job):
    broken = job(ranks=(1, 1), transport="tcp")
    outcomes = broken.attempt(cannot_compress, "no memory")
    broken.kill()
    for outcome in outcomes:
        assert outcome.error and "there is no memory to compress partition" in str(outcome), outcome


def for_ever(name):
    session = process.current()
    codec = CODECS["topk, error feedback"]
    session.tensors.declare([TensorSpec(name=name, dtype="float32", shape=(1_000_000,), codec=codec)])
    unit = session.tensors.unit(name, 20)
    x = gradient(session.rank, 1, 1_000_000, "float32")
    while True:
        unit.push(x.ctypes.data, x.nbytes)
        unit.wait(unit.round, 20)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_all_ranks_hear_of_the_end_of_an_owner(job, transport):
    started = job(ranks=(2, 1), transport=transport)
    started.run(owners, "both own", CODECS["topk, error feedback"])  # the kernels are there
    started.begin(for_ever, "lost")
    started.kill_daemon("node 1")
    assert {outcome.error for outcome in started.outcomes(30)} == {"PeerLostError"}
    started.kill()
