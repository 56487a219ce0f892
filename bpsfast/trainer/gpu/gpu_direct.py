"""GPUDirect: memory of a rank's device that the node's RDMA cards read and write themselves (setting gpu_direct).

    cover      before tensors are declared: shares memory for their inputs, and for both results of each
    commit     the node places there the results of partitions that other nodes sum, and the inputs of these
    a round    the input is copied there within the device and announced; the sum arrives there, and is copied on

One rank of a machine does this: the only one, or the root of an island of all ranks. Partitions that this machine sums,
and those that the CPU must see, are still staged in host memory. On the host device the shared memory is a memfd.
**Unproven: no machine with such a GPU and card has run it.**
"""
from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...base.dtypes import TABLE
from ...base.settings import Settings
from ...gpu.communicator import sums_in_island
from ...gpu.device import Device, DeviceRegion, DeviceSegment
from ...orchestration.errors import ConfigError, error_of
from ...orchestration.messages import ShareDevice, TensorSpec
from ...pyx.pages import Segment
from ..input_memory import Region
from ..unit import Unit
from . import DeviceSession

_PAGE_NBYTES = 4096
#: Memory is shared at least this much at a time, so that a hundred tensors do not make a hundred registrations.
_LEAST_NBYTES = 24 << 20
#: Registrations are multiples of this size, that of huge pages and of what GPUs map for cards.
_UNIT_NBYTES = 2 << 20


class DeviceInput(NamedTuple):
    """Where a unit's input lies that comes from a device: its partitions are *stride* bytes apart in *staging*.

    Those in *direct* lie at these bytes of *region*, from where cards read them. None: no partition lies there.
    """

    staging: Region | None
    region: DeviceRegion | None
    direct: dict[int, int]
    stride: int

    def entry(self, number: int) -> tuple[int, int]:
        """Return segment and offset of partition *number*, as the node knows them."""
        at = self.direct.get(number)
        if at is not None:
            assert self.region is not None, "it lies there"
            return self.region.segment.number, self.region.offset + at
        assert self.staging is not None, "it lies there"
        return self.staging.segment, self.staging.offset + number * self.stride

    @property
    def address(self) -> int:
        """Where the unit begins on the host; 0: nothing of it lies there."""
        return self.staging.address if self.staging is not None else 0

    @property
    def on_device(self) -> dict[int, int]:
        """The address on the device at which the unit would begin, by partition that lies there."""
        if self.region is None:
            return {}
        return {number: self.region.address + at - number * self.stride for number, at in self.direct.items()}

    def segments(self, mapped: Mapping[tuple[str, int], Segment]) -> list[Segment]:
        """Return the host segments that it lies in, of those that this rank has *mapped*."""
        return [] if self.staging is None else [mapped["rank", self.staging.segment]]


