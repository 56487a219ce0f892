"""Train in one process what `train.py` trains on many ranks, and save losses and parameters.

It imports nothing of bpsfast. It computes every rank's micro-batch in turn, each with a backward pass of its own, and
adds the gradients with NumPy in the order that bpsfast promises: the ranks of a node, then the nodes, then one
division. So the parameters of the two trainings must be equal to the last bit.
"""
from __future__ import annotations

import argparse
import time
from pathlib import Path

import data
import network
import numpy as np
import torch


def averaged(gradients: list[np.ndarray], ranks_per_node: int) -> np.ndarray:
    """Return the mean of one gradient per rank: sums per node in rank order, their sum in node order, one division."""
    partials = []
    for first in range(0, len(gradients), ranks_per_node):
        partial = gradients[first]
        for gradient in gradients[first + 1 : first + ranks_per_node]:
            partial = partial + gradient
        partials.append(partial)
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    return total / np.float32(len(gradients))


def train(n_ranks: int, n_nodes: int, epochs: int, seed: int) -> tuple[list[float], dict[str, np.ndarray], float]:
    """Return the loss of each step, the final parameters, and the test accuracy."""
    network.deterministic(seed)
    digits = data.load()
    model = network.network()
    optimizer = network.optimizer(model)
    losses = []
    for epoch in range(epochs):
        for step in data.batches(len(digits.train_labels), n_ranks, network.MICRO_BATCH, epoch):
            gradients = []
            for indexes in step:
                optimizer.zero_grad()
                loss = network.loss_of(model, digits, indexes)
                loss.backward()
                gradients.append([parameter.grad.numpy().copy() for parameter in model.parameters()])
                losses.append(loss.item())
            for parameter, of_ranks in zip(model.parameters(), zip(*gradients)):
                parameter.grad.copy_(torch.from_numpy(averaged(list(of_ranks), n_ranks // n_nodes)))
            optimizer.step()
    per_step = np.reshape(losses, (-1, n_ranks)).mean(axis=1)
    return per_step.tolist(), network.parameters(model), network.accuracy(model, digits)


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    options = parser.parse_args()
    begin = time.monotonic()
    losses, parameters, accuracy = train(options.ranks, options.nodes, options.epochs, options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    arrays = {f"parameter.{name}": value for name, value in parameters.items()}
    np.savez(options.out / "single.npz", losses=losses, **arrays)
    print(f"one process: loss {losses[-1]:.4f}, test accuracy {accuracy:.4f}, {time.monotonic() - begin:.1f} s")


if __name__ == "__main__":
    main()
