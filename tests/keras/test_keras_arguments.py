"""bpsfast.keras and bpsfast.hvd.keras without a job: arguments that are refused, public names, names of variables."""
from __future__ import annotations

import inspect

import pytest

from tests.support.keras_ranks import bps, keras, line, raised

import bpsfast.hvd.keras as hvd  # isort: skip
from bpsfast import compression  # isort: skip
from bpsfast.keras.variables import common_names

callbacks = bps.callbacks

# Keras and PyTorch make arrays in a way of which NumPy warns.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def sgd(**options):
    return keras.optimizers.SGD(0.1, **options)


def distributed():
    return bps.DistributedOptimizer(sgd())


@pytest.mark.parametrize("wrong", [
    lambda: bps.DistributedOptimizer("sgd"),
    lambda: bps.DistributedOptimizer(keras.optimizers.SGD),
    lambda: bps.DistributedOptimizer(distributed()),
    lambda: bps.DistributedOptimizer(sgd(), compression="fp16"),
    lambda: bps.DistributedOptimizer(sgd(), compression=compression.onebit),
    lambda: bps.load_model("nowhere.keras", custom_optimizers=["SGD"]),
    lambda: bps.load_model("nowhere.keras", compression=3),
    lambda: bps.broadcast_global_variables(0, 5),
    lambda: callbacks.BroadcastGlobalVariablesCallback(-1),
    lambda: callbacks.BroadcastGlobalVariablesCallback("0"),
    lambda: callbacks.LearningRateScheduleCallback(-1),
    lambda: callbacks.LearningRateScheduleCallback("high"),
    lambda: callbacks.LearningRateScheduleCallback(1, start_epoch=3, end_epoch=2),
    lambda: callbacks.LearningRateScheduleCallback(1, steps_per_epoch=0),
    lambda: callbacks.LearningRateScheduleCallback(1, initial_lr=float("nan")),
    lambda: callbacks.LearningRateWarmupCallback(warmup_epochs=-1),
    lambda: hvd.DistributedOptimizer(sgd(), op=3),
    lambda: hvd.DistributedOptimizer(sgd(), gradient_predivide_factor=0.0),
    lambda: hvd.DistributedOptimizer(sgd(), gradient_predivide_factor=2.0, op=hvd.Sum),
    lambda: hvd.DistributedOptimizer(sgd(), backward_passes_per_step=0),
    lambda: hvd.DistributedOptimizer(sgd(gradient_accumulation_steps=2), backward_passes_per_step=2),
    lambda: hvd.allreduce(1.0, average=True, op=hvd.Sum),
    lambda: hvd.allreduce(1.0, op=7),
    lambda: hvd.allreduce(1.0, average="a name"),
    lambda: hvd.allreduce(1.0, average=1),
    lambda: hvd.allreduce(1.0, prescale_factor="2"),
    lambda: hvd.allreduce(1.0, postscale_factor=None),
    lambda: hvd.DistributedOptimizer(sgd(), gradient_predivide_factor="2"),
    lambda: hvd.DistributedOptimizer(sgd(), backward_passes_per_step="2"),
])
def test_bad_arguments(wrong):
    kind, text = raised(wrong)
    assert kind == "ConfigError" and len(text) > 20, (kind, text)


@pytest.mark.parametrize("wrong", [
    lambda: bps.push_pull("text"),
    lambda: bps.broadcast(object(), 0),
    lambda: bps.broadcast_global_variables(0),
    lambda: keras.optimizers.LossScaleOptimizer(distributed()),
    lambda: hvd.init(process_sets=[1]),
    lambda: hvd.allreduce(1.0, compression=compression.onebit()),
    lambda: hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[1]),
])
def test_what_is_not_supported(wrong):
    assert raised(wrong)[0] == "UnsupportedError"


def test_without_init():
    assert raised(bps.push_pull, 1.0)[0] == raised(bps.rank)[0] == "ClosedError" and not hvd.is_initialized()
    model = line(distributed())
    assert raised(model.optimizer.apply, [keras.ops.zeros((1, 1))], model.trainable_variables)[0] == "ClosedError"


def test_learning_rates_that_cannot_be_set():
    for optimizer in (keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)),
                      keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(sgd()))):
        callback = callbacks.LearningRateScheduleCallback(0.5)
        callback.set_model(line(optimizer))
        kind, text = raised(callback.on_train_begin)
        assert kind == "ConfigError" and "cannot be set" in text
    callback = callbacks.LearningRateScheduleCallback(lambda epoch: 1.0, staircase=False)
    callback.set_model(line(sgd()))
    callback.set_params({"steps": None})
    kind, text = raised(callback.on_train_begin)
    assert kind == "ConfigError" and "steps_per_epoch" in text


def test_the_arguments_are_those_of_byteps_and_horovod():
    def names(function):
        return list(inspect.signature(function).parameters)

    assert names(bps.DistributedOptimizer)[:6] == ["optimizer", "name", "device_dense", "device_sparse", "compression",
                                                  "sparse_as_dense"]
    assert names(bps.push_pull) == ["value", "name", "average"]
    assert names(bps.broadcast) == ["value", "root_rank", "name"]
    assert names(bps.load_model)[:4] == ["filepath", "custom_optimizers", "custom_objects", "compression"]
    assert names(callbacks.LearningRateScheduleCallback) == [
        "multiplier", "start_epoch", "end_epoch", "staircase", "momentum_correction", "steps_per_epoch", "initial_lr"]
    assert names(callbacks.LearningRateWarmupCallback) == ["warmup_epochs", "momentum_correction", "steps_per_epoch",
                                                           "verbose", "initial_lr"]
    assert names(hvd.callbacks.LearningRateScheduleCallback)[:2] == ["initial_lr", "multiplier"]
    assert names(hvd.callbacks.LearningRateWarmupCallback)[:2] == ["initial_lr", "warmup_epochs"]


def test_horovods_passes():
    found = hvd.DistributedOptimizer(sgd(), backward_passes_per_step=4, gradient_predivide_factor=2.0)
    assert found.gradient_accumulation_steps == 4
    reduction = found._bpsfast_reduction
    assert reduction.average and (reduction.prescale, reduction.postscale) == (0.5, 8.0)
    mean = hvd.DistributedOptimizer(sgd(), backward_passes_per_step=4, average_aggregated_gradients=True)
    assert mean._bpsfast_reduction.postscale == 1.0


def test_names_do_not_depend_on_keras_numbers():
    mine = ["sequential/dense/kernel", "sequential/dense_1/kernel", "adam/sequential_dense_1_kernel_momentum"]
    other = ["sequential_7/dense_4/kernel", "sequential_7/dense_5/kernel",
             "adam_2/sequential_7_dense_5_kernel_momentum"]
    assert common_names(mine) == common_names(other) and len(set(common_names(mine))) == 3
