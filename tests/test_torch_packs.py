"""Packs of parameters: how buckets are cut, what is saved of them, ranks that are done early, passes that fail."""
from __future__ import annotations

import io
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel

import bpsfast.torch as bps
import bpsfast.torch.backend  # noqa: F401
from bpsfast.orchestration.errors import MismatchError
from bpsfast.torch.hooks import CompressionState, int8_hook, onebit_hook, randomk_hook
from bpsfast.torch.packs import Gradient, Landing, _cut
from bpsfast.trainer.tensor_input import TensorInput
from tests.torch_ranks import keep_gloo

SHAPE = {"ranks": (2, 1), "transport": "tcp", "min_compress_bytes": 1024, "partition_bytes": 100_000}
_kept = {}


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 60))
def test_packs_are_whole_and_no_larger_than_they_must_be(sizes, most):
    gradients = [Gradient(torch.empty(0), size, sum(sizes[:i])) for i, size in enumerate(sizes)]
    packs = _cut(gradients, most)
    assert [each.offset for pack in packs for each in pack] == [each.offset for each in reversed(gradients)]
    for pack, following in zip(packs, [*packs[1:], None], strict=True):
        assert len(pack) == 1 or sum(each.n_elements for each in pack) <= most
        if following is not None:
            assert sum(each.n_elements for each in pack) + following[0].n_elements > most, "there was room"


def landing(n_missing):
    tensor = torch.zeros(4)
    return Landing(TensorInput(tensor.data_ptr(), (4,), "float32", 16, True, tensor), tensor, n_missing), tensor


def test_a_bucket_lands_with_its_last_gradient():
    landed, tensor = landing(2)
    landed.landed(None)
    assert not landed.future.done()
    landed.landed(None)
    assert landed.future.wait() is tensor


def test_the_first_error_counts():
    landed, _ = landing(3)
    landed.landed(ValueError("one"))
    landed.landed(ValueError("two"))
    landed.landed(None)
    with pytest.raises(ValueError, match="one"):
        landed.future.wait()


def test_many_threads_land_one_bucket_once():
    for _ in range(50):
        landed, _ = landing(8)
        threads = [threading.Thread(target=landed.landed, args=(None,)) for _ in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert landed.future.done()


class Net(torch.nn.Module):
    """Layers that are listed in another order than they are used in: torch makes its buckets anew."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.last = torch.nn.Linear(200, 150)
        self.middle = torch.nn.Linear(400, 200)
        self.first = torch.nn.Linear(50, 400)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Deep(torch.nn.Module):
    """Layers in order: packs of the first bucket, which has all of them, lie across the buckets that follow.

    With a number, the gradient of that layer's input fails: those of later layers have come, and are under way.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(50 if i == 0 else 150, 150) for i in range(6))

    def forward(self, x, fail_at=None):
        for number, layer in enumerate(self.layers):
            if number == fail_at:
                x.register_hook(_refuse)
            x = torch.tanh(layer(x))
        return x


def _refuse(gradient):
    raise RuntimeError("in the midst of backward")


@pytest.fixture
def path():
    with tempfile.TemporaryDirectory(prefix="bpsfast-packs-") as folder:
        yield str(Path(folder) / "store")


def group(path):
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=bps.rank(), world_size=bps.size())
        keep_gloo()


