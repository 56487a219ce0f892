"""torchrun's elastic agent restarts all ranks when one is lost: `init` works again each time."""
from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from bpsfast.launch.daemons import clean_environment, reserve_port

pytest.importorskip("torch")

_PROGRAM = """
import json, os, signal, sys
from pathlib import Path
import torch, bpsfast.torch as bps
from bpsfast import elastic
folder, restart = Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
victim = [1, 0, None][restart]
bps.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
state = elastic.TorchState(model=model, optimizer=optimizer, step=0)
if bps.rank() == 0 and (folder / "checkpoint").exists():
    kept = torch.load(folder / "checkpoint")
    model.load_state_dict(kept["model"])
    state.step = kept["step"]

@elastic.run
def train(state):
    begun = state.step
    while state.step < 30:
        optimizer.zero_grad()
        (model(torch.full((2, 4), float(bps.rank() + state.step))) ** 2).mean().div(1e4).backward()
        if state.step == 10 * (restart + 1) and bps.rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        state.step += 1
        state.commit()
        if bps.rank() == 0:
            torch.save({"model": model.state_dict(), "step": state.step}, folder / "new")
            os.replace(folder / "new", folder / "checkpoint")
    return begun

begun = train(state)
weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
(folder / f"rank{bps.rank()}").write_text(json.dumps([restart, begun, weights]))
bps.shutdown()
"""


def torchrun(folder, *options):
    command = [sys.executable, "-m", "torch.distributed.run", *options, folder / "train.py", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=160, check=False,
                          env={**clean_environment(os.environ), "BPSFAST_TIMEOUT_S": "60", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank{rank}").read_text()) for rank in range(2)]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_two_losses_and_two_restarts(tmp_path, rendezvous):
    (tmp_path / "train.py").write_text(_PROGRAM)
    with reserve_port("127.0.0.1") as reserved:
        port = str(reserved.getsockname()[1])
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0") if rendezvous == "c10d" else (
        "--master-addr", "127.0.0.1", "--master-port", port)
    found = torchrun(tmp_path, "--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "2", *where)
    assert found[0][:2] == [2, 20] and found[0] == found[1]
