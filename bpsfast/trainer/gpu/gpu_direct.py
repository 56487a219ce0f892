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
from collections.abc import Sequence

from ...base.dtypes import TABLE
from ...base.settings import Settings
from ...gpu.communicator import sums_in_island
from ...gpu.device import Device, DeviceRegion, DeviceSegment
from ...orchestration.errors import ConfigError, error_of
from ...orchestration.messages import ShareDevice, TensorSpec
from . import DeviceSession

_PAGE_NBYTES = 4096
#: Memory is shared at least this much at a time, so that a hundred tensors do not make a hundred registrations.
_LEAST_NBYTES = 24 << 20
#: Registrations are multiples of this size, that of huge pages and of what GPUs map for cards.
_UNIT_NBYTES = 2 << 20


class GpuDirectMemory:
    """The device memory that *session*'s rank has shared with its node. Any thread."""

    def __init__(self, session: DeviceSession) -> None:
        self._session = session
        self._is_on = session.settings.gpu_direct
        self._lock = threading.RLock()
        self._needs: dict[str, int] = {}  # covered names -> bytes of their inputs, in whole pages
        self._room_nbytes = 0  # shared for inputs
        #: The shared segments, by number.
        self.segments: dict[int, DeviceSegment] = {}

    def cover(self, device: Device | None, specs: Sequence[TensorSpec]) -> None:
        """Share memory for the tensors *specs* of *device* (None: host memory), before they are declared.

        Raises
        ------
        ConfigError, UnsupportedError, CapacityError
            If GPUDirect is not possible on this machine, with the reason. Nothing was declared.
        DeviceError
            If the device has no memory left.
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
    """Return the bytes of *spec* in whole pages."""
    return _up(max(1, math.prod(spec.shape) * TABLE[spec.dtype].itemsize), _PAGE_NBYTES)


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
