"""BytePS's operations and optimizers in jobs of every shape: all dtypes, and gradients by finite differences."""
from __future__ import annotations

import itertools

import pytest
import torch

import bpsfast.torch as bps
from bpsfast.orchestration.errors import ClosedError, ConfigError, UnsupportedError
from tests.support.every_shape import numerical_gradient

pytestmark = pytest.mark.matrix

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
OTHERS = (torch.bool, torch.complex64)  # which can be broadcast
#: Of one rounding of a sum to the dtype.
TOLERANCES = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def given(rank, dtype, shape):
    """Return the tensor of *rank*: small integers, so that float sums are exact."""
    n = torch.Size(shape).numel()
    return ((torch.arange(n).reshape(shape) % 5) * (rank + 1) + rank).to(dtype)


def defined(dtype, shape, average):
    """Return the sum of all ranks' tensors, or the mean as it is defined."""
    total = sum(given(rank, dtype, shape).to(torch.int64 if dtype in INTEGERS else torch.float64)
                for rank in range(bps.size()))
    if not average:
        return total.to(dtype)
    return (total // bps.size() if dtype in INTEGERS else total / bps.size()).to(dtype)


#: (dtype, shape, average): all dtypes, and odd shapes of one of them.
SUMS = [*itertools.product((*INTEGERS, *FLOATS), [(2, 3)], (True, False)),
        *itertools.product([torch.float32], [(), (0, 2), (3000,)], (True, False))]


def sums():
    for dtype, shape, average in SUMS:
        name, mine = f"sums {dtype} {shape} {average}", given(bps.rank(), dtype, shape)
        wanted = defined(dtype, shape, average)
        found = {}
        x = mine.clone()
        found["push_pull"] = bps.push_pull(x, average, name)
        handle = bps.push_pull_async(x, average, name)
        found["push_pull_async"] = bps.synchronize(handle)
        assert bps.poll(handle) and bps.synchronize(handle) is found["push_pull_async"]
        assert torch.equal(x, mine) and all(y.data_ptr() != x.data_ptr() or not y.numel() for y in found.values())
        found["push_pull_inplace"] = bps.push_pull_inplace(x, average, name)
        y, z = mine.clone(), mine.clone()
        assert found["push_pull_inplace"] is x
        found["byteps_push_pull"] = bps.synchronize(bps.byteps_push_pull(y, average, name))
        found["group"] = bps.synchronize(bps.push_pull_group_sync_inplace(z, average, name)[0])
        assert found["byteps_push_pull"] is y and found["group"] is z
        for how, result in found.items():
            assert result.dtype == dtype and torch.equal(result, wanted), (how, dtype, shape, average, result, wanted)


def test_sums_and_means_of_all_dtypes(everywhere):
    everywhere.run(sums)


def total(number):
    return bps.push_pull(torch.tensor([number], dtype=torch.float64), False, "total").item()


def by_differences():
    generator = torch.Generator().manual_seed(bps.rank())
    weight = torch.randn(3, generator=generator, dtype=torch.float64)
    for average in (True, False):
        def loss(x, average=average):
            return bps.push_pull(x.square(), average, f"difference {average}").mul(weight).sum()

        x = torch.randn(3, generator=generator, dtype=torch.float64).requires_grad_()
        loss(x).backward()
        found = numerical_gradient(lambda x: loss(x).item(), x.detach().clone(), bps.rank(), bps.size(), total)
        assert torch.allclose(x.grad, found, rtol=1e-6, atol=1e-6), (x.grad, found)


def test_gradients_are_finite_differences(everywhere):
    everywhere.run(by_differences)


def by_definition():
    for dtype, average in itertools.product(FLOATS, (True, False)):
        x = given(bps.rank(), dtype, (4,)).requires_grad_()
        (bps.push_pull(x * 2, average, f"gradient {dtype} {average}") * (bps.rank() + 1)).sum().backward()
        weights = sum(range(1, bps.size() + 1)) / (bps.size() if average else 1)
        assert x.grad.dtype == dtype
        assert torch.allclose(x.grad.double(), torch.full((4,), 2.0 * weights, dtype=torch.float64),
                              rtol=TOLERANCES[dtype])


def test_gradients_of_all_dtypes(everywhere):
    everywhere.run(by_definition)


class Halves(bps.Compressor):
    """Sends half of the value as float16, flattened."""

    @staticmethod
    def compress(tensor):
        return (tensor.reshape(-1) / 2).half(), (tensor.dtype, tensor.shape)

    @staticmethod
    def decompress(tensor, context):
        return tensor.to(context[0]).mul_(2).reshape(context[1])


class Plain:
    """A compressor without a base class."""

    @staticmethod
    def compress(tensor):
        return tensor.clone(), None

    @staticmethod
    def decompress(tensor, context):
        return tensor


COMPRESSORS = (bps.Compression.none, bps.Compression.fp16, bps.Compression.bf16, Halves, Plain, Plain())


def compressed():
    for number, (compression, dtype) in enumerate(itertools.product(COMPRESSORS, FLOATS)):
        x = given(bps.rank(), dtype, (2, 3)).requires_grad_()
        y = bps.push_pull(x, False, f"compressed {number}", compression=compression)
        y.sum().backward()
        assert y.dtype == dtype and torch.equal(y.detach(), defined(dtype, (2, 3), False))
        assert x.grad.tolist() == [[float(bps.size())] * 3] * 2


def test_compression(everywhere):
    everywhere.run(compressed)


def grouped():
    assert bps.byteps_torch_set_num_grads(3) == 0
    counts = []
    for number in range(7):
        handle, count = bps.push_pull_group_sync_inplace(torch.ones(2), False, f"grouped {number % 3}")
        assert bps.synchronize(handle).tolist() == [float(bps.size())] * 2
        counts.append(count)
    assert counts == [1, 2, 3, 1, 2, 3, 1]
    bps.byteps_torch_set_num_grads(2)
    assert bps.push_pull_group_sync_inplace(torch.ones(2), False, "grouped 0")[1] == 1
    with pytest.raises(ConfigError, match="at least one"):
        bps.byteps_torch_set_num_grads(0)


def test_groups_are_counted(everywhere):
    everywhere.run(grouped)


def declared():
    from bpsfast.trainer import process

    assert [bps.declare(name) for name in ("declared a", "declared b", "declared a")] == [0, 0, 0]
    for name, priority in (("declared b", 0), ("declared a", 0), ("urgent", 7)):
        y = bps.push_pull(torch.ones(3), False, name, 5, priority)  # version and priority, as BytePS takes them
        assert y.tolist() == [float(bps.size())] * 3
    specs = process.current().tensors._specs
    first, second = specs["declared a"].priority, specs["declared b"].priority
    assert first > second and specs["urgent"].priority == 7
    assert bps.push_pull(torch.ones(2)).tolist() == [1.0] * 2  # without a name


def test_declare_priority_version_and_names(everywhere):
    everywhere.run(declared)


def who():
    assert bps.size() == bps.broadcast_object(bps.size()) and bps.local_size() <= bps.size()
    ranks = [bps.broadcast_object((bps.rank(), bps.local_rank()), root) for root in range(bps.size())]
    assert [rank for rank, _ in ranks] == list(range(bps.size()))
    bps.barrier()
    when, speed = bps.get_pushpull_speed()
    assert isinstance(when, int) and isinstance(speed, float)
    return bps.rank(), bps.local_rank(), bps.local_size()


def test_who_is_who(everywhere):
    found = everywhere.run(who)
    places = [(local, n) for n in everywhere.ranks for local in range(n)]
    assert found == [(rank, local, n) for rank, (local, n) in enumerate(places)]


def broadcasts():
    for root in range(bps.size()):
        def made(rank):
            tensors = {str(dtype): given(rank, dtype, (2, 3)) for dtype in (*INTEGERS, *FLOATS, *OTHERS)}
            return tensors | {"scalar": torch.tensor(rank + 0.5), "empty": torch.empty(0), "none": None,
                              "strided": given(rank, torch.float32, (3, 4)).t()}

        for kind in (dict, list, iter):
            mine, wanted = made(bps.rank()), made(root)
            named = list(mine.items())
            tensors = [tensor for tensor in mine.values() if tensor is not None]
            params = {dict: mine, list: named, iter: (tensor for tensor in tensors)}[kind]
            bps.broadcast_parameters(params, root, prefix=f"prefix {kind.__name__}.")
            for name, tensor in mine.items():
                assert tensor is None or torch.equal(tensor, wanted[name]), (kind, name)
        mine = {"rank": bps.rank(), "long": "x" * 10**5 * bps.rank()}
        got = bps.broadcast_object(mine, root_rank=root, name="object")
        assert got["rank"] == root and len(got["long"]) == 10**5 * root


def test_broadcasts_of_all_dtypes_from_each_root(everywhere):
    everywhere.run(broadcasts)


OPTIMIZERS = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "adam": lambda p, lr: torch.optim.Adam(p, lr=lr, amsgrad=True),
    "rmsprop": lambda p, lr: torch.optim.RMSprop(p, lr=lr, centered=True),
    "adagrad": lambda p, lr: torch.optim.Adagrad(p, lr=lr),
}


