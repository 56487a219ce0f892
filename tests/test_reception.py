"""The reception: whoever is not let in leaves nothing behind."""
from __future__ import annotations

import contextlib
import os

import pytest

from bpsfast import channel
from bpsfast.node.event_loop import EventLoop
from bpsfast.node.reception import Reception, bind
from bpsfast.orchestration import security
from bpsfast.orchestration.messages import VERSION, Refuse
from bpsfast.pyx import ring
from bpsfast.pyx.pages import Segment
from bpsfast.transport import shm

KEY = bytes(range(16))


@pytest.fixture
def doorstep(no_leaks):
    with Segment(ring.DOORBELL_NBYTES) as doorbell, contextlib.closing(shm.Doorstep(doorbell)) as made:
        ring.format_doorbell(doorbell)
        yield made


@pytest.fixture
def reception(doorstep):
    """Node 0's, on a loop that the test turns."""
    listener = bind(KEY, f"test-{os.getpid()}")
    assert listener is not None
    guests = []
    with contextlib.closing(EventLoop(guests.append)) as loop:
        with contextlib.closing(Reception(loop, listener, KEY, guests.append, guests.append, guests.append)) as made:
            made.know(0, 1, doorstep)
            yield made, loop
    assert guests == [], "nobody was let in, and nothing failed"


def test_a_node_whose_descriptors_cannot_be_mapped_is_refused_and_they_are_closed(reception, doorstep):
    door, loop = reception
    reader, writer = os.pipe()
    pid = os.getpid()
    hello = shm.PeerHello(version=VERSION, source=1, target=0, epoch=1, pid=pid,
                          proof=security.prove(KEY, *shm._hello(1, 0, 1, pid)))
    with channel.connect(door.name, 20, shm.decode) as link, open(reader, "rb"), open(writer, "wb"):
        link.send(hello)
        answer, fds = turn(loop, link)
        assert isinstance(answer, shm.PeerWelcome)
        link.send(shm.PeerLane(), [fds[0], reader, doorstep.pidfd])
        for fd in fds:
            os.close(fd)
        answer, _ = turn(loop, link)
        assert isinstance(answer, Refuse) and "node 1 passed a descriptor that cannot be mapped" in answer.reason


def turn(loop, link):
    """Turn *loop* until *link* has an answer; the suite's deadline ends what never comes."""
    while not (answers := link.recv_nowait()):
        loop.run_once(0.05)
    return answers[0]