def made(name, path, hook=randomk_hook, net=Net, wrap=lambda hook: hook, rate=0.1, **options):
    group(path)
    model = DistributedDataParallel(net(), bucket_cap_mb=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    state = CompressionState(k=0.05, name=name, **options)
    state.follow(optimizer)
    model.register_comm_hook(state, wrap(hook))
    return model, optimizer, state


def train(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(100 * step + bps.rank())
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step) if step != 4 else 0.0  # and that is no rate for what is left
        optimizer.zero_grad()
        model(torch.randn(8, 50)).square().mean().backward()
        optimizer.step()


def again(model, state):
    """Torch's model is lost after a backward pass that failed: make another one of what it is of."""
    model = DistributedDataParallel(model.module, bucket_cap_mb=0.3)
    model.register_comm_hook(state, randomk_hook)
    return model


def weights(model):
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


# -- saved and loaded --------------------------------------------------------------------------------------------------


def begin(name, path):
    _kept[name] = model, optimizer, state = made(name, path, momentum=0.5)
    assert state.state_dict() == {"packs": [], "nodes": {}}
    train(model, optimizer, range(4))
    file = io.BytesIO()
    torch.save({"state": state.state_dict(), "model": model.state_dict()}, file)
    return file.getvalue()


def resume(name, path, files, without=False):
    _kept[name] = model, _, state = made(f"{name} again", path, momentum=0.5)
    saved = torch.load(io.BytesIO(files[bps.rank()]), weights_only=True)
    model.load_state_dict(saved["model"])
    if not without:
        state.load_state_dict(saved["state"])
        before = state.state_dict()
        assert before == saved["state"], "not taken over yet"
        _kept["before"] = before, saved["state"]


def go_on(name):
    model, optimizer, state = _kept.pop(name)
    train(model, optimizer, range(4, 8))
    assert state.state_dict()["nodes"]
    before, saved = _kept.pop("before", (0, 0))
    assert before == saved, "a state that was given away does not change"
    dist.destroy_process_group()
    return weights(model)


def test_a_job_that_goes_on_has_the_bits_of_one_that_never_stopped(job, path):
    jobs = [job(**SHAPE) for _ in range(3)]
    files = jobs[0].run(begin, "net", path)
    expected = jobs[0].run(go_on, "net")
    assert all(each == expected[0] for each in expected)
    jobs[1].run(resume, "net", f"{path} 1", files)
    assert jobs[1].run(go_on, "net") == expected
    jobs[2].run(resume, "net", f"{path} 2", files, True)
    assert jobs[2].run(go_on, "net") != expected, "what is kept makes the difference"


def refused(path):
    model, optimizer, state = made("refused", path)
    for other in ({}, {"packs": [1]}, {"packs": [4], "nodes": {"1": torch.zeros(3, dtype=torch.uint8)}}):
        with pytest.raises(MismatchError, match=r"not one that CompressionState\.state_dict made"):
            state.load_state_dict(other)
    before = weights(model)
    model, optimizer, state = made("good", path)
    train(model, optimizer, range(2))
    saved = state.state_dict()
    with pytest.raises(MismatchError, match="load into a new CompressionState"):
        state.load_state_dict(saved)
    nodes = saved["nodes"]
    short = {number: each[:-1].clone() for number, each in nodes.items()}
    fewer = {number: each for number, each in nodes.items() if number != min(nodes)}
    extra = {**nodes, **{str(number): nodes[min(nodes)] for number in range(len(saved["packs"]))}}
    assert len(extra) > len(nodes), "some packs are not compressed"
    for other, words in (({"packs": [4], "nodes": {}}, "of another model, or of other settings"),
                         ({"packs": [*saved["packs"], 8], "nodes": nodes}, "of another model, or of other settings"),
                         ({**saved, "nodes": short}, "it is of another job, node or compression"),
                         ({**saved, "nodes": fewer}, r"has none of 'with .*', which is compressed here"),
                         ({**saved, "nodes": extra}, r"has one of 'with .*', which is not compressed here")):
        model, optimizer, state = made(f"with {words}", path)
        state.load_state_dict(other)
        for _ in range(2):
            with pytest.raises(MismatchError, match=words):
                train(model, optimizer, range(1))
            model = again(model, state)
        assert weights(model) == before
    dist.destroy_process_group()


def test_what_does_not_fit_is_refused_and_nothing_changes(shared_job, path):
    shared_job(**SHAPE).run(refused, path)


# -- what torch lets models do -----------------------------------------------------------------------------------------


def uneven(path):
    """Rank r has 2 + r batches; those that are done shadow the others."""
    model, optimizer, state = made("uneven", path, int8_hook)
    n_steps = 0
    with model.join():
        for step in range(2 + bps.rank()):
            train(model, optimizer, [step])
            n_steps += 1
    rounds = {pack.unit.round for pack in state._packs.packs}
    found = weights(model)
    dist.destroy_process_group()
    return n_steps, rounds, found


def test_ranks_with_fewer_batches_join_early(shared_job, path):
    results = shared_job(**SHAPE).run(uneven, path)
    assert [n for n, _, _ in results] == [2, 3, 4]
    assert all(rounds == {4} for _, rounds, _ in results), "all take part in every step"
    assert len({found for _, _, found in results}) == 1, "at the end all have the last one's weights"


class Branches(torch.nn.Module):
    """Each step uses one of two branches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(50, 300) for _ in range(2))
        self.step = 0

    def forward(self, x):
        self.step += 1
        return self.branches[(self.step + bps.rank()) % 2](x)


def unused(path):
    group(path)
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    model.register_comm_hook(CompressionState(name="unused"), onebit_hook)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(4))
    found = weights(model)
    dist.destroy_process_group()
    return found


def test_parameters_that_only_some_ranks_use(shared_job, path):
    assert len(set(shared_job(**SHAPE).run(unused, path))) == 1


def halved(path):
    model, optimizer, state = made("halved", path, onebit_hook, wrap=fp16_compress_wrapper)
    train(model, optimizer, range(3))
    found = weights(model), {str(pack.unit.dtype) for pack in state._packs.packs}
    dist.destroy_process_group()
    return found


def test_torchs_wrappers_go_round_the_hooks(shared_job, path):
    results = shared_job(**SHAPE).run(halved, path)
    assert len({found for found, _ in results}) == 1
    assert all(dtypes == {"float16"} for _, dtypes in results)


def accumulated(path):
    model, optimizer, state = made("accumulated", path)
    for step in range(2):
        with model.no_sync():
            model(torch.ones(8, 50)).sum().backward()
        train(model, optimizer, [step])
    rounds = {pack.unit.round for pack in state._packs.packs}
    dist.destroy_process_group()
    return rounds


def test_no_sync_sends_nothing(shared_job, path):
    assert shared_job(**SHAPE).run(accumulated, path) == [{2}] * 3


# -- what goes wrong ---------------------------------------------------------------------------------------------------


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
    """All ranks fail in the midst of the third backward pass, and go on with the state that they have."""
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
