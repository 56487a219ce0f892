"""The communication service: most urgent first, within credit, to everybody who waits."""
from __future__ import annotations

import time

import pytest

from bpsfast.pyx.engine import EVENT_FORWARD, EVENT_RESULT
from tests.support.dispatch_service import NBYTES, alone, service as service

SMALL_NBYTES = 30_000  # who posts it may send it at once


@pytest.mark.parametrize("service", [(1, NBYTES, [True])], indirect=True)
def test_one_write_at_a_time_most_urgent_first_when_credit_is_one_write(service):
    service.commit((3, 2, 1, 0))
    service.report([service.event(EVENT_FORWARD, 0, part) for part in (0, 1, 2, 3)])
    # All four were there before the first was posted, and one is under way at a time.
    assert service.written(0, 4) == [3, 2, 1, 0]
    service.until_delivered()
    counters = service.dispatcher.counters()
    assert (counters["peak_in_flight_nbytes"], counters["queued"], counters["peak_queued"]) == (NBYTES, 0, 3)


@pytest.mark.parametrize("service", [(1, NBYTES, [True], True)], indirect=True)
def test_without_urgency_what_is_there_first_leaves_first(service):
    service.commit((3, 2, 1, 0))
    service.report([service.event(EVENT_FORWARD, 0, part) for part in (1, 3, 0, 2)])
    assert service.written(0, 4) == [1, 3, 0, 2]


@pytest.mark.parametrize("service", [(1, NBYTES, [True])], indirect=True)
def test_a_trace_says_since_when_each_write_could_leave_and_when_it_did(service):
    service.commit((1, 0))
    begin_ns = time.monotonic_ns()
    service.report([service.event(EVENT_FORWARD, 0, part) for part in (0, 1)])
    between_ns = time.monotonic_ns()
    assert service.written(0, 2) == [1, 0]
    urgent, other = service.dispatcher.sends().spans({0: 5})
    assert (urgent.key, other.key, other.args["peer"], other.args["nbytes"]) == ((1, 1), (0, 1), 5, NBYTES)
    assert begin_ns <= other.begin_ns <= urgent.begin_ns <= urgent.end_ns <= between_ns <= other.end_ns
    assert urgent.args["pass"] == other.args["pass"] and urgent.args["order"] < other.args["order"]


@pytest.mark.parametrize("service", [(1, NBYTES, [True], True)], indirect=True)
def test_a_trace_without_urgency_says_how_urgent_each_write_was(service):
    service.commit((1, 0))
    service.report([service.event(EVENT_FORWARD, 0, part, 3) for part in (0, 1)])
    assert service.written(0, 2) == [0, 1]
    first, second = service.dispatcher.sends().spans({0: 5})
    assert first.args["pass"] == second.args["pass"] == 3 and first.args["order"] > second.args["order"]


@pytest.mark.parametrize("service", [(1, NBYTES, [True])], indirect=True)
def test_within_a_unit_partials_leave_before_results(service):
    service.commit((3, 4, 5, 0, 1, 2), {0: 0, 1: 0, 2: 0, 3: 3, 4: 3, 5: 3})
    kinds = {0: EVENT_RESULT, 1: EVENT_FORWARD, 2: EVENT_FORWARD, 3: EVENT_RESULT, 4: EVENT_RESULT, 5: EVENT_FORWARD}
    service.report([service.event(kind, 0, part) for part, kind in kinds.items()])
    assert service.written(0, len(kinds)) == [5, 3, 4, 1, 2, 0]


@pytest.mark.parametrize("service", [(1, NBYTES, [True])], indirect=True)
def test_the_last_sum_for_a_slow_node_is_not_overtaken_by_the_next_step_of_a_fast_one(service):
    service.commit((0, 1, 2))
    service.report([service.event(EVENT_FORWARD, 0, part) for part in (0, 1)])
    service.report([service.event(EVENT_RESULT, 0, 2)])
    service.report([service.event(EVENT_FORWARD, 0, part, 2) for part in (0, 1)])
    assert service.written(0, 5) == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("service", [(3, 1 << 20, [True, False, True])], indirect=True)
