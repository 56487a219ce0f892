"""Training with PyTorch that is tuned meanwhile: the same weights. (How fast: `bpsfast bench autotune`.)"""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

PROGRAM = """
import hashlib, os, time
import torch
import bpsfast.torch as bps
torch.set_num_threads(1)
bps.init()
torch.manual_seed(bps.rank())
width = int(os.environ["WIDTH"])
model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
bps.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01),
                                     named_parameters=model.named_parameters(),
                                     cross_barrier=os.environ["CROSSES"] == "1")
times = []
for step in range(int(os.environ["STEPS"])):
    begin = time.monotonic()
    x = torch.randn(8, width)
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    model(x).square().mean().backward()
    optimizer.step()
    times.append(time.monotonic() - begin)
weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print("rank", bps.rank(), "weights", weights, "times", *times)
bps.shutdown()
"""


def train(folder: Path, n_steps: int, *options: str, width: int = 1024, crosses: bool = False, tune: bool = False,
          **settings: object) -> tuple[str, list[float], dict]:
    """Train; return the weights' checksum, rank 0's step times in seconds, and what tuning said."""
    (folder / "train.py").write_text(PROGRAM)
    bpsfast = str(Path(sys.executable).with_name("bpsfast"))
    report = folder / "found.json"
    command = [bpsfast, "run", "-n", "2", "--nodes", "2", *options, "--timeout", "150", "--"]
    command += [sys.executable, "train.py"]
    if tune:
        command = [bpsfast, "tune", "--json", "-o", str(report), "--", *command]
    variables = {f"BPSFAST_{name.upper()}": str(value) for name, value in settings.items()}
    environ = {**os.environ, **variables, "WIDTH": str(width), "STEPS": str(n_steps), "CROSSES": str(int(crosses)),
               "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = dict(re.findall(r"rank (\d) weights (\w+ times .*)", done.stdout))
    weights, _, *times = ranks["0"].split()
    assert ranks["1"].split()[0] == weights
    return weights, [float(each) for each in times], json.loads(report.read_text()) if tune else {}


@pytest.mark.parametrize("crosses", [False, True])
def test_weights_are_those_of_an_untuned_run(tmp_path: Path, crosses: bool) -> None:
    options = "--set", "transport=tcp"
    before, _, _ = train(tmp_path, 75, *options, width=256, crosses=crosses)
    after, _, found = train(tmp_path, 75, *options, width=256, crosses=crosses, tune=True, partition_bytes=64_000,
                            fusion_bytes=8192)
    assert after == before
    assert found["is_over"] and len(found["trials"]) > 1
