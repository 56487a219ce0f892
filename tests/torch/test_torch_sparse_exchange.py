"""DistributedOptimizer with sparse gradients on real ranks, against one process that trains with dense ones."""
from __future__ import annotations

import pytest
import torch

import bpsfast
import bpsfast.torch as bps
from bpsfast.torch.compression import Compression, Compressor

pytestmark = pytest.mark.matrix

N_STEPS = 4
N_WORDS, WIDTH = 4000, 6


@pytest.fixture(params=[((2, 1), "tcp"), ((1, 1), "shm"), ((2,), "auto")], ids=["tcp", "shm", "one-node"])
def ranks(request, shared_job):
    shape, transport = request.param
    return shared_job(ranks=shape, transport=transport)


def network(sparse):
    torch.manual_seed(5)
    return torch.nn.ModuleDict({"words": torch.nn.Embedding(N_WORDS, WIDTH, sparse=sparse),
                                "marks": torch.nn.Embedding(9, WIDTH, sparse=sparse), "top": torch.nn.Linear(WIDTH, 3)})


def loss_of(net, step, rank):
    """Words repeat, with different frequencies; rank 1 uses no marks in the first step, and no words in the third."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    words = (torch.rand(900, generator=draw) ** 3 * N_WORDS).long()
    hidden = net["words"](words).mean(0, keepdim=True) if (step, rank) != (2, 1) else torch.zeros(1, WIDTH)
    if (step, rank) != (0, 1):
        hidden = hidden + net["marks"](torch.randint(0, 9, (4,), generator=draw)).mean(0, keepdim=True)
    return torch.nn.functional.cross_entropy(net["top"](hidden), torch.tensor([step % 3])) * 50


def make(kind, net):
    """Return the optimizers of a kind: of the tables, and of the rest."""
    tables = [*net["words"].parameters(), *net["marks"].parameters()]
    if kind == "sgd":
        return [torch.optim.SGD(net.parameters(), lr=0.1)]
    return [torch.optim.SparseAdam(tables, lr=0.01), torch.optim.SGD(net["top"].parameters(), lr=0.1)]


def train(kind, passes=1, to_none=True, **arguments):
    """Train on this rank, and return the weights."""
    net = network(sparse=True)
    names = {p: f"{kind} {passes} {arguments} {name}" for name, p in net.named_parameters()}
    optimizers = [bps.DistributedOptimizer(
        each, [(names[p], p) for group in each.param_groups for p in group["params"]],
        backward_passes_per_step=passes, **arguments) for each in make(kind, net)]
    for step in range(N_STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=to_none)
        for number in range(passes):
            loss_of(net, step * passes + number, bps.rank()).backward()
        for optimizer in optimizers:
            optimizer.synchronize()
        for name in ("words", "marks"):
            gradient = net[name].weight.grad
            assert gradient.is_sparse and gradient.is_coalesced() and gradient.dtype == torch.float32
            torch.sparse_coo_tensor(gradient.indices(), gradient.values(), gradient.shape, check_invariants=True)
        for optimizer in optimizers:
            with optimizer.skip_synchronize():
                optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def single(kind, size, passes=1):
    """Train in one process: gradients are computed dense, and averaged; SparseAdam gets their rows."""
    net = network(sparse=False)
    optimizers = make(kind, net)
    for step in range(N_STEPS):
        total = [torch.zeros_like(p, dtype=torch.float64) for p in net.parameters()]
        for rank in range(size):
            net.zero_grad()
            for number in range(passes):
                loss_of(net, step * passes + number, rank).backward()
            total = [t + p.grad if p.grad is not None else t for t, p in zip(total, net.parameters())]
        for (name, p), t in zip(net.named_parameters(), total):
            mean = (t / size).float()
            p.grad = mean.to_sparse(1) if kind != "sgd" and "top" not in name else mean
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def check(ranks, kind, tolerance=1e-5, passes=1, **arguments):
    results = ranks.run(trained_with, kind, passes, arguments)
    expected = single(kind, len(results), passes)
    for weights in results:
        for mine, first, wanted in zip(weights, results[0], expected):
            assert torch.equal(mine, first), "all ranks have the same bits"
            torch.testing.assert_close(mine, wanted, atol=tolerance, rtol=tolerance)


def trained_with(kind, passes, arguments):
    return train(kind, passes, **arguments)


@pytest.mark.parametrize("kind", ["sgd", "sparse adam"])
def test_weights_are_those_of_dense_training(ranks, kind):
    check(ranks, kind)


def test_over_several_backward_passes(ranks):
    check(ranks, "sgd", passes=2)


def test_gradients_that_are_kept_as_zeros(ranks):
    check(ranks, "sgd", to_none=False)


def test_sparse_as_dense(ranks):
    check(ranks, "sparse adam", sparse_as_dense=True)


@pytest.mark.parametrize("compression", [Compression.fp16, Compression.bf16])
def test_rows_in_half_the_bytes(ranks, compression):
    check(ranks, "sgd", tolerance=0.05, compression=compression)


def rows_travel():
    """Return how many bytes this rank pushed in a step with 64 words of a million."""
    words = torch.nn.Embedding(1_000_000, 16, sparse=True)
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(words.parameters(), lr=0.1), [("million", words.weight)])
    before = 0
    for step in range(2):
        optimizer.zero_grad()
        before = bpsfast.counters()[f"rank_{bps.rank()}_pushed_bytes"]
        words(torch.arange(64) * 10_000 + step + bps.rank()).sum().backward()
        optimizer.step()
        assert words.weight.grad._nnz() == 64 * bps.size()
    memory = sum(value for name, value in bpsfast.counters().items() if name in ("memory_input", "memory_result"))
    return bpsfast.counters()[f"rank_{bps.rank()}_pushed_bytes"] - before, memory


def test_nobody_has_the_table_in_shared_memory(job):
    for pushed, memory in job(ranks=(1, 1), transport="tcp").run(rows_travel):
        assert 64 * 68 <= pushed < 3 * 64 * 68
        assert memory < 64_000_000 / 4, "the table has 64 MB"


def later_than_the_first_step():
    """No rank uses the table in the first step, so it is declared dense; then its gradient is sparse."""
    torch.manual_seed(1)
    words, top = torch.nn.Embedding(20, 3, sparse=True), torch.nn.Linear(3, 1)
    named = [("late", words.weight), ("late.w", top.weight), ("late.b", top.bias)]
    optimizer = bps.DistributedOptimizer(torch.optim.SGD([p for _, p in named], lr=1.0), named)
    top(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = words.weight.detach().clone()
    words(torch.tensor([bps.rank(), 7])).sum().backward()
    optimizer.step()
    expected = torch.zeros(20, 3)
    for rank in range(bps.size()):
        expected[rank] += 1 / bps.size()
    expected[7] += 1
    torch.testing.assert_close(before - words.weight, expected)


def test_a_table_that_nobody_used_at_first(ranks):
    ranks.run(later_than_the_first_step)


class Halved(Compressor):
    """A compressor of a user's."""

    @staticmethod
    def compress(tensor):
        return tensor.half(), tensor.dtype

    @staticmethod
    def decompress(tensor, context):
        return tensor.to(context)


