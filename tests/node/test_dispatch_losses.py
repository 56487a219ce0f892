"""The communication service when links and nodes are lost: replaced links, resends, what is dropped and forgotten."""
from __future__ import annotations

import socket

import pytest

from bpsfast.node import dispatch
from bpsfast.node.transport.tcp import TcpLink
from bpsfast.orchestration.errors import StallError
from bpsfast.pyx.engine import EVENT_DELIVERED, EVENT_FORWARD, EVENT_LOST, EVENT_RESULT
from tests.support.dispatch_service import HEADER, NBYTES, alone, service as service


@pytest.mark.parametrize("service", [(2, 1 << 20, [True, True])], indirect=True)
def test_a_lost_connection_is_reported_once_and_gets_nothing_more(service):
    service.commit((0,))
    service.dispatcher.handle([service.event(EVENT_LOST, 0, 0), service.event(EVENT_LOST, 0, 0)])
    service.dispatcher.handle([service.event(EVENT_RESULT, 0, 0)])
    assert service.lost.get_nowait() == (0, 0) and service.lost.empty()
    assert service.written(1, 1) == [0]
    assert service.links[0].counters()["writes_pending"] == service.links[0].counters()["writes_sent"] == 0


@pytest.mark.parametrize("service", [(1, 3 * NBYTES, [True])], indirect=True)
def test_over_a_reconnect_goes_what_is_awaited_then_what_waited_and_nothing_twice(service):
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
    dispatcher.replace_link(0, link, {0: 2, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1})
    assert service.written(0, 4) == [1, 2, 3, 4]
    dispatcher.stop()
    dispatcher.handle([service.event(EVENT_FORWARD, 0, 0, round_=2)])
    assert service.written(0, 1) == [0]
    assert dispatcher.counters()["reconnects"] == 1
    assert service.sent(link, 5) == 5


@pytest.mark.parametrize("service", [(1, 2 * NBYTES, [True])], indirect=True)
def test_a_reconnect_that_ends_before_its_repeats_have_left_repeats_none_of_them_twice(service):
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
        dispatcher._replace_link(0, service.links[-1], dict.fromkeys(range(4), 1))
        assert dispatcher.counters()["queued"] == 2
    dispatcher.handle([service.event(EVENT_FORWARD, 0, 0, round_=2)])
    while dispatcher.counters()["queued"]:
        dispatcher.handle(service.engine.events(10))
    service.far[0], service.far[-1] = service.far[-1], service.far[0]
    assert service.written(0, 5) == [0, 1, 2, 3, 0]


@pytest.mark.parametrize("service", [(1, NBYTES, [True])], indirect=True)
def test_a_service_that_does_not_run_takes_over_no_link(service, monkeypatch):
    monkeypatch.setattr(dispatch, "_COMMAND_TIMEOUT_S", 0.01)
    with pytest.raises(StallError, match="did not take over a new link within"):
        service.dispatcher.replace_link(0, service.links[0], {})


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
    dispatcher.handle([])
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
    dispatcher.resend(dispatch.ResultResend(source=1, part=0, round=7, address=service.payload.address, nbytes=NBYTES))
    dispatcher.handle([])
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
    service.dispatcher.resend(dispatch.ResultResend(1, 0, 1, service.payload.address, NBYTES))
    assert service.written(1, 1) == [0]
    service.links[0].close()
    assert service.lost.empty()


@pytest.mark.parametrize("service", [(1, NBYTES, [True])], indirect=True)
def test_a_reconnect_to_a_node_that_is_dropped_meanwhile_is_no_failure(service):
    service.commit((0,))
    service.dispatcher.drop(0)
    service.dispatcher.handle([])
    service.dispatcher.start()
    service.dispatcher.replace_link(0, service.links[0], {0: 1})  # who asks for it does not wait for its deadline
    assert service.dispatcher.counters()["reconnects"] == 0 and service.dispatcher.error is None


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
    dispatcher._replace_link(0, service.links[1], {0: 1, 1: 1})
    service.far[0], service.far[1] = service.far[1], service.far[0]
    assert service.written(0, 1) == [1] and set(dispatcher._posted[0]) == {1}
    assert dispatcher._send_key_of(0, is_result=False) < dispatcher._send_key_of(1, is_result=False), "of the same pass"


@pytest.mark.parametrize("service", [(1, NBYTES, [True])], indirect=True)
def test_a_running_service_forgets_what_it_is_told_to(service):
    service.commit((0, 1))
    service.dispatcher.start()
    service.dispatcher.resend(dispatch.ResultResend(0, 0, 1, service.payload.address, NBYTES))
    assert service.written(0, 1) == [0]
    service.dispatcher.forget([0])
    service.dispatcher.resend(dispatch.ResultResend(0, 1, 1, service.payload.address, NBYTES))
    assert service.written(0, 1) == [1] and set(service.dispatcher._posted[0]) == {1}
