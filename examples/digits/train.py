"""Train a convolutional net on handwritten digits, data-parallel over the ranks of a bpsfast job.

    bpsfast run -n 4 --nodes 2 --helpers 1 --set transport=tcp -- python examples/digits/train.py

What makes it distributed are the four lines with ``bps.``; the rest measures.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path

import data
import network
import numpy as np
import timing
import traffic

import bpsfast
from bpsfast import torch as bps
from bpsfast.trainer.process import current


def train(epochs: int, seed: int, show_steps: bool) -> tuple[network.nn.Module, list[float], dict]:
    """Return the trained network, this rank's losses, and what was measured (complete on rank 0)."""
    rank, size = bps.rank(), bps.size()
    network.deterministic(seed + rank)  # only rank 0's start counts
    digits = data.load()
    model = network.network()
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = bps.DistributedOptimizer(network.optimizer(model), named_parameters=model.named_parameters())

    losses: list[float] = []
    steps = [data.batches(len(digits.train_labels), size, network.MICRO_BATCH, epoch) for epoch in range(epochs)]
    n_steps = sum(map(len, steps))
    wire = traffic.Meter()
    wire.read()
    begin_ns = time.monotonic_ns()
    clock = timing.Clock()
    for epoch in range(epochs):
        for step in steps[epoch]:
            optimizer.zero_grad()
            loss = network.loss_of(model, digits, step[rank])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if rank == 0 and show_steps:
                print(f"step {len(losses)}/{n_steps}", flush=True)
        spent = clock.epoch()
        if rank == 0:
            mean_loss = np.mean(losses[-len(steps[epoch]) :])
            print(f"epoch {epoch + 1}/{epochs}  loss {mean_loss:.4f}  |  {spent}", flush=True)
    window_ns = (begin_ns, time.monotonic_ns())
    wire.read()
    names = [f"Gradient.{name}" for name, _ in model.named_parameters()]
    expected, ring = traffic.predicted(names, n_steps)
    measured = {
        "test_accuracy": network.accuracy(model, digits), "steps": n_steps, "window_ns": window_ns,
        "transports": current().transports, "wire_source": wire.source, "wire": wire.between(),
        "wire_predicted": expected, "wire_ring": ring,
    }
    return model, losses, measured


def save(out: Path, model: network.nn.Module, losses: list[float], measured: dict) -> None:
    """Let rank 0 write what all ranks have: the mean loss of each step, the parameters, the measurements."""
    mean_losses = bpsfast.push_pull(np.asarray(losses), name="losses")
    parameters = network.parameters(model)
    digest = hashlib.sha256(b"".join(value.tobytes() for value in parameters.values())).hexdigest()
    digests = {bps.broadcast_object(digest, rank) for rank in range(bps.size())}
    if bps.rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        arrays = {f"parameter.{name}": value for name, value in parameters.items()}
        np.savez(out / "job.npz", losses=mean_losses, **arrays)
        (out / "job.json").write_text(json.dumps({**measured, "ranks": bps.size(), "ranks_agree": len(digests) == 1}))


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    parser.add_argument("--show-steps", action="store_true", help="print a line per step, for a progress bar to read")
    options = parser.parse_args()
    bps.init()
    model, losses, measured = train(options.epochs, options.seed, options.show_steps)
    save(options.out, model, losses, measured)
    bps.shutdown()


if __name__ == "__main__":
    main()
