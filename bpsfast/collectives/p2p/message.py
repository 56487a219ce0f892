"""A message, as the sender keeps it until it is sent, and as the receiver keeps it until it is received."""
from __future__ import annotations

from dataclasses import dataclass

from .transfer import Transfer


@dataclass(eq=False)
class Outgoing:
    """A message to be sent, and how much of it was."""

    transfer: Transfer
    number: int = 0
    n_sent: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return self.transfer.nbytes


@dataclass(eq=False)
class Arrival:
    """A message that has come, or was announced, from rank *source*.

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
    """A payload on its way into the memory of *transfer*, which has met *arrival*."""

    transfer: Transfer
    arrival: Arrival
    n_received: int = 0
