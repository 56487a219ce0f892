"""Errors with packs of parameters: failing passes, parameters that change, states of ended jobs."""
from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel

from bpsfast.orchestration.errors import MismatchError
from bpsfast.torch.hooks import CompressionState, onebit_hook, randomk_hook
from tests.support.packed_training import SHAPE, Deep, Net, again, group, made, train, weights


@pytest.fixture
def path():
    with tempfile.TemporaryDirectory(prefix="bpsfast-packs-") as folder:
        yield str(Path(folder) / "store")


def two_hooks(path):
    model, optimizer, state = made("two hooks", path)
    train(model, optimizer, range(1))
    state.k = 0.5
    try:
        train(model, optimizer, range(1))
    except Exception as exc:
        return str(exc)
    finally:
        dist.destroy_process_group()


def test_options_stay_as_they_were_first_used(shared_job, path):
    for text in shared_job(**SHAPE).run(two_hooks, path):
        assert "'two hooks' has compressed by" in text and "each hook needs a CompressionState of its own" in text


def failing(path, fail_at):
    """All ranks fail during the third backward pass, and continue with the state that they have."""
    model, optimizer, state = made("failing", path, net=Deep)
    train(model, optimizer, range(2))
    with pytest.raises(RuntimeError, match="in the midst of backward"):
        model(torch.randn(8, 50), fail_at).sum().backward()
    n_left = sum(bool(pack._arrived) for pack in state._packs.packs)
    model = again(model, state)
    train(model, optimizer, range(2, 4))
    assert not any(pack._arrived for pack in state._packs.packs)
    dist.destroy_process_group()
    return n_left, weights(model)


def test_training_goes_on_after_a_backward_pass_that_failed(shared_job, path):
    n_left = 0
    for fail_at in (2, 3, 4):
        results = shared_job(**SHAPE).run(failing, f"{path} {fail_at}", fail_at)
        assert len(set(results)) == 1
        n_left += results[0][0]
    assert n_left, "a pack had some of its gradients, which are not to be taken for the next pass's"


def changed(path):
    """The same parameters in another dtype."""
    model, optimizer, state = made("changed", path)
    train(model, optimizer, range(1))
    with pytest.raises(MismatchError, match="comes as float64, but came with"):
        model = again(DistributedDataParallel(model.module.double()), state)
        model(torch.randn(8, 50).double()).sum().backward()
    model = DistributedDataParallel(Net())
    model.register_comm_hook(state, fp16_compress_wrapper(randomk_hook))
    with pytest.raises(Exception, match="each model needs a CompressionState of its own"):
        model(torch.randn(8, 50)).sum().backward()
    dist.destroy_process_group()


def test_parameters_that_change_their_dtype_are_refused(shared_job, path):
    shared_job(**SHAPE).run(changed, path)


def sparse(path):
    group(path)
    model = DistributedDataParallel(torch.nn.Embedding(100, 8, sparse=True))
    model.register_comm_hook(CompressionState(name="sparse"), onebit_hook)
    try:
        model(torch.tensor([1, 2])).sum().backward()
    except Exception as exc:
        return str(exc)
    finally:
        dist.destroy_process_group()


def test_sparse_gradients_are_refused_in_words(shared_job, path):
    for text in shared_job(**SHAPE).run(sparse, path):
        assert "sparse=False in the embedding" in text


SECOND_JOB = """
import os, sys, torch, torch.distributed as dist
import bpsfast.torch as bps
from bpsfast.torch.hooks import CompressionState, onebit_hook
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300))
state = CompressionState()
model.register_comm_hook(state, onebit_hook)
for job in range(2):
    bps.init()
    for _ in range(2):
        model(torch.ones(2, 300)).sum().backward()
    saved = state.state_dict()
    assert saved["packs"], saved
    bps.shutdown()
    assert state.state_dict() == {"packs": [], "nodes": {}}
    state.load_state_dict(saved)
    assert state.state_dict() == saved
print("done", flush=True)
os._exit(0)  # gloo's end is not what this is about
"""


def test_a_state_outlives_its_job(path):
    done = subprocess.run([sys.executable, "-c", SECOND_JOB, path], capture_output=True, text=True, timeout=90)
    assert done.stdout == "done\n", done.stderr
