"""A training in the shape of Horovod's elastic example for PyTorch: FOLDER OP [DEED]...

OP is that of the optimizer. A deed ``MEMBER@STEP`` kills worker MEMBER in STEP, between backward and step;
``MEMBER~STEP`` sends it SIGTERM, after which all end together (`bpsfast.preempted`); ``+STEP`` makes worker 0 write the
file *add* in STEP, and all wait until there is one rank more.
"""
from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import bpsfast
import bpsfast.hvd as hvd
from bpsfast.elastic.coordinator_client import current_client

_BATCH, _EPOCHS, _N, _RATE = 8, 2, 480, 0.01


def main() -> None:
    folder, op, *deeds = sys.argv[1:]
    hvd.init()
    client = current_client()
    assert client is not None, "bpsfast run --elastic"
    number = client.number
    torch.manual_seed(number)  # all ranks get the weights of one
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=_RATE * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=getattr(hvd, op))
    inputs = torch.randn(_N, 20, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(torch.arange(_N), inputs, inputs.sum(1, keepdim=True))
    sampler = hvd.elastic.ElasticSampler(data)
    sizes = []

    def on_state_reset() -> None:
        sizes.append(hvd.size())
        for group in optimizer.param_groups:
            group["lr"] = _RATE * hvd.size()

    def in_step(state: hvd.elastic.TorchState) -> None:
        if f"{number}@{state.steps}" in deeds:
            os.kill(os.getpid(), signal.SIGKILL)
        if f"{number}~{state.steps}" in deeds:
            os.kill(os.getpid(), signal.SIGTERM)
        if f"+{state.steps}" in deeds and number == 0:
            (Path(folder) / "add").touch()

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> str:
        while state.epoch <= _EPOCHS:
            loader = torch.utils.data.DataLoader(data, _BATCH, sampler=state.sampler)
            for batch_idx, (indices, x, y) in enumerate(loader):
                assert indices.tolist() == state.sampler.get_indices(batch_idx, _BATCH)
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                in_step(state)
                optimizer.step()
                used = hvd.allreduce(torch.bincount(indices, minlength=_N), op=hvd.Sum, name="used")
                state.used = (*state.used, (state.epoch, used.nonzero().flatten().tolist()))
                state.steps += 1
                state.sampler.record_batch(batch_idx, _BATCH)
                if bpsfast.preempted():
                    return "preempted"
                while f"+{state.steps - 1}" in deeds and hvd.size() == 2:
                    state.commit()
                    time.sleep(0.05)
                state.commit()
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
        return "trained"

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=1, steps=0, used=())
    state.register_reset_callbacks([on_state_reset])
    how = train(state)
    everybody = hvd.allgather_object(number)
    found = {"how": how, "size": hvd.size(), "sizes": sizes, "used": state.used, "everybody": everybody,
             "weights": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
             "rate": optimizer.param_groups[0]["lr"], "processed": sorted(sampler.processed_indices)}
    (Path(folder) / f"{number}.json").write_text(json.dumps(found))
    hvd.shutdown()


if __name__ == "__main__":
    main()
