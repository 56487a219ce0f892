"""What of CUDA's driver CuPy has no names for: exporting memory as a dma-buf, and the order of what cards write.

Written from cuda.h (13.0); the numbers are its. **Unproven: no machine has run it.**

References
----------
CUDA Driver API, ``cuMemGetHandleForAddressRange``, ``cuFlushGPUDirectRDMAWrites``, ``CUGPUDirectRDMAWritesOrdering``;
NVIDIA, "GPUDirect RDMA", "Synchronization and Memory Ordering".
"""
from __future__ import annotations

import ctypes
import functools
from typing import Any

from ..orchestration.errors import DeviceError, UnsupportedError

_LIBRARY = "libcuda.so.1"
_DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_*
_FLUSH_OPTIONS, _WRITES_ORDERING = 117, 118
_FLUSH_BY_HOST = 1  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_CURRENT_CONTEXT, _TO_OWNER = 0, 100  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_*; of the ordering, too: the owner's is natural


@functools.cache
def _library() -> Any:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as exc:
        raise UnsupportedError(f"GPUDirect needs NVIDIA's driver library, {_LIBRARY}: {exc}") from exc


def _call(name: str, *arguments: Any) -> None:
    """Call *name* in the context that is current in this thread.

    Raises
    ------
    UnsupportedError
        If the driver has no such call.
    DeviceError
        With the driver's name for what failed.
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
    """Return *attribute* of CUDA device *device*, as the runtime numbers it."""
    handle, value = ctypes.c_int(), ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
    _call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), handle)
    return value.value


def require_dma_buf(device: int) -> None:
    """Raise `UnsupportedError` unless cards can be given memory of CUDA device *device*."""
    if not _attribute(device, _DMA_BUF_SUPPORTED):
        raise UnsupportedError(f"cuda:{device} exports no dma-buf, by which cards reach its memory: that takes CUDA "
                               "11.7, NVIDIA's open kernel modules, Linux 5.12 and a data center or workstation GPU")


def dma_buf(address: int, nbytes: int) -> int:
    """Return a new descriptor of *nbytes* at *address*, whole pages of memory by cudaMalloc, for others to register.

    Raises `DeviceError` as the driver does.
    """
    fd = ctypes.c_int(-1)
    _call("cuMemGetHandleForAddressRange", ctypes.byref(fd), ctypes.c_uint64(address), ctypes.c_size_t(nbytes),
          ctypes.c_int(_DMA_BUF_FD), ctypes.c_ulonglong(0))
    return fd.value


def needs_flush(device: int) -> bool:
    """Return whether CUDA device *device* may see a card's writes later than the host sees their completion.

    Raises
    ------
    UnsupportedError
        If it does, and cannot be told to look.
    """
    if _attribute(device, _WRITES_ORDERING) >= _TO_OWNER:
        return False
    if not _attribute(device, _FLUSH_OPTIONS) & _FLUSH_BY_HOST:
        raise UnsupportedError(f"cuda:{device} does not order what cards write into its memory, and cannot flush it "
                               "(cuFlushGPUDirectRDMAWrites)")
    return True


def flush_writes() -> None:
    """Block until the device whose context is current sees all that cards have written to it until now."""
    _call("cuFlushGPUDirectRDMAWrites", ctypes.c_int(_CURRENT_CONTEXT), ctypes.c_int(_TO_OWNER))
