"""The communication service when links and nodes are lost: replaced links, resends, what is dropped and forgotten."""
from __future__ import annotations

import errno
import socket
import time

import pytest

import bpsfast
from bpsfast.node import dispatch
from bpsfast.node.transport.tcp import TcpLink
from bpsfast.orchestration.errors import ProtocolError
from bpsfast.pyx.engine import EVENT_DELIVERED, EVENT_FORWARD, EVENT_LOST, EVENT_RESULT
from tests.support.dispatch_service import HEADER, NBYTES, alone, service as service


def replace_link(dispatcher: dispatch.Dispatcher, link: TcpLink, awaited: dict[int, int]) -> None:
    if dispatcher.start_link(0, link):
        dispatcher.resume(0, awaited)


@pytest.mark.parametrize("service", [(2, 1 << 20, [True, True])], indirect=True)
def test_a_lost_connection_is_reported_once_and_gets_nothing_more(service):
    service.commit((0,))
    service.dispatcher.handle([service.event(EVENT_LOST, 0, 0, nbytes=0)] * 2)
    service.report([service.event(EVENT_RESULT, 0, 0)])
    assert service.lost.get_nowait() == (0, 0) and service.lost.empty()
    assert service.written(1, 1) == [0]
    assert service.links[0].counters()["writes_pending"] == service.links[0].counters()["writes_sent"] == 0


@pytest.mark.parametrize("service", [(1, 3 * NBYTES, [True])], indirect=True)
def test_over_a_reconnect_goes_what_is_awaited_then_what_waited_and_nothing_twice(service):
    dispatcher = service.dispatcher
    dispatcher.commit(tuple(range(6)), alone(6), {}, {})
    service.report([service.event(EVENT_FORWARD, 0, part) for part in (0, 1, 2, 3)])
    assert dispatcher.counters()["queued"] == 1  # 3 waits for credit
    dispatcher.hold(0)
    assert service.written(0, 3) == [0, 1, 2]
    dispatcher.handle([service.event(EVENT_LOST, 0, 0, nbytes=0)])
    service.report([service.event(EVENT_FORWARD, 0, 4)])
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
    replace_link(dispatcher, link, {0: 2, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1})
    assert service.written(0, 4) == [1, 2, 3, 4]
    service.report([service.event(EVENT_FORWARD, 0, 0, round_=2)])
    assert service.written(0, 1) == [0]
    assert dispatcher.counters()["reconnects"] == 1
    assert service.sent(link, 5) == 5


@pytest.mark.parametrize("service", [(1, 2 * NBYTES, [True])], indirect=True)
def test_a_reconnect_that_ends_before_its_repeats_have_left_repeats_none_of_them_twice(service):
    dispatcher = service.dispatcher
    service.commit(tuple(range(4)))
    service.report([service.event(EVENT_FORWARD, 0, part) for part in range(4)])
    assert service.written(0, 4) == [0, 1, 2, 3]
    for _ in range(2):  # all four are awaited, and there is credit for two
        dispatcher.hold(0)
        service.links[-1].close()
        near, far = socket.socketpair()
        far.settimeout(20)
        service.far.append(far)
        service.links.append(TcpLink(0, {0: near}, n_slots=64))
        replace_link(dispatcher, service.links[-1], dict.fromkeys(range(4), 1))
        assert dispatcher.counters()["queued"] == 2
    service.report([service.event(EVENT_FORWARD, 0, 0, round_=2)])
    service.far[0], service.far[-1] = service.far[-1], service.far[0]
    assert service.written(0, 5) == [0, 1, 2, 3, 0]


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
    service.engine.arrived(source, 0, 1, 1)  # no order was committed to the dispatcher
    assert service.lost.get(timeout=20) == (-1, 0)
    assert isinstance(service.dispatcher.error, ProtocolError)
    assert str(service.dispatcher.error).startswith("round 1 of partition 0 (0 bytes at 0x0) cannot be sent: no plan")
    assert service.lost.empty() and service.links[0].counters()["writes_pending"] == 0


