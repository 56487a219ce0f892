"""Streams: payloads whole and in order, credit on acknowledgement, nothing written that was not bound."""
import contextlib
import errno
import fcntl
import gc
import os
import struct
import subprocess
import sys
import termios
import time

import numpy as np
import pytest

from bpsfast.base.encryption import seals_of
from bpsfast.pyx import engine as native
from bpsfast.pyx.pace import Pace
from bpsfast.pyx.pages import Segment
from bpsfast.pyx.tcp import BACKENDS, IoThreads, Slots, Stream
from tests.support import streams, threads
from tests.support.streams import EPOCH, NBYTES, bound, events, header, mailbox, pair, receive, receiving, stream

SECRET = bytes(range(32))
GATHER_NBYTES = 128 << 10  # BPS_GATHER_NBYTES of pyx/tcp_stream.h


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


def test_the_wire_header_is_as_drawn(engine, sockets):
    left, right = sockets
    sender = stream(engine, left)
    sender.start()
    payload = np.arange(16, dtype=np.uint8)
    sender.post(3, 18, 0, payload.ctypes.data, 16)
    assert receive(right, 48) == header(3, 18, nbytes=16) + payload.tobytes()
    [(kind, source, part, round, _, _, nbytes)] = events(engine, 1)
    assert (kind, source, part, round, nbytes) == (native.EVENT_DELIVERED, sender.peer, 3, 18, 16)
    sender.close()


def test_payloads_land_in_the_slot_of_their_round(engine, sockets):
    left, right = sockets
    sender, receiver = stream(engine, left), stream(engine, right)
    with bound(engine, sender, receiver, NBYTES) as got:
        for round in (1, 2, 3):
            payload = np.full(NBYTES, round, np.uint8)
            sender.post(1, round, 0, payload.ctypes.data, NBYTES)
            assert events(engine, 1)[0][0] == native.EVENT_DELIVERED
            while receiver.counters()["writes_received"] < round:
                os.sched_yield()
            assert (got[round % 2] == round).all()
        del got


def test_many_posts_leave_in_order_and_are_all_acknowledged(engine, sockets):
    left, right = sockets
    sender = stream(engine, left, send_buffer_nbytes=1 << 16)
    payload = np.zeros(1000, np.uint8)
    for round in range(3000):  # more than the queue's first capacity, before anything is sent
        sender.post(2, round, 0, payload.ctypes.data, 1000)
    sender.start()
    for round in range(3000):
        data = receive(right, 1032)
        assert struct.unpack_from("<6I", data)[3] == round
    rounds = [event[3] for event in events(engine, 3000)]
    assert rounds == list(range(3000))
    assert sender.counters() == {"bytes_sent": 3000 * 1032, "bytes_received": 0, "writes_sent": 3000,
                                 "writes_received": 0, "writes_damaged": 0, "writes_pending": 0}
    sender.close()


def test_nothing_counts_as_delivered_while_the_peer_takes_nothing(engine, sockets):
    left, right = sockets
    sender = stream(engine, left, send_buffer_nbytes=1 << 16)
    sender.start()
    payload = np.zeros(32 << 20, np.uint8)
    sender.post(1, 1, 0, payload.ctypes.data, payload.nbytes)
    assert engine.events(0.3) == []
    right.settimeout(20)
    left_over = payload.nbytes + 32
    while left_over:
        left_over -= len(right.recv(1 << 20))
    assert events(engine, 1)[0][0] == native.EVENT_DELIVERED
    sender.close()


