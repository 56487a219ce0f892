"""bpsfast.tensorflow: MirroredStrategy, several backward passes per step, CrossBarrier, objects, suspend and resume."""
from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed: pip install bpsfast[tensorflow]")

import bpsfast.tensorflow as bps  # noqa: E402
from bpsfast.launch.daemons import clean_environment  # noqa: E402
from bpsfast.tensorflow.ops import reduced  # noqa: E402
from bpsfast.tensorflow.optimizer import PassAccumulator  # noqa: E402
from tests.support.raised import raised  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400),  # the import of TensorFlow takes its time beside others
              pytest.mark.usefixtures("keras_on_tensorflow")]

SHAPES = [(1,), (2, 2)]
v1 = tf.compat.v1


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def ranks(request, shared_job):
    return shared_job(ranks=request.param, transport="tcp" if len(request.param) > 1 else "auto")


def strategies():
    from bpsfast.tensorflow.distribute import MirroredStrategy

    rank, size = bps.rank(), bps.size()
    total = sum(range(1, size + 1))
    found = []
    for op in (bps.Average, bps.Sum):
        strategy = MirroredStrategy(devices=["/cpu:0"], op=op)
        with strategy.scope():
            w = tf.Variable([1.0, 2.0])
        assert strategy.num_replicas_in_sync == 1 and isinstance(strategy, tf.distribute.MirroredStrategy)

        def replica(w=w):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(w * (rank + 1.0))
            context = tf.distribute.get_replica_context()
            gradient, count = context.all_reduce(tf.distribute.ReduceOp.SUM, [tape.gradient(loss, w), tf.constant(2)])
            mean = context.all_reduce(tf.distribute.ReduceOp.MEAN, tf.constant(rank + 1.0))
            rows = context.all_reduce("SUM", tf.IndexedSlices(tf.ones([1, 2]), tf.constant([rank]),
                                                              tf.constant([size, 2])))
            return gradient, count, mean, tf.convert_to_tensor(rows), loss

        def step(strategy=strategy, replica=replica):
            *reduced, loss = strategy.run(replica)
            return *reduced, strategy.reduce("SUM", loss, axis=None)

        for run in (step, tf.function(step, autograph=False)):
            gradient, count, mean, rows, loss = [each.numpy() for each in run()]
            by = size if op == bps.Average else 1
            assert np.allclose(gradient, total / by) and count == 2 * size / by and np.allclose(mean, total / size)
            assert np.allclose(rows, 1 / by) and loss == 3 * (rank + 1)
            found.append(gradient.tobytes())
    return found


def fitted():
    """Keras's fit inside the strategy, beside the same model with a DistributedOptimizer."""
    import keras

    from bpsfast.tensorflow.distribute import MirroredStrategy

    x = np.random.default_rng(bps.rank()).random((32, 4), np.float32)
    weights = []
    strategies = [MirroredStrategy(["/cpu:0"]), tf.distribute.get_strategy()]
    for strategy, wrap in zip(strategies, (lambda it: it, bps.DistributedOptimizer)):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="tanh"),
                                      keras.layers.Dense(1)])
            model.compile(wrap(keras.optimizers.Adam(0.01)), "mse")
        model.fit(x, x.sum(1), batch_size=16, epochs=2, verbose=0, shuffle=False)
        weights.append(b"".join(np.asarray(each).tobytes() for each in model.get_weights()))
    assert weights[0] == weights[1]
    return weights[0]


def test_a_strategy_reduces_over_all_ranks(ranks):
    assert len(set(map(tuple, ranks.run(strategies, timeout_s=350.0)))) == 1


def test_training_in_a_strategy_is_that_of_a_distributed_optimizer(ranks):
    pytest.importorskip("keras")
    assert len(set(ranks.run(fitted, timeout_s=350.0))) == 1


def passes_of_a_graph():
    """TensorFlow 1: two passes a step, summed and averaged; what was applied after each."""
    found = []
    for average in (False, True):
        with tf.Graph().as_default():
            w = v1.get_variable("w", initializer=[5.0, 5.0], use_resource=True)
            unused = v1.get_variable("unused", initializer=1.0, use_resource=True)
            steps = v1.train.get_or_create_global_step()
            x = v1.placeholder(tf.float32, [])
            optimizer = bps.DistributedOptimizer(v1.train.MomentumOptimizer(1.0, 0.0), backward_passes_per_step=2,
                                                 average_aggregated_gradients=average)
            train = optimizer.minimize(tf.reduce_sum(w) * x, steps, [w, unused])
            with v1.Session() as session:
                session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
                for k in range(4):
                    session.run(train, {x: float(bps.rank() + k)})
                    found.append(session.run(w).tolist())
                assert session.run(steps) == 4
            assert len(v1.global_variables()) == 4 and len(optimizer.get_slot_names()) == 1  # with slot and steps
    return found


