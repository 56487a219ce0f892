"""bpsfast.tensorflow, eagerly and inside tf.function: sums, gradients, broadcasts, errors for bad input."""
from __future__ import annotations

import os

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed: pip install bpsfast[tensorflow]")

import bpsfast.tensorflow as bps  # noqa: E402
from bpsfast import compression  # noqa: E402
from bpsfast.tensorflow.ops import reduced  # noqa: E402
from tests.support.raised import raised  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400),  # the import of TensorFlow takes its time beside others
              pytest.mark.usefixtures("keras_on_tensorflow")]

SHAPES = [(1,), (2, 2)]
FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")


@pytest.fixture
def three_started(shared_job):
    return shared_job(ranks=(2, 1), transport="tcp")


def given(rank, dtype, shape):
    """Return the tensor of *rank*: small integers, so that float sums are exact."""
    n = int(np.prod(shape))
    return tf.cast(tf.constant((np.arange(n).reshape(shape) % 5) * (rank + 1) + rank), dtype)


def defined(dtype, shape, average):
    """Return the sum of all ranks' tensors, or the mean as it is defined."""
    wide = np.int64 if dtype in INTEGERS else np.float64
    total = sum(given(rank, dtype, shape).numpy().astype(wide) for rank in range(bps.size()))
    if average:
        total = total // bps.size() if dtype in INTEGERS else total / bps.size()
    return np.asarray(total).astype(tf.as_dtype(dtype).as_numpy_dtype)


def same(found, wanted):
    """Whether two tensors are the same, bit for bit."""
    found, wanted = np.asarray(found.numpy()), np.asarray(wanted)
    return (found.dtype, found.shape) == (wanted.dtype, wanted.shape) and found.tobytes() == wanted.tobytes()


def sums():
    kinds = [*((dtype, (2, 3)) for dtype in (*FLOATS, *INTEGERS)), ("float32", ()), ("float32", (0, 2)),
             ("float32", (300_000,))]
    names = [f"{dtype} {shape}" for dtype, shape in kinds]
    for op in (bps.Average, bps.Sum):
        mine = [given(bps.rank(), *kind) for kind in kinds]
        wanted = [defined(*kind, op == bps.Average) for kind in kinds]
        titles = [f"{name} {op}" for name in names]

        def bundle(tensors, titles=titles, op=op):
            return reduced([*tensors, None], [*titles, "none"], op == bps.Average)

        # AutoGraph needs no source here, and unknown shapes are known when it runs.
        inside = tf.function(bundle, autograph=False, reduce_retracing=True)
        for _ in range(2):
            for found in (bundle(mine), inside(mine)):
                assert found[-1] is None and all(map(same, found, wanted))
            assert all(same(bps.push_pull(x, op=op), y) for x, y in zip(mine, wanted))
        unknown = tf.function(lambda x, op=op: bps.push_pull(x, op=op), autograph=False,
                              input_signature=[tf.TensorSpec(None, tf.float32)])
        assert all(same(unknown(mine[i]), wanted[i]) for i in (0, 9, 10, 11))
    # A later round writes into no earlier result.
    kept = bps.push_pull(given(bps.rank(), "float32", (1000,)), scope="kept")
    before = kept.numpy()
    for _ in range(3):
        bps.push_pull(tf.ones(1000) * 7, scope="kept")
    return bool(same(kept, before))


@pytest.mark.parametrize("ranks", SHAPES, ids=str)
def test_sums_of_all_dtypes_by_definition(job, ranks):
    assert all(job(ranks=ranks, transport="tcp" if len(ranks) > 1 else "auto").run(sums, timeout_s=350.0))


def test_sums_of_three(three_started):
    assert all(three_started.run(sums, timeout_s=350.0))


def rows_of(rank):
    return tf.IndexedSlices(tf.ones([3, 2]) * (rank + 1), tf.constant([rank, rank, 9]), tf.constant([10, 2]))


def sparse():
    wanted = sum(tf.convert_to_tensor(rows_of(rank)).numpy() for rank in range(bps.size()))
    for function in (lambda f: f, lambda f: tf.function(f, autograph=False)):
        rows = function(lambda: bps.push_pull(rows_of(bps.rank()), op=bps.Sum))()
        assert isinstance(rows, tf.IndexedSlices) and rows.indices.numpy().tolist() == [*range(bps.size()), 9]
        assert same(tf.convert_to_tensor(rows), wanted)
        dense, = function(lambda: reduced([rows_of(bps.rank())], ["as dense"], False))()
        assert same(dense, wanted)
        half, = function(lambda: reduced([rows_of(bps.rank())], ["half rows"], False, sparse_as_dense=False,
                                         compression=bps.Compression.fp16))()
        assert half.values.dtype == tf.float32 and same(tf.convert_to_tensor(half), wanted)
    return True