def test_streams_keep_to_their_pace_and_end_at_once_when_closed(engine, sockets):
    left, right = sockets
    rate = 4_000_000
    out, incoming = Pace(rate), Pace(rate / 2)
    sender = stream(engine, left, pace_out=out.address)
    receiver = stream(engine, right, pace_in=incoming.address)
    nbytes = 1 << 20
    payload = np.frombuffer(os.urandom(nbytes), np.uint8)
    with bound(engine, sender, receiver, nbytes) as got:
        begin = time.monotonic()
        sender.post(1, 1, 0, payload.ctypes.data, nbytes)
        while receiver.counters()["writes_received"] < 1:
            assert time.monotonic() - begin < 20
            os.sched_yield()
        assert time.monotonic() - begin >= nbytes / (rate / 2) - 0.01, "the receiver is the slower one"
        assert (got[1] == payload).all()
        del got
        assert out.counters()["bytes"] == nbytes + 32 and incoming.counters()["bytes"] == nbytes
        out.turn(100 * rate)  # reserves the next 100 seconds
        sender.post(1, 2, 0, payload.ctypes.data, nbytes)
        begin = time.monotonic()
        sender.close()
        assert time.monotonic() - begin < 5


def test_an_empty_contribution_has_no_payload(engine, sockets):
    left, right = sockets
    sender = stream(engine, left)
    sender.start()
    sender.post(1, 1, native.FLAG_EMPTY, 0, 12345)
    assert receive(right, 32) == header(flags=native.FLAG_EMPTY, nbytes=0)
    sender.close()


@pytest.mark.parametrize("bad", [
    header(magic=1), header(slot=2), header(slot=64), header(epoch=EPOCH + 1), header(nbytes=NBYTES + 1),
    header(nbytes=NBYTES - 1), header(immediate=0), header(flags=1), header(round=0), header(round=2),
    header(round=17), b"GET / HTTP/1.1\r\n" + b" " * 16,
], ids=["magic", "unbound slot", "slot out of range", "epoch", "too long", "too short", "immediate",
        "empty with payload", "the round before", "the next round", "the same round, modulo 16", "another protocol"])
def test_a_header_that_does_not_fit_ends_the_connection_before_a_byte_is_written(engine, sockets, bad):
    left, right = sockets
    receiver = stream(engine, right)
    with Segment(NBYTES) as slots:
        receiver.slots.bind(1, slots.address, slots.address, NBYTES)
        receiver.start()
        left.sendall(bad)
        [(kind, source, _, _, code, _, _)] = events(engine, 1)
        assert (kind, source, code) == (native.EVENT_LOST, receiver.peer, errno.EPROTO)
        left.close()
        assert not any(bytes(memoryview(slots)))
        receiver.close()


@pytest.mark.parametrize("again", [1, 2], ids=["the last but one", "the last one"])
def test_a_round_that_has_arrived_does_not_arrive_again(engine, sockets, again):
    """It would be summed as another one, and what a link awaits that takes this one's place would be wrong."""
    left, right = sockets
    with receiving(engine, right) as (receiver, slots):
        left.sendall(b"".join(header(round=round) + bytes([round]) * NBYTES for round in (1, 2)))
        left.sendall(header(round=again) + bytes([9]) * NBYTES)
        assert events(engine, 1) == [(native.EVENT_LOST, receiver.peer, 0, 0, errno.EPROTO, 0, 0)]
        receiver.close()
        assert receiver.slots.next_round(1) == 3 and receiver.counters()["writes_received"] == 2
        assert bytes(memoryview(slots)[:NBYTES]) == bytes([2]) * NBYTES
        assert bytes(memoryview(slots)[NBYTES:]) == bytes([1]) * NBYTES


def test_rounds_go_on_where_they_wrap(engine, sockets):
    left, right = sockets
    with receiving(engine, right, next_round=(1 << 32) - 1) as (receiver, _):
        left.sendall(b"".join(header(round=round) + bytes(NBYTES) for round in ((1 << 32) - 1, 0, 1)))
        left.sendall(header(round=1))
        assert events(engine, 1) == [(native.EVENT_LOST, receiver.peer, 0, 0, errno.EPROTO, 0, 0)]
        receiver.close()
        assert receiver.slots.next_round(1) == 2 and receiver.counters()["writes_received"] == 3


