"""The launcher starts another scheduler when the job's is lost with its host, or is killed too often."""
from __future__ import annotations

import os
import sys

import pytest

from bpsfast.base import process_identity
from bpsfast.base.exit_codes import LEFT_BEHIND, LOST_HOST, TIMEOUT
from bpsfast.base.settings import Settings
from bpsfast.launch import daemons, local_job, ssh_job
from bpsfast.launch.processes import Command, Kind, LocalProcesses
from bpsfast.launch.supervisor import Limits, SpareScheduler
from tests.launch.test_lost_hosts import LosableHost
from tests.launch.test_worker_loss import Job

pytestmark = pytest.mark.timeout(60)

_LIMITS = Limits(job_s=40.0, after_failure_s=0.3, after_ranks_s=0.3, after_sigterm_s=0.5)
_KILLED = "import os; os.kill(os.getpid(), 9)"
#: Parts of the line that announces the next scheduler: each process waits for another one.
_NEXT = ("another one is started", "one is started at", "is started at 10.0.0.", "started at 10")


def python(name: str, text: str, kind: Kind = Kind.DAEMON, node: int = -1, n_restarts: int = 0) -> Command:
    return Command(name, kind, (sys.executable, "-S", "-c", text), dict(os.environ), n_restarts=n_restarts, node=node)


def away(name: str, kind: Kind = Kind.DAEMON, node: int = -1) -> Command:
    """Return a command for a `LosableHost`, which starts nothing."""
    return Command(name, kind, (), {}, node=node, n_restarts=3 if node < 0 else 0)


def spare(text: str, host=None, address: str = "10.0.0.2:7") -> SpareScheduler:
    return SpareScheduler(python("scheduler", text, n_restarts=3), host, address)


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def run(job, lost, here, spares, **options):
    """Run a job: *lost* commands are on a host that is lost, *here* others."""
    gone, local = LosableHost(0.3), LocalProcesses()
    hosts = [gone] * len(lost) + [local] * len(here)
    spares = [each if each.host is not None else each._replace(host=local) for each in spares]
    return job.run(*lost, *here, hosts=hosts, spares=spares, limits=_LIMITS, **options)


@pytest.mark.parametrize("min_workers", [1, 2])
def test_the_scheduler_s_host_is_lost_and_the_job_goes_on(job, min_workers):
    lost = [away("scheduler"), away("node 0", node=0), away("rank 0", Kind.RANK, 0)]
    here = [python(f"node {node}", job.after(_NEXT[node]), node=node) for node in (1, 2)]
    here += [python("rank 1", job.after(_NEXT[0]), Kind.RANK, 1), python("rank 2", job.after(_NEXT[3]), Kind.RANK, 2)]
    code, said = run(job, lost, here, [spare("")], min_workers=min_workers)
    assert code == 0, said
    why = "was lost with its host c (nothing was heard of it for 30 s)"
    assert f"scheduler {why}: another one is started at 10.0.0.2:7\n" in said
    assert f"rank 0 {why}: the job goes on with 2 ranks (min_workers = {min_workers})\n" in said


def test_a_host_without_ranks_is_lost_with_the_scheduler(job):
    here = [python("node 0", job.after(_NEXT[0]), node=0), python("rank 0", job.after(_NEXT[1]), Kind.RANK, 0)]
    code, said = run(job, [away("scheduler")], here, [spare("")], min_workers=None)
    assert code == 0 and "another one is started at 10.0.0.2:7" in said, said


@pytest.mark.parametrize("min_workers", [None, 3])
def test_no_scheduler_takes_over_a_job_that_ends_with_the_host(job, min_workers):
    lost = [away("scheduler"), away("node 0", node=0), away("rank 0", Kind.RANK, 0)]
    stays = "import time; time.sleep(600)"
    here = [python(f"node {node}", stays, node=node) for node in (1, 2)]
    here += [python(f"rank {rank}", stays, Kind.RANK, rank) for rank in (1, 2)]
    code, said = run(job, lost, here, [spare("raise SystemExit(9)")], min_workers=min_workers)
    assert code == LOST_HOST and "is started at" not in said, said


