"""Gradients leave torch in the order of the forward pass, whatever the order of their names."""
from __future__ import annotations

import pytest
import torch

import bpsfast.torch as bps
from bpsfast.torch.exchange import forward_order
from bpsfast.trainer import process


@pytest.mark.parametrize(("seen", "expected"), [
    ("", "abcdef"), ("fedcba", "abcdef"), ("abcdef", "fedcba"), ("badc", "cdefab"), ("c", "abcdef"), ("ca", "abcdef"),
    ("ace", "efcdab"), ("acea", "efcdab"),
])
def test_the_forward_pass_is_backward_backwards(seen, expected):
    assert "".join(forward_order("abcdef", seen)) == expected


class Scrambled(torch.nn.Module):
    """Uses its layers in another order than it declares them; one is used twice, one never, one by its weight."""

    def __init__(self):
        super().__init__()
        for name in ("third", "unused", "shared", "first", "by_weight"):
            setattr(self, name, torch.nn.Linear(64, 64, bias=False))

    def forward(self, x):
        x = self.shared(self.first(x) / 8)
        return self.shared(torch.nn.functional.linear(self.third(x), self.by_weight.weight) / 8)


class Odd(Scrambled):
    """Uses its layers in another order on odd ranks."""

    def forward(self, x):
        if bps.rank() % 2 == 0:
            return super().forward(x)
        return self.first(self.third(self.by_weight(self.shared(x) / 8)) / 8)


def train(kind, prefix, passes=1, crosses=False, spoils=False):
    """Return the layers of a trained model in the order of their partitions, and its parameters."""
    torch.manual_seed(5)
    model = kind()
    named = [(f"{prefix}.{name}", parameter) for name, parameter in model.named_parameters()]
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), named,
                                         backward_passes_per_step=passes, cross_barrier=crosses)
    if spoils:  # a hook of the user's, which runs after ours
        model.third.weight.register_post_accumulate_grad_hook(spoil)
    for step in range(3):
        for number in range(passes):
            torch.manual_seed(100 * step + 10 * number + bps.rank())
            model(torch.randn(4, 64)).square().mean().backward()
        if spoils:
            model.first.weight.grad += 1  # too late: it has gone
        optimizer.step()
        optimizer.zero_grad()
    return in_order(prefix), {name: value.numpy() for name, value in model.state_dict().items()}


def spoil(parameter):
    parameter.grad.mul_(3)


def in_order(prefix):
    """Return the layers in the order of their partitions."""
    place = {name: (unit.first_part, member.offset) for unit in process.current().tensors.units()
             for name, member in unit.members.items() if name.startswith(f"Gradient.{prefix}.")}
    return [name.split(".")[-2] for name in sorted(place, key=lambda name: place[name])]


@pytest.fixture(scope="module", params=["alone", "fused"])
def pair(request, shared_job):
    """Two ranks whose gradients are units of their own, or fused by threes."""
    return shared_job(ranks=(2,), fusion_bytes=0 if request.param == "alone" else 3 * 64 * 64 * 4)


def scrambled(*arguments):
    return train(Scrambled, *arguments)


def odd(*arguments):
    return train(Odd, *arguments)


EXPECTED = ["first", "shared", "third", "unused", "by_weight"]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("crosses", [False, True])
def test_layers_travel_in_the_order_of_their_use(pair, passes, crosses):
    results = pair.run(scrambled, f"used {passes} {crosses}", passes, crosses)
    assert [order for order, _ in results] == [EXPECTED] * 2
    assert_equal(*results)


def test_what_happens_to_a_gradient_after_backward_happens_to_no_sum(pair):
    results = pair.run(scrambled, "clean") + pair.run(scrambled, "spoilt", 1, False, True)
    assert_equal(*results)


def test_rank_0s_order_counts_where_ranks_differ(pair):
    results = pair.run(odd, "odd")
    assert [order for order, _ in results] == [EXPECTED] * 2
    assert_equal(*results)


def halves(prefix):
    """Train two halves by an optimizer each, which ranks use differently in the first step; return all parameters."""
    torch.manual_seed(7)
    first, second = (torch.nn.Linear(64, 64, bias=False) for _ in range(2))
    optimizers = [
        bps.DistributedOptimizer(torch.optim.SGD(half.parameters(), lr=0.1), [(f"{prefix}.{name}", half.weight)])
        for name, half in (("first", first), ("second", second))]
    for step in range(3):
        torch.manual_seed(100 * step + bps.rank())
        x = torch.randn(4, 64)
        if step or bps.rank() == 0:
            (second(first(x)) if bps.rank() == 0 else first(second(x))).square().mean().backward()
        bps.push_pull(torch.ones(3), name=f"{prefix}.loss")  # no rank is kept in its backward pass by another
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [], {"first": first.weight.detach().numpy(), "second": second.weight.detach().numpy()}


def test_backward_waits_for_no_other_rank(pair):
    assert_equal(*pair.run(halves, "halves"))


def compiled(prefix):
    """As `train`, of a compiled model of twelve layers."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(12)))
    named = [(f"{prefix}.{name}", parameter) for name, parameter in model.named_parameters()]
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), named)
    torch.compile(model, backend="aot_eager")(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    return in_order(prefix)


def test_the_order_of_names_counts_where_torch_has_compiled(job):
    assert job(ranks=(2,), fusion_bytes=0).run(compiled, "compiled") == [[str(layer) for layer in range(12)]] * 2


def assert_equal(first, *others):
    for _, parameters in others:
        for name, value in parameters.items():
            assert value.tobytes() == first[1][name].tobytes(), name
