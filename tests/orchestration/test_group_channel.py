"""What ranks tell each other about turns, over real sockets on loopback."""
from __future__ import annotations

import os
import secrets
import socket
import time

import msgspec
import pytest

from bpsfast.orchestration.errors import ConfigError, PeerLostError, ProtocolError
from bpsfast.orchestration.handshakes import KEEPALIVE_IDLE_S, KEEPALIVE_PROBES
from bpsfast.orchestration.priority.group_channel import (
    Begun,
    Failed,
    FollowerChannel,
    Hello,
    LeaderChannel,
    Left,
    Turns,
)
from bpsfast.orchestration.priority.turns import Entry
from bpsfast.orchestration.zmq_connections import view
from tests.support.channel_ends import receive

KEY = secrets.token_bytes(32)
LIMIT_S = 20.0
ENTRY = Entry(name="a", part=3, nbytes=4, kind="float32 sum")


@pytest.fixture
def lines():
    """A leader and two followers."""
    leader = LeaderChannel(KEY)
    followers = [FollowerChannel("127.0.0.1", leader.port, KEY, leader=f"rank {3 * i}") for i in range(2)]
    yield leader, followers
    for line in (leader, *followers):
        line.close()


def greet(leader, followers):
    for rank, follower in enumerate(followers, 1):
        follower.tell(Hello(rank))
    receive(leader, len(followers))


def test_everybody_hears_the_leader_and_the_leader_everybody(lines):
    leader, followers = lines
    assert leader.present == set()
    greet(leader, followers)
    assert leader.present == {1, 2}
    leader.tell(Turns((ENTRY, ENTRY)))
    leader.tell(Failed("StallError", "why"))
    for follower in followers:
        assert receive(follower, 2) == [Turns((ENTRY, ENTRY)), Failed("StallError", "why")]
    followers[0].tell(Begun(1, 7))
    followers[0].tell(Left(1))
    assert receive(leader, 2) == [Begun(1, 7), Left(1)]


def test_a_leader_that_is_gone_is_news_after_its_last_words(lines):
    leader, followers = lines
    greet(leader, followers)
    leader.tell(Turns((ENTRY,)))
    leader.close()
    assert receive(followers[0], 1) == [Turns((ENTRY,))]
    for name, follower in zip(("rank 0", "rank 3"), followers):
        with pytest.raises(PeerLostError, match=f"{name}'s process is gone"):
            receive(follower, 2)


class Unheard(msgspec.Struct, tag=True, frozen=True):
    """No message of these lines."""


def test_one_word_that_is_none_takes_no_other_with_it(lines):
    leader, followers = lines
    greet(leader, followers)
    for line, words in ((followers[0], (Begun(1, 1), Unheard(), Unheard(), Left(1))),
                        (leader, (Turns((ENTRY,)), Unheard(), Unheard(), Left(0)))):
        for word in words:
            line.tell(word)
    for line, first, last in ((leader, Begun(1, 1), Left(1)), (followers[0], Turns((ENTRY,)), Left(0))):
        heard, n_wrong, until, wake = [], 0, time.monotonic() + LIMIT_S, os.eventfd(0)
        while last not in heard and time.monotonic() < until:
            line.wait(wake, 0.5)
            try:
                heard += line.recv_nowait()
            except ProtocolError:
                n_wrong += 1
        os.close(wake)
        assert (heard, n_wrong) == ([first, last], 2)


def test_a_follower_that_is_gone_is_noticed_at_the_next_word_and_its_last_ones_are_heard(lines):
    leader, followers = lines
    greet(leader, followers)
    followers[0].tell(Left(1))
    followers[0].close()
    until = time.monotonic() + LIMIT_S
    while leader.tell(Left(0)) != [1]:
        assert time.monotonic() < until
    assert leader.tell(Left(0), but=[1]) == []
    assert receive(leader, 1) == [Left(1)]


def test_somebody_without_the_key_is_not_heard(lines):
    leader, followers = lines
    stranger = FollowerChannel("127.0.0.1", leader.port, bytes(32))
    stranger.tell(Hello(9))
    assert stranger._monitor.poll(int(LIMIT_S * 1000)), "neither understood nor cut off"
    assert stranger.recv_nowait() == [] and not stranger.is_connected
    greet(leader, followers)
    assert leader.present == {1, 2}
    stranger.close()


def test_what_is_no_address_is_named():
    with pytest.raises(ConfigError, match="rank 3 says it listens at no such place:7"):
        FollowerChannel("no such place", 7, KEY, leader="rank 3")


def test_rubbish_is_named(lines):
    leader, followers = lines
    followers[0]._socket.send(b"rubbish")
    with pytest.raises(ProtocolError, match="is no message"):
        receive(leader, 1)


def test_closing_twice_does_nothing(lines):
    for line in (lines[0], *lines[1]):
        line.close()
        line.close()


def test_the_kernel_probes_idle_connections(lines):
    """Or a rank whose host is lost would be waited for until a quarter of an hour after the next message."""
    leader, followers = lines
    greet(leader, followers)
    assert [each._socket.tcp_keepalive for each in followers] == [1, 1]
    assert len(leader._handshake_limiter._known) == 2
    for fd in leader._handshake_limiter._known:
        with view(fd) as sock:
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == KEEPALIVE_IDLE_S
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == KEEPALIVE_PROBES


def test_the_leader_listens_within_the_range():
    first = LeaderChannel(KEY)
    try:
        if first.port > 65_500:
            pytest.skip("the kernel has drawn one of the last ports")
        second = LeaderChannel(KEY, ports=(first.port, first.port + 20))
        second.close()
        assert first.port < second.port <= first.port + 20
        with pytest.raises(ConfigError, match=rf"within {first.port} to {first.port} \(BPSFAST_PORTS\)"):
            LeaderChannel(KEY, ports=(first.port, first.port))
    finally:
        first.close()
