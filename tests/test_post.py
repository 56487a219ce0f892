"""Messages between real ranks: order, sizes, bounds, ends."""
from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import bpsfast
from bpsfast.cluster import netns
from bpsfast.post import Post, peer as peers, pull
from bpsfast.post.allowance import N_ANNOUNCED, ROOM_NBYTES
from bpsfast.post.frames import EAGER_NBYTES
from bpsfast.trainer import current

SIZES = [0, 1, EAGER_NBYTES, EAGER_NBYTES + 1, 1 << 20, 50 << 20]


def post() -> Post:
    return current.current().post


def send(x, to, tag=0, channel=1):
    return post().send(channel, to, tag, x.ctypes.data, x.nbytes, x)


def receive(x, source=None, tag=None, channel=1):
    return post().receive(channel, source, tag, x.ctypes.data, x.nbytes, x)


def pattern(nbytes, seed):
    return (np.arange(nbytes, dtype=np.uint32) * 2654435761 + seed >> 7).astype(np.uint8)


# -- sizes and order -----------------------------------------------------------------------------------------------


def ring(sizes, copies=True):
    """Send to the next rank, receive from the one before."""
    if not copies:
        pull.can_read = lambda *token: False
    me, size = bpsfast.rank(), bpsfast.size()
    for nbytes in sizes:
        theirs = np.zeros(nbytes + 3, np.uint8)
        incoming = receive(theirs, (me - 1) % size, 5)
        outgoing = send(pattern(nbytes, me), (me + 1) % size, 5)
        incoming.wait(20)
        outgoing.wait(20)
        assert (incoming.source, incoming.tag, incoming.nbytes) == ((me - 1) % size, 5, nbytes)
        assert np.array_equal(theirs[:nbytes], pattern(nbytes, (me - 1) % size)) and not theirs[nbytes:].any()
    return {peer.pid > 0 for peer in post()._peers.values()}


def test_a_ring_in_shared_memory(two):
    assert two.run(ring, SIZES) == [{True}] * 2, "the sender's memory is read"


def test_a_ring_by_local_sockets(job):
    assert job(ranks=(2,)).run(ring, SIZES, False) == [{False}] * 2


def test_a_ring_over_the_network(three):
    assert three.run(ring, SIZES) == [{True, False}, {True, False}, {False}]


def to_oneself():
    for nbytes in SIZES:
        x = np.zeros(nbytes, np.uint8)
        outgoing = send(pattern(nbytes, 3), bpsfast.rank(), 4)
        assert outgoing.done() == (nbytes <= EAGER_NBYTES)
        receive(x, bpsfast.rank(), 4).wait(5)
        outgoing.wait(5)
        assert np.array_equal(x, pattern(nbytes, 3))
    waits = receive(np.zeros(3, np.uint8), None, 9)
    send(np.ones(3, np.uint8), bpsfast.rank(), 9)
    assert waits.done() and waits.source == bpsfast.rank()
    return True


def test_messages_to_oneself(two):
    assert two.run(to_oneself) == [True] * 2


def mixed_traffic(seed):
    """Messages of random sizes and tags from everybody to everybody, received in random order; each is checked."""
    me, size = bpsfast.rank(), bpsfast.size()
    order = np.random.default_rng(seed)
    plan = [(int(order.integers(size)), int(order.integers(size)), int(order.integers(3)),
             int(order.choice([0, 5, 900, 8192, 9000, 300_000]))) for _ in range(400)]
    mine = np.random.default_rng(seed + 1 + me)
    outgoing = [(to, tag, nbytes, number) for number, (source, to, tag, nbytes) in enumerate(plan) if source == me]
    incoming = [(source, tag, nbytes, number) for number, (source, to, tag, nbytes) in enumerate(plan) if to == me]
    under_way = []
    while outgoing or incoming:
        if outgoing and (not incoming or mine.random() < 0.5):
            to, tag, nbytes, number = outgoing.pop(0)
            under_way.append((send(pattern(nbytes, number), to, tag), None, None))
        else:
            keys = list({each[:2] for each in incoming})
            key = keys[mine.integers(len(keys))]
            source, tag, nbytes, number = next(each for each in incoming if each[:2] == key)
            incoming.remove((source, tag, nbytes, number))
            x = np.zeros(300_000, np.uint8)
            under_way.append((receive(x, source, tag), x, (nbytes, number)))
    for transfer, x, expected in under_way:
        transfer.wait(30)
        if expected:
            nbytes, number = expected
            assert transfer.nbytes == nbytes and np.array_equal(x[:nbytes], pattern(nbytes, number))
    return True


