"""The state of one send or receive between two ranks, which its caller can wait for or cancel."""
from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ...orchestration.errors import BpsError

_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_from_memory.restype = ctypes.py_object
_READ, _WRITE = 0x100, 0x200


class TransferOwner(Protocol):
    """What a transfer needs of its endpoint: `P2PEndpoint`, whose first three calls are those of the transfer."""

    rank: int

    def wait(self, transfer: Transfer, timeout_s: float | None) -> None: ...
    def on_done(self, transfer: Transfer, callback: Callable[[Transfer], object]) -> None: ...
    def cancel(self, transfer: Transfer) -> bool: ...
    def ended(self, transfer: Transfer) -> None: ...


class Transfer:
    """A send or a receive under way; `P2PEndpoint.send` and `receive` return it. Any thread.

    *peer* is the other rank, and *tag* the message's; None, of a receive: any. *address* and *nbytes* are the caller's
    memory: what is sent, or where to put it; nbytes -1: memory is allocated when the message comes. *owner* keeps the
    memory alive, and is kept until the transfer has ended.

    Once `done`, these say what it was: `source` (a rank), `tag`, `nbytes` of the message, `data` (uint8, only of
    `receive_any_size`, the caller's from then on), `error` (None if it ended well).
    """

    __slots__ = ("_done", "_endpoint", "address", "callbacks", "capacity", "channel", "data", "error", "is_send",
                 "nbytes", "owner", "peer", "source", "tag")

    def __init__(self, endpoint: TransferOwner, is_send: bool, channel: int, peer: int | None, tag: int | None,
                 address: int, nbytes: int, owner: object) -> None:
        self._endpoint = endpoint
        self._done = False
        self.is_send, self.channel, self.peer, self.tag = is_send, channel, peer, tag
        self.source = endpoint.rank if is_send else peer
        self.address, self.nbytes, self.capacity, self.owner = address, nbytes, nbytes, owner
        self.data: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        self.error: BpsError | None = None
        self.callbacks: list[Callable[[Transfer], object]] = []

    def done(self) -> bool:
        """Return whether it has ended, well or not. Of a send: whether its memory may be written again."""
        return self._done

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended, at most *timeout_s* (None: the setting); after that the transfer goes on, and may be
        waited for again.

        Raises `StallError` if it has not ended in time, naming the rank that is missing; `PeerLostError` if the other
        rank is gone, or has left the job; `MismatchError` if the message was longer than the receive's memory (it is
        consumed; the sender is not told); `ClosedError` if the endpoint was closed, or the transfer cancelled.
        """
        self._endpoint.wait(self, timeout_s)

    def on_done(self, callback: Callable[[Transfer], object]) -> None:
        """Call *callback* with this once it has ended; at once if it has.

        It runs in a thread that drives messages and blocks them meanwhile. An exception in it is logged.
        """
        self._endpoint.on_done(self, callback)

    def cancel(self) -> bool:
        """End a receive that has matched no message, with a `ClosedError`; return False if it goes on, or has ended."""
        return self._endpoint.cancel(self)

    def finish(self, error: BpsError | None = None) -> None:
        """Note the end, with the endpoint's lock. The caller runs the callbacks afterwards."""
        if not self._done:
            self.error = error
            self.owner = None
            self._done = True
            self._endpoint.ended(self)

    def describe(self) -> str:
        """Return the message in words: "a message with tag 3 on channel 7"."""
        tag = "any tag" if self.tag is None else f"tag {self.tag}"
        size = "any size" if self.capacity < 0 else f"{self.capacity} bytes"
        return f"a message with {tag} on channel {self.channel} ({size if self.is_send else 'up to ' + size})"


@dataclass(eq=False)
class Outgoing:
    """A message to send, and how much of it was sent."""

    transfer: Transfer
    number: int = 0
    n_sent: int = 0

    @property
    def nbytes(self) -> int:
        return self.transfer.nbytes


@dataclass(eq=False)
class Arrival:
    """A message that has arrived, or was announced, from rank *source*.

    Its payload is `data`; or still in the memory of `outgoing`, if this rank has sent it to itself; or with the sender,
    at `address` in its process, under `number`.
    """

    source: int
    tag: int
    nbytes: int
    data: bytes | memoryview | None = None
    outgoing: Outgoing | None = None
    number: int = 0
    address: int = 0


@dataclass(eq=False)
class Incoming:
    """A payload on its way into the memory of *transfer*, which *arrival* matches."""

    transfer: Transfer
    arrival: Arrival
    n_received: int = 0


def view(address: int, nbytes: int, writable: bool = False) -> memoryview:
    """Return the *nbytes* at *address*, which the caller keeps alive longer than the view."""
    if not nbytes:
        return memoryview(b"")
    found: memoryview = _from_memory(address, nbytes, _WRITE if writable else _READ)
    return found
