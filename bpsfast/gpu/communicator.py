"""Sums and copies among the devices of one island: NCCL's, or our own where its members share one device."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..collectives.group import all_gather_bytes
from ..orchestration.errors import BpsError, ConfigError
from .device import Device, Event, Stream
from .host import HostDevice

if TYPE_CHECKING:
    from ..base.settings import Settings
    from ..collectives.group import Group
    from ..orchestration.codec import CodecSpec

#: ncclDataType_t of what islands sum; others have none.
DTYPES = {"int8": 0, "uint8": 1, "int32": 2, "int64": 4, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}


def sums_in_island(settings: Settings, dtype: str, codec: CodecSpec | None) -> bool:
    """Whether a tensor on a device is summed in islands first: all ranks say the same of it."""
    return settings.islands == "auto" and dtype in DTYPES and codec is None


class IslandRange(NamedTuple):
    """*nbytes* at *source* of each member, which go to *target* of the *root*-th; or back from there."""

    source: int
    target: int
    nbytes: int
    root: int


#: Hears, once all is enqueued, of the event after it; from any thread.
OnEnqueued = Callable[[Event], None]


class Communicator(Protocol):
    """The members' devices. All make the same calls in the same order; a call returns at once, and enqueues on its
    stream, after all of *after*. One thread at a time.
    """

    def reduce(self, stream: Stream, after: Sequence[Event], runs: Sequence[IslandRange], dtype: str, then: OnEnqueued) -> None:
        """Add the members' sources of each run up at the root's target. Other targets are not written."""

    def broadcast(self, stream: Stream, after: Sequence[Event], runs: Sequence[IslandRange], dtype: str, then: OnEnqueued) -> None:
        """Overwrite all targets of each run by the root's."""

    def close(self) -> None:
        """Let go of it; of calls under way those that are not enqueued yet are dropped."""


def communicator(device: Device, group: Group, fail: Callable[[BpsError], None]) -> Communicator:
    """Return that of *group*'s members, each with its own *device*; *fail* hears what ends it between calls.
    Collective; raises as calls of the group, and `UnsupportedError` without NCCL.
    """
    if isinstance(device, HostDevice):
        from .shared_device import SharedCommunicator

        return SharedCommunicator(device, group, fail)
    from .cuda import CudaDevice
    from .nccl import NcclCommunicator
    from .shared_device import SharedCommunicator

    assert isinstance(device, CudaDevice), f"{device.name} is of no known kind"
    addresses = all_gather_bytes(group, device.address.encode())
    if len(set(addresses)) == 1:
        return SharedCommunicator(device, group, fail)
    if len(set(addresses)) < len(addresses):
        raise ConfigError(f"ranks {group.ranks} are one island, and only some of them share a GPU: {addresses}")
    return NcclCommunicator(device, group)
