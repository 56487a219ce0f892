"""push_pull and Gradients with compression: between nodes the bits of the NumPy reading, within one exact sums."""
from __future__ import annotations

import numpy as np
import pytest

import bpsfast
from bpsfast import compression
from bpsfast.base import reference_sum
from bpsfast.base.dtypes import TABLE
from bpsfast.trainer import process
from bpsfast.trainer.gradients import Gradients
from tests.support.compressed_rounds import Replay, values

pytestmark = pytest.mark.matrix

CODECS = {
    "onebit": compression.onebit(error_feedback=True),
    "topk": compression.topk(0.05, error_feedback=True, momentum=0.9),
    "randomk": compression.randomk(300, seed=5, error_feedback=True),
    "dithering": compression.dithering(6, partition="natural", normalize="l2", seed=3),
    "int8": compression.int8(error_feedback=True),
    "float16": compression.float16(),
    "bfloat16": compression.bfloat16(error_feedback=True),
}
DTYPES = {"topk": "float64", "int8": "float16", "float16": "bfloat16"}  # of the others float32
SHAPE = (37, 1021)
RATES = (0.1, 0.1, 0.05, 0.2, 0.0)
RATIOS = (1.0, 1.0, 2.0, 0.25, 1.0)


@pytest.fixture(params=[((1, 1), "tcp"), ((2, 1), "tcp"), ((2, 1), "shm")], ids=["1+1-tcp", "2+1-tcp", "2+1-shm"])
def nodes(request, shared_job):
    shape, transport = request.param
    job = shared_job(ranks=shape, transport=transport, partition_bytes=65536)
    return job, shape


def pushed(name, codec, dtype, rates):
    """Push made-up values, waiting at once, later, and into an array; return the results and the unit's stride."""
    found = []
    for step, rate in enumerate(rates):
        x = values(1, bpsfast.rank(), step, SHAPE, dtype)
        how = {"name": name, "compression": codec, "learning_rate": rate}
        if step % 3 == 0:
            found.append(bpsfast.push_pull(x, **how))
        elif step % 3 == 1:
            found.append(bpsfast.synchronize(bpsfast.push_pull_async(x, **how)))
        else:
            bpsfast.push_pull(x, out=x, **how)
            found.append(x)
    return found, process.current().tensors.unit(name).stride


def replayed(codec, dtype, stride, shape, seed=1, ratios=RATIOS):
    replay = Replay(codec, SHAPE[0] * SHAPE[1], dtype, stride, shape)
    return [replay.round([values(seed, rank, step, SHAPE, dtype) for rank in range(sum(shape))], ratio=ratio)
            for step, ratio in enumerate(ratios)]


@pytest.mark.parametrize("kind", CODECS)
def test_all_ranks_have_the_bits_of_the_reading(nodes, kind):
    job, shape = nodes
    dtype = DTYPES.get(kind, "float32")
    for found, stride in job.run(pushed, f"bits {kind}", CODECS[kind], dtype, RATES):
        for step, want in enumerate(replayed(CODECS[kind], dtype, stride, shape)):
            assert found[step].tobytes() == want.tobytes(), f"step {step}"


def overflowing(name, codec):
    """Push ones five times, the last rank a NaN among the second and an infinity among the third; return the places of
    what each result has that is not finite.
    """
    import torch  # tensors of torch are those of the host device where there is one

    from bpsfast import torch as bps

    found = []
    for step in range(5):
        x = torch.ones(SHAPE)
        if step in (1, 2) and bpsfast.rank() == bpsfast.size() - 1:
            x.view(-1)[20_000 + step] = np.nan if step == 1 else -np.inf
        result = bps.push_pull(x, name=name, compression=codec)
        found.append(np.flatnonzero(~np.isfinite(result.numpy().reshape(-1))).tolist())
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("host_device", [False, True])
def test_no_codec_swallows_nan_or_infinity(shared_job, host_device):
    job = shared_job(ranks=(2, 1), partition_bytes=65536, host_device=host_device)
    codecs = {**CODECS, "unscaled": compression.onebit(scaled=False, error_feedback=True, momentum=0.9),
              "random": compression.randomk(1, seed=9, error_feedback=True, momentum=0.9)}
    for kind, codec in codecs.items():
        by_rank = job.run(overflowing, f"overflow {kind} {host_device}", codec, timeout_s=180.0)
        assert all(found == by_rank[0] for found in by_rank), kind
        before, nan, infinite, *after = by_rank[0]
        assert 20_001 in nan and 20_002 in infinite, kind
        assert not before and not any(after), kind


