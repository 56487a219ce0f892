"""A copier: one thread, which ends with the session, and tells whoever waits why."""
from __future__ import annotations

import contextlib
import threading
import time

import pytest

from bpsfast.gpu.copies import CopyThread, DeviceCopy
from bpsfast.gpu.host import HostDevice
from bpsfast.orchestration.errors import ClosedError, DeviceError, PeerLostError, StallError
from tests.support.device_memory import LIMIT_S, deadline, eventually, held

pytestmark = pytest.mark.usefixtures("no_leaks")


class Copying(DeviceCopy):
    """Runs *work* in the copier's thread; over when it returns true."""

    def __init__(self, work, priority=0):
        super().__init__("a copy", priority, keeps=object())
        self.work = work


class PlainCopier(CopyThread[Copying]):
    """Runs its copies one after another."""

    def _step(self, under_way, stream):
        rest = []
        for copying in under_way:
            if copying.work(stream):
                copying.release_memory()
                copying.end()
            else:
                rest.append(copying)
        if rest:
            self._pause()
        return rest


@pytest.fixture
def copier():
    copier = PlainCopier(HostDevice(), "plain copier")
    yield copier
    copier.close(closed)
    assert copier.join(LIMIT_S)


def closed():
    return ClosedError("it is over")


def never(stream):
    return False


def nothing():
    return None


def test_what_is_added_is_brought(copier):
    all_copying = [Copying(lambda stream: stream.record().wait(LIMIT_S)) for _ in range(10)]
    for copying in all_copying:
        copier.add(copying)
    for copying in all_copying:
        copying.wait(deadline(), nothing)
        assert copying.is_over
        assert not copying.has_failed
        assert copying.keeps is None


def test_an_unused_line_has_no_thread():
    before = threading.active_count()
    copier = PlainCopier(HostDevice(), "plain copier")
    assert threading.active_count() == before
    copier.close(closed)
    assert copier.join(0)


def test_waiting_has_a_deadline_that_says_where_to_look(copier):
    copying = Copying(never)
    copier.add(copying)
    looks = []
    with pytest.raises(StallError, match=r"a copy did not come in time.*this rank's GPU"):
        copying.wait(time.monotonic() + 0.25, lambda: looks.append(1))
    assert looks, "others are looked after meanwhile"


def test_what_the_waiting_thread_finds_out_ends_the_wait(copier):
    copying = Copying(never)
    copier.add(copying)

    def lost():
        raise PeerLostError("rank 1 is lost")

    with pytest.raises(PeerLostError):
        copying.wait(deadline(), lost)


@pytest.mark.parametrize(("raised", "text"), [
    (PeerLostError("rank 7"), "rank 7"), (ZeroDivisionError("by nought"), "plain copier cannot go on.*by nought")])
def test_a_failure_ends_all_and_what_comes_after(copier, raised, text):
    waiting = Copying(never)
    copier.add(waiting)

    def fail(stream):
        raise raised

    copier.add(Copying(fail))
    error = type(raised) if isinstance(raised, PeerLostError) else DeviceError
    with pytest.raises(error, match=text):
        waiting.wait(deadline(), nothing)
    late = Copying(never)
    copier.add(late)
    with pytest.raises(error, match=text):
        late.wait(deadline(), nothing)
    eventually(lambda: waiting.keeps is None)
    assert late.keeps is None
    assert late.has_failed


def test_closing_ends_what_is_under_way(copier):
    all_copying = [Copying(never) for _ in range(3)]
    for copying in all_copying:
        copier.add(copying)
    copier.close(closed)
    assert copier.join(LIMIT_S)
    for copying in all_copying:
        with pytest.raises(ClosedError, match="it is over"):
            copying.wait(deadline(), nothing)
        assert copying.keeps is None
    copier.add(late := Copying(never))
    with pytest.raises(ClosedError, match="it is over"):
        late.wait(deadline(), nothing)


def test_memory_is_kept_while_copies_go_on():
    device = HostDevice()
    copier = PlainCopier(device, "plain copier")
    with held(device) as other:
        enqueued = threading.Event()

        def copy(stream):
            stream.wait(other.stream.record())
            enqueued.set()
            return False

        copying = Copying(copy)
        copier.add(copying)
        assert enqueued.wait(LIMIT_S)
        copier.close(closed)
        with pytest.raises(ClosedError):
            copying.wait(deadline(), nothing)
        assert not copier.join(0.05), "a copy goes on"
        assert copying.keeps is not None
        other.go()
        assert copier.join(LIMIT_S)
        assert copying.keeps is None


def test_two_threads_that_end_it_at_the_same_time_end_it_once(monkeypatch):
    """Both are to find that it is not over, unless the other one is kept from looking until it is."""
    copying, ends = Copying(never), []
    looked = threading.Barrier(2)
    is_set = copying._over.is_set

    def look():
        found = is_set()
        with contextlib.suppress(threading.BrokenBarrierError):
            looked.wait(0.1)
        return found

    monkeypatch.setattr(copying._over, "is_set", look)
    copying.then = ends.append
    threads = [threading.Thread(target=copying.end, args=(error,)) for error in (None, closed())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(ends) == 1
    assert copying._error is ends[0]
