"""The device interface (`device`) for CUDA GPUs, and ROCm's where CuPy is built for it, by CuPy's calls of the runtime.

CuPy and the user's framework share each device's primary context, so both can use the same addresses and streams.

What GPUDirect needs of CUDA's driver, for which CuPy has no names, is called through ctypes: dma-buf export and the
order of what cards write. It follows cuda.h (13.0) and the CUDA Driver API (``cuMemGetHandleForAddressRange``,
``cuFlushGPUDirectRDMAWrites``, ``CUGPUDirectRDMAWritesOrdering``). **Unproven: no machine has run this part.**
"""
from __future__ import annotations

import ctypes
import functools
import importlib.util
import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ..orchestration.errors import DeviceError, UnsupportedError
from .device import DeviceLocation, Event, SharedMemory, Stream

_TO_DEVICE, _TO_HOST, _WITHIN = 1, 2, 3  # cudaMemcpyKind
_PORTABLE, _READ_ONLY = 0x01, 0x08  # cudaHostRegister flags
_SUCCESS, _NOT_READY = 0, 600  # cudaError_t; ROCm's hipError_t has them, too
_LIBRARY = "libcuda.so.1"
_DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_*
_FLUSH_OPTIONS, _WRITES_ORDERING = 117, 118
_FLUSH_BY_HOST = 1  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_CURRENT_CONTEXT, _TO_OWNER = 0, 100  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_*; of the ordering, too: the owner's is natural
#: CUDA has no wait with a timeout: a thread that needs one polls at this interval.
_POLL_S = 0.0001
#: cudaStreamPerThread, which means another stream in each thread.
_PER_THREAD = 2


@functools.cache
def cupy() -> Any:
    """Return the module `cupy`. Raises `UnsupportedError` if CuPy is not installed, or finds no device."""
    try:
        import cupy as module
    except ImportError as exc:
        is_there = importlib.util.find_spec("cupy") is not None
        how = "cannot be imported" if is_there else "is not installed"
        raise UnsupportedError(f"arrays on a GPU are reached through CuPy, which {how}: pip install bpsfast[cuda], or "
                               f"a CuPy for your CUDA or ROCm ({exc.__cause__ or exc})") from exc
    try:
        n_devices = module.cuda.runtime.getDeviceCount()
    except module.cuda.runtime.CUDARuntimeError as exc:
        raise UnsupportedError(f"CuPy {module.__version__} finds no GPU: {exc}") from exc
    if n_devices == 0:
        raise UnsupportedError(f"CuPy {module.__version__} finds no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES")
    return module


class CudaEvent:
    """CuPy's *event*, recorded on stream *handle* (see `Event`). Waiting threads sleep (flag eventBlockingSync)."""

    def __init__(self, event: Any, device: str, handle: int) -> None:
        self._event, self._device = event, device
        self.origin = device, handle, threading.get_ident() if handle == _PER_THREAD else None

    def done(self) -> bool:
        runtime = cupy().cuda.runtime
        with _failures(self._device, "asking for an event"):
            status = runtime.eventQuery(self._event.ptr)  # CuPy's `Event.done` takes a failure for "not yet"
            if status not in (_SUCCESS, _NOT_READY):
                raise runtime.CUDARuntimeError(status)
            return bool(status == _SUCCESS)

    def wait(self, timeout_s: float | None = None) -> bool:
        if timeout_s is None:
            with _failures(self._device, "waiting for an event"):
                self._event.synchronize()
            return True
        deadline = time.monotonic() + timeout_s
        while not self.done():
            rest_s = deadline - time.monotonic()
            if rest_s <= 0:
                return False
            time.sleep(min(rest_s, _POLL_S))
        return True

    def block_stream(self, handle: int) -> None:
        """Make later work on the stream *handle* wait for it."""
        cupy().cuda.runtime.streamWaitEvent(handle, self._event.ptr)


