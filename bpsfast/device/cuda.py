"""CUDA devices, and ROCm's where CuPy is built for it, through CuPy's calls of the runtime. See `device`.

CuPy and the user's framework share each device's primary context, so addresses and streams of one are the other's.
"""
from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..orchestration.errors import DeviceError, UnsupportedError
from .device import Event, Place

_TO_DEVICE, _TO_HOST = 1, 2  # cudaMemcpyKind
_PORTABLE, _READ_ONLY = 0x01, 0x08  # cudaHostRegister flags


@functools.cache
def cupy() -> Any:
    """Return the module.

    Raises
    ------
    UnsupportedError
        If there is none, or it finds no device.
    """
    try:
        import cupy as module
    except ImportError as exc:
        raise UnsupportedError("arrays on a GPU are reached through CuPy, which is not installed: pip install "
                               f"bpsfast[cuda] (or a CuPy for your CUDA or ROCm); {exc}") from exc
    try:
        n_devices = module.cuda.runtime.getDeviceCount()
    except module.cuda.runtime.CUDARuntimeError as exc:
        raise UnsupportedError(f"CuPy {module.__version__} finds no GPU: {exc}") from exc
    if n_devices == 0:
        raise UnsupportedError(f"CuPy {module.__version__} finds no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES")
    return module


class CudaEvent:
    """See `Event`. Waiting threads sleep: the flag eventBlockingSync."""

    def __init__(self, event: Any, device: str) -> None:
        self._event, self._device = event, device

    def done(self) -> bool:
        """See `Event`."""
        with _failures(self._device, "asking for an event"):
            return bool(self._event.done)

    def wait(self) -> None:
        """See `Event`."""
        with _failures(self._device, "waiting for an event"):
            self._event.synchronize()

    def hold_back(self, stream: Any) -> None:
        """Let CuPy's *stream* wait for it."""
        stream.wait_event(self._event)


class CudaStream:
    """CuPy's *stream* of *device*. See `Stream`."""

    def __init__(self, device: CudaDevice, stream: Any) -> None:
        self._device, self._stream = device, stream

    @property
    def handle(self) -> int:
        """The cudaStream_t."""
        return int(self._stream.ptr)

    def record(self) -> CudaEvent:
        """See `Stream`."""
        with self._device.current("recording an event"):
            event = cupy().cuda.Event(block=True, disable_timing=True)
            event.record(self._stream)
            return CudaEvent(event, self._device.name)

    def wait(self, event: Event) -> None:
        """See `Stream`. An event of another kind of device is waited for by the host."""
        if not isinstance(event, CudaEvent):
            event.wait()
            return
        with self._device.current("letting a stream wait"):
            event.hold_back(self._stream)

    def copy(self, destination: int, source: int, nbytes: int, to_host: bool) -> None:
        """See `Stream`. From or to pages that are not pinned it blocks, and is right."""
        with self._device.current(f"copying {nbytes} bytes {'to' if to_host else 'from'} the host"):
            cupy().cuda.runtime.memcpyAsync(destination, source, nbytes, _TO_HOST if to_host else _TO_DEVICE,
                                            self._stream.ptr)


    def close(self) -> None:
        """See `OwnStream`. CuPy destroys it when nobody holds it any more."""


class CudaDevice:
    """CUDA device *number* of this process. See `Device`."""

    def __init__(self, number: int) -> None:
        self.name = f"cuda:{number}"
        self._number = number
        self._device = cupy().cuda.Device(number)
        self._lock = threading.Lock()
        self._gate: CudaStream | None = None

    @contextmanager
    def current(self, what: str) -> Iterator[None]:
        """Let calls inside be of this device, whichever the thread uses; failures while *what* are `DeviceError`."""
        with _failures(self.name, what), self._device:
            yield

    def enter(self) -> None:
        """See `Device`."""
        with _failures(self.name, "entering it"):
            self._device.use()

    def stream(self) -> CudaStream:
        """See `Device`."""
        with self.current("making a stream"):
            return CudaStream(self, cupy().cuda.Stream(non_blocking=True))

    @property
    def address(self) -> str:
        """On PCIe, as sysfs writes it: "0000:3b:00.0"."""
        domain, _, rest = str(self._device.pci_bus_id).lower().partition(":")
        return f"{domain[-4:]:0>4}:{rest}"

    def stream_at(self, handle: int) -> CudaStream:
        """Return the stream that its owner calls *handle* (a cudaStream_t; 0: the default one)."""
        with self.current("using a stream"):
            return CudaStream(self, cupy().cuda.ExternalStream(handle))

    def current_stream(self) -> CudaStream:
        """Return the stream that is current in CuPy, in this thread."""
        with self.current("using a stream"):
            return CudaStream(self, cupy().cuda.get_current_stream())

    @property
    def gate(self) -> CudaStream:
        """A stream on which owners of arrays show when these are ready (DLPack's ``stream=``), and nothing else is."""
        with self._lock:
            if self._gate is None:
                self._gate = self.stream()
            return self._gate

    def place(self, stream: CudaStream | None = None) -> Place:
        """Return the place of an array whose owner works on *stream*; None: on CuPy's current one."""
        if stream is not None:
            own = stream
            return Place(self, own.record(), lambda: own)
        return Place(self, self.current_stream().record(), self.current_stream)

    def pin(self, address: int, nbytes: int, writable: bool) -> None:
        """See `Device`. For all devices of the process."""
        flags = _PORTABLE if writable else _PORTABLE | _READ_ONLY
        with self.current(f"pinning {nbytes} bytes of the host"):
            cupy().cuda.runtime.hostRegister(address, nbytes, flags)

    def unpin(self, address: int) -> None:
        """See `Device`."""
        runtime = cupy().cuda.runtime
        try:
            with self._device:
                runtime.hostUnregister(address)
        except runtime.CUDARuntimeError:
            return  # the context is gone, or broken by a failure that was raised where it came from


@functools.cache
def cuda_device(number: int) -> CudaDevice:
    """Return this process's device *number*. Raises `UnsupportedError` as `cupy`, and where there is no such one."""
    n_devices = cupy().cuda.runtime.getDeviceCount()
    if not 0 <= number < n_devices:
        raise UnsupportedError(f"there is no device cuda:{number}: CuPy finds {n_devices} (CUDA_VISIBLE_DEVICES)")
    return CudaDevice(number)


@contextmanager
def _failures(device: str, what: str) -> Iterator[None]:
    runtime = cupy().cuda.runtime
    try:
        yield
    except runtime.CUDARuntimeError as exc:
        raise DeviceError(f"{device} failed while {what}: {exc}. Work that was enqueued before may be to blame: run "
                          "with CUDA_LAUNCH_BLOCKING=1 to see which") from exc
