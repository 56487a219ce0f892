"""Communicators: reduce and broadcast among the GPUs of one island (the ranks of a machine that sum on their GPUs).

`NcclCommunicator` serves ranks that have a GPU each; `shared_device.SharedCommunicator` ranks that share one device.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import msgspec

from ..base.dtypes import TABLE
from ..base.settings import Settings
from ..orchestration.codec import CodecSpec
from ..orchestration.errors import DeviceError, UnsupportedError
from .cuda import CudaDevice, cupy, handle_of
from .device import Event, Stream

#: ncclDataType_t of the dtypes that islands sum.
DTYPES = {"int8": 0, "uint8": 1, "int32": 2, "int64": 4, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}


def sums_in_island(settings: Settings, dtype: str, codec: CodecSpec | None) -> bool:
    """Return whether tensors on devices are summed in islands first. All ranks get the same answer."""
    return settings.islands == "auto" and dtype in DTYPES and codec is None


class Members(Protocol):
    """The group of ranks that form an island: what communicators need of `collectives.group.Group`."""

    rank: int
    size: int
    ranks: tuple[int, ...]
    timeout_s: float

    def barrier(self, text: str = "") -> None: ...
    def broadcast_bytes(self, data: bytes, root: int) -> bytes: ...
    def all_gather_bytes(self, data: bytes) -> list[bytes]: ...
    def close(self) -> None: ...


class IslandRange(NamedTuple):
    """*nbytes* to reduce from each member's *source* to the *target* of member *root*, or to broadcast from there."""

    source: int
    target: int
    nbytes: int
    root: int


#: Called with the event after the call's work, once all of it is enqueued; from any thread.
OnEnqueued = Callable[[Event], None]


class Communicator(Protocol):
    """Reduces and broadcasts among the members' devices. All members make the same calls in the same order, each from
    one thread at a time. A call returns at once; its work is enqueued on *stream*, behind all events *after*.
    """

    def reduce(self, stream: Stream, after: Sequence[Event], ranges: Sequence[IslandRange], dtype: str,
               then: OnEnqueued) -> None:
        """Sum the members' sources of each range into the root's target. Other targets are not written."""

    def broadcast(self, stream: Stream, after: Sequence[Event], ranges: Sequence[IslandRange], dtype: str,
                  then: OnEnqueued) -> None:
        """Overwrite all targets of each range by the root's."""

    def close(self) -> None:
        """Free its resources. Calls that are not enqueued yet are dropped."""


_SUM = 0  # ncclRedOp_t


class NcclCommunicator:
    """The members of *group*, each with its own GPU. See `Communicator`.

    Raises `UnsupportedError` if CuPy has no NCCL: on all members, if the first has none.
    """

    def __init__(self, device: CudaDevice, group: Members) -> None:
        self._device = device
        self._group = group
        self._nccl = cupy().cuda.nccl
        said = b""
        if group.rank == 0 and self._nccl.available:
            said = msgspec.msgpack.encode(list(self._nccl.get_unique_id()))
        said = group.broadcast_bytes(said, 0)
        if not said or not self._nccl.available:
            where = "" if said else " on the first rank of the island"
            raise UnsupportedError(f"BPSFAST_ISLANDS needs NCCL, which CuPy does not find{where}. pip install "
                                   "nvidia-nccl-cu12 (or cu13, as your CuPy), or set BPSFAST_ISLANDS=off")
        with self._calls("joining"):
            self._communicator: Any = self._nccl.NcclCommunicator(group.size, tuple(msgspec.msgpack.decode(said)),
                                                                  group.rank)

    def reduce(self, stream: Stream, after: Sequence[Event], ranges: Sequence[IslandRange], dtype: str,
               then: OnEnqueued) -> None:
        with self._enqueued("reducing", stream, after, then):
            for each in ranges:
                self._communicator.reduce(each.source, each.target, _count(each, dtype), DTYPES[dtype], _SUM, each.root,
                                          handle_of(stream))

    def broadcast(self, stream: Stream, after: Sequence[Event], ranges: Sequence[IslandRange], dtype: str,
                  then: OnEnqueued) -> None:
        with self._enqueued("broadcasting", stream, after, then):
            for each in ranges:
                self._communicator.bcast(each.target, _count(each, dtype), DTYPES[dtype], each.root, handle_of(stream))

    def close(self) -> None:
        with self._calls("leaving"):
            self._communicator.abort()  # `destroy` would wait for members that may be gone
        self._group.close()

    @contextmanager
    def _enqueued(self, what: str, stream: Stream, after: Sequence[Event], then: OnEnqueued) -> Iterator[None]:
        """Make one group of the calls inside, behind *after*."""
        for event in after:
            stream.wait(event)
        with self._calls(what):
            self._nccl.groupStart()
            try:
                yield
            finally:
                self._nccl.groupEnd()
        then(stream.record())

    @contextmanager
    def _calls(self, what: str) -> Iterator[None]:
        try:
            with self._device.current(f"{what} an island"):
                yield
        except self._nccl.NcclError as exc:
            raise DeviceError(f"NCCL failed while {what} an island of {self._device.name}: {exc}. Set NCCL_DEBUG=INFO "
                              "for details") from exc


def _count(each: IslandRange, dtype: str) -> int:
    return each.nbytes // TABLE[dtype].itemsize
