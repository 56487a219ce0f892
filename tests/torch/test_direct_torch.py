"""torch's tensors, and torch.distributed over bpsfast, among ranks that sum directly."""
from __future__ import annotations

import datetime
import functools
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import bpsfast
import bpsfast.torch as bps
import bpsfast.torch.backend  # registers it
from bpsfast.trainer import process


@pytest.fixture(scope="module")
def ranks(shared_job):
    return shared_job(ranks=(2,), direct_sums="auto")


def in_place():
    n_sums = []
    kinds = ((7,), torch.float32), ((3, 4), torch.bfloat16), ((100_000,), torch.float64), ((), torch.int64)
    for shape, dtype in kinds:
        name = f"in place {shape} {dtype}"
        for step in range(4):
            x = torch.full(shape, step + bps.rank() + 1).to(dtype)
            if step == 2:
                x = torch.nn.Parameter(x, requires_grad=False)
            if step == 3 and x.dim() == 2:
                x = x.t().contiguous().t()
                with pytest.raises(bpsfast.UnsupportedError, match="not contiguous"):
                    bps.push_pull_inplace(x, average=False, name=name)
                x = x.contiguous()
            assert bps.push_pull_inplace(x, average=False, name=name) is x
            assert x.eq(2 * step + 3).all(), (name, step, x)
        n_sums.append(process.current().tensors.unit(name).direct.n_sums)
    with pytest.raises(bpsfast.MismatchError, match="average of tensor"):
        bps.push_pull_inplace(torch.ones(7), average=True, name="in place (7,) torch.float32")
    with pytest.raises(bpsfast.UnsupportedError, match="not contiguous"):
        bps.push_pull_inplace(torch._neg_view(torch.ones(7)), average=False, name="in place (7,) torch.float32")
    return n_sums


def test_tensors_are_summed_in_place(ranks):
    assert set(map(min, ranks.run(in_place))) == {3}, "all but the first, which came before the commit"


def out_of_place():
    x, out = torch.ones(1000), torch.zeros(1000)
    for _ in range(4):
        assert bpsfast.push_pull(x, False, "out", out=out) is out and out.eq(2).all()
    n_sums = process.current().tensors.unit("out").direct.n_sums
    wide = torch.ones(1500)
    bpsfast.push_pull(wide[:1000], False, "out", out=wide[500:])
    assert wide[500:].eq(2).all() and wide[:500].eq(1).all()
    learned = torch.ones(1000, requires_grad=True)
    for name in ("out", "fresh"):  # whether or not the name has a short way
        for source, destination in ((learned, learned), (x, learned), (learned, out)):
            with pytest.raises((bpsfast.BpsError, RuntimeError, BufferError), match=r"requires? grad"):
                bpsfast.push_pull(source, False, name, out=destination)
    assert learned.eq(1).all()
    array = torch.ones(1000).numpy()  # of another type than the name's short way is for
    assert bpsfast.push_pull(array, False, "out", out=array) is array and (array == 2).all()
    assert (bpsfast.push_pull(x, False, "out") == 2).all()
    return n_sums


def test_tensors_are_summed_out_of_place(ranks):
    assert set(ranks.run(out_of_place)) == {3}


def new_tensors():
    results = [bps.push_pull(torch.full((1000,), float(step)), False, "new") for step in range(5)]
    assert all(each.eq(2 * step).all() for step, each in enumerate(results))
    n_sums = process.current().tensors.unit("new").direct.n_sums
    learned = torch.ones(1000, requires_grad=True)  # the short way has no gradient
    bps.push_pull(learned, False, "new").sum().backward()
    assert learned.grad.eq(2).all()
    with pytest.raises(bpsfast.UnsupportedError, match=r"expected a torch\.Tensor"):
        bps.push_pull([1.0], False, "new")
    return n_sums


def test_tensors_get_new_results(ranks):
    assert set(ranks.run(new_tensors)) == {4}


