"""Tests a descriptor that wakes the thread that polls it."""
from __future__ import annotations

import os
import select
import threading

from bpsfast.orchestration.wake_up import WakeUp


def is_readable(wake, timeout_s=0.0):
    return bool(select.select([wake], [], [], timeout_s)[0])


def test_rings_of_any_thread_wake_once():
    wake = WakeUp()
    assert not is_readable(wake)
    ringers = [threading.Thread(target=wake.ring) for _ in range(3)]
    for ringer in ringers:
        ringer.start()
    assert is_readable(wake, timeout_s=10)
    for ringer in ringers:
        ringer.join(10)
    wake.clear()
    assert not is_readable(wake)
    wake.clear()
    wake.ring()
    assert is_readable(wake)
    wake.close()


def test_who_rings_late_rings_at_nobody_elses_descriptor():
    wake = WakeUp()
    number = wake.fileno()
    wake.close()
    wake.close()
    assert wake.fileno() == -1
    other = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        assert other == number, "the lowest free number"
        wake.ring()
        assert not select.select([other], [], [], 0)[0]
    finally:
        os.close(other)
