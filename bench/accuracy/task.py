"""The task of `bench accuracy`: a small perceptron in NumPy learns scikit-learn's handwritten digits.

Each rank has half of each batch. Weights, batches and learning rates follow from the seed, so that trainings of one
seed differ only in the exchange of their gradients.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

#: Number of test images; there are 1,797 images.
N_TEST = 597
LAYERS = (64, 256, 128, 10)
BATCH = 32
_MOMENTUM = 0.9
_RATE = 0.2
_SPLIT_SEED = 7


class Digits(NamedTuple):
    """Images of shape (n, 64), float32 from 0 to 1, and labels of shape (n,), integers."""

    train_images: Array
    train_labels: Array
    test_images: Array
    test_labels: Array


def load() -> Digits:
    """Return the images, split by a fixed permutation."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(raw.target))
    images, labels = (raw.data[order] / 16.0).astype(np.float32), raw.target[order]
    return Digits(images[N_TEST:], labels[N_TEST:], images[:N_TEST], labels[:N_TEST])


def weights(seed: int) -> dict[str, Array]:
    """Return the initial weights by name, in forward order."""
    draw = np.random.default_rng(seed)
    found: dict[str, Array] = {}
    for layer, (n_in, n_out) in enumerate(itertools.pairwise(LAYERS)):
        found[f"{layer}.weight"] = (draw.standard_normal((n_in, n_out)) * np.sqrt(2 / n_in)).astype(np.float32)
        found[f"{layer}.bias"] = np.zeros(n_out, np.float32)
    return found


def rate_of(epoch: int, n_epochs: int) -> float:
    """Return the learning rate: a tenth in the last third, a hundredth in the last ninth."""
    return _RATE * (1.0 if 3 * epoch < 2 * n_epochs else 0.1 if 9 * epoch < 8 * n_epochs else 0.01)


def forward(net: Mapping[str, Array], images: Array) -> list[Array]:
    """Return the inputs of all layers, and the outputs of the last."""
    inputs = [images]
    for layer in range(len(LAYERS) - 1):
        z = inputs[-1] @ net[f"{layer}.weight"] + net[f"{layer}.bias"]
        inputs.append(z if layer == len(LAYERS) - 2 else np.maximum(z, 0))
    return inputs


def gradients(net: Mapping[str, Array], images: Array, labels: Array) -> dict[str, Array]:
    """Return the gradients of the mean cross entropy."""
    inputs = forward(net, images)
    odds = np.exp(inputs[-1] - inputs[-1].max(axis=1, keepdims=True))
    slope = odds / odds.sum(axis=1, keepdims=True)
    slope[np.arange(len(labels)), labels] -= 1
    slope /= len(labels)
    found: dict[str, Array] = {}
    for layer in reversed(range(len(LAYERS) - 1)):
        found[f"{layer}.weight"], found[f"{layer}.bias"] = inputs[layer].T @ slope, slope.sum(axis=0)
        slope = (slope @ net[f"{layer}.weight"].T) * (inputs[layer] > 0)
    return found


def accuracy(net: Mapping[str, Array], digits: Digits) -> float:
    """Return the fraction of test images that are classified correctly."""
    outputs = forward(net, digits.test_images)[-1]
    return float((outputs.argmax(axis=1) == digits.test_labels).mean())


def train(digits: Digits, seed: int, n_epochs: int, rank: int, n_ranks: int,
          mean: Callable[[dict[str, Array], float], Mapping[str, Array]]) -> dict[str, Array]:
    """Return the weights after *n_epochs*; *mean* averages a rank's gradients, which are used with the rate it gets."""
    net = weights(seed)
    for epoch in range(n_epochs):
        order = np.random.default_rng((seed, epoch)).permutation(len(digits.train_labels))
        rate = rate_of(epoch, n_epochs)
        for at in range(0, len(order) - BATCH + 1, BATCH):
            own = order[at:at + BATCH][rank::n_ranks]
            found = mean(gradients(net, digits.train_images[own], digits.train_labels[own]), rate)
            for name, weight in net.items():
                weight -= np.float32(rate) * found[name]
    return net