@pytest.mark.parametrize("service", [(3, NBYTES, [False, True, True])], indirect=True)
def test_to_a_node_that_is_dropped_nothing_more_goes(service):
    dispatcher = service.dispatcher
    service.commit((0, 1, 2))
    service.report([service.event(EVENT_FORWARD, 0, part) for part in (0, 1)])
    dispatcher.drop(0)
    dispatcher.drop(0)
    assert service.written(0, 1) == [0]
    service.links[0].close()
    service.report([service.event(EVENT_DELIVERED, 0, 0), service.event(EVENT_FORWARD, 0, 2),
                    service.event(EVENT_FORWARD, 1, 1, 2)])
    assert service.written(1, 1) == [1]
    service.report([service.event(EVENT_FORWARD, 0, 2)])
    service.until_delivered()
    counters = dispatcher.counters()
    assert counters["queued"] == 0 and counters["in_flight_nbytes"] == 0, "nothing of it holds up the others"
    service.far[0].settimeout(20)
    assert service.far[0].recv(1) == b""


@pytest.mark.parametrize("service", [(2, NBYTES, [True, True])], indirect=True)
def test_a_result_is_lent_to_one_node_and_counted(service):
    dispatcher = service.dispatcher
    service.commit((1, 0))
    dispatcher.resend(dispatch.ResultResend(source=1, part=0, round=7, address=service.payload.address, nbytes=NBYTES))
    service.report([service.event(EVENT_RESULT, 0, 0, 8)])
    header = HEADER.unpack(service._exactly(1, HEADER.size))
    assert header[2:4] == (0, 7) and header[-1] == NBYTES, "before the next round of the same partition"
    service._exactly(1, NBYTES)
    assert service.written(0, 1) == [0]
    assert HEADER.unpack(service._exactly(1, HEADER.size))[2:4] == (0, 8)
    service._exactly(1, NBYTES)
    assert dispatcher.counters()["lent"] == 1


@pytest.mark.parametrize("service", [(2, 1 << 20, [True, True])], indirect=True)
def test_a_running_service_hears_of_losses_and_loans_by_itself(service):
    service.commit((0,))
    service.dispatcher.start()
    service.dispatcher.drop(0)
    service.dispatcher.resend(dispatch.ResultResend(1, 0, 1, service.payload.address, NBYTES))
    assert service.written(1, 1) == [0]
    service.links[0].close()
    assert service.lost.empty()


@pytest.mark.parametrize("service", [(1, NBYTES, [True])], indirect=True)
def test_a_reconnect_to_a_node_that_is_dropped_meanwhile_is_no_failure(service):
    service.commit((0,))
    service.dispatcher.drop(0)
    replace_link(service.dispatcher, service.links[0], {0: 1})  # who asks for it does not wait for its deadline
    assert service.dispatcher.counters()["reconnects"] == 0 and service.dispatcher.error is None


@pytest.mark.parametrize("service", [(1, 1 << 20, [True])], indirect=True)
def test_what_was_given_up_is_not_written_again_nor_behind_what_waits(service):
    """A partition that comes back, or another of its number, may be awaited in a round that was written long ago."""
    dispatcher = service.dispatcher
    service.commit((0, 1))
    service.report([service.event(EVENT_FORWARD, 0, part) for part in (0, 1)])
    assert service.written(0, 2) == [0, 1]
    dispatcher.forget({0})
    dispatcher.hold(0)
    service.links[0].close()
    near, far = socket.socketpair()
    far.settimeout(20)
    service.far.append(far)
    service.links.append(TcpLink(0, {0: near}, n_slots=64))
    service.report([service.event(EVENT_FORWARD, 0, part, 2) for part in (1, 0)])
    replace_link(dispatcher, service.links[1], {0: 1, 1: 1})
    service.far[0], service.far[1] = service.far[1], service.far[0]
    assert service.written(0, 3) == [1, 0, 1], "1 again; then 0, which is of the pass before"
    assert dispatcher._native.posted(0) == {0, 1}


@pytest.mark.parametrize("service", [(1, NBYTES, [True])], indirect=True)
def test_a_running_service_forgets_what_it_is_told_to(service):
    service.commit((0, 1))
    service.dispatcher.start()
    service.dispatcher.resend(dispatch.ResultResend(0, 0, 1, service.payload.address, NBYTES))
    assert service.written(0, 1) == [0]
    service.dispatcher.forget([0])
    service.dispatcher.resend(dispatch.ResultResend(0, 1, 1, service.payload.address, NBYTES))
    assert service.written(0, 1) == [1] and service.dispatcher._native.posted(0) == {1}


