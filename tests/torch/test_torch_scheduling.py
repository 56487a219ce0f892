"""All-reduces of a gloo group in one order on all ranks, in real processes: the sums are torch's own."""
from __future__ import annotations

import os
import socket
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist

import bpsfast.torch as bps
from bpsfast.orchestration.errors import (
    BpsError,
    BusyError,
    ConfigError,
    MismatchError,
    PeerLostError,
    UnsupportedError,
)
from bpsfast.torch.scheduling import _own_host, bucket_hook
from tests.support.torch_ranks import keep_gloo

LIMIT_S = 30.0


@contextmanager
def gloo(store):
    """A default group of the job's ranks."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=bps.rank(), world_size=bps.size())
    keep_gloo()
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def scheduled(store, **settings):
    """A gloo group of the job's ranks, and its schedule."""
    with gloo(store), bps.schedule(**{"timeout_s": LIMIT_S, **settings}) as schedule:
        yield schedule


def when_the_other_has_closed(store, prepare):
    """What rank 0 gets from the function that *prepare*(schedule) returns, when rank 1 has closed."""
    with gloo(store):
        schedule = bps.schedule(dist.new_group(), timeout_s=LIMIT_S)
        act = prepare(schedule)
        if bps.rank() == 1:
            schedule.close()
        dist.barrier()
        result = act() if bps.rank() == 0 else None
        schedule.close()
        dist.barrier()  # gloo ends with an error where a peer is gone first
        return result


def tensors():
    """Return this rank's tensors: all sorts of sizes and dtypes, the same kinds on all ranks."""
    torch.manual_seed(bps.rank())
    made = {f"f{i}": _whole(size) for i, size in enumerate((1, 7, 1000, 4097, 100_000))}
    made |= {"double": _whole(3, 5).double(), "half": _whole(999).half(), "none": torch.zeros(0)}
    made["integers"] = torch.arange(50) * (bps.rank() + 1)
    return made


def _whole(*shape):
    """Random whole numbers: their sums are the same in any order, and gloo's depends on where a tensor is cut."""
    return torch.randint(-8, 9, shape).float()


def sums(store):
    """The reduced tensors by schedule, and by torch."""
    with scheduled(store, partition_nbytes=4000, credit_nbytes=9000) as schedule:
        expected = tensors()
        for name in expected:
            dist.all_reduce(expected[name])
        rounds = []
        for number in range(3):
            given = tensors()
            names = sorted(given, key=lambda name: hash((name, bps.rank(), number)))
            futures = {name: schedule.all_reduce(given[name], name=name, priority=len(name)) for name in names}
            rounds.append({name: futures[name].wait() for name in given})
            assert all(rounds[-1][name] is given[name] for name in given)
    return [{name: value.numpy() for name, value in each.items()} for each in (*rounds, expected)]


def test_sums_are_torchs_whatever_the_order_on_each_rank(two, three, tmp_path):
    for job, name in ((two, "a"), (three, "b")):
        for *rounds, expected in job.run(sums, str(tmp_path / name)):
            for each in rounds:
                for key, value in each.items():
                    assert np.array_equal(value, expected[key]), key


def test_the_urgent_overtakes_what_has_been_given(two, tmp_path):
    for finished in two.run(overtaking, str(tmp_path / "store")):
        assert finished.index("urgent") == 0  # before all but the first part of the first one: credit is for one


def overtaking(store):
    """The order in which tensors were complete."""
    finished = []
    with scheduled(store, partition_nbytes=1 << 16, credit_nbytes=0) as schedule:
        futures = []
        other = dist.new_group()
        if bps.rank() == 1:  # nothing goes on before rank 0 has given everything
            dist.barrier(other)
        for i in range(10):
            futures.append(schedule.all_reduce(torch.ones(1 << 16), name=f"t{i}"))
            futures[-1].add_done_callback(lambda _, i=i: finished.append(f"t{i}"))
        futures.append(schedule.all_reduce(torch.ones(4), name="urgent", priority=1))
        futures[-1].add_done_callback(lambda _: finished.append("urgent"))
        if bps.rank() == 0:
            dist.barrier(other)
        for future in futures:
            future.wait()
    return finished


