"""Sessions behind torch's process groups, in real ranks: shared, several, one after another, left in any order."""
from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bpsfast
from bpsfast.orchestration.errors import ConfigError
from bpsfast.torch.backend import worlds
from bpsfast.trainer import process as current

dist = pytest.importorskip("torch.distributed")

_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 90.0
_SIZE = 3


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[..., list[Any]]]:
    """Run a scenario of `tests.support.world_rank` on three ranks without a launcher; return what each printed."""
    with contextlib.ExitStack() as stack:

        def run(scenario: str) -> list[Any]:
            environ = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT),
                       "BPSFAST_START_TIMEOUT_S": "40", "BPSFAST_TIMEOUT_S": "40"}
            started = []
            for rank in range(_SIZE):
                command = [sys.executable, "-m", "tests.support.world_rank", str(tmp_path), str(rank), str(_SIZE),
                           scenario]
                started.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                                text=True))
                stack.callback(_end, started[-1])
            said = [each.communicate(timeout=_TIMEOUT_S) for each in started]
            assert not any(each.returncode for each in started), [err for _, err in said]
            return [json.loads(out.splitlines()[-1]) for out, _ in said]  # gloo of some versions says more

        yield run


def test_groups_end_with_those_of_a_torch_that_does_not_tell_them(monkeypatch):
    told = []

    class Group:
        def shutdown(self):
            told.append(self)

    first, second = Group(), Group()
    torchs = SimpleNamespace(destroy_process_group=lambda group=None: told.append(("torch", group)))
    dist = SimpleNamespace(ProcessGroup=object, group=SimpleNamespace(WORLD="world"))
    monkeypatch.setattr(worlds, "dist", dist)
    monkeypatch.setattr(worlds, "distributed_c10d", torchs)
    monkeypatch.setattr(worlds, "_groups", lambda: [first, second])
    worlds.end_with_torchs_groups()
    for group, ended in ((first, [first]), ("another's", []), ("world", [first, second]), (None, [first, second])):
        dist.destroy_process_group(group)
        assert told == [*ended, ("torch", group)] and torchs.destroy_process_group is dist.destroy_process_group
        told.clear()


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.kill()
    process.communicate(timeout=10)


def test_groups_share_the_session_of_the_default_group_and_the_last_one_ends_it(ranks):
    assert ranks("reuse") == [[True, True, sums, True, 0] for sums in ([6, 3], [6, 3, 5], [6, 5])]


def test_groups_beside_another_backends_have_sessions_of_their_own_ranks(ranks):
    assert ranks("several") == [
        [[3, 4, 3, 6], True, 3, True, 0],  # {0,1}, {0,2}, {0,1} again, all
        [[3, 5, 3, 2, 6], True, 3, True, 0],  # {0,1}, {1,2}, {0,1} again, {1} in the first of them, all
        [[5, 4, 6], True, 3, True, 0],
    ]


def test_a_process_may_join_again_and_nothing_is_left_over(ranks):
    for seen in ranks("one_after_another"):
        assert seen[1] == seen[2], seen


def test_sessions_are_left_in_any_order(ranks):
    assert ranks("any_order") == [[3], [3, 5], [5]]


def test_abort_ends_a_call_that_waits(ranks):
    (spent_s, error), *_ = ranks("aborted")
    assert "ClosedError" in error and spent_s < 20.0, (spent_s, error)


def test_a_fork_is_told_that_it_has_no_groups(ranks):
    assert ranks("forked") == [[7, 6.0]] * 3


def test_a_program_may_end_while_a_call_waits(ranks):
    assert ranks("left_under_way") == [0, 1, 2]


def test_who_does_not_come_to_a_group_is_named(ranks):
    (error, text), *_ = ranks("nobody_else")
    assert error == "StallError" and "1" in text and "2" in text, text


def of_the_launchers_job(folder):
    """Under a launcher, and after `bpsfast.init`, groups use the existing job, and leave it as it was."""
    import torch
    import torch.distributed as dist

    import bpsfast.torch.backend

    dist.init_process_group("bpsfast", init_method=f"file://{folder}/{bpsfast.size()}", rank=bpsfast.rank(),
                            world_size=bpsfast.size())
    assert dist.group.WORLD._group.session is current.current()
    x = torch.ones(3)
    dist.all_reduce(x)
    dist.destroy_process_group()
    bpsfast.barrier()
    return x.tolist()


@pytest.mark.parametrize("attach", [True, False])
def test_the_job_that_is_there_is_taken(job, tmp_path, attach):
    """Without *attach* the first group calls `bpsfast.init` on each rank."""
    started = job(ranks=(2, 1), attach=attach)
    if attach:
        assert started.run(of_the_launchers_job, str(tmp_path)) == [[3.0] * 3] * 3
        return
    assert started.run(joined_by_a_group, str(tmp_path)) == [[3.0] * 3] * 3
    started.call("shutdown")


def joined_by_a_group(folder):
    """As `of_the_launchers_job`, but nothing of this process has joined before."""
    import torch
    import torch.distributed as dist

    import bpsfast.torch.backend

    rank, size = int(os.environ["BPSFAST_RANK"]), int(os.environ["BPSFAST_SIZE"])
    dist.init_process_group("bpsfast", init_method=f"file://{folder}/joined", rank=rank, world_size=size)
    assert current.session() is not None and bpsfast.rank() == rank
    x = torch.ones(3)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return x.tolist()


def with_another_rank():
    import torch.distributed as dist

    from bpsfast.torch.backend import worlds

    other = (bpsfast.rank() + 1) % bpsfast.size()
    with pytest.raises(ConfigError, match=f"this process is rank {bpsfast.rank()} of 2 of bpsfast's job, but torch's "
                                          f"process group is made with rank {other}"):
        worlds.enter(dist.HashStore(), other, bpsfast.size(), [], 5.0)
    assert worlds._worlds == []


def test_torch_and_the_job_must_agree_on_ranks(two):
    two.run(with_another_rank)
