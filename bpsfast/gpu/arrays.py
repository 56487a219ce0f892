"""Finds the GPU and stream of an array of PyTorch, CuPy or another library, and allocates arrays on GPUs.

    torch tensors                             torch's current stream of their device
    CuPy arrays                               CuPy's current stream
    others with ``__cuda_array_interface__``  the stream that they name, else the default one (version 3 of it; older
                                              arrays name none, as of torch and Numba, and are ordered there)
    others with CUDA DLPack                   ``__dlpack__(stream=)`` orders them; results are ordered on CuPy's current
                                              stream, as those of new arrays, which are CuPy's
"""
from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..base.dtypes import TABLE
from ..orchestration.errors import ConfigError, UnsupportedError
from .cuda import CudaDevice, CudaStream, cuda_device, cupy
from .device import Device, DeviceLocation
from .host import HostArray, host_device

#: kDLCUDA, kDLROCM.
GPU_TYPES = {2, 10}
#: What a DLPack consumer calls the legacy default stream.
_LEGACY = 1


def of_ndarray(x: Any) -> DeviceLocation | None:
    """Return the location of an array of a class derived from NumPy's; None if it lies on the CPU."""
    return host_device().location(x.stream) if isinstance(x, HostArray) else None


def of_torch(tensor: Any) -> DeviceLocation:
    """Return the location of a tensor on a CUDA (or ROCm) device, ordered on torch's current stream of it."""
    torch = sys.modules["torch"]
    device, where = cuda_device(tensor.get_device()), tensor.device  # not the tensor, which a location must not keep

    def current() -> CudaStream:
        return device.stream_at(torch.cuda.current_stream(where).cuda_stream)

    return DeviceLocation(device, current().record(), current)


def of_array_interface(x: Any) -> DeviceLocation:
    """Return the location of *x*, which has ``__cuda_array_interface__``.

    Raises `UnsupportedError` if there is no CuPy, or it finds no device with this memory.
    """
    module = cupy()
    if isinstance(x, module.ndarray):
        return cuda_device(int(x.device.id)).location()
    runtime = module.cuda.runtime
    interface = x.__cuda_array_interface__
    address = interface["data"][0]
    try:  # an empty array may have no address
        number = int(runtime.pointerGetAttributes(address).device if address else runtime.getDevice())
    except runtime.CUDARuntimeError as exc:
        raise UnsupportedError(f"CUDA does not know the memory at {address:#x}: {exc}") from exc
    if number < 0:
        raise UnsupportedError(f"the memory at {address:#x} is the host's: CUDA does not know it")
    device = cuda_device(number)
    stream = interface.get("stream")
    if stream == 0:
        raise UnsupportedError("__cuda_array_interface__ names stream 0, which its version 3 forbids: 1 is the default "
                               "stream, 2 that of the thread")
    return device.location(device.stream_at(_LEGACY if stream is None else int(stream)))


def of_dlpack(x: Any, device_id: int) -> tuple[DeviceLocation, int]:
    """Return the location of *x* on CUDA device *device_id*, and the stream to export it on; raises as
    `of_array_interface`.

    Call `location_after_export` after the export.
    """
    device = cuda_device(device_id)
    torch = sys.modules.get("torch")
    is_torchs = torch is not None and isinstance(x, torch.Tensor)
    return of_torch(x) if is_torchs else device.location(), device.dlpack_stream.handle


def location_after_export(location: DeviceLocation) -> DeviceLocation:
    """Return *location* as it is after its owner has exported the array on the device's DLPack stream."""
    device = location.device
    assert isinstance(device, CudaDevice), "only CUDA devices export by DLPack"
    return DeviceLocation(device, device.dlpack_stream.record(), location.caller)


def device_of(device: str) -> Device:
    """Return the device of that name: "host", "cuda" or "cuda:1". Raises as `zeros`."""
    if device == "host":
        return host_device()
    kind, colon, number = device.partition(":")
    if kind != "cuda" or (colon and not number.isdecimal()):
        raise ConfigError(f"device={device!r}: expected 'cuda', 'cuda:0' or the like, or 'host'")
    return cuda_device(int(number) if colon else int(cupy().cuda.runtime.getDevice()))


def zeros(shape: tuple[int, ...], dtype: str, device: str) -> Any:
    """Return a new array of zeros on *device* ("host", "cuda" or "cuda:1"); on a GPU a CuPy array, ordered on CuPy's
    current stream.

    Raises `ConfigError` if *device* is no such name. Raises `UnsupportedError` if there is no such device, or CuPy has
    no such dtype.
    """
    numpy_dtype = TABLE[dtype].numpy
    if device == "host":
        return np.zeros(shape, numpy_dtype).view(HostArray)
    found = device_of(device)  # first: a wrong name is an error without CuPy, too
    module = cupy()
    assert isinstance(found, CudaDevice), f"{device} is of no known kind"
    with found.current(f"making an array of {shape}"):
        try:
            return module.zeros(shape, numpy_dtype)
        except (TypeError, ValueError) as exc:
            raise UnsupportedError(f"CuPy has no arrays of {dtype}: {exc}; give out= of your framework") from exc
