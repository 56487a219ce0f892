"""The communication service: most urgent first, within credit, to everybody who waits; CPU time and losses counted."""
from __future__ import annotations

import queue
import socket
import struct
import threading
import time

import pytest

from bpsfast.node import dispatch
from bpsfast.node.dispatch import Dispatcher
from bpsfast.orchestration.errors import StallError
from bpsfast.pyx import ring
from bpsfast.pyx.engine import EVENT_DELIVERED, EVENT_FORWARD, EVENT_LOST, EVENT_RESULT, Engine
from bpsfast.pyx.pages import Segment
from bpsfast.trace import Limits, SendLog
from bpsfast.transport.tcp import TcpLink

HEADER = struct.Struct("<IIIIIIQ")  # wire.h
NBYTES = 100


def alone(n_parts: int) -> dict[int, int]:
    """Each part is a unit of its own."""
    return {part: part for part in range(n_parts)}


class Service:
    """A dispatcher with real streams; the other ends are plain sockets that read what was written."""

    def __init__(self, n_peers: int, credit_nbytes: int, with_ranks: list[bool], fifo: bool = False) -> None:
        self.board = Segment(ring.BOARD_NBYTES, huge=False, populate=False)
        self.bell = Segment(ring.DOORBELL_NBYTES, huge=False)
        ring.format_board(self.board)
        ring.format_doorbell(self.bell)
        self.payload = Segment(4096, huge=False)
        self.engine = Engine(self.board, self.bell, n_threads=1)
        self.lost: queue.Queue[tuple[int, int]] = queue.Queue()
        self.sends = SendLog(Limits(100))
        self.dispatcher = Dispatcher(self.engine, credit_nbytes, lambda source, code: self.lost.put((source, code)),
                                     self.sends, fifo=fifo)
        self.readers = tuple(index for index in range(n_peers) if with_ranks[index])
        self.links: list[TcpLink] = []
        self.far: list[socket.socket] = []
        for index in range(n_peers):
            near, far = socket.socketpair()
            far.settimeout(20)
            link = TcpLink(index, {0: near}, n_slots=64)
            source = self.engine.add_wire_peer()
            assert source == index
            self.dispatcher.add(source, link)
            link.start(self.engine, source)
            self.links.append(link)
            self.far.append(far)

    def commit(self, order: tuple[int, ...], first_parts: dict[int, int] | None = None) -> None:
        """Commit parts, each a unit of its own unless *first_parts* says otherwise, that all peers with ranks read."""
        readers = {part: self.readers for part in range(len(order))}
        self.dispatcher.commit(order, first_parts or alone(len(order)), {}, readers)

    def event(self, kind: int, source: int, part: int, round_: int = 1, nbytes: int = NBYTES) -> tuple[int, ...]:
        return kind, source, part, round_, 0, self.payload.address, nbytes

    def written(self, peer: int, n_writes: int) -> list[int]:
        """Read *n_writes* whole writes that reached *peer*; return their parts."""
        parts = []
        for _ in range(n_writes):
            header = HEADER.unpack(self._exactly(peer, HEADER.size))
            self._exactly(peer, header[-1])
            parts.append(header[2])
        return parts

    def sent(self, link: TcpLink, n_writes: int) -> int:
        """Return how many writes *link* has counted as sent, once these are *n_writes* or nothing comes any more.

        What is read here may not be counted there yet.
        """
        deadline = time.monotonic() + 20
        while (n_sent := link.counters()["writes_sent"]) < n_writes and time.monotonic() < deadline:
            pass
        return n_sent

    def _exactly(self, peer: int, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            piece = self.far[peer].recv(nbytes - len(data))
            assert piece
            data += piece
        return data

    def close(self) -> None:
        self.dispatcher.stop()
        for link in self.links:
            link.close()
        for sock in self.far:
            sock.close()
        self.engine.close()
        self.links.clear()
        self.dispatcher = self.engine = None
        for segment in (self.payload, self.board, self.bell):
            segment.close()


@pytest.fixture
def service(request):
    made = Service(*request.param)
    yield made
    made.close()


@pytest.mark.parametrize("service", [(1, NBYTES, [True])], indirect=True)
def test_one_write_at_a_time_most_urgent_first_when_credit_is_one_write(service):
    service.commit((3, 2, 1, 0))
    service.dispatcher.handle([service.event(EVENT_FORWARD, 0, part) for part in (0, 1, 2, 3)])
    order = []
    for _ in range(4):
        (part,) = service.written(0, 1)
        order.append(part)
        service.dispatcher.handle([service.event(EVENT_DELIVERED, 0, part)])
    # All four were there before the first was posted, and one is under way at a time.
    assert order == [3, 2, 1, 0]
    counters = service.dispatcher.counters()
    assert (counters["peak_in_flight_nbytes"], counters["queued"], counters["peak_queued"]) == (NBYTES, 0, 3)


@pytest.mark.parametrize("service", [(1, NBYTES, [True], True)], indirect=True)
def test_without_urgency_what_is_there_first_leaves_first(service):
    service.commit((3, 2, 1, 0))
    service.dispatcher.handle([service.event(EVENT_FORWARD, 0, part) for part in (1, 3, 0, 2)])
    order = []
    for _ in range(4):
        (part,) = service.written(0, 1)
        order.append(part)
        service.dispatcher.handle([service.event(EVENT_DELIVERED, 0, part)])
    assert order == [1, 3, 0, 2]


@pytest.mark.parametrize("service", [(1, NBYTES, [True])], indirect=True)
def test_a_trace_says_since_when_each_write_could_leave_and_when_it_did(service):
    service.commit((1, 0))
    begin_ns = time.monotonic_ns()
    service.dispatcher.handle([service.event(EVENT_FORWARD, 0, part) for part in (0, 1)])
    assert service.written(0, 1) == [1]
    between_ns = time.monotonic_ns()
    service.dispatcher.handle([service.event(EVENT_DELIVERED, 0, 1)])
    assert service.written(0, 1) == [0]
    urgent, other = service.sends.spans({0: 5})
    assert (urgent.key, other.key, other.args["peer"], other.args["nbytes"]) == ((1, 1), (0, 1), 5, NBYTES)
    assert begin_ns <= urgent.begin_ns == other.begin_ns <= urgent.end_ns <= between_ns <= other.end_ns
    assert urgent.args["pass"] == other.args["pass"] and urgent.args["order"] < other.args["order"]


@pytest.mark.parametrize("service", [(1, NBYTES, [True], True)], indirect=True)
def test_a_trace_without_urgency_says_how_urgent_each_write_was(service):
    service.commit((1, 0))
    service.dispatcher.handle([service.event(EVENT_FORWARD, 0, part, 3) for part in (0, 1)])
    assert service.written(0, 1) == [0]
    service.dispatcher.handle([service.event(EVENT_DELIVERED, 0, 0)])
    assert service.written(0, 1) == [1]
    first, second = service.sends.spans({0: 5})
    assert first.args["pass"] == second.args["pass"] == 3 and first.args["order"] > second.args["order"]


@pytest.mark.parametrize("service", [(1, NBYTES, [True])], indirect=True)
def test_within_a_unit_partials_leave_before_results(service):
    service.commit((3, 4, 5, 0, 1, 2), {0: 0, 1: 0, 2: 0, 3: 3, 4: 3, 5: 3})
    kinds = {0: EVENT_RESULT, 1: EVENT_FORWARD, 2: EVENT_FORWARD, 3: EVENT_RESULT, 4: EVENT_RESULT, 5: EVENT_FORWARD}
    service.dispatcher.handle([service.event(kind, 0, part) for part, kind in kinds.items()])
    order = []
    for _ in kinds:
        (part,) = service.written(0, 1)
        order.append(part)
        service.dispatcher.handle([service.event(EVENT_DELIVERED, 0, part)])
    assert order == [5, 3, 4, 1, 2, 0]


@pytest.mark.parametrize("service", [(1, NBYTES, [True])], indirect=True)
def test_the_last_sum_for_a_slow_node_is_not_overtaken_by_the_next_step_of_a_fast_one(service):
    service.commit((0, 1, 2))
    service.dispatcher.handle([service.event(EVENT_FORWARD, 0, part) for part in (0, 1)])
    service.dispatcher.handle([service.event(EVENT_RESULT, 0, 2)])
    service.dispatcher.handle([service.event(EVENT_FORWARD, 0, part, 2) for part in (0, 1)])
    order = []
    for _ in range(5):
        (part,) = service.written(0, 1)
        order.append(part)
        service.dispatcher.handle([service.event(EVENT_DELIVERED, 0, part)])
    assert order == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("service", [(3, 1 << 20, [True, False, True])], indirect=True)
def test_a_result_goes_to_every_node_with_ranks(service):
    service.commit((0, 1))
    service.dispatcher.handle([service.event(EVENT_RESULT, 0, 1), service.event(EVENT_FORWARD, 1, 0)])
    assert service.written(0, 1) == [1] and service.written(2, 1) == [1] and service.written(1, 1) == [0]
    assert service.dispatcher.counters()["partitions"] == 2


@pytest.mark.parametrize("service", [(3, 1 << 20, [True] * 3)], indirect=True)
def test_a_result_goes_to_the_nodes_that_push_it_and_to_no_other(service):
    readers = {0: (1,), 1: (), 2: (0, 2), 3: (0, 1, 2)}
    service.dispatcher.commit((0, 1, 2, 3), alone(4), {}, readers)
    service.dispatcher.handle([service.event(EVENT_RESULT, 0, part) for part in range(4)])
    assert [service.written(peer, 2) for peer in range(3)] == [[2, 3], [0, 3], [2, 3]]
    assert [service.sent(link, 2) for link in service.links] == [2, 2, 2]
    readers.clear()  # what was committed is the dispatcher's own
    service.dispatcher.handle([service.event(EVENT_RESULT, 0, 0, 2)])
    assert service.written(1, 1) == [0]
    service.dispatcher.commit((0, 1, 2, 3), alone(4), {}, {0: (2,)})
    service.dispatcher.handle([service.event(EVENT_RESULT, 0, 0, 3)])
    assert service.written(2, 1) == [0]


@pytest.mark.parametrize("service", [(1, 0, [True])], indirect=True)
def test_an_empty_write_needs_no_credit_to_return(service):
    service.commit((0, 1))
    service.dispatcher.handle([service.event(EVENT_FORWARD, 0, 0, nbytes=0), service.event(EVENT_FORWARD, 0, 1)])
    assert service.written(0, 1) == [0]
    service.dispatcher.handle([service.event(EVENT_DELIVERED, 0, 0, nbytes=0)])
    assert service.written(0, 1) == [1]


@pytest.mark.parametrize("service", [(1, 250, [True])], indirect=True)
def test_the_thread_gives_credit_back_by_itself_and_counts_its_time(service):
    n_parts = 40
    service.commit(tuple(range(n_parts)))
    service.dispatcher.start()
    # Empty partials of 40 parts: forwarded by the engine's own event queue, delivered by the stream.
    sources = [service.engine.add_wire_peer() for _ in range(n_parts)]
    for part in range(n_parts):
        service.engine.add_member(part, nbytes=NBYTES, n_elements=NBYTES, unit_offset=0, kernel=1,
                                  local=[sources[part]], owner=0, partial=(0, 0, 0))
    service.engine.freeze(5)
    service.engine.commit(1, range(n_parts))
    for part, source in enumerate(sources):
        service.engine.arrived(source, part, 1, 1)
    assert sorted(service.written(0, n_parts)) == list(range(n_parts))
    counters = service.dispatcher.counters()
    assert counters["partitions"] == n_parts and counters["cpu_ns"] > 0


@pytest.mark.parametrize("service", [(2, 1 << 20, [True, True])], indirect=True)
def test_a_lost_connection_is_reported_once_and_gets_nothing_more(service):
    service.commit((0,))
    service.dispatcher.handle([service.event(EVENT_LOST, 0, 0), service.event(EVENT_LOST, 0, 0)])
    service.dispatcher.handle([service.event(EVENT_RESULT, 0, 0)])
    assert service.lost.get_nowait() == (0, 0) and service.lost.empty()
    assert service.written(1, 1) == [0]
    assert service.links[0].counters()["writes_pending"] == service.links[0].counters()["writes_sent"] == 0


@pytest.mark.parametrize("service", [(1, 3 * NBYTES, [True])], indirect=True)
def test_over_a_detour_goes_what_is_awaited_then_what_waited_and_nothing_twice(service):
    dispatcher = service.dispatcher
    dispatcher.commit(tuple(range(6)), alone(6), {}, {})
    dispatcher.handle([service.event(EVENT_FORWARD, 0, part) for part in (0, 1, 2, 3)])
    assert service.written(0, 3) == [0, 1, 2]  # and 3 waits for credit
    dispatcher.hold(0)
    dispatcher.handle([service.event(EVENT_LOST, 0, 0), service.event(EVENT_FORWARD, 0, 4)])
    assert service.lost.empty()  # the caller of `hold` knows
    service.links[0].close()
    dispatcher.start()
    near, far = socket.socketpair()
    far.settimeout(20)
    link = TcpLink(0, {0: near}, n_slots=64)
    service.links.append(link)
    service.far[0].close()
    service.far[0] = far
    # The peer got part 0. It awaits nothing of 5, which was never written.
    dispatcher.detour(0, link, {0: 2, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1})
    assert service.written(0, 4) == [1, 2, 3, 4]
    dispatcher.stop()
    dispatcher.handle([service.event(EVENT_FORWARD, 0, 0, round_=2)])
    assert service.written(0, 1) == [0]
    assert dispatcher.counters()["detours"] == 1
    assert service.sent(link, 5) == 5


@pytest.mark.parametrize("service", [(1, 2 * NBYTES, [True])], indirect=True)
def test_a_detour_that_ends_before_its_repeats_have_left_repeats_none_of_them_twice(service):
    dispatcher = service.dispatcher
    service.commit(tuple(range(4)))
    dispatcher.handle([service.event(EVENT_FORWARD, 0, part) for part in range(4)])
    while dispatcher.counters()["queued"]:
        dispatcher.handle(service.engine.events(10))
    assert service.written(0, 4) == [0, 1, 2, 3]
    for _ in range(2):  # all four are awaited, and there is credit for two
        dispatcher.hold(0)
        service.links[-1].close()
        near, far = socket.socketpair()
        far.settimeout(20)
        service.far.append(far)
        service.links.append(TcpLink(0, {0: near}, n_slots=64))
        dispatcher._take(dispatch.Detour(0, service.links[-1], dict.fromkeys(range(4), 1), threading.Event()))
        assert dispatcher.counters()["queued"] == 2
    dispatcher.handle([service.event(EVENT_FORWARD, 0, 0, round_=2)])
    while dispatcher.counters()["queued"]:
        dispatcher.handle(service.engine.events(10))
    service.far[0], service.far[-1] = service.far[-1], service.far[0]
    assert service.written(0, 5) == [0, 1, 2, 3, 0]


@pytest.mark.parametrize("service", [(1, NBYTES, [True])], indirect=True)
def test_a_service_that_does_not_run_takes_over_no_link(service, monkeypatch):
    monkeypatch.setattr(dispatch, "_DETOUR_TIMEOUT_S", 0.01)
    with pytest.raises(StallError, match="did not take over a new link within"):
        service.dispatcher.detour(0, service.links[0], {})


@pytest.mark.parametrize("service", [(1, 1 << 20, [True])], indirect=True)
def test_a_closed_connection_reaches_the_control_loop(service):
    service.dispatcher.start()
    service.far[0].close()
    assert service.lost.get(timeout=20)[0] == 0


@pytest.mark.parametrize("service", [(1, 1 << 20, [True])], indirect=True)
def test_a_service_that_fails_says_so(service, caplog):
    service.dispatcher.start()
    source = service.engine.add_wire_peer()
    service.engine.add_member(0, nbytes=1, n_elements=1, unit_offset=0, kernel=1, local=[source], owner=0,
                              partial=(0, 0, 0))
    service.engine.freeze(5)
    service.engine.commit(1, [0])
    service.engine.arrived(source, 0, 1, 1)  # no order was committed to the dispatcher: a KeyError in its thread
    assert service.lost.get(timeout=20) == (-1, 0)
    assert isinstance(service.dispatcher.error, KeyError)


@pytest.mark.parametrize("service", [(3, NBYTES, [False, True, True])], indirect=True)
def test_to_a_node_that_is_dropped_nothing_more_goes(service):
    dispatcher = service.dispatcher
    service.commit((0, 1, 2))
    dispatcher.handle([service.event(EVENT_FORWARD, 0, part) for part in (0, 1)])
    assert service.written(0, 1) == [0]
    dispatcher.drop(0)
    dispatcher.drop(0)
    service.links[0].close()
    dispatcher._keep_up()
    dispatcher.handle([service.event(EVENT_DELIVERED, 0, 0), service.event(EVENT_FORWARD, 0, 2),
                       (EVENT_LOST, 0, 0, 0, 5, 0, 0), service.event(EVENT_FORWARD, 1, 1, 2)])
    assert service.written(1, 1) == [1]
    dispatcher.handle([service.event(EVENT_FORWARD, 0, 2), service.event(EVENT_DELIVERED, 1, 1)])
    counters = dispatcher.counters()
    assert counters["queued"] == 0 and counters["in_flight_nbytes"] == 0, "nothing of it holds up the others"
    service.far[0].settimeout(20)
    assert service.far[0].recv(1) == b""


@pytest.mark.parametrize("service", [(2, NBYTES, [True, True])], indirect=True)
def test_a_result_is_lent_to_one_node_and_counted(service):
    dispatcher = service.dispatcher
    service.commit((1, 0))
    dispatcher.lend(dispatch.Loan(source=1, part=0, round=7, address=service.payload.address, nbytes=NBYTES))
    dispatcher._keep_up()
    dispatcher.handle([service.event(EVENT_RESULT, 0, 0, 8)])
    header = HEADER.unpack(service._exactly(1, HEADER.size))
    assert header[2:4] == (0, 7) and header[-1] == NBYTES, "before the next round of the same partition"
    service._exactly(1, NBYTES)
    assert service.written(0, 1) == [0]
    dispatcher.handle([service.event(EVENT_DELIVERED, 1, 0)])
    assert HEADER.unpack(service._exactly(1, HEADER.size))[2:4] == (0, 8)
    service._exactly(1, NBYTES)
    assert dispatcher.counters()["lent"] == 1


@pytest.mark.parametrize("service", [(2, 1 << 20, [True, True])], indirect=True)
def test_a_running_service_hears_of_losses_and_loans_by_itself(service):
    service.commit((0,))
    service.dispatcher.start()
    service.dispatcher.drop(0)
    service.dispatcher.lend(dispatch.Loan(source=1, part=0, round=1, address=service.payload.address, nbytes=NBYTES))
    assert service.written(1, 1) == [0]
    service.links[0].close()
    assert service.lost.empty()


@pytest.mark.parametrize("service", [(1, NBYTES, [True])], indirect=True)
def test_a_detour_to_a_node_that_is_dropped_meanwhile_is_no_failure(service):
    service.commit((0,))
    service.dispatcher.drop(0)
    service.dispatcher._keep_up()
    detour = dispatch.Detour(0, service.links[0], {0: 1}, threading.Event())
    service.dispatcher._take(detour)
    assert service.dispatcher.counters()["detours"] == 0
    assert detour.taken.is_set(), "who asked for it does not wait for its deadline"


@pytest.mark.parametrize("service", [(1, 1 << 20, [True])], indirect=True)
def test_what_was_given_up_is_not_written_again_nor_behind_what_waits(service):
    """A partition that comes back, or another of its number, may be awaited in a round that was written long ago."""
    dispatcher = service.dispatcher
    service.commit((0, 1))
    dispatcher.handle([service.event(EVENT_FORWARD, 0, part) for part in (0, 1)])
    assert service.written(0, 2) == [0, 1]
    dispatcher.forget({0})
    dispatcher.hold(0)
    service.links[0].close()
    near, far = socket.socketpair()
    far.settimeout(20)
    service.far.append(far)
    service.links.append(TcpLink(0, {0: near}, n_slots=64))
    dispatcher._take(dispatch.Detour(0, service.links[1], {0: 1, 1: 1}, threading.Event()))
    service.far[0], service.far[1] = service.far[1], service.far[0]
    assert service.written(0, 1) == [1] and set(dispatcher._destinations[0].posted) == {1}
    assert dispatcher._place_of(0, is_result=False) < dispatcher._place_of(1, is_result=False), "of the same pass"


@pytest.mark.parametrize("service", [(1, NBYTES, [True])], indirect=True)
def test_a_running_service_forgets_what_it_is_told_to(service):
    service.commit((0, 1))
    service.dispatcher.start()
    service.dispatcher.lend(dispatch.Loan(source=0, part=0, round=1, address=service.payload.address, nbytes=NBYTES))
    assert service.written(0, 1) == [0]
    service.dispatcher.forget([0])
    service.dispatcher.lend(dispatch.Loan(source=0, part=1, round=1, address=service.payload.address, nbytes=NBYTES))
    assert service.written(0, 1) == [1] and set(service.dispatcher._destinations[0].posted) == {1}
