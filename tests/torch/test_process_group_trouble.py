"""How process groups of the backend "bpsfast" begin and end: by every init_method of torch, repeatedly in one process,
by `abort`, and when a rank raises or is killed in the middle of a backward pass.
"""
from __future__ import annotations

import datetime
import os
import signal
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.torch_ranks import LIMIT_S, Processes, TorchRanks, world

#: Within this all know that one is gone: seconds, not the 40 of a call's timeout.
SOON_S = 20.0


def rank_of():
    return int(os.environ["RANK"])


def size_of():
    return int(os.environ["WORLD_SIZE"])


def total():
    """The sum over all ranks, by the default group."""
    x = torch.full((1000,), float(rank_of() + 1))
    dist.all_reduce(x)
    return x.unique().tolist()


def expected(size):
    return [float(sum(range(1, size + 1)))]


def stale_resources():
    """Return this process's open descriptors and threads; its daemons must have ended."""
    import psutil

    _, alive = psutil.wait_procs(psutil.Process().children(), timeout=LIMIT_S)
    assert not alive, "daemons outlive their job"
    return len(os.listdir("/proc/self/fd")), sorted(thread.name for thread in threading.enumerate())


# -- ways to meet ------------------------------------------------------------------------------------------------------


def met_by(way, where):
    options = {"rank": rank_of(), "world_size": size_of(), "timeout": datetime.timedelta(seconds=LIMIT_S)}
    if way == "env":
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(where)
        options = {"timeout": options["timeout"]}
    elif way == "store":
        options["store"] = dist.TCPStore("127.0.0.1", where, size_of(), rank_of() == 0)
    elif way == "tcp":
        options["init_method"] = f"tcp://127.0.0.1:{where}"
    else:
        options["init_method"] = f"file://{where}"
    import bpsfast.torch.backend  # noqa: F401

    dist.init_process_group("bpsfast", **options)
    try:
        return total()
    finally:
        dist.destroy_process_group()


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.mark.parametrize("way", ["env", "tcp", "file", "store"])
def test_ranks_meet_in_all_of_torchs_ways(torch_ranks, way):
    ranks = torch_ranks(2)
    assert ranks.run(met_by, way, ranks.new_path() if way == "file" else free_port()) == [expected(2)] * 2


# -- again and again ---------------------------------------------------------------------------------------------------


def again(paths):
    """Begin and end five times, with overlapping groups of neighbours; return what is left open each time."""
    found = []
    for path in paths:
        with world("bpsfast", path):
            assert total() == expected(size_of())
            pairs = [dist.new_group([rank, rank + 1]) for rank in range(size_of() - 1)]
            for first, pair in enumerate(pairs):
                if rank_of() in (first, first + 1):
                    x = torch.tensor([rank_of()])
                    dist.all_reduce(x, group=pair)
                    assert x.item() == 2 * first + 1
            model = DistributedDataParallel(torch.nn.Linear(3, 3))
            model(torch.ones(2, 3)).sum().backward()
            del model
        found.append(stale_resources())
    return found


def test_begun_and_ended_five_times(torch_ranks):
    ranks = torch_ranks(3)
    for found in ranks.run(again, [ranks.new_path() for _ in range(5)], timeout_s=120):
        assert found[1] == found[2] == found[3] == found[4], "descriptors, threads"
        assert not any("bpsfast" in name for name in found[-1][1])


def overlapping():
    """Groups of all kinds at the same time, used in turn; one of them has another order of ranks."""
    rank = rank_of()
    sets = [[0, 1, 2, 3], [0, 2], [1, 3], [1, 2, 3], [0, 1], [0, 1, 2, 3]]
    groups = [dist.new_group(ranks) for ranks in sets]
    backwards = dist.new_group([3, 1, 0], use_local_synchronization=False)
    for round in range(3):
        for ranks, group in [*zip(sets, groups), ([0, 1, 3], backwards)]:
            if rank in ranks:
                x = torch.full((round * 50_000 + 1,), 10.0**rank)
                dist.all_reduce(x, group=group)
                assert (x == sum(10.0**each for each in ranks)).all(), (ranks, x[0])
    found = [None] * 4
    dist.all_gather_object(found, {"rank": rank})
    dist.destroy_process_group(groups[0])
    assert total() == expected(4)
    return found


