"""Memory of a rank's device that the node's cards read and write by themselves (GPUDirect, setting gpu_direct).

    cover      before tensors are declared: there is room for their inputs, and for both results of each
    committed  the node has placed results there, of partitions that other nodes sum; inputs of those have places, too
    a round    input is copied there within the device, and announced; the sum is found there, and copied to its target

One rank of a machine does so: the only one, or the root of an island of all. Nothing of it is staged in memory of the
host; what else is summed, by this machine or after the CPU has had a look at it, is. **Unproven: no machine with such a
GPU and card has run it.** On the host device the memory is a memfd; all else is the same.
"""
from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...base.dtypes import TABLE
from ...gpu.communicator import sums_in_island
from ...gpu.device import Device
from ...gpu.device_segments import DeviceRegion, DeviceSegment
from ...orchestration.errors import ConfigError, error_of
from ...orchestration.messages import ShareDevice

if TYPE_CHECKING:
    from ...base.settings import Settings
    from ...orchestration.messages import TensorSpec
    from ..session import Session

_PAGE_NBYTES = 4096
#: So much is shared at once at least, so that a hundred tensors do not make a hundred registrations.
_LEAST_NBYTES = 24 << 20
#: A registration is made of pieces of this size: of huge pages, and of what GPUs map for cards.
_PIECE_NBYTES = 2 << 20


class GpuDirectMemory:
    """What *session*'s rank has shared of its device. Any thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._is_on = session.settings.gpu_direct
        self._lock = threading.RLock()
        self._needs: dict[str, int] = {}  # bytes of inputs, in whole pages, by the names that were covered
        self._room_nbytes = 0  # for that
        #: By number.
        self.segments: dict[int, DeviceSegment] = {}

    def cover(self, device: Device | None, specs: Sequence[TensorSpec]) -> None:
        """Have room for tensors *specs* of *device* (None: the host's memory) before they are declared.

        Raises
        ------
        ConfigError, UnsupportedError, CapacityError
            With the reason why no GPU of this machine can do without memory of the host. Nothing was declared.
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
                nbytes = _up(max(lacking, _LEAST_NBYTES // 3), _PIECE_NBYTES)
                self._share(device, 3 * nbytes, 2 * nbytes)
                self._room_nbytes += nbytes
            self._needs |= new
        if new:
            session.say_direct(tuple(new))

    def forget(self, names: Sequence[str]) -> None:
        """Know that *names* are retired: their room is others'."""
        with self._lock:
            for name in names:
                self._needs.pop(name, None)

    def allocate(self, device: Device, nbytes: int) -> DeviceRegion:
        """Return *nbytes* for inputs. Raises as `cover`."""
        rounded = _up(max(nbytes, 1), _PAGE_NBYTES)
        with self._lock:
            place = self._take(rounded)
            if place is None:  # there is room, but not in one piece
                self._share(device, _up(rounded, _PIECE_NBYTES), 0)
                place = self._take(rounded)
        assert place is not None, "it was made for it"
        return place

    def release(self, place: DeviceRegion) -> None:
        """Take back what `allocate` returned: nobody writes there, and all rounds announced from it are over."""
        with self._lock:
            place.segment.holes.give(place.offset - place.segment.begin, place.nbytes)

    def close(self) -> None:
        """Give all of it back. No copy goes on; what cards still have registered they keep by themselves."""
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
        """Share *nbytes* more of *device*, the first *result_nbytes* for results."""
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
    """Return the local rank whose device it is; raise `ConfigError` where it could be none, or several."""
    if n_machines == 1:
        raise ConfigError("BPSFAST_GPU_DIRECT is on, but the job has one machine: nothing goes over a card; set it to "
                          "off")
    if local_size == 1:
        return 0
    if settings.islands != "auto" or not settings.reduce_roots.isdecimal():
        raise ConfigError(f"BPSFAST_GPU_DIRECT is on, and this machine has {local_size} ranks: what a card sends must "
                          "be the sum of all of them. Set BPSFAST_ISLANDS=auto and BPSFAST_REDUCE_ROOTS to the one "
                          "local rank whose GPU is below the card's PCIe switch "
                          f"(islands={settings.islands}, reduce_roots={settings.reduce_roots or 'by topology'})")
    return int(settings.reduce_roots)


def _nbytes(spec: TensorSpec) -> int:
    """Return the bytes of the partitions of *spec*, each in whole pages, of which only the last is not full."""
    return _up(max(1, math.prod(spec.shape) * TABLE[spec.dtype].itemsize), _PAGE_NBYTES)


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