def deferred_beside_a_loss(path):
    """Rank 1 is gone when rank 0, with a push that was never joined, reduces: the error is torch's."""
    dist.init_process_group("bpsfast", init_method=f"file://{path}", rank=bps.rank(), world_size=bps.size())
    x = torch.ones(100)
    for _ in range(3):
        dist.all_reduce(x)
    if bps.rank() == 1:
        os._exit(7)
    bpsfast.push_pull_async(torch.ones(3).numpy(), True, "never")
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        while True:
            dist.all_reduce(x)
    return True


def test_a_loss_beside_a_deferred_push_is_torchs_error(job, tmp_path):
    running = job(ranks=(2,), direct_sums="auto", timeout_s=20)
    running.begin(deferred_beside_a_loss, tmp_path / "store")
    [outcome] = running.outcomes(only=(0,))
    assert outcome.value is True, outcome
    running.kill()


def all_reduces(path):
    """Members that reach the sum by different ways agree; return how many calls went the shortest way."""
    dist.init_process_group("bpsfast", init_method=f"file://{path}", rank=bps.rank(), world_size=bps.size())
    group = dist.group.WORLD
    for step in range(40):
        n = (1, 5, 1000, 300_000)[step % 4]
        dtype = (torch.float32, torch.float16, torch.int32, torch.bool)[step // 4 % 4]
        x = torch.full((n,) if step % 3 else (n, 1, 1), 1 if dtype is torch.bool else step % 7).to(dtype)
        expected = x.clone() if dtype is torch.bool else 2 * x
        if step % 5 == bps.rank():  # this member has it elsewhere
            wide = torch.zeros(*x.shape, 2, dtype=dtype)
            wide[..., 0] = x
            x = wide[..., 0]
        if step % 3 == bps.rank():
            dist.all_reduce(x, async_op=True).wait()
        else:
            assert dist.all_reduce(x) is None
        assert torch.equal(x, expected), (step, n, dtype)
        dist.all_reduce(scalar := torch.tensor(1.5), async_op=step % 2 == bps.rank())
        dist.barrier()
        assert scalar.item() == 3
        if step % 6 == 0:
            dist.all_reduce(y := torch.tensor([bps.rank()]), op=dist.ReduceOp.MAX)
            assert y.item() == 1
    n_sums = group._group.n_calls_at_once
    with pytest.raises(dist.DistBackendError, match=r"called different collectives.*rank 0: call .*rank 1: call"):
        dist.all_reduce(torch.ones(3 + bps.rank()))
    with pytest.raises(dist.DistBackendError, match="MismatchError"):
        dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()
    return n_sums


def test_members_reach_a_sum_by_different_ways(ranks, tmp_path):
    assert all(n > 5 for n in ranks.run(all_reduces, tmp_path / "store"))


class Drawn(NamedTuple):
    """One collective, which both members draw alike; `strided` and `waits_not`: the members that go the longer way."""

    kind: str
    n: int
    dtype: torch.dtype
    root: int
    strided: int
    waits_not: int
    is_even: bool


def drawn(draw):
    def member():
        return draw.choice((0, 1, None, None))

    return Drawn(draw.choice(KINDS), draw.choice((1, 5, 1000, 150_000)),
                 draw.choice((torch.float32, torch.bfloat16, torch.int64, torch.uint8)), draw.randrange(2), member(),
                 member(), draw.random() < 0.5)


def collective(step, each, group):
    """Make one collective among two members; return tensors and what they are to be."""
    kind, n, dtype, root, strided_at, waits_not, is_even = each
    me = dist.get_rank(group)
    async_op = me == waits_not

    def x(member, i=0):
        return ((torch.arange(n) + 10 * member + i + step) % 100).to(dtype)

    def strided(tensor):
        wide = torch.zeros(n, 2, dtype=dtype)
        wide[:, 0] = tensor
        return wide[:, 0] if me == strided_at else tensor

    out, whole = torch.zeros(n, dtype=dtype), torch.zeros(2 * n, dtype=dtype)
    outs, to_each = [torch.zeros(n, dtype=dtype) for _ in range(2)], [x(me, 1), x(me, 2)]
    source, own = dist.get_global_rank(group, root), (x(0, 1 + me), x(1, 1 + me))
    if kind == "broadcast":
        work, found, wanted = dist.broadcast(y := strided(x(me)), source, group, async_op), [y], [x(root)]
    elif kind == "reduce":
        work = dist.reduce(y := strided(x(me)), source, group=group, async_op=async_op)
        found, wanted = ([y], [x(0) + x(1)]) if me == root else ([], [])
    elif kind == "all_gather":
        work, found, wanted = dist.all_gather(outs, strided(x(me)), group, async_op), outs, [x(0), x(1)]
    elif kind == "all_gather_into_tensor":
        work = dist.all_gather_into_tensor(whole, strided(x(me)), group, async_op)
        found, wanted = [whole], [torch.cat([x(0), x(1)])]
    elif kind == "reduce_scatter":
        work = dist.reduce_scatter(out, to_each, group=group, async_op=async_op)
        found, wanted = [out], [own[0] + own[1]]
    elif kind == "reduce_scatter_tensor":
        work = dist.reduce_scatter_tensor(y := strided(out), torch.cat(to_each), group=group, async_op=async_op)
        found, wanted = [y], [own[0] + own[1]]
    elif kind == "all_to_all_single":
        work = dist.all_to_all_single(whole, torch.cat(to_each), group=group, async_op=async_op)
        found, wanted = [whole], [torch.cat(own)]
    elif kind == "splits":
        sent = [n, n] if is_even else [1, 2 * n - 1]
        given = [sent[me]] * 2
        taken = torch.zeros(sum(given), dtype=dtype)
        work = dist.all_to_all_single(taken, torch.cat(to_each), given, sent, group=group, async_op=async_op)
        cut = slice(0, sent[0]) if me == 0 else slice(sent[0], None)
        found, wanted = [taken], [torch.cat([torch.cat([x(m, 1), x(m, 2)])[cut] for m in (0, 1)])]
    elif kind == "all_to_all":
        work = dist.all_to_all(outs, to_each, group=group, async_op=async_op)
        found, wanted = outs, [*own]
    else:
        work, found, wanted = dist.barrier(group, async_op), [], []
    assert (work is None) != async_op
    if work is not None:
        work.wait()
    return found, wanted


KINDS = ("broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor",
         "all_to_all_single", "splits", "all_to_all", "barrier")


def collectives(path, seed):
    """Members that reach calls by different ways agree; return how many of each went the shortest way."""
    dist.init_process_group("bpsfast", init_method=f"file://{path}", rank=bps.rank(), world_size=bps.size())
    made = Counter()

    def counted(name, call):
        def counts(*arguments):
            is_made = call(*arguments)
            made[name] += is_made
            return is_made

        return counts

    for group in (dist.group.WORLD, dist.new_group([1, 0], sort_ranks=False)):
        draw = random.Random(seed)
        for _ in range(2):
            dist.barrier(group)
        group._at_once = {name: counted(name, call) for name, call in group._at_once.items()}
        for step in range(120):
            each = drawn(draw)
            found, wanted = collective(step, each, group)
            assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True)), each
    dist.destroy_process_group()
    return made


