"""CUDA devices, and ROCm's where CuPy is built for it, through CuPy's calls of the runtime. See `device`.

CuPy and the user's framework share each device's primary context, so addresses and streams of one are the other's.
"""
from __future__ import annotations

import functools
import importlib.util
import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..orchestration.errors import DeviceError, UnsupportedError
from . import cuda_driver
from .device import DeviceLocation, Event, SharedMemory

_TO_DEVICE, _TO_HOST, _WITHIN = 1, 2, 3  # cudaMemcpyKind
_PORTABLE, _READ_ONLY = 0x01, 0x08  # cudaHostRegister flags
_SUCCESS, _NOT_READY = 0, 600  # cudaError_t; ROCm's hipError_t has them, too
#: CUDA has no wait with a limit: a thread that has one asks so often.
_ASK_S = 0.0001
#: cudaStreamPerThread: as many streams as threads call it so.
_PER_THREAD = 2


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
        is_there = importlib.util.find_spec("cupy") is not None
        how = "cannot be imported" if is_there else "is not installed"
        raise UnsupportedError(f"arrays on a GPU are reached through CuPy, which {how}: pip install bpsfast[cuda] (or "
                               f"a CuPy for your CUDA or ROCm); {exc.__cause__ or exc}") from exc
    try:
        n_devices = module.cuda.runtime.getDeviceCount()
    except module.cuda.runtime.CUDARuntimeError as exc:
        raise UnsupportedError(f"CuPy {module.__version__} finds no GPU: {exc}") from exc
    if n_devices == 0:
        raise UnsupportedError(f"CuPy {module.__version__} finds no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES")
    return module


class CudaEvent:
    """See `Event`: CuPy's *event*, recorded on stream *handle*. Waiting threads sleep: the flag eventBlockingSync."""

    def __init__(self, event: Any, device: str, handle: int) -> None:
        self._event, self._device = event, device
        self.origin = device, handle, threading.get_ident() if handle == _PER_THREAD else None

    def done(self) -> bool:
        """See `Event`."""
        runtime = cupy().cuda.runtime
        with _failures(self._device, "asking for an event"):
            status = runtime.eventQuery(self._event.ptr)  # CuPy's `Event.done` takes a failure for "not yet"
            if status not in (_SUCCESS, _NOT_READY):
                raise runtime.CUDARuntimeError(status)
            return bool(status == _SUCCESS)

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `Event`."""
        if timeout_s is None:
            with _failures(self._device, "waiting for an event"):
                self._event.synchronize()
            return True
        deadline = time.monotonic() + timeout_s
        while not self.done():
            rest_s = deadline - time.monotonic()
            if rest_s <= 0:
                return False
            time.sleep(min(rest_s, _ASK_S))
        return True

    def hold_back(self, handle: int) -> None:
        """Let the stream that is called so wait for it."""
        cupy().cuda.runtime.streamWaitEvent(handle, self._event.ptr)


class CudaStream:
    """The stream that is called *handle* (a cudaStream_t) of *device*; *keeps* holds it. See `Stream`."""

    def __init__(self, device: CudaDevice, handle: int, keeps: object) -> None:
        self._device, self.handle, self._keeps = device, handle, keeps

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of this protocol of CUDA's Python libraries, and the handle."""
        return 0, self.handle

    def record(self) -> CudaEvent:
        """See `Stream`."""
        module = cupy()
        with self._device.current("recording an event"):
            event = module.cuda.Event(block=True, disable_timing=True)
            module.cuda.runtime.eventRecord(event.ptr, self.handle)
            return CudaEvent(event, self._device.name, self.handle)

    def wait(self, event: Event) -> None:
        """See `Stream`. An event of another kind of device is waited for by the host."""
        if not isinstance(event, CudaEvent):
            event.wait()
            return
        with self._device.current("letting a stream wait"):
            event.hold_back(self.handle)

    def copy(self, destination: int, source: int, nbytes: int, to_host: bool) -> None:
        """See `Stream`. From or to pages that are not pinned it blocks, and is right."""
        with self._device.current(f"copying {nbytes} bytes {'to' if to_host else 'from'} the host"):
            cupy().cuda.runtime.memcpyAsync(destination, source, nbytes, _TO_HOST if to_host else _TO_DEVICE,
                                            self.handle)

    def move(self, destination: int, source: int, nbytes: int) -> None:
        """See `Stream`."""
        with self._device.current(f"copying {nbytes} bytes within it"):
            cupy().cuda.runtime.memcpyAsync(destination, source, nbytes, _WITHIN, self.handle)

    def close(self) -> None:
        """See `OwnStream`. CuPy destroys it when nobody holds it any more."""


