"""bpsfast.hvd.tensorflow: negotiated operations on TensorFlow's tensors, eagerly and inside tf.function."""
from __future__ import annotations

import os

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed: pip install bpsfast[tensorflow]")
pytest.importorskip("torch", reason="torch is not installed: pip install bpsfast[torch]")

import bpsfast.hvd.tensorflow as hvd  # noqa: E402
from tests.support.raised import raised  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400),  # the import of TensorFlow takes its time beside others
              pytest.mark.usefixtures("keras_on_tensorflow")]

BOTH = (lambda f: f, lambda f: tf.function(f, autograph=False))


@pytest.fixture(scope="module", params=[(1,), (2, 1)], ids=["one", "three"])
def ranks(request, shared_job):
    return shared_job(ranks=request.param, transport="tcp" if len(request.param) > 1 else "auto")


def exact(found, wanted):
    """Whether *found* is *wanted*, bit for bit."""
    found, wanted = found.numpy(), np.asarray(wanted)
    return found.shape == wanted.shape and found.astype(wanted.dtype).tobytes() == wanted.tobytes()


def operations():
    rank, size = hvd.rank(), hvd.size()
    everyone = range(size)
    mine = tf.fill([rank + 1, 2], float(rank))
    all_rows = np.concatenate([np.full((r + 1, 2), r, np.float32) for r in everyone])
    to_each = tf.reshape(tf.range(size * 2), [size, 2]) + 100 * rank
    whole = tf.ones([size + 1, 2]) * (rank + 1)
    total = sum(r + 1 for r in everyone)
    for function in BOTH:
        for dtype in ("float32", "bfloat16", "bool", "int64"):
            assert exact(function(lambda dtype=dtype: hvd.allgather(tf.cast(mine, dtype)))(),
                         tf.cast(all_rows, dtype).numpy())
        first, second = function(lambda: hvd.grouped_allgather([mine, tf.constant([rank])]))()
        assert exact(first, all_rows) and second.numpy().tolist() == list(everyone)
        even = function(lambda: hvd.alltoall(to_each))()
        assert even.numpy().tolist() == [[2 * rank + 100 * r, 2 * rank + 1 + 100 * r] for r in everyone]
        output, came = function(lambda: hvd.alltoall(tf.fill([size * 2], rank), [2] + [1] * (size - 1)))()
        assert came.numpy().tolist() == [2 if rank == 0 else 1] * size and came.dtype == tf.int32
        assert output.numpy().tolist() == [r for r in everyone for _ in range(2 if rank == 0 else 1)]
        part = function(lambda: hvd.reducescatter(whole, op=hvd.Sum))()
        assert exact(part, np.full((2 if rank == 0 else 1, 2), total, np.float32))
        halves = function(lambda: hvd.grouped_reducescatter([whole, whole], compression=hvd.Compression.fp16))()
        assert all(np.allclose(each, total / size, rtol=1e-3) for each in halves)
        for op, wanted in ((hvd.Min, 1), (hvd.Max, size), (hvd.Product, int(np.prod(range(1, size + 1))))):
            assert exact(function(lambda op=op: hvd.allreduce(tf.constant(rank + 1), op=op))(), np.int32(wanted))
        sums = function(lambda: hvd.grouped_allreduce([whole, tf.constant(rank)], op=hvd.Sum))()
        assert exact(sums[0], np.full((size + 1, 2), total, np.float32)) and int(sums[1]) == sum(everyone)
    assert hvd.allgather_object({"rank": rank}) == [{"rank": r} for r in everyone]
    assert hvd.broadcast_object("mine" if rank == 0 else None) == "mine"
    (variable,) = hvd.broadcast_([tf.Variable(rank)], size - 1)
    hvd.barrier()
    return int(variable) == size - 1


def gradients():
    """Each gradient by its definition, on this rank."""
    rank, size = hvd.rank(), hvd.size()
    mean = sum(r + 1 for r in range(size)) / size
    for function in BOTH:
        @function
        def of_gather():
            x = tf.ones([rank + 1, 2])
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(hvd.allgather(x)) * (rank + 1.0)
            return tape.gradient(loss, x)

        @function
        def of_scatter(op):
            x = tf.ones([size, 2])
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(hvd.reducescatter(x, op=op)) * (rank + 1.0)
            return tape.gradient(loss, x)

        @function
        def of_exchange(splits):
            x = tf.ones([size + 2, 1])
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(hvd.alltoall(x, splits)[0]) * (rank + 1.0)
            return tape.gradient(loss, x)

        assert np.allclose(of_gather(), mean)
        rows = np.repeat([[r + 1.0] for r in range(size)], 2, 1)
        assert np.allclose(of_scatter(hvd.Average), rows) and np.allclose(of_scatter(hvd.Sum), rows * size)
        assert of_exchange(tf.ones(size, tf.int32)).numpy().ravel().tolist() == [*(r + 1 for r in range(size)), 0, 0]
    return True


