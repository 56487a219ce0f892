"""CRC32C as RFC 3720 has it, and streams whose writes carry it: nothing of what was changed on the way arrives."""
from __future__ import annotations

import errno
import os
import time

import numpy as np
import pytest
from hypothesis import given, strategies as st

from bpsfast.pyx import engine as native
from bpsfast.pyx.pace import Pace
from bpsfast.pyx.tcp import BACKENDS, crc32c
from tests.support import streams
from tests.support.streams import NBYTES, bound, events, header, mailbox, pair, receive, receiving, stream

CHECKSUM_NBYTES = 4
CHECKED_HEADER = 32 + CHECKSUM_NBYTES
PIECE_NBYTES = 512 << 10  # write_out.h
BLOCK_NBYTES = 3 * 1024  # crc32c.h
READ = bytes.fromhex("01c00000 00000000 00000000 00000000 14000000 00000400 00000014 00000018 28000000 00000000"
                     "02000000 00000000")

either = pytest.mark.parametrize("by_tables", [False, True], ids=["by the instruction, if there is one", "by tables"])


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


@either
@pytest.mark.parametrize(("data", "crc"), [
    (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C), (READ, 0xD9963A56), (b"123456789", 0xE3069283), (b"", 0),
], ids=["zeros", "ones", "rising", "falling", "an iSCSI read", "digits", "nothing"])
def test_it_is_that_of_rfc_3720(data, crc, by_tables):
    assert crc32c(data, by_tables=by_tables) == crc


def by_bits(data: bytes, crc: int = 0) -> int:
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@either
@given(st.data())
def test_any_length_at_any_address_and_in_any_pieces(by_tables, data):
    begin = data.draw(st.integers(0, 9))
    nbytes = data.draw(st.one_of(st.integers(0, 40), st.integers(BLOCK_NBYTES - 9, 2 * BLOCK_NBYTES + 9)))
    cut = data.draw(st.integers(0, nbytes))
    memory = np.random.default_rng(nbytes).integers(0, 256, begin + nbytes, np.uint8)
    whole = memoryview(memory)[begin:]
    expected = by_bits(bytes(whole))
    assert crc32c(whole, by_tables=by_tables) == expected
    assert crc32c(whole[cut:], crc32c(whole[:cut], by_tables=by_tables), by_tables=by_tables) == expected


def wire_nbytes(nbytes):
    """How long a write of *nbytes* is on the wire."""
    return CHECKED_HEADER + nbytes + (CHECKSUM_NBYTES if nbytes else 0)


def arrived(receiver, n):
    deadline = time.monotonic() + 20
    while receiver.counters()["writes_received"] < n:
        assert time.monotonic() < deadline, receiver.counters()
        os.sched_yield()


def with_checksums(payload: bytes, **fields) -> bytes:
    head = header(nbytes=len(payload), **fields)
    said = head + crc32c(head).to_bytes(4, "little")
    return said + payload + crc32c(payload, crc32c(head)).to_bytes(4, "little") if payload else said


@pytest.mark.parametrize("nbytes", [1, 4096, PIECE_NBYTES - 1, PIECE_NBYTES, PIECE_NBYTES + 1, 3 * PIECE_NBYTES + 5])
def test_payloads_of_any_length_land_in_the_slot_of_their_round(engine, sockets, nbytes):
    left, right = sockets
    sender, receiver = stream(engine, left, checks=True), stream(engine, right, checks=True)
    with bound(engine, sender, receiver, nbytes) as got:
        for round in (1, 2, 3):
            payload = np.frombuffer(os.urandom(nbytes), np.uint8)
            sender.post(1, round, 0, payload.ctypes.data, nbytes)
            assert events(engine, 1)[0][0] == native.EVENT_DELIVERED
            arrived(receiver, round)
            assert np.array_equal(got[round % 2], payload) and receiver.slots.next_round(1) == round + 1
        assert sender.counters()["bytes_sent"] == receiver.counters()["bytes_received"] == 3 * wire_nbytes(nbytes)
        assert receiver.counters()["writes_damaged"] == 0
        del got


