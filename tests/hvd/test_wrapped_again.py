"""Parameters that several optimizers and modules wrap, one after another or at once, and their memory."""
from __future__ import annotations

import gc

import pytest
import torch

import bpsfast
import bpsfast.hvd as hvd
import bpsfast.torch as bps
from bpsfast.torch.outer_optimizer import OuterOptimizer
from bpsfast.torch.parallel import DistributedDataParallel
from bpsfast.trainer import process
from tests.support.hvd_ranks import begun

WAYS = {"bps": (bps, {}), "cross": (bps, {"cross_barrier": True}), "hvd": (hvd, {}), "ddp": (bps, {}),
        "hvd max": (hvd, {"op": hvd.Max})}

#: Units of hvd's operations, which come with the first ones that are fused: when that is depends on who is fast.
FUSED = "bpsfast.group/"


@pytest.fixture(scope="module")
def pair(shared_job):
    return begun(shared_job(ranks=(2,)))


class Net(torch.nn.Module):
    """Its numbers are exact in float16."""

    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 1)
        for p in self.parameters():
            torch.nn.init.constant_(p, 0.25)

    def forward(self, x):
        return self.head(self.body(x)).sum()


def train(way, model, part, compression, kept):
    """A step of an optimizer of *part* of *model*, whose gradients are of the loss of both ranks; return the gradients.
    """
    made, options = WAYS[way]
    parameters = list(part.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    forward = model
    if way == "ddp":
        forward = DistributedDataParallel(model, compression=getattr(bps.Compression, compression))
    else:
        known = {id(p) for p in parameters}
        named = [(name, p) for name, p in model.named_parameters() if id(p) in known]
        optimizer = made.DistributedOptimizer(optimizer, named, compression=getattr(made.Compression, compression),
                                              **options)
    kept.append((optimizer, forward))
    for _ in range(3):
        optimizer.zero_grad()
        forward(torch.full((1, 64), float(bps.rank()))).backward()
        optimizer.step()
        if way == "cross":
            optimizer.synchronize()
    return [p.grad.flatten()[0].item() for p in parameters]


def again(way, keeps):
    """Return the gradients, and the job's units after each round."""
    torch.set_num_threads(1)
    session = process.current()
    model, found, sizes, kept = Net(), [], [], []
    parts = [(model.head, "none"), (model, "none"), (model, "fp16"), (model.body, "none")]
    for _ in range(5):
        for part, compression in parts[:3] if keeps else parts:  # who keeps that of the body has to step it, too
            found.append(train(way, model, part, compression, kept))
            model.zero_grad()
            if not keeps:
                kept.clear()
        gc.collect()
        session.barrier()
        mapped = sum(segment.nbytes for segment in session.memory.segments.values())
        own = [unit for unit in session.tensors.units() if not unit.name.startswith(FUSED)]
        sizes.append((len(own), mapped))
    return found, sizes


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("keeps", [False, True])
def test_parts_of_a_model_and_all_of_it(pair, way, keeps):
    factor = 2 if way == "hvd max" else 1
    body, head, bias = 0.125 * factor, 8.0 * factor, 1.0
    for found, sizes in pair.run(again, way, keeps):
        once = [[head, bias], [body, head, bias], [body, head, bias], [body]]
        assert found == (once[:3] if keeps else once) * 5
        if not keeps:
            assert sizes[4][0] <= sizes[1][0] and sizes[4][1] == sizes[2][1], sizes


def rows_again():
    """As `again`, for sparse gradients; return the number of the rank's units after each round."""
    table, n_units = torch.nn.Embedding(64, 8, sparse=True), []
    for _ in range(4):
        optimizer = bps.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.0), [("table", table.weight)])
        for _ in range(2):
            optimizer.zero_grad()
            table(torch.tensor([bps.rank()])).sum().backward()
            optimizer.step()
        assert table.weight.grad.to_dense()[:2, 0].tolist() == [0.5, 0.5]
        del optimizer
        gc.collect()
        n_units.append(len(process.current().tensors.units()))
    return n_units


def test_rows_are_given_back(pair):
    for n_units in pair.run(rows_again):
        assert len(set(n_units)) == 1


