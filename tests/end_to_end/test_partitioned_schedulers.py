"""A network is cut in two, with a scheduler in each part: one part goes on, and the other one ends."""
from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bpsfast.base.exit_codes import LEFT_BEHIND
from bpsfast.launch.namespaces import Cluster, netns
from tests.end_to_end.test_lost_scheduler_host import MACHINES, declare_new
from tests.support.jobs import Job, Outcome
from tests.support.lossy_training import train_without_lost, until_step

pytestmark = [pytest.mark.root, pytest.mark.matrix, pytest.mark.timeout(150),
              pytest.mark.skipif(netns.missing() is not None, reason=str(netns.missing()))]

PORT = 7700


class ClusterJob(Job):
    """A job of three machines with a rank each; a scheduler may run on each of them, the first one on the first."""

    def __init__(self, **values: Any) -> None:
        self.cluster = Cluster(["m0", "m1", "m2"])
        try:
            super().__init__(ranks=(1, 1, 1), transport="tcp", partition_bytes=65536, lease_s=2.0, heartbeat_s=0.5,
                             next_hosts=("127.0.0.2", "127.0.0.3"), **values)
        except BaseException:
            self.cluster.close()
            raise

    def _start(self, command: Any, values: dict[str, Any]) -> None:
        number = command.name.partition(" ")[2]
        machine = self.cluster[f"m{number or 0}"]
        addresses = ",".join(f"{self.cluster[f'm{i}'].address}:{PORT}" for i in range(3))
        environ = {**command.environ, "BPSFAST_SCHEDULER": addresses, "BPSFAST_NODE_HOST": machine.address}
        super()._start(msgspec.structs.replace(command, argv=(*machine.via(), *command.argv), environ=environ), values)

    def start_scheduler(self, number: int) -> None:
        """Start another scheduler on machine *number*."""
        self._start(self._commands[f"scheduler {number}"], {})

    def set_link(self, number: int, state: str) -> None:
        subprocess.run(["ip", "-n", self.cluster[f"m{number}"].namespace, "link", "set", "eth0", state], check=True,
                       timeout=20)

    def kill(self) -> None:
        super().kill()
        self.cluster.close()


@pytest.fixture
def started():
    job = ClusterJob(on_worker_loss="continue", start_timeout_s=25)
    yield job
    job.kill()


def cut_off(job: ClusterJob, path: Path, node: int, scheduler: int) -> list[Outcome]:
    """Cut *node* off in a training that then gets another *scheduler*; return the outcomes of the other ranks."""
    job.begin(train_without_lost, MACHINES, 0, 60, str(path))
    until_step(path, 20)
    job.set_link(node, "down")
    job.start_scheduler(scheduler)
    outcomes = job.outcomes(60, only=tuple(rank for rank in range(3) if rank != node))
    assert [each.text or each.value[0] for each in outcomes] == [[], []]
    return outcomes


def test_the_first_machine_is_cut_off_with_its_scheduler(started, tmp_path: Path):
    """It lives on, alone, until it learns that the others have gone on without it."""
    outcomes = cut_off(started, tmp_path / "step", 0, scheduler=1)
    assert outcomes[0].value[1:] == outcomes[1].value[1:] and outcomes[0].value[1][-1] == (1, 2)
    assert len(outcomes[0].value[1]) == 60 * 6, "no step is lost"
    started.set_link(0, "up")
    (alone,) = started.outcomes(60, only=(0,))
    assert alone.error == "PeerLostError", alone
    assert started.daemons.pop("scheduler").wait(60) == LEFT_BEHIND
    assert started.daemons.pop("node 0").wait(20) != 0
    started.lost.add(0)
    assert started.run(declare_new, 0, 3) == [[], []], "nothing of that disturbs the others"
    started.close()


def test_the_last_machine_is_cut_off_and_finds_no_job_at_its_own_scheduler(started, tmp_path: Path):
    """A scheduler is started there, too: it hears one of three nodes, and decides nothing."""
    outcomes = cut_off(started, tmp_path / "step", 2, scheduler=2)
    assert outcomes[0].value[1][-1] == (0, 1)
    (alone,) = started.outcomes(60, only=(2,))
    assert alone.error == "PeerLostError", "though a scheduler has answered"
    second = started.daemons.pop("scheduler 2")
    assert second.wait(60) == LEFT_BEHIND, "though its node has looked elsewhere meanwhile"
    assert started.daemons.pop("node 2").wait(20) != 0
    started.lost.add(2)
    started.set_link(2, "up")
    assert started.run(declare_new, 0, 3) == [[], []]
    started.close()
