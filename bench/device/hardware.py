"""The interface of a device that `bench device` measures; `on_cuda` and `on_host` implement it."""
from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from bpsfast.gpu.device import Device

Floats = np.ndarray[Any, np.dtype[np.float32]]


class Pinned(NamedTuple):
    """*nbytes* of the host's own memory that the device reaches by itself; *owner* keeps it."""

    address: int
    nbytes: int
    owner: object


class Moment(Protocol):
    """The time at which the program's stream reached a place in its work."""

    def since(self, earlier: Moment) -> float:
        """Return the seconds since *earlier*, by the device's clock, once both have been reached."""


class Hardware(Protocol):
    """One device and the stream on which this process computes. Owner thread only.

    Arrays are float32 vectors of the kind that users of the device have. What is enqueued is done on the stream, in
    order.
    """

    name: str

    @property
    def device(self) -> Device:
        """The device, for separate streams and plain copies."""

    def array(self, n: int) -> Any:
        """Return an array of *n* zeros."""

    def address(self, array: Any) -> int:
        """Return where on the device it lies."""

    def write(self, array: Any, values: Floats) -> None:
        """Copy *values* there, and wait until they are there."""

    def read(self, array: Any) -> Floats:
        """Wait for what is enqueued, and return the values."""

    def set(self, array: Any, value: float) -> None:
        """Enqueue a kernel that sets all elements to *value*."""

    def compute(self, n: int) -> None:
        """Enqueue *n* products of matrices."""

    def moment(self) -> Moment:
        """Enqueue a reading of the clock."""

    def begin(self, array: Any, name: str, average: bool) -> Any:
        """Begin a push_pull in place, as a hook of the backward pass does; return its handle."""

    def idle(self) -> None:
        """Wait until everything that is enqueued is done."""

    def pinned(self, nbytes: int) -> Pinned:
        """Return pinned memory of the device's own library."""

    def allocated_nbytes(self) -> int | None:
        """Return the bytes of device memory that arrays take now; None if they are not counted."""

    def facts(self) -> dict[str, Any]:
        """Return a description of the device, for the result file."""
