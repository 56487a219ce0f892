"""Compressing hooks of torch's DistributedDataParallel, over gloo and over the backend "bpsfast"."""
from __future__ import annotations

import copy
import gc
import pickle
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import bpsfast.torch as bps
import bpsfast.torch.backend  # noqa: F401
from bpsfast.base import reference_sum
from bpsfast.compression import formats
from bpsfast.orchestration.errors import ConfigError
from bpsfast.torch import hooks
from bpsfast.torch.compression_state import CompressionState, gradients_of
from tests.support.compressed_rounds import Replay
from tests.support.torch_ranks import keep_gloo

pytestmark = pytest.mark.matrix

PARTITION_NBYTES = 100_000
HOOKS = ("onebit", "topk", "randomk", "dithering", "int8")
N_STEPS = 5


class Backwards(torch.nn.Module):
    """Layers that are used in another order than they are listed in, so that torch makes its buckets anew."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.last = torch.nn.Linear(200, 150)
        self.middle = torch.nn.Linear(400, 200)
        self.first = torch.nn.Linear(50, 400)
        self.small = torch.nn.Linear(50, 50)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(self.small(x))))))


class Group:
    """A default group of all ranks of the job for the time of a block."""

    def __init__(self, backend, path):
        dist.init_process_group(backend, init_method=f"file://{path}", rank=bps.rank(), world_size=bps.size())
        keep_gloo()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        dist.destroy_process_group()


@pytest.fixture
def path():
    with tempfile.TemporaryDirectory(prefix="bpsfast-hooks-") as folder:
        yield str(Path(folder) / "store")


def spied(state, hook, seen):
    """*hook*, which records its inputs and outputs in *seen*: for each call, (pack, position) -> (before, after)."""
    def spy(state, bucket):
        before = bucket.buffer().clone().numpy()
        gradients = [(id(each.parameter), each.offset, each.offset + each.n_elements) for each in gradients_of(bucket)]
        future, call = hook(state, bucket), {}
        seen.append(call)  # in the order of the calls, whatever is complete first

        def note(done):
            after = done.value().clone().numpy()
            for parameter, begin, end in gradients:
                _, pack, position = state._packs._pack_of[parameter]
                call[state._packs.packs.index(pack), position] = before[begin:end], after[begin:end]
            return done.value()

        return future.then(note)

    return spy


def trained(model, optimizer, n_steps=N_STEPS):
    for step in range(n_steps):
        torch.manual_seed(100 * step + bps.rank())
        optimizer.zero_grad()
        model(torch.randn(16, 50)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()


def hooked(kind, backend, path, options):
    with Group(backend, path):
        model = DistributedDataParallel(Backwards(), bucket_cap_mb=0.35, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state, seen = CompressionState(k=0.05, name=f"{kind} {backend} {sorted(options)}"), []
        model.register_comm_hook(state, spied(state, getattr(hooks, f"{kind}_hook"), seen))
        weights = trained(model, optimizer)
        return weights, seen, packs_of(state)


def packs_of(state):
    """Return for each pack: name, codec, stride, number of parameters."""
    return [(pack.unit.name, pack.unit.codec, pack.unit.stride, len(pack.nbytes_of)) for pack in state._packs.packs]


def codec_of(kind):
    return getattr(formats, kind)(error_feedback=True, momentum=0.0, **{
        "topk": {"k": 0.05}, "randomk": {"k": 0.05}, "dithering": {"levels": 4}}.get(kind, {}))


def check(results, shape, kind):
    """Compare what came out of every pack in every step, on every rank, with the reading; return the codecs of packs,
    and into how many buckets each step's gradients were cut."""
    assert all((weights == results[0][0]).all() for weights, _, _ in results), "all ranks stay alike"
    packs = results[0][2]
    assert all(each == packs for _, _, each in results)
    n_places = {(pack, place) for pack, (_, _, _, n) in enumerate(packs) for place in range(n)}
    replays, steps, n_buckets = {}, [{}], [0]
    for calls in zip(*(seen for _, seen, _ in results), strict=True):
        assert not steps[-1].keys() & calls[0].keys()
        steps[-1] |= {key: [call[key] for call in calls] for key in calls[0]}
        n_buckets[-1] += 1
        if steps[-1].keys() == n_places:
            steps.append({})
            n_buckets.append(0)
    assert not steps.pop(), "every step has every gradient"
    for step in steps:
        for pack, (name, codec, stride, n) in enumerate(packs):
            inputs, found = ([np.concatenate([step[pack, place][rank][i] for place in range(n)])
                              for rank in range(sum(shape))] for i in range(2))
            if codec is None:
                want = reference_sum.reduce(grouped(inputs, shape), average=True)
            else:
                assert codec == codec_of(kind)
                if pack not in replays:
                    replays[pack] = Replay(codec, len(inputs[0]), "float32", stride, shape)
                want = replays[pack].round(inputs)
            for rank, each in enumerate(found):
                assert each.tobytes() == want.tobytes(), f"{name} on rank {rank}"
    return [codec for _, codec, _, _ in packs], n_buckets[:-1]