def test_groups_overlap(torch_ranks):
    for found in torch_ranks(4, 2).grouped(overlapping):
        assert found == [{"rank": rank} for rank in range(4)]


def meshes():
    """torch splits groups for device meshes where a backend can; here each is made anew."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    found = []
    flat = mesh["a", "b"]._flatten("all").get_group() if hasattr(mesh, "_flatten") else dist.group.WORLD
    for group in (mesh.get_group("a"), mesh.get_group("b"), flat):
        x = torch.tensor([2**rank_of()])
        dist.all_reduce(x, group=group)
        found.append(x.item())
    return found


def test_device_meshes(torch_ranks):
    found = torch_ranks(4, 2).grouped(meshes)
    assert found == [[5, 3, 15], [10, 3, 15], [5, 12, 15], [10, 12, 15]]


def under_debug_levels():
    """Do the same at each of torch's debug levels: sums, coalesced calls, a step of a DDP; in a new group each time."""
    found = []
    for level in (dist.DebugLevel.OFF, dist.DebugLevel.INFO, dist.DebugLevel.DETAIL):
        dist.set_debug_level(level)
        try:
            group = dist.new_group()
            x = torch.full((3,), rank_of() + 1.0)
            dist.all_reduce(x, group=group)
            y = [torch.full((n,), rank_of() + n + 0.0) for n in (2, 5)]
            with dist._coalescing_manager(group, torch.device("cpu")):
                for each in y:
                    dist.all_reduce(each, group=group)
            torch.manual_seed(1)
            model = DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group, find_unused_parameters=True)
            for _ in range(2):
                model(x).square().sum().backward()
            dist.barrier(group)
            found.append([x.tolist(), [each.tolist() for each in y], model.module.weight.grad.tolist()])
            dist.destroy_process_group(group)
        finally:
            dist.set_debug_level(dist.DebugLevel.OFF)
    return found


def test_torchs_debug_levels_change_nothing(torch_ranks):
    for off, info, detail in torch_ranks(2).grouped(under_debug_levels):
        assert off == info == detail
        assert off[:2] == [[3.0] * 3, [[5.0] * 2, [11.0] * 5]]


def split():
    try:
        dist.split_group(dist.group.WORLD, [[0, 1]])
    except (RuntimeError, ValueError) as exc:
        return str(exc)
    return ""


@pytest.mark.skipif(not hasattr(dist, "split_group"), reason="this torch has no split_group")
def test_split_group_says_what_to_do(torch_ranks):
    for text in torch_ranks(2).grouped(split):
        assert "split" in text or "device" in text


# -- trouble -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_ranks():
    """Ranks that the test may break."""
    started = []

    def start(size, nodes=1):
        started.append(Processes(size))
        return TorchRanks(started[-1], size, nodes)

    yield start
    for each in started:
        each.kill()


class Trap(torch.autograd.Function):
    """Identity; its backward pass performs what a rank is to do in the middle of a step."""

    @staticmethod
    def forward(context, x, act):
        context.act = act
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        context.act()
        return gradient, None


def die(path):
    _note(path)
    os.kill(os.getpid(), signal.SIGKILL)


def throw(path):
    _note(path)
    raise KeyError("a fault of the program")


def _note(path):
    """Record the time, for the other ranks."""
    with open(f"{path}.time", "w", encoding="ascii") as file:
        file.write(str(time.monotonic()))


