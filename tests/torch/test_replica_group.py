"""ReplicaGroup is configured again and again while members are killed, come late, or do not come."""
from __future__ import annotations

import contextlib
import inspect
import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from bpsfast.orchestration.errors import ConfigError
from bpsfast.torch.backend import ProcessGroup, ReplicaGroup
from tests.support.torch_ranks import LIMIT_S, Processes, keep_gloo
from tests.torch.test_process_group_trouble import stale_resources

_state = {}


@pytest.fixture
def store():
    """Return a function that gives each configuration of a group an address of its own."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda life: f"127.0.0.1:{server.port}/quorum/{life}"


@pytest.fixture
def processes():
    started = []

    def start(size):
        started.append(Processes(size))
        return started[-1]

    yield start
    for each in started:
        each.kill()


def on(processes, ranks, function, *arguments):
    """Run *function* on some of *processes* only; return each result or failure."""
    processes.begin(function, *arguments, only=ranks)
    return [outcome.value if not outcome.error else f"{outcome.error}: {outcome.text}"
            for outcome in processes.outcomes(LIMIT_S + 20, only=ranks)]


# What runs on the ranks. `members` says which ranks are the group, in its order.


def begin(address, members, timeout_s=LIMIT_S):
    group = _state.setdefault("group", ReplicaGroup())
    group.set_timeout(timedelta(seconds=timeout_s))
    group.configure(address, f"replica {os.environ['RANK']}", members.index(int(os.environ["RANK"])), len(members), 7)
    return group.rank(), group.size(), group.errored()


def total():
    x = torch.full((5000,), float(2 ** int(os.environ["RANK"])))
    _state["group"].allreduce([x]).wait()
    return x.unique().tolist()


def broken():
    """Sum until it fails; return that error's text, that of `errored`, and that of the next call."""
    group = _state["group"]
    texts = []
    for _ in range(2):
        try:
            while True:
                total()
        except dist.DistBackendError as exc:
            texts.append(str(exc))
    return texts[0], str(group.errored()), texts[1]


def die():
    work = _state["group"].allreduce([torch.ones(1_000_000)])  # half of it may be under way
    os.kill(os.getpid(), signal.SIGKILL)
    work.wait()


def test_members_are_lost_and_others_come(processes, store):
    ranks = processes(4)
    assert on(ranks, (0, 1, 2), begin, store(0), [0, 1, 2]) == [(0, 3, None), (1, 3, None), (2, 3, None)]
    assert on(ranks, (0, 1, 2), total) == [[7.0]] * 3
    ranks.begin(broken, only=(0, 1))
    ranks.begin(die, only=(2,))
    assert ranks.outcomes(LIMIT_S, only=(2,))[0].error == "died"
    for outcome in ranks.outcomes(LIMIT_S, only=(0, 1)):
        first, said, later = outcome.value
        assert "rank 2" in first and said == first and later
    assert on(ranks, (0, 1), begin, store(1), [1, 0]) == [(1, 2, None), (0, 2, None)]
    assert on(ranks, (0, 1), total) == [[3.0]] * 2
    assert on(ranks, (0, 1, 3), begin, store(2), [1, 3, 0]) == [(2, 3, None), (0, 3, None), (1, 3, None)]
    assert on(ranks, (0, 1, 3), total) == [[11.0]] * 3


def test_who_does_not_come_is_named_and_the_next_life_is_a_good_one(processes, store):
    ranks = processes(2)
    (said,) = on(ranks, (0,), begin, store(0), [0, 1], 2.0)
    assert said.startswith("DistBackendError") and "'replica 0' of quorum 7" in said and "rank 1 of 2" in said
    assert on(ranks, (0, 1), begin, store(1), [0, 1]) == [(0, 2, None), (1, 2, None)]
    assert on(ranks, (0, 1), total) == [[3.0]] * 2


def waits_in_vain():
    """No member sends; return the errors of the wait and of `errored`."""
    try:
        _state["group"].recv([torch.ones(3)], 1, 0).wait()
    except dist.DistBackendError as exc:
        return str(exc), str(_state["group"].errored())


def test_a_message_that_does_not_come_is_a_call_that_failed(processes, store):
    ranks = processes(2)
    assert on(ranks, (0, 1), begin, store(0), [0, 1], 2.0) == [(0, 2, None), (1, 2, None)]
    ((said, after),) = on(ranks, (0,), waits_in_vain)
    assert said.startswith("StallError") and after == said