def test_messages_of_a_pair_do_not_overtake_each_other(three):
    for seed in range(3):
        assert three.run(mixed_traffic, seed) == [True] * 3


def any_source():
    n = 30
    if bpsfast.rank():
        for number in range(n):
            send(np.array([bpsfast.rank(), number]), 0, number % 3, channel=2).wait(10)
        return None
    seen = []
    for _ in range(2 * n):
        x = np.zeros(2, int)
        transfer = receive(x, channel=2)
        transfer.wait(10)
        assert transfer.source == x[0] and transfer.tag == x[1] % 3 and transfer.nbytes == 16
        seen.append(tuple(x))
    return seen


def test_from_anybody_in_the_order_of_each(three):
    seen = three.run(any_source)[0]
    assert all([number for rank, number in seen if rank == source] == list(range(30)) for source in (1, 2))


def any_size():
    if bpsfast.rank():
        for nbytes in SIZES:
            send(pattern(nbytes, 1), 0, 3).wait(20)
        return True
    for nbytes in SIZES:
        transfer = post().receive_any_size(1, 1, None)
        transfer.wait(20)
        assert transfer.data.dtype == np.uint8 and transfer.nbytes == nbytes
        assert np.array_equal(transfer.data, pattern(nbytes, 1))
    return True


def test_of_any_size(job):
    assert job(ranks=(2,)).run(any_size) == [True] * 2


# -- bounds --------------------------------------------------------------------------------------------------------


def unexpected(nbytes, n):
    """Rank 0 sends what nobody receives; then the last one does. What lay where."""
    if bpsfast.rank() == 0:
        transfers = [send(pattern(nbytes, number), 1, 8) for number in range(n)]
        send(np.zeros(1, np.uint8), 1, 9, channel=3).wait(10)
        sent_at_once = sum(transfer.done() for transfer in transfers)
        bpsfast.barrier()
        for transfer in transfers:
            transfer.wait(20)
        return sent_at_once, 0
    receive(np.zeros(1, np.uint8), 0, 9, channel=3).wait(10)  # what was sent before it has come before it
    lie = [each for here in post().delivery.matching._arrivals.values() for queue in here.values() for _, each in queue]
    bpsfast.barrier()
    x = np.zeros(nbytes, np.uint8)
    for number in range(n):
        receive(x, 0, 8).wait(20)
        assert np.array_equal(x, pattern(nbytes, number)), number
    return len(lie), sum(len(each.data) for each in lie if each.data is not None)


