"""Stop signals: a call instead of a death, and only while asked for."""
from __future__ import annotations

import signal
import threading

from bpsfast.node.event_loop import stop_signals


def test_signals_are_calls_while_entered():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    seen = []
    with stop_signals(seen.append):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert seen == ["SIGTERM", "SIGINT"]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_another_thread_changes_nothing():
    before = signal.getsignal(signal.SIGTERM)
    found = []

    def enter():
        with stop_signals(found.append):
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [before]