def test_what_travels_is_header_and_payload_with_the_checksum_of_each_behind_it(engine, sockets):
    left, right = sockets
    sender = stream(engine, left, checks=True)
    sender.start()
    payload = np.arange(1000, dtype=np.uint8)
    sender.post(1, 1, 0, payload.ctypes.data, 1000)
    sender.post(1, 2, native.FLAG_EMPTY, 0, 12345)
    assert receive(right, wire_nbytes(1000)) == with_checksums(payload.tobytes())
    assert receive(right, CHECKED_HEADER) == with_checksums(b"", round=2, flags=native.FLAG_EMPTY)
    assert [event[0] for event in events(engine, 2)] == [native.EVENT_DELIVERED] * 2
    sender.close()


def test_they_keep_to_their_pace_in_pieces(engine, sockets):
    left, right = sockets
    rate, nbytes = 4_000_000, 1 << 20
    out, incoming = Pace(rate), Pace(rate / 2)
    sender = stream(engine, left, checks=True, pace_out=out.address)
    receiver = stream(engine, right, checks=True, pace_in=incoming.address)
    payload = np.frombuffer(os.urandom(nbytes), np.uint8)
    with bound(engine, sender, receiver, nbytes) as got:
        begin = time.monotonic()
        sender.post(1, 1, 0, payload.ctypes.data, nbytes)
        arrived(receiver, 1)
        assert time.monotonic() - begin >= nbytes / (rate / 2) - 0.05, "the receiver is the slower one"
        assert np.array_equal(got[1], payload)
        del got
        assert out.counters()["bytes"] == wire_nbytes(nbytes) and incoming.counters()["bytes"] == nbytes


LENGTH = PIECE_NBYTES + 100


@pytest.mark.parametrize("where", [
    0, 12, 31, 32, CHECKED_HEADER - 1, CHECKED_HEADER, CHECKED_HEADER + PIECE_NBYTES, CHECKED_HEADER + LENGTH - 1,
    CHECKED_HEADER + LENGTH, wire_nbytes(LENGTH) - 1,
], ids=["header", "its round", "its length", "its checksum", "its checksum's end", "payload", "its second piece",
        "its last byte", "its checksum ", "the last byte"])
def test_a_changed_bit_is_the_end_of_the_connection_and_no_arrival(engine, sockets, where):
    payload, (left, right) = os.urandom(LENGTH), sockets
    bad = bytearray(with_checksums(payload, round=2))
    bad[where] ^= 0x10
    with receiving(engine, right, LENGTH, checks=True) as (receiver, slots):
        left.sendall(with_checksums(payload) + bad)
        [(kind, source, _, _, code, _, _)] = events(engine, 1)
        assert (kind, source, code) == (native.EVENT_LOST, receiver.peer, errno.EBADMSG)
        assert bytes(memoryview(slots)[LENGTH:2 * LENGTH]) == payload, "the first one was in order"
        assert receiver.slots.next_round(1) == 2 and receiver.counters()["writes_received"] == 1
        assert receiver.counters()["writes_damaged"] == 1
        if where < CHECKED_HEADER:
            assert not any(memoryview(slots)[:LENGTH]), "nothing of a header that does not fit is believed"
    assert receiver.slots.next_round(1) == 2, "for good"


@pytest.mark.parametrize(("said", "code"), [
    (header() + bytes(NBYTES), errno.EBADMSG), (with_checksums(bytes(NBYTES))[:-1], errno.ECONNRESET),
    (with_checksums(bytes(NBYTES))[:CHECKED_HEADER], errno.ECONNRESET),
    (with_checksums(bytes(NBYTES), round=2), errno.EPROTO), (with_checksums(b"", flags=0), errno.EPROTO),
], ids=["without checksums", "cut before the end", "cut behind the header", "another round", "no payload"])
def test_nothing_else_arrives_either(engine, sockets, said, code):
    left, right = sockets
    with receiving(engine, right, checks=True) as (receiver, _):
        left.sendall(said)
        left.close()
        [(kind, source, _, _, found, _, _)] = events(engine, 1)
        assert (kind, source, found) == (native.EVENT_LOST, receiver.peer, code)
        assert receiver.counters()["writes_received"] == 0 and receiver.slots.next_round(1) == 1
