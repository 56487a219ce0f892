"""A Keras network that reads handwritten digits, trained by fit() on several ranks, on any backend of Keras 3.

    KERAS_BACKEND=jax bpsfast run -n 4 --nodes 2 --helpers 1 -- python examples/keras_digits.py
    KERAS_BACKEND=jax python examples/keras_digits.py --alone 2,2          # the same in one process, bit for bit

Each rank has its own part of every batch. It needs keras, tensorflow, torch or jax (with optax), and scikit-learn.
"""
import argparse
import hashlib

import keras
import numpy as np
from sklearn.datasets import load_digits

import bpsfast.keras as bps
from bpsfast.base import reference_sum

N_EPOCHS, N_SAMPLES = 20, 32


def network(seed):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([
        keras.Input((64,)), keras.layers.Dense(48, activation="relu"), keras.layers.Dense(10)])


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def part_of(array, rank, size):
    """Return the samples of one rank in all steps of an epoch."""
    n_steps = len(array) // (size * N_SAMPLES)
    return np.concatenate([array[(step * size + rank) * N_SAMPLES:][:N_SAMPLES] for step in range(n_steps)])


def train(x, y):
    """Train as one rank of a job."""
    bps.init()
    model = network(seed=bps.rank())  # weights differ until rank 0's are broadcast
    model.compile(bps.DistributedOptimizer(keras.optimizers.Adam(5e-3)), loss(), metrics=["accuracy"])
    callbacks = [bps.callbacks.BroadcastGlobalVariablesCallback(0), bps.callbacks.MetricAverageCallback()]
    x, y = (part_of(array, bps.rank(), bps.size()) for array in (x, y))
    model.fit(x, y, N_SAMPLES, N_EPOCHS, shuffle=False, callbacks=callbacks, verbose=2 if bps.rank() == 0 else 0)
    return f"rank {bps.rank()}", model


def train_alone(x, y, ranks):
    """Train like *ranks* ranks of each node, in one process that adds gradients in the same order."""
    model, optimizer, size = network(seed=0), keras.optimizers.Adam(5e-3), sum(ranks)
    optimizer.build(model.trainable_variables)
    gradients, update = functions_of(model, optimizer)

    def mean_of(*parts):
        parts = iter(parts)
        return reference_sum.reduce([[next(parts) for _ in range(n)] for n in ranks], average=True)

    parts = [(part_of(x, rank, size), part_of(y, rank, size)) for rank in range(size)]
    for _ in range(N_EPOCHS):
        for step in range(0, len(parts[0][0]), N_SAMPLES):
            every = [gradients(px[step:step + N_SAMPLES], py[step:step + N_SAMPLES]) for px, py in parts]
            update([mean_of(*each) for each in zip(*every)])
    return "alone", model


def functions_of(model, optimizer):
    """Return a function that computes gradients as arrays, and one that applies them, compiled as in fit()."""
    cross_entropy, variables = loss(), model.trainable_variables
    arrays = keras.ops.convert_to_numpy
    if keras.backend.backend() == "torch":
        def gradients(x, y):
            model.zero_grad()
            cross_entropy(y, model(x, training=True)).backward()
            return [arrays(variable.value.grad) for variable in variables]

        def update(means):
            optimizer.apply([keras.ops.convert_to_tensor(each) for each in means], variables)

        return gradients, update
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        @tf.function
        def compute(x, y):
            with tf.GradientTape() as tape:
                value = cross_entropy(y, model(x, training=True))
            return tape.gradient(value, variables)

        apply = tf.function(lambda means: optimizer.apply(means, variables))
        return lambda x, y: [arrays(each) for each in compute(tf.constant(x), tf.constant(y))], \
            lambda means: apply([tf.constant(each) for each in means])
    import jax

    def value(values, x, y):
        return cross_entropy(y, model.stateless_call(values, [], x, training=True)[0])

    compute = jax.jit(jax.grad(value))
    apply = jax.jit(optimizer.stateless_apply)

    def update(means):
        values, state = apply([v.value for v in optimizer.variables], means, [v.value for v in variables])
        for variable, value in zip([*variables, *optimizer.variables], [*values, *state]):
            variable.assign(value)

    return lambda x, y: [arrays(each) for each in compute([v.value for v in variables], x, y)], update


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--alone", metavar="N,N", help="ranks of each node; train in this process alone")
    ranks = parser.parse_args().alone
    digits = load_digits()
    x, y = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    test, rest = slice(0, 300), slice(300, None)
    if ranks:
        who, model = train_alone(x[rest], y[rest], [int(n) for n in ranks.split(",")])
    else:
        who, model = train(x[rest], y[rest])
    accuracy = float((keras.ops.convert_to_numpy(model(x[test])).argmax(1) == y[test]).mean())
    digest = hashlib.sha256(b"".join(keras.ops.convert_to_numpy(weight).tobytes() for weight in model.weights))
    print(f"{who}: accuracy {accuracy:.3f}, parameters {digest.hexdigest()[:16]}", flush=True)
    if not ranks:
        bps.shutdown()


if __name__ == "__main__":
    main()