def overtaken():
    """The first of two optimizers has gradients under way when the second takes over its parameters."""
    model = Net()
    first = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters("overtaken"))

    def backward():
        model(torch.full((1, 64), float(bps.rank()))).backward()
        return model.head.weight.grad[0, 0].item()

    backward()
    first.step()
    first.zero_grad()
    if bps.rank():
        backward()
    second = bps.DistributedOptimizer(torch.optim.SGD(model.head.parameters(), lr=0.0),
                                      model.head.named_parameters("overtaken.head"))
    backward()
    second.step()
    second.zero_grad()
    with pytest.raises(bpsfast.BusyError, match="another optimizer has some of"):
        first.step()
    model.zero_grad()
    backward()
    first.step()
    return model.head.weight.grad[0, 0].item(), model.body.weight.grad[0, 0].item()


def test_gradients_under_way_of_an_optimizer_that_is_overtaken(pair):
    assert pair.run(overtaken) == [(8.0, 0.125)] * 2


def overtaken_across_the_barrier():
    """As `overtaken`, but the first one's updates are due: they are refused, and never made."""
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(layer.weight, 0.0)
    first = bps.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0), layer.named_parameters("crossing"),
                                     cross_barrier=True)
    layer(torch.ones(1, 1)).backward()
    first.step()
    first.zero_grad()
    layer(torch.ones(1, 1)).backward()
    second = bps.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.0),
                                      layer.named_parameters("crossing too"))
    layer.weight.grad = None
    layer(torch.full((1, 1), 10.0)).backward()
    first.step()
    with pytest.raises(bpsfast.BusyError, match="another optimizer has some of"):
        layer.weight.item()
    del second
    return layer.weight.item()


def test_an_update_that_was_refused_is_never_made(pair):
    assert pair.run(overtaken_across_the_barrier) == [-1.0, -1.0]


def overtaken_on_one_rank():
    """As `overtaken_across_the_barrier`, but only rank 1 has made another optimizer."""
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(layer.weight, 0.0)
    first = bps.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0), layer.named_parameters("one rank"),
                                     cross_barrier=True)
    layer(torch.ones(1, 1)).backward()
    first.step()
    first.zero_grad()
    layer(torch.ones(1, 1)).backward()
    if bpsfast.rank():
        second = bps.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.0), layer.named_parameters("alone"))
        layer.weight.grad = None
        layer(torch.full((1, 1), 10.0)).backward()
        del second
    first.step()
    try:
        layer.weight.item()
    except bpsfast.BusyError as exc:
        return "another optimizer has some of" in str(exc), layer.weight.item()
    return False, layer.weight.item()


def test_a_step_that_one_rank_refuses_is_an_error_on_all(pair):
    (told, _), (refused, value) = pair.run(overtaken_on_one_rank)
    assert told and refused and value == -1.0, "rank 1 has not made its update"


def summed_twice(op_name):
    layer = torch.nn.Linear(1, 1, bias=False)
    first, second = (hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.0),
                                              layer.named_parameters(f"{op_name} {which}"), op=getattr(hvd, op_name))
                     for which in ("first", "second"))
    for _ in range(2):
        second.zero_grad()
        layer(torch.full((1, 1), 3.0)).backward()
        second.step()
        once = layer.weight.grad.item()
        try:
            first.step()
        except bpsfast.BusyError as exc:
            assert "has summed their gradients" in str(exc)
            once = -once
    return once


@pytest.mark.parametrize(("op_name", "wanted"), [("Sum", -6.0), ("Product", -9.0), ("Average", 3.0)])
def test_what_one_optimizer_has_summed_another_does_not_sum_again(pair, op_name, wanted):
    assert pair.run(summed_twice, op_name) == [wanted, wanted]


def undead():
    """Rank 1 still has a module that is gone on the other rank, and whose last forward pass had no backward pass."""
    model = Net()
    first = DistributedDataParallel(model)
    first(torch.ones(1, 64)).backward()
    first(torch.ones(1, 64))
    kept = [first] if bps.rank() else []
    del first
    second = DistributedDataParallel(model)
    for _ in range(2):
        model.zero_grad()
        second(torch.full((1, 64), float(bps.rank()))).backward()
    kept.clear()
    return model.head.weight.grad[0, 0].item()


def test_a_module_that_one_rank_still_has_sends_nothing(pair):
    assert pair.run(undead) == [8.0, 8.0]


def one_of_two_refused():
    models = Net(), Net()
    first, second = map(DistributedDataParallel, models)

    def backward():
        for model in models:
            model.zero_grad()
        x = torch.full((1, 64), float(bps.rank()))
        (first(x) + second(x)).backward()
        return [model.head.weight.grad[0, 0].item() for model in models]

    found = [backward()]
    models[0].head = torch.nn.Linear(64, 1)
    with pytest.raises(bpsfast.UnsupportedError, match="that were added"):
        backward()
    torch.nn.init.constant_(models[0].head.weight, 0.25)
    first = DistributedDataParallel(models[0])
    return [*found, backward(), backward()]