def in_the_segment(codec):
    x = bpsfast.empty(SHAPE)
    found = []
    for step in range(3):
        x[:] = values(2, bpsfast.rank(), step, SHAPE, "float32")
        found.append(bpsfast.push_pull(x, name="in the segment", compression=codec).copy())
    return found, process.current().tensors.unit("in the segment").stride


def test_views_of_shared_memory_too(nodes):
    job, shape = nodes
    codec = CODECS["onebit"]
    for found, stride in job.run(in_the_segment, codec):
        for step, want in enumerate(replayed(codec, "float32", stride, shape, seed=2, ratios=(1, 1, 1))):
            assert found[step].tobytes() == want.tobytes(), f"step {step}"


LAYERS = {"conv.weight": (SHAPE, "f4"), "conv.bias": ((16,), "f4"), "fc.weight": (SHAPE, "f4"), "steps": ((9,), "i8")}
CHOICE = {"*.bias": None, "conv*": CODECS["topk"], "*": CODECS["onebit"]}


def stepped(prefix, choice, n):
    """Steps by `Gradients`, with a learning rate of its own for one of them; return results and strides by name."""
    g = Gradients(LAYERS, prefix=prefix, compression=choice)
    found = {name: [] for name in g}
    for step in range(n):
        g.learning_rate = {"fc.weight": RATES[step]}
        for number, name in enumerate(reversed(list(g))):
            shape, dtype = LAYERS[name]
            g[name][...] = values(number, bpsfast.rank(), step, shape, "float32").astype(dtype)
            g.ready(name)
        g.step()
        for name in g:
            found[name].append(g.wait(name).copy())
    units = {name: process.current().tensors.unit(prefix + name) for name in g}
    return found, {name: unit.stride for name, unit in units.items()}, {
        name: None if unit.codec is None else unit.codec.kind for name, unit in units.items()}


def test_gradients_are_compressed_by_their_names(nodes):
    job, shape = nodes
    for found, strides, kinds in job.run(stepped, "chosen ", CHOICE, 4):
        assert kinds == {"conv.weight": "topk", "conv.bias": None, "fc.weight": "onebit", "steps": None}
        for name, seed, ratios in (("conv.weight", 3, (1, 1, 1, 1)), ("fc.weight", 1, RATIOS)):
            want = replayed(CHOICE["conv*" if name == "conv.weight" else "*"], "float32", strides[name], shape, seed,
                            ratios[:4])
            for step in range(4):
                assert found[name][step].tobytes() == want[step].tobytes(), f"{name} in step {step}"
        for step in range(4):
            whole = [values(2, rank, step, (16,), "float32") for rank in range(sum(shape))]
            groups = [whole[:-1], whole[-1:]]
            assert found["conv.bias"][step].tobytes() == reference_sum.reduce(groups, average=True).tobytes()


def exact(codec):
    x = values(3, bpsfast.rank(), 0, SHAPE, "float32")
    return bpsfast.push_pull(x, name="exact", compression=codec), bpsfast.push_pull(x, name="plain")


def test_one_node_sums_exactly(shared_job):
    for ours, plain in shared_job(ranks=(3,), transport="auto").run(exact, CODECS["onebit"]):
        assert ours.tobytes() == plain.tobytes()


