"""Steps that overlap the next forward pass: the same bits as with a barrier, and no needless waiting."""
from __future__ import annotations

import copy
import io
import re
import time
from pathlib import Path

import pytest
import torch

import bpsfast.torch as bps
from bpsfast.orchestration.errors import BusyError, UnsupportedError
from bpsfast.torch.optimizer_wrapper import UnderWayError

pytestmark = pytest.mark.matrix

N_STEPS = 5


class Network(torch.nn.Module):
    """Layers that are called, one that the outer module reads, one that is read twice, one that is not read."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.last = torch.nn.Linear(16, 10)  # held in another order than read
        self.first = torch.nn.Linear(12, 16)
        self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)  # reads out_proj's weights itself
        self.norm = torch.nn.LayerNorm(16)
        self.shared = torch.nn.Linear(16, 16)
        self.unused = torch.nn.Linear(3, 3)
        self.scale = torch.nn.Parameter(torch.ones(16))  # held by the root: read in its own forward pass

    def forward(self, x):
        x = torch.relu(self.first(x)) * self.scale
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.last(self.shared(torch.relu(self.shared(x)))).mean(1)


class Tied(torch.nn.Module):
    """Reads the weight of a layer itself before it calls that layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.code = torch.nn.Linear(12, 10)
        self.coder = torch.nn.TransformerEncoderLayer(12, 2, 8, 0.0, batch_first=True)

    def forward(self, x):
        return self.code(self.coder(x)).mean(1) + torch.nn.functional.linear(x, self.code.weight).mean(1)


class Tower(torch.nn.Module):
    """So wide that its tensors are not fused."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.body = torch.nn.Sequential(*(torch.nn.Linear(12 if i == 0 else 32, 32) for i in range(4)))
        self.end = torch.nn.Linear(32, 10)

    def forward(self, x):
        return self.end(self.body(x)).mean(1)


def loss_of(net, step, autocast=False):
    generator = torch.Generator().manual_seed(1000 * step + bps.rank())
    x, y = torch.randn(4, 6, 12, generator=generator), torch.randint(0, 10, (4,), generator=generator)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return torch.nn.functional.cross_entropy(net(x).float(), y)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "tensor rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2)),
    "groups": lambda p: torch.optim.SGD([{"params": ps, "lr": 0.1 * i} for i, ps in enumerate((p[:3], p[3:]), 1)],
                                        momentum=0.9),
}


def clamp(net, optimizer, step):
    with torch.no_grad():
        for p in net.parameters():
            p.clamp_(-0.05, 0.05)
    return []


def take_back(net, optimizer, step):
    """Go back to the last step but one, as after a spike."""
    if step == 2:
        net.load_state_dict(net.kept[0])
        optimizer.load_state_dict(net.kept[1])
    net.__dict__["kept"] = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    return []


def pickled(net, optimizer, step):
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    torch.save(list(net.parameters()), file)
    return [file.getvalue().__len__(), *(float(p.sum()) for p in net.parameters())]


BETWEEN = {
    "": lambda net, optimizer, step: [],
    "clamp": clamp,
    "take back": take_back,
    "pickle": pickled,
    "copy": lambda net, optimizer, step: [float(p.sum()) for p in copy.deepcopy(net).parameters()],
    "read": lambda net, optimizer, step: [float(p.data.sum()) for p in net.parameters()] if step % 2 else [],
    "settle": lambda net, optimizer, step: [getattr(optimizer, "settle", int)() or 0],
    "move": lambda net, optimizer, step: [0 * len(str(net.to("cpu")))],
}


def train(cross, kind="sgd", network="Network", passes=1, autocast=False, clip=None, zero="none", schedule=False,
          evaluate=False, between="", num_steps=10**6):
    torch.set_num_threads(1)
    net = globals()[network]()
    optimizer = OPTIMIZERS[kind](list(net.parameters()))
    if cross:
        optimizer = bps.CrossBarrier(net, optimizer, backward_passes_per_step=passes, num_steps=num_steps)
    else:
        optimizer = bps.DistributedOptimizer(optimizer, net.named_parameters(), backward_passes_per_step=passes)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if schedule else None
    seen = []
    for step in range(N_STEPS):
        for number in range(passes):
            loss_of(net, step * passes + number, autocast).backward()
        if clip is not None:
            optimizer.synchronize()
            seen.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), clip)))
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if zero == "model":
            net.zero_grad()
        elif zero != "never":
            optimizer.zero_grad(set_to_none=zero == "none")
        if evaluate:
            with torch.inference_mode():
                first, again = (float(net.eval()(torch.ones(1, 6, 12)).sum()) for _ in range(2))
            assert first == pytest.approx(again, rel=1e-4, abs=1e-5), "another of torch's paths, no other values"
            seen.append(again)
            net.train()
        seen += BETWEEN[between](net, optimizer, step)
    states = [value for each in optimizer.state_dict()["state"].values() for value in each.values()]
    seen += [value.sum().item() for value in states if isinstance(value, torch.Tensor)]
    return seen, {name: value.numpy().tobytes() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_any_optimizer_of_single_parameters_gives_the_same_bits(three, kind):
    assert three.run(train, True, kind) == three.run(train, False, kind)


@pytest.mark.parametrize("variant", [
    {"passes": 2}, {"autocast": True}, {"clip": 0.5}, {"zero": "zeros"}, {"zero": "model"}, {"zero": "never"},
    {"schedule": True}, {"schedule": True, "kind": "tensor rate"}, {"evaluate": True, "kind": "adam"},
    {"network": "Tower", "kind": "adamw"}, {"network": "Tied"}, {"network": "Tied", "evaluate": True},
    *({"between": each} for each in BETWEEN)], ids=str)
@pytest.mark.parametrize("shape", ["two", "three"])
def test_any_loop_gives_the_same_bits(request, shape, variant):
    job = request.getfixturevalue(shape)
    crossing, plain = (job.run(train, cross, *[variant.get(name, default) for name, default in DEFAULTS.items()])
                       for cross in (True, False))
    assert crossing == plain


DEFAULTS = {"kind": "sgd", "network": "Network", "passes": 1, "autocast": False, "clip": None, "zero": "none",
            "schedule": False, "evaluate": False, "between": ""}


@pytest.mark.parametrize("end", ["num_steps", "settle", "nobody", "shutdown"])
def test_no_update_is_lost_at_the_end(job, end):
    assert job(ranks=(2,)).run(drain, end) == [True] * 2


def fit(net, num_steps):
    optimizer = bps.DistributedOptimizer(OPTIMIZERS["sgd"](net.parameters()), net.named_parameters(),
                                         cross_barrier=True, num_steps=num_steps)
    for step in range(N_STEPS):
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def drain(end):
    """At the last of `num_steps`, by `settle`, after the optimizer was dropped, at the end of the job."""
    want = train(False)[1]
    net = Network()
    optimizer = fit(net, N_STEPS - 1 if end == "num_steps" else 10**6)
    if end == "settle":
        optimizer.settle()
    if end == "nobody":
        del optimizer
    if end == "shutdown":
        bps.shutdown()
    parameters = list(net.named_parameters())
    if end != "nobody":
        assert {type(p) for _, p in parameters} == {torch.nn.Parameter}
    found = {name: value.detach().numpy().tobytes() for name, value in parameters}
    return found == want


def fail_once():
    """The user's optimizer raises in an update: the next use tries again, and nothing is lost."""
    want = train(False)[1]
    net = Network()
    base = OPTIMIZERS["sgd"](net.parameters())
    optimizer = bps.DistributedOptimizer(base, net.named_parameters(), cross_barrier=True)
    for step in range(N_STEPS):
        if step == 3:
            plain, torch.optim.SGD.step = torch.optim.SGD.step, broken
            try:
                net(torch.ones(1, 6, 12))
            except ZeroDivisionError:
                pass
            finally:
                torch.optim.SGD.step = plain
        loss_of(net, step).backward()
        optimizer.step()
        net.zero_grad()
    return {name: value.numpy().tobytes() for name, value in net.state_dict().items()} == want


