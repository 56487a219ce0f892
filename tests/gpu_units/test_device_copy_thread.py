"""A line: one thread, which ends with the session, and tells whoever waits why."""
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


class Errand(DeviceCopy):
    """Runs *work* in the line's thread; over when it returns true."""

    def __init__(self, work, priority=0):
        super().__init__("an errand", priority, keeps=object())
        self.work = work


class Errands(CopyThread[Errand]):
    """Does errands one after another."""

    def _step(self, under_way, stream):
        rest = []
        for errand in under_way:
            if errand.work(stream):
                errand.release_memory()
                errand.end()
            else:
                rest.append(errand)
        if rest:
            self._pause()
        return rest


@pytest.fixture
def line():
    line = Errands(HostDevice(), "errands")
    yield line
    line.close(closed)
    assert line.join(LIMIT_S)


def closed():
    return ClosedError("it is over")


def never(stream):
    return False


def nothing():
    return None


def test_what_is_added_is_brought(line):
    errands = [Errand(lambda stream: stream.record().wait(LIMIT_S)) for _ in range(10)]
    for errand in errands:
        line.add(errand)
    for errand in errands:
        errand.wait(deadline(), nothing)
        assert errand.is_over
        assert not errand.has_failed
        assert errand.keeps is None


def test_an_unused_line_has_no_thread():
    before = threading.active_count()
    line = Errands(HostDevice(), "errands")
    assert threading.active_count() == before
    line.close(closed)
    assert line.join(0)


def test_waiting_has_a_deadline_that_says_where_to_look(line):
    errand = Errand(never)
    line.add(errand)
    looks = []
    with pytest.raises(StallError, match=r"an errand did not come in time.*this rank's GPU"):
        errand.wait(time.monotonic() + 0.25, lambda: looks.append(1))
    assert looks, "others are looked after meanwhile"


def test_what_the_waiting_thread_finds_out_ends_the_wait(line):
    errand = Errand(never)
    line.add(errand)

    def lost():
        raise PeerLostError("rank 1 is lost")

    with pytest.raises(PeerLostError):
        errand.wait(deadline(), lost)


@pytest.mark.parametrize(("raised", "text"), [
    (PeerLostError("rank 7"), "rank 7"), (ZeroDivisionError("by nought"), "errands cannot go on.*by nought")])
def test_a_failure_ends_all_and_what_comes_after(line, raised, text):
    waiting = Errand(never)
    line.add(waiting)

    def fail(stream):
        raise raised

    line.add(Errand(fail))
    error = type(raised) if isinstance(raised, PeerLostError) else DeviceError
    with pytest.raises(error, match=text):
        waiting.wait(deadline(), nothing)
    late = Errand(never)
    line.add(late)
    with pytest.raises(error, match=text):
        late.wait(deadline(), nothing)
    eventually(lambda: waiting.keeps is None)
    assert late.keeps is None
    assert late.has_failed


def test_closing_ends_what_is_under_way(line):
    errands = [Errand(never) for _ in range(3)]
    for errand in errands:
        line.add(errand)
    line.close(closed)
    assert line.join(LIMIT_S)
    for errand in errands:
        with pytest.raises(ClosedError, match="it is over"):
            errand.wait(deadline(), nothing)
        assert errand.keeps is None
    line.add(late := Errand(never))
    with pytest.raises(ClosedError, match="it is over"):
        late.wait(deadline(), nothing)


def test_memory_is_kept_while_copies_go_on():
    device = HostDevice()
    line = Errands(device, "errands")
    with held(device) as other:
        enqueued = threading.Event()

        def copy(stream):
            stream.wait(other.stream.record())
            enqueued.set()
            return False

        errand = Errand(copy)
        line.add(errand)
        assert enqueued.wait(LIMIT_S)
        line.close(closed)
        with pytest.raises(ClosedError):
            errand.wait(deadline(), nothing)
        assert not line.join(0.05), "a copy goes on"
        assert errand.keeps is not None
        other.go()
        assert line.join(LIMIT_S)
        assert errand.keeps is None


def test_two_threads_that_end_it_at_the_same_time_end_it_once(monkeypatch):
    """Both are to find that it is not over, unless the other one is kept from looking until it is."""
    errand, ends = Errand(never), []
    looked = threading.Barrier(2)
    is_set = errand._over.is_set

    def look():
        found = is_set()
        with contextlib.suppress(threading.BrokenBarrierError):
            looked.wait(0.1)
        return found

    monkeypatch.setattr(errand._over, "is_set", look)
    errand.then = ends.append
    threads = [threading.Thread(target=errand.end, args=(error,)) for error in (None, closed())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(ends) == 1
    assert errand._error is ends[0]
