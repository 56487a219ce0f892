"""OuterOptimizer on real ranks, against all ranks computed one after the other in this process."""
from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch

import bpsfast
import bpsfast.torch as bps
from bpsfast.torch.outer_optimizer import split_parameters

pytestmark = pytest.mark.matrix

LR, MOMENTUM = 0.7, 0.9


def model(seed, halves=False):
    torch.manual_seed(seed)
    made = torch.nn.Sequential(torch.nn.Linear(7, 40), torch.nn.Tanh(), torch.nn.Linear(40, 30), torch.nn.Tanh(),
                               torch.nn.Linear(30, 1))
    made[0].bias.requires_grad_(False)
    return made.to(torch.bfloat16) if halves else made


def batch(rank, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(8, 7, generator=generator)
    return x.to(dtype), x.sum(1, keepdim=True).sin().to(dtype)


def inner(parameters):
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.01)


def train(net, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        x, y = batch(rank, step, next(net.parameters()).dtype)
        (net(x) - y).square().mean().backward()
        optimizer.step()


def weights(net):
    return [p.detach().clone() for p in net.parameters()]


def on_ranks(n_steps, halves, options):
    """Train on this rank; return its parameters after each step, as float32 arrays."""
    net = model(bpsfast.rank(), halves)
    optimizer = bps.OuterOptimizer(inner(net.parameters()), net, **options)
    found = []
    for step in range(n_steps):
        train(net, optimizer, bpsfast.rank(), [step])
        found.append([w.float().numpy() for w in weights(net)])
    return found


def reference(n_ranks, n_steps, halves, sync_every, n_fragments=1, overlap=0, mix=0.5):
    """Compute each rank's parameters after each step; torch.optim.SGD itself makes the outer steps."""
    root = model(0, halves)
    nets = [copy.deepcopy(root) for _ in range(n_ranks)]
    fixed = {r: model(r, halves)[0].bias for r in range(n_ranks)}
    for r, net in enumerate(nets):  # what is not trained does not travel
        net[0].bias.data.copy_(fixed[r])
    optimizers = [inner(net.parameters()) for net in nets]
    names = [name for name, p in root.named_parameters() if p.requires_grad]
    runs = split_parameters([(name, dict(root.named_parameters())[name]) for name in names], n_fragments)
    outer = {name: dict(root.named_parameters())[name].detach().float().clone().requires_grad_() for name in names}
    steppers = [torch.optim.SGD([outer[name] for name, _ in run], lr=LR, momentum=MOMENTUM, nesterov=True)
                for run in runs]
    due = {}
    found = []
    for step in range(n_steps):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers)):
            train(net, optimizer, rank, [step])
        for number, (run, stepper) in enumerate(zip(runs, steppers)):
            if (step + 1) % sync_every == number * sync_every // len(runs):
                for name, _ in run:
                    moved = [outer[name].detach() - net.get_parameter(name).detach().float() for net in nets]
                    outer[name].grad = sum(moved) / n_ranks
                stepper.step()
                due[number] = step + overlap
            if due.get(number) == step:
                for net in nets:
                    for name, _ in run:
                        p = net.get_parameter(name)
                        kept = mix if overlap else 0.0
                        p.data.copy_(kept * p.detach().float() + (1 - kept) * outer[name].detach())
        found.append([[w.float().numpy() for w in weights(net)] for net in nets])
    return found


OPTIONS = [dict(sync_every=1), dict(sync_every=4), dict(sync_every=4, n_fragments=3),
           dict(sync_every=5, n_fragments=2, overlap=2, mix=0.3)]


@pytest.fixture(params=[((2,), 0, "auto"), ((1, 1), 0, "shm"), ((2, 1), 1, "tcp")], ids=str)
def ranks(request, shared_job):
    shape, helpers, transport = request.param
    return shared_job(ranks=shape, helpers=helpers, transport=transport)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ranks_have_the_weights_of_a_sequential_reference(ranks, options):
    found = ranks.run(on_ranks, 12, False, options, timeout_s=120)
    wanted = reference(ranks.size, 12, False, **options)
    for step, nets in enumerate(wanted):
        for rank, net in enumerate(nets):
            for ours, theirs in zip(found[rank][step], net):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6, err_msg=f"rank {rank}, step {step}")


