"""How a worker gets into real jobs: one after another, again where one does not come together, and not for ever."""
from __future__ import annotations

import logging
import time

import pytest

from bpsfast.elastic.coordinator_client import CoordinatorClient, _Store
from bpsfast.launch import rendezvous
from bpsfast.orchestration.elastic.protocol import Come, Formed, Void
from bpsfast.orchestration.errors import PeerLostError, StallError
from bpsfast.trainer import process
from tests.support.coordinators import (  # fixtures
    LIMIT_S,
    coordinator as coordinator,
    end as end,
    meanwhile,
    settings_of,
    until_connected,
)


def test_one_job_after_another_is_joined(coordinator, end):
    made = coordinator(1, lost_worker="shrink")
    member = end(made.address)
    for number in (1, 2):
        member.join()
        assert (member.job, member.lost_worker, process.size(), process.rank()) == (number, "shrink", 1, 0)
        process.barrier(LIMIT_S)
        process.shutdown()
    member.done()


def test_a_job_that_does_not_come_together_is_tried_three_times(coordinator, end, caplog):
    caplog.set_level(logging.INFO, "bpsfast.elastic")
    made = coordinator(2, lost_worker="shrink")
    worker = made.speaker(1)
    member = end(made.address, start_timeout_s=0.5)
    until_connected(member)

    def others():
        """Come each time, and never to the store."""
        for number in (1, 2, 3):
            worker.say(Come, node="a")
            assert worker.hears(Formed).job == number
            if number < 3:
                assert worker.hears(Void) == Void(number, "worker 0 has left it")

    with meanwhile(others), pytest.raises(StallError, match=r"1 of 2 ha(s|ve) not come to the store within 0\.5 s"):
        member.join()
    assert (member.job, process.session()) == (3, None)
    said = [text for text in caplog.messages if text.endswith("another one is awaited")]
    assert [text.split(": it did not come together: rank")[0] for text in said] == ["job 1", "job 2"]


def test_a_job_that_loses_somebody_before_it_has_begun_is_no_try(coordinator, end):
    made = coordinator(2, lost_worker="wait")
    member = end(made.address)

    def others():
        """Come, one after another, and are lost."""
        for number in range(1, 6):
            worker = made.speaker(number)
            worker.say(Come, node="a")
            assert worker.hears(Formed).job == number
            if number == 5:
                made.service.give_up("that was enough")
            made.service.ended(number, "is gone")
            made.service.started(number + 1, instead_of=number)

    with meanwhile(others), pytest.raises(PeerLostError, match=r"^that was enough$"):
        member.join()
    assert member.job == 5 and process.session() is None


def test_a_worker_that_is_lost_while_others_attach_is_not_waited_for(coordinator, end):
    made = coordinator(2, lost_worker="shrink")
    member = end(made.address)

    def other():
        """Find the others, and be lost before it attaches to the node."""
        second = CoordinatorClient(settings_of(made.address, 1))
        try:
            formed = second._await_job(0, "")
            found = rendezvous.role_of(_Store(second, 1), formed.rank, formed.size, second._settings,
                                     LIMIT_S)
            assert (found.rank, found.size) == (1, 2)
            made.service.ended(1, "was killed by SIGKILL")
        finally:
            second.close()

    begin = time.monotonic()
    with meanwhile(other):
        member.join()
    assert time.monotonic() - begin < 15.0, "the deadline of the first job was not waited for"
    assert (member.job, process.size()) == (2, 1)
    process.barrier(LIMIT_S)
    process.shutdown()
