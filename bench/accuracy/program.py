"""One rank of `bench accuracy`: trains the task with each codec and seed, one after another, in one job.

    python -m bpsfast.bench.accuracy.program JSON       {"codecs": ["", "onebit"], "n_seeds": 2, "n_epochs": 20}
"""
from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import bpsfast
from bpsfast.bench.accuracy import task
from bpsfast.bench.harness import job_output
from bpsfast.tools.planner.prediction import parse


def main(arguments: Sequence[str]) -> int:
    """Run one rank from `init` to `shutdown`; print the results."""
    options = json.loads(arguments[0])
    bpsfast.init()
    digits = task.load()
    runs = [_run(digits, codec, seed, options["n_epochs"])
            for seed in range(options["n_seeds"]) for codec in options["codecs"]]
    job_output.tell(bpsfast.rank(), runs=runs)
    bpsfast.shutdown()
    return 0


def _run(digits: task.Digits, codec: str, seed: int, n_epochs: int) -> dict[str, Any]:
    """Train once, with tensor names that no other training uses, so that none shares state with it."""
    shapes = {name: weight.shape for name, weight in task.weights(seed).items()}
    gradients = bpsfast.Gradients({name: (shape, np.float32) for name, shape in shapes.items()},
                                  prefix=f"{codec or 'uncompressed'} {seed} ",
                                  compression=parse(codec) if codec else None)

    def mean(found: dict[str, task.Array], rate: float) -> Mapping[str, task.Array]:
        gradients.learning_rate = rate
        for name, gradient in found.items():
            gradients[name][...] = gradient
            gradients.ready(name)
        means = {name: gradients.wait(name) for name in gradients}
        gradients.step()
        return means

    before = bpsfast.stats().sent_bytes
    net = task.train(digits, seed, n_epochs, bpsfast.rank(), bpsfast.size(), mean)
    weights = hashlib.sha256(b"".join(net[name].tobytes() for name in sorted(net))).hexdigest()
    return {"codec": codec, "seed": seed, "accuracy": task.accuracy(net, digits), "weights": weights,
            "sent_nbytes": bpsfast.stats().sent_bytes - before}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