def misuse(kind):
    words = torch.nn.Embedding(7, 3, sparse=True)
    sgd = torch.optim.SGD(words.parameters(), lr=0.1)
    if kind == "both":
        bps.DistributedOptimizer(sgd, [("m", words.weight)], cross_barrier=True, sparse_as_dense=True)
    optimizer = bps.DistributedOptimizer(sgd, [(kind, words.weight)],
                                         compression=Halved if kind == "own" else Compression.none)
    if kind == "dimensions":
        words.weight.grad = torch.ones(7, 3).to_sparse()
    else:
        words(torch.tensor([1])).sum().backward()
    if kind == "zero_grad":
        optimizer.step()
        optimizer.zero_grad()
        words(torch.tensor([1])).sum().backward()
        try:
            optimizer.zero_grad()
        finally:
            optimizer.step()
    optimizer.step()


@pytest.mark.parametrize(("kind", "error", "text"), [
    ("both", "UnsupportedError", "without cross_barrier"), ("own", "UnsupportedError", "compressor of your own"),
    ("dimensions", "UnsupportedError", "2 sparse dimensions"),
    ("zero_grad", "UnderWayError", "before optimizer.step()"),
])
def test_misuse(ranks, kind, error, text):
    for outcome in ranks.attempt(misuse, kind):
        assert outcome.error == error and text in outcome.text, outcome
