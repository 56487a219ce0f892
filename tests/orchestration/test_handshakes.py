"""Who has not proved the key: whoever floods a port pushes out its own connections, and nobody keeps a member out."""
from __future__ import annotations

import queue
import socket
from collections import Counter

import pytest
from hypothesis import given, strategies as st

from bpsfast.orchestration.errors import ProtocolError
from bpsfast.orchestration.handshakes import (
    MAX_PENDING_HANDSHAKES,
    HandshakeAcceptor,
    HandshakeLimiter,
    host_of,
    source_of,
)

_STEPS = st.lists(st.one_of(
    st.tuples(st.just("come"), st.sampled_from("abc")), st.tuples(st.just("prove"), st.integers(0, 40)),
    st.tuples(st.just("later"), st.floats(0.0, 2.0))), max_size=80)


@given(st.integers(1, 8), st.integers(0, 8), st.sampled_from([0.0, 1.0]), _STEPS)
def test_who_goes_is_the_oldest_of_the_source_with_the_most(most, n_members, grace_s, steps):
    limiter = HandshakeLimiter(most, n_members, grace_s)
    now, number, held = 0.0, 0, {}
    for kind, value in steps:
        if kind == "later":
            now += value
        elif kind == "prove":
            assert limiter.remove(value) == (held.pop(value, None) is not None)
        else:
            going = limiter.one_to_go(now)
            if going is None and not limiter.has_room:
                n_of = Counter(source for source, _ in held.values())
                assert any(now - since < grace_s for source, since in held.values()
                           if n_of[source] == max(n_of.values())), "they are waited for, as they are new"
                continue
            if going is not None:
                source, since = held[going]
                n_of = Counter(other for other, _ in held.values())
                assert n_of[source] == max(n_of.values()), "nobody's connection goes for the crowd of another one"
                assert going == min(each for each in held if held[each][0] == source)
                assert now - since >= grace_s / (10 if n_of[source] > max(most / 2, n_members) else 1)
                assert limiter.remove(going)
                del held[going]
            limiter.add(number, value, now)
            held[number] = value, now
            number += 1
        assert list(limiter) == list(held) and len(limiter) <= most
        assert limiter.overdue(now, 1.0) == [each for each, (_, since) in held.items() if now - since >= 1.0]


@given(st.integers(2, 20), st.integers(1, 200))
def test_a_flood_from_one_host_leaves_a_member_on_another_alone(most, n_flood):
    limiter = HandshakeLimiter(most)
    limiter.add("member", "its host", 0.0)
    for number in range(n_flood):
        now = number / 10
        if (going := limiter.one_to_go(now)) is not None:
            limiter.remove(going)
        if limiter.has_room:
            limiter.add(number, "flood", now)
    assert "member" in limiter or most == 2, "of two sources with one each the first may go"


@pytest.mark.parametrize(("address", "host"), [
    ("10.0.0.7", "10.0.0.7"), ("::ffff:10.0.0.7", "10.0.0.7"), ("2001:db8::1:2:3:4", "2001:db8::/64"),
    ("fe80::1%eth0", "fe80::/64"), ("::1", "::/64"),
])
def test_where_a_connection_comes_from(address, host):
    assert host_of(address) == host


@pytest.mark.usefixtures("no_leaks")
def test_a_local_connection_comes_from_a_process_and_one_that_is_gone_from_nowhere():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert source_of(ours).startswith("process ")
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        assert source_of(client) == "127.0.0.1"
    with socket.socket() as unconnected:
        assert source_of(unconnected) == ""


class Opened:
    """A port at which one says "key"; the other end of each connection is to be had by `call`."""

    def __init__(self):
        self.came, self.refused, self._calls = queue.Queue(), queue.Queue(), []
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.acceptor = HandshakeAcceptor(listener, self._prove, lambda sock, proof: self.came.put((sock, proof)),
                                          self.refused.put, lambda words: None)
        self.acceptor.start()

    def call(self, host="127.0.0.1"):
        self._calls.append(socket.create_connection(self.address, 20, source_address=(host, 0)))
        return self._calls[-1]

    @staticmethod
    def _prove(sock):
        sock.settimeout(20)
        sock.sendall(b"?")
        said = sock.recv(3, socket.MSG_WAITALL)
        if said != b"key":
            raise ProtocolError(f"no key: {said!r}")
        return said

    def close(self):
        self.acceptor.close()
        for sock in self._calls:
            sock.close()


@pytest.fixture
def opened(no_leaks):
    made = Opened()
    yield made
    made.close()


def test_a_flood_does_not_end_the_handshake_of_another_host(opened):
    """It fills all places many times over, while a member from another address is in the middle of its own."""
    member = opened.call("127.0.0.2")
    assert member.recv(1) == b"?"
    for _ in range(2 * MAX_PENDING_HANDSHAKES):
        opened.call()
    for _ in range(20):
        opened.refused.get(timeout=20)
    member.sendall(b"key")
    sock, proof = opened.came.get(timeout=20)
    sock.close()
    assert proof == b"key"


def test_during_a_flood_a_member_is_let_in(opened):
    for _ in range(2 * MAX_PENDING_HANDSHAKES):
        opened.call()
    member = opened.call("127.0.0.2")
    assert member.recv(1) == b"?"
    member.sendall(b"key")
    opened.came.get(timeout=20)[0].close()


def test_its_end_ends_all_handshakes(no_leaks):
    made = Opened()
    strangers = [made.call() for _ in range(5)]
    assert [sock.recv(1) for sock in strangers] == [b"?"] * 5
    made.acceptor.close()
    assert [sock.recv(1) for sock in strangers] == [b""] * 5
    made.close()
