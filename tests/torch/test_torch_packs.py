"""Packs of parameters: how buckets are cut, saved states, ranks that finish early, failing passes."""
from __future__ import annotations

import io
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
from bpsfast.torch.compression_state import Gradient, _split_bucket
from bpsfast.torch.hooks import CompressionState, int8_hook, onebit_hook
from bpsfast.torch.partwise_future import PartwiseFuture
from tests.support.packed_training import SHAPE, again, group, made, train, weights

_state = {}


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 60))
def test_packs_are_whole_and_no_larger_than_they_must_be(sizes, most):
    gradients = [Gradient(torch.empty(0), size, sum(sizes[:i])) for i, size in enumerate(sizes)]
    packs = _split_bucket(gradients, most)
    assert [each.offset for pack in packs for each in pack] == [each.offset for each in reversed(gradients)]
    for pack, following in zip(packs, [*packs[1:], None], strict=True):
        assert len(pack) == 1 or sum(each.n_elements for each in pack) <= most
        if following is not None:
            assert sum(each.n_elements for each in pack) + following[0].n_elements > most, "there was room"


def test_a_bucket_is_complete_with_its_last_gradient():
    tensor = torch.zeros(4)
    completion = PartwiseFuture(tensor, 2)
    completion.part_done(None)
    assert not completion.future.done()
    completion.part_done(None)
    assert completion.future.wait() is tensor


def test_the_first_error_counts():
    completion = PartwiseFuture(torch.zeros(4), 3)
    completion.part_done(ValueError("one"))
    completion.part_done(ValueError("two"))
    completion.part_done(None)
    with pytest.raises(ValueError, match="one"):
        completion.future.wait()


def test_many_threads_land_one_bucket_once():
    for _ in range(50):
        completion = PartwiseFuture(torch.zeros(4), 8)
        threads = [threading.Thread(target=completion.part_done, args=(None,)) for _ in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert completion.future.done()


@pytest.fixture
def path():
    with tempfile.TemporaryDirectory(prefix="bpsfast-packs-") as folder:
        yield str(Path(folder) / "store")


# -- saved and loaded --------------------------------------------------------------------------------------------------


def begin(name, path):
    _state[name] = model, optimizer, state = made(name, path, momentum=0.5)
    assert state.state_dict() == {"packs": [], "nodes": {}}
    train(model, optimizer, range(4))
    file = io.BytesIO()
    torch.save({"state": state.state_dict(), "model": model.state_dict()}, file)
    return file.getvalue()


def resume(name, path, files, without=False):
    _state[name] = model, _, state = made(f"{name} again", path, momentum=0.5)
    saved = torch.load(io.BytesIO(files[bps.rank()]), weights_only=True)
    model.load_state_dict(saved["model"])
    if not without:
        state.load_state_dict(saved["state"])
        before = state.state_dict()
        assert before == saved["state"], "not taken over yet"
        _state["before"] = before, saved["state"]


def go_on(name):
    model, optimizer, state = _state.pop(name)
    train(model, optimizer, range(4, 8))
    assert state.state_dict()["nodes"]
    before, saved = _state.pop("before", (0, 0))
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
    """Rank r has 2 + r batches; finished ranks take part in the others' calls (join)."""
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
