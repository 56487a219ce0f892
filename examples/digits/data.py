"""The handwritten digits that ship inside scikit-learn, and which images each rank sees in each step."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

N_TEST = 360
SPLIT_SEED = 7


class Digits(NamedTuple):
    """Images are (n, 1, 8, 8) float32 from 0 to 1, labels (n,) int64."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load() -> Digits:
    """Return the 1797 images, split into training and test by a fixed permutation."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    images = (raw.images / 16.0).astype(np.float32)[:, None]
    order = np.random.default_rng(SPLIT_SEED).permutation(len(images))
    test, train = order[:N_TEST], order[N_TEST:]
    return Digits(images[train], raw.target[train].astype(np.int64), images[test], raw.target[test].astype(np.int64))


def batches(n_images: int, n_ranks: int, micro_batch: int, epoch: int) -> np.ndarray:
    """Return indexes of shape (steps, ranks, micro_batch): a new order each epoch, the same in every process.

    What does not fill a last step is left out, so that all micro-batches have one shape.
    """
    order = np.random.default_rng(1000 + epoch).permutation(n_images)
    step = n_ranks * micro_batch
    return order[: n_images // step * step].reshape(-1, n_ranks, micro_batch)