def test_sparse(three_started):
    assert all(three_started.run(sparse, timeout_s=350.0))


def gradients():
    rank, size = bps.rank(), bps.size()
    table, bias, unused = tf.Variable(tf.ones([4, 2])), tf.Variable([1.0, 2.0]), tf.Variable(1.0)

    def step(as_dense):
        with bps.DistributedGradientTape(tf.GradientTape(), sparse_as_dense=as_dense) as tape:
            loss = tf.reduce_sum((tf.gather(table, [rank]) + bias) * tf.cast(rank + 1, tf.float32))
        return tape.gradient(loss, {"table": table, "bias": bias, "unused": unused})

    wanted = np.zeros((4, 2), np.float32)
    for r in range(size):
        wanted[r] = np.float32(r + 1) / np.float32(size)
    mean = np.full(2, sum(r + 1 for r in range(size)) / size, np.float32)
    for as_dense in (True, False):
        for found in (step(as_dense), tf.function(step, autograph=False)(as_dense)):
            assert isinstance(found["table"], tf.IndexedSlices) is not as_dense and found["unused"] is None
            assert np.allclose(tf.convert_to_tensor(found["table"]), wanted) and same(found["bias"], mean)
    x = tf.constant([1.0, 2.0]) * (rank + 1)

    def through(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(bps.push_pull(x, scope="through") ** 2) * (rank + 1)
        return tape.gradient(y, x)

    total = sum(np.array([1.0, 2.0]) * (r + 1) for r in range(size)) / size
    back = 2 * total * sum(r + 1 for r in range(size)) / size
    assert np.allclose(through(x), back) and np.allclose(tf.function(through, autograph=False)(x), back)
    return True


def test_tape_and_gradients_through_push_pull(three_started):
    assert all(three_started.run(gradients, timeout_s=350.0))


def compressed():
    x = tf.linspace(-1.0, 1.0, 100_000) * (bps.rank() + 1)
    exact = bps.push_pull(x, name="exact").numpy()
    found = []
    for how in (bps.Compression.fp16, bps.Compression.bf16, compression.float16(), {"*": compression.float16()}):
        title = f"inexact {len(found)}"
        for each in (bps.push_pull(x, name=title, compression=how), tf.function(
                lambda how=how, title=title: bps.push_pull(x, name=title, compression=how), autograph=False)()):
            assert each.dtype == tf.float32 and 0 < np.abs(each.numpy() - exact).max() < 2e-2
            found.append(each.numpy().tobytes())
    learning = tf.Variable(0.1)
    reduced([x], ["feedback"], True, compression=compression.topk(0.01, error_feedback=True), learning_rate=learning)
    assert "learning_rate" in raised(reduced, [x], ["feedback"], True, learning_rate=-1.0,
                                     compression=compression.topk(0.01, error_feedback=True))[1]
    return found


def test_compression(three_started):
    first, *others = three_started.run(compressed, timeout_s=350.0)
    assert all(other == first for other in others)


def broadcasts():
    rank = bps.rank()
    dtypes = ("float32", "bfloat16", "int32", "bool", "complex64", "uint8", "int64")
    for root in range(bps.size()):
        for function in (lambda f: f, lambda f: tf.function(f, autograph=False)):
            for dtype in dtypes:
                found = function(lambda dtype=dtype, root=root: bps.broadcast(
                    tf.cast(tf.constant([[rank, 1, 2]]), dtype), root))()
                assert same(found, tf.cast(tf.constant([[root, 1, 2]]), dtype).numpy())
    variables = [tf.Variable(float(rank)), tf.Variable(tf.fill([3], rank))]
    assert bps.broadcast_variables(variables, 1) is None
    assert variables[0].numpy() == 1 and variables[1].numpy().tolist() == [1, 1, 1]
    variables[0].assign(float(rank))
    tf.function(lambda: bps.broadcast_variables(variables, 2), autograph=False)()
    assert variables[0].numpy() == 2
    assert bps.broadcast(variables[1], 0, is_variable=True) is variables[1]
    refused = [raised(bps.broadcast, tf.constant("text"), 0), raised(bps.broadcast_variables, [tf.ones(2)], 0),
               raised(bps.broadcast_global_variables, 0), raised(bps.broadcast, rows_of(0), 0)]
    wrong = raised(bps.broadcast, tf.constant(1.0), 9), raised(bps.broadcast, tf.ones(2 + (rank == 1)), 0)
    return refused, wrong, bps.broadcast(tf.constant(rank), 2).numpy()


def test_broadcasts(three_started):
    for rank, (refused, (root, shape), after) in enumerate(three_started.run(broadcasts, timeout_s=350.0)):
        assert {kind for kind, _ in refused} == {"UnsupportedError"}, refused
        assert root[0] == "ConfigError" and shape[0] == ("MismatchError" if rank == 1 else "") and after == 2


def horovod():
    import sys

    import bpsfast.hvd.tensorflow as hvd

    rank, size = hvd.rank(), hvd.size()
    assert hvd.is_initialized() and issubclass(hvd.DistributedGradientTape, bps.DistributedGradientTape)
    x, mean = tf.constant([1.0, 2.0]) * rank, np.array([1.0, 2.0]) * sum(range(size)) / size
    assert np.allclose(hvd.allreduce(x), mean) and np.allclose(hvd.allreduce(x, op=hvd.Sum), mean * size)
    assert np.allclose(hvd.allreduce(x, prescale_factor=2.0, postscale_factor=3.0), mean * 6)
    assert all(np.allclose(total, mean) for total in hvd.grouped_allreduce([x, x], name="group"))
    variable = tf.Variable(float(rank))
    hvd.broadcast_variables([variable], root_rank=1)
    assert variable.numpy() == 1 and hvd.broadcast(tf.constant(rank), 2).numpy() == 2
    assert raised(hvd.init, comm=[0])[0] == "UnsupportedError"
    assert int(hvd.allreduce(tf.constant(-3), prescale_factor=0.5)) == -1  # cut off towards zero
    places = [(0, 2, False), (0, 1, False), (1, 2, False)]  # two ranks here, one there
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == places[rank] and not hvd.mpi_built()
    return "torch" in sys.modules


def test_horovods_names_without_torch(three_started):
    assert three_started.run(horovod, timeout_s=350.0) == [False] * 3


def session_of_one():
    """Check an optimizer and the hook of TensorFlow 1."""
    rank, size = bps.rank(), bps.size()
    with tf.Graph().as_default():
        w = tf.compat.v1.get_variable("w", initializer=float(rank + 5), use_resource=True)
        optimizer = bps.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0))
        train = optimizer.minimize(w * float(rank))
        with tf.compat.v1.train.MonitoredTrainingSession(hooks=[bps.BroadcastGlobalVariablesHook(0)]) as session:
            session.run(train)
            assert session.run(w) == 5 - sum(range(size)) / size
    kernel = tf.Variable([1.0])
    import keras

    optimizer = bps.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=bps.Compression.fp16)
    optimizer.apply_gradients([(tf.constant([float(rank)]), kernel)])
    return kernel.numpy().tolist() == [1 - sum(range(size)) / size]