def joined_pair(service, **options):
    """Return a new link of source 0 over one connection, and its far end."""
    near, far = socket.socketpair()
    far.settimeout(20)
    service.far.append(far)
    service.links.append(TcpLink(0, {0: near}, n_slots=64, **options))
    return service.links[-1], far


@pytest.mark.parametrize("service", [(1, 1 << 20, [True])], indirect=True)
def test_a_new_link_that_ends_before_it_is_used_is_reported(service, monkeypatch):
    """What is read of it while its source is still held is kept until that is not."""
    service.commit((0,))
    service.dispatcher.start()
    service.dispatcher.hold(0)
    service.links[0].close()
    link, far = joined_pair(service)
    route = link.route

    def late(native, source):
        far.close()
        deadline = time.monotonic() + 20
        while not service.dispatcher._lost_early:
            assert time.monotonic() < deadline
        route(native, source)

    monkeypatch.setattr(link, "route", late)
    replace_link(service.dispatcher, link, {})
    assert service.lost.get(timeout=20)[0] == 0 and service.lost.empty()
    service.report([service.event(EVENT_FORWARD, 0, 0)])
    assert service.dispatcher.counters()["queued"] == 1, "it is held until the next link"


@pytest.mark.parametrize("service", [(1, 1 << 20, [True])], indirect=True)
def test_a_late_word_of_the_old_link_says_nothing_of_the_new_one(service):
    service.commit((0,))
    service.dispatcher.hold(0)
    service.links[0].close()
    link, _ = joined_pair(service)
    replace_link(service.dispatcher, link, {})
    service.dispatcher.handle([(EVENT_LOST, 0, 0, 0, errno.ECONNRESET, 0, 0)])
    assert service.lost.empty()
    service.far[0], service.far[-1] = service.far[-1], service.far[0]
    service.report([service.event(EVENT_FORWARD, 0, 0)])
    assert service.written(0, 1) == [0]
    service.dispatcher.handle([(EVENT_LOST, 0, 0, 0, errno.EPROTO, 0, 0)])
    assert service.lost.get_nowait() == (0, errno.EPROTO), "the engine's own word counts: it knows of no links"


@pytest.mark.parametrize("service", [(1, 1 << 20, [True])], indirect=True)
def test_a_link_that_replaces_another_has_its_own_numbers_of_streams(service):
    """As when RDMA, which has none, gives way to tcp."""
    service.commit((0, 1))
    service.dispatcher.hold(0)
    service.links[0].close()
    pairs = [socket.socketpair() for _ in range(2)]
    link = TcpLink(0, {number: near for number, (near, _) in enumerate(pairs)}, n_slots=64)
    service.links.append(link)
    link.expect(1, service.payload.address, service.payload.address, 100, n_streams=1)
    replace_link(service.dispatcher, link, {})
    service.report([service.event(EVENT_FORWARD, 0, part, nbytes=100) for part in (0, 1)])
    pairs[0][1].settimeout(20)
    received = b""
    while len(received) < 2 * (HEADER.size + 100):
        received += pairs[0][1].recv(1000)
    assert link.streams[0].counters()["writes_sent"] == 2 and link.streams[1].counters()["writes_sent"] == 0
    for _, far in pairs:
        far.close()


@pytest.mark.parametrize(("code", "kind", "text"), [
    (errno.ENOMEM, bpsfast.CapacityError, "no memory to send round 3 of partition 5"),
    (errno.ENOTCONN, ProtocolError, r"round 3 of partition 5 \(9 bytes at 0x1000\) cannot be sent to source 2: there"),
    (errno.EDESTADDRREQ, ProtocolError, "the peer has not told where it goes"),
    (errno.EBADF, ProtocolError, "Bad file descriptor"),
])
def test_why_nothing_is_sent_is_said_in_words(code, kind, text):
    with pytest.raises(kind, match=text):
        raise dispatch._error_of(code, 2, 5, 3, 9, 0x1000)
