"""Functions for ranks in tests of bpsfast.keras, on backend KERAS_BACKEND; importing it without Keras skips tests.
"""
from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
keras = pytest.importorskip("keras", reason="keras is not installed: pip install bpsfast[keras], and a backend")

import numpy as np  # noqa: E402

import bpsfast.keras as bps  # noqa: E402
from bpsfast import compression  # noqa: E402
from bpsfast.base import reference_sum  # noqa: E402
from bpsfast.keras.optimizer import is_distributed  # noqa: E402
from bpsfast.trainer import process  # noqa: E402
from tests.support.raised import raised  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))


def numpy(tensor):
    return keras.ops.convert_to_numpy(tensor)


def digest(variables):
    return hashlib.sha256(b"".join(numpy(v).tobytes() for v in variables)).hexdigest()


def line(optimizer, weight=2.0, **options):
    """Return a model of one weight, y = w x."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(
        1, use_bias=False, kernel_initializer=keras.initializers.Constant(weight), name="line")])
    model.compile(optimizer, loss="mse", **options)
    return model


def weight_of(model):
    return float(numpy(model.weights[0]).ravel()[0])


def fit(model, xs, epochs=1, callbacks=()):
    """Train *model* to y = 0 with one sample for each batch."""
    x = np.asarray(xs, np.float32).reshape(-1, 1)
    return model.fit(x, np.zeros_like(x), batch_size=1, epochs=epochs, shuffle=False, verbose=0,
                     callbacks=list(callbacks))


def units(prefix):
    """Return the units whose tensors have names with this *prefix*."""
    tensors = process.current().tensors
    return [tensors.unit(name) for name in tensors._specs if name.startswith(prefix)]


def ops():
    rank, size = bps.rank(), bps.size()
    total = sum(range(1, size + 1))
    for dtype in ("float32", "int32"):
        tensor = keras.ops.convert_to_tensor(np.full((2, 3), rank + 1, dtype))
        found = bps.push_pull(tensor, name=f"sum {dtype}", average=False)
        assert type(found) is type(tensor) and found.dtype == tensor.dtype
        assert (numpy(found) == total).all() and tuple(found.shape) == (2, 3)
        mean = numpy(bps.push_pull(tensor, name=f"mean {dtype}"))
        assert (mean == (total // size if dtype == "int32" else np.float32(total / size))).all()
    wide = bps.push_pull(np.full(3, rank + 1.0), average=False)
    assert wide.dtype == np.float64 and (wide == total).all()
    several = bps.push_pull([float(rank), 1.0], average=False)
    assert isinstance(several, np.ndarray) and several.dtype == np.float32 and list(several) == [total - size, size]
    variable = keras.Variable(np.full(3, rank, np.float32))
    for root in range(size):
        assert (numpy(bps.broadcast(variable, root)) == root).all() and (numpy(variable) == rank).all()
        array = np.full((2, 2), rank, np.int64)
        assert (bps.broadcast(array, root, name="array") == root).all() and (array == rank).all()
        assert bps.broadcast(rank + 0.5, root) == root + 0.5
    model = line(keras.optimizers.SGD(0.1, momentum=0.9), weight=rank)
    fit(model, [1.0] * (rank + 1))
    bps.broadcast_global_variables(size - 1, model)
    assert len({text for text in every(digest([*model.weights, *model.optimizer.variables]))}) == 1
    assert int(model.optimizer.iterations) == size
    bps.broadcast_global_variables(0, [variable])
    assert (numpy(variable) == 0).all()
    return True


def every(text):
    """Return the *text* (of hexadecimal digits) of every rank."""
    mine = np.zeros((bps.size(), 64), np.uint8)
    mine[bps.rank()] = list(text.ljust(64).encode())
    return [bytes(row).decode() for row in bps.push_pull(mine, name="texts", average=False)]


def refused():
    """Bad input of ranks is refused before anything is sent, so later calls work."""
    model = line(bps.DistributedOptimizer(keras.optimizers.SGD(0.1), name="refused"))
    wrong = [keras.ops.zeros((3, 3))]
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        compiled = raised(tf.function(lambda x: bps.push_pull(x), autograph=False), tf.zeros(3))
    elif keras.backend.backend() == "jax":
        import jax

        compiled = raised(jax.jit(bps.push_pull), np.zeros(3, np.float32))
    else:
        compiled = raised(bps.push_pull, keras.ops.zeros((3,)).to("meta"))
    found = [raised(model.optimizer.apply, wrong, model.trainable_variables),
             raised(model.optimizer.apply, [keras.ops.zeros((1, 1))] * 2, model.trainable_variables),
             compiled, raised(bps.broadcast, 1.0, bps.size()), raised(bps.push_pull, np.ones(3, bool)),
             raised(bps.broadcast_global_variables, 7, model), raised(
                 fit, model, [1.0], callbacks=[bps.callbacks.BroadcastGlobalVariablesCallback(99)])]
    assert units("refused.") == []
    return found, float(bps.push_pull(1.0, average=False))


def differing():
    """If models differ, the broadcast says how, and all ranks can continue."""
    units = 3 + (bps.rank() == 1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(units, name="wide")])
    return raised(bps.broadcast_global_variables, 0, model), float(bps.push_pull(1.0, average=False))


def passes():
    """Passes are accumulated on each rank, and summed once."""
    rank, size = bps.rank(), bps.size()
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3, global_clipnorm=100.0)
    model = line(bps.DistributedOptimizer(optimizer, name="passes"))
    xs = [[1.0 + other + step / 4 for step in range(6)] for other in range(size)]
    fit(model, xs[rank])
    weight = 2.0
    for steps in (slice(0, 3), slice(3, 6)):
        weight -= 0.1 * np.mean([2 * weight * x * x for own in xs for x in own[steps]])
    (unit,) = units("passes.")
    return weight_of(model), weight, unit.round - unit.first_round + 1, digest(model.weights)


def overflow():
    """If a gradient is not finite on one rank, all skip the step."""
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01, momentum=0.9), initial_scale=8.0)
    model = line(bps.DistributedOptimizer(optimizer))
    fit(model, [1.0])
    before = weight_of(model)
    fit(model, [np.inf if bps.rank() == 1 else 1.0])
    skipped, scale = weight_of(model), float(numpy(model.optimizer.dynamic_scale))
    fit(model, [1.0 + bps.rank()])
    return before, skipped, scale, weight_of(model), int(model.optimizer.iterations)


def half_precision():
    """With policy mixed_float16 Keras would wrap the optimizer in the wrong order."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        refusal = raised(line, bps.DistributedOptimizer(keras.optimizers.SGD(0.01)))
        plain = line(bps.DistributedOptimizer(keras.optimizers.SGD(0.01)), auto_scale_loss=False)
        right = line(bps.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01))))
    finally:
        keras.config.set_dtype_policy("float32")
    for model in (plain, right):
        fit(model, [1.0 + bps.rank()] * 2)
    return refusal, digest(plain.weights), weight_of(plain), weight_of(right)