def train(store, hooked):
    """The parameters after some steps of DistributedDataParallel."""
    with scheduled(store, partition_nbytes=1 << 12) as schedule:
        own = dist.new_group()
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(100, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10))
        ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02, process_group=own)
        if hooked:
            ddp.register_comm_hook(schedule, bucket_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        for step in range(5):
            torch.manual_seed(10 * step + bps.rank())
            ddp(torch.randn(8, 100)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.numpy() for name, value in model.state_dict().items()}


def test_buckets_of_ddp_train_as_without(two, tmp_path):
    hooked, plain = (two.run(train, str(tmp_path / str(each)), each) for each in (True, False))
    for rank in range(2):
        for name, value in plain[0].items():  # halving is exact: before the sum as after it
            assert np.array_equal(hooked[rank][name], value), name


def averages(store):
    """An average, and arguments that are refused at once."""
    with scheduled(store) as schedule:
        x = torch.full((3,), float(bps.rank()))
        value = schedule.all_reduce(x, name="x", average=True).wait().tolist()
        largest = schedule.all_reduce(torch.tensor([bps.rank()]), name="m", op=dist.ReduceOp.MAX).wait().item()
        for bad, settings in ((torch.ones(4, 4).t(), {}), (torch.eye(3).to_sparse(), {}),
                              (torch.ones(2, dtype=torch.int64), {"average": True}),
                              (torch.ones(2), {"op": dist.ReduceOp.MAX, "average": True}),
                              (torch.ones(2), {"op": dist.ReduceOp(dist.ReduceOp.SUM)})):
            with pytest.raises(UnsupportedError, match="'bad'"):
                schedule.all_reduce(bad, name="bad", **settings)
        if bps.rank() == 0:
            dist.barrier()
        future = schedule.all_reduce(torch.ones(4), name="busy")
        if bps.rank() == 1:  # rank 0 has not given it yet
            with pytest.raises(BusyError, match="'busy' was given twice"):
                schedule.all_reduce(torch.ones(4), name="busy")
            dist.barrier()
        future.wait()
        schedule.all_reduce(torch.ones(5), name="busy").wait()  # another size, another round
    return value, largest


def test_averages_other_operations_and_what_is_refused(two, tmp_path):
    assert two.run(averages, str(tmp_path / "store")) == [([0.5] * 3, 1)] * 2


def differing(store):
    """Return a rank's error when the ranks give different tensors under one name."""
    try:
        with scheduled(store, partition_nbytes=12) as schedule:
            schedule.all_reduce(torch.ones(3 + bps.rank()), name="x").wait()  # the first part is alike
    except BpsError as exc:
        return type(exc).__name__, str(exc)


def test_what_differs_is_an_error_on_all_ranks(two, tmp_path):
    for kind, text in two.run(differing, str(tmp_path / "store")):
        assert kind == MismatchError.__name__
        assert "12 bytes, of 3 float32, sum on rank 0, 12 bytes, of 4 float32, sum here" in text


def giving_alone(store):
    """Return rank 0's error when the other rank has closed."""
    def prepare(schedule):
        def act():
            with pytest.raises(BpsError) as raised:
                schedule.all_reduce(torch.ones(2), name="x").wait()
            return raised.typename, str(raised.value)

        return act

    return when_the_other_has_closed(store, prepare)


def test_a_rank_that_has_closed_is_named(two, tmp_path):
    [(kind, text), other] = two.run(giving_alone, str(tmp_path / "store"))
    assert other is None and kind == PeerLostError.__name__
    assert "rank 1 has closed, and will not give" in text and "'x' part 0" in text


def training_alone(store):
    """Return the error of rank 0's backward pass when the other rank has closed."""
    def prepare(schedule):
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        ddp.register_comm_hook(schedule, bucket_hook)

        def act():
            with pytest.raises(RuntimeError) as raised:
                ddp(torch.ones(1, 4)).sum().backward()
            return str(raised.value)

        return act

    return when_the_other_has_closed(store, prepare)


def test_an_error_in_a_backward_pass_is_an_exception(two, tmp_path):
    text = two.run(training_alone, str(tmp_path / "store"))[0]
    assert "rank 1 has closed, and will not give" in text and "'bucket 0'" in text


def test_without_a_group_it_says_so():
    with pytest.raises(ConfigError, match="call init_process_group first"):
        bps.schedule()


@pytest.mark.parametrize(("master", "expected"), [("127.0.0.1", "127.0.0.1"), ("localhost", "localhost")])
def test_where_others_reach_this_process(monkeypatch, master, expected):
    monkeypatch.setenv("MASTER_ADDR", master)
    assert _own_host() == expected
    monkeypatch.delenv("MASTER_ADDR")
    assert _own_host() == socket.gethostname()