@pytest.mark.parametrize(("nbytes", "n"), [(1000, 1200), (0, N_ANNOUNCED + 500), (EAGER_NBYTES, 100), (100_000, 500)])
@pytest.mark.parametrize("ranks", [(2,), (1, 1)])
def test_what_nobody_receives_is_bounded(shared_job, ranks, nbytes, n):
    started = shared_job(ranks=ranks, transport="tcp")
    (at_once, _), (n_lying, nbytes_lying) = started.run(unexpected, nbytes, n)
    assert nbytes_lying <= ROOM_NBYTES and n_lying == n <= at_once + N_ANNOUNCED
    most = 0 if nbytes > EAGER_NBYTES else min(n, ROOM_NBYTES // (nbytes + 40))
    assert most * 3 // 4 - 1 <= at_once <= most, "a quarter may not have been given back of what was before"


def more_than_announced():
    """More messages than may be announced: the last one waits at its sender, and is received in its turn."""
    n = N_ANNOUNCED + 300
    if bpsfast.rank() == 0:
        x = pattern(EAGER_NBYTES + 1, 0)
        transfers = [send(x, 1, number) for number in range(n)]
        bpsfast.barrier()
        for transfer in transfers:
            transfer.wait(30)
        return len(transfers)
    bpsfast.barrier()
    with pytest.raises(bpsfast.StallError, match=r"rank 1 waited 0.2 s for rank 0 to send a message with tag \d+ on"):
        late = receive(np.zeros(9000, np.uint8), 0, n - 1)
        late.wait(0.2)
    assert late.cancel()
    for number in range(n):
        receive(np.zeros(9000, np.uint8), 0, number).wait(30)
    return n


def test_what_is_beyond_waits_at_the_sender(job):
    assert job(ranks=(2,)).run(more_than_announced) == [N_ANNOUNCED + 300] * 2


def too_long():
    me = bpsfast.rank()
    for nbytes in (20, EAGER_NBYTES, 100_000):
        for to_me in (False, True):
            if me == 0 or to_me:
                outgoing = send(pattern(nbytes, 1), me if to_me else 1, 6)
            if me == 1 or to_me:
                x = np.zeros(10, np.uint8)
                source = me if to_me else 0
                with pytest.raises(bpsfast.MismatchError, match=f"a message of {nbytes} bytes from rank {source} with "
                                                                f"tag 6 on channel 1 does not fit into the 10 bytes"):
                    receive(x, source, 6).wait(10)
                assert not x.any()
            if me == 0 or to_me:
                outgoing.wait(10)
    bpsfast.barrier()
    return ring([5])


def test_a_message_that_is_too_long_is_an_error_of_the_receiver(two):
    two.run(too_long)


@pytest.mark.parametrize(("arguments", "words"), [
    ((1 << 32, 0, 0, 0, 0), "channel=4294967296"), ((-1, 0, 0, 0, 0), "channel=-1"),
    ((0, 2, 0, 0, 0), "rank 2 is none of this job's ranks 0 to 1"), ((0, -1, 0, 0, 0), "rank -1"),
    ((0, 0, 1 << 63, 0, 0), "tag=9223372036854775808"), ((0, 0, 0, 0, -5), "nbytes=-5"),
])
def test_numbers_out_of_range_are_errors(two, arguments, words):
    for outcome in two.attempt(refused, arguments):
        assert outcome.error == "ConfigError" and words in outcome.text


def refused(arguments):
    post().send(*arguments, None)


# -- waiting -------------------------------------------------------------------------------------------------------


def stalls():
    if bpsfast.rank() == 0:
        bpsfast.barrier()
        return []
    texts = []
    send(np.zeros(3, np.uint8), 1, 77)
    large = send(np.zeros(100_000, np.uint8), 0, 78)
    waits = receive(np.zeros(3, np.uint8), 0, 5)
    whoever = receive(np.zeros(3, np.uint8), None, 6)
    for transfer in (large, waits, whoever):
        with pytest.raises(bpsfast.StallError) as caught:
            transfer.wait(0.3)
        texts.append(str(caught.value))
    assert waits.cancel() and whoever.cancel() and not waits.cancel() and not large.cancel()
    with pytest.raises(bpsfast.ClosedError, match="its receive was cancelled"):
        waits.wait(1)
    bpsfast.barrier()
    receive(np.zeros(3, np.uint8), 1, 77).wait(5)
    return texts


def test_a_wait_names_who_is_missing(job):
    started = job(ranks=(2,))
    large, waits, whoever = started.run(stalls)[1]
    assert "rank 1 waited 0.3 s for rank 0 to receive a message with tag 78 on channel 1 (100000 bytes)" in large
    assert "not connected to it yet; its address is looked up" in large, "rank 0 has not asked for its post"
    assert "rank 1 waited 0.3 s for rank 0 to send a message with tag 5 on channel 1 (up to 3 bytes)" in waits
    assert "for any rank to send a message with tag 6" in whoever and "rank 1 tag 77" in whoever
    started.kill()  # rank 0 was never sent tag 78's receive


def without_waiting():
    """Nobody waits for a message: the post's own thread brings it, and calls back."""
    me, other = bpsfast.rank(), 1 - bpsfast.rank()
    arrived, order = threading.Event(), []
    x = np.zeros(3 << 20, np.uint8)
    for nbytes in (10, 3 << 20):
        arrived.clear()
        incoming = receive(x, other, 2)
        incoming.on_done(lambda transfer: order.append(transfer.nbytes))
        incoming.on_done(lambda transfer: 1 / 0)
        incoming.on_done(lambda transfer: arrived.set())
        outgoing = send(pattern(nbytes, me), other, 2)
        assert arrived.wait(20) and np.array_equal(x[:nbytes], pattern(nbytes, other))
        outgoing.wait(20)
    incoming.on_done(lambda transfer: order.append("at once"))
    return order


def test_callbacks_without_a_wait(two):
    assert two.run(without_waiting) == [[10, 3 << 20, "at once"]] * 2


def wait_in_a_callback():
    other, done = 1 - bpsfast.rank(), threading.Event()
    first, second = np.zeros(1, np.uint8), np.zeros(1, np.uint8)

    def answer(transfer):
        send(first, other, 32).wait(10)
        receive(second, other, 32).wait(10)
        done.set()

    send(np.full(1, 7, np.uint8), other, 31)
    receive(first, other, 31).on_done(answer)
    assert done.wait(20)
    return int(second[0])


def test_a_callback_may_wait(two):
    assert two.run(wait_in_a_callback) == [7, 7]


def many_threads():
    """Threads that each talk to a thread of the other rank."""
    other, failures = 1 - bpsfast.rank(), []

    def talk(tag):
        x = np.zeros(20_000, np.uint8)
        try:
            for number in range(40):
                nbytes = 20_000 if number % 5 == 0 else 10
                outgoing = send(pattern(nbytes, number + tag), other, tag, channel=9)
                receive(x, other, tag, channel=9).wait(20)
                outgoing.wait(20)
                assert np.array_equal(x[:nbytes], pattern(nbytes, number + tag))
        except BaseException as exc:
            failures.append(repr(exc))

    threads = [threading.Thread(target=talk, args=(100 * tag,)) for tag in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    return failures


def test_many_threads(two):
    assert two.run(many_threads) == [[], []]


# -- ends ----------------------------------------------------------------------------------------------------------


def wait_for_who_dies(with_link):
    """Rank 0 sends to, receives from, and waits for rank 1, which is killed."""
    if bpsfast.rank() == 1:
        if with_link:
            post()
            receive(np.zeros(1, np.uint8), 0, 1).wait(20)
        bpsfast.barrier()
        return True
    if with_link:
        send(np.zeros(1, np.uint8), 1, 1).wait(20)
    transfers = [send(np.zeros(1 << 20, np.uint8), 1, 2), receive(np.zeros(1, np.uint8), 1, 3),
                 receive(np.zeros(1, np.uint8), None, 4)]
    bpsfast.barrier()
    texts = []
    for transfer in transfers:
        with pytest.raises(bpsfast.PeerLostError) as caught:
            transfer.wait(30)
        texts.append(str(caught.value))
    with pytest.raises(bpsfast.PeerLostError):
        send(np.zeros(1, np.uint8), 1, 1).wait(10)
    return texts


@pytest.mark.parametrize("with_link", [True, False])
@pytest.mark.parametrize("ranks", [(2,), (1, 1)])
def test_a_peer_that_is_killed_is_named(job, ranks, with_link):
    started = job(ranks=ranks, transport="tcp")
    started.begin(wait_for_who_dies, with_link)
    [ready] = started.outcomes(only=(1,))
    assert ready.value is True
    started.kill_rank(1)
    [outcome] = started.outcomes(only=(0,))
    assert outcome.value is not None, outcome.traceback
    assert all("rank 1" in text for text in outcome.value), outcome.value
    started.kill()


def die_while_sending():
    """Rank 1 is killed when it has sent a few pieces of a large message."""
    n = 64 << 20
    if bpsfast.rank() == 1:
        pieces, sent = [], peers.Peer.sent

        def last_words(self, frame):
            sent(self, frame)
            pieces.append(frame)
            if len(pieces) == 5:
                os.kill(os.getpid(), signal.SIGKILL)

        peers.Peer.sent = last_words
        send(np.zeros(n, np.uint8), 0, 2).wait(20)
    with pytest.raises(bpsfast.PeerLostError) as caught:
        receive(np.zeros(n, np.uint8), 1, 2).wait(20)
    return str(caught.value)


def test_a_peer_that_dies_in_the_middle_of_a_message(job):
    started = job(ranks=(1, 1), transport="tcp")
    receiver, dead = started.attempt(die_while_sending)
    assert "rank 1" in (receiver.value or ""), receiver.traceback
    assert dead.error == "died"
    started.kill()


def kill_who_is_read():
    """Rank 0 reads rank 1's memory when that is killed."""
    n = 64 << 20
    if bpsfast.rank() == 1:
        send(np.ones(n, np.uint8), 0, 2).wait(20)
    read, pieces = pull.read, []

    def and_kill(pid, source, destination, nbytes):
        if nbytes > 8:
            pieces.append(nbytes)
        if len(pieces) == 3:
            os.kill(pid, signal.SIGKILL)
            fd = os.pidfd_open(pid)
            assert select.select([fd], [], [], 20)[0]
            os.close(fd)
        return read(pid, source, destination, nbytes)

    pull.read = and_kill
    with pytest.raises(bpsfast.PeerLostError) as caught:
        receive(np.zeros(n, np.uint8), 1, 2).wait(20)
    return len(pieces), str(caught.value)


def test_a_peer_that_dies_while_its_memory_is_read(job):
    started = job(ranks=(2,))
    reader, dead = started.attempt(kill_who_is_read)
    assert reader.value is not None, reader.traceback
    assert reader.value[0] >= 3 and "rank 1" in reader.value[1] and dead.error == "died"
    started.kill()


def leave_early(asks):
    if bpsfast.rank() == 1:
        if asks:
            x = np.zeros(1, np.uint8)
            receive(x, 0, 1).wait(20)
            send(np.zeros(5, np.uint8), 0, 2).wait(20)
        bpsfast.shutdown()
        return None
    if asks:
        send(np.zeros(1, np.uint8), 1, 1).wait(20)
    begin = time.monotonic()
    with pytest.raises(bpsfast.PeerLostError) as caught:
        receive(np.zeros(1, np.uint8), 1, 3).wait(30)
    if asks:
        receive(np.zeros(5, np.uint8), 1, 2).wait(5)  # it came in time
    with pytest.raises(bpsfast.PeerLostError):
        send(np.zeros(1, np.uint8), 1, 1).wait(5)
    assert time.monotonic() - begin < 10
    return str(caught.value)


@pytest.mark.parametrize("asks", [True, False])
def test_who_has_left_is_not_waited_for(job, asks):
    started = job(ranks=(1, 1))
    text = started.run(leave_early, asks)[0]
    assert ("rank 1 has left" if asks else "rank 1 (node 1") in text and ("shutdown" in text)
    started.kill()


def shut_down_beside_a_wait():
    failures, x = [], np.zeros(1, np.uint8)

    def wait():
        try:
            receive(x, None, 1).wait(30)
        except bpsfast.BpsError as exc:
            failures.append(type(exc).__name__)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while not post()._n_open:
        os.sched_yield()
    lone = receive(x, 1 - bpsfast.rank(), 2)
    bpsfast.barrier()
    mine = post()
    bpsfast.shutdown()
    waiter.join(20)
    with pytest.raises(bpsfast.ClosedError):
        mine.send(0, 0, 0, 0, 0, None)
    assert lone.done() and isinstance(lone.error, bpsfast.BpsError)
    return failures


def test_closing_ends_waits(job):
    started = job(ranks=(2,))
    assert started.run(shut_down_beside_a_wait) == [["ClosedError"]] * 2
    started.kill()


def last_words():
    """What was sent at once arrives, though the sender leaves in the next moment."""
    n = 100
    if bpsfast.rank() == 0:
        for number in range(n):
            send(np.array([number]), 1, 3).wait(20)
        bpsfast.shutdown()
        return True
    x = np.zeros(1, int)
    for number in range(n):
        receive(x, 0, 3).wait(20)
        assert x[0] == number
    bpsfast.shutdown()
    return True


def test_last_words_arrive(job):
    for ranks in ((2,), (1, 1)):
        started = job(ranks=ranks, transport="tcp")
        assert started.run(last_words) == [True] * 2
        started.kill()


def fork_beside_messages():
    """A forked child is refused at once, and does not keep the parent's connections."""
    other = 1 - bpsfast.rank()
    pending = receive(np.zeros(1, np.uint8), other, 4)
    reader, writer = os.pipe()
    with post()._lock:
        child = os.fork()
        if child == 0:
            answers = []
            for call in (lambda: send(np.zeros(1), other), lambda: pending.wait(5), pending.cancel,
                         lambda: pending.on_done(print)):
                try:
                    answers.append(repr(call()))
                except bpsfast.ClosedError as exc:
                    answers.append(str(exc))
            sockets = sum(os.readlink(f"/proc/self/fd/{fd}").startswith("anon_inode:[eventpoll]")
                          for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}"))
            os.write(writer, "|".join([str(sockets), *answers]).encode())
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    text = os.read(reader, 1 << 16).decode()
    os.close(reader)
    send(np.zeros(1, np.uint8), other, 4).wait(10)
    pending.wait(10)
    return text.split("|")


def test_a_forked_child_has_no_post(two):
    for n_polls, *answers in two.run(fork_beside_messages):
        assert len(answers) == 4 and all("is a fork of rank" in answer for answer in answers), answers
        assert n_polls == "0"


CYCLES = """
import os, threading, gc
import numpy as np, bpsfast
from bpsfast.trainer import current
def cycle():
    bpsfast.init(heartbeat_s=0.2)
    post = current.current().post
    x, y = np.ones(100_000, np.uint8), np.zeros(100_000, np.uint8)
    transfer = post.receive(1, 0, 1, y.ctypes.data, y.nbytes, y)
    post.send(1, 0, 1, x.ctypes.data, x.nbytes, x).wait()
    transfer.wait()
    assert y.all()
    bpsfast.shutdown()
def counts():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()
cycle()
before = counts()
for _ in range(5): cycle()
assert counts() == before, (before, counts())
"""


def test_cycles_of_init_and_shutdown_leave_nothing():
    done = subprocess.run([sys.executable, "-c", CYCLES], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


ACROSS = """
import numpy as np, bpsfast
from bpsfast.trainer import current
bpsfast.init()
post, me, size = current.current().post, bpsfast.rank(), bpsfast.size()
for n in (8, 100_000, 5_000_000):
    x, y = np.full(n, me, np.uint8), np.zeros(n, np.uint8)
    transfer = post.receive(1, (me - 1) % size, 0, y.ctypes.data, n, y)
    post.send(1, (me + 1) % size, 0, x.ctypes.data, n, x).wait(20)
    transfer.wait(20)
    assert (y == (me - 1) % size).all()
kinds = sorted(peer.link.sock.family.name for peer in post._peers.values())
bpsfast.barrier()
print(f"rank {me}: {kinds}")
bpsfast.shutdown()
"""


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(netns.missing() is not None, reason=f"{netns.missing()}")
def test_across_network_namespaces(tmp_path):
    program = tmp_path / "across.py"
    program.write_text(ACROSS)
    done = subprocess.run([sys.executable, "-m", "bpsfast", "run", "-n", "3", "--nodes", "2", "--netns", "--",
                           sys.executable, str(program)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0: ['AF_INET', 'AF_UNIX']" in done.stdout and "rank 2: ['AF_INET', 'AF_INET']" in done.stdout
