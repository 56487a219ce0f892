"""Where an array on a device lies, and on which stream its owner works.

    torch tensors                             torch's current stream of their device
    CuPy arrays                               CuPy's current stream
    others with ``__cuda_array_interface__``  the stream they name, else the default one (version 3 of it; an array that
                                              names none, like torch's and Numba's older ones, is ordered there)
    others with CUDA DLPack                   their ``__dlpack__(stream=)`` orders them; results are ordered on CuPy's
                                              current stream, as those of new arrays, which are CuPy's
"""
from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ..orchestration.errors import UnsupportedError
from .device import DeviceLocation

if TYPE_CHECKING:
    from .cuda import CudaStream

#: kDLCUDA, kDLROCM.
GPU_TYPES = {2, 10}
#: What a DLPack consumer calls the legacy default stream.
_LEGACY = 1


def of_ndarray(x: Any) -> DeviceLocation | None:
    """Return the place of an array of a class derived from NumPy's; None: the CPU's."""
    from .host import HostArray, host_device

    return host_device().place(x.stream) if isinstance(x, HostArray) else None


def of_torch(tensor: Any) -> DeviceLocation:
    """Return the place of a tensor on a CUDA (or ROCm) device, under torch's current stream of it."""
    from .cuda import cuda_device

    torch = sys.modules["torch"]
    device, where = cuda_device(tensor.get_device()), tensor.device  # not the tensor: a place shall not keep it

    def current() -> CudaStream:
        return device.stream_at(torch.cuda.current_stream(where).cuda_stream)

    return DeviceLocation(device, current().record(), current)


def of_array_interface(x: Any) -> DeviceLocation:
    """Return the place of *x*, which has ``__cuda_array_interface__``.

    Raises
    ------
    UnsupportedError
        If there is no CuPy, or the memory is on no device that it finds.
    """
    from .cuda import cuda_device, cupy

    module = cupy()
    if isinstance(x, module.ndarray):
        return cuda_device(int(x.device.id)).place()
    runtime = module.cuda.runtime
    interface = x.__cuda_array_interface__
    address = interface["data"][0]
    try:  # what has no elements may lie nowhere
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
    return device.place(device.stream_at(_LEGACY if stream is None else int(stream)))


def of_dlpack(x: Any, device_id: int) -> tuple[DeviceLocation, int]:
    """Return the place of *x*, which is about to be exported on CUDA device *device_id*, and the stream to export it
    on. `location_after_export` comes after the export. Raises as `of_array_interface`.
    """
    from .cuda import cuda_device

    device = cuda_device(device_id)
    torch = sys.modules.get("torch")
    is_torchs = torch is not None and isinstance(x, torch.Tensor)
    return of_torch(x) if is_torchs else device.place(), device.gate.handle


def location_after_export(place: DeviceLocation) -> DeviceLocation:
    """Return *place* as it is once its owner has exported the array on the gate."""
    from .cuda import CudaDevice

    device = place.device
    assert isinstance(device, CudaDevice), "only CUDA devices have a gate"
    return DeviceLocation(device, device.gate.record(), place.caller)
