"""Sums and copies among the devices of one island: NCCL's on GPUs, the job's own collectives on the host device."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..dtypes import TABLE
from ..trainer.tensor_input import TensorInput
from .device import Device, Stream
from .host import HostDevice, HostStream

if TYPE_CHECKING:
    from ..collective.group import Group
    from ..orchestration.codec import CodecSpec
    from ..settings import Settings

#: ncclDataType_t of what islands sum; others have none.
DTYPES = {"int8": 0, "uint8": 1, "int32": 2, "int64": 4, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}


def joins(settings: Settings, dtype: str, codec: CodecSpec | None) -> bool:
    """Whether a tensor on a device is summed in islands first: all ranks say the same of it."""
    return settings.islands == "auto" and dtype in DTYPES and codec is None


class Run(NamedTuple):
    """*nbytes* at *source* of each member, which go to *target* of the *root*-th; or back from there."""

    source: int
    target: int
    nbytes: int
    root: int


class Communicator(Protocol):
    """The members' devices. All make the same calls in the same order; a call only enqueues. One thread at a time."""

    def reduce(self, stream: Stream, runs: Sequence[Run], dtype: str) -> None:
        """Add the members' sources of each run up at the root's target. Other targets are not written."""

    def broadcast(self, stream: Stream, runs: Sequence[Run], dtype: str) -> None:
        """Overwrite all targets of each run by the root's."""

    def close(self) -> None:
        """Let go of it; calls under way are not waited for."""


def communicator(device: Device, group: Group) -> Communicator:
    """Return that of *group*'s members, each with its own *device*. Collective; raises as calls of the group, and
    `UnsupportedError` without NCCL.
    """
    if isinstance(device, HostDevice):
        return HostCommunicator(group)
    from .cuda import CudaDevice
    from .nccl import NcclCommunicator

    assert isinstance(device, CudaDevice), f"{device.name} is of no known kind"
    return NcclCommunicator(device, group)


class HostCommunicator:
    """Members whose device is the host."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def reduce(self, stream: Stream, runs: Sequence[Run], dtype: str) -> None:
        """See `Communicator`."""
        for run in runs:
            _enqueue(stream, partial(self._reduce, run, dtype))

    def broadcast(self, stream: Stream, runs: Sequence[Run], dtype: str) -> None:
        """See `Communicator`."""
        for run in runs:
            _enqueue(stream, partial(self._group.broadcast, _memory(run.target, run, dtype), run.root))

    def _reduce(self, run: Run, dtype: str) -> None:
        target = _memory(run.target, run, dtype) if run.root == self._group.rank else None
        self._group.reduce(_memory(run.source, run, dtype), target, run.root)

    def close(self) -> None:
        """See `Communicator`."""
        self._group.close()


def _enqueue(stream: Stream, work: Callable[[], object]) -> None:
    assert isinstance(stream, HostStream), "a host device's own stream"
    stream.run(work)


def _memory(address: int, run: Run, dtype: str) -> TensorInput:
    return TensorInput(address, (run.nbytes // TABLE[dtype].itemsize,), dtype, run.nbytes, True, run)
