"""What a network does to a job of two machines, and what the job makes of it: the same bits, or an error with names.

Scheduler, node 0 and rank 0 are on one machine, node 1 and rank 1 on the other; a forwarder between them loses, delays
and cuts (`bpsfast.cluster.FaultyLink`). Each step's sums are compared with NumPy's on both ranks.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bpsfast.cluster import FaultyLink, faulty_link
from tests.checked_training import train
from tests.conftest import Job

LACKING = faulty_link.missing()
pytestmark = [pytest.mark.root, pytest.mark.skipif(LACKING is not None, reason=f"{LACKING}")]

#: What the scheduler says and hears goes the same way, unless a test spares this port.
PORT = 7700
PATIENCE_S = 60.0


class SplitJob(Job):
    """A job on the two machines of a link; it trains from its start, and says how far it is."""

    def __init__(self, link: FaultyLink, folder: Path, **values: Any) -> None:
        self._link = link
        self._folder = folder
        super().__init__(ranks=(1, 1), transport="tcp", partition_bytes=1 << 18, **values)
        try:
            self.begin(train, str(folder))
            self.go_on(2)
        except BaseException:
            self.kill()
            raise

    def _start(self, command: Any, values: dict[str, Any]) -> None:
        machine = self._link["ab"[command.name in ("node 1", "rank 1")]]
        environ = {**command.environ, "BPSFAST_SCHEDULER": f"{self._link['a'].address}:{PORT}",
                   "BPSFAST_NODE_HOST": machine.address, "BPSFAST_LOG_LEVEL": "INFO"}
        super()._start(msgspec.structs.replace(command, argv=(*machine.via(), *command.argv), environ=environ), values)

    @property
    def steps(self) -> int:
        """How many steps the slower rank has made."""
        files = [self._folder / f"rank {rank}" for rank in (0, 1)]
        return min(int(file.read_text()) if file.exists() else 0 for file in files)

    def go_on(self, n_steps: int) -> None:
        """Wait until *n_steps* more are made."""
        enough = self.steps + n_steps
        self.until(lambda: self.steps >= enough)

    def until(self, happened: Callable[[], bool]) -> None:
        """Wait for what is to happen while both ranks train."""
        deadline = time.monotonic() + PATIENCE_S
        while not happened():
            ended = [pipe for pipe in self._pipes if pipe.poll(0.005)]
            assert not ended, [outcome.text for outcome in self.outcomes(20)]
            assert time.monotonic() < deadline, f"{self.steps} steps, {self._link.carried}"

    def finish(self) -> list[dict[str, int]]:
        """End the training; return the counters of both nodes. All sums were right."""
        self.go_on(2)
        (self._folder / "stop").touch()
        found = [outcome.value for outcome in self.outcomes(PATIENCE_S)]
        assert [each["wrong"] for each in found] == [[], []] and found[0]["steps"] == found[1]["steps"]
        self.close()
        return [each["counters"] for each in found]


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Return a context manager that makes the link and the job: ``with trained(spared=..., **settings)``."""
    @contextmanager
    def make(spared: tuple[int, ...] = (), **values: Any) -> Iterator[tuple[FaultyLink, SplitJob]]:
        with FaultyLink("a", "b", spared=spared, mtu=9000) as link:
            job = SplitJob(link, tmp_path, **{"lease_s": 6.0, "heartbeat_s": 0.5, "timeout_s": 60} | values)
            try:
                yield link, job
            finally:
                job.kill()

    yield make


def replaced(counters: list[dict[str, int]]) -> tuple[int, int]:
    """Return how many links each node has replaced."""
    return counters[0]["wire_1_replaced"], counters[1]["wire_0_replaced"]


def last(duration_s: float) -> None:
    """Let a fault last so long."""
    time.sleep(duration_s)


def test_without_faults_no_link_is_replaced(trained):
    with trained() as (_, job):
        assert replaced(job.finish()) == (0, 0)


@pytest.mark.parametrize("cut", [("a",), ("b",), ()], ids=["from a", "from b", "both ways"])
def test_a_short_cut_is_passed_over(trained, cut):
    with trained() as (link, job):
        link.cut(*cut)
        last(1.5)
        link.mend()
        assert replaced(job.finish()) == (0, 0)
        assert link.carried.dropped > 0


@pytest.mark.parametrize("cut", [("a",), ("b",), ()], ids=["from a", "from b", "both ways"])
def test_a_cut_that_a_connection_does_not_survive_is_shorter_than_the_lease(trained, cut):
    with trained(spared=(PORT,)) as (link, job):
        link.cut(*cut)
        last(5.0)
        link.mend()
        there, here = replaced(job.finish())
        assert there == here >= 1


def test_three_in_ten_packets_are_lost_for_some_seconds(trained):
    with trained() as (link, job):
        link.lose(0.3)
        last(4.0)
        link.lose(0.0)
        there, here = replaced(job.finish())
        assert abs(there - here) <= 1  # a connection may have had bad luck, also a new one
        assert link.carried.dropped > 50


def test_spikes_of_50_ms_only_take_time(trained):
    with trained() as (link, job):
        link.spike(0.05, 0.005)
        job.go_on(3)
        assert replaced(job.finish()) == (0, 0)


@pytest.mark.parametrize("streams", [1, 4])
def test_resets_in_the_middle_of_payloads_add_nothing_twice(trained, streams):
    with trained(tcp_streams=streams, spared=(PORT,)) as (link, job):
        link.reset(6, 700_000)
        job.until(lambda: link.carried.resets == 6)
        there, here = replaced(job.finish())
        assert there == here and 2 <= here <= 6  # some may have met while the pair had parted


def test_resets_that_meet_the_new_connections_too_add_nothing_twice(trained):
    with trained(spared=(PORT,)) as (link, job):
        link.reset(25, 1)  # handshakes, what is awaited, first headers: whatever is sent next
        job.until(lambda: link.carried.resets == 25)
        assert min(replaced(job.finish())) >= 1


def test_a_half_open_connection_is_noticed_and_replaced(trained):
    with trained(spared=(PORT,)) as (link, job):
        link.forget()
        job.go_on(3)
        assert replaced(job.finish()) == (1, 1)


def test_a_cut_longer_than_the_lease_ends_in_words(trained):
    with trained(spared=(PORT,), lease_s=3.0) as (link, job):
        begin = time.monotonic()
        link.cut()
        outcomes = job.outcomes(30)
        assert time.monotonic() - begin < 2 * 3.0 + 2.0
        assert {outcome.error for outcome in outcomes} == {"PeerLostError"}, outcomes
        assert all("node " in outcome.text and "within lease_s = 3 s" in outcome.text for outcome in outcomes), outcomes


def test_a_machine_that_is_cut_off_for_longer_than_the_lease_is_lost_by_name(trained):
    with trained(lease_s=3.0) as (link, job):
        begin = time.monotonic()
        link.cut()
        outcomes = job.outcomes(30)
        assert time.monotonic() - begin < 2 * 3.0
        assert {outcome.error for outcome in outcomes} == {"PeerLostError"}, outcomes
        assert "node 1" in outcomes[0].text and "silent for 3" in outcomes[0].text
        assert "scheduler" in outcomes[1].text and "silent for 3" in outcomes[1].text