@pytest.mark.parametrize("seed", range(2))
def test_members_make_collectives_by_different_ways(ranks, seed, tmp_path):
    for made in ranks.run(collectives, tmp_path / "store", seed):
        assert set(made) == {"reduce", "broadcast", "allgather", "reduce_scatter", "alltoall", "barrier",
                             "all_gather_single", "reduce_scatter_single", "all_to_all_single"}
        assert all(n > 3 for n in made.values()), made


def refused_collectives(path):
    """What the shortest way cannot do gets the error of the general one, and the group goes on."""
    dist.init_process_group("bpsfast", init_method=f"file://{path}", rank=bps.rank(), world_size=bps.size())
    dist.barrier()
    dist.barrier()
    x = torch.ones(6)
    for call in (lambda: dist.all_to_all_single(torch.zeros(3, 2), torch.zeros(3, 2)),
                 lambda: dist.all_gather_into_tensor(torch.zeros(13), x),
                 lambda: dist.all_gather_into_tensor(torch.zeros(12, dtype=torch.int32), x),
                 lambda: dist.reduce_scatter_tensor(torch.zeros(4), x),
                 lambda: dist.reduce_scatter(torch.zeros(6, dtype=torch.int32), [x, x]),
                 lambda: dist.broadcast(x.to_sparse(), 0)):
        with pytest.raises((bpsfast.BpsError, RuntimeError, ValueError)):
            call()
    dist.all_reduce(x)
    assert x.eq(2).all()
    with pytest.raises(dist.DistBackendError, match=r"rank [01] has sent .* bytes, .* were expected|cannot be used"):
        mine = [torch.zeros(3 + bps.rank()) for _ in range(2)]
        dist.all_to_all([torch.zeros(3), torch.zeros(3)], mine)
        dist.barrier()
    dist.destroy_process_group()


