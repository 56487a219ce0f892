"""The protocol of messages between two ranks: the formats of its frames, and its flow control.

A frame has a header of 40 bytes; some have a payload.

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

#: The longest message that is sent before a receive matches it.
EAGER_NBYTES = 64 << 10
#: No message is longer.
MESSAGE_MAX_NBYTES = 1 << 46
#: The longest payload of a DATA frame: other frames for that rank wait no longer than this takes to send.
PIECE_NBYTES = 1 << 20
#: What one rank may send to another before receives match: bytes of small messages, and announcements.
ROOM_NBYTES = 512 << 10
N_ANNOUNCED = 1024
#: Room is given back in portions: a frame for every small message would cost as much as the message.
_PORTION_NBYTES = ROOM_NBYTES // 4


class Frame(NamedTuple):
    """A frame's header."""

    kind: int
    channel: int = 0
    tag: int = 0
    number: int = 0
    nbytes: int = 0
    address: int = 0

    def pack(self) -> bytes:
        return HEADER.pack(*self)

    @property
    def name(self) -> str:
        return _NAMES[self.kind - 1]

    @property
    def n_payload(self) -> int:
        """Bytes that follow it."""
        return self.nbytes if self.kind in (EAGER, DATA) else 0


def unpack(buffer: bytes | bytearray | memoryview, offset: int) -> Frame:
    """Return the header at *offset*; raise `ProtocolError` if it is none, as far as it tells without earlier frames."""
    frame = Frame(*HEADER.unpack_from(buffer, offset))
    if not EAGER <= frame.kind <= LEAVE:
        raise ProtocolError(f"a frame of kind {frame.kind}, known are 1 to {LEAVE}")
    most = {EAGER: EAGER_NBYTES, DATA: PIECE_NBYTES}.get(frame.kind, MESSAGE_MAX_NBYTES)
    if frame.nbytes > most:
        raise ProtocolError(f"{frame.name} with {frame.nbytes} bytes, at most {most} are allowed")
    return frame


def cost(nbytes: int) -> int:
    """Return the credit that a small message of *nbytes* takes; an empty one takes some, too."""
    return HEADER.size + nbytes


class SendCredit:
    """The sender's side: what it may still send to one rank before receives match."""

    def __init__(self) -> None:
        self._room = ROOM_NBYTES
        self._n_announced = 0

    def take_room(self, nbytes: int) -> bool:
        """Take room for a small message if there is enough."""
        if cost(nbytes) > self._room:
            return False
        self._room -= cost(nbytes)
        return True

    def give_room(self, room: int) -> None:
        """Take back *room*. Raises `ProtocolError` if it is more than was taken."""
        self._room += room
        if self._room > ROOM_NBYTES:
            raise ProtocolError(f"CREDIT of {room} bytes makes {self._room}, there are {ROOM_NBYTES}")

    def announce(self) -> bool:
        """Take one of the announcements if one is left."""
        if self._n_announced >= N_ANNOUNCED:
            return False
        self._n_announced += 1
        return True

    def answered(self) -> None:
        """Take back one announcement."""
        self._n_announced -= 1


class ReceiveCredit:
    """The receiver's side: what one rank has used. Methods raise `ProtocolError` if that is more than it was given."""

    def __init__(self) -> None:
        self._used = 0
        self._free = 0  # of that: received, but not given back yet
        self._n_announced = 0

    def eager(self, nbytes: int) -> None:
        """Note that a small message has come."""
        self._used += cost(nbytes)
        if self._used > ROOM_NBYTES:
            raise ProtocolError(f"small messages of {self._used} bytes, {ROOM_NBYTES} were allowed")

    def received(self, nbytes: int) -> int:
        """Note that it was received; return the credit to give back now, 0: none yet."""
        self._free += cost(nbytes)
        if self._free < _PORTION_NBYTES:
            return 0
        free, self._free = self._free, 0
        self._used -= free
        return free

    def announced(self) -> None:
        """Note that a message was announced."""
        self._n_announced += 1
        if self._n_announced > N_ANNOUNCED:
            raise ProtocolError(f"{self._n_announced} announced messages, {N_ANNOUNCED} were allowed")

    def answered(self) -> None:
        """Note that an announcement is answered."""
        self._n_announced -= 1
