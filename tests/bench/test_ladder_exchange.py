"""The exchange over sockets: all bytes, with any split by the kernel; peers that close or are silent cause errors.

`tests/guest/suite_exchange.py` tests it over queue pairs.
"""
from __future__ import annotations

import errno
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bpsfast.bench.paper.ladder import exchange
from bpsfast.bench.paper.ladder.exchange import StreamExchange

SIZES = [4, 1 << 20, 12, 4096, 3_000_004]


class End:
    """One end, with separate memory for each partition."""

    def __init__(self, sock: socket.socket, is_service: bool, sizes=SIZES) -> None:
        self.socket = sock
        self.exchange = StreamExchange()
        self.sources = [np.arange(nbytes // 4, dtype=np.uint32) + nbytes for nbytes in sizes]
        self.results = [np.zeros(nbytes // 4, np.uint32) for nbytes in sizes]
        sources = self.results if is_service else self.sources  # a service sends its input back
        self.exchange.add_end(sock.fileno(), [(source.ctypes.data, result.ctypes.data, result.nbytes)
                                              for source, result in zip(sources, self.results)], is_service=is_service)

    def is_right(self) -> bool:
        return all((a == b).all() for a, b in zip(self.sources, self.results))

    def close(self) -> None:
        self.exchange.close()
        self.socket.close()


@pytest.fixture
def ends():
    left, right = socket.socketpair()
    made = [End(left, False), End(right, True)]
    yield made
    for end in made:
        end.close()


def test_all_bytes_go_and_come_back_step_after_step(ends):
    worker, service = ends
    with ThreadPoolExecutor(1) as executor:
        serving = executor.submit(service.exchange.run, 5, 20.0)
        samples = worker.exchange.run(5, 20.0)
        assert len(samples) == len(serving.result(20)) == 5
    assert worker.is_right() and service.is_right()


def test_several_ends_share_one_loop():
    pairs = [socket.socketpair() for _ in range(2)]
    workers, services = [End(a, False) for a, _ in pairs], [End(b, True) for _, b in pairs]
    loop = StreamExchange()
    for end, is_service in [(each, False) for each in workers] + [(each, True) for each in services]:
        sources = end.results if is_service else end.sources
        loop.add_end(end.socket.fileno(), [(source.ctypes.data, result.ctypes.data, result.nbytes)
                                           for source, result in zip(sources, end.results)], is_service=is_service)
    assert len(loop.run(3, 20.0)) == 3
    assert all(end.is_right() for end in (*workers, *services))
    loop.close()
    for end in (*workers, *services):
        end.close()


def test_a_peer_that_closes_ends_the_step_in_words(ends):
    worker, service = ends
    service.socket.close()
    with pytest.raises(OSError, match="worker with 5 partitions a step: 0 arrived") as caught:
        worker.exchange.run(1, 20.0)
    assert caught.value.errno in (errno.ECONNRESET, errno.EPIPE)


def test_a_peer_that_says_nothing_ends_the_step_in_time(ends):
    worker, _ = ends
    with pytest.raises(OSError, match="0 arrived") as caught:
        worker.exchange.run(1, 0.2)
    assert caught.value.errno == errno.ETIMEDOUT


@pytest.mark.parametrize("header", [(7, 4), (0, 8)], ids=["no such partition", "wrong length"])
def test_what_is_no_partition_is_refused(ends, header):
    worker, service = ends
    service.socket.send(struct.pack("=II", *header))
    with pytest.raises(OSError) as caught:
        worker.exchange.run(1, 20.0)
    assert caught.value.errno == errno.EPROTO
    assert not worker.results[0].any()


def test_an_end_has_partitions(ends):
    with pytest.raises(ValueError, match="one partition at least"):
        ends[0].exchange.add_end(0, [], is_service=False)


def test_sizes_for_messages_follow_from_the_partitions():
    assert exchange.receives(10) == 30
    assert exchange.messages_nbytes(10) == 640
