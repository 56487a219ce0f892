"""Compressed training is saved, and continues in another job with the same bits."""
from __future__ import annotations

import copy
import io

import pytest
import torch

import bpsfast.torch as bps
from bpsfast import compression
from bpsfast.orchestration.errors import MismatchError

pytestmark = pytest.mark.matrix

CODEC = compression.randomk(0.05, error_feedback=True, momentum=0.9, seed=5)
SHAPE = {"ranks": (2, 1), "transport": "tcp", "min_compress_bytes": 1024}
_state = {}


def made(name, codec=CODEC, **options):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(60, 40), torch.nn.Tanh(), torch.nn.Linear(40, 30))
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = bps.DistributedOptimizer(inner, [(f"{name}.{key}", p) for key, p in model.named_parameters()],
                                         compression=codec, **options)
    return model, optimizer


def train(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(100 * step + bps.rank())
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        optimizer.zero_grad()
        model(torch.randn(8, 60)).square().sum().backward()
        optimizer.step()


def begin(name, crossing=False):
    """Train four steps; return the saved file's bytes."""
    _state[name] = model, optimizer = made(name, **({"cross_barrier": True} if crossing else {}))
    train(model, optimizer, range(4))
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "model": model.state_dict()}, file)
    return file.getvalue()


def go_on(name):
    model, optimizer = _state[name]
    train(model, optimizer, range(4, 8))
    optimizer.state_dict()  # of one that crosses: makes the updates that are due
    return [p.detach().numpy().tobytes() for p in model.parameters()]


def resume(name, files, crossing=False, after=0, without=False):
    """As `begin`, but continue from a file; *after* that many steps, which loading undoes; *without* codec states."""
    _state[name] = model, optimizer = made(name, **({"cross_barrier": True} if crossing else {}))
    train(model, optimizer, range(50, 50 + after))
    saved = torch.load(io.BytesIO(files[bps.rank()]), weights_only=True)
    if without:
        del saved["optimizer"]["compression"]
    optimizer.load_state_dict(saved["optimizer"])
    model.load_state_dict(saved["model"])
    again = optimizer.state_dict()
    assert without or again["compression"]["nodes"].keys() == saved["optimizer"]["compression"]["nodes"].keys()


@pytest.fixture
def jobs(shared_job):
    """Three jobs of the same shape, independent of each other."""
    return [shared_job(**SHAPE, stall_warn_s=50.0 + i) for i in range(3)]


@pytest.mark.parametrize("crossing", [False, True], ids=["stepping", "crossing"])
@pytest.mark.parametrize("after", [0, 2])
def test_a_job_that_goes_on_has_the_bits_of_one_that_never_stopped(jobs, crossing, after):
    first, second, third = jobs
    name = f"net {crossing} {after}"
    files = first.run(begin, name, crossing)
    expected = first.run(go_on, name)
    assert all(each == expected[0] for each in expected)
    second.run(resume, name, files, crossing, after)
    assert second.run(go_on, name) == expected
    third.run(resume, name, files, crossing, 0, True)
    assert third.run(go_on, name) != expected, "what is kept makes the difference"


def refused(files):
    model, optimizer = made("other")
    train(model, optimizer, range(1))
    other = torch.load(io.BytesIO(files[(bps.rank() + 2) % 3]), weights_only=True)["optimizer"]
    with pytest.raises(MismatchError, match=r"each node saves and loads its own|of another job, node or compression"):
        optimizer.load_state_dict(other)
    with pytest.raises(MismatchError, match="remove it to begin with nothing kept"):
        optimizer.load_state_dict({**other, "compression": {"nodes": {}}})
    optimizer.load_state_dict({key: value for key, value in other.items() if key != "compression"})
    train(model, optimizer, range(1))
    plain, uncompressed = made("plain", codec=compression.onebit())
    train(plain, uncompressed, range(1))
    with pytest.raises(MismatchError, match=r"which (is not compressed|has none) here"):
        uncompressed.load_state_dict(other)


def test_what_another_node_kept_is_refused(job):
    three = job(**{**SHAPE, "ranks": (1, 1, 1)})
    three.run(refused, three.run(begin, "other"))


def broadcast():
    """Codec states stay with their nodes: only the optimizer's own state is broadcast."""
    model, optimizer = made("cast")
    train(model, optimizer, range(2))
    before = {name: each.clone() for name, each in optimizer.state_dict()["compression"]["nodes"].items()}
    optimizer.param_groups[0]["lr"] = 0.5 + bps.rank()
    bps.broadcast_optimizer_state(optimizer, root_rank=1)
    assert optimizer.param_groups[0]["lr"] == 1.5
    after = optimizer.state_dict()["compression"]["nodes"]
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_broadcasting_an_optimizer_leaves_what_nodes_keep(jobs):
    jobs[0].run(broadcast)


def alone():
    model, optimizer = made("alone")
    train(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["compression"]["nodes"] == {} and saved["compression"]["momentum"], "one machine compresses nothing"
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    train(model, optimizer, range(3, 5))
    expected = [p.detach().clone() for p in model.parameters()]
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(3, 5))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected))
    with pytest.raises(MismatchError, match=r"'other\.0\.weight', which has none here"):
        others = {"nodes": {}, "momentum": {"other.0.weight": torch.ones(1)}}
        optimizer.load_state_dict({**saved, "compression": others})


def test_one_machine_saves_the_momentum_of_codecs(two):
    two.run(alone)


POINT = {"partition_nbytes": 16_384, "fusion_nbytes": 8192, "credit_nbytes": 1 << 20, "n_streams": 1}


def tuned(steps):
    model, optimizer = made("tuned", codec=bps.Compression.none)
    with pytest.raises(MismatchError, match="remove it"):
        optimizer.load_state_dict({**optimizer.state_dict(), "tuned": {"partition_nbytes": 1}})
    optimizer.load_state_dict({**optimizer.state_dict(), "tuned": POINT})
    assert optimizer.state_dict()["tuned"] == POINT, "before the first step"
    train(model, optimizer, range(steps))
    return optimizer.state_dict()["tuned"], optimizer._exchange.gradients._layout.sizes


@pytest.mark.parametrize("autotune", [True, False])
def test_what_tuning_has_found_is_used_again(job, tmp_path, autotune):
    tuning = {"autotune": autotune, "tuned_dir": str(tmp_path)}
    for saved, cut in job(ranks=(1, 1), transport="tcp", **tuning).run(tuned, 12):
        assert saved == POINT
        assert tuple(cut) == ((16_384, 8192, 1) if autotune else (0, 0, 0))
    assert not list(tmp_path.iterdir()), "nothing was tried"
