"""bpsfast.hvd's DistributedOptimizer, compared with one process that computes and reduces all ranks' gradients."""
from __future__ import annotations

import warnings

import pytest
import torch

import bpsfast.hvd as hvd
from bpsfast.trainer import process
from tests.support.compressed_rounds import Replay, values
from tests.support.hvd_ranks import begun, of_shapes

pytestmark = pytest.mark.matrix

SHAPE = (300, 100)
TOP = hvd.Compression.topk(0.05, error_feedback=True)

ranks = of_shapes((1,), (2,), (3,), (2, 2))


@pytest.fixture
def pair(shared_job):
    return begun(shared_job(ranks=(2,), transport="tcp", fusion_bytes=64))


class Net(torch.nn.Module):
    def __init__(self, sparse=False):
        super().__init__()
        torch.manual_seed(11)
        self.embedding = torch.nn.Embedding(8, 4, sparse=sparse)
        self.first = torch.nn.Linear(4, 5)
        self.second = torch.nn.Linear(5, 1)
        self.unused = torch.nn.Parameter(torch.ones(3))

    def forward(self, rank, step, number=0):
        words = torch.tensor([rank, (step + number) % 8, 7])
        return self.second(torch.tanh(self.first(self.embedding(words)))).square().sum() * (rank + 1)


def reference(n, op, steps, passes, ranks):
    """Return the parameters after training in this process with the reduced gradients of *ranks*."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step in range(steps):
        every = []
        for rank in ranks:
            model.zero_grad(set_to_none=True)
            for number in range(passes):
                model(rank, step, number).backward()
            every.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()])
        for p, gradients in zip(model.parameters(), zip(*every)):
            stacked = torch.stack(gradients)
            p.grad = {hvd.Average: stacked.mean(0), hvd.Sum: stacked.sum(0), hvd.Min: stacked.amin(0),
                      hvd.Max: stacked.amax(0), hvd.Product: stacked.prod(0)}[op]
        optimizer.step()
    return model.state_dict()


def train(title, sparse=False, steps=3, by_name=True, clips=False, to_none=True, **arguments):
    """Train by DistributedOptimizer; return whether all parameters are those of `reference`."""
    model = Net(sparse)
    names = [(f"{title}.{name}", p) for name, p in model.named_parameters()] if by_name else None
    for key in ("groups",):
        if arguments.get(key) == "tensors":
            arguments[key] = [[model.second.weight, model.first.bias], [model.embedding.weight]]
    if arguments.get("process_set") == "odd":
        arguments["process_set"] = hvd.add_process_set(range(1, hvd.size(), 2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), names, **arguments)
    passes = arguments.get("backward_passes_per_step", 1)
    for step in range(steps):
        for number in range(passes):
            model(hvd.rank(), step, number).backward()
        if clips:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    of = arguments["process_set"].ranks if "process_set" in arguments else range(hvd.size())
    if hvd.rank() not in of:
        of = [hvd.rank()]
    expected = reference(len(of), arguments.get("op", hvd.Average), steps, passes, of)
    if "process_set" in arguments:
        hvd.remove_process_set(arguments["process_set"])
    return [name for name, value in model.state_dict().items()
            if not torch.allclose(value, expected[name], rtol=1e-4, atol=1e-5)]


def trainings(cases):
    return [(title, wrong) for title, arguments in cases if (wrong := train(title, **arguments))]



WAYS = [
    ("average", {}), ("sum", {"op": 1}), ("min", {"op": 3}), ("max", {"op": 4}), ("product", {"op": 5}),
    ("numbered", {"by_name": False}), ("clipped", {"clips": True}), ("kept", {"to_none": False}),
    ("passes", {"backward_passes_per_step": 2}), ("predivided", {"gradient_predivide_factor": 4.0}),
    ("groups", {"groups": 2}), ("lists", {"groups": "tensors"}),
    ("groups of maxima", {"groups": 2, "op": 4}), ("lists of maxima", {"groups": "tensors", "op": 4}),
    ("passes of maxima", {"op": 4, "backward_passes_per_step": 2, "groups": 3}),
    ("predivided and kept", {"gradient_predivide_factor": 2.0, "to_none": False}),
]
SPARSE = [
    ("sparse", {"sparse": True, "by_name": True}), ("sparse sums", {"sparse": True, "op": 1}),
    ("sparse as dense", {"sparse": True, "sparse_as_dense": True}),
    ("sparse as dense maxima", {"sparse": True, "sparse_as_dense": True, "op": 4}),
]


def test_every_way_to_reduce(ranks):
    assert ranks.run(trainings, WAYS) == [[]] * ranks.size


def test_sparse_gradients(ranks):
    assert ranks.run(trainings, SPARSE) == [[]] * ranks.size


def test_a_process_set(ranks):
    if ranks.size > 1:
        cases = [("set", {"process_set": "odd"}), ("set, sparse", {"process_set": "odd", "sparse": True}),
                 ("set, groups", {"process_set": "odd", "groups": 2, "op": 1})]
        assert ranks.run(trainings, cases) == [[]] * ranks.size


def narrow():
    """Check float16 and a user's own compressor."""
    wrong = []

    class Thirds:
        @staticmethod
        def compress(tensor):
            return tensor / 3, 3.0

        @staticmethod
        def decompress(tensor, ctx):
            return tensor * ctx

    for compression in (hvd.Compression.fp16, Thirds):
        for op in (hvd.Average, hvd.Max):
            p = torch.nn.Parameter(torch.zeros(3))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [(f"p {compression} {op}", p)],
                                                 compression, op=op)
            (p * (hvd.rank() + 1.0)).sum().backward()
            optimizer.step()
            n = hvd.size()
            if not torch.allclose(p, torch.full((3,), -((n + 1) / 2 if op == hvd.Average else float(n)))):
                wrong.append(f"{compression} {op}")
    return wrong