def framed(nbytes, said=None):
    return struct.pack("<Q", nbytes - 8 if said is None else said) + bytes(range(1, nbytes - 7))


def test_frames_have_any_length_that_fits(engine, sockets):
    left, right = sockets
    sender, receiver = stream(engine, left), stream(engine, right)
    with Segment(4096) as slots:
        engine.add_member(1, nbytes=100, n_elements=100, unit_offset=0, kernel=1, local=[0], owner=receiver.peer,
                          partial=(0, 0, 0))
        receiver.slots.bind(1, slots.address, slots.address + 2048, 100, True)
        sender.start()
        receiver.start()
        for round, nbytes in enumerate((8, 100, 9), start=1):
            frame = np.frombuffer(framed(nbytes), np.uint8)
            sender.post(1, round, 0, frame.ctypes.data, nbytes)
            assert events(engine, 1)[0][6] == nbytes
            while receiver.counters()["writes_received"] < round:
                os.sched_yield()
            begin = 2048 * (round & 1)
            assert bytes(memoryview(slots)[begin:begin + nbytes]) == framed(nbytes)
        sender.close()
        receiver.close()


@pytest.mark.parametrize("bad", [
    header(nbytes=7) + b"1234567", header(nbytes=101) + framed(101), header(nbytes=50) + framed(50, said=41),
    header(nbytes=50) + framed(50, said=43), header(nbytes=50) + framed(50, said=(1 << 64) - 1),
], ids=["shorter than its length", "longer than its slot", "says too little", "says too much", "says nonsense"])
def test_a_frame_that_does_not_fit_ends_the_connection(engine, sockets, bad):
    left, right = sockets
    receiver = stream(engine, right)
    with Segment(4096) as slots:
        receiver.slots.bind(1, slots.address, slots.address, 100, True)
        receiver.start()
        left.sendall(bad)
        [(kind, source, _, _, code, _, _)] = events(engine, 1)
        assert (kind, source, code) == (native.EVENT_LOST, receiver.peer, errno.EPROTO)
        assert not any(memoryview(slots)[100:])
        receiver.close()


@pytest.mark.parametrize("sent", [0, 10, 32, 1000])
def test_a_peer_that_goes_away_is_reported_once(engine, sockets, sent):
    left, right = sockets
    receiver = stream(engine, right)
    with Segment(NBYTES) as slots:
        receiver.slots.bind(1, slots.address, slots.address, NBYTES)
        receiver.start()
        left.sendall((header() + b"x" * NBYTES)[:sent])
        left.close()
        [(kind, source, _, _, code, _, _)] = events(engine, 1)
        assert (kind, source) == (native.EVENT_LOST, receiver.peer)
        assert code == (0 if sent == 0 else errno.ECONNRESET)
        assert engine.events(0.05) == []
        receiver.close()


def test_our_own_close_is_no_loss_and_cuts_a_blocked_send(engine, sockets):
    left, right = sockets
    sender = stream(engine, left, send_buffer_nbytes=1 << 16)
    sender.start()
    payload = np.zeros(64 << 20, np.uint8)
    sender.post(1, 1, 0, payload.ctypes.data, payload.nbytes)
    sender.close()
    sender.close()
    assert engine.events(0.05) == []
    with pytest.raises(ValueError, match="closed"):
        sender.post(1, 1, 0, 0, 0)
    right.settimeout(20)
    while right.recv(1 << 20):
        continue


@pytest.mark.parametrize(("options", "error"), [
    ({"trace_capacity": 1 << 60}, MemoryError), ({"send_buffer_nbytes": 1 << 40}, OverflowError),
])
def test_a_stream_that_cannot_be_made_leaves_the_descriptor_to_the_caller(engine, sockets, options, error):
    left, right = sockets
    with pytest.raises(error):
        Stream(left.fileno(), IoThreads(1), peer=0, engine=engine.handle, arrived=engine.arrived_address,
               notify=engine.notify_address, slots=Slots(64, epoch=EPOCH), keep=engine, **options)
    gc.collect()
    left.sendall(b"still open")
    assert receive(right, 10) == b"still open"


