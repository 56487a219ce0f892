"""A network in TensorFlow that reads handwritten digits on several ranks, with a custom loop, as in BytePS's example.

    bpsfast run -n 4 --nodes 2 --helpers 1 -- python examples/tensorflow_digits.py
    python examples/tensorflow_digits.py --alone 2,2          # the same in one process, bit for bit

Each rank has its own part of every batch. It needs tensorflow and scikit-learn.
"""
import argparse
import hashlib
import itertools

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import bpsfast.tensorflow as bps
from bpsfast.base import reference_sum

N_STEPS, N_SAMPLES, SIZES, RATE = 300, 32, (64, 48, 10), 0.2


def network(seed):
    """Return the variables of a perceptron with one hidden layer."""
    draw = np.random.default_rng(seed)
    found = []
    for n, m in itertools.pairwise(SIZES):
        found += [tf.Variable(draw.normal(0, (2 / n) ** 0.5, (n, m)).astype(np.float32)), tf.Variable(tf.zeros(m))]
    return found


def logits(variables, x):
    w0, b0, w1, b1 = variables
    return tf.nn.relu(x @ w0 + b0) @ w1 + b1


def loss(variables, x, y):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits(variables, x)))


def update(variables, gradients):
    for variable, gradient in zip(variables, gradients):
        variable.assign_sub(RATE * gradient)


def batches(x, y, size):
    """Yield each step's batch, cut into the parts of *size* ranks."""
    order = np.random.default_rng(0)
    for _ in range(N_STEPS):
        chosen = order.permutation(len(x))[:N_SAMPLES * size].reshape(size, N_SAMPLES)
        yield [(tf.constant(x[part]), tf.constant(y[part])) for part in chosen]


def train(x, y):
    """Train as one rank of a job."""
    bps.init()
    variables = network(bps.rank())

    @tf.function
    def step(x, y):
        with bps.DistributedGradientTape(tf.GradientTape()) as tape:
            value = loss(variables, x, y)
        update(variables, tape.gradient(value, variables))

    bps.broadcast_variables(variables, root_rank=0)  # ranks begin with different ones
    for parts in batches(x, y, bps.size()):
        step(*parts[bps.rank()])
    return f"rank {bps.rank()}", variables


def train_alone(x, y, ranks):
    """Train like *ranks* ranks of each node, in one process that adds gradients in the same order."""
    variables = network(0)

    @tf.function
    def gradients(x, y):
        with tf.GradientTape() as tape:
            value = loss(variables, x, y)
        return tape.gradient(value, variables)

    @tf.function
    def step(means):
        update(variables, means)

    def mean_of(*each):
        each = iter(gradient.numpy() for gradient in each)
        return tf.constant(reference_sum.reduce([[next(each) for _ in range(n)] for n in ranks], average=True))

    for parts in batches(x, y, sum(ranks)):
        step([mean_of(*each) for each in zip(*[gradients(*part) for part in parts])])
    return "alone", variables


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--alone", metavar="N,N", help="ranks of each node; train in this process alone")
    ranks = parser.parse_args().alone
    digits = load_digits()
    x, y = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    test, rest = slice(0, 300), slice(300, None)
    if ranks:
        who, variables = train_alone(x[rest], y[rest], [int(n) for n in ranks.split(",")])
    else:
        who, variables = train(x[rest], y[rest])
    accuracy = float((logits(variables, x[test]).numpy().argmax(1) == y[test]).mean())
    digest = hashlib.sha256(b"".join(variable.numpy().tobytes() for variable in variables))
    print(f"{who}: accuracy {accuracy:.3f}, parameters {digest.hexdigest()[:16]}", flush=True)
    if not ranks:
        bps.shutdown()


if __name__ == "__main__":
    main()
