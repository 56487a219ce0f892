"""Streams that seal: payloads whole, credit exact, nothing in the clear, and nothing of what somebody has changed."""
from __future__ import annotations

import contextlib
import errno
import os
import time

import numpy as np
import pytest

from bpsfast.base.encryption import seals_of
from bpsfast.pyx import engine as native
from bpsfast.pyx.pace import Pace
from bpsfast.pyx.pages import Segment
from bpsfast.pyx.seal import RECORD_NBYTES, TAG_NBYTES
from bpsfast.pyx.tcp import BACKENDS
from tests.support import streams
from tests.support.streams import NBYTES, bound, events, header, mailbox, pair, receive, stream

SECRET = bytes(range(32))
HEADER_NBYTES = 32
SEALED_HEADER = HEADER_NBYTES + TAG_NBYTES


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    streams.require_backend(request.param)
    monkeypatch.setattr(streams, "default_backend", request.param)


@pytest.fixture
def engine(backend):
    with mailbox() as made:
        yield made


@pytest.fixture
def sockets():
    with pair() as made:
        yield made


def sealing(engine, sock, dialled, **options):
    """Return a stream over *sock* that seals."""
    seals = seals_of(SECRET, dialled=dialled)
    made = stream(engine, sock, seal_out=seals.out.address, seal_in=seals.incoming.address, **options)
    return made, seals


