"""What suites of streams share: one device with all that a stream needs, and two of them connected."""
from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from bpsfast.pyx import ring, verbs
from bpsfast.pyx.engine import Engine
from bpsfast.pyx.pages import Segment
from bpsfast.pyx.rdma import Rail, Stream

EPOCH = 5
NBYTES = 1 << 16
N_SLOTS = 64
MAX_SEND = 8
MAX_RECEIVE = 16


class Side:
    """One device with a rail, a queue pair and its stream, an engine as the stream's mailbox, and registered memory."""

    def __init__(self, name: str, *, n_slots: int = N_SLOTS, max_receive: int = MAX_RECEIVE, **options: Any) -> None:
        self.signal_every = options.get("signal_every", 1)
        self.device = verbs.Device(name)
        self.domain = verbs.ProtectionDomain(self.device)
        self.queue = verbs.CompletionQueue(self.device, MAX_SEND + max_receive, events=True)
        self.pair = verbs.QueuePair(self.domain, self.queue, self.queue, max_send=MAX_SEND, max_recv=max_receive,
                                    max_inline=options.get("inline_nbytes", 0))
        self.pair.to_init(1)
        self.rail = Rail(self.queue.handle, keep=self.queue)
        self.stream = Stream(self.rail, self.pair.handle, epoch=EPOCH, n_slots=n_slots, max_send=MAX_SEND,
                             max_receive=max_receive, trace_capacity=100, keep=self.pair, **options)
        self.board, self.bell = Segment(ring.BOARD_NBYTES, populate=False), Segment(ring.DOORBELL_NBYTES)
        ring.format_board(self.board)
        ring.format_doorbell(self.bell)
        self.engine = Engine(self.board, self.bell, n_threads=1)
        self.source = self.engine.add_wire_peer()
        self.memory = Segment(4 * NBYTES, huge=False)
        self.region = verbs.MemoryRegion(self.domain, self.memory)
        self.rail.know(self.region.address, self.region.nbytes, self.region.lkey)
        self.bytes = np.frombuffer(self.memory, np.uint8)

    def connect(self, number: int, psn: int, gid: bytes, rnr_retry: int = 0, timeout: int = 14) -> None:
        self.pair.to_rtr(number, psn, gid=gid, gid_index=1, mtu=1024)
        # 67 ms: an emulated peer beside other work may take many times what a card takes to acknowledge.
        self.pair.to_rts(timeout=timeout, retry_count=3, rnr_retry=rnr_retry)

    @property
    def place(self) -> tuple[int, int, bytes]:
        return self.pair.number, self.pair.psn, self.device.gid(1, 1)

    def start(self) -> None:
        self.stream.start(peer=self.source, engine=self.engine.handle, arrived=self.engine.arrived_address,
                        notify=self.engine.notify_address, keep=self.engine)

    def expect(self, slot: int, even: int, odd: int, nbytes: int = NBYTES, framed: bool = False) -> None:
        """Bind a slot at two offsets of the memory; the engine takes what arrives for a result."""
        self.engine.add_member(slot, nbytes=nbytes, n_elements=nbytes, unit_offset=0, kernel=1, local=[self.source],
                               owner=self.source, partial=(0, 0, 0))
        self.stream.bind(slot, self.region.address + even, self.region.address + odd, nbytes, framed)

    def events(self, n: int) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        while len(found) < n:
            batch = self.engine.events(20)
            assert batch, f"only {len(found)} of {n} events came, the last ones {found[-3:]}"
            found += batch
        return found

    def close(self) -> None:
        del self.bytes
        self.stream.close()
        self.pair.close()
        self.rail.close()
        self.region.close()
        self.queue.close()
        self.domain.close()
        self.device.close()
        self.engine.close()
        self.engine = None
        for segment in (self.memory, self.board, self.bell):
            segment.close()


@contextlib.contextmanager
def connected(rnr_retry: int = 0, timeout: int = 14, **options: int) -> Iterator[list[Side]]:
    """Yield two sides whose queue pairs are connected, their streams made with *options*; close them afterwards."""
    made = [Side(name, **options) for name in ("rxe0", "rxe1")]
    left, right = made
    left.connect(*right.place, rnr_retry=rnr_retry, timeout=timeout)
    right.connect(*left.place, rnr_retry=rnr_retry, timeout=timeout)
    yield made
    for side in made:
        side.close()


def prove(sides: list[Side], start: bool = True) -> list[Side]:
    """Let both sides write to each other, and *start* them; return them."""
    left, right = sides
    with ThreadPoolExecutor(1) as executor:
        other = executor.submit(right.stream.prove, 20)
        assert left.stream.prove(20) and other.result()
    for side in sides if start else ():
        side.start()
    return sides


def aim(sender: Side, receiver: Side, slot: int, even: int, odd: int, nbytes: int = NBYTES, framed: bool = False
        ) -> None:
    base = receiver.region.address
    sender.stream.aim(slot, base + even, base + odd, nbytes, receiver.region.rkey, framed)


def wait_for(read, value):
    while read() != value:
        os.sched_yield()
