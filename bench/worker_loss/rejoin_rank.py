"""One worker of a `bench worker_loss` trial in which a lost worker is replaced: trains a small network on digits.

    python -m bpsfast.bench.worker_loss.rejoin_rank FOLDER N_STEPS VICTIM STEP

Worker VICTIM kills itself in STEP (-1: no worker does). Each worker writes a `rejoin.WorkerHistory` to FOLDER at the
end.
Besides the real gradients a step sleeps, as in the other trials, so that two cores do not compute for three ranks.
"""
from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch

import bpsfast
import bpsfast.torch as bps
from bpsfast import elastic
from bpsfast.bench.accuracy.task import load
from bpsfast.elastic.coordinator_client import current_client
from bpsfast.torch.elastic import ElasticSampler, TorchState

from .rejoin import WorkerHistory
from .training import COMPUTE_S

_BATCH = 16


def main(arguments: list[str]) -> int:
    """Train to the end."""
    folder, n_steps, victim, at_step = Path(arguments[0]), *map(int, arguments[1:])
    torch.set_num_threads(1)
    digits = load()
    train_set = torch.utils.data.TensorDataset(torch.from_numpy(digits.train_images),
                                               torch.from_numpy(digits.train_labels))
    history = WorkerHistory(pid=os.getpid(), comes_s=time.monotonic())
    bps.init()
    member = current_client()
    assert member is not None, "started by `bpsfast run --elastic`"
    torch.manual_seed(member.number)  # all get the weights of one
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
                                         model.named_parameters())
    sampler = ElasticSampler(train_set)
    state = TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0)

    def digest() -> str:
        return hashlib.blake2b(b"".join(p.detach().numpy().tobytes() for p in model.parameters()),
                               digest_size=8).hexdigest()

    @elastic.run
    def train(state: TorchState) -> None:
        history.jobs.append((member.job, bps.rank()))
        history.first_digests.append(digest())
        while state.step < n_steps:
            for batch, (x, y) in enumerate(torch.utils.data.DataLoader(train_set, _BATCH, sampler=sampler)):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                time.sleep(COMPUTE_S)
                if (member.number, state.step) == (victim, at_step):
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                state.step += 1
                sampler.record_batch(batch, _BATCH)
                history.steps.append(state.step)
                history.ends_s.append(time.monotonic())
                history.digests.append(digest())
                history.n_members.append(len(bpsfast.members()))
                if state.step == n_steps:
                    return
                state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)

    train(state)
    with torch.no_grad():
        found = model(torch.from_numpy(digits.test_images)).argmax(1)
        history.accuracy = float((found == torch.from_numpy(digits.test_labels)).float().mean())
    history.write(folder / f"worker_{member.number}.json")
    bps.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
