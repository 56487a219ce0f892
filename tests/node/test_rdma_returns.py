"""`RdmaReturns`: it repeats failed attempts, keeps a link until it is taken, and closes links that are not wanted."""
from __future__ import annotations

import queue
import threading

import pytest

from bpsfast.node.transport.rdma import NoRdmaError, returns
from bpsfast.node.transport.rdma.returns import RdmaReturns

WAIT_S = 20.0
RAILS = {"mlx5_0/1": "mlx5_0/1", "mlx5_1/1": "mlx5_2/1"}


class Link:
    """What `RdmaReturns` knows of a link."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.rails = RAILS
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


class Node:
    """The returns of one node, whose attempts end as the test says."""

    def __init__(self) -> None:
        self.answers: queue.Queue[Link | Exception] = queue.Queue()
        self.asked: queue.Queue[tuple[int, dict[str, str], int]] = queue.Queue()
        self.news: queue.Queue[None] = queue.Queue()
        self.returns = RdmaReturns(self._dial, lambda: self.news.put(None))

    def _dial(self, index: int, rails: dict[str, str], least_rails: int) -> Link:
        self.asked.put((index, rails, least_rails))
        answer = self.answers.get(timeout=WAIT_S)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def node(no_leaks, monkeypatch):
    monkeypatch.setattr(returns, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(returns, "URGENT_PAUSE_S", 0.01)
    made = Node()
    yield made
    made.answers.put(NoRdmaError("the end"))
    made.returns.close()


@pytest.mark.parametrize("is_urgent", [True, False])
def test_a_link_is_tried_until_it_is_made_and_kept_until_it_is_taken(is_urgent, node):
    node.returns.seek(0, RAILS, 2, dials=True, pause_s=0.01, is_urgent=is_urgent)
    assert node.returns.wanted(0) == (RAILS, 2) and node.returns.wanted(1) is None
    link = Link(0)
    for answer in (NoRdmaError("the port is DOWN"), ValueError("the device is closed"), link):
        assert node.asked.get(timeout=WAIT_S) == (0, RAILS, 2)
        node.answers.put(answer)
    node.news.get(timeout=WAIT_S)
    assert node.returns.links() == [link] and node.returns.wanted(0) is None and node.returns.seeks(0)
    assert node.returns.take(0) is link and node.returns.take(0) is None
    assert not node.returns.links() and not node.returns.seeks() and not link.closed.is_set()


def test_a_peer_that_does_not_answer_keeps_no_other_waiting(node):
    for index in (0, 1):
        node.returns.seek(index, RAILS, 1, dials=True, pause_s=0.01)
    asked = {node.asked.get(timeout=WAIT_S)[0] for _ in range(2)}  # both at once: there is no answer yet
    assert asked == {0, 1}
    node.answers.put(link := Link(0))  # of either
    node.news.get(timeout=WAIT_S)
    assert node.returns.links() == [link]
    node.answers.put(NoRdmaError("node 1 does not answer"))


def test_few_threads_dial_many_peers_and_end_with_the_last_one(no_leaks, monkeypatch):
    monkeypatch.setattr(returns, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(returns, "URGENT_PAUSE_S", 0.001)
    monkeypatch.setattr(returns, "_MOST_THREADS", 3)
    n_peers, lock, dialled, most = 20, threading.Lock(), [], []

    def dial(index, rails, least_rails):
        with lock:
            dialled.append(index)
            most.append(sum(each.name == "bpsfast-rdma-return" for each in threading.enumerate()))
            if dialled.count(index) == 1:
                raise NoRdmaError("the port is DOWN")
        return Link(index)

    news = queue.Queue()
    tried = RdmaReturns(dial, lambda: news.put(None))
    for index in range(n_peers):
        tried.seek(index, RAILS, 1, dials=True, pause_s=0.001)
    for _ in range(n_peers):
        news.get(timeout=WAIT_S)
    assert sorted(dialled) == sorted([*range(n_peers)] * 2) and max(most) <= 3
    for index in range(n_peers):
        assert tried.take(index).index == index
    tried.close()
    assert not any(thread.is_alive() for thread in tried._threads)


def test_a_peer_that_nothing_else_connects_is_dialled_before_others(no_leaks, monkeypatch):
    monkeypatch.setattr(returns, "_MOST_IN_BACKGROUND", 1)
    begun, end, news = queue.Queue(), threading.Event(), queue.Queue()

    def dial(index, rails, least_rails):
        begun.put(index)
        if index == 0:
            assert end.wait(WAIT_S)
        return Link(index)

    tried = RdmaReturns(dial, lambda: news.put(None))
    tried.seek(0, RAILS, 1, dials=True, pause_s=0.0)
    assert begun.get(timeout=WAIT_S) == 0
    tried.seek(1, RAILS, 1, dials=True, pause_s=0.0)  # has to wait: one attempt in the background is under way
    tried.seek(2, RAILS, 1, dials=True, is_urgent=True)
    assert begun.get(timeout=WAIT_S) == 2
    news.get(timeout=WAIT_S)
    assert begun.empty() and [link.index for link in tried.links()] == [2]
    end.set()
    assert begun.get(timeout=WAIT_S) == 1
    for _ in range(2):
        news.get(timeout=WAIT_S)
    for index in range(3):
        assert tried.take(index).index == index
    tried.close()


def test_a_thread_that_cannot_start_is_logged_and_another_one_dials(node, monkeypatch, caplog):
    start = threading.Thread.start

    def fail(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    node.returns.seek(0, RAILS, 1, dials=True, pause_s=0.0)
    assert "no thread to make an RDMA link to node 0 again: can't start new thread; it is tried" in caplog.text
    monkeypatch.setattr(threading.Thread, "start", start)
    node.returns.seek(1, RAILS, 1, dials=True, pause_s=0.0)
    for _ in range(2):
        node.answers.put(Link(node.asked.get(timeout=WAIT_S)[0]))
        node.news.get(timeout=WAIT_S)
    assert sorted(link.index for link in node.returns.links()) == [0, 1]


def test_a_link_that_ends_before_it_is_taken_is_sought_again(node):
    node.returns.seek(0, RAILS, 1, dials=True, pause_s=0.01)
    first, second = Link(0), Link(0)
    for link in (first, second):
        node.asked.get(timeout=WAIT_S)
        node.answers.put(link)
        node.news.get(timeout=WAIT_S)
        if link is first:
            node.returns.drop(0)
            assert link.closed.is_set()
    assert node.returns.take(0) is second


def test_what_is_not_wanted_is_closed(node):
    late = Link(1)
    node.returns.offer(1, late)
    assert late.closed.is_set()
    node.returns.seek(1, RAILS, 1, dials=False)  # the other node dials
    kept, double = Link(1), Link(1)
    node.returns.offer(1, kept)
    node.returns.offer(1, double)
    assert double.closed.is_set() and node.returns.links() == [kept]
    node.returns.seek(1, RAILS, 2, dials=False)
    assert kept.closed.is_set() and not node.returns.links()
    poor = Link(1)
    poor.rails = {"mlx5_0/1": "mlx5_0/1"}
    node.returns.offer(1, poor)  # of an attempt before
    assert poor.closed.is_set()
    node.returns.offer(1, last := Link(1))
    node.returns.close()
    assert last.closed.is_set()
    node.returns.seek(1, RAILS, 1, dials=True)  # comes too late
    assert node.asked.empty()
