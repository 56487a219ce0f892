"""Small writes behind no other: who posts them sends them, and the stream's thread what the socket does not take."""
from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import numpy as np
import pytest

from bpsfast.base.encryption import seals_of
from bpsfast.pyx import engine as native
from bpsfast.pyx.tcp import BACKENDS
from tests.support import streams
from tests.support.streams import events, mailbox, pair, stream

SECRET = bytes(range(32))
MOST_NBYTES = 1 << 16  # BPS_AT_ONCE_NBYTES of tcp_stream.h
kinds = pytest.mark.parametrize("kind", ["in the clear", "with checksums", "sealed"])


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    streams.require_backend(request.param)
    monkeypatch.setattr(streams, "default_backend", request.param)


@pytest.fixture
def engine(backend):
    with mailbox() as made:
        yield made


@contextlib.contextmanager
def ends(kind, engine, sockets, n_slots=1, nbytes=MOST_NBYTES):
    """Yield a sender, which is started, a receiver, which is not, and the bytes of its slots: by slot and parity."""
    made, held = [], []
    for sock, dialled in zip(sockets, (True, False)):
        options = {"checks": kind == "with checksums"}
        if kind == "sealed":
            held.append(seals_of(SECRET, dialled=dialled))
            options = {"seal_out": held[-1].out.address, "seal_in": held[-1].incoming.address}
        made.append(stream(engine, sock, **options))
    sender, receiver = made
    slots = np.zeros((n_slots, 2, nbytes), np.uint8)
    for slot in range(n_slots):
        engine.add_member(slot, nbytes=nbytes, n_elements=nbytes, unit_offset=0, kernel=1, local=[0],
                          owner=receiver.peer, partial=(0, 0, 0))
        receiver.slots.bind(slot, slots[slot, 0].ctypes.data, slots[slot, 1].ctypes.data, nbytes)
    sender.start()
    try:
        yield sender, receiver, slots
    finally:
        sender.close()
        receiver.close()


def arrived(receiver, n):
    deadline = time.monotonic() + 20
    while receiver.counters()["writes_received"] < n:
        assert time.monotonic() < deadline, receiver.counters()
        os.sched_yield()


@kinds
def test_a_small_write_has_left_when_its_post_returns(engine, kind):
    with pair() as sockets, ends(kind, engine, sockets) as (sender, receiver, got):
        payload = np.arange(MOST_NBYTES, dtype=np.uint8)
        sender.post(0, 1, 0, payload.ctypes.data, MOST_NBYTES)
        payload_of_round_1 = payload.copy()
        payload[:] = 0  # the bytes are the caller's again
        [(event, source, part, round_, _, _, nbytes)] = engine.events(0)
        assert (event, source, part, round_, nbytes) == (native.EVENT_DELIVERED, sender.peer, 0, 1, MOST_NBYTES)
        assert sender.counters()["writes_sent"] == 1 and sender.counters()["writes_pending"] == 0
        receiver.start()
        arrived(receiver, 1)
        assert (got[0, 1] == payload_of_round_1).all()
        assert sender.counters()["bytes_sent"] == receiver.counters()["bytes_received"]


def test_a_larger_one_is_left_to_the_thread(engine):
    with pair() as sockets, ends("in the clear", engine, sockets, nbytes=MOST_NBYTES + 1) as (sender, receiver, _):
        payload = np.zeros(MOST_NBYTES + 1, np.uint8)
        sender.post(0, 1, 0, payload.ctypes.data, payload.size)
        receiver.start()
        assert events(engine, 1)[0][:4] == (native.EVENT_DELIVERED, sender.peer, 0, 1)


def narrow_pair():
    """Return both ends of a connection whose buffers hold less than one write."""
    server = socket.create_server(("127.0.0.1", 0))
    with server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        left = socket.socket()
        left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        left.connect(server.getsockname())
        right, _ = server.accept()
    return left, right


@kinds
@pytest.mark.parametrize("nbytes", [1000, 5000, MOST_NBYTES])
def test_what_a_full_socket_does_not_take_follows_in_order(engine, kind, nbytes):
    n_rounds = 30
    with ends(kind, engine, narrow_pair(), nbytes=nbytes) as (sender, receiver, got):
        payloads = [np.full(nbytes, round_, np.uint8) for round_ in range(n_rounds + 1)]
        for round_ in range(1, n_rounds + 1):
            sender.post(0, round_, 0, payloads[round_].ctypes.data, nbytes)
        assert sender.counters()["writes_pending"] > 0
        receiver.start()
        arrived(receiver, n_rounds)
        assert [event[:4] for event in events(engine, n_rounds)] == [
            (native.EVENT_DELIVERED, sender.peer, 0, round_) for round_ in range(1, n_rounds + 1)]
        assert (got[0, 0] == 30).all() and (got[0, 1] == 29).all()
        assert sender.counters()["writes_pending"] == 0
        assert sender.counters()["bytes_sent"] == receiver.counters()["bytes_received"]


@kinds
def test_threads_that_post_at_once_do_not_mix_their_writes(engine, kind):
    n_threads, n_rounds, nbytes = 4, 200, 3000
    with ends(kind, engine, narrow_pair(), n_threads, nbytes) as (sender, receiver, got):
        payloads = [np.full(nbytes, slot, np.uint8) for slot in range(n_threads)]
        receiver.start()

        def post(slot):
            for round_ in range(1, n_rounds + 1):
                sender.post(slot, round_, 0, payloads[slot].ctypes.data, nbytes)

        posting = [threading.Thread(target=post, args=(slot,)) for slot in range(n_threads)]
        for thread in posting:
            thread.start()
        for thread in posting:
            thread.join(30)
        arrived(receiver, n_threads * n_rounds)
        assert all((got[slot] == slot).all() for slot in range(n_threads))
        assert len(events(engine, n_threads * n_rounds)) == n_threads * n_rounds
        counters = receiver.counters()
        assert counters["writes_damaged"] == 0 and counters["bytes_received"] == sender.counters()["bytes_sent"]


@kinds
def test_a_write_to_a_peer_that_has_gone_loses_the_peer(engine, kind):
    with pair() as sockets:
        gone = sockets[1]
        with ends(kind, engine, (sockets[0], socket.socket()), nbytes=1000) as (sender, _, _):
            gone.close()
            payload = np.zeros(1000, np.uint8)
            for round_ in range(1, 100):
                sender.post(0, round_, 0, payload.ctypes.data, 1000)
            found = events(engine, 1)
            while (native.EVENT_LOST, sender.peer) not in [event[:2] for event in found]:
                found += events(engine, 1)
