"""Broadcasts of arrays on devices: the bytes pass through a twin on each rank. See `trainer.broadcaster`."""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from ...gpu import arrays
from ...pyx.port import copy
from ..tensor_input import TensorInput, tensor_input
from .staging_buffers import StagingBuffer

if TYPE_CHECKING:
    from ..session import Session


class Channel(Protocol):
    """What gives bytes to all ranks: `trainer.broadcaster.Broadcaster`."""

    def send(self, text: str, pieces: Sequence[tuple[int, int]]) -> None:
        """Send the bytes of *pieces* to all other ranks."""

    def receive(self, root: int, text: str, accept: Callable[[int], Sequence[tuple[int, int]]]) -> None:
        """Receive what rank *root* sends into the pieces that ``accept(nbytes)`` returns."""


def broadcast(session: Session, channel: Channel, x: Any, memory: TensorInput, root_rank: int, text: str) -> Any:
    """As `trainer.broadcaster.broadcast`, of *x*, which is *memory* on a device.

    The root's bytes count as they are after what its owner has enqueued; what is enqueued from the return on finds the
    result.
    """
    result, target = x, memory
    if not memory.writable:
        result = arrays.empty_like(memory)
        target = session.devices.placed(tensor_input(result))
    if session.rank != root_rank:
        with _twin(session, target) as twin:
            channel.receive(root_rank, text, lambda nbytes: [(twin.region.address, nbytes)])
            _give(twin)
        return result
    with _twin(session, memory) as source:
        source.fetch()
        source.wait(time.monotonic() + session.settings.timeout_s)
        if session.size > 1:
            channel.send(text, [(source.region.address, memory.nbytes)])
        if not memory.writable:
            with _twin(session, target) as twin:
                copy(twin.region.address, source.region.address, memory.nbytes)
                _give(twin)
    return result


def _give(twin: StagingBuffer) -> None:
    """Let what its owner enqueues from now on find the twin's bytes on the device."""
    twin.place.caller().wait(twin.restore())


@contextmanager
def _twin(session: Session, memory: TensorInput) -> Iterator[StagingBuffer]:
    assert memory.place is not None, "it lies on a device"
    twin = StagingBuffer(session.devices.twins, memory.place, memory.address, memory.nbytes, memory.owner)
    try:
        yield twin
    finally:
        twin.release()
