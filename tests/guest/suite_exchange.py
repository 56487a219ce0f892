"""The exchange over queue pairs: each switch moves the same bytes, and what goes wrong ends the step in words.

Runs in the guest: a worker on rxe0 and a service on rxe1, in one process. Two hosts: `suite_ladder.py`.
"""
from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bpsfast.bench.paper.ladder import exchange
from bpsfast.bench.paper.ladder.exchange import WriteExchange
from bpsfast.pyx import verbs
from bpsfast.pyx.pages import Segment
from tests.guest.hosts import DEVICES, GID_INDEX

SIZES = [4, 65536, 100, 4096, 20004]
STRIDE = 1 << 17
SWITCHES = [0, exchange.REGISTER, exchange.RENDEZVOUS, exchange.COPY, exchange.TWO_SGES, exchange.HALF_DUPLEX,
            exchange.REGISTER | exchange.RENDEZVOUS | exchange.COPY | exchange.TWO_SGES | exchange.HALF_DUPLEX]


class End:
    """One device, one queue pair, and memory: sources, results and stages, `STRIDE` bytes for each partition."""

    def __init__(self, name: str, is_service: bool, switches: int) -> None:
        n = len(SIZES)
        self.is_service, self.copies = is_service, bool(switches & exchange.COPY)
        self.device = verbs.Device(name)
        self.domain = verbs.ProtectionDomain(self.device)
        self.queue = verbs.CompletionQueue(self.device, 8 + exchange.receives(n), events=True)
        self.pair = verbs.QueuePair(self.domain, self.queue, self.queue, max_send=4, max_recv=exchange.receives(n),
                                    max_send_sge=2)
        self.pair.to_init(1)
        self.memory = Segment(3 * n * STRIDE, huge=False)
        self.messages = Segment(exchange.messages_nbytes(n), huge=False)
        self.region = verbs.MemoryRegion(self.domain, self.memory)
        self.message_region = verbs.MemoryRegion(self.domain, self.messages)
        self.exchange = WriteExchange(self.queue.handle, switches=switches, keep=self.queue)
        self.bytes = np.frombuffer(self.memory, np.uint8)

    def at(self, area: int, i: int) -> int:
        return (area * len(SIZES) + i) * STRIDE

    def place(self, area: int, i: int) -> int:
        return self.region.address + self.at(area, i)

    def connect(self, other: End, rkey: int | None = None) -> None:
        self.pair.to_rtr(other.pair.number, other.pair.psn, gid=other.device.gid(1, GID_INDEX), gid_index=GID_INDEX,
                         mtu=1024)
        self.pair.to_rts(timeout=18, retry_count=3)
        source = 1 if self.is_service else 0  # a service sends back what it got
        landing = 2 if self.copies else 1
        self.exchange.add_end(self.pair.handle, [
            (self.place(source, i), self.place(2, i) if self.copies else 0, other.place(landing, i),
             self.place(landing, i), self.place(1, i) if self.copies else 0, nbytes, self.region.lkey,
             other.region.rkey if rkey is None else rkey, self.region.rkey) for i, nbytes in enumerate(SIZES)],
            is_service=self.is_service, max_send=4, messages=self.message_region.address,
            messages_lkey=self.message_region.lkey)

    def close(self) -> None:
        del self.bytes
        self.pair.close()
        self.exchange.close()
        for each in (self.region, self.message_region, self.memory, self.messages, self.queue, self.domain,
                     self.device):
            each.close()


@pytest.fixture
def make():
    made = []

    def both(switches: int = 0) -> list[End]:
        made.extend(End(name, i == 1, switches) for i, name in enumerate(DEVICES))
        return made

    yield both
    for end in made:
        end.close()


@pytest.mark.parametrize("switches", SWITCHES)
def test_all_bytes_go_and_come_back_and_nothing_beside_them(make, switches):
    worker, service = make(switches)
    worker.connect(service)
    service.connect(worker)
    rng = np.random.default_rng(switches)
    for i, nbytes in enumerate(SIZES):
        worker.bytes[worker.at(0, i):][:nbytes] = rng.integers(1, 255, nbytes)
    with ThreadPoolExecutor(1) as executor:
        serving = executor.submit(service.exchange.run, 3, 30.0)
        assert len(worker.exchange.run(3, 30.0)) == len(serving.result(30)) == 3
    for i, nbytes in enumerate(SIZES):
        expected = worker.bytes[worker.at(0, i):][:nbytes]
        for end in (worker, service):
            found = end.bytes[end.at(1, i):][:STRIDE]
            assert (found[:nbytes] == expected).all() and not found[nbytes:].any()
    n = 3 * len(SIZES)
    assert worker.exchange.counters() == {
        "writes": n, "sges": n * (2 if switches & exchange.TWO_SGES else 1),
        "requests": n if switches & exchange.RENDEZVOUS else 0,
        "registrations": n if switches & exchange.REGISTER else 0, "copies": 2 * n if switches & exchange.COPY else 0}


def test_a_wrong_key_ends_both_ends_in_words(make):
    worker, service = make()
    worker.connect(service, rkey=service.region.rkey ^ 0xffff00)
    service.connect(worker)
    with pytest.raises(OSError, match="worker with 5 partitions a step") as caught:
        worker.exchange.run(1, 30.0)
    assert caught.value.errno == errno.EIO
    status, _, end, kind, part = worker.exchange.failure
    assert (status, end, kind, part) == (10, 0, "write", 0)
    assert not service.bytes.any()


def test_a_service_that_does_not_run_ends_the_step_in_time(make):
    worker, service = make()
    worker.connect(service)
    service.connect(worker)
    with pytest.raises(OSError, match="0 arrived, 5 sent") as caught:
        worker.exchange.run(1, 0.5)
    assert caught.value.errno == errno.ETIMEDOUT
    assert worker.exchange.failure is None


def test_what_is_closed_does_not_run(make):
    worker, _ = make()
    worker.exchange.close()
    worker.exchange.close()
    with pytest.raises(ValueError, match="closed"):
        worker.exchange.run(1)
    with pytest.raises(ValueError, match="closed"):
        worker.exchange.add_end(worker.pair.handle, [], is_service=False, max_send=1, messages=0, messages_lkey=0)
