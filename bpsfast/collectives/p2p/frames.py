"""What two posts say to each other: a header of 40 bytes, after some of them payload.

    sender -> receiver                              receiver -> sender
    EAGER     a message with its payload            CREDIT  `nbytes` of eager room are free again
    ANNOUNCE  a message whose payload stays         WANT    send the payload of announced message `number`
    DATA      `nbytes` more of what was wanted      TAKEN   its payload was fetched, or is not wanted
    GREETING  where the receiver may try to read    LEAVE   nothing comes any more (both ways)

`number` counts what one sender announces to one receiver. `address` is of memory in the sender's process.
"""
from __future__ import annotations

import struct
from typing import NamedTuple

from ...orchestration.errors import ProtocolError

EAGER, ANNOUNCE, DATA, GREETING, CREDIT, WANT, TAKEN, LEAVE = range(1, 9)
_NAMES = ("EAGER", "ANNOUNCE", "DATA", "GREETING", "CREDIT", "WANT", "TAKEN", "LEAVE")

HEADER = struct.Struct("<B3xIqQQQ")

#: The longest message that travels before it is asked for.
EAGER_NBYTES = 8 << 10
#: No message is longer.
MESSAGE_MAX_NBYTES = 1 << 46
#: Payload between two headers: what else is to be said to that rank waits no longer than so much takes.
PIECE_NBYTES = 1 << 20


class Frame(NamedTuple):
    """A header."""

    kind: int
    channel: int = 0
    tag: int = 0
    number: int = 0
    nbytes: int = 0
    address: int = 0

    def pack(self) -> bytes:
        """Return its bytes."""
        return HEADER.pack(*self)

    @property
    def name(self) -> str:
        """How its kind is called."""
        return _NAMES[self.kind - 1]

    @property
    def n_payload(self) -> int:
        """Bytes that follow it."""
        return self.nbytes if self.kind in (EAGER, DATA) else 0


def unpack(buffer: bytes | bytearray | memoryview, offset: int) -> Frame:
    """Return the header at *offset*, checked as far as it can be without knowing what was said before.

    Raises
    ------
    ProtocolError
        If it is none.
    """
    frame = Frame(*HEADER.unpack_from(buffer, offset))
    if not EAGER <= frame.kind <= LEAVE:
        raise ProtocolError(f"a frame of kind {frame.kind}, known are 1 to {LEAVE}")
    most = {EAGER: EAGER_NBYTES, DATA: PIECE_NBYTES}.get(frame.kind, MESSAGE_MAX_NBYTES)
    if frame.nbytes > most:
        raise ProtocolError(f"{frame.name} with {frame.nbytes} bytes, at most {most} are allowed")
    return frame