def passes_eagerly(inside):
    found = []
    w = tf.Variable([5.0, 5.0])
    optimizer = bps.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2)

    def step(x):
        optimizer.minimize(lambda: tf.reduce_sum(w) * x, var_list=[w])

    run = tf.function(step, autograph=False) if inside else step
    for k in range(4):
        run(tf.constant(float(bps.rank() + k)))
        found.append(w.numpy().tolist())
    return found


def passes_of_keras():
    import keras

    found = []
    for average in (False, True):
        w = keras.Variable([5.0, 5.0])
        optimizer = bps.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2,
                                             average_aggregated_gradients=average)
        optimizer.build([w])
        for k in range(4):
            optimizer.apply([tf.fill([2], float(bps.rank() + k))], [w])
            found.append(w.numpy().tolist())
    return found


def test_passes_are_added_up_before_they_are_sent(ranks):
    pytest.importorskip("keras")
    for rank, graph in enumerate(ranks.run(passes_of_a_graph, timeout_s=350.0)):
        size = ranks.size
        mean = sum(range(size)) / size
        sums = [5.0, 5 - (2 * mean + 1), 5 - (2 * mean + 1), 5 - (4 * mean + 6)]
        halves = [5.0, 5 - (2 * mean + 1) / 2, 5 - (2 * mean + 1) / 2, 5 - (4 * mean + 6) / 2]
        assert graph == [[each] * 2 for each in (*sums, *halves)], rank
    wanted = graph
    assert all(found == wanted[:4] for inside in (False, True)
               for found in ranks.run(passes_eagerly, inside, timeout_s=350.0))
    assert all(found == wanted for found in ranks.run(passes_of_keras, timeout_s=350.0))


def objects():
    rank, last = bps.rank(), bps.size() - 1
    found = bps.broadcast_object({"rank": rank, "name": "x" * 100_000}, last, name="state")
    assert found["rank"] == last and len(found["name"]) == 100_000
    return bps.broadcast_object_fn(0)([rank])


def test_objects(ranks):
    assert all(found == [0] for found in ranks.run(objects))


def crossing():
    """Steps by CrossBarrier beside steps by a tape: the same weights, bit for bit, eagerly and inside tf.function."""
    x = tf.random.stateless_normal([8, 6], [bps.rank(), 1])
    digests = []
    for inside in (False, True):
        weights = []
        for crosses in (False, True):
            layers = [tf.Variable(tf.random.stateless_normal([6, 6], [k, 2])) for k in range(3)]
            table, unused = tf.Variable(tf.ones([4, 6])), tf.Variable([1.0])
            variables = [table, *layers, unused]
            momenta = {id(each): tf.Variable(tf.zeros_like(each)) for each in variables}

            def update(variable, gradient, momenta=momenta):
                momentum = momenta[id(variable)]
                momentum.assign(0.9 * momentum + gradient)
                variable.assign_sub(0.1 * momentum)

            crossing = bps.CrossBarrier(variables, update) if crosses else None

            def step(x, variables=variables, crossing=crossing, update=update, inside=inside):
                with tf.GradientTape() as tape:
                    table, *layers, _ = [crossing.read(each) if crossing else each.value() for each in variables]
                    hidden = x + tf.gather(table, [bps.rank(), 3, 3, 0, 1, 2, 3, 0])
                    for layer in layers:
                        hidden = tf.tanh(hidden @ layer)
                    loss = tf.reduce_sum(hidden ** 2)
                gradients = tape.gradient(loss, variables, unconnected_gradients="zero")
                if crossing is None:
                    mean = reduced([tf.convert_to_tensor(each) for each in gradients],
                                   [f"{inside} {k}" for k in range(len(variables))], True)
                    for variable, gradient in zip(variables, mean):
                        update(variable, gradient)

            run = tf.function(step, autograph=False) if inside else step
            for k in range(5):
                run(x)
                if crossing and k in (2, 4):  # in the midst, too
                    crossing.settle()
            weights.append(b"".join(each.numpy().tobytes() for each in (*variables, *momenta.values())))
        assert weights[0] == weights[1]
        digests.append(weights[0])
    return digests[0]