def states():
    for root, (name, make) in itertools.product({0, bps.size() - 1}, OPTIMIZERS.items()):
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = make([p], 0.1 * (bps.rank() + 1))
        if bps.rank() == root:
            for step in range(2):
                p.grad = torch.full((3,), 1.0 + step)
                optimizer.step()
        want = bps.broadcast_object(optimizer.state_dict(), root)
        bps.broadcast_optimizer_state(optimizer, root_rank=root, prefix=f"{name}.")
        have = optimizer.state_dict()
        assert have["param_groups"] == want["param_groups"]
        for key, value in want["state"][0].items():
            assert torch.equal(torch.as_tensor(have["state"][0][key]), torch.as_tensor(value)), (name, key)


def test_broadcast_optimizer_state(everywhere):
    everywhere.run(states)


def network(dtype):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).to(dtype)


def backward(model, rank, step, dtype):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(5, 3, generator=generator, dtype=torch.float64).to(dtype)
    model(x).square().sum().backward()


def means(model, steps, dtype):
    """Return the gradients by definition: the mean over ranks of the sums of their passes, in float64."""
    double = network(torch.float64)
    double.load_state_dict(model.state_dict())
    for rank, step in itertools.product(range(bps.size()), steps):
        backward(double, rank, step, torch.float64)
    return [p.grad / bps.size() for p in double.parameters()]


