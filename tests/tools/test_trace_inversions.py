"""Less urgent bytes ahead of urgent ones: none but what was under way, and whatever else is an inversion."""
from __future__ import annotations

from hypothesis import given, settings, strategies as st

from bpsfast.base.trace_file import FORMAT, Process
from bpsfast.base.trace_records import Span
from bpsfast.orchestration.priority.send_queue import CreditQueue
from bpsfast.tools.trace.inversions import examine
from tests.support.trace_records import send


def node(credit_nbytes: int, spans: list[Span]) -> Process:
    return Process(format=FORMAT, role="node 0", pid=1, base_ns=0, node=0, rank=-1, clock=(), clock_id="",
                   credit_nbytes=credit_nbytes, full=False, parts={}, spans=spans)


def wire(begin_ns: int, end_ns: int, part: int, peer: int = 1) -> Span:
    return Span(begin_ns, end_ns, "wire", {"part": part, "round": 1, "nbytes": 100, "peer": peer})


def look(credit_nbytes: int, *spans: Span):
    process = node(credit_nbytes, list(spans))
    return examine([(process, process.spans)])


def test_what_is_under_way_cannot_be_called_back():
    found = look(250, send(0, 0, 9, part=0), wire(0, 50, 0), send(1, 1, 8, part=1), wire(1, 60, 1),
                 send(10, 51, 0, part=2))
    assert (found.most_nbytes, found.inversions, found.writes, found.window_nbytes) == (200, [], 3, 250)
    assert found.most is not None and found.most.args["part"] == 2


def test_what_was_delivered_before_is_in_nobodys_way():
    found = look(250, send(0, 0, 9, part=0), wire(0, 9, 0), send(10, 51, 0, part=2))
    assert (found.most_nbytes, found.most) == (0, None)


def test_a_write_that_leaves_before_an_urgent_one_beyond_the_window_is_an_inversion():
    late = [send(5, 10 * i, 5, part=i) for i in range(1, 5)]
    found = look(150, send(5, 100, 0, part=9), *late)
    (inversion,) = found.inversions  # once for each urgent write, however many follow
    assert (inversion.at_ns, inversion.urgent.args["part"], inversion.by.args["part"]) == (20, 9, 2)
    assert (inversion.node, inversion.peer, inversion.ahead_nbytes, found.most_nbytes) == (0, 1, 200, 400)


def test_other_peers_and_other_passes_are_no_matter():
    assert look(50, send(5, 100, 0, part=9), *(send(5, 10 * i, 5, part=i, peer=2) for i in (1, 2, 3))).inversions == []
    older = look(50, send(5, 100, 0, part=9, pass_=2), *(send(5, 10 * i, 5, part=i, pass_=1) for i in (1, 2, 3)))
    assert (older.inversions, older.most_nbytes) == ([], 0)


def test_one_partition_larger_than_the_credit_is_its_window():
    found = look(10, send(0, 0, 9, part=0), wire(0, 50, 0), send(10, 51, 0, part=2))
    assert (found.most_nbytes, found.window_nbytes, found.inversions) == (100, 100, [])


@settings(deadline=None, max_examples=60)
@given(credit_nbytes=st.integers(0, 500), fair=st.booleans(),
       puts=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 30), st.integers(1, 200)), min_size=1, max_size=40))
def test_the_jobs_own_queue_never_inverts(credit_nbytes, fair, puts):
    """A simulated link takes one byte a moment; first come, first served inverts wherever it can, the queue nowhere."""
    queue: CreditQueue[int] = CreditQueue(credit_nbytes)
    waiting = sorted((at, i) for i, (at, _, _) in enumerate(puts))
    spans, under_way, now, free = [], [], 0, 0
    while waiting or queue.queued or under_way:
        while waiting and waiting[0][0] * 100 <= now:
            _, i = waiting.pop(0)
            queue.put(i, order=puts[i][1] if fair else 0, key=i, nbytes=puts[i][2])
        while (i := queue.pop()) is not None:
            at, order, nbytes = puts[i]
            spans.append(send(at * 100, now, order, part=i, nbytes=nbytes))
            free = max(free, now) + nbytes
            under_way.append((free, i))
            spans.append(wire(now, free, i))
        moments = [end for end, _ in under_way[:1]] + [at * 100 for at, _ in waiting[:1]]
        now = max(now, min(moments, default=now))
        while under_way and under_way[0][0] <= now:
            queue.release(puts[under_way.pop(0)[1]][2])
    found = look(credit_nbytes, *spans)
    assert found.writes == len(puts)
    if fair:
        assert found.inversions == [] and found.most_nbytes <= found.window_nbytes
    elif found.most_nbytes > found.window_nbytes:
        assert found.inversions