def test_a_result_goes_to_every_node_with_ranks(service):
    service.commit((0, 1))
    service.report([service.event(EVENT_RESULT, 0, 1), service.event(EVENT_FORWARD, 1, 0)])
    assert service.written(0, 1) == [1] and service.written(2, 1) == [1] and service.written(1, 1) == [0]
    assert service.dispatcher.counters()["partitions"] == 2


@pytest.mark.parametrize("service", [(3, 1 << 20, [True] * 3)], indirect=True)
def test_a_result_goes_to_the_nodes_that_push_it_and_to_no_other(service):
    readers = {0: (1,), 1: (), 2: (0, 2), 3: (0, 1, 2)}
    service.dispatcher.commit((0, 1, 2, 3), alone(4), {}, readers)
    service.report([service.event(EVENT_RESULT, 0, part) for part in range(4)])
    assert [service.written(peer, 2) for peer in range(3)] == [[2, 3], [0, 3], [2, 3]]
    assert [service.sent(link, 2) for link in service.links] == [2, 2, 2]
    readers.clear()  # what was committed is the dispatcher's own
    service.report([service.event(EVENT_RESULT, 0, 0, 2)])
    assert service.written(1, 1) == [0]
    service.dispatcher.commit((0, 1, 2, 3), alone(4), {}, {0: (2,)})
    service.report([service.event(EVENT_RESULT, 0, 0, 3)])
    assert service.written(2, 1) == [0]


@pytest.mark.parametrize("service", [(1, 2 * SMALL_NBYTES, [True])], indirect=True)
def test_small_writes_keep_to_a_small_credit(service):
    """Though each could be sent at once, and the kernel has room for all: the network has not."""
    service.commit((0, 1, 2, 3, 4, 5))
    for part in range(6):
        service.report([service.event(EVENT_FORWARD, 0, part, nbytes=SMALL_NBYTES)])
    counters = service.dispatcher.counters()
    assert (counters["in_flight_nbytes"], counters["queued"]) == (2 * SMALL_NBYTES, 4)
    assert service.written(0, 6) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("service", [(1, 16 * SMALL_NBYTES, [True])], indirect=True)
def test_a_small_write_beside_a_large_credit_is_delivered_when_it_is_posted(service):
    service.commit((0, 1))
    service.report([service.event(EVENT_FORWARD, 0, 0, nbytes=SMALL_NBYTES)])
    assert service.dispatcher.counters()["in_flight_nbytes"] == 0
    service.report([service.event(EVENT_FORWARD, 0, 1, nbytes=SMALL_NBYTES)])
    assert service.written(0, 2) == [0, 1]


@pytest.mark.parametrize("service", [(1, 0, [True])], indirect=True)
def test_an_empty_write_needs_no_credit_to_return(service):
    service.commit((0, 1))
    service.report([service.event(EVENT_FORWARD, 0, 0, nbytes=0), service.event(EVENT_FORWARD, 0, 1)])
    assert service.written(0, 2) == [0, 1]


@pytest.mark.parametrize("service", [(1, 250, [True])], indirect=True)
def test_what_an_engine_forwards_is_written_within_credit(service):
    n_parts = 40
    service.commit(tuple(range(n_parts)))
    service.dispatcher.start()
    # Empty partials of 40 parts: forwarded by the engine, delivered by the stream.
    sources = [service.engine.add_wire_peer() for _ in range(n_parts)]
    for part in range(n_parts):
        service.engine.add_member(part, nbytes=NBYTES, n_elements=NBYTES, unit_offset=0, kernel=1,
                                  local=[sources[part]], owner=0, partial=(0, 0, 0))
    service.engine.freeze(5)
    service.engine.commit(1, range(n_parts))
    for part, source in enumerate(sources):
        service.engine.arrived(source, part, 1, 1)
    assert sorted(service.written(0, n_parts)) == list(range(n_parts))
    assert service.dispatcher.counters()["partitions"] == n_parts


@pytest.mark.parametrize("service", [(1, 1 << 20, [True])], indirect=True)
def test_who_reports_much_sends_some_of_it_and_the_engine_the_rest(service):
    n_parts = 60
    service.commit((0,) * n_parts)
    service.report([service.event(EVENT_FORWARD, 0, part, nbytes=8) for part in range(n_parts)])
    assert sorted(service.written(0, n_parts)) == list(range(n_parts))
    service.until_delivered()
    assert service.dispatcher.counters()["queued"] == 0