class CudaDevice:
    """CUDA device *number* of this process. See `Device`."""

    def __init__(self, number: int) -> None:
        self.name = f"cuda:{number}"
        self.number = number
        self._runtime = cupy().cuda.runtime
        self._lock = threading.Lock()
        self._gate: CudaStream | None = None
        self._needs_flush = False  # what cards have written, before it is read

    @contextmanager
    def current(self, what: str) -> Iterator[None]:
        """Let calls inside be of this device, whichever the thread uses; failures while *what* are `DeviceError`.

        Not by CuPy's ``with Device``, which remembers in the object, in some versions, what threads have used before.
        """
        runtime = self._runtime
        with _failures(self.name, what):
            before = runtime.getDevice()
            runtime.setDevice(self.number)
            try:
                yield
            finally:
                runtime.setDevice(before)

    def enter(self) -> None:
        """See `Device`."""
        with _failures(self.name, "entering it"):
            self._runtime.setDevice(self.number)

    def stream(self) -> CudaStream:
        """See `Device`."""
        with self.current("making a stream"):
            return self._of_cupy(cupy().cuda.Stream(non_blocking=True))

    @property
    def address(self) -> str:
        """On PCIe, as sysfs writes it: "0000:3b:00.0"."""
        with _failures(self.name, "asking for its address"):
            domain, _, rest = str(self._runtime.deviceGetPCIBusId(self.number)).lower().partition(":")
        return f"{domain[-4:]:0>4}:{rest}"

    def stream_at(self, handle: int) -> CudaStream:
        """Return the stream that its owner calls *handle* (a cudaStream_t; 0: the default one), and holds."""
        return CudaStream(self, handle, None)

    def current_stream(self) -> CudaStream:
        """Return the stream that is current in CuPy, in this thread."""
        with self.current("using a stream"):
            return self._of_cupy(cupy().cuda.get_current_stream())

    def _of_cupy(self, stream: Any) -> CudaStream:
        return CudaStream(self, int(stream.ptr), stream)

    @property
    def gate(self) -> CudaStream:
        """A stream on which owners of arrays show when these are ready (DLPack's ``stream=``), and nothing else is."""
        with self._lock:
            if self._gate is None:
                self._gate = self.stream()
            return self._gate

    def place(self, stream: CudaStream | None = None) -> DeviceLocation:
        """Return the place of an array whose owner works on *stream*; None: on CuPy's current one."""
        if stream is not None:
            own = stream
            return DeviceLocation(self, own.record(), lambda: own)
        return DeviceLocation(self, self.current_stream().record(), self.current_stream)

    def pin(self, address: int, nbytes: int, writable: bool) -> None:
        """See `Device`. For all devices of the process."""
        flags = _PORTABLE if writable else _PORTABLE | _READ_ONLY
        with self.current(f"pinning {nbytes} bytes of the host"):
            cupy().cuda.runtime.hostRegister(address, nbytes, flags)

    def unpin(self, address: int) -> None:
        """See `Device`."""
        try:
            with self.current("unpinning pages of the host"):
                self._runtime.hostUnregister(address)
        except DeviceError:
            return  # the context is gone, or broken by a failure that was raised where it came from

    def share(self, nbytes: int) -> SharedMemory:
        """See `Device`. Whole pages of the host's, as dma-bufs have them, wherever cudaMalloc begins."""
        page_nbytes = mmap.PAGESIZE
        rounded = -(-nbytes // page_nbytes) * page_nbytes
        with self.current(f"making {rounded} bytes of its memory known to cards"):
            cuda_driver.require_dma_buf(self.number)
            self._needs_flush = cuda_driver.needs_flush(self.number)
            begin = int(self._runtime.malloc(rounded + page_nbytes - 1))
            address = -(-begin // page_nbytes) * page_nbytes
            try:
                fd = cuda_driver.dma_buf(address, rounded)
            except BaseException:
                self._runtime.free(begin)
                raise
        return SharedMemory(address, rounded, fd, self.address, lambda: self._free(begin))

    def _free(self, address: int) -> None:
        try:
            with self.current("giving memory back that cards knew"):
                self._runtime.free(address)
        except DeviceError:
            return  # as for `unpin`

    def flush_remote_writes(self) -> None:
        """See `Device`."""
        if self._needs_flush:
            with self.current("waiting for what cards have written"):
                cuda_driver.flush_writes()


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