class Halved(keras.optimizers.SGD):
    """A user-defined optimizer."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate * 0.5)

    _parallel_update_step = None


def saved(folder):
    """A model that is saved and loaded with its state continues as it would have without that."""
    path = str(Path(folder) / f"{keras.backend.backend()}{bps.rank()}.keras")
    model = line(bps.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9)))
    fit(model, [1.0 + bps.rank()] * 2)
    model.save(path)
    plain, again = keras.models.load_model(path), bps.load_model(path, compression=bps.Compression.fp16)
    assert not is_distributed(plain.optimizer) and is_distributed(again.optimizer)
    assert type(plain.optimizer) is model.optimizer.__class__
    assert digest(again.optimizer.variables) == digest(model.optimizer.variables) == digest(plain.optimizer.variables)
    copy = type(model.optimizer).from_config(model.optimizer.get_config())
    assert is_distributed(copy) and copy.momentum == 0.9
    for each in (model, again):
        fit(each, [2.0 + bps.rank()])
    assert abs(weight_of(model) - weight_of(again)) < 1e-2 and weight_of(model) != weight_of(plain)
    own = line(bps.DistributedOptimizer(Halved(0.1)))
    own.save(path)
    assert is_distributed(bps.load_model(path, custom_optimizers=[Halved]).optimizer)
    scaled = line(bps.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())))
    scaled.save(path)
    loaded = bps.load_model(path)
    assert is_distributed(loaded.optimizer) and not is_distributed(loaded.optimizer.inner_optimizer)
    return digest(model.weights), digest(again.weights)


def fitted():
    """Train with all callbacks at once."""
    rank, size = bps.rank(), bps.size()
    model = line(bps.DistributedOptimizer(keras.optimizers.SGD(0.01 * size, momentum=0.5)), weight=2.0 + rank)
    before, rates = [], []

    class Seen(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            before.append(weight_of(self.model))
            rates.append(float(numpy(self.model.optimizer.learning_rate)))

    callbacks = [bps.callbacks.BroadcastGlobalVariablesCallback(1 % size), bps.callbacks.MetricAverageCallback(),
                 bps.callbacks.LearningRateWarmupCallback(warmup_epochs=2, momentum_correction=False),
                 bps.callbacks.LearningRateScheduleCallback(0.5, start_epoch=2, momentum_correction=False), Seen()]
    history = fit(model, [1.0, 1.0 + rank], epochs=3, callbacks=callbacks).history
    wanted = [0.01 * (e * (size - 1) / 2 + 1) for e in (0.5, 1, 1.5, 2)] + [0.01 * size / 2] * 2
    assert np.allclose(rates, wanted, rtol=1e-6), (rates, wanted)
    assert np.allclose(history["lr"], wanted[1::2], rtol=1e-6)
    return before[0], history["loss"], digest(model.weights)


def corrected():
    """The momentum is scaled with the rate; a rate of 0 causes no division."""
    rates, weight, gathered = [0.0, 0.04, 0.02], 2.0, 0.0
    model = line(bps.DistributedOptimizer(keras.optimizers.SGD(0.04, momentum=0.5)), weight=weight)
    schedule = bps.callbacks.LearningRateScheduleCallback(lambda epoch: rates[epoch] / 0.04, initial_lr=0.04)
    fit(model, [1.0, 1.0], epochs=3, callbacks=[schedule])
    for old, new in zip([0.04, *rates], rates):
        gathered *= new / old if old else 1
        for _ in range(2):
            gathered = 0.5 * gathered - new * 2 * weight
            weight += gathered
    found = float(numpy(model.optimizer.momentums[0]).ravel()[0])
    return weight_of(model), weight, found, gathered


def compressed():
    """Train with a compressor, and with a codec that receives the learning rate."""
    outcomes = []
    for number, chosen in enumerate((bps.Compression.fp16, bps.Compression.bf16,
                                     {"*coded/kernel": compression.onebit(error_feedback=True)})):
        keras.utils.set_random_seed(7)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(64, name="coded"), keras.layers.Dense(1)])
        model.compile(bps.DistributedOptimizer(keras.optimizers.SGD(0.05), f"compressed{number}", compression=chosen),
                      loss="mse")
        x = np.random.default_rng(bps.rank()).random((8, 8), np.float32)
        model.fit(x, x.sum(1), batch_size=4, epochs=2, verbose=0)
        outcomes.append(digest(model.weights))
    (unit,) = [unit for unit in units("compressed2.") if unit.codec is not None]
    return outcomes, unit.codec is not None, unit.learning_rate


def several():
    """Train with one optimizer for each layer, and two models at once."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="a"), keras.layers.Dense(1, name="b")])
    inner = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.01), {"a/.*": keras.optimizers.Adam(0.01)})
    model.compile(bps.DistributedOptimizer(keras.optimizers.MultiOptimizer(inner)), loss="mse")
    other = line(bps.DistributedOptimizer(keras.optimizers.RMSprop(0.01, momentum=0.5)))
    bps.broadcast_global_variables(0, model)
    for step in range(3):
        x = np.full((4, 2), bps.rank() + step, np.float32)
        model.train_on_batch(x, x.sum(1, keepdims=True))
        fit(other, [1.0 + bps.rank()])
    return digest(model.weights), digest(other.weights), digest(other.optimizer.variables)