def grouped(inputs, shape):
    groups, first = [], 0
    for n_ranks in shape:
        groups.append(inputs[first : first + n_ranks])
        first += n_ranks
    return groups


@pytest.mark.parametrize("backend", ["gloo", "bpsfast"])
@pytest.mark.parametrize("kind", HOOKS)
def test_packs_have_the_bits_of_the_reading(shared_job, path, kind, backend):
    shape = (2, 1)
    job = shared_job(ranks=shape, transport="tcp", partition_bytes=PARTITION_NBYTES)
    codecs, n_buckets = check(job.run(hooked, kind, backend, path, {}), shape, kind)
    assert 1 < codecs.count(codec_of(kind)) < len(codecs), "most of it is compressed, small packs are not"
    assert n_buckets[0] < n_buckets[1] == n_buckets[-1], "torch has made its buckets anew"
    assert len(n_buckets) == N_STEPS


def test_buckets_that_are_not_made_anew(shared_job, path):
    shape = (1, 1)
    job = shared_job(ranks=shape, transport="tcp", partition_bytes=PARTITION_NBYTES)
    _, n_buckets = check(job.run(hooked, "onebit", "gloo", path, {"find_unused_parameters": True}), shape, "onebit")
    assert n_buckets == [n_buckets[0]] * N_STEPS and n_buckets[0] > 1


def inside_the_backend_alone(kind):
    """The job is the process group's own: init was not called."""
    model = DistributedDataParallel(Backwards())
    state, seen = CompressionState(k=0.05, name=f"alone {kind}"), []
    model.register_comm_hook(state, spied(state, getattr(hooks, f"{kind}_hook"), seen))
    weights = trained_by_dist(model)
    return weights, seen, packs_of(state)