def steps_of(wrap, label, dtype, compression, n_passes):
    """Train two steps by the optimizer that *wrap* returns: each must be that of the gradients by definition."""
    model = network(dtype)
    named = [(f"{label} {name}", p) for name, p in model.named_parameters()]
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.125), named, compression, n_passes)
    tolerance = 20 * max(TOLERANCES[dtype], 1e-2 if compression is not bps.Compression.none else 0)
    for number in range(2):
        before = [p.detach().double().clone() for p in model.parameters()]
        wanted = means(model, range(n_passes * number, n_passes * (number + 1)), dtype)
        for step in range(n_passes * number, n_passes * (number + 1)):
            backward(model, bps.rank(), step, dtype)
        optimizer.step()
        for p, kept, gradient in zip(model.parameters(), before, wanted):
            assert torch.allclose((kept - p.detach().double()) / 0.125, gradient, rtol=tolerance, atol=tolerance * 4), (
                label, number, (kept - p.detach().double()) / 0.125, gradient)
        optimizer.zero_grad()


def distributed(model, optimizer, named, compression, n_passes):
    return bps.DistributedOptimizer(optimizer, named, compression, n_passes)


def crossing(model, optimizer, named, compression, n_passes):
    return bps.CrossBarrier(model, optimizer, named, compression, n_passes, num_steps=10)


VARIANTS = [*((dtype, bps.Compression.none, 1) for dtype in FLOATS), (torch.float64, bps.Compression.none, 3),
            (torch.float32, bps.Compression.fp16, 1), (torch.float64, bps.Compression.bf16, 2),
            (torch.float32, Halves, 1), (torch.float32, Plain(), 2)]


def optimizes(wrap):
    for number, variant in enumerate(VARIANTS):
        steps_of(globals()[wrap], f"{wrap} {number}", *variant)


@pytest.mark.parametrize("wrap", ["distributed", "crossing"])
def test_optimizers_average_gradients_of_all_dtypes(everywhere, wrap):
    everywhere.run(optimizes, wrap)


def unused():
    """A parameter without a gradient on odd ranks, by a compressor of the user's."""
    for compression in (bps.Compression.none, Halves):
        p, q = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        named = [(f"unused {compression.__name__} {name}", each) for name, each in (("p", p), ("q", q))]
        optimizer = bps.DistributedOptimizer(torch.optim.SGD([p, q], lr=1.0), named, compression)
        for _ in range(2):
            optimizer.zero_grad()
            (p.sum() + (q.sum() if bps.rank() % 2 == 0 else 0.0)).backward()
            optimizer.synchronize()
            assert p.grad.tolist() == [1.0] * 2
            even = (bps.size() + 1) // 2 / bps.size()
            assert q.grad.tolist() == pytest.approx([even] * 2, rel=1e-3)
            with optimizer.skip_synchronize():
                optimizer.step()


def test_gradients_that_are_missing(everywhere):
    everywhere.run(unused)


def suspended():
    if bps.size() > 1:
        with pytest.raises(UnsupportedError, match=r"that bpsfast has started.*save a checkpoint"):
            bps.suspend()
        assert bps.push_pull(torch.ones(2), False, "not suspended").tolist() == [float(bps.size())] * 2
    with pytest.raises(ClosedError, match="without suspend"):
        bps.resume(1, 1, 0)
    for numbers, error in (((2, 1, 0), UnsupportedError), ((0, 1, 0), ConfigError), ((1, 1, 1), ConfigError)):
        with pytest.raises(error, match="num_workers="):
            bps.resume(*numbers)


def test_a_job_of_several_ranks_is_not_suspended(everywhere):
    everywhere.run(suspended)


def test_a_single_process_suspends_and_resumes():
    bps.init()
    try:
        bps.declare("b")
        bps.declare("a")
        bps.suspend()
        with pytest.raises(ClosedError):
            bps.size()
        bps.resume(1, 0, 0, None)
        assert bps.size() == 1 and bps.push_pull(torch.ones(2), name="c").tolist() == [1.0] * 2
        from bpsfast.trainer import process

        assert process.current().tensors.order() == ["b", "a"]
    finally:
        bps.shutdown()