def digits():
    """Run the example as a rank of the job, and then alone, like two nodes and like one."""
    import keras_digits

    keras_digits.N_EPOCHS = 6
    data = keras_digits.load_digits()
    x, y = (data.data / 16).astype(np.float32), data.target.astype(np.int32)
    _, model = keras_digits.train(x[300:], y[300:])
    accuracy = float((numpy(model(x[:300])).argmax(1) == y[:300]).mean())
    together = digest(model.weights)
    alone = {0: [2, 2], 1: [4]}.get(bps.rank())
    return accuracy, together, digest(keras_digits.train_alone(x[300:], y[300:], alone)[1].weights) if alone else None


def alone():
    """With one rank nothing is sent, and everything works."""
    model = line(bps.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    fit(model, [1.0], callbacks=[bps.callbacks.BroadcastGlobalVariablesCallback(0),
                                 bps.callbacks.MetricAverageCallback()])
    assert float(bps.push_pull(2.5)) == 2.5 and float(bps.broadcast(1.5, 0)) == 1.5
    return weight_of(model)


def averaged():
    """Call fit twice with moving averages of weights, which are the weights after each fit."""
    found = []
    for wrap in (lambda optimizer: optimizer, keras.optimizers.LossScaleOptimizer):
        model = line(bps.DistributedOptimizer(wrap(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5))))
        for _ in range(2):
            fit(model, [bps.rank() + 1.0])
            found.append(weight_of(model))
    return found


