"""`Peering` at the start of a job: it dials many peers in few threads, and notifies the control loop once."""
from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from bpsfast.node.transport import peering
from bpsfast.node.transport.peering import Peering
from bpsfast.orchestration.errors import ConfigError

WAIT_S = 20.0
N_PEERS = 30


@pytest.fixture
def dialler(monkeypatch):
    """A `Peering` of node N_PEERS, without sockets, whose `_dial` the test replaces."""
    monkeypatch.setattr(peering, "_DIAL_PATIENCE_S", 0.005)
    made = Peering.__new__(Peering)
    made.error = None
    made._me = SimpleNamespace(index=N_PEERS)
    made._peers = {index: SimpleNamespace(index=index) for index in range(N_PEERS + 3) if index != N_PEERS}
    made._gathered = threading.Condition()
    made._notify = lambda: None
    return made


def test_peers_of_lower_index_are_dialled_once_each(dialler, no_leaks):
    dialled, threads = [], set()

    def dial(peer):
        dialled.append(peer.index)
        threads.add(threading.current_thread())

    dialler._dial = dial
    dialler._dial_all()
    assert sorted(dialled) == list(range(N_PEERS)) and len(threads) < N_PEERS and dialler.error is None


def test_peers_that_take_long_keep_no_other_waiting(dialler, no_leaks):
    left, lock, others_are_done = set(range(10, N_PEERS)), threading.Lock(), threading.Event()

    def dial(peer):
        if peer.index < 10:  # more than dial at first
            assert others_are_done.wait(WAIT_S)
            return
        with lock:
            left.discard(peer.index)
            if not left:
                others_are_done.set()

    dialler._dial = dial
    dialler._dial_all()
    assert not left and dialler.error is None


def test_an_error_is_kept_and_the_others_are_dialled_nevertheless(dialler, no_leaks):
    dialled = []

    def dial(peer):
        dialled.append(peer.index)
        if peer.index == 3:
            raise ConfigError("node 3 cannot be reached")
        if peer.index == 4:
            raise OSError("no descriptor is left")

    dialler._dial = dial
    dialler._dial_all()
    assert len(dialled) == N_PEERS
    assert "node 3 cannot be reached" in str(dialler.error) or "no descriptor is left" in str(dialler.error)


def test_the_control_loop_is_notified_once_all_peers_of_the_start_are_connected(dialler):
    notified = []
    dialler._notify = lambda: notified.append(len(dialler.links))
    dialler._lock, dialler._closed = threading.RLock(), False
    dialler._gathered = threading.Condition(dialler._lock)
    dialler.links, dialler.reasons, dialler._first = {}, {}, frozenset(range(5))
    for index in (0, 1, 2, 20, 3, 4):  # node 20 has joined late
        dialler.offer(SimpleNamespace(index=index), "a reason")
    assert notified == [4, 6]