def many_lives(addresses):
    found = []
    for address in addresses:
        begin(address, [0, 1])
        assert total() == [3.0]
        (_state["group"].abort if len(found) % 2 else _state["group"].shutdown)()
        found.append(stale_resources())
    return found


def test_lives_leave_nothing_behind(processes, store):
    for found in processes(2).run(many_lives, [store(life) for life in range(5)], timeout_s=120):
        assert found[1] == found[2] == found[3] == found[4], "descriptors, threads"


@contextlib.contextmanager
def default_group_of_one(path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    keep_gloo()
    try:
        yield
    finally:
        dist.destroy_process_group()


def called_by_name(address, path):
    """Let torch find the group by name, beside a default group of gloo with this rank alone."""
    from torch.distributed import _functional_collectives as functional

    with default_group_of_one(f"{path}-{os.environ['RANK']}"):
        begin(address, [0, 1])
        group = _state["group"].register("replicas")
        x = torch.ones(10) * (1 + int(os.environ["RANK"]))
        dist.all_reduce(x, group=group)
        y = functional.all_reduce(torch.ones(3), "sum", group) + 0
        _state["group"].unregister()
        return x.unique().tolist(), y.tolist(), str(_state["group"].errored())


def test_torch_finds_it_by_name(processes, store):
    ranks = processes(2)
    assert ranks.run(called_by_name, store(0), ranks.new_path()) == [([3.0], [2.0] * 3, "None")] * 2


# -- without members ---------------------------------------------------------------------------------------------------


def test_before_it_is_configured():
    group = ReplicaGroup()
    assert (group.size(), group.rank(), group.errored(), group.getBackendName()) == (1, 0, None, "bpsfast")
    with pytest.raises(dist.DistBackendError, match="configure"):
        group.allreduce([torch.ones(1)])
    group.abort()
    assert group.errored() is None
    group.shutdown()


def test_a_group_of_one_that_is_aborted(store):
    group = ReplicaGroup(timedelta(seconds=LIMIT_S))
    group.configure(store(0), "a", 0, 1)
    x = torch.arange(3.0)
    group.allreduce([x]).wait()
    assert x.tolist() == [0.0, 1.0, 2.0]
    group.abort()
    assert "aborted" in str(group.errored())
    with pytest.raises(dist.DistBackendError, match="aborted"):
        group.barrier()
    group.configure(store(1), "a", 0, 1)
    assert group.errored() is None
    group.barrier().wait()
    group.abort(errored=False)
    assert group.errored() is None


@pytest.mark.parametrize(("address", "rank", "size", "word"), [
    ("127.0.0.1:1", 0, 1, "prefix"), ("127.0.0.1/a", 0, 1, "store_addr of replica 'a'"),
    ("127.0.0.1:1/a", 1, 1, "rank = 1"), ("127.0.0.1:1/a", 0, 0, "world_size = 0")])
def test_bad_arguments_change_nothing(store, address, rank, size, word):
    group = ReplicaGroup(timedelta(seconds=LIMIT_S))
    group.configure(store(0), "a", 0, 1)
    with pytest.raises(ConfigError, match=word):
        group.configure(address, "a", rank, size)
    group.barrier().wait()
    group.shutdown()


def test_a_store_that_nobody_keeps():
    group = ReplicaGroup(timedelta(seconds=1))
    with pytest.raises(dist.DistBackendError, match=r"no store answers at 127\.0\.0\.1:1 ") as caught:
        group.configure("127.0.0.1:1/a", "a", 0, 1)
    assert group.errored() is caught.value
    with pytest.raises(dist.DistBackendError, match="no store answers"):
        group.barrier()


def test_every_call_of_a_process_group_is_one_of_this_too():
    missing = {name for owner in ProcessGroup.__mro__[:2] for name, value in vars(owner).items()
               if inspect.isfunction(value) and not hasattr(ReplicaGroup, name)}
    assert all(name.startswith("_") for name in missing), missing
    for name, value in vars(ProcessGroup).items():
        if inspect.isfunction(value) and not name.startswith("_"):
            assert name in vars(ReplicaGroup), f"{name} would be torch's own"


def test_torchfts_signatures():
    """What torchft's manager and wrappers call, by position and name."""
    configure = inspect.signature(ReplicaGroup.configure).parameters
    assert list(configure)[1:] == ["store_addr", "replica_id", "rank", "world_size", "quorum_id", "group_rank",
                                   "group_world_size", "global_ranks"]
    assert list(inspect.signature(ReplicaGroup.abort).parameters) == ["self", "errored"]
    for name in ("errored", "set_timeout", "register", "unregister", "shutdown"):
        assert callable(getattr(ReplicaGroup, name))
