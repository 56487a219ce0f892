"""What a node answers when it has prepared a plan: Ready, or, when it has waited for too long, who keeps it waiting."""
from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from bpsfast.node.event_loop import EventLoop
from bpsfast.node.generation import Generation
from bpsfast.node.plans import Plans
from bpsfast.orchestration.messages import Plan, PrepareFailed, Ready

TIMEOUT_S = 0.2


class Side:
    """The plans of one node; `told`: what the scheduler hears."""

    def __init__(self) -> None:
        self.told = []
        self.loop = EventLoop(self._raised)
        self.runtime = SimpleNamespace(installer=SimpleNamespace(ownable_nbytes=77, forget_early=lambda index: None),
                                       connected=True)
        self.node = SimpleNamespace(send=self.told.append, run_with_heartbeats=lambda work: work())
        self.plans = Plans(self.node, self.loop, self.runtime, None, TIMEOUT_S)

    def run(self) -> float:
        """Let all time pass that something waits for; return when that was over."""
        while self.loop._timers:
            self.loop.run_once(10.0)
        return time.monotonic()

    @staticmethod
    def _raised(exc: Exception) -> None:
        raise exc


@pytest.fixture
def side():
    made = Side()
    yield made
    made.loop.close()


def generation(awaited=(), is_owner_change=True):
    return Generation(Plan(generation=9, units=()), awaited=set(awaited), is_owner_change=is_owner_change)


def transfer(arrivals, given_up=(0,)):
    """What has *arrivals* in turn; the last one for ever."""
    class Found:
        missing = "round 7 of partition 12 of 'w' from node 3"
        asked = 0

        @property
        def arrived(self) -> bool:
            self.asked += 1
            return arrivals[min(self.asked, len(arrivals)) - 1]

    found = Found()
    found.given_up = set(given_up)
    return found


def test_ready_is_said_once_and_only_when_all_has_arrived(side):
    found = transfer([False, False, True])
    side.plans.await_for(generation(), found)
    assert side.told == []
    side.run()
    assert side.told == [Ready(generation=9, ownable_nbytes=77)] and found.asked == 3


def test_who_keeps_owners_from_giving_up_is_named_before_the_scheduler_ends_the_job(side):
    found, begin = transfer([False]), time.monotonic()
    side.plans.await_for(generation(), found)
    assert side.run() - begin >= TIMEOUT_S / 2
    (failed,) = side.told
    assert isinstance(failed, PrepareFailed) and (failed.generation, failed.ownable_nbytes) == (9, 77)
    assert failed.reason.endswith("did not arrive within 0.1 s: round 7 of partition 12 of 'w' from node 3")
    asked = found.asked
    side.plans.without(3)
    assert found.asked == asked and len(side.told) == 1, "it has its answer"


@pytest.mark.parametrize(("given_up", "wait_s"), [((), TIMEOUT_S), ((0,), TIMEOUT_S / 2)])
def test_peers_that_do_not_say_where_to_write_are_named(side, given_up, wait_s):
    begin = time.monotonic()
    side.plans.await_for(generation(awaited={5, 2}), transfer([True], given_up))
    assert side.run() - begin >= wait_s
    (failed,) = side.told
    assert failed.reason == f"node 2, node 5 did not send the addresses of results and slots within {wait_s:g} s"


def test_a_plan_that_is_forgotten_has_no_answer(side):
    side.plans.await_for(generation(), transfer([False]))
    side.plans.forget()
    side.run()
    assert side.told == []