def small():
    least = process.current().settings.min_compress_bytes
    found = []
    for n in (least // 4 - 1, least // 4):
        bpsfast.push_pull(np.zeros(n, np.float32), name=f"small {n}", compression=compression.onebit())
        found.append(process.current().tensors.unit(f"small {n}").codec)
    return found


def test_small_tensors_are_summed_exactly(shared_job):
    job = shared_job(ranks=(1, 1), transport="tcp", partition_bytes=65536)
    assert job.run(small) == [[None, compression.onebit()]] * 2


def unnamed():
    for _ in range(2):
        bpsfast.push_pull(np.ones(SHAPE, np.float32), compression={"": compression.onebit()})
    return [process.current().tensors.unit(f"auto.{i}").codec for i in range(2)]


def test_without_a_name_the_name_is_empty(shared_job):
    job = shared_job(ranks=(1, 1), transport="tcp", partition_bytes=65536)
    assert job.run(unnamed) == [[compression.onebit()] * 2] * 2


def refused(kind):
    x = np.zeros(SHAPE, np.float32)
    top = compression.topk(0.1)
    if kind == "integers":
        bpsfast.push_pull(x.astype(np.int32), name=f"refused {kind}", compression=top)
    if kind == "no codec":
        bpsfast.push_pull_async(x, name=f"refused {kind}", compression="topk")
    if kind == "nonsense":
        bpsfast.push_pull(x, name=f"refused {kind}", compression=compression.CodecSpec(kind="topk", k=-1.0))
    if kind == "rate":
        bpsfast.push_pull(x, name=f"refused {kind}", compression=top, learning_rate=-0.1)
    if kind == "declared":
        bpsfast.declare(f"refused {kind}", SHAPE, np.int8, compression=top)
    if kind == "gradients":
        Gradients({"a": (SHAPE, "i4")}, prefix=f"refused {kind} ", compression={"a": top})
    if kind == "rate of gradients":
        Gradients({"a": (SHAPE, "f4")}, prefix=f"refused {kind} ", compression=top).learning_rate = {"b": 1.0}
    if kind == "changed":
        bpsfast.push_pull(x, name=f"refused {kind}", compression=top)
        bpsfast.push_pull(x, name=f"refused {kind}")


@pytest.mark.parametrize(("kind", "error", "text"), [
    ("integers", "UnsupportedError", "'topk' was chosen for tensor 'refused integers': tensors of int32"),
    ("no codec", "ConfigError", "'topk' is not a choice"), ("nonsense", "ConfigError", "k=-1"),
    ("rate", "ConfigError", "learning_rate=-0.1: expected a number"), ("declared", "UnsupportedError", "int8"),
    ("gradients", "UnsupportedError", "tensor 'a': tensors of int32"),
    ("rate of gradients", "MismatchError", "no gradient 'b'"), ("changed", "MismatchError", "codec of tensor"),
])
def test_what_is_refused(shared_job, kind, error, text):
    job = shared_job(ranks=(1, 1), transport="tcp", partition_bytes=65536)
    for outcome in job.attempt(refused, kind):
        assert outcome.error == error and text in outcome.text


def usable(kind):
    x = np.ones(SHAPE, TABLE["float32"].numpy)
    return float(bpsfast.push_pull(x, name=f"refused {kind}").mean())


@pytest.mark.parametrize("kind", ["integers", "no codec", "nonsense", "rate", "declared"])
def test_what_was_refused_was_not_declared(shared_job, kind):
    job = shared_job(ranks=(1, 1), transport="tcp", partition_bytes=65536)
    assert [outcome.error for outcome in job.attempt(refused, kind)] != ["", ""]
    assert job.run(usable, kind) == [1.0] * 2


def differing():
    codec = compression.topk(0.1) if bpsfast.rank() else compression.onebit()
    bpsfast.push_pull(np.zeros(SHAPE, np.float32), name="differing", compression=codec)


def test_ranks_that_choose_otherwise(shared_job):
    job = shared_job(ranks=(1, 1), transport="tcp", partition_bytes=65536)
    for outcome in job.attempt(differing):
        assert outcome.error == "MismatchError" and "tensor 'differing': codec differs" in outcome.text


def tuned():
    g = Gradients({"a": (SHAPE, "f4")}, prefix="tuned ", compression=CODECS["topk"])
    for _ in range(3):
        g["a"][...] = 1
        g.ready("a")
        g.step()
    plain = Gradients({"b": (SHAPE, "f4")}, prefix="tuned ")
    return g._tuner is None, plain._tuner is not None


def test_what_is_compressed_is_not_tuned(job):
    assert job(ranks=(1, 1), transport="tcp", autotune=1).run(tuned) == [(True, True)] * 2