def test_calls_that_cannot_go_the_shortest_way(ranks, tmp_path):
    ranks.run(refused_collectives, tmp_path / "store")


def a_caller_of_another_collective(path):
    dist.init_process_group("bpsfast", init_method=f"file://{path}", rank=bps.rank(), world_size=bps.size())
    x = torch.ones(6)
    for _ in range(3):
        dist.broadcast(x, 0)
    with pytest.raises(dist.DistBackendError) as caught:
        if bps.rank():
            dist.all_gather([torch.zeros(6), torch.zeros(6)], x)
        else:
            dist.broadcast(x, 1)
    dist.destroy_process_group()
    return str(caught.value)


def test_both_calls_are_named_if_members_call_different_collectives(ranks, tmp_path):
    for text in ranks.run(a_caller_of_another_collective, tmp_path / "store"):
        assert ("rank 0: call 4: broadcast float32 (6,) from 1; rank 1: call 4: all_gather float32 (24, 24)"
                in text), text


def a_member_is_late(path):
    dist.init_process_group("bpsfast", init_method=f"file://{path}", rank=bps.rank(), world_size=bps.size(),
                            timeout=datetime.timedelta(seconds=2))
    x = torch.ones(10)
    for _ in range(3):
        dist.all_reduce(x)
    text = ""
    if bps.rank() == 0:
        with pytest.raises(dist.DistBackendError) as caught:
            dist.all_reduce(x)
        text = str(caught.value)
        assert dist.group.WORLD.errored() is not None
        with pytest.raises(dist.DistBackendError, match="cannot be used any more"):
            dist.all_reduce(x)
    process.current().barrier()
    dist.destroy_process_group()
    return text


def test_a_member_that_does_not_call_is_named(ranks, tmp_path):
    text, _ = ranks.run(a_member_is_late, tmp_path / "store")
    assert "StallError: call 4 of group" in text and "all_reduce sum float32 (10,): rank 0 waited 2 s" in text, text
    assert "missing: rank 1" in text, text


def handlers_call(path):
    """A handler that runs while a call waits is refused further ones, and the call goes on."""
    dist.init_process_group("bpsfast", init_method=f"file://{path}", rank=bps.rank(), world_size=bps.size())
    refused = []

    def handle(flag, *_):
        for call in (dist.barrier, functools.partial(dist.all_reduce, torch.ones(3)),
                     functools.partial(dist.all_reduce, torch.ones(3), async_op=True)):
            with pytest.raises(dist.DistBackendError, match=r"BusyError: .* inside another call"):
                call()
            refused.append(call)
        flag.touch()

    for step in range(6):
        x, flag = torch.ones(5), Path(f"{path}.{step}")
        if bps.rank() == 0:
            signal.signal(signal.SIGALRM, lambda *_, flag=flag: handle(flag))
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        else:
            deadline = time.monotonic() + 20
            while not flag.exists():
                assert time.monotonic() < deadline
                time.sleep(0.001)
        if step % 2:
            dist.barrier()
        dist.all_reduce(x)
        assert x.eq(2).all(), step
    dist.destroy_process_group()
    return len(refused)


def test_calls_of_a_signal_handler_inside_a_call_are_refused(ranks, tmp_path):
    assert ranks.run(handlers_call, tmp_path / "store") == [18, 0]