def test_compression(ranks):
    assert ranks.run(narrow) == [[]] * ranks.size


def sometimes_sparse():
    """One rank's gradient is sparse, the other's dense; then one rank has none at all."""
    found = []
    embedding = torch.nn.Embedding(4, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=0.0),
                                         [("sometimes", embedding.weight)])
    for step in range(3):
        if step < 2 or hvd.rank() == 0:
            torch.nn.functional.embedding(torch.tensor([hvd.rank()]), embedding.weight,
                                          sparse=hvd.rank() == 0).sum().backward()
        optimizer.step()
        gradient = embedding.weight.grad
        found.append((gradient.is_sparse, gradient.to_dense().tolist()))
        optimizer.zero_grad()
    return found


def test_gradients_that_are_sparse_on_one_rank_only(pair):
    both = [[0.5, 0.5], [0.5, 0.5], [0, 0], [0, 0]]
    one = [[0.5, 0.5], [0, 0], [0, 0], [0, 0]]
    assert pair.run(sometimes_sparse) == [
        [(True, both), (True, both), (True, one)], [(False, both), (False, both), (True, one)]]


def arguments():
    model = Net()
    named = list(model.named_parameters())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for kwargs, error, text in (
            ({"named_parameters": model.parameters()}, ValueError,
             r"named_parameters should be a sequence of tuples \(name, parameter\), usually produced by "
             r"model.named_parameters\(\)."),
            ({"named_parameters": [*named, ("first.bias", model.unused)]}, ValueError,
             "Parameter names in named_parameters must be unique. Found duplicates: first.bias"),
            ({"named_parameters": named[1:]}, ValueError,
             "named_parameters was specified, but one or more model parameters were not named. Python object ids: "),
            ({"groups": 0}, ValueError, "groups should be a non-negative integer or a list of list of torch.Tensor."),
            ({"groups": [["a"]]}, ValueError, "groups must consist of torch.Tensor."),
            ({"groups": [[model.unused], [model.unused]]}, ValueError, "A parameter can only appear once in groups."),
            ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, ValueError,
             "gradient_predivide_factor not supported with op != Average"),
            ({"backward_passes_per_step": 0}, ValueError, "backward_passes_per_step must be > 0"),
            ({"op": hvd.Adasum}, NotImplementedError, "Adasum"), ({"op": 17}, ValueError, "op=17 is no reduction"),
            ({"compression": 3}, ValueError, "compression=3")):
        with pytest.raises(error, match=text):
            hvd.DistributedOptimizer(sgd, **kwargs)
    with pytest.warns(DeprecationWarning, match="Parameter `num_groups` has been replaced by `groups`"):
        optimizer = hvd.DistributedOptimizer(sgd, [(f"arguments.{name}", p) for name, p in named], num_groups=2)
    with pytest.raises(ValueError, match=r"DistributedOptimizer, .* already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(TypeError, match="before the optimizer is wrapped"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match="must be > 0"):
        optimizer.set_backward_passes_per_step(0)
    return isinstance(optimizer, torch.optim.SGD), type(optimizer).__name__


def test_bad_arguments_in_horovods_words(pair):
    assert pair.run(arguments) == [(True, "SGD")] * 2


def misuse(op):
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.0), [(f"misuse {op}", p)], op=op)
    for _ in range(2):  # the first step declares, the second sends at once
        p.sum().backward()
        with pytest.raises(AssertionError, match=r"Gradients were computed more than backward_passes_per_step times "
                                                 r"before call to step\(\)."):
            p.sum().backward()
        with pytest.raises(AssertionError, match=r"optimizer.zero_grad\(\) was called after loss.backward\(\) but"):
            optimizer.zero_grad()
        p.grad.fill_(hvd.rank() + 1.0) if op == hvd.Max else None
        optimizer.synchronize()
        with pytest.warns(UserWarning, match=r"optimizer.step\(\) called without optimizer.skip_synchronize\(\)"):
            optimizer.step()
        optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(2)
    for _ in range(2):
        p.sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    sums = p.grad.tolist()
    optimizer.load_state_dict(optimizer.state_dict())
    return sums