def test_halves_travel_as_float32(shared_job):
    job = shared_job(ranks=(2, 1), helpers=1, transport="tcp")
    found, wanted = job.run(on_ranks, 6, True, dict(sync_every=2)), reference(3, 6, True, 2)
    for rank in range(3):
        for ours, theirs in zip(found[rank][-1], wanted[-1][rank]):
            np.testing.assert_allclose(ours, theirs, rtol=0.01, atol=1e-3)
        assert all((a == b).all() for a, b in zip(found[0][-1][2:], found[rank][-1][2:]))  # the first bias stays


def kinds_of_parameters():
    """Make outer steps with a double, a half and a transposed parameter; return how far each is from the reference."""
    rank, size = bpsfast.rank(), bpsfast.size()
    start = [torch.arange(6, dtype=torch.float64), torch.arange(6, dtype=torch.bfloat16),
             torch.arange(6, dtype=torch.float32).view(2, 3).t()]
    named = [(str(i), torch.nn.Parameter(p.clone() + rank)) for i, p in enumerate(start)]
    optimizer = bps.OuterOptimizer(torch.optim.SGD([p for _, p in named], lr=1.0), named, 1, outer_lr=0.5,
                                   outer_momentum=0.0)
    for _, p in named:
        p.grad = torch.full_like(p, rank + 1.0)
    optimizer.step()
    mean = sum(range(1, size + 1)) / size
    return [float((p.detach() - (before - 0.5 * mean)).abs().max()) for before, (_, p) in zip(start, named)]


def test_kinds_of_parameters(shared_job):
    for double, half, transposed in shared_job(ranks=(2, 1), helpers=1, transport="tcp").run(kinds_of_parameters):
        assert double == 0.0 and transposed == 0.0 and half <= 0.02


# -- saved and loaded -------------------------------------------------------------------------------------

def interrupted(options, saved_after, n_steps):
    """Train to the end, saving on the way; then load that into a fresh optimizer and train to the end again."""
    rank = bpsfast.rank()
    net = model(rank)
    optimizer = bps.OuterOptimizer(inner(net.parameters()), net, **options)
    train(net, optimizer, rank, range(saved_after))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    fixed = net[0].bias.detach().clone()
    train(net, optimizer, rank, range(saved_after, n_steps))
    wanted = weights(net)

    again = model(rank + 10)
    again[0].bias.data.copy_(fixed)
    optimizer = bps.OuterOptimizer(inner(again.parameters()), again, **options)
    train(again, optimizer, rank, range(2))  # it goes on from the saved state, whatever it did before
    optimizer.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    train(again, optimizer, rank, range(saved_after, n_steps))
    return [bool((a == b).all()) for a, b in zip(wanted, weights(again))]


@pytest.mark.parametrize(("options", "saved_after"), [
    (OPTIONS[1], 4), (OPTIONS[1], 6), (OPTIONS[2], 5), (OPTIONS[3], 6)], ids=str)
def test_a_resumed_optimizer_has_the_same_bits(shared_job, options, saved_after):
    job = shared_job(ranks=(2, 1), helpers=1, transport="tcp")
    assert all(map(all, job.run(interrupted, options, saved_after, 14, timeout_s=120)))


