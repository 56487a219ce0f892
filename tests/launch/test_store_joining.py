"""Tests jobs that form through a store: several in one process, at once and in sequence, and real processes."""
from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bpsfast.launch.namespaces import Cluster
from bpsfast.launch.namespaces.cluster import Machine

_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 90.0
_AS_ROOT = (pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"))


class Ended:
    """What became of one rank."""

    def __init__(self, process: subprocess.Popen, out: str, err: str) -> None:
        self.code, self.err = process.returncode, err
        self.value = json.loads(out) if out else None


class Ranks:
    """Start ranks of `tests.support.store_rank`, on this machine or each on one of *machines*."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self.environ: dict[str, str] = {}

    def start(self, scenario: str, rank: int, size: int, kind: str = "directory", machine: Machine | None = None,
              **variables: str) -> subprocess.Popen:
        """Start one rank."""
        command = [sys.executable, "-m", "tests.support.store_rank", str(self._folder), str(rank), str(size), kind,
                   scenario]
        environ = {"PATH": os.environ["PATH"], "BPSFAST_START_TIMEOUT_S": "40", "BPSFAST_TIMEOUT_S": "40",
                   "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT), **self.environ, **variables}
        if machine is not None:
            environ.setdefault("BPSFAST_JOB_KEY", "ab" * 32)
        popen: Callable[..., subprocess.Popen] = subprocess.Popen if machine is None else machine.popen
        started = popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._stack.callback(_end, started)
        return started

    def run(self, scenario: str, size: int = 3, kind: str = "directory", machines: list[Machine] | None = None,
            **variables: str) -> list[Ended]:
        """Run all ranks to their end."""
        started = [self.start(scenario, rank, size, kind, machines[rank] if machines else None, **variables)
                   for rank in range(size)]
        return [Ended(each, *each.communicate(timeout=_TIMEOUT_S)) for each in started]

    def values(self, *arguments: Any, **options: Any) -> list[Any]:
        """As `run`; all must end well and say nothing else. Return their values."""
        ended = self.run(*arguments, **options)
        assert not any(each.code or each.err for each in ended), [each.err for each in ended]
        return [each.value for each in ended]


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.kill()
    process.communicate(timeout=10)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    with contextlib.ExitStack() as stack:
        yield Ranks(tmp_path, stack)


def test_ranks_of_one_machine_are_one_node(ranks):
    found = ranks.values("one")
    assert found == [[6.0, rank, 3, 0, 1, 0, "127.0.0.1"] for rank in range(3)]


@pytest.mark.parametrize("kind", [pytest.param("file", marks=pytest.mark.thorough), "tcp"])
def test_stores_of_torch(ranks, kind):
    dist = pytest.importorskip("torch.distributed")
    server = None
    if kind == "tcp":
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
        ranks.environ["STORE_PORT"] = str(server.port)
    totals = ranks.values("five", kind=kind)
    assert [each[0] for each in totals] == [[6.0] * 5] * 3
    del server


def test_five_jobs_one_after_another_leave_nothing(ranks):
    for totals, n_keys, before, after in ranks.values("five"):
        assert totals == [6.0] * 5 and n_keys == 5
        assert before == after, "descriptors, threads, children"


def test_two_jobs_at_once_are_left_in_any_order(ranks):
    assert ranks.values("two_at_once") == [[6.0, 6.0, 6.0, 6.0]] * 3


def test_a_given_key_is_no_way_from_one_job_into_another(ranks):
    assert ranks.values("two_at_once", BPSFAST_JOB_KEY="ab" * 32) == [[6.0, 6.0, 6.0, 6.0]] * 3


def test_daemons_outlive_the_session_of_their_starter(ranks):
    assert ranks.values("leaves_early") == [0.0, 1.0, 2.0]


def test_the_end_of_the_program_leaves(ranks):
    assert ranks.values("exits_without_leaving") == [6.0] * 3


def test_an_uncaught_exception_ends_both_jobs(ranks):
    ended = ranks.run("raises")
    assert ended[1].code == 1 and "ValueError: a bug of the user" in ended[1].err
    for rank in (0, 2):
        assert [name for name, _ in ended[rank].value] == ["PeerLostError"] * 2
        assert all("ValueError: a bug of the user" in text for _, text in ended[rank].value)


def test_a_fork_leaves_nothing(ranks):
    assert ranks.values("forks") == [[6.0, 0]] * 3


def test_nodes_by_their_name_on_one_host(ranks):
    started = [ranks.start("one", rank, 3, BPSFAST_NODE_ID="b" if rank == 1 else "a") for rank in range(3)]
    ended = [Ended(each, *each.communicate(timeout=_TIMEOUT_S)) for each in started]
    assert [each.value for each in ended] == [[6.0, 0, 2, 0, 2, 0, "127.0.0.1"], [6.0, 0, 1, 1, 2, 0, "127.0.0.1"],
                                              [6.0, 1, 2, 0, 2, 0, "127.0.0.1"]], [each.err for each in ended]


@pytest.mark.parametrize("marks", [pytest.param("", marks=_AS_ROOT)])
def test_machines_are_told_apart_and_rank_0_need_not_be_where_master_addr_is(ranks, marks):
    with Cluster(2) as cluster:
        a, b = cluster
        found = ranks.values("one", 3, machines=[a, b, a], MASTER_ADDR=b.address)
        assert found == [[6.0, 0, 2, 0, 2, 0, a.address], [6.0, 0, 1, 1, 2, 0, a.address],
                         [6.0, 1, 2, 0, 2, 0, a.address]]
