"""The end of a pair of ranks that exchange messages: by death, in the middle of one, and in order."""
from __future__ import annotations

import os
import select
import signal
import time

import numpy as np
import pytest

import bpsfast
from bpsfast.collectives.p2p import cross_memory, peer as peers
from tests.support.rank_messages import endpoint, receive, send


def wait_for_who_dies(with_link):
    """Rank 0 sends to, receives from, and waits for rank 1, which is killed."""
    if bpsfast.rank() == 1:
        if with_link:
            endpoint()
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
    read, pieces = cross_memory.read, []

    def and_kill(pid, source, destination, nbytes):
        if nbytes > 8:
            pieces.append(nbytes)
        if len(pieces) == 3:
            os.kill(pid, signal.SIGKILL)
            fd = os.pidfd_open(pid)
            assert select.select([fd], [], [], 20)[0]
            os.close(fd)
        return read(pid, source, destination, nbytes)

    cross_memory.read = and_kill
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
