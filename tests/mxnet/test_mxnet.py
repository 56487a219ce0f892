"""bpsfast.mxnet with MXNet 1.9.1, in its own environment (make test-mxnet): operations, optimizer, trainer."""
from __future__ import annotations

import numpy as np
import pytest

mxnet = pytest.importorskip("mxnet", reason="mxnet is not installed: make test-mxnet")

import bpsfast.mxnet as bps  # noqa: E402


@pytest.fixture
def three_started(shared_job):
    return shared_job(ranks=(2, 1), transport="tcp")


def raised(function, *arguments, **keywords):
    try:
        function(*arguments, **keywords)
    except Exception as exc:
        return type(exc).__name__
    return ""


def sums():
    rank, size = bps.rank(), bps.size()
    for dtype in ("float32", "float64", "float16", "int8", "int32", "int64", "uint8"):
        for shape in ((2, 3), (1,), (3000,)):
            for average in (True, False):
                mine = (np.arange(np.prod(shape)).reshape(shape) % 5).astype(dtype)
                tensor = mxnet.nd.array(mine, dtype=dtype) * (rank + 1)  # MXNet has not computed it yet
                bps.byteps_push_pull(tensor, name=f"{dtype} {shape} {average}", is_average=average)
                total = mine.astype("f8") * sum(r + 1 for r in range(size))
                wanted = (total // size if dtype[-3] == "n" or "int" in dtype else total / size) if average else total
                assert np.array_equal(tensor.asnumpy(), wanted.astype(dtype)), (dtype, shape, average)
    tensor = mxnet.nd.full((4,), rank)
    for _ in range(3):
        bps.byteps_push_pull(tensor, name="in place", priority=-1)
        tensor = tensor + 1
    assert np.allclose(tensor.asnumpy(), (size - 1) / 2 + 3)
    bps.byteps_declare_tensor("halved", byteps_compressor_type="onebit", byteps_ef_type="vanilla")
    large = mxnet.nd.ones((100_000,)) * (rank + 1)
    bps.byteps_push_pull(large, name="halved")
    return large.asnumpy().tobytes()


def test_sums(three_started):
    assert len(set(three_started.run(sums))) == 1


def refused():
    sparse = mxnet.nd.ones((3, 1)).tostype("row_sparse")
    return [raised(bps.byteps_push_pull, np.ones(3)), raised(bps.byteps_push_pull, sparse),
            raised(bps.broadcast_parameters, [1]), raised(bps.DistributedOptimizer, "sgd"),
            raised(bps.byteps_declare_tensor, "x", compressor="zip")]


def test_bad_input(three_started):
    for found in three_started.run(refused):
        assert found == ["UnsupportedError"] * 3 + ["ConfigError"] * 2


def broadcast():
    tensors = {"b": mxnet.nd.full((3,), bps.rank()), "a": mxnet.nd.full((2, 2), bps.rank() * 2, dtype="float64")}
    bps.broadcast_parameters(tensors, root_rank=2)
    return tensors["a"].asnumpy().tolist(), tensors["b"].asnumpy().tolist()


def test_broadcast(three_started):
    assert three_started.run(broadcast) == [([[4, 4], [4, 4]], [2, 2, 2])] * 3


def optimizer():
    made = bps.DistributedOptimizer(mxnet.optimizer.create("sgd", learning_rate=0.5, momentum=0.9))
    weight, gradient = mxnet.nd.ones((4,)), mxnet.nd.full((4,), bps.rank())
    state = made.create_state_multi_precision(0, weight)
    made.update_multi_precision(0, weight, gradient, state)
    return weight.asnumpy().tolist()


def test_optimizer(three_started):
    assert three_started.run(optimizer) == [[0.5] * 4] * 3


def trained(compression):
    mxnet.random.seed(bps.rank())
    net = mxnet.gluon.nn.Sequential()
    net.add(mxnet.gluon.nn.Dense(300, activation="relu"), mxnet.gluon.nn.Dense(1))
    net.initialize(mxnet.init.Xavier())
    source = np.random.default_rng(bps.rank())
    name = f"{compression} "
    trainer = bps.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.001, "momentum": 0.9},
                                     compression_params=compression, prefix=name)
    x, losses = mxnet.nd.array(source.standard_normal((16, 300)), dtype="float32"), []
    y = x[:, :10].sum(axis=1, keepdims=True)
    for _ in range(30):
        with mxnet.autograd.record():
            loss = mxnet.gluon.loss.L2Loss()(net(x), y)
        loss.backward()
        trainer.step(16)
        losses.append(float(loss.mean().asscalar()))
    parameters = b"".join(p.data().asnumpy().tobytes() for _, p in sorted(net.collect_params().items(),
                                                                            key=lambda item: str(item[1].shape)))
    return parameters, losses[0], losses[-1]


@pytest.mark.parametrize("compression", [None, {"compressor": "topk", "k": 0.1, "ef": "vanilla"},
                                         {"compressor": "onebit", "scaling": True, "ef": "vanilla",
                                          "momentum": "nesterov"}], ids=str)
def test_trainer(three_started, compression):
    found = three_started.run(trained, compression)
    assert found[0][0] == found[1][0] == found[2][0], "replicas"
    assert all(np.isfinite(last) for _, _, last in found)
    if compression is None:
        assert sum(last for _, _, last in found) < sum(first for _, first, _ in found)