def test_crossing_the_barrier_has_the_same_weights(ranks):
    assert len(set(ranks.run(crossing, timeout_s=350.0))) == 1


def crossed_wrongly():
    a, b = tf.Variable([1.0]), tf.Variable([2.0])

    def update(variable, gradient):
        variable.assign_sub(gradient)

    make = bps.CrossBarrier
    found = [raised(make, [], update), raised(make, [a, a], update), raised(make, [tf.ones(1)], update),
             raised(make, [tf.Variable("text")], update), raised(make, [a], update, op=5)]
    crossing = make([a, b], update)

    def step(*reads):
        with tf.GradientTape() as tape:
            loss = sum(crossing.read(each) for each in reads)
        tape.gradient(loss, [a, b])

    found += [raised(crossing.read, tf.Variable([1.0])), raised(step, a, a)]
    crossing.settle()  # what has been read belongs to no step
    assert [float(crossing.read(each)[0]) for each in (a, b)] == [1.0, 2.0]  # an evaluation, after which, too
    crossing.settle()
    step(a, b)
    found += [raised(step, a), raised(tf.function(crossing.settle, autograph=False))]
    crossing.settle()
    return [kind for kind, _ in found], [float(each[0]) for each in (a, b)]


def test_what_a_crossing_refuses(ranks):
    for kinds, (a, b) in ranks.run(crossed_wrongly, timeout_s=350.0):
        assert kinds == ["ConfigError", "ConfigError", "UnsupportedError", "UnsupportedError", "ConfigError",
                         "ConfigError", "BusyError", "BusyError", "UnsupportedError"], kinds
        assert (a, b) == (0.0, 1.0)


def refused():
    import keras

    from bpsfast.tensorflow.distribute import MirroredStrategy

    many = PassAccumulator(2, False)
    rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))
    unknown = tf.function(lambda x: PassAccumulator(2, False).added([x], list), autograph=False,
                          input_signature=[tf.TensorSpec([None])])
    unsupported = [raised(MirroredStrategy, ["/cpu:0", "/cpu:1"]), raised(MirroredStrategy, []),
                   raised(MirroredStrategy, cross_device_ops=tf.distribute.ReductionToOneDevice()),
                   raised(many.added, [rows], list), raised(unknown, tf.ones(2)),
                   raised(tf.function(lambda: bps.broadcast_object(1), autograph=False))]
    many.added([tf.ones(2), None], list)
    mismatch = [raised(many.added, [tf.ones(2), tf.ones(2)], list), raised(many.added, [tf.ones(3), None], list)]
    optimizer, built = v1.train.GradientDescentOptimizer(1.0), keras.optimizers.SGD(1.0)
    built.build([keras.Variable(1.0)])
    distributed = bps.DistributedOptimizer
    config = [raised(MirroredStrategy, ["/gpu:7"]), raised(MirroredStrategy, op=7),
              raised(bps.broadcast_object, 1, 99), raised(distributed, optimizer, backward_passes_per_step=0),
              raised(distributed, optimizer, backward_passes_per_step=1.5),
              raised(distributed, built, backward_passes_per_step=2)]
    return unsupported, mismatch, config, bps.push_pull(tf.ones(2)).numpy().tolist()


_SUSPENDED = """
import tensorflow as tf, bpsfast.tensorflow as bps
bps.init()
rank, size = bps.rank(), bps.size()
total = tf.function(lambda x: bps.push_pull(x, op=bps.Sum, name="total"), autograph=False)
for _ in range(2):
    assert total(tf.constant([1.0, rank])).numpy().tolist() == [2.0, 1.0]
    bps.suspend()
    bps.resume(size, 0, rank)
print("resumed", flush=True)
bps.shutdown()
"""


def test_a_traced_function_goes_on_after_suspend_and_resume():
    command = [sys.executable, "-m", "bpsfast", "run", "-n", "2", "--elastic", "--", sys.executable, "-c", _SUSPENDED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False,
                          env={**clean_environment(os.environ), "TF_CPP_MIN_LOG_LEVEL": "3"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("resumed") == 2


def test_bad_input_is_refused_before_anything_is_sent(ranks):
    pytest.importorskip("keras")
    for unsupported, mismatch, config, after in ranks.run(refused, timeout_s=350.0):
        assert {kind for kind, _ in unsupported} == {"UnsupportedError"}, unsupported
        assert {kind for kind, _ in mismatch} == {"MismatchError"}, mismatch
        assert {kind for kind, _ in config} == {"ConfigError"}, config
        assert after == [1, 1]