def refused():
    net = model(0)
    optimizer = bps.OuterOptimizer(inner(net.parameters()), net, 2)
    before, state = weights(net), optimizer.state_dict()
    others = torch.nn.Linear(3, 1)
    other = bps.OuterOptimizer(inner(others.parameters()), others, 2).state_dict()
    errors = []
    for call in (lambda: optimizer.load_state_dict(other),
                 lambda: optimizer.load_state_dict({k: v for k, v in state.items() if k != "outer"}),
                 lambda: optimizer.load_state_dict({**state, "outer": {**state["outer"], "sync_every": 9}}),
                 lambda: optimizer.load_state_dict({**state, "outer": {**state["outer"], "fragments": []}}),
                 lambda: optimizer.load_state_dict({**state, "outer": {}}),
                 lambda: optimizer.load_state_dict({**state, "outer": {**state["outer"], "fragments": [{}]}}),
                 lambda: bps.OuterOptimizer(inner(net.parameters()), net.parameters(), 3),
                 lambda: bps.OuterOptimizer(inner(net.parameters()), None, 3),
                 lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]}),
                 lambda: bps.OuterOptimizer(optimizer, net, 2),
                 lambda: bps.OuterOptimizer(inner(net.parameters()), net, 0),
                 lambda: bps.OuterOptimizer(inner(net.parameters()), net, 3, overlap=3),
                 lambda: bps.OuterOptimizer(inner(net.parameters()), net, 3, n_fragments=4),
                 lambda: bps.OuterOptimizer(inner(net.parameters()), net, 3, outer_momentum=1.0),
                 lambda: bps.OuterOptimizer(inner(net.parameters()), [("x", net[2].weight)], 3),
                 lambda: bps.OuterOptimizer(inner(net.parameters()), net, 2.5),
                 lambda: bps.OuterOptimizer(inner(net.parameters()), net, 4, overlap=1.5),
                 lambda: bps.OuterOptimizer(inner(net.parameters()), net, 4, outer_lr="fast")):
        try:
            call()
        except bpsfast.BpsError as exc:
            errors.append(f"{type(exc).__name__}: {exc}")
    changed = {**state, "outer": {**state["outer"], "fragments": [
        {**each, "local": each["local"] + 1} for each in state["outer"]["fragments"]]}, "param_groups": []}
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(changed)
    assert all((a == b).all() for a, b in zip(before, weights(net)))
    return errors


def test_what_cannot_be_is_refused_in_words(shared_job):
    words = ["this optimizer's parameters make", "not an OuterOptimizer's", "sync_every=9", "has 0 fragments",
             "has [] of outer steps", "has [], not what", "Parameter among", "NoneType among",
             "before the optimizer is wrapped", "already", "sync_every=0", "overlap=3", "n_fragments=4", "momentum=1",
             "4 of 5 parameters", "sync_every=2.5: expected int, got float", "overlap=1.5", "outer_lr='fast'"]
    for errors in shared_job(ranks=(2, 1), helpers=1, transport="tcp").run(refused):
        assert len(errors) == len(words) and all(word in error for word, error in zip(words, errors)), errors


# -- bytes, and who is lost -------------------------------------------------------------------------------

def bytes_sent(sync_every, n_steps):
    """Return the bytes that this machine's node has sent over the network in *n_steps*."""
    net = model(0)
    optimizer = bps.OuterOptimizer(inner(net.parameters()), net, sync_every)
    bpsfast.barrier()
    before = sent()
    bpsfast.barrier()  # ranks of one machine see the same
    train(net, optimizer, bpsfast.rank(), range(n_steps))
    bpsfast.barrier()
    found = sent() - before
    bpsfast.barrier()
    return found


def sent():
    return sum(value for name, value in bpsfast.counters().items() if name.startswith("wire_")
               and name.endswith("bytes_sent"))


def test_twenty_inner_steps_for_each_outer_one_send_a_twentieth(shared_job):
    job = shared_job(ranks=(2, 1), helpers=1, transport="tcp")
    often, seldom = job.run(bytes_sent, 1, 40), job.run(bytes_sent, 20, 40)
    assert often[0] == 20 * seldom[0] > 0 and often[2] == 20 * seldom[2] > 0


made = {}


def begin():
    net = torch.nn.Linear(1000, 1000)
    made["net"], made["optimizer"] = net, bps.OuterOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, 1)


def for_ever():
    while True:
        made["optimizer"].step()


def test_all_ranks_hear_of_the_end_of_an_owner(job):
    started = job(ranks=(2, 1), transport="tcp")
    started.run(begin, timeout_s=120)
    started.begin(for_ever)
    started.kill_daemon("node 1")
    assert {outcome.error for outcome in started.outcomes(30)} == {"PeerLostError"}
    started.kill()