def test_slots_out_of_range_are_refused(engine, sockets):
    made = stream(engine, sockets[0])
    with pytest.raises(ValueError, match="slot 64 of 64"):
        made.slots.bind(64, 1, 1, 1)
    with pytest.raises(ValueError, match="slot 99 of 64"):
        made.post(99, 1, 0, 0, 0)
    made.close()


def test_threads_and_descriptors_end(engine, sockets):
    left, _ = sockets
    before, n_descriptors = threads.ids(), len(os.listdir("/proc/self/fd"))
    io_threads = IoThreads(3, streams.default_backend)
    made = stream(engine, left, io_threads)
    made.start()
    fresh = threads.ids() - before
    assert len(fresh) == 3
    io_threads.close()
    assert fresh <= threads.ids(), "a stream is open"
    with pair() as (other, _), pytest.raises(ValueError, match="were closed"):
        stream(engine, other, io_threads).start()
    made.close()
    io_threads.close()
    assert len(os.listdir("/proc/self/fd")) == n_descriptors - 1
    threads.until_forgotten(fresh)


@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_a_few_threads_move_the_bytes_of_many_streams(engine, n_threads):
    """All at once, in both directions, with payloads that fill the sockets and others that do not."""
    n_streams, n_rounds, most = 12, 6, 1 << 20
    io_threads = IoThreads(n_threads, streams.default_backend)
    before = threads.ids()
    with contextlib.ExitStack() as stack:
        ends = [stream(engine, sock, io_threads, send_buffer_nbytes=1 << 16)
                for _ in range(n_streams) for sock in stack.enter_context(pair())]
        memory = np.zeros((len(ends), 2, most), np.uint8)
        for part, end in enumerate(ends):
            engine.add_member(part ^ 1, nbytes=most, n_elements=most, unit_offset=0, kernel=1, local=[0],
                              owner=end.peer, partial=(0, 0, 0))
            nbytes = most >> (part // 2 % 4 * 5)  # 1 MiB, 32 KiB, 1 KiB, 32 bytes
            end.slots.bind(part ^ 1, memory[part, 0].ctypes.data, memory[part, 1].ctypes.data, nbytes)
            end.start()
        for round_ in range(1, n_rounds + 1):
            payload = np.full(most, round_, np.uint8)
            for part, end in enumerate(ends):
                end.post(part, round_, 0, payload.ctypes.data, most >> (part // 2 % 4 * 5))
            found = events(engine, len(ends))
            assert {event[0] for event in found} == {native.EVENT_DELIVERED}, found
            for part, end in enumerate(ends):
                while end.counters()["writes_received"] < round_:
                    os.sched_yield()
                nbytes = most >> (part // 2 % 4 * 5)
                assert (memory[part, round_ % 2, :nbytes] == round_).all()
                assert not memory[part, round_ % 2, nbytes:].any()
        assert threads.ids() == before, "no thread more"
        for end in ends:
            end.close()
    io_threads.close()


def unread(sock):
    """Return how many bytes wait in the kernel's receive queue of *sock*."""
    return struct.unpack("i", fcntl.ioctl(sock, termios.FIONREAD, bytes(4)))[0]


def on_the_wire(engine, payload, **options):
    """Return the bytes of a write of *payload* into slot 1 in round 1 by a stream with these *options*."""
    with pair() as (left, right):
        sender = stream(engine, left, **options)
        sender.start()
        sender.post(1, 1, 0, payload.ctypes.data, payload.nbytes)
        found = receive(right, payload.nbytes)
        assert events(engine, 1)[0][0] == native.EVENT_DELIVERED
        found += receive(right, sender.counters()["bytes_sent"] - payload.nbytes)
        sender.close()
    return found


@contextlib.contextmanager
def most_of_a_large_write(engine, sockets, n_threads, kept, kind):
    """Send a write of 1 MiB but for its last *kept* bytes.

    Yields the receiving stream, its memory, the payload, and what was kept, once the stream has taken what it can.
    """
    left, right = sockets
    payload = np.frombuffer(np.random.default_rng(kept).bytes(1 << 20), np.uint8)
    queue = right.dup()
    io_threads = IoThreads(n_threads, streams.default_backend)
    theirs, ours = {"checks": kind == "with checksums"}, {"checks": kind == "with checksums"}
    if kind == "sealed":
        seals = seals_of(SECRET, dialled=True), seals_of(SECRET, dialled=False)
        theirs, ours = {"seal_out": seals[0].out.address}, {"seal_in": seals[1].incoming.address}
    sent = on_the_wire(engine, payload, **theirs)
    receiver = stream(engine, right, io_threads, **ours)
    with queue, Segment(1 << 20) as slots:
        engine.add_member(1, nbytes=1 << 20, n_elements=1 << 20, unit_offset=0, kernel=1, local=[0],
                          owner=receiver.peer, partial=(0, 0, 0))
        receiver.slots.bind(1, slots.address, slots.address, 1 << 20)
        receiver.start()
        left.sendall(sent[:-kept])
        while unread(queue) >= GATHER_NBYTES:
            os.sched_yield()
        yield receiver, slots, payload, sent[-kept:]
        receiver.close()
    io_threads.close()


@pytest.mark.parametrize(("kind", "n_threads"), [("plain", 1), ("plain", 2), ("with checksums", 2), ("sealed", 2)])
@pytest.mark.parametrize("kept", [1, GATHER_NBYTES, GATHER_NBYTES + 1, 2 * GATHER_NBYTES])
def test_a_large_write_arrives_whole_although_nothing_follows_it(engine, sockets, n_threads, kept, kind):
    """The kernel gathers bytes before it wakes the thread: a thread that left too few to come would not be woken."""
    with most_of_a_large_write(engine, sockets, n_threads, kept, kind) as (receiver, slots, payload, rest):
        sockets[0].sendall(rest)
        while receiver.slots.next_round(1) == 1:  # under a lock, which tells the race detector when the bytes had come
            os.sched_yield()
        assert bytes(slots) == payload.tobytes()


def test_a_peer_that_goes_away_while_bytes_are_gathered_is_reported(engine, sockets):
    with most_of_a_large_write(engine, sockets, 2, GATHER_NBYTES + 1, "plain") as (receiver, *_):
        sockets[0].close()
        assert events(engine, 1) == [(native.EVENT_LOST, receiver.peer, 0, 0, errno.ECONNRESET, 0, 0)]


@contextlib.contextmanager
def link(engine, n_streams, nbytes, first_round=1):
    """Yield the peer's sockets, the receive queues and streams of their other ends, and the memory of slots 1 and 2.

    The streams share these slots.
    """
    io_threads = IoThreads(2, streams.default_backend)
    slots = Slots(64, epoch=EPOCH)
    memory = np.zeros((3, 2, nbytes), np.uint8)
    with contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(pair()) for _ in range(n_streams)]
        queues = [stack.enter_context(right.dup()) for _, right in pairs]
        peer = engine.add_wire_peer()
        made = [stream(engine, right, io_threads, slots, peer) for _, right in pairs]
        for slot in (1, 2):
            engine.add_member(slot, nbytes=nbytes, n_elements=nbytes, unit_offset=0, kernel=1, local=[0],
                              owner=peer, partial=(0, 0, 0))
            slots.bind(slot, memory[slot, 0].ctypes.data, memory[slot, 1].ctypes.data, nbytes, next_round=first_round)
        for each in made:
            each.start()
        yield [left for left, _ in pairs], queues, made, memory
        for each in made:
            each.close()
    io_threads.close()


def taken_in(made):
    return sum(each.counters()["writes_received"] for each in made)


@pytest.mark.parametrize("first_round", [1, (1 << 32) - 3])
@pytest.mark.parametrize("nbytes", [1, 7000, 300_000])
def test_each_round_may_come_over_another_stream(engine, nbytes, first_round):
    with link(engine, 3, nbytes, first_round) as (far, _, made, memory):
        for n in range(6):
            round_ = (first_round + n) % (1 << 32)
            far[n % 3].sendall(header(1, round_, nbytes=nbytes) + bytes([n + 1]) * nbytes)
            while taken_in(made) <= n:
                os.sched_yield()
            assert (memory[1, round_ % 2] == n + 1).all()
        assert made[0].slots.next_round(1) == (first_round + 6) % (1 << 32) and not memory[2].any()
        assert engine.events(0) == []


@pytest.mark.parametrize("bad", ["a round ahead", "the last round again", "a round that another stream receives"])
def test_what_no_stream_takes_another_one_does_not_take_either(engine, bad):
    with link(engine, 2, 1000) as (far, queues, made, memory):
        far[0].sendall(header(1, 1, nbytes=1000) + bytes([1]) * 1000 + header(2, 1, nbytes=1000) + bytes([2]) * 500)
        while taken_in(made) == 0 or unread(queues[0]):
            os.sched_yield()
        slot, round_ = {"a round ahead": (1, 3), "the last round again": (1, 1)}.get(bad, (2, 1))
        far[1].sendall(header(slot, round_, nbytes=1000) + bytes([3]) * 1000)
        assert events(engine, 1) == [(native.EVENT_LOST, made[1].peer, 0, 0, errno.EPROTO, 0, 0)]
        assert not (memory == 3).any()


def test_a_stream_whose_peer_takes_nothing_delays_no_other(engine):
    io_threads = IoThreads(2, streams.default_backend)
    with pair() as (stuck, silent), pair() as (left, right):
        blocked = stream(engine, stuck, io_threads, send_buffer_nbytes=1 << 16)
        sender, receiver = stream(engine, left, io_threads), stream(engine, right, io_threads)
        payload = np.ones(32 << 20, np.uint8)
        blocked.start()
        blocked.post(1, 1, 0, payload.ctypes.data, payload.nbytes)
        with bound(engine, sender, receiver, NBYTES) as got:
            for round_ in range(1, 20):
                sender.post(1, round_, 0, payload.ctypes.data, NBYTES)
                assert events(engine, 1)[0][:2] == (native.EVENT_DELIVERED, sender.peer)
            del got
        assert blocked.counters()["writes_pending"] == 1
        blocked.close()
        silent.close()
    io_threads.close()


#: Nobody closes the stream, whose engine only the stream keeps; the collector finds both in a cycle.
_DROPPED = """
import gc, socket
from bpsfast.pyx import ring
from bpsfast.pyx.engine import Engine
from bpsfast.pyx.pace import Pace
from bpsfast.pyx.pages import Segment
from bpsfast.pyx.tcp import IoThreads, Slots, Stream
for _ in range(20):
    board, bell = Segment(ring.BOARD_NBYTES, populate=False), Segment(ring.DOORBELL_NBYTES)
    ring.format_board(board)
    ring.format_doorbell(bell)
    engine = Engine(board, bell, n_threads=1)
    left, right = socket.socketpair()
    keep = [engine]
    stream = Stream(left.detach(), IoThreads(2), peer=engine.add_wire_peer(), engine=engine.handle,
                    arrived=engine.arrived_address, notify=engine.notify_address, slots=Slots(8, epoch=1),
                    keep=keep)
    stream.start()
    keep.append(stream)
    del engine, keep, stream, board, bell
    gc.collect()
    right.settimeout(20)
    assert right.recv(1) == b"", "the stream was not closed"
    right.close()
"""


def test_a_stream_that_is_garbage_ends_its_threads_before_its_engine_goes():
    done = subprocess.run([sys.executable, "-c", _DROPPED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (done.returncode, done.stderr)
