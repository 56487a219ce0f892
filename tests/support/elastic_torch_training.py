"""A training with PyTorch that survives lost workers: FOLDER KIND MEMBER STEP MOMENT.

Worker MEMBER kills itself in STEP at MOMENT: before or after backward, after the step, or instead of making the model.

KIND: opt (`DistributedOptimizer`), cross (with cross_barrier), ddp (`DistributedDataParallel`).
"""
from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

import bpsfast.torch as bps
from bpsfast import elastic
from bpsfast.elastic.coordinator_client import current_client

_BATCH = 8


def main() -> None:
    folder, kind, victim, at_step, moment = sys.argv[1:]
    bps.init()
    member = current_client()
    number = member.number if member is not None else bps.rank()
    torch.manual_seed(number)  # all ranks get the weights of one
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
    model.register_buffer("unused", torch.zeros(1))  # DistributedDataParallel broadcasts rank 0's
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if kind == "ddp":
        if moment == "making" and str(number) == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        model = bps.DistributedDataParallel(model)
    else:
        optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters(), cross_barrier=kind == "cross")
    inputs = torch.randn(480, 20, generator=torch.Generator().manual_seed(1))
    numbered = torch.utils.data.TensorDataset(torch.arange(480), inputs, inputs.sum(1, keepdim=True))
    sampler = elastic.ElasticSampler(numbered)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
    state = elastic.TorchState(model=model, optimizer=optimizer, rates=rates, sampler=sampler, epoch=0, steps=0,
                               used=())

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        while state.epoch < 2:
            loader = torch.utils.data.DataLoader(numbered, _BATCH, sampler=sampler)
            for batch, (indices, x, y) in enumerate(loader):
                optimizer.zero_grad()
                loss = (model(x) - y).square().mean()
                is_to_die = (str(number), str(state.steps)) == (victim, at_step)
                if is_to_die and moment == "before":
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
                if is_to_die and moment == "after":
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                if is_to_die:
                    os.kill(os.getpid(), signal.SIGKILL)
                rates.step()
                state.steps += 1
                used = bps.push_pull(torch.bincount(indices, minlength=480), average=False, name="used")
                state.used = (*state.used, (state.epoch, used.nonzero().flatten().tolist()))
                sampler.record_batch(batch, _BATCH)
                state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)

    train(state)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    found = {"size": bps.size(), "weights": weights, "used": state.used, "rate": rates.get_last_lr()}
    (Path(folder) / f"{number}.json").write_text(json.dumps(found))
    bps.shutdown()


if __name__ == "__main__":
    main()
