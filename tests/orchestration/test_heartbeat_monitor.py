"""Whose silence is too long: messages, pulses, and who looks late himself."""
from __future__ import annotations

from hypothesis import given, strategies as st

from bpsfast.orchestration.job.liveness import HeartbeatMonitor

WORKER, HELPER = b"worker", b"helper"


def is_helper(sender):
    return sender != WORKER


def table(lease_s=10.0, helper_lease_s=1.0, pulses=True):
    """Both were heard at 0, and looked at ever since, ten times a second, until 2 s."""
    found = HeartbeatMonitor(lease_s, helper_lease_s, 0.0)
    for sender in (WORKER, HELPER):
        found.heard(0.0, sender)
    look(found, 0.0, 2.0, {WORKER: None, HELPER: None} if not pulses else {})
    return found


def look(found, begin_s, end_s, pulses=None):
    """Look ten times a second; *pulses* as the kernel has them, by default: each just came."""
    for tenths in range(round(10 * begin_s), round(10 * end_s) + 1):
        for sender in found.quiet(tenths / 10, is_helper):
            found.pulse(sender, (pulses or {}).get(sender, tenths / 10))
        found.tick(tenths / 10)


def names(found, now):
    return [sender for sender, _ in found.silent(now, is_helper)]


def test_a_helper_without_a_pulse_has_its_own_lease():
    found = table()
    look(found, 2.1, 2.9, {HELPER: 2.0})
    assert names(found, 2.9) == []
    look(found, 3.0, 3.0, {HELPER: 2.0})
    assert found.silent(3.0, is_helper) == [(HELPER, "silent for 1.0 s (helper_lease_s = 1)")]


def test_a_node_with_ranks_has_the_whole_lease_whatever_its_pulse():
    found = table()
    look(found, 2.1, 9.9)
    assert names(found, 9.9) == []
    look(found, 10.0, 10.0)
    assert (WORKER, "silent for 10.0 s (lease_s = 10)") in found.silent(10.0, is_helper)


def test_a_helper_that_has_a_pulse_and_says_nothing_hangs():
    """Its native threads live, and its control loop does not: that takes the whole lease."""
    found = table()
    look(found, 2.1, 10.0)
    assert (HELPER, "silent for 10.0 s (lease_s = 10)") in found.silent(10.0, is_helper)


def test_a_message_is_a_pulse_too():
    found = table()
    look(found, 2.1, 2.9, {HELPER: 2.0})
    found.heard(2.9, HELPER)
    look(found, 3.0, 3.8, {HELPER: 2.0})
    assert names(found, 3.8) == []


def test_where_no_pulse_can_be_felt_helpers_have_the_whole_lease():
    found = table(pulses=False)
    assert names(found, 2.0) == []
    look(found, 2.1, 9.9, {HELPER: None})
    assert names(found, 9.9) == []


def test_a_pulse_that_cannot_be_felt_any_more_counts_no_more():
    found = table()
    look(found, 2.1, 9.9, {HELPER: None})
    assert names(found, 9.9) == []


def test_without_a_lease_of_their_own():
    found = table(helper_lease_s=0.0)
    assert found.quiet(9.0, is_helper) == []
    look(found, 2.1, 9.9)
    assert names(found, 9.9) == []
    assert table(lease_s=3.0, helper_lease_s=50.0).silent(2.9, is_helper) == []


def test_who_looks_late_has_not_been_listening():
    """A machine that stood still for a while has heard nobody, and its kernel neither."""
    found = table()
    found.pulse(HELPER, 2.0)
    found.tick(9.0)
    assert names(found, 9.0) == []
    look(found, 9.1, 9.9, {HELPER: 2.0})
    assert names(found, 9.9) == []
    look(found, 10.0, 10.0, {HELPER: 2.0})
    assert names(found, 10.0) == [HELPER]


def test_messages_that_are_still_to_be_read_after_a_long_sleep():
    found = table()
    found.tick(20.0)
    assert names(found, 20.0) == [] and found.seen == {WORKER: 18.0, HELPER: 18.0}


def test_only_those_that_have_said_nothing_for_a_while_are_felt():
    found = table()
    found.heard(2.0, HELPER)
    assert found.quiet(2.2, is_helper) == []
    assert found.quiet(2.3, is_helper) == [HELPER], "a worker's pulse is of no matter"


def test_who_is_forgotten_is_nobody():
    found = table()
    found.forget(HELPER)
    found.pulse(HELPER, 2.0)
    assert HELPER not in found and names(found, 9.0) == []
    found.restart(30.0, [HELPER])
    assert HELPER in found and WORKER not in found and names(found, 39.0) == []


@given(st.lists(st.tuples(st.floats(0.01, 0.3), st.floats(0.0, 0.3), st.booleans()), max_size=60))
def test_nobody_is_lost_who_was_heard_within_the_lease(turns):
    """Whatever the looks are like, a helper whose bytes come every 0.3 s is never silent for 1 s."""
    found, now = HeartbeatMonitor(10.0, 1.0, 0.0), 0.0
    found.heard(0.0, HELPER)
    for step_s, age_s, says in turns:
        now += step_s
        if says:
            found.heard(now - age_s, HELPER)
        for sender in found.quiet(now, is_helper):
            found.pulse(sender, now - age_s)
        found.tick(now)
        assert names(found, now) == []
