"""The end of one queue pair, asked for by two threads: an abort fences from one while the node closes from another.

And what a link that was fenced says is to come.
"""
from __future__ import annotations

import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from bpsfast.node.transport.rdma.link import RailPath, RdmaLink, turns_of
from bpsfast.orchestration.errors import CapacityError


class Pair:
    """A queue pair whose end takes until a second thread is about to end it too, or half a second."""

    def __init__(self) -> None:
        self.closed = False
        self.n_closes = 0
        self._both = threading.Barrier(2)

    def close(self) -> None:
        self.n_closes += 1
        try:
            self._both.wait(0.5)
        except threading.BrokenBarrierError:
            pass  # nobody else came, as it should be
        self.closed = True


def test_two_threads_close_once_and_both_return_when_it_is_done():
    left = []
    pair = Pair()
    rail = SimpleNamespace(leave=lambda: left.append(pair.closed))
    path = RailPath(SimpleNamespace(rail=rail), pair, SimpleNamespace(close=lambda: None))

    def close() -> bool:
        path.close()
        return pair.closed

    with ThreadPoolExecutor(2) as executor:
        assert [done.result(20) for done in [executor.submit(close) for _ in range(2)]] == [True, True]
    assert pair.n_closes == 1 and left == [True]
    path.close()
    assert pair.n_closes == 1 and left == [True]


def test_what_is_bound_after_the_end_is_awaited_from_its_first_round_on():
    """An owner takes over in the middle of a job while a pair is on its way from RDMA to TCP."""
    link = RdmaLink(1, n_nodes=2, paths=(), channel=None)
    link.fence()
    link.bind(4, 0, 64, 64, first_round=7)
    link.bind(5, 128, 192, 64)
    assert link.awaited() == {4: 7, 5: 1}
    link.unbind(4)
    assert link.awaited() == {5: 1}


def test_what_a_queue_pair_refuses_is_told_with_partition_and_peer():
    def bind(*_):
        raise OSError(errno.ENOMEM, "ibv_post_recv for slot 7: Cannot allocate memory")

    rail = SimpleNamespace(name="mlx5_0/1", port={"max_msg_sz": 1 << 30})
    link = RdmaLink(3, n_nodes=2, paths=[SimpleNamespace(rail=rail, stream=SimpleNamespace(bind=bind))], channel=None)
    with pytest.raises(CapacityError, match="partition 7 cannot be expected from node 3 over mlx5_0/1: ibv_post_recv"):
        link.bind(7, 64, 128, 64)


@pytest.mark.parametrize(("rates", "turns"), [
    ([], []), ([100.0], [0]), ([100.0, 100.0], [0, 1]), ([0.0, 400.0, 100.0], [0, 1, 2]),
    ([100.0, 200.0], [1, 0, 1]), ([200.0, 25.0], [0, 0, 0, 0, 1, 0, 0, 0, 0]),
    ([100.0, 150.0], [1, 0, 1, 0, 1]), ([100.0, 101.0], [0, 1]), ([101.0, 100.0], [0, 1]),
])
def test_rails_take_turns_by_their_rates(rates, turns):
    assert turns_of(rates) == turns
