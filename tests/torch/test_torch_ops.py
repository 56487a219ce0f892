"""bpsfast.torch's operations on real ranks: BytePS's signatures, broadcast, compression."""
from __future__ import annotations

import pytest
import torch

import bpsfast.torch as bps
from bpsfast.orchestration.errors import MismatchError, UnsupportedError
from bpsfast.torch.compression import Compression
from bpsfast.torch.ops import tensor_memory

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32,
          torch.int64, torch.uint8]


@pytest.fixture
def three(shared_job):
    return shared_job(ranks=(2, 1), transport="tcp")


def sums(dtype, average):
    dtype = getattr(torch, dtype)
    x = (torch.arange(12).reshape(3, 4) * (bps.rank() + 1)).to(dtype)
    kept = x.clone()
    new = bps.push_pull(x, average, f"sum {dtype} {average}")
    if not torch.equal(x, kept) or new.data_ptr() == x.data_ptr():
        return "input changed"
    same = bps.push_pull_inplace(x, average, f"sum {dtype} {average}")
    if same is not x or not torch.equal(x, new):
        return "in place differs"
    want = torch.arange(12).reshape(3, 4) * 6 // (3 if average else 1)
    return torch.equal(new, want.to(dtype))


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums(three, dtype, average):
    assert three.run(sums, str(dtype).removeprefix("torch."), average) == [True] * 3


def handles():
    x, y = torch.ones(5), torch.ones(6)
    first = bps.push_pull_async(x, False, "first")
    second = bps.byteps_push_pull(y, False, "second")
    out = bps.synchronize(first)
    same = bps.synchronize(second)
    return out.tolist(), out is x, same is y, y.tolist(), bps.poll(first)


def test_handles(three):
    assert three.run(handles) == [([3.0] * 5, False, True, [3.0] * 6, True)] * 3


def gradients():
    x = torch.full((4,), 2.0, requires_grad=True)
    weight = torch.full((4,), float(bps.rank() + 1))
    y = bps.push_pull(x * x, average=False, name="differentiable")
    (y * weight).sum().backward()
    return y.tolist(), x.grad.tolist()


def test_push_pull_is_differentiable(three):
    # y = sum of x^2 over 3 ranks; dL/dx = 2x * (1 + 2 + 3)
    assert three.run(gradients) == [([12.0] * 4, [24.0] * 4)] * 3


def expanded_gradient():
    x = torch.ones(4, requires_grad=True)
    bps.push_pull(x, average=True, name="expanded").sum().backward()  # its gradient has stride 0
    return x.grad.tolist()


def test_a_gradient_that_is_not_contiguous(three):
    assert three.run(expanded_gradient) == [[1.0] * 4] * 3


def compressed():
    x = torch.full((5,), 1 + bps.rank() / 4, requires_grad=True)
    found = []
    for name in ("none", "fp16", "bf16"):
        y = bps.push_pull(x, average=False, name=f"compressed {name}", compression=getattr(Compression, name))
        y.sum().backward()
        found.append((str(y.dtype), y.tolist(), x.grad.tolist()))
        x.grad = None
    return found


def test_compression(three):
    assert three.run(compressed) == [[("torch.float32", [3.75] * 5, [3.0] * 5)] * 3] * 3


def test_compression_narrows_wide_floats_only():
    for compressor, narrow in ((Compression.fp16, torch.float16), (Compression.bf16, torch.bfloat16)):
        for dtype in DTYPES:
            wide = dtype in (torch.float32, torch.float64)
            small, context = compressor.compress(torch.ones(3, dtype=dtype))
            assert small.dtype == (narrow if wide else dtype)
            assert compressor.decompress(small, context).dtype == dtype


def declared():
    first, second = bps.declare("declared a"), bps.declare("declared b")
    return first, second, bps.push_pull(torch.ones(3), False, "declared b").tolist()


def test_declare(three):
    assert three.run(declared) == [(0, 0, [3.0] * 3)] * 3


@pytest.mark.parametrize(("tensor", "text"), [
    (torch.zeros(4, 4).t(), "contiguous"), (torch.zeros(3, dtype=torch.bool), "torch.bool"),
    (torch.zeros(3, 3).to_sparse(), "not dense"), (torch.zeros(3, dtype=torch.complex64), "complex64"),
    (torch.zeros(3, device="meta"), "is on meta"), ([1.0], "torch.Tensor"),
])
def test_what_is_refused(tensor, text):
    with pytest.raises(UnsupportedError, match=text):
        tensor_memory(tensor)


# -- broadcast -----------------------------------------------------------------------------------------------------


def model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten(),
                               torch.nn.Linear(8, 4))


def parameters(kind):
    net = model(bps.rank())
    net[0].weight.data = net[0].weight.data.to(memory_format=torch.channels_last)
    given = {"state": net.state_dict(), "named": net.named_parameters(), "list": list(net.parameters())}[kind]
    bps.broadcast_parameters(given, root_rank=1)
    want = model(1)
    return all(torch.equal(a, b) for a, b in zip(net.parameters(), want.parameters()))


@pytest.mark.parametrize("kind", ["state", "named", "list"])
def test_broadcast_parameters(three, kind):
    assert three.run(parameters, kind) == [True] * 3


def odd_parameters():
    width = 5 if bps.rank() == 2 else 4
    mask = torch.ones(2, dtype=torch.bool)
    bps.broadcast_parameters([("a", torch.ones(3)), ("b", torch.ones(width)), ("mask", mask)], 0)


def test_parameters_that_differ_are_named(three):
    first, second, third = three.attempt(odd_parameters)
    assert not first.error and not second.error
    assert third.error == MismatchError.__name__ and "Parameter.b" in third.text
    assert "(5,)" in third.text and "(4,)" in third.text
    assert three.run(parameters, "list") == [True] * 3


def objects():
    rank = bps.rank()
    mine = {"rank": rank, "large": "x" * 10**6 * rank}
    return [bps.broadcast_object(mine, root, f"object {root}")["rank"] for root in (0, 2)]


def test_broadcast_object(three):
    assert three.run(objects) == [[0, 2]] * 3


def optimizer_state(name):
    rank = bps.rank()
    net = model(rank)
    made = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1 * (rank + 1), momentum=0.9),
            "adam": lambda p: torch.optim.AdamW(p, lr=0.1 * (rank + 1), betas=(0.5 + rank / 10, 0.9))}[name]
    optimizer = made(net.parameters())
    if rank == 1:  # the others have no state at all
        for p in net.parameters():
            p.grad = torch.full_like(p, 2.0)
        optimizer.step()
    before = [p.clone() for p in net.parameters()]
    bps.broadcast_optimizer_state(optimizer, root_rank=1)
    if not all(torch.equal(a, b) for a, b in zip(before, net.parameters())):
        return "a parameter changed"
    state = optimizer.state_dict()
    tensors = [v for each in state["state"].values() for v in each.values() if isinstance(v, torch.Tensor)]
    values = [float(v.float().sum()) for v in tensors]
    return state["param_groups"][0]["lr"], state["param_groups"][0].get("betas"), len(state["state"]), values


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_broadcast_optimizer_state(three, name):
    first, second, third = three.run(optimizer_state, name)
    assert first == second == third and first[0] == 0.2 and first[2] == 6


def lbfgs():
    bps.broadcast_optimizer_state(torch.optim.LBFGS([torch.zeros(3, requires_grad=True)]), 0)


def test_lbfgs_is_refused(three):
    for outcome in three.attempt(lbfgs):
        assert outcome.error == "UnsupportedError" and "LBFGS" in outcome.text