def broken(self):
    raise ZeroDivisionError


def test_an_update_that_fails_is_made_later(two):
    assert two.run(fail_once) == [True] * 2


def halves(path):
    """Rank 1 computes the gradient of `b` only after rank 0 has used the new `a`: a barrier would block both."""
    torch.manual_seed(1)
    net = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)})
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(),
                                         cross_barrier=True)
    x = torch.ones(2, 4)
    used = Path(path)
    for step in range(2):
        net["a"](x).sum().backward()
        if step == 1 and bps.rank() == 1:
            deadline = time.monotonic() + 30
            while not used.exists():
                assert time.monotonic() < deadline, "rank 0 waits for what it does not need"
                time.sleep(0.001)
        net["b"](x).sum().backward()
        before = net["a"].weight.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
    net["a"](x)
    changed = not torch.equal(before, net["a"].weight)
    if bps.rank() == 0:
        used.touch()
    net["b"](x)
    optimizer.synchronize()
    return changed, net["b"].weight.detach().numpy().tobytes()


def test_a_layer_waits_for_its_own_parameters_only(shared_job, tmp_path):
    job = shared_job(ranks=(2,), transport="auto", fusion_bytes=0)
    (first, ours), (second, theirs) = job.run(halves, str(tmp_path / "used"))
    assert first and second and ours == theirs


class Clock(torch.optim.SGD):
    """Counts its steps."""

    n_steps = 0

    def step(self, closure=None):
        self.n_steps += 1
        return super().step(closure)


class Counting(torch.optim.SGD):
    """Counts its steps in its groups."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["n_steps"] = group.get("n_steps", 0) + 1
        return super().step(closure)


def misuse(kind):
    net = Network()
    base = {"lbfgs": torch.optim.LBFGS, "groups": Counting, "clock": Clock}.get(kind, torch.optim.SGD)
    optimizer = bps.DistributedOptimizer(base(net.parameters(), lr=0.1), net.named_parameters(), cross_barrier=True)
    if kind == "closure":
        optimizer.step(lambda: 0.0)
    if kind == "scripted":
        net.first = torch.jit.trace(net.first, torch.ones(1, 6, 12))
    for step in range(3):
        loss_of(net, step).backward()
        if kind == "clip":
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if kind == "zero":
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    if kind == "twice":
        loss_of(net, 2).backward()
        loss_of(net, 2).backward()


@pytest.mark.parametrize(("kind", "error", "text"), [
    ("lbfgs", UnsupportedError, "LBFGS cannot do"),
    ("groups", UnsupportedError, "Counting changes n_steps of parameter group 0"),
    ("closure", UnsupportedError, "closure"),
    ("clip", BusyError, "clipping by norm"),
    ("zero", UnderWayError, r"after loss.backward\(\) but before optimizer.step\(\)"),
    ("twice", BusyError, "computed over backward_passes_per_step=1 times"),
    ("clock", UnsupportedError, "Clock changes its n_steps in a step"),
    ("scripted", BusyError, "'first.weight' before its update|'first.bias' before its update"),
])
def test_misuse_is_named(job, kind, error, text):
    started = job(ranks=(2,))
    for outcome in started.attempt(misuse, kind):
        assert outcome.error == error.__name__ and re.search(text, outcome.text), outcome
