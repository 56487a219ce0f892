"""Windows of an island where CUDA fails while they are made: what was opened is closed, and the own one is kept.

CUDA is played here, since that a handle cannot be opened is nothing a real GPU does at will (`tests/gpu` has those).
"""
from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from bpsfast.gpu import shared_device
from bpsfast.gpu.shared_device import CudaWindows
from bpsfast.orchestration.errors import DeviceError

N_EVENTS = 2


class Runtime:
    """What CUDA has open; call number *fails_at* of opening or making something fails."""

    def __init__(self):
        self.open, self.fails_at, self.closing_fails = set(), 0, False
        self._n_calls = 0

    def malloc(self, nbytes):
        return self._opened("memory")

    def ipcGetMemHandle(self, address):
        return b"window"

    def ipcGetEventHandle(self, event):
        return b"event"

    def ipcOpenMemHandle(self, handle):
        return self._opened("window")

    def ipcOpenEventHandle(self, handle):
        return self._opened("event")

    def memcpy(self, *arguments):
        pass

    def _opened(self, kind):
        self._n_calls += 1
        if self._n_calls == self.fails_at:
            raise DeviceError(f"opening {kind}")
        self.open.add((kind, self._n_calls))
        return self._n_calls

    def _close(self, kind, handle):
        if self.closing_fails:
            raise DeviceError("closing")
        self.open.remove((kind, handle))

    def ipcCloseMemHandle(self, address):
        self._close("window", address)

    def eventDestroy(self, event):
        self._close("event", event)

    def free(self, address):
        self._close("memory", address)


@pytest.fixture
def runtime(monkeypatch):
    played = Runtime()
    event = SimpleNamespace(ptr=1)
    monkeypatch.setattr(shared_device, "cupy", lambda: SimpleNamespace(
        cuda=SimpleNamespace(runtime=played, Event=lambda **_: event)))
    monkeypatch.setattr(shared_device, "_kept", {})
    return played


def made(runtime):
    device = SimpleNamespace(number=0, current=lambda what: contextlib.nullcontext())
    group = SimpleNamespace(size=3, rank=1, ranks=(0, 1, 2), all_gather_bytes=lambda own: [own] * 3)
    return CudaWindows(device, group, 4096, N_EVENTS)


def kept():
    return [own.address for each in shared_device._kept.values() for own in each]


def test_they_are_closed_and_the_own_one_serves_the_next(runtime):
    first = made(runtime)
    own = first.addresses[1]
    assert len(runtime.open) == 1 + 2 * (1 + N_EVENTS) + 1  # the own one; two others with their events; the table
    first.close()
    assert runtime.open == {("memory", own)} and kept() == [own]
    second = made(runtime)
    assert second.addresses[1] == own and kept() == []


@pytest.mark.parametrize("call", range(2, 2 + 2 * (1 + N_EVENTS) + 1))
def test_what_was_opened_before_one_cannot_be_is_closed(runtime, call):
    runtime.fails_at = call
    with pytest.raises(DeviceError, match="opening"):
        made(runtime)
    assert runtime.open == {("memory", 1)} and kept() == [1]


def test_without_memory_nothing_is_kept_and_all_are_told(runtime):
    runtime.fails_at = 1
    with pytest.raises(DeviceError, match=r"rank 0 cannot share memory.*opening memory.*BPSFAST_ISLANDS=off"):
        made(runtime)
    assert not runtime.open and kept() == []


def test_the_own_one_is_kept_where_closing_fails(runtime):
    found = made(runtime)
    runtime.closing_fails = True
    with pytest.raises(DeviceError, match="closing"):
        found.close()
    assert kept() == [found._own.address]