def trapped(path, act, victim):
    """Train; in step 3 the *victim* does *act* in its backward pass, after some buckets have gone. Return what the
    others are told then, and how many seconds later.
    """
    try:
        with world("bpsfast", path):
            model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(6))),
                                            bucket_cap_mb=0.1)
            for step in range(6):
                if step == 3 and rank_of() == victim:
                    model.module[2].register_forward_hook(
                        lambda *args: Trap.apply(args[-1], lambda: globals()[act](path)))
                model(torch.ones(4, 200)).sum().backward()
    except RuntimeError as exc:
        now = time.monotonic()
        with open(f"{path}.time", encoding="ascii") as file:
            return str(exc), now - float(file.read())
    return "no error", 0.0


@pytest.mark.parametrize(("size", "nodes"), [(2, 1), (4, 2)])
def test_a_rank_killed_in_backward_is_named_on_all_others(own_ranks, size, nodes):
    ranks = own_ranks(size, nodes)
    victim = size - 1
    ranks.begin(trapped, ranks.new_path(), "die", victim)
    died, *others = ranks.outcomes(100, only=(victim, *range(victim)))
    assert died.error == "died"
    for outcome in others:
        text, after_s = outcome.value
        assert f"rank {victim}" in text and after_s < SOON_S, outcome


@pytest.mark.parametrize(("size", "nodes"), [(2, 1), (4, 2)])
def test_a_rank_that_raises_in_backward_is_named_on_all_others(own_ranks, size, nodes):
    ranks = own_ranks(size, nodes)
    victim = size - 1
    outcomes = ranks.attempt(trapped, ranks.new_path(), "throw", victim, timeout_s=100)
    assert outcomes[victim].error == "KeyError" and "a fault of the program" in outcomes[victim].text
    for outcome in outcomes[:victim]:
        text, after_s = outcome.value
        assert f"rank {victim}" in text and after_s < SOON_S, outcome
    assert ranks.run(met_by, "file", ranks.new_path()) == [expected(size)] * size, "and can begin again"


def stays_away(path, ended):
    with world("bpsfast", path, timeout_s=3.0):
        if rank_of() != 1:
            try:
                total()
            finally:
                with open(ended, "w", encoding="ascii"):
                    pass
        while not os.path.exists(ended):
            threading.Event().wait(0.05)


def test_a_rank_that_stays_away_is_named_at_the_timeout(own_ranks):
    ranks = own_ranks(2)
    began = time.monotonic()
    outcomes = ranks.attempt(stays_away, ranks.new_path(), ranks.new_path(), timeout_s=40)
    assert outcomes[0].error == "DistBackendError" and "rank 1" in outcomes[0].text, outcomes
    assert time.monotonic() - began < 35


def differs():
    x = torch.ones(3 + rank_of())
    dist.all_reduce(x)


def test_calls_that_differ_are_shown(torch_ranks):
    for outcome in torch_ranks(2).attempt_grouped(differs):
        assert outcome.error == "DistBackendError"
        assert "(3,)" in outcome.text and "(4,)" in outcome.text


def aborted():
    """A call is under way that the other rank never makes."""
    if rank_of() == 0:
        work = dist.all_reduce(torch.ones(10), async_op=True)
        dist.group.WORLD.abort()
        try:
            work.wait()
        except RuntimeError as exc:
            return str(exc)
        return "no error"
    return ""


def test_abort_ends_what_is_under_way(own_ranks):
    ranks = own_ranks(2)
    found = ranks.attempt_grouped(aborted)
    assert found[0].value and found[0].value != "no error", found


def absent(path):
    if rank_of() == 1:
        return
    with world("bpsfast", path, timeout_s=3.0):
        pass


def test_a_rank_that_does_not_come_to_the_beginning_is_named(own_ranks):
    ranks = own_ranks(2)
    outcomes = ranks.attempt(absent, ranks.new_path(), timeout_s=40)
    assert outcomes[0].error and not outcomes[1].error
    assert "rank 1 of 2 has not come" in outcomes[0].text, outcomes[0].text