def test_optimizers(shared_job):
    pytest.importorskip("keras")
    job = shared_job(ranks=(2, 1), transport="tcp")
    assert all(job.run(keras_backend) and job.run(session_of_one, timeout_s=350.0))


def keras_backend():
    os.environ["KERAS_BACKEND"] = "tensorflow"
    return True


def refused():
    x = tf.ones(3)
    push = bps.push_pull
    tape = bps.DistributedGradientTape
    unsupported = [raised(push, tf.constant(["text"])), raised(push, tf.ones(3, tf.bool)), raised(push, "text"),
                   raised(push, tf.ones(3, tf.complex64)), raised(push, x, enable_async=True),
                   raised(tf.function(push, autograph=False), tf.ones(3, tf.uint32)),
                   raised(push, tf.IndexedSlices(x, tf.constant([0, 1, 2]))),
                   raised(push, tf.ragged.constant([[1], []]))]
    config = [raised(push, x, average=True, op=bps.Sum), raised(push, x, op=7),
              raised(push, x, compression=compression.onebit), raised(push, x, compression="onebit"),
              raised(reduced, [x, x], ["same", "same"], True), raised(reduced, [x], [], True), raised(tape, x),
              raised(tape, tf.GradientTape(), op=9), raised(tape, tf.GradientTape(), compression=7)]
    push(x, name="shape")
    mismatch = [raised(push, tf.ones(4), name="shape"),
                raised(tf.function(lambda: push(tf.ones(4), name="shape"), autograph=False))]
    return unsupported, config, mismatch, push(x).numpy().tolist()


def test_bad_input_is_refused_before_anything_is_sent(three_started):
    for unsupported, config, mismatch, after in three_started.run(refused, timeout_s=350.0):
        assert {kind for kind, _ in unsupported} == {"UnsupportedError"}, unsupported
        assert {kind for kind, _ in config} == {"ConfigError"}, config
        assert mismatch[0][0] == "MismatchError" and mismatch[1][0] == "InvalidArgumentError"
        assert "MismatchError" in mismatch[1][1] and after == [1, 1, 1]


def without_init():
    return raised(bps.push_pull, tf.ones(3)), raised(bps.broadcast, tf.ones(3), 0)


def test_before_init(job):
    alone = job(ranks=(1,), attach=False)
    (found,) = alone.run(without_init, timeout_s=350.0)
    assert all(kind == "ClosedError" and "init" in text for kind, text in found)
    alone.kill()