@pytest.mark.parametrize("op", [0, 4])
def test_misuse_in_horovods_words(pair, op):
    assert pair.run(misuse, op) == [[2.0, 2.0]] * 2


def by_closure():
    p = torch.nn.Parameter(torch.full((1,), float(4)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.25), [("closure", p)])

    def closure():
        optimizer.zero_grad()
        loss = (p * (hvd.rank() + 1)).sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(2)]
    return losses, p.item()


def test_a_closure(pair):
    assert pair.run(by_closure) == [([4.0, 3.625], 3.25), ([8.0, 7.25], 3.25)]


def compressed(names, steps=3):
    """Step with halving learning rates; return the gradients, and the sizes of their partitions."""
    big, small = torch.nn.Parameter(torch.zeros(SHAPE)), torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([big, small], lr=1.0),
                                         [(f"{names} big", big), (f"{names} small", small)], TOP,
                                         gradient_predivide_factor=2.0)
    found = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.5 ** step
        optimizer.zero_grad()
        ((big * torch.from_numpy(values(0, hvd.rank(), step, SHAPE, "float32"))).sum() + small.sum()).backward()
        optimizer.synchronize()
        found.append(big.grad.numpy().copy())
        assert small.grad.tolist() == [1.0] * 3
        with optimizer.skip_synchronize():
            optimizer.step()
    unit = next(unit for unit in process.current().tensors.units() if unit.name.endswith(f"{names} big"))
    return found, unit.codec, unit.stride


def test_gradients_are_compressed_between_nodes(shared_job):
    ranks = begun(shared_job(ranks=(2, 1), transport="tcp"))
    for found, codec, stride in ranks.run(compressed, "compressed"):
        assert codec == TOP
        replay = Replay(TOP, SHAPE[0] * SHAPE[1], "float32", stride, (2, 1))
        for step in range(3):
            halves = [values(0, rank, step, SHAPE, "float32") / 2 for rank in range(3)]
            want = replay.round(halves, ratio=2.0 if step else 1.0) * 2
            assert found[step].tobytes() == want.tobytes(), f"step {step}"


def joined_early():
    """Rank 0 joins after a step; the last one's gradients are still summed, and compressed."""
    p = torch.nn.Parameter(torch.zeros(SHAPE))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("joined early", p)], hvd.Compression.onebit())
    for _ in range(1 if hvd.rank() == 0 else 2):
        optimizer.zero_grad()
        p.sum().backward()
        optimizer.step()
    hvd.join()
    return p.grad.unique().tolist()


def test_a_rank_that_has_joined_sends_zeros_by_the_codec(shared_job):
    ranks = begun(shared_job(ranks=(2, 1), transport="tcp"))
    first, second, third = ranks.run(joined_early)
    assert first == [1.0] and second == third and len(second) == 1 and second[0] == pytest.approx(2 / 3)


def refused_codec(kind):
    p = torch.nn.Parameter(torch.zeros(SHAPE))
    if kind == "minimum":
        hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("refused", p)], TOP, op=hvd.Min)
    if kind == "momentum":
        hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("refused", p)], hvd.Compression.onebit(momentum=0.9))
    if kind == "call":
        hvd.allreduce(torch.zeros(SHAPE), name="refused", compression=TOP)


@pytest.mark.parametrize(("kind", "error", "text"), [
    ("minimum", "UnsupportedError", "reduced by Min over ProcessSet"),
    ("momentum", "UnsupportedError", "are for bpsfast.torch.DistributedOptimizer"),
    ("call", "ConfigError", "no functions compress and decompress")])
def test_where_codecs_do_not_go(pair, kind, error, text):
    for outcome in pair.attempt(refused_codec, kind):
        assert outcome.error == error and text in outcome.text
