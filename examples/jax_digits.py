"""A network in JAX and optax that reads handwritten digits, on several ranks; each step is a single jit.

    bpsfast run -n 4 --nodes 2 --helpers 1 -- python examples/jax_digits.py
    python examples/jax_digits.py --alone 2,2          # the same in one process, bit for bit

Each rank has its own part of every batch. It needs jax, optax and scikit-learn.
"""
import argparse
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import bpsfast.jax as bps
from bpsfast.base import reference_sum

N_STEPS, N_SAMPLES, SIZES = 300, 32, (64, 48, 10)


def network(key):
    """Return the parameters of a perceptron with one hidden layer."""
    keys = jax.random.split(key, len(SIZES) - 1)
    return {f"layer{i}": {"w": jax.random.normal(k, (n, m)) * (2 / n) ** 0.5, "b": jnp.zeros(m)}
            for i, (k, n, m) in enumerate(zip(keys, SIZES[:-1], SIZES[1:]))}


def logits(params, x):
    hidden = jax.nn.relu(x @ params["layer0"]["w"] + params["layer0"]["b"])
    return hidden @ params["layer1"]["w"] + params["layer1"]["b"]


def loss(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()


def batches(x, y, size):
    """Yield each step's batch, cut into the parts of *size* ranks."""
    order = np.random.default_rng(0)
    for _ in range(N_STEPS):
        chosen = order.permutation(len(x))[:N_SAMPLES * size].reshape(size, N_SAMPLES)
        yield [(x[part], y[part]) for part in chosen]


def train(x, y):
    """Train as one rank of a job."""
    bps.init()
    params = bps.broadcast(network(jax.random.key(bps.rank())), root_rank=0)  # ranks begin with different ones
    optimizer = bps.DistributedOptimizer(optax.adam(5e-3))
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, x, y):
        updates, state = optimizer.update(jax.grad(loss)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    for parts in batches(x, y, bps.size()):
        params, state = step(params, state, *parts[bps.rank()])
    return f"rank {bps.rank()}", params


def train_alone(x, y, ranks):
    """Train like *ranks* ranks of each node, in one process that adds gradients in the same order."""
    params = network(jax.random.key(0))
    optimizer = optax.adam(5e-3)
    state = optimizer.init(params)
    gradients = jax.jit(jax.grad(loss))

    @jax.jit
    def step(params, state, mean):
        updates, state = optimizer.update(mean, state, params)
        return optax.apply_updates(params, updates), state

    def mean_of(*leaves):
        leaves = iter(np.asarray(leaf) for leaf in leaves)
        return reference_sum.reduce([[next(leaves) for _ in range(n)] for n in ranks], average=True)

    for parts in batches(x, y, sum(ranks)):
        mean = jax.tree_util.tree_map(mean_of, *[gradients(params, *part) for part in parts])
        params, state = step(params, state, mean)
    return "alone", params


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--alone", metavar="N,N", help="ranks of each node; train in this process alone")
    ranks = parser.parse_args().alone
    digits = load_digits()
    x, y = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    test, rest = slice(0, 300), slice(300, None)
    if ranks:
        who, params = train_alone(x[rest], y[rest], [int(n) for n in ranks.split(",")])
    else:
        who, params = train(x[rest], y[rest])
    accuracy = float((logits(params, x[test]).argmax(1) == y[test]).mean())
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree_util.tree_leaves(params)))
    print(f"{who}: accuracy {accuracy:.3f}, parameters {digest.hexdigest()[:16]}", flush=True)
    if not ranks:
        bps.shutdown()


if __name__ == "__main__":
    main()