class CudaStream:
    """The stream *handle* (a cudaStream_t) of *device*; *keeps* holds it. See `Stream`."""

    def __init__(self, device: CudaDevice, handle: int, keeps: object) -> None:
        self._device, self.handle, self._keeps = device, handle, keeps

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of this protocol of CUDA's Python libraries, and the handle."""
        return 0, self.handle

    def record(self) -> CudaEvent:
        module = cupy()
        with self._device.current("recording an event"):
            event = module.cuda.Event(block=True, disable_timing=True)
            module.cuda.runtime.eventRecord(event.ptr, self.handle)
            return CudaEvent(event, self._device.name, self.handle)

    def wait(self, event: Event) -> None:
        """See `Stream`. The host waits for an event of another kind of device."""
        if not isinstance(event, CudaEvent):
            event.wait()
            return
        with self._device.current("letting a stream wait"):
            event.block_stream(self.handle)

    def copy(self, destination: int, source: int, nbytes: int, to_host: bool) -> None:
        """See `Stream`. With pages that are not pinned it blocks, but is correct."""
        with self._device.current(f"copying {nbytes} bytes {'to' if to_host else 'from'} the host"):
            cupy().cuda.runtime.memcpyAsync(destination, source, nbytes, _TO_HOST if to_host else _TO_DEVICE,
                                            self.handle)

    def move(self, destination: int, source: int, nbytes: int) -> None:
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
        self._dlpack_stream: CudaStream | None = None
        self._needs_flush = False  # before what cards have written is read

    @contextmanager
    def current(self, what: str) -> Iterator[None]:
        """Make this the device of calls inside; failures are `DeviceError`s that say *what* was done.

        CuPy's ``with Device`` is not used: in some versions the object remembers what other threads had used.
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
        with _failures(self.name, "entering it"):
            self._runtime.setDevice(self.number)

    def stream(self) -> CudaStream:
        with self.current("making a stream"):
            return self._of_cupy(cupy().cuda.Stream(non_blocking=True))

    @property
    def address(self) -> str:
        """Its PCIe address, as in sysfs: "0000:3b:00.0"."""
        with _failures(self.name, "asking for its address"):
            domain, _, rest = str(self._runtime.deviceGetPCIBusId(self.number)).lower().partition(":")
        return f"{domain[-4:]:0>4}:{rest}"

    def stream_at(self, handle: int) -> CudaStream:
        """Return the stream *handle* (a cudaStream_t; 0: the default one), which its owner holds."""
        return CudaStream(self, handle, None)

    def current_stream(self) -> CudaStream:
        """Return CuPy's current stream in this thread."""
        with self.current("using a stream"):
            return self._of_cupy(cupy().cuda.get_current_stream())

    def _of_cupy(self, stream: Any) -> CudaStream:
        return CudaStream(self, int(stream.ptr), stream)

    @property
    def dlpack_stream(self) -> CudaStream:
        """The stream that owners of arrays are given for exports (DLPack's ``stream=``), and that has no other work."""
        with self._lock:
            if self._dlpack_stream is None:
                self._dlpack_stream = self.stream()
            return self._dlpack_stream

    def location(self, stream: CudaStream | None = None) -> DeviceLocation:
        """Return the location of an array whose owner works on *stream*; None: on CuPy's current one."""
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
        with suppress(DeviceError), self.current("unpinning pages of the host"):
            self._runtime.hostUnregister(address)  # fails if the context is gone, or broken by an earlier failure

    def share(self, nbytes: int) -> SharedMemory:
        """See `Device`. Aligned to whole pages of the host, as dma-bufs require; cudaMalloc's memory is not."""
        page_nbytes = mmap.PAGESIZE
        rounded = -(-nbytes // page_nbytes) * page_nbytes
        with self.current(f"sharing {rounded} bytes of its memory with cards"):
            require_dma_buf(self.number)
            self._needs_flush = needs_flush(self.number)
            begin = int(self._runtime.malloc(rounded + page_nbytes - 1))
            address = -(-begin // page_nbytes) * page_nbytes
            try:
                fd = dma_buf(address, rounded)
            except BaseException:
                self._runtime.free(begin)
                raise
        return SharedMemory(address, rounded, fd, self.address, lambda: self._free(begin))

    def _free(self, address: int) -> None:
        with suppress(DeviceError), self.current("freeing memory that was shared with cards"):
            self._runtime.free(address)  # as for `unpin`

    def flush_remote_writes(self) -> None:
        if self._needs_flush:
            with self.current("waiting for what cards have written"):
                _call("cuFlushGPUDirectRDMAWrites", ctypes.c_int(_CURRENT_CONTEXT), ctypes.c_int(_TO_OWNER))


@functools.cache
def cuda_device(number: int) -> CudaDevice:
    """Return this process's CUDA device *number*. Raises `UnsupportedError` as `cupy`, and if there is no such one."""
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
        raise DeviceError(f"{device} failed while {what}: {exc}. The cause may be work that was enqueued before: run "
                          "with CUDA_LAUNCH_BLOCKING=1 to see which") from exc


def handle_of(stream: Stream) -> int:
    """Return the cudaStream_t of *stream*, which belongs to a GPU."""
    assert isinstance(stream, CudaStream), "a stream of a GPU"
    return stream.handle


# -- CUDA's driver: GPUDirect ----------------------------------------------------------------------------------


@functools.cache
def _library() -> Any:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as exc:
        raise UnsupportedError(f"GPUDirect needs NVIDIA's driver library, {_LIBRARY}: {exc}") from exc


def _call(name: str, *arguments: Any) -> None:
    """Call *name* in the context that is current in this thread.

    Raises `UnsupportedError` if the driver has no such call. Raises `DeviceError` with the driver's name for what
    failed.
    """
    try:
        function = getattr(_library(), name)
    except AttributeError:
        raise UnsupportedError(f"this driver has no {name}: it is older than CUDA 11.7") from None
    code = function(*arguments)
    if code:
        words = ctypes.c_char_p()
        _library().cuGetErrorName(ctypes.c_int(code), ctypes.byref(words))
        raise DeviceError(f"{name} failed with {(words.value or b'an unknown error').decode()} ({code})")


def _attribute(device: int, attribute: int) -> int:
    """Return *attribute* of the device that the CUDA runtime calls *device*."""
    handle, value = ctypes.c_int(), ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
    _call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), handle)
    return value.value