def test_of_two_machines_the_second_one_may_not_go_on_alone(job):
    lost = [away("scheduler"), away("node 0", node=0), away("rank 0", Kind.RANK, 0)]
    stays = "import time; time.sleep(600)"
    here = [python("node 1", stays, node=1), python("rank 1", stays, Kind.RANK, 1)]
    code, said = run(job, lost, here, [spare("raise SystemExit(9)")], min_workers=1)
    assert code == LOST_HOST, said
    assert "no scheduler takes over, as fewer nodes are left than may go on without the others" in said


def test_a_scheduler_that_is_killed_too_often_is_replaced_elsewhere(job):
    gone = LosableHost(float("inf"))
    gone.lost = "lost"
    here = [python("scheduler", _KILLED, n_restarts=1), python("rank 0", job.after(_NEXT[0]), Kind.RANK, 0)]
    spares = [spare("", gone), spare("", address="10.0.0.3:7")]
    code, said = run(job, [], here, spares)
    assert code == 0, said
    assert "it is started again (1 of 1 times)" in said and not gone.processes
    assert "scheduler was killed by SIGKILL: another one is started at 10.0.0.3:7" in said


def test_if_all_are_killed_the_job_ends(job):
    here = [python("scheduler", _KILLED), python("rank 0", "import time; time.sleep(600)", Kind.RANK, 0)]
    code, said = run(job, [], here, [spare(_KILLED)])
    assert code == 128 + 9 and "scheduler failed first: it was killed by SIGKILL" in said, said
    assert said.count("it is started again") == 3, "at its place first"


def test_a_scheduler_that_leaves_the_job_to_another_one_is_no_failure(job):
    here = [python("scheduler", f"raise SystemExit({LEFT_BEHIND})"),
            python("rank 0", job.after(_NEXT[0]), Kind.RANK, 0)]
    code, said = run(job, [], here, [spare("")])
    assert code == 0 and "another one is started at 10.0.0.2:7" in said, said


def test_if_the_last_one_leaves_the_job_that_is_a_timeout(job):
    gone = LosableHost(float("inf"))
    gone.lost = "lost"
    leaves = f"raise SystemExit({LEFT_BEHIND})"
    here = [python("scheduler", leaves), python("rank 0", "import time; time.sleep(600)", Kind.RANK, 0)]
    code, said = run(job, [], here, [spare(leaves), spare("", gone)])
    assert code == TIMEOUT and said.count("another one is started") == 1, said


@pytest.mark.parametrize(("n_addresses", "number", "is_replaced", "is_last"), [
    (1, 0, False, False), (2, 0, True, False), (2, 1, False, True), (3, 1, True, False)])
def test_each_scheduler_knows_whether_the_launcher_starts_another_one(
        n_addresses, number, is_replaced, is_last, monkeypatch):
    monkeypatch.setenv(process_identity.LAUNCHER_VARIABLE, "1")
    assert daemons._followers(n_addresses, number) == (is_replaced, is_last)
    monkeypatch.delenv(process_identity.LAUNCHER_VARIABLE)
    assert daemons._followers(n_addresses, number) == (False, False), "by hand"


@pytest.mark.parametrize(("values", "is_late"), [
    ({}, False), ({"start_timeout_s": 39.0}, True), ({"start_timeout_s": 40.0}, False),
    ({"start_timeout_s": 32.0, "lease_s": 2.0}, False), ({"start_timeout_s": 5.0, "on_worker_loss": "abort"}, False)],
    ids=str)
def test_a_launcher_that_would_notice_too_late_says_so(values, is_late):
    said = ssh_job.late_takeover(Settings(**{"on_worker_loss": "continue", **values}))
    assert bool(said) == is_late
    if is_late:
        assert "the launcher notices that after 30 s" in said
        assert said.endswith("Set it to 40 (with lease_s = 10) or more")


def test_each_scheduler_of_a_job_knows_its_own_address():
    commands = local_job.plan(local_job.JobShape(ranks=(1, 1)), ["python"], Settings(), {}, ("10.0.0.1", 7), "ab" * 32,
                              python="python", next_schedulers=[("10.0.0.2", 8)])
    second = local_job.next_scheduler(commands[0], 1)
    assert {command.environ["BPSFAST_SCHEDULER"] for command in [*commands, second]} == {"10.0.0.1:7,10.0.0.2:8"}
    assert [each.environ["BPSFAST_SCHEDULER_INDEX"] for each in (commands[0], second)] == ["0", "1"]
    assert all("BPSFAST_SCHEDULER_INDEX" not in command.environ for command in commands[1:])