def sets():
    """Operations in a set of the last ranks, which the others are not in."""
    rank, size = hvd.rank(), hvd.size()
    if size == 1:
        return raised(hvd.add_process_set, [0])[0] == "ConfigError"  # that is the set of all ranks
    chosen = list(range(size // 2, size))
    few = hvd.add_process_set(chosen)
    assert few.size() == len(chosen) and few.included() == (rank in chosen)
    if rank in chosen:
        x = tf.constant([1.0, 2.0]) * rank
        wanted = np.array([1, 2]) * sum(chosen) / len(chosen)
        for function in BOTH:
            assert np.allclose(function(lambda: hvd.allreduce(x, process_set=few))(), wanted)
            assert hvd.allgather(tf.constant([rank]), process_set=few).numpy().tolist() == chosen
            assert int(function(lambda: hvd.broadcast(tf.constant(rank), chosen[-1], process_set=few))()) == chosen[-1]
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum, process_set=few)) * (rank + 1.0)
        assert np.allclose(tape.gradient(y, x), sum(r + 1 for r in chosen))
        assert hvd.broadcast_object(rank, chosen[0], process_set=few) == chosen[0]
        variable = tf.Variable(float(rank))
        hvd.broadcast_variables([variable], chosen[-1], few)
        assert variable.numpy() == chosen[-1]
        hvd.barrier(few)
    outside = raised(hvd.allreduce, tf.constant(1.0), process_set=few)[0] if rank not in chosen else "ConfigError"
    return hvd.remove_process_set(few) and outside == "ConfigError"


def tapes():
    """Each rank's gradient is r + 1; of `own`, which stays local, too."""
    rank, size = hvd.rank(), hvd.size()
    shared, rows, own = tf.Variable([1.0, 1.0]), tf.Variable(tf.ones([3, 2])), tf.Variable(2.0)
    chosen = list(range(size // 2, size))
    few = hvd.add_process_set(chosen) if size > 1 else hvd.global_process_set
    found = []
    for choice in ({}, {"gradient_predivide_factor": 4.0},
                   {"op": hvd.Sum, "scale_local_gradients": False, "scope": "sum"},
                   {"process_set": few}, {"process_set": few, "compression": hvd.Compression.fp16, "scope": "narrow"}):
        for function in BOTH:
            def step(choice=choice):
                with hvd.DistributedGradientTape(tf.GradientTape(), num_groups=2, **choice) as tape:
                    tape.register_local_source(own)
                    loss = tf.reduce_sum(shared + own) / 2 + tf.reduce_sum(tf.gather(rows, [rank % 3]))
                    loss *= rank + 1.0
                return [tf.convert_to_tensor(each) for each in tape.gradient(loss, [shared, rows, own])]

            found.append([each.numpy() for each in function(step)()])
    for place, (dense, sparse, local) in enumerate(found):
        over = list(range(size)) if place < 6 else chosen if rank in chosen else [rank]
        divisor = 1 if place in (4, 5) else len(over)
        table = np.zeros([3, 2])
        for other in over:
            table[other % 3] += (other + 1) / divisor
        assert np.allclose(dense, sum(other + 1 for other in over) / 2 / divisor), (place, dense)
        assert np.allclose(sparse, table) and np.allclose(local, (rank + 1) / divisor), (place, sparse, local)
    if size == 1:
        return True
    with hvd.DistributedGradientTape(tf.GradientTape(), process_set=few) as tape:
        loss = tf.reduce_sum(shared)
    assert hvd.remove_process_set(few)
    found = raised(tape.gradient, loss, [shared])
    assert found[0] == "ConfigError", found
    return True


def refused():
    from bpsfast import compression

    x = tf.ones(3)
    rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))
    unsupported = [raised(hvd.join), raised(hvd.allgather, "text"), raised(hvd.allgather, tf.constant(["text"])),
                   raised(hvd.alltoall, rows), raised(hvd.reducescatter, x, op=hvd.Max),
                   raised(hvd.reducescatter, x, compression=compression.onebit()),
                   raised(hvd.allreduce, rows, op=hvd.Min), raised(hvd.init, comm=[0]),
                   raised(tf.function(lambda: hvd.allgather_object(1), autograph=False))]
    few = hvd.ProcessSet([0])
    codec = compression.onebit()
    unsupported += [raised(hvd.DistributedOptimizer, None, process_set=few),
                    raised(hvd.DistributedOptimizer, None, gradient_predivide_factor=2.0),
                    raised(hvd.DistributedGradientTape, tf.GradientTape(), compression=codec, process_set=few)]
    adasum = raised(hvd.allreduce, x, op=hvd.Adasum)
    config = [raised(hvd.allreduce, x, average=True, op=hvd.Sum), raised(hvd.allreduce, x, op=9),
              raised(hvd.alltoall, x, [9] * hvd.size()), raised(hvd.add_process_set, [99]),
              raised(hvd.DistributedGradientTape, tf.GradientTape(), gradient_predivide_factor=0.0),
              raised(hvd.DistributedGradientTape, tf.GradientTape(), op=hvd.Sum, gradient_predivide_factor=2.0),
              raised(hvd.DistributedOptimizer, None, op=hvd.Max),
              raised(hvd.allreduce, x, "a name"), raised(hvd.grouped_allreduce, [x], 1),
              raised(hvd.allreduce, x, op="Sum"), raised(hvd.allreduce, x, prescale_factor="2"),
              raised(hvd.allreduce, x, postscale_factor=None),
              raised(hvd.allreduce, x, process_set=[0]), raised(hvd.broadcast, x, "0"), raised(hvd.broadcast, x, 0.5),
              raised(hvd.alltoall, tf.ones(hvd.size()), [1.0] * hvd.size()),
              raised(hvd.DistributedGradientTape, tf.GradientTape(), gradient_predivide_factor="2")]
    return unsupported, adasum, config, hvd.allreduce(x).numpy().tolist()