def wire_nbytes(nbytes):
    """How long a write of *nbytes* is on the wire."""
    return SEALED_HEADER + nbytes + TAG_NBYTES * -(-nbytes // RECORD_NBYTES)


def arrived(receiver, n):
    deadline = time.monotonic() + 20
    while receiver.counters()["writes_received"] < n:
        assert time.monotonic() < deadline, receiver.counters()
        os.sched_yield()


def written(engine, sock, payloads):
    """Return what a sealed stream over *sock* says of these *payloads* for slot 1, one a round; it is kept open."""
    left, right = sock
    sender, seals = sealing(engine, left, True)
    sender.start()
    said = []
    for round, payload in enumerate(payloads, start=1):
        sender.post(1, round, 0, payload.ctypes.data, payload.nbytes)
        said.append(receive(right, wire_nbytes(payload.nbytes)))
        assert events(engine, 1)[0][0] == native.EVENT_DELIVERED
    sender.close()
    del seals
    return said


@contextlib.contextmanager
def receiving(engine, sock, nbytes=NBYTES):
    """Yield a sealed stream over *sock* that takes *nbytes* in slot 1, and its memory."""
    receiver, seals = sealing(engine, sock, False)
    with Segment(2 * nbytes) as slots:
        engine.add_member(1, nbytes=nbytes, n_elements=nbytes, unit_offset=0, kernel=1, local=[0],
                          owner=receiver.peer, partial=(0, 0, 0))
        receiver.slots.bind(1, slots.address, slots.address + nbytes, nbytes)
        receiver.start()
        yield receiver, slots
        receiver.close()
    del seals


@pytest.mark.parametrize("nbytes", [1, 15, 16, 4096, RECORD_NBYTES - 1, RECORD_NBYTES, RECORD_NBYTES + 1,
                                    3 * RECORD_NBYTES + 5])
def test_payloads_of_any_length_land_in_the_slot_of_their_round(engine, sockets, nbytes):
    left, right = sockets
    sender, ours = sealing(engine, left, True)
    receiver, theirs = sealing(engine, right, False)
    with bound(engine, sender, receiver, nbytes) as got:
        for round in (1, 2, 3):
            payload = np.frombuffer(os.urandom(nbytes), np.uint8)
            sender.post(1, round, 0, payload.ctypes.data, nbytes)
            assert events(engine, 1)[0][0] == native.EVENT_DELIVERED
            arrived(receiver, round)
            assert np.array_equal(got[round % 2], payload) and receiver.slots.next_round(1) == round + 1
        total = 3 * wire_nbytes(nbytes)
        assert sender.counters()["bytes_sent"] == receiver.counters()["bytes_received"] == total
        del got
    del ours, theirs


def test_nothing_is_in_the_clear_and_nothing_twice_the_same(engine, sockets):
    payloads = [np.full(1000, 7, np.uint8)] * 2
    first, second = written(engine, sockets, payloads)
    assert first != second and bytes([7] * 4) not in first + second and header(nbytes=1000)[:4] not in first + second
    theirs = seals_of(SECRET, dialled=False).incoming
    assert theirs.open(first[:SEALED_HEADER]) == header(nbytes=1000)
    assert theirs.open(first[SEALED_HEADER:]) == payloads[0].tobytes()


def test_an_empty_contribution_is_one_record(engine, sockets):
    left, right = sockets
    sender, seals = sealing(engine, left, True)
    sender.start()
    sender.post(1, 1, native.FLAG_EMPTY, 0, 12345)
    record = receive(right, SEALED_HEADER)
    assert seals_of(SECRET, dialled=False).incoming.open(record) == header(flags=native.FLAG_EMPTY, nbytes=0)
    assert events(engine, 1)[0][0] == native.EVENT_DELIVERED
    assert sender.counters()["bytes_sent"] == SEALED_HEADER
    sender.close()
    del seals


def test_nothing_counts_as_delivered_before_its_last_tag_is_acknowledged(engine, sockets):
    left, right = sockets
    sender, seals = sealing(engine, left, True, send_buffer_nbytes=1 << 16)
    sender.start()
    payload = np.zeros(32 << 20, np.uint8)
    sender.post(1, 1, 0, payload.ctypes.data, payload.nbytes)
    assert engine.events(0.3) == []
    left_over = wire_nbytes(payload.nbytes)
    right.settimeout(20)
    while left_over:
        left_over -= len(right.recv(1 << 20))
    assert events(engine, 1)[0][0] == native.EVENT_DELIVERED
    sender.close()
    del seals


def test_they_keep_to_their_pace_in_pieces_and_end_at_once_when_closed(engine, sockets):
    left, right = sockets
    rate = 4_000_000
    out, incoming = Pace(rate), Pace(rate / 2)
    sender, ours = sealing(engine, left, True, pace_out=out.address)
    receiver, theirs = sealing(engine, right, False, pace_in=incoming.address)
    nbytes = 1 << 20
    payload = np.frombuffer(os.urandom(nbytes), np.uint8)
    with bound(engine, sender, receiver, nbytes) as got:
        begin = time.monotonic()
        sender.post(1, 1, 0, payload.ctypes.data, nbytes)
        arrived(receiver, 1)
        assert time.monotonic() - begin >= nbytes / (rate / 2) - 0.05, "the receiver is the slower one"
        assert np.array_equal(got[1], payload)
        del got
        assert out.counters()["bytes"] == wire_nbytes(nbytes)
        assert incoming.counters()["bytes"] == wire_nbytes(nbytes) - SEALED_HEADER
        out.turn(100 * rate)  # reserves the next 100 seconds
        sender.post(1, 2, 0, payload.ctypes.data, nbytes)
        begin = time.monotonic()
        sender.close()
        assert time.monotonic() - begin < 5
    del ours, theirs


LENGTH = RECORD_NBYTES + 100


@pytest.mark.parametrize("where", [
    0, HEADER_NBYTES - 1, HEADER_NBYTES, SEALED_HEADER - 1, SEALED_HEADER, SEALED_HEADER + RECORD_NBYTES,
    SEALED_HEADER + RECORD_NBYTES + TAG_NBYTES, wire_nbytes(LENGTH) - TAG_NBYTES - 1, wire_nbytes(LENGTH) - 1,
], ids=["header", "its length", "its tag", "its tag's end", "payload", "the first record's tag", "the second record",
        "its last byte", "the last tag"])
def test_a_changed_byte_is_the_end_of_the_connection_and_no_arrival(engine, sockets, where):
    payloads = [np.frombuffer(os.urandom(LENGTH), np.uint8) for _ in range(2)]
    with pair() as other:
        good, bad = written(engine, other, payloads)
    left, right = sockets
    bad = bytearray(bad)
    bad[where] ^= 0x10
    with receiving(engine, right, LENGTH) as (receiver, slots):
        left.sendall(good + bad)
        [(kind, source, _, _, code, _, _)] = events(engine, 1)
        assert (kind, source, code) == (native.EVENT_LOST, receiver.peer, errno.EBADMSG)
        assert bytes(memoryview(slots)[LENGTH:2 * LENGTH]) == payloads[0].tobytes(), "the first one was in order"
        assert receiver.slots.next_round(1) == 2 and receiver.counters()["writes_received"] == 1
        if where < SEALED_HEADER:
            assert not any(memoryview(slots)[:LENGTH]), "of a header that does not open nothing follows"
        assert engine.events(0.05) == []
    assert receiver.slots.next_round(1) == 2, "for good"


@pytest.mark.parametrize(("spoil", "code", "n_whole"), [
    (lambda first, second: first + first, errno.EBADMSG, 1), (lambda first, second: second, errno.EBADMSG, 0),
    (lambda first, second: second + first, errno.EBADMSG, 0),
    (lambda first, second: first[:SEALED_HEADER] + second[SEALED_HEADER:], errno.EBADMSG, 0),
    (lambda first, second: first[:-1], errno.ECONNRESET, 0), (lambda first, second: first[:1], errno.ECONNRESET, 0),
    (lambda first, second: first[:SEALED_HEADER], errno.ECONNRESET, 0), (lambda first, second: first, 0, 1),
    (lambda first, second: header() + bytes(NBYTES), errno.EBADMSG, 0),
], ids=["repeated", "first missing", "exchanged", "payloads exchanged", "cut before the end", "cut in the header",
        "cut behind the header", "cut between two", "in the clear"])
def test_nothing_arrives_but_what_was_sent_in_the_order_in_which_it_was(engine, sockets, spoil, code, n_whole):
    with pair() as other:
        said = written(engine, other, [np.full(NBYTES, round, np.uint8) for round in (1, 2)])
    left, right = sockets
    with receiving(engine, right) as (receiver, _):
        left.sendall(spoil(*said))
        left.close()
        [(kind, source, _, _, found, _, _)] = events(engine, 1)
        assert (kind, source, found) == (native.EVENT_LOST, receiver.peer, code)
        assert receiver.counters()["writes_received"] == n_whole and receiver.slots.next_round(1) == 1 + n_whole


def test_what_a_stream_has_sent_itself_is_not_taken_back(engine, sockets):
    """A reflection: both directions count from 0, under keys of their own."""
    left, right = sockets
    sender, seals = sealing(engine, left, True)
    with Segment(NBYTES) as slots:
        sender.slots.bind(1, slots.address, slots.address, NBYTES)
        sender.start()
        payload = np.ones(NBYTES, np.uint8)
        sender.post(1, 1, 0, payload.ctypes.data, NBYTES)
        right.sendall(receive(right, wire_nbytes(NBYTES)))
        found = {event[0]: event[4] for event in events(engine, 2)}
        assert found == {native.EVENT_DELIVERED: 0, native.EVENT_LOST: errno.EBADMSG}
        assert not any(memoryview(slots))
        sender.close()
    del seals


def test_a_stream_without_seals_takes_nothing_sealed(engine, sockets):
    with pair() as other:
        [said] = written(engine, other, [np.ones(NBYTES, np.uint8)])
    left, right = sockets
    receiver = stream(engine, right)
    with Segment(NBYTES) as slots:
        receiver.slots.bind(1, slots.address, slots.address, NBYTES)
        receiver.start()
        left.sendall(said)
        assert events(engine, 1)[0][4] == errno.EPROTO
        assert not any(memoryview(slots))
        receiver.close()