def require_dma_buf(device: int) -> None:
    """Raise `UnsupportedError` unless CUDA device *device* can export its memory to cards."""
    if not _attribute(device, _DMA_BUF_SUPPORTED):
        raise UnsupportedError(f"cuda:{device} exports no dma-buf, by which cards reach its memory. It needs CUDA "
                               "11.7, NVIDIA's open kernel modules, Linux 5.12 and a data center or workstation GPU")


def dma_buf(address: int, nbytes: int) -> int:
    """Return a new dma-buf descriptor of *nbytes* at *address*: whole pages of memory by cudaMalloc."""
    fd = ctypes.c_int(-1)
    _call("cuMemGetHandleForAddressRange", ctypes.byref(fd), ctypes.c_uint64(address), ctypes.c_size_t(nbytes),
          ctypes.c_int(_DMA_BUF_FD), ctypes.c_ulonglong(0))
    return fd.value


def needs_flush(device: int) -> bool:
    """Return whether CUDA device *device* may see a card's writes later than the host sees their completion.

    Raises `UnsupportedError` if it may, and its writes cannot be flushed.
    """
    if _attribute(device, _WRITES_ORDERING) >= _TO_OWNER:
        return False
    if not _attribute(device, _FLUSH_OPTIONS) & _FLUSH_BY_HOST:
        raise UnsupportedError(f"cuda:{device} does not order what cards write into its memory, and cannot flush it "
                               "(cuFlushGPUDirectRDMAWrites)")
    return True