def integers():
    """Averages and factors are truncated towards zero, not downwards; None in a group stays None."""
    rank, size = hvd.rank(), hvd.size()
    mine = [-3 - rank, 3 + rank, 100 * rank]
    sums = [sum(each) for each in zip(*[[-3 - r, 3 + r, 100 * r] for r in range(size)])]
    means = [int(total / size) for total in sums]
    for function in BOTH:
        for dtype in (tf.int32, tf.int64):
            x = tf.constant(mine, dtype)
            assert function(lambda x=x: hvd.allreduce(x))().numpy().tolist() == means
            found = function(lambda x=x: hvd.grouped_allreduce([x, None, tf.constant(float(rank))]))()
            assert found[0].numpy().tolist() == means and found[1] is None
            assert np.allclose(found[2], (size - 1) / 2)
            scaled = function(lambda x=x: hvd.allreduce(x, op=hvd.Sum, postscale_factor=0.5))()
            assert scaled.dtype == dtype and scaled.numpy().tolist() == [int(total * 0.5) for total in sums]
        assert function(lambda: hvd.reducescatter(tf.fill([size], -1 - rank)))().numpy().tolist() == [
            int(-(size + 1) / 2)]
        least = function(lambda: hvd.grouped_allreduce([None, tf.constant(rank)], op=hvd.Min))()
        assert least[0] is None and int(least[1]) == 0
    return True


def keras_names():
    import keras

    import bpsfast.hvd.keras
    import bpsfast.hvd.tensorflow.keras as other
    from bpsfast.hvd.tensorflow.keras import callbacks

    assert other is bpsfast.hvd.keras and callbacks is bpsfast.hvd.keras.callbacks
    optimizer = other.DistributedOptimizer(keras.optimizers.SGD(1.0))
    weight = keras.Variable([5.0])
    optimizer.apply([tf.constant([float(other.rank())])], [weight])
    return float(weight.numpy()[0])


def test_operations_by_definition(ranks):
    assert all(ranks.run(operations, timeout_s=350.0))


def test_gradients(ranks):
    assert all(ranks.run(gradients, timeout_s=350.0))


def test_process_sets(ranks):
    assert all(ranks.run(sets, timeout_s=350.0))


def test_tapes_reduce_what_is_not_local_over_their_set(ranks):
    assert all(ranks.run(tapes, timeout_s=350.0))


def test_bad_input_is_refused_with_a_reason(ranks):
    for unsupported, adasum, config, after in ranks.run(refused, timeout_s=350.0):
        assert {kind for kind, _ in unsupported} == {"UnsupportedError"}, unsupported
        assert adasum[0] == "AdasumError" and {kind for kind, _ in config} == {"ConfigError"}, config
        assert after == [1, 1, 1]


def test_integers_are_cut_off_towards_zero(ranks):
    assert all(ranks.run(integers, timeout_s=350.0))


def test_keras_by_horovods_other_name(ranks):
    pytest.importorskip("keras")
    mean = sum(range(ranks.size)) / ranks.size
    assert ranks.run(keras_names, timeout_s=350.0) == [5 - mean] * ranks.size
