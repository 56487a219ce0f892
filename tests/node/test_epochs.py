"""Whose connections are of the job as it is now: who was left behind is let in by nobody, who is only late is soon."""
from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from bpsfast.node.transport import Epochs, tcp
from bpsfast.orchestration.errors import MismatchError, ProtocolError
from bpsfast.orchestration.security import StreamHello
from tests.node.test_reconnects import KEY, WAIT_S, Side, sides as sides
from tests.support.streams import greet

pytestmark = pytest.mark.timeout(60)


def test_a_node_says_the_newest_epoch_and_wants_the_last_that_was_committed():
    epochs = Epochs()
    epochs.begin(3)
    assert (epochs.known, epochs.least_of(7)) == (3, 3)
    epochs.freeze(4, ())
    assert (epochs.known, epochs.least_of(7)) == (4, 3), "others may not have heard of it"
    epochs.freeze(5, ())
    epochs.commit()
    assert (epochs.known, epochs.least_of(7)) == (5, 5), "all who are left have stopped for it"


def test_a_node_that_comes_late_needs_to_know_what_was_committed_when_it_was_announced():
    epochs = Epochs(2)
    epochs.expect(9)
    epochs.freeze(3, ())
    epochs.commit()
    assert (epochs.least_of(1), epochs.least_of(9)) == (3, 2), "nobody has told it of 3"
    epochs.freeze(4, (9,))
    assert epochs.least_of(9) == 2
    epochs.freeze(5, ())  # somebody is lost meanwhile: it hears of that
    epochs.commit()
    assert epochs.least_of(1) == epochs.least_of(9) == 5


def test_two_nodes_that_learn_of_an_epoch_at_different_times_meet_again(sides: list[Side]):
    for ahead in (0, 1):
        sides[ahead].epochs.freeze(2 + ahead, ())
        for side in sides:
            side.seek()
        links = [side.link() for side in sides]
        assert links[0].number == links[1].number and links[0].epoch == links[1].epoch == sides[1].epochs.known


def test_a_link_comes_about_once_the_other_side_knows_the_epoch_too(sides: list[Side], caplog):
    sides[0].epochs.freeze(2, ())
    sides[0].epochs.commit()  # node 1 has stopped for it, says the scheduler: its word is on its way
    for side in sides:
        side.seek()
    until = time.monotonic() + WAIT_S
    while sides[1].reconnector._pairs[0].newest < 2:  # it dials in vain, and again
        assert time.monotonic() < until
        time.sleep(0.001)
    assert sides[0].links.empty() and "node 1 dialled for epoch 1, the job goes on in epoch 2" in caplog.text
    sides[1].epochs.freeze(2, ())
    sides[1].epochs.commit()
    assert [side.link().epoch for side in sides] == [2, 2]


def test_who_was_left_behind_is_let_in_by_nobody_whatever_it_dials(sides: list[Side]):
    sides[0].epochs.freeze(2, ())
    sides[0].epochs.commit()
    host, _, port = sides[0].address.rpartition(":")
    for stream, link in ((0, 0), (1, 0), (0, 1), (0, 99), (1001, 0), (1002, 0), (1000, 0)):
        with socket.create_connection((host, int(port)), WAIT_S) as sock:
            greet(sock, KEY, StreamHello(peer=1, stream=stream, epoch=1, link=link), 0, WAIT_S)
            assert sock.recv(1) == b"", "its hello is heard, and the connection ended"
    assert not sides[0].reconnector.requested() and sides[0].reconnector._pairs[1].newest == 0


def test_who_was_left_behind_finds_nobody_who_dials_it(sides: list[Side]):
    """A node of the job that has the old address refuses what answers there."""
    epochs = Epochs(2)
    with pytest.raises(MismatchError, match="is node 0 of epoch 1, expected node 0 of epoch 2 or later"):
        tcp.dial(sides[0].address, KEY, mine=1, peer=0, n_streams=1, epochs=epochs, deadline=time.monotonic() + WAIT_S)


def test_shared_memory_is_offered_to_nobody_who_was_left_behind(monkeypatch):
    from bpsfast.node.transport import shm
    from bpsfast.orchestration.messages import VERSION

    monkeypatch.setattr(shm, "check", lambda key, hello, link: None)
    hello = shm.PeerHello(version=VERSION, source=1, target=0, epoch=1, pid=1, proof=b"")
    epochs = Epochs(1)
    epochs.freeze(2, ())
    epochs.commit()
    with pytest.raises(ProtocolError, match=r"this is node 0 \(version \d+, epoch 2 or later\), not node 0 .* epoch 1"):
        shm.welcome(KEY, hello, None, 0, epochs, None)


@pytest.fixture(autouse=True)
def _quiet(caplog) -> Iterator[None]:
    caplog.set_level("WARNING", "bpsfast.node")
    yield
