"""NCCL among the GPUs of one island, through CuPy. See `communicator`."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from ..base.dtypes import TABLE
from ..collectives.group import broadcast_bytes
from ..orchestration.errors import DeviceError, UnsupportedError
from .communicator import DTYPES, IslandRange, OnEnqueued
from .cuda import CudaDevice, CudaStream, cupy
from .device import Event, Stream

if TYPE_CHECKING:
    from ..collectives.group import Group

_SUM = 0  # ncclRedOp_t


class NcclCommunicator:
    """The members of *group*, each with its own GPU. See `Communicator`.

    Raises
    ------
    UnsupportedError
        If CuPy has no NCCL: on all members, if the first has none.
    """

    def __init__(self, device: CudaDevice, group: Group) -> None:
        self._device = device
        self._group = group
        self._nccl = cupy().cuda.nccl
        said = b""
        if group.rank == 0 and self._nccl.available:
            said = msgspec.msgpack.encode(list(self._nccl.get_unique_id()))
        said = broadcast_bytes(group, said, 0)
        if not said or not self._nccl.available:
            where = "" if said else " on the first rank of the island"
            raise UnsupportedError(f"BPSFAST_ISLANDS needs NCCL, which CuPy does not find{where}: pip install "
                                   "nvidia-nccl-cu12 (or cu13, as your CuPy), or set BPSFAST_ISLANDS=off")
        with self._calls("joining"):
            self._communicator: Any = self._nccl.NcclCommunicator(group.size, tuple(msgspec.msgpack.decode(said)),
                                                                  group.rank)

    def reduce(self, stream: Stream, after: Sequence[Event], runs: Sequence[IslandRange], dtype: str, then: OnEnqueued) -> None:
        """See `Communicator`."""
        for event in after:
            stream.wait(event)
        with self._grouped("reducing"):
            for run in runs:
                self._communicator.reduce(run.source, run.target, _count(run, dtype), DTYPES[dtype], _SUM, run.root,
                                          _handle(stream))
        then(stream.record())

    def broadcast(self, stream: Stream, after: Sequence[Event], runs: Sequence[IslandRange], dtype: str, then: OnEnqueued) -> None:
        """See `Communicator`."""
        for event in after:
            stream.wait(event)
        with self._grouped("broadcasting"):
            for run in runs:
                self._communicator.bcast(run.target, _count(run, dtype), DTYPES[dtype], run.root, _handle(stream))
        then(stream.record())

    def close(self) -> None:
        """See `Communicator`."""
        with self._calls("leaving"):
            self._communicator.abort()  # `destroy` would wait for members that may be gone
        self._group.close()

    @contextmanager
    def _grouped(self, what: str) -> Iterator[None]:
        with self._calls(what):
            self._nccl.groupStart()
            try:
                yield
            finally:
                self._nccl.groupEnd()

    @contextmanager
    def _calls(self, what: str) -> Iterator[None]:
        try:
            with self._device.current(f"{what} an island"):
                yield
        except self._nccl.NcclError as exc:
            raise DeviceError(f"NCCL failed while {what} an island of {self._device.name}: {exc}; NCCL_DEBUG=INFO says "
                              "more") from exc


def _count(run: IslandRange, dtype: str) -> int:
    return run.nbytes // TABLE[dtype].itemsize


def _handle(stream: Stream) -> int:
    assert isinstance(stream, CudaStream), "a stream of this GPU"
    return stream.handle