def missing():
    """If one rank lacks metrics of the other, an error names it before the timeout."""
    callbacks = [bps.callbacks.MetricAverageCallback()]
    callbacks[0].set_model(None)
    logs = {"loss": 1.0, "val_loss": 2.0} if bps.rank() == 0 else {"loss": 1.0}
    return raised(callbacks[0].on_epoch_end, 0, logs)


def associated():
    """The mean of gradients is equal to the reference."""
    rank, size = bps.rank(), bps.size()
    gradients = [np.random.default_rng(r).standard_normal((1, 1)).astype(np.float32) for r in range(size)]
    model = line(bps.DistributedOptimizer(keras.optimizers.SGD(1.0)), weight=0.0)
    model.optimizer.apply([keras.ops.convert_to_tensor(gradients[rank])], model.trainable_variables)
    ranks = [n for n, _ in process.current().machines if n]
    mine = iter(gradients)
    wanted = reference_sum.reduce([[next(mine) for _ in range(n)] for n in ranks], average=True)
    return weight_of(model) == -float(wanted[0, 0])


def by_other_names():
    """Use Horovod's API, and the module's name in bpsfast.tensorflow."""
    import bpsfast.hvd.keras as hvd
    from bpsfast.hvd.keras import callbacks

    rank, size = hvd.rank(), hvd.size()
    hvd.init()
    assert hvd.is_initialized() and hvd.callbacks is callbacks
    total = sum(range(1, size + 1))
    mine = np.full(3, rank + 1, np.float32)
    assert (hvd.allreduce(mine, op=hvd.Sum) == total).all() and (hvd.allreduce(mine) == np.float32(total / size)).all()
    whole = np.array([-3 - rank, 3 + rank], np.int32)  # truncated towards zero, not rounded down
    sums = [sum(-3 - r for r in range(size)), sum(3 + r for r in range(size))]
    assert hvd.allreduce(whole, "whole").tolist() == [int(each / size) for each in sums]
    halves = hvd.allreduce(keras.ops.convert_to_tensor(whole), "halves", op=hvd.Sum, postscale_factor=0.5)
    assert keras.ops.convert_to_numpy(halves).tolist() == [int(each / 2) for each in sums]
    scaled = hvd.allreduce(keras.ops.convert_to_tensor(mine), "scaled", op=hvd.Sum, prescale_factor=0.5,
                           postscale_factor=4.0, compression=hvd.Compression.fp16)
    assert keras.ops.is_tensor(scaled) and (numpy(scaled) == 2 * total).all()
    model = line(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), gradient_predivide_factor=2.0,
                                          backward_passes_per_step=2), weight=2.0 + rank)
    fit(model, [1.0, 1.0 + rank], callbacks=[callbacks.BroadcastGlobalVariablesCallback(0),
                                             callbacks.LearningRateScheduleCallback(0.1, 0.5)])
    wanted = 2.0 - 0.05 * 2 * np.mean([2 * 2.0 * x * x for other in range(size) for x in (1.0, 1.0 + other)])
    if keras.backend.backend() == "tensorflow":
        import bpsfast.tensorflow.keras as other
        from bpsfast.tensorflow.keras.callbacks import MetricAverageCallback

        assert other is bps and MetricAverageCallback is bps.callbacks.MetricAverageCallback
    return weight_of(model), wanted