def test_of_two_modules_in_one_backward_pass_one_is_refused(pair):
    assert pair.run(one_of_two_refused) == [[[8.0, 8.0]] * 3] * 2


def another_runtime():
    found = []
    for number in range(2):
        layer = torch.nn.Linear(4, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.0),
                                             layer.named_parameters(f"runtime {number}"))
        layer(torch.full((1, 4), float(hvd.rank()))).sum().backward()
        optimizer.step()
        found.append(layer.weight.grad[0, 0].item())
        del optimizer
        hvd.shutdown()
        hvd.init()
    return found


def test_horovod_is_begun_again_in_one_job(pair):
    assert pair.run(another_runtime) == [[0.5, 0.5]] * 2


def wrapped(model, prefix):
    return bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(prefix))


def housed(prefix):
    """Return a model whose gradients live in the segment, and its optimizer."""
    model = Net()
    optimizer = wrapped(model, prefix)
    for _ in range(4):
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(1, 64)).backward()
        optimizer.step()
    return model, optimizer


def is_inside(gradient):
    return process.current().memory.locate(gradient.data_ptr(), 4) is not None


def kept_home():
    """A gradient in the memory of an optimizer that is gone keeps its values."""
    model, optimizer = housed("home")
    gradient = model.head.weight.grad
    inside = is_inside(gradient)
    del optimizer
    gc.collect()
    for seed in range(3):
        other = Net()
        made = wrapped(other, f"other {seed}")
        other(torch.full((1, 64), 7.0)).backward()
        made.step()
    return inside, gradient[0, :3].tolist()


def test_a_gradient_outlives_its_optimizer(pair):
    assert pair.run(kept_home) == [(True, [16.0] * 3)] * 2


def moved_out():
    """Return whether a gradient is in the segment: with one optimizer, with another of its parameters, without that."""
    model, first = housed("moved out")
    found = [is_inside(model.head.weight.grad)]
    second = wrapped(model, "moved out, too")
    found.append(is_inside(model.head.weight.grad))
    value = model.head.weight.grad[0, 0].item()
    second.zero_grad(set_to_none=False)
    first.zero_grad(set_to_none=False)
    found.append(is_inside(model.head.weight.grad))
    del second
    gc.collect()
    first.zero_grad(set_to_none=False)
    return [*found, is_inside(model.head.weight.grad), value]


def test_gradients_of_two_optimizers_live_outside_of_the_segment(pair):
    assert pair.run(moved_out) == [[True, False, False, True, 16.0]] * 2


def local_ways(kind):
    """Optimizers that push parameters instead of gradients refuse what they do not know, before anything changes."""
    model = Net()
    model.body.requires_grad_(False)
    optimizer = OuterOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model, 2)
    model(torch.ones(1, 64)).backward()
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    if kind == "frozen":
        model.head.requires_grad_(False)
    else:
        model.body.requires_grad_(True)
        model(torch.ones(1, 64)).backward()
    try:
        optimizer.step()
    except bpsfast.UnsupportedError as exc:
        return str(exc), all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
    return "", False


@pytest.mark.parametrize(("kind", "words"), [("frozen", "outer momentum"), ("thawed", "would stay this rank's")])
def test_outer_steps_of_other_parameters_are_refused(pair, kind, words):
    for text, is_same in pair.run(local_ways, kind):
        assert words in text and is_same


def joins():
    """Rank 1 has no data left when rank 0 thaws a layer; later both train it."""
    model = Net()
    model.body.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters("joins"))
    found = []

    def step():
        optimizer.zero_grad()
        model(torch.full((1, 64), 1.0 + hvd.rank())).backward()
        optimizer.step()
        found.append([None if p.grad is None else p.grad.flatten()[0].item() for p in model.parameters()])

    step()
    if hvd.rank() == 0:
        step()
        model.body.requires_grad_(True)
        step()
        step()
    hvd.join()
    model.body.requires_grad_(False)
    step()
    model.body.requires_grad_(True)
    step()
    return found


def test_a_layer_is_thawed_while_a_rank_has_joined(pair):
    alone, both = [0.125, 8.0, 0.5], [0.375, 24.0, 1.0]
    first = [[None, *both[1:]], [None, *alone[1:]], alone, alone, [None, *both[1:]], both]
    assert pair.run(joins) == [first, [first[0], *first[4:]]]
