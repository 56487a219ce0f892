"""How much a rank may send to another before it is asked for. Pure; both sides count, in the same way.

So messages that nobody receives take bounded memory where they lie: of each sender `ROOM_NBYTES` of small messages, and
the headers of `N_ANNOUNCED` others. What is beyond waits at the sender, in its order.
"""
from __future__ import annotations

from ...orchestration.errors import ProtocolError
from .frames import HEADER

ROOM_NBYTES = 256 << 10
N_ANNOUNCED = 1024
#: Room is given back in portions: a frame for every small message would cost as much as the message.
_PORTION_NBYTES = ROOM_NBYTES // 4


def cost(nbytes: int) -> int:
    """Return the room that a small message of *nbytes* takes; an empty one takes some, too."""
    return HEADER.size + nbytes


class SendCredit:
    """What is left, at the sender."""

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
    """What was used and not given back, at the receiver. Raises `ProtocolError` if that is more than was allowed."""

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
        """Note that it was received; return the room to give back now, 0: nothing yet."""
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
