"""Messages between real ranks: order, sizes, the endpoint's end."""
from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import bpsfast
from bpsfast.collectives.p2p.protocol import EAGER_NBYTES
from bpsfast.launch.namespaces import netns
from bpsfast.trainer import process
from tests.support.rank_messages import SIZES, endpoint, pattern, receive, ring, send

# -- sizes and order -----------------------------------------------------------------------------------------------


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
             int(order.choice([0, 5, 900, EAGER_NBYTES, EAGER_NBYTES + 1, 300_000]))) for _ in range(400)]
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
        transfer = endpoint().receive_any_size(1, 1, None)
        transfer.wait(20)
        assert transfer.data.dtype == np.uint8 and transfer.nbytes == nbytes
        assert np.array_equal(transfer.data, pattern(nbytes, 1))
    return True


def test_of_any_size(job):
    assert job(ranks=(2,)).run(any_size) == [True] * 2


# -- bounds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "words"), [
    ((1 << 32, 0, 0, 0, 0), "channel=4294967296"), ((-1, 0, 0, 0, 0), "channel=-1"),
    ((0, 2, 0, 0, 0), "rank 2 is none of this job's ranks 0 to 1"), ((0, -1, 0, 0, 0), "rank -1"),
    ((0, 0, 1 << 63, 0, 0), "tag=9223372036854775808"), ((0, 0, 0, 0, -5), "nbytes=-5"),
])
def test_numbers_out_of_range_are_errors(two, arguments, words):
    for outcome in two.attempt(refused, arguments):
        assert outcome.error == "ConfigError" and words in outcome.text


def refused(arguments):
    endpoint().send(*arguments, None)


# -- ends ----------------------------------------------------------------------------------------------------------


def shut_down_beside_a_wait():
    failures, x = [], np.zeros(1, np.uint8)

    def wait():
        try:
            receive(x, None, 1).wait(30)
        except bpsfast.BpsError as exc:
            failures.append(type(exc).__name__)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while not endpoint()._n_open:
        os.sched_yield()
    lone = receive(x, 1 - bpsfast.rank(), 2)
    bpsfast.barrier()
    mine = endpoint()
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


def fork_beside_messages():
    """A forked child is refused at once, and does not keep the parent's connections."""
    other = 1 - bpsfast.rank()
    pending = receive(np.zeros(1, np.uint8), other, 4)
    reader, writer = os.pipe()
    with endpoint()._lock:
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
    process.current().barrier()  # the message ends `pending`, which the other rank's child must find under way
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
from bpsfast.collectives.p2p import P2PEndpoint
from bpsfast.trainer import process
def cycle():
    bpsfast.init(heartbeat_s=0.2)
    endpoint = process.current().extension(P2PEndpoint)
    x, y = np.ones(100_000, np.uint8), np.zeros(100_000, np.uint8)
    transfer = endpoint.receive(1, 0, 1, y.ctypes.data, y.nbytes, y)
    endpoint.send(1, 0, 1, x.ctypes.data, x.nbytes, x).wait()
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
from bpsfast.collectives.p2p import P2PEndpoint
from bpsfast.trainer import process
bpsfast.init()
endpoint, me, size = process.current().extension(P2PEndpoint), bpsfast.rank(), bpsfast.size()
for n in (8, 100_000, 5_000_000):
    x, y = np.full(n, me, np.uint8), np.zeros(n, np.uint8)
    transfer = endpoint.receive(1, (me - 1) % size, 0, y.ctypes.data, n, y)
    endpoint.send(1, (me + 1) % size, 0, x.ctypes.data, n, x).wait(20)
    transfer.wait(20)
    assert (y == (me - 1) % size).all()
kinds = sorted(peer.link.sock.family.name for peer in endpoint._peers.values())
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
