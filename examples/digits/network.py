"""The network, its optimizer, one micro-batch, and the test: what both trainings have in common."""
from __future__ import annotations

import numpy as np
import torch
from data import Digits
from torch import nn

MICRO_BATCH = 16


def deterministic(seed: int) -> None:
    """Make this process compute the same bits each time: one thread, deterministic algorithms, a fixed seed."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)


def network() -> nn.Sequential:
    """Return a convolutional net with 1.1 million parameters; most of them are in the first linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * 4 * 4, 1024), nn.ReLU(),
        nn.Linear(1024, 10),
    )


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of both trainings."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: nn.Module, digits: Digits, indexes: np.ndarray) -> torch.Tensor:
    """Return the mean cross entropy of one micro-batch."""
    images = torch.from_numpy(digits.train_images[indexes])
    labels = torch.from_numpy(digits.train_labels[indexes])
    return nn.functional.cross_entropy(model(images), labels)


def accuracy(model: nn.Module, digits: Digits) -> float:
    """Return the share of test images that are recognised."""
    with torch.no_grad():
        guesses = model(torch.from_numpy(digits.test_images)).argmax(dim=1).numpy()
    return float((guesses == digits.test_labels).mean())


def parameters(model: nn.Module) -> dict[str, np.ndarray]:
    """Return copies of all parameters by name."""
    return {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
