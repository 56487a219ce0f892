"""One message, for its owner: waits, callbacks, receives that do not fit."""
from __future__ import annotations

import threading

import numpy as np
import pytest

import bpsfast
from bpsfast.collectives.p2p.protocol import EAGER_NBYTES
from tests.support.rank_messages import pattern, receive, ring, send


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
    assert "not connected to it yet; it has not sent or received anything yet" in large
    assert "rank 1 waited 0.3 s for rank 0 to send a message with tag 5 on channel 1 (up to 3 bytes)" in waits
    assert "for any rank to send a message with tag 6" in whoever and "rank 1 tag 77" in whoever
    started.kill()  # rank 0 was never sent tag 78's receive


def much_later():
    """Rank 1 exchanges messages for the first time when a lookup in rank 0's name would long be over."""
    me, x = bpsfast.rank(), np.zeros(100_000, np.uint8)
    if me == 0:
        transfer = send(pattern(100_000, 0), 1, 3)
        with pytest.raises(bpsfast.StallError, match="has not sent or received anything yet"):
            transfer.wait(3.0)
        bpsfast.barrier(timeout_s=30)
        transfer.wait(20)
    else:
        bpsfast.barrier(timeout_s=30)
        receive(x, 0, 3).wait(20)
        assert np.array_equal(x, pattern(100_000, 0))


def test_who_is_late_for_his_first_message_is_waited_for_as_long_as_anybody_waits(job):
    job(ranks=(2,), timeout_s=1).run(much_later)


def without_waiting():
    """Nobody waits for a message: the endpoint's own thread brings it, and calls back."""
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