def trained_by_dist(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(16, 50)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()


def test_inside_the_job_of_the_backend(torch_ranks):
    ranks = torch_ranks(2, nodes=2)
    codecs, _ = check(ranks.grouped(inside_the_backend_alone, "topk"), (1, 1), "topk")
    assert codec_of("topk") in codecs


def two_models(path):
    """Two models in one backward pass; each with a state. Then one state for both, which is refused."""
    with Group("gloo", path):
        models = [DistributedDataParallel(Backwards()) for _ in range(2)]
        states = [CompressionState(error_feedback=False) for _ in models]
        for model, state in zip(models, states):
            model.register_comm_hook(state, hooks.onebit_hook)
        for step in range(3):
            torch.manual_seed(step)
            sum(model(torch.randn(4, 50)).square().mean() for model in models).backward()
        shared = CompressionState(name="of both")
        models = [DistributedDataParallel(Backwards()) for _ in range(2)]
        for model in models:
            model.register_comm_hook(shared, hooks.onebit_hook)
        models[0](torch.randn(4, 50)).sum().backward()
        try:
            models[1](torch.randn(4, 50)).sum().backward()
        except Exception as exc:
            text = str(exc)
        return len({state.name for state in states}), text


def test_each_model_has_its_state(shared_job, path):
    for n_names, text in shared_job(ranks=(1, 1), transport="tcp").run(two_models, path):
        assert n_names == 2
        assert "'of both'" in text and "each model needs a CompressionState of its own" in text


def rated(path):
    with Group("gloo", path):
        model = DistributedDataParallel(Backwards())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        state, found = CompressionState(name="rated"), []
        state.follow(optimizer)
        model.register_comm_hook(state, hooks.onebit_hook)
        for _ in range(4):
            model(torch.randn(4, 50)).square().mean().backward()
            found.append({pack.unit.learning_rate for pack in state._packs.packs})
            optimizer.step()
            scheduler.step()
        return found


def test_learning_rates_are_those_of_the_optimizer(shared_job, path):
    assert shared_job(ranks=(1, 1), transport="tcp").run(rated, path) == [[{0.1}, {0.05}, {0.025}, {0.0125}]] * 2


def ended(path):
    """States must not leave threads behind."""
    with Group("gloo", path):
        model = DistributedDataParallel(Backwards(), bucket_cap_mb=0.35)
        state = CompressionState(name="ended")
        model.register_comm_hook(state, hooks.int8_hook)
        trained(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
        n_before = sum(each.name == "bpsfast-ended" for each in threading.enumerate())
        del model, state
        gc.collect()
        return n_before, sum(each.name == "bpsfast-ended" for each in threading.enumerate())


def test_states_end_their_threads(shared_job, path):
    for n_before, n_after in shared_job(ranks=(1, 1), transport="tcp").run(ended, path):
        assert n_before >= 1 and n_after == 0


def smaller_group(path):
    with Group("gloo", path):
        group = dist.new_group([0])
        if bps.rank() == 0:
            model = DistributedDataParallel(Backwards(), process_group=group)
            model.register_comm_hook(CompressionState(group, name="smaller"), hooks.topk_hook)
            model(torch.randn(4, 50)).sum().backward()


def test_a_group_of_some_ranks_is_refused(shared_job, path):
    first, _ = shared_job(ranks=(1, 1), transport="tcp").attempt(smaller_group, path)
    assert "rank 0 of 1 in the model's process group, and rank 0 of 2 in bpsfast's job" in first.text


def without_a_job(path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(Backwards())
        model.register_comm_hook(CompressionState(name="no job"), hooks.topk_hook)
        model(torch.randn(4, 50)).sum().backward()
    finally:
        dist.destroy_process_group()


def test_without_a_job_it_says_what_to_call(path):
    with pytest.raises(Exception, match=r"call bpsfast\.init\(\) first"):
        without_a_job(path)


def dying(path):
    """Rank 1 does not begin the third backward pass: the other rank's error names it."""
    with Group("gloo", path):
        model = DistributedDataParallel(Backwards())
        model.register_comm_hook(CompressionState(name="dying"), hooks.onebit_hook)
        for _ in range(2):  # from then on, torch itself sends nothing
            model(torch.randn(4, 50)).sum().backward()
        dist.barrier()
        if bps.rank() == 0:
            model(torch.randn(4, 50)).sum().backward()


def test_errors_come_out_of_backward(job, path):
    first, second = job(ranks=(1, 1), transport="tcp", timeout_s=6).attempt(dying, path)
    assert "StallError" in first.text and "rank 1" in first.text, first
    assert not second.error


def test_states_may_be_pickled_and_copied():
    state = CompressionState(k=7, levels=3, partition="natural", seed=9, momentum=0.5, error_feedback=False)
    state.follow(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0))
    named = CompressionState(name="mine")
    for copied in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
        assert copied.__getstate__() == state.__getstate__()
        assert copied.name != state.name, "names of two states of one process"
    assert pickle.loads(pickle.dumps(named)).name == "mine"


@pytest.mark.parametrize("options", [{"k": 0}, {"levels": 0}, {"seed": 0}, {"momentum": 2.0}, {"partition": "log"},
                                     {"scaled": "no"}, {"error_feedback": 3}])
def test_options_are_looked_at_at_once(options):
    with pytest.raises(ConfigError, match=next(iter(options)) if options != {"levels": 0} else "levels"):
        CompressionState(**options)


@pytest.mark.parametrize("kind", HOOKS)
def test_a_state_that_is_none_is_refused_in_words(kind):
    with pytest.raises(ConfigError, match=rf"the state of {kind}_hook is None: give it one of bpsfast's"):
        getattr(hooks, f"{kind}_hook")(None, None)


def test_the_compressed_values_differ_from_exact_ones():
    """The replay above would also agree if nothing were compressed: these codecs do change values."""
    x = [np.linspace(-1, 1, 1000, dtype=np.float32)] * 2
    for kind in HOOKS:
        found = Replay(codec_of(kind), 1000, "float32", 4000, (1, 1)).round(x)
        assert (found != x[0]).any(), kind
