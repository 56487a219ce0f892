"""Tests the elastic service: its answers to workers and its orders to the launcher."""
from __future__ import annotations

import contextlib
import os
import select
import threading
import time

import pytest

from bpsfast.base.job_key import elastic_key
from bpsfast.base.settings import load, parse_address
from bpsfast.elastic.coordinator_client import CoordinatorClient
from bpsfast.launch import elastic_service
from bpsfast.launch.elastic_service import ElasticService, KillWorker, ReplaceWorker, StartWorkers, StopJob
from bpsfast.orchestration.elastic import protocol
from bpsfast.orchestration.elastic.coordinator import ElasticRules
from bpsfast.orchestration.elastic.protocol import (
    Add,
    Added,
    Come,
    Dismissed,
    Done,
    Formed,
    Hello,
    Newcomers,
    Over,
    Prepared,
    Put,
    Refused,
    Value,
    Void,
    Wait,
    Want,
)
from bpsfast.orchestration.errors import CapacityError, StallError

KEY = b"k" * 32


class Worker:
    """A worker's end, as far as it speaks."""

    def __init__(self, service, number, key=KEY):
        self.number, self.heard = number, []
        self._channel = protocol.connect(*parse_address(service.address, "test"), elastic_key(key))
        self._quiet = os.eventfd(0)
        self._channel.tell(Hello(rank=number))

    def say(self, kind, **fields):
        self._channel.tell(kind(member=self.number, **fields))

    def hears(self, kind, timeout_s=10.0):
        """The next message of *kind*; others before it are kept in `heard`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._channel.wait(self._quiet, 0.1)
            self.heard += self._channel.recv_nowait()
            for message in self.heard:
                if isinstance(message, kind):
                    self.heard.remove(message)
                    return message
        raise AssertionError(f"worker {self.number} has not heard {kind.__name__}, but {self.heard}")

    @property
    def is_connected(self):
        self.heard += self._channel.recv_nowait()
        return self._channel.is_connected

    def close(self):
        self._channel.close()
        os.close(self._quiet)


@pytest.fixture
def coordinator(no_leaks):
    """Return a service and its first workers, whose first job is formed, and a way to make more workers."""
    with contextlib.ExitStack() as stack:
        def start(n, **rules):
            chosen = ElasticRules(**{"max_ranks": n, "within_s": 20.0, **rules})
            service = ElasticService(chosen, range(n), KEY, "127.0.0.1")
            stack.callback(service.close)
            service.start()

            def more(number, key=KEY):
                worker = Worker(service, number, key)
                stack.callback(worker.close)
                return worker

            workers = [more(number) for number in range(n)]
            for worker in workers:
                worker.say(Come, node="a")
            for worker in workers:
                formed = worker.hears(Formed)
                assert formed == Formed(1, worker.number, n, service._coordinator.rules.lost_worker)
            return service, workers, more

        yield start


def order(service):
    """The next order."""
    assert select.select([service], [], [], 10.0)[0], "nothing is ordered"
    (found,) = service.orders()
    return found


def test_a_newcomer_that_prepares_itself_is_let_in_when_it_is_ready(coordinator, monkeypatch):
    monkeypatch.setattr(protocol, "WORD_EVERY_S", 0.0)
    service, (first,), more = coordinator(1, max_ranks=2)
    second = more(1)
    service.started(1)
    second.say(Come, node="a", is_ready=False)
    for _ in range(3):
        assert second.hears(Wait).prepares, "each time: the last word counts"
    second.say(Prepared)
    assert first.hears(Newcomers) == Newcomers(1, 1)
    second.say(Prepared)  # it counts once
    while second.hears(Wait).prepares:  # what was sent before
        continue
    assert not [said for said in first.heard if isinstance(said, Newcomers)]


def test_two_replacements_are_let_in_together(coordinator):
    service, (first, _, _), more = coordinator(3, lost_worker="wait", goes_on=True)
    for lost, by in ((1, 3), (2, 4)):
        service.ended(lost, "is gone")
        assert order(service) == ReplaceWorker(lost)
        service.started(by, lost)
    workers = [more(number) for number in (3, 4)]
    for worker in workers:
        worker.say(Come, node="a")
    assert first.hears(Newcomers) == Newcomers(1, 2), "only then"
    first.say(Come, node="a", has_state=True)
    assert [worker.hears(Formed).rank for worker in (first, *workers)] == [0, 1, 2]


def test_a_replacement_that_does_not_come_holds_up_no_other(coordinator, monkeypatch):
    monkeypatch.setattr(elastic_service, "_TOGETHER_S", 0.5)
    service, (first, _, _), more = coordinator(3, lost_worker="wait", goes_on=True)
    for lost, by in ((1, 3), (2, 4)):
        service.ended(lost, "is gone")
        assert order(service) == ReplaceWorker(lost)
        service.started(by, lost)
    more(3).say(Come, node="a")
    assert first.hears(Newcomers) == Newcomers(1, 1)


def test_who_is_lost_just_before_a_job_is_formed_is_replaced_and_joins_it(coordinator):
    service, (first, second, _), more = coordinator(3, lost_worker="wait", goes_on=True)
    first.say(Come, node="a", has_state=True, n_commits=4)
    second.say(Come, node="a", has_state=True, n_commits=5)
    until_waiting(service, 2)
    service.ended(2, "is gone")
    assert first.hears(Formed) == Formed(2, 0, 2, "wait", n_commits=5)
    assert order(service) == ReplaceWorker(2)
    service.started(3, 2)
    third = more(3)
    third.say(Come, node="a")
    while (said := first.hears(Newcomers)).job == 1:  # of those who were awaited
        continue
    assert said == Newcomers(2, 1)


def test_who_may_still_train_is_called_when_half_have_come_back(coordinator):
    _, (first, second), _ = coordinator(2, lost_worker="shrink", goes_on=True)
    second.say(Come, node="a", has_state=True, reason="its node is lost")
    assert first.hears(Newcomers) == Newcomers(1, 1)
    first.say(Come, node="a", has_state=True)
    assert first.hears(Formed).job == second.hears(Formed).job == 2


@pytest.mark.parametrize("end", ["training", "job"])
def test_a_worker_that_hangs_and_that_its_job_went_on_without_is_ended(coordinator, monkeypatch, end):
    monkeypatch.setattr(elastic_service, "_COMES_BACK_S", 0.3)
    service, (first, second, _), _ = coordinator(3, lost_worker="shrink", goes_on=True)
    if end == "training":
        first.say(Done, lost=(2,))
    else:
        for worker in (first, second):
            worker.say(Come, node="a", has_state=True, lost=(2,))
    assert order(service) == KillWorker(2)
    assert service.was_left_behind(2) and service.is_over == (end == "training")
    service.ended(2, "was killed")
    if end == "job":
        assert first.hears(Formed).size == 2


def test_a_worker_that_comes_back_in_time_is_not_ended(coordinator, monkeypatch):
    monkeypatch.setattr(elastic_service, "_COMES_BACK_S", 0.3)
    service, (first, second, third), _ = coordinator(3, lost_worker="shrink", goes_on=True)
    first.say(Come, node="a", has_state=True, lost=(2,))
    third.say(Come, node="b", has_state=True, reason="its node is lost")
    until_waiting(service, 2)
    second.say(Come, node="a", has_state=True, lost=(2,))
    assert [worker.hears(Formed).size for worker in (first, second, third)] == [3, 3, 3]
    assert not service.was_left_behind(2)


def test_a_worker_that_comes_back_with_the_last_of_the_others_is_not_ended(coordinator):
    """The service handles both messages, and forms the job, in one turn."""
    service, (first, second, third), _ = coordinator(3, lost_worker="shrink", goes_on=True)
    answer, go = service._on_come, threading.Event()

    def held(message):
        go.wait(10.0)
        answer(message)

    service._on_come = held
    first.say(Come, node="a", has_state=True, lost=(2,))
    third.say(Come, node="b", has_state=True, reason="its node is lost")
    second.say(Come, node="a", has_state=True)
    go.set()
    assert [worker.hears(Formed).size for worker in (first, second, third)] == [3, 3, 3]
    assert not service.was_left_behind(2)


def until_waiting(service, n):
    """Wait until *n* members wait for a job."""
    deadline = time.monotonic() + 10.0
    while len(service._coordinator.waiting) < n:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("end", ["others come", "it ends", "no next job"])
def test_a_newcomer_that_still_prepares_itself_is_answered_when_nothing_runs(coordinator, end):
    service, (first,), more = coordinator(1, max_ranks=2)
    second = more(1)
    service.started(1)
    second.say(Come, node="a", is_ready=False)
    assert second.hears(Wait).prepares
    if end == "others come":
        first.say(Come, node="a", has_state=True)
        assert first.hears(Formed) == Formed(2, 0, 2, "abort") and second.hears(Formed) == Formed(2, 1, 2, "abort")
    elif end == "it ends":
        first.say(Done)
        assert second.hears(Over)
    else:
        service.give_up("no more")
        assert second.hears(Refused).reason == "no more"


def test_a_stranger_is_not_heard(coordinator):
    service, _, more = coordinator(1, max_ranks=5)
    stranger = more(77, key=b"x" * 32)
    stranger.say(Add, count=1)
    member = more(-5)
    member.say(Add, count=1)
    assert member.hears(Added) == Added(1, "") and order(service) == StartWorkers(1)
    assert not stranger.is_connected and not stranger.heard and service.orders() == []


def test_a_lost_worker_voids_its_job_and_is_replaced_in_its_place(coordinator):
    service, (_, second), more = coordinator(2, lost_worker="wait")
    service.ended(0, "was killed by SIGKILL")
    assert second.hears(Void) == Void(1, "worker 0 was killed by SIGKILL")
    assert order(service) == ReplaceWorker(0)
    service.started(2, instead_of=0)
    third = more(2)
    for worker in (second, third):
        worker.say(Come, node="a")
    assert third.hears(Formed).rank == 0 and second.hears(Formed) == Formed(2, 1, 2, "wait")
    assert service.orders() == []


def test_who_waits_without_a_seat_voids_no_job(coordinator):
    service, (first, second), more = coordinator(2, lost_worker="shrink")
    third = more(7)
    third.say(Come, node="b")  # beyond max_ranks: nobody lets it in
    third.say(Add, count=1)
    assert third.hears(Added).count == 0
    service.ended(7, "was killed by SIGKILL")
    first.say(Add, count=1)
    assert first.hears(Added).count == 0, "what came before has been heard"
    second.say(Come, node="a")
    assert first.hears(Void) == Void(1, "worker 1 has left it")
    assert not any(isinstance(message, Void) for message in first.heard)


def test_a_job_cannot_fill_the_launcher_and_others_have_no_part_in_its_values(coordinator, monkeypatch):
    monkeypatch.setattr(protocol, "MOST_WANTED", 2)
    monkeypatch.setattr(protocol, "MOST_STORED_NBYTES", protocol.stored_nbytes("a", "x" * 100) + 20)
    service, (first, second), more = coordinator(2)
    stranger = more(7)
    stranger.say(Put, job=1, key="a", value="of another")
    stranger.say(Want, job=1, key="a")
    stranger.say(Add, count=1)
    assert stranger.hears(Added).count == 0
    for key in ("a", "b", "c"):
        second.say(Want, job=1, key=key)
    second.say(Add, count=1)
    assert second.hears(Added).count == 0
    first.say(Put, job=1, key="a", value="y" * 121)
    first.say(Put, job=1, key="a", value="é" * 70)
    first.say(Put, job=1, key="a", value="x" * 100)
    first.say(Put, job=1, key="b", value="x")
    first.say(Put, job=1, key="a", value="z" * 121)  # in the place of another
    first.say(Put, job=1, key="a", value="z")
    first.say(Add, count=1)
    assert first.hears(Added).count == 0
    assert second.hears(Value) == Value(1, "a", "x" * 100)
    second.say(Want, job=1, key="a")
    assert second.hears(Value) == Value(1, "a", "z")
    assert not any(isinstance(message, Value) for message in second.heard)
    assert not any(isinstance(message, Value) for message in stranger.heard)
    assert set(service._wanted) == {"b"} and set(service._store) == {"a"}
    assert service._stored_nbytes == protocol.stored_nbytes("a", "z")


def test_members_that_are_to_leave_are_let_go_between_two_jobs(coordinator):
    service, (first, second), more = coordinator(2, max_ranks=3)
    service.leave([1, 7])
    assert first.hears(Newcomers) == second.hears(Newcomers) == Newcomers(1, 0, 1)
    late = more(7)
    late.say(Come, node="b")
    assert "no slot for it any more" in late.hears(Dismissed).reason, "it never had a rank"
    for worker in (second, first):
        worker.say(Come, node="a", has_state=True)
    assert "no slot for it any more" in second.hears(Dismissed).reason
    assert first.hears(Formed) == Formed(2, 0, 1, "abort")
    service.left(1)
    service.ended(7, "is gone")
    first.say(Add, count=2)
    assert first.hears(Added).count == 2 and order(service) == StartWorkers(2)


def test_all_are_to_leave_and_go_once_another_has_the_state(coordinator):
    service, (first,), more = coordinator(1, max_ranks=1)
    service.leave([0])
    newcomer = more(7)
    newcomer.say(Come, node="b")
    assert first.hears(Newcomers) == Newcomers(1, 1, 0)
    first.say(Come, node="a", has_state=True)
    assert first.hears(Formed) == Formed(2, 0, 2, "abort") and newcomer.hears(Formed).rank == 1
    assert first.hears(Newcomers) == newcomer.hears(Newcomers) == Newcomers(2, 0, 1)
    for worker in (newcomer, first):
        worker.say(Come, node="a", has_state=True)
    assert isinstance(first.hears(Dismissed), Dismissed)
    assert newcomer.hears(Formed) == Formed(3, 0, 1, "abort")


def test_a_worker_that_counts_as_lost_and_runs_on_is_refused(coordinator):
    service, (first, second), _ = coordinator(2, lost_worker="shrink", max_ranks=3)
    service.ended(1, "was lost with its host")
    second.say(Come, node="b", has_state=True)
    assert second.hears(Refused) == Refused("PeerLostError", "worker 1 counts as lost, and the others go on without it")
    first.say(Come, node="a", has_state=True)
    assert first.hears(Formed) == Formed(2, 0, 1, "shrink")


def test_a_program_that_fails_on_all_ranks_is_named_by_its_members(coordinator):
    service, _, _ = coordinator(2, lost_worker="shrink")
    service.ended(1, "ended with exit code 3", is_own_failure=True)
    service.ended(0, "ended with exit code 3", is_own_failure=True)
    found = order(service)
    assert isinstance(found, StopJob) and found.lost == (1, 0)


def test_a_limit_is_an_error_where_it_is_passed(coordinator):
    service, _, _ = coordinator(1, max_ranks=2)
    member = CoordinatorClient(load({"coordinator": service.address, "job_key": KEY.hex(), "member": 1}, {}))
    try:
        for key, value in (("k", "x" * protocol.MOST_VALUE_NBYTES), ("k" * 257, "x")):
            with pytest.raises(CapacityError, match="the coordinator stores 1048576 bytes under a key of 256"):
                member.put(1, key, value)
    finally:
        member.close()


def test_two_who_add_at_once_start_no_more_than_may_be(coordinator):
    service, (first, second), _ = coordinator(2, max_ranks=4, lost_worker="wait")
    first.say(Add, count=1)
    assert first.hears(Added) == Added(1, "")
    second.say(Add, count=5)
    assert second.hears(Added) == Added(1, "3 workers run, and the job may have 4 (--max-ranks)")
    service.ended(0, "is gone")
    second.say(Add, count=1)
    assert second.hears(Added).count == 0, "one of them will be replaced"
    for member in (2, 3):
        service.started(member)
    service.started(4, instead_of=0)
    second.say(Add, count=1)
    assert second.hears(Added) == Added(0, "4 workers run, and the job may have 4 (--max-ranks)")


def test_values_reach_those_who_asked_before_and_after_and_no_other_job(coordinator):
    _, (first, second), _ = coordinator(2)
    second.say(Want, job=1, key="a")
    first.say(Put, job=0, key="a", value="old")
    first.say(Put, job=1, key="a", value="x")
    assert second.hears(Value) == Value(1, "a", "x")
    first.say(Want, job=1, key="a")
    assert first.hears(Value) == Value(1, "a", "x")
    for worker in (first, second):
        worker.say(Come, node="a")
    for worker in (first, second):
        assert worker.hears(Formed).job == 2
    second.say(Want, job=2, key="a")
    first.say(Want, job=1, key="a")
    first.say(Put, job=2, key="big", value="x" * (protocol.MOST_VALUE_NBYTES + 1))
    first.say(Put, job=2, key="a", value="y")
    assert second.hears(Value) == Value(2, "a", "y"), "not that of the job before"
    first.say(Add, count=1)
    assert first.hears(Added).count == 0
    assert not any(isinstance(message, Value) for message in first.heard), "who asks for a job's that is over"


def test_ranks_hear_of_newcomers_and_the_end_is_everybodys(coordinator):
    _, (first, second), more = coordinator(2, max_ranks=3)
    third = more(7)
    third.say(Come, node="b")
    assert first.hears(Newcomers) == second.hears(Newcomers) == Newcomers(1, 1)
    first.say(Done)
    assert isinstance(third.hears(Over), Over)
    second.say(Come, node="a")
    assert isinstance(second.hears(Over), Over)


def test_who_waits_hears_for_what_again_and_again(coordinator):
    service, (first, _), more = coordinator(2, lost_worker="shrink")
    third = more(7)
    third.say(Come, node="b")
    for _ in range(2):
        assert third.hears(Wait).awaited.startswith("job 1, of 2 ranks, runs and has let nobody in")
    first.say(Come, node="a")
    assert first.hears(Wait).awaited == "worker 1 has not come"
    for member in (0, 1):
        service.left(member)
    assert isinstance(third.hears(Over), Over), "nobody is left who could let it in"


def test_jobs_that_fail_without_a_loss_have_an_end(coordinator):
    service, workers, _ = coordinator(2)
    for number in range(2, 5):
        for worker in workers:
            worker.say(Come, node="a", n_commits=0, reason=f"a link of {worker.number} " + "x" * 1000)
        for worker in workers:
            assert worker.hears(Formed).job == number
    for worker in workers:
        worker.say(Come, node="a", reason="again")
    assert isinstance(order(service), StopJob)
    for worker in workers:
        assert worker.hears(Refused) == Refused("StallError", (
            "4 jobs in a row have failed, the last one number 4, though no worker was lost, and without a commit: "
            "worker 0: again, worker 1: again"))


def test_a_coordinator_that_says_nothing_is_named(coordinator, monkeypatch):
    monkeypatch.setattr(protocol, "WORD_EVERY_S", 0.2)
    service, _, _ = coordinator(1, max_ranks=2)
    member = CoordinatorClient(load(
        {"coordinator": service.address, "job_key": KEY.hex(), "member": 1, "start_timeout_s": 1}, {}))
    try:
        heard = threading.Event()
        monkeypatch.setattr(service._coordinator, "decide", lambda now_s: heard.wait() and None)
        with pytest.raises(StallError, match=r"worker 1: bpsfast run, at .*, says nothing for 1 s: is it stopped"):
            member.join()
    finally:
        heard.set()
        member.close()


def test_who_comes_after_the_coordinator_has_failed_hears_why(coordinator):
    service, (_, second), _ = coordinator(2, lost_worker="shrink", min_ranks=2, within_s=0.3)
    service.ended(0, "is gone")
    second.say(Come, node="a")
    assert isinstance(order(service), StopJob)
    reason = "no quorum: 1 ranks have come within 0.3 s, min_ranks is 2 (rank 0 (worker 0) is gone)"
    assert second.hears(Refused) == Refused("StallError", reason)
    second.say(Come, node="a")
    assert second.hears(Refused).reason == reason


def test_the_launchers_own_reason_reaches_those_who_wait(coordinator):
    service, (first, _), _ = coordinator(2, lost_worker="shrink")
    first.say(Come, node="a")
    service.give_up("worker 1 ended with exit code 1")
    assert first.hears(Refused) == Refused("PeerLostError", "worker 1 ended with exit code 1")


def test_who_is_silent_is_ended_once(coordinator):
    service, (first, *_), _ = coordinator(3, lost_worker="shrink", within_s=0.3)
    service.ended(2, "is gone")
    first.say(Come, node="a")
    assert order(service) == KillWorker(1)
    assert not select.select([service], [], [], 0.5)[0], "that is ordered once"
    service.ended(1, "was killed by SIGKILL")
    assert first.hears(Formed) == Formed(2, 0, 1, "shrink")


def test_no_more_are_added_than_may_be(coordinator):
    service, _, more = coordinator(2, max_ranks=3)
    asking = more(-9)
    asking.say(Add, count=4)
    assert asking.hears(Added) == Added(1, "2 workers run, and the job may have 3 (--max-ranks)")
    assert order(service) == StartWorkers(1)
    service.give_up("it has failed")
    asking.say(Add, count=1)
    assert asking.hears(Added) == Added(0, "the training has ended")