class GpuDirectMemory:
    """The device memory that *session*'s rank has shared with its node. Any thread."""

    def __init__(self, session: DeviceSession) -> None:
        self._session = session
        self._is_on = session.settings.gpu_direct
        self._lock = threading.RLock()
        self._needs: dict[str, int] = {}  # covered names -> bytes of their inputs, in whole pages
        self._room_nbytes = 0  # shared for inputs
        self._inputs: dict[Unit, DeviceInput] = {}
        #: The shared segments, by number.
        self.segments: dict[int, DeviceSegment] = {}

    def cover(self, device: Device | None, specs: Sequence[TensorSpec]) -> None:
        """Share memory for the tensors *specs* of *device* (None: host memory), before they are declared.

        Raises `ConfigError`, `UnsupportedError` or `CapacityError` if GPUDirect is not possible on this machine, with
        the reason. Nothing was declared. Raises `DeviceError` if the device has no memory left.
        """
        if not self._is_on or device is None:
            return
        settings, session = self._session.settings, self._session
        root = _require_root(settings, session.local_size, session.n_nodes + session.n_helpers)
        suited = [spec for spec in specs if session.local_size == 1 or sums_in_island(settings, spec.dtype, spec.codec)]
        suited = [spec for spec in suited if spec.codec is None]
        if session.local_rank != root or not suited:
            return
        with self._lock:
            new = {spec.name: _nbytes(spec) for spec in suited if spec.name not in self._needs}
            lacking = sum(self._needs.values()) + sum(new.values()) - self._room_nbytes
            if lacking > 0:
                nbytes = _up(max(lacking, _LEAST_NBYTES // 3), _UNIT_NBYTES)
                self._share(device, 3 * nbytes, 2 * nbytes)
                self._room_nbytes += nbytes
            self._needs |= new
        if new:
            session.say_direct(tuple(new))

    def forget(self, names: Sequence[str]) -> None:
        """Release the room of *names*, which are retired."""
        with self._lock:
            for name in names:
                self._needs.pop(name, None)

    def input_of(self, unit: Unit, device: Device) -> DeviceInput:
        """Return the memory of *unit*'s input when that comes from *device*; it is allocated at the first use."""
        found = self._inputs.get(unit)
        if found is None:
            own = unit.parts_on_own_device()
            staging = unit.staging if len(own) < unit.n_parts or not unit.n_parts else None
            with self._lock:
                found = self._inputs.get(unit)
                if found is None:
                    region = self.allocate(device, len(own) * unit.stride) if own else None
                    offsets = {number: at * unit.stride for at, number in enumerate(own)}
                    found = self._inputs[unit] = DeviceInput(staging, region, offsets, unit.stride)
        return found

    def release_input(self, unit: Unit) -> None:
        """Release what `input_of` allocated for *unit*, which is retired."""
        with self._lock:
            found = self._inputs.pop(unit, None)
        if found is not None and found.region is not None:
            self.release(found.region)

    def allocate(self, device: Device, nbytes: int) -> DeviceRegion:
        """Return *nbytes* of shared memory for inputs. Raises as `cover`."""
        rounded = _up(max(nbytes, 1), _PAGE_NBYTES)
        with self._lock:
            region = self._take(rounded)
            if region is None:  # the free room is fragmented
                self._share(device, _up(rounded, _UNIT_NBYTES), 0)
                region = self._take(rounded)
        assert region is not None, "its memory was just shared"
        return region

    def release(self, region: DeviceRegion) -> None:
        """Take back what `allocate` returned. No copy writes there, and all rounds announced from it are over."""
        with self._lock:
            region.segment.holes.give(region.offset - region.segment.begin, region.nbytes)

    def close(self) -> None:
        """Free all shared memory. No copy may go on. Cards keep alive what they still have registered."""
        with self._lock:
            segments, self.segments = list(self.segments.values()), {}
            self._inputs.clear()
        for segment in segments:
            if segment.memory is not None:
                segment.memory.close()
                segment.memory = None

    def _take(self, nbytes: int) -> DeviceRegion | None:
        for segment in self.segments.values():
            offset = segment.holes.take(nbytes)
            if offset is not None:
                return DeviceRegion(segment, segment.begin + offset, nbytes)
        return None

    def _share(self, device: Device, nbytes: int, result_nbytes: int) -> None:
        """Share *nbytes* more of *device*, of which the first *result_nbytes* are for results."""
        memory = device.share(nbytes)
        try:
            answer = self._session.share_device(
                lambda request: ShareDevice(request=request, nbytes=memory.nbytes, result_nbytes=result_nbytes,
                                            gpu=memory.gpu),
                f"the node did not register {nbytes} bytes of {device.name}", memory.fd)
            if answer.error:
                raise error_of(answer.error, answer.reason)
        except BaseException:
            memory.close()
            raise
        self.segments[answer.segment] = DeviceSegment(answer.segment, memory, result_nbytes)


def _require_root(settings: Settings, local_size: int, n_machines: int) -> int:
    """Return the local rank whose device is used; raise `ConfigError` if there is none, or several."""
    if n_machines == 1:
        raise ConfigError("BPSFAST_GPU_DIRECT is on, but the job has one machine, so nothing goes over a card. Set it "
                          "to off")
    if local_size == 1:
        return 0
    if settings.islands != "auto" or not settings.reduce_roots.isdecimal():
        raise ConfigError(f"BPSFAST_GPU_DIRECT is on, and this machine has {local_size} ranks: what a card sends must "
                          "be the sum of all of them. Set BPSFAST_ISLANDS=auto and BPSFAST_REDUCE_ROOTS to the one "
                          "local rank whose GPU is below the card's PCIe switch "
                          f"(islands={settings.islands}, reduce_roots={settings.reduce_roots or 'by topology'})")
    return int(settings.reduce_roots)


def _nbytes(spec: TensorSpec) -> int:
    return _up(max(1, math.prod(spec.shape) * TABLE[spec.dtype].itemsize), _PAGE_NBYTES)


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
