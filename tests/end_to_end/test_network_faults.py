"""What a network does to a job of two machines, and what the job makes of it: the same bits, or an error with names.

Scheduler, node 0 and rank 0 are on one machine, node 1 and rank 1 on the other; a forwarder between them loses, delays
and cuts (`bpsfast.launch.namespaces.FaultyLink`). Each step's sums are compared with NumPy's on both ranks.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import bpsfast
from bpsfast.base.exit_codes import LEFT_BEHIND
from bpsfast.launch.namespaces import FaultyLink, faulty_link
from tests.support.checked_training import train
from tests.support.jobs import Job

LACKING = faulty_link.missing()
pytestmark = [pytest.mark.root, pytest.mark.skipif(LACKING is not None, reason=f"{LACKING}")]

#: What the scheduler says and hears goes the same way, unless a test spares this port.
PORT = 7700
PATIENCE_S = 60.0
LEASE_S = 6.0


class SplitJob(Job):
    """A job on the two machines of a link; it trains once or more often, and says how far it is."""

    def __init__(self, folder: Path, far: Sequence[str] = ("node 1", "rank 1"), **values: Any) -> None:
        """*far*: what runs on the second machine."""
        self.link = FaultyLink("a", "b", mtu=9000)
        self._far = far
        self._folder = folder
        self.trains, self.n_damaged = False, 0  # writes, between the last `train` and `finish`
        try:
            super().__init__(ranks=(1, 1), transport="tcp", partition_bytes=1 << 18,
                             **{"lease_s": LEASE_S, "heartbeat_s": 0.5, "timeout_s": PATIENCE_S} | values)
        except BaseException:
            self.link.close()
            raise

    def _start(self, command: Any, values: dict[str, Any]) -> None:
        machine = self.link["ab"[command.name in self._far]]
        environ = {**command.environ, "BPSFAST_SCHEDULER": f"{self.link['a'].address}:{PORT}",
                   "BPSFAST_NODE_HOST": machine.address, "BPSFAST_LOG_LEVEL": "INFO"}
        super()._start(msgspec.structs.replace(command, argv=(*machine.via(), *command.argv), environ=environ), values)

    def train(self) -> None:
        """Let both ranks train until `finish`; return when they do."""
        for file in self._folder.iterdir():
            file.unlink()
        self.trains = True
        self.begin(train, str(self._folder))
        self.go_on(2)

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
            assert time.monotonic() < deadline, f"{self.steps} steps, {self.link.carried}"

    def finish(self) -> tuple[int, int]:
        """End the training, all sums of which were right; return how many links each node has replaced since `train`.
        """
        self.go_on(2)
        (self._folder / "stop").touch()
        found = [outcome.value for outcome in self.outcomes(PATIENCE_S)]
        assert [each["wrong"] for each in found] == [[], []] and found[0]["steps"] == found[1]["steps"]
        self.trains = False
        self.n_damaged = sum(each["after"][name] - each["before"][name] for rank, each in enumerate(found)
                             for name in (f"wire_{1 - rank}_writes_damaged",))
        there, here = (each["after"][f"wire_{1 - rank}_replaced"] - each["before"][f"wire_{1 - rank}_replaced"]
                       for rank, each in enumerate(found))
        return there, here

    def close(self) -> None:
        """End the job in order, and its machines."""
        try:
            super().close()
        finally:
            self.link.close()

    def kill(self) -> None:
        """End everything at once."""
        super().kill()
        self.link.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., SplitJob]]:
    """Return a function that starts a job, or the one that runs already if the test before it left it in order."""
    running: dict[str, SplitJob] = {}

    def start(**values: Any) -> SplitJob:
        found = running.get(repr(values))
        if found is not None and found.trains:
            running.pop(repr(values)).kill()
            found = None
        if found is None:
            found = running[repr(values)] = SplitJob(tmp_path_factory.mktemp("job"), **values)
        found.link.mend()
        found.link.spare()
        found.train()
        return found

    yield start
    for job in running.values():
        if job.trains:
            job.kill()
        else:
            job.close()


@pytest.fixture
def job(shared: Callable[..., SplitJob]) -> SplitJob:
    """Both ranks of it train. For tests which it survives."""
    return shared()


@pytest.fixture
def doomed(tmp_path: Path) -> Iterator[SplitJob]:
    """Both ranks of it train, with a short lease."""
    made = SplitJob(tmp_path, lease_s=3.0)
    try:
        made.train()
        yield made
    finally:
        made.kill()


def last(duration_s: float) -> None:
    """Let a fault last so long."""
    time.sleep(duration_s)


def test_without_faults_no_link_is_replaced(job):
    assert job.finish() == (0, 0)


@pytest.mark.parametrize("cut", [("a",), ("b",), ()], ids=["from a", "from b", "both ways"])
def test_a_short_cut_is_passed_over(job, cut):
    dropped = job.link.carried.dropped
    job.link.cut(*cut)
    last(0.8)  # tcp tries again after up to twice as long, and the scheduler's connection is cut, too
    job.link.mend()
    assert job.finish() == (0, 0)
    assert job.link.carried.dropped > dropped


@pytest.mark.parametrize("cut", [("a",), ("b",), ()], ids=["from a", "from b", "both ways"])
def test_a_cut_that_a_connection_does_not_survive_is_shorter_than_the_lease(job, cut):
    job.link.spare(PORT)
    job.link.cut(*cut)
    last(LEASE_S - 1.0)
    job.link.mend()
    assert min(job.finish()) >= 1


def test_a_cut_that_no_connection_survives_not_the_schedulers_either(job):
    """Longer than half the lease: by then tcp would try again only when the lease is over."""
    job.link.cut()
    last(LEASE_S * 0.6)
    job.link.mend()
    assert min(job.finish()) >= 1
    job.run(meet)


def meet() -> None:
    """Do what needs the scheduler."""
    bpsfast.barrier()


def test_three_in_ten_packets_are_lost_for_some_seconds(job):
    dropped = job.link.carried.dropped
    job.link.lose(0.3)
    last(4.0)
    job.link.mend()
    there, here = job.finish()
    assert abs(there - here) <= 1  # a connection may have had bad luck, also a new one
    assert job.link.carried.dropped > dropped + 50


def test_spikes_of_50_ms_only_take_time(job):
    job.link.spike(0.05, 0.005)
    job.go_on(3)
    assert job.finish() == (0, 0)


@pytest.mark.parametrize("values", [{}, {"tcp_streams": 4}], ids=["1 stream", "4 streams"])
def test_resets_in_the_middle_of_payloads_add_nothing_twice(shared, values):
    job = shared(**values)
    resets = job.link.carried.resets
    job.link.spare(PORT)
    job.link.reset(6, 700_000)
    job.until(lambda: job.link.carried.resets == resets + 6)
    found = job.finish()
    assert min(found) >= 2 and max(found) <= 6  # some may have met while the pair had parted


def test_resets_that_meet_the_new_connections_too_add_nothing_twice(job):
    resets = job.link.carried.resets
    job.link.spare(PORT)
    job.link.reset(25, 1)  # handshakes, what is awaited, first headers: whatever is sent next
    job.until(lambda: job.link.carried.resets == resets + 25)
    assert min(job.finish()) >= 1


protected = pytest.mark.parametrize("values", [{"encryption": "on"}, {"checksum": "on"}],
                                    ids=["encrypted", "with checksums"])


@protected
def test_who_changes_what_is_protected_costs_links_and_changes_no_sum(shared, values):
    job = shared(**values)
    before = job.link.carried.changed
    job.link.spare(PORT)
    job.link.change(6, 700_000)
    job.until(lambda: job.link.carried.changed == before + 6)
    found = job.finish()
    assert min(found) >= 2 and max(found) <= 6 and 1 <= job.n_damaged <= 6


@protected
def test_who_changes_what_is_protected_from_the_first_byte_on_changes_no_sum(shared, values):
    job = shared(**values)
    before = job.link.carried.changed
    job.link.spare(PORT)
    job.link.change(25, 1)  # handshakes, what is awaited, first headers: whatever is sent next
    job.until(lambda: job.link.carried.changed == before + 25)
    assert min(job.finish()) >= 1


def test_who_changes_what_is_not_protected_changes_sums(tmp_path):
    """What the two before could not show if the changes did not arrive."""
    job = SplitJob(tmp_path, encryption="off")
    try:
        job.train()
        job.link.spare(PORT)
        job.link.change(3, 700_000)
        job.until(lambda: job.link.carried.changed == 3)
        job.go_on(2)
        (tmp_path / "stop").touch()
        assert any(outcome.value["wrong"] for outcome in job.outcomes(PATIENCE_S))
    finally:
        job.kill()


def test_a_half_open_connection_is_noticed_and_replaced(job):
    job.link.spare(PORT)
    job.link.forget()
    job.go_on(3)
    assert job.finish() == (1, 1)


def test_data_connections_that_a_firewall_resets_and_refuses_for_a_while_are_made_anew(job):
    """As while its rules change, for longer than a dead process has: this one lives, for the scheduler hears it."""
    job.link.spare(PORT)
    job.link.refuse()
    last(LEASE_S / 2)
    job.link.mend()
    assert min(job.finish()) >= 1


def test_a_connection_to_the_scheduler_that_is_reset_and_refused_for_a_while_is_made_anew(job):
    job.link.refuse(PORT)
    last(LEASE_S / 2)
    job.link.mend()
    assert job.finish() == (0, 0)
    job.run(meet)


def test_a_node_that_only_the_scheduler_does_not_reach_has_longer_than_the_lease(job):
    """The other nodes reach it, so it has as long as all have when the scheduler is lost; sums go on meanwhile."""
    job.link.refuse(PORT)
    last(LEASE_S * 1.5)
    job.go_on(3)
    job.link.mend()
    assert job.finish() == (0, 0)
    job.run(meet)


def test_a_cut_longer_than_the_lease_ends_in_words(doomed):
    begin = time.monotonic()
    doomed.link.spare(PORT)
    doomed.link.cut()
    outcomes = doomed.outcomes(30)
    assert time.monotonic() - begin < 3 * 3.0  # half a lease, a lease, and what a busy machine takes
    assert {outcome.error for outcome in outcomes} == {"PeerLostError"}, outcomes
    assert all("node " in outcome.text and "within lease_s = 3 s" in outcome.text for outcome in outcomes), outcomes


def test_a_machine_that_is_cut_off_for_longer_than_the_lease_is_lost_by_name(doomed):
    begin = time.monotonic()
    doomed.link.cut()
    outcomes = doomed.outcomes(30)
    assert time.monotonic() - begin < 3 * 3.0
    assert {outcome.error for outcome in outcomes} == {"PeerLostError"}, outcomes
    assert "node 1" in outcomes[0].text and "silent for 3" in outcomes[0].text
    assert "node 0" in outcomes[1].text and "within lease_s = 3 s" in outcomes[1].text


def test_a_helper_whose_machine_is_cut_off_is_done_without_long_before_the_lease_is_over(tmp_path):
    """As one that is switched off: nothing ends the connections. The ranks train on, beside each other."""
    found = SplitJob(tmp_path, far=("helper 0",), helpers=1, placement="ps", lease_s=3 * PATIENCE_S)
    try:
        found.train()
        found.link.cut()
        found.go_on(4)
        helper = found.daemons.pop("helper 0")
        found.link.mend()
        assert helper.wait(PATIENCE_S) == LEFT_BEHIND, "it is told so"
        found.finish()
        found.close()
    finally:
        found.kill()
