"""New arrays on devices: results, and what `bpsfast.empty` and `bpsfast.Gradients` give out."""
from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.dtypes import TABLE
from ..orchestration.errors import ConfigError, UnsupportedError
from .host import HostArray, host_device

if TYPE_CHECKING:
    from ..trainer.tensor_input import TensorInput
    from .device import Device


def empty_like(source: TensorInput) -> Any:
    """Return a new array of the kind of *source*, which lies on a device: torch's, the host device's, else CuPy's."""
    assert source.place is not None, "it lies on a device"
    owner = source.owner[1] if isinstance(source.owner, tuple) else source.owner  # with its DLPack capsule
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(owner, torch.Tensor):
        return torch.empty_like(owner, requires_grad=False, memory_format=torch.contiguous_format)
    if isinstance(owner, np.ndarray):
        fresh = np.empty(source.shape, TABLE[source.dtype].numpy).view(type(owner))
        if isinstance(owner, HostArray) and isinstance(fresh, HostArray):
            fresh.stream = owner.stream
        return fresh
    return zeros(source.shape, source.dtype, source.place.device.name)


def device_of(device: str) -> Device:
    """Return the device that is called so, as `zeros` says; raises as that."""
    if device == "host":
        return host_device()
    kind, colon, number = device.partition(":")
    if kind != "cuda" or (colon and not number.isdecimal()):
        raise ConfigError(f"device={device!r}: expected 'cuda', 'cuda:0' or the like, or 'host'")
    from .cuda import cuda_device, cupy

    return cuda_device(int(number) if colon else int(cupy().cuda.runtime.getDevice()))


def zeros(shape: tuple[int, ...], dtype: str, device: str) -> Any:
    """Return a new array of zeros on *device*: "host", "cuda", "cuda:1"; a CuPy array on a GPU, ordered on CuPy's
    current stream.

    Raises
    ------
    ConfigError
        If *device* is no such name.
    UnsupportedError
        If that device is not there, or CuPy has no such dtype.
    """
    numpy_dtype = TABLE[dtype].numpy
    if device == "host":
        return np.zeros(shape, numpy_dtype).view(HostArray)
    place = device_of(device)  # before CuPy is looked for: a wrong name is wrong with it and without
    from .cuda import CudaDevice, cupy

    module = cupy()
    assert isinstance(place, CudaDevice), f"{device} is of no known kind"
    with place.current(f"making an array of {shape}"):
        try:
            return module.zeros(shape, numpy_dtype)
        except (TypeError, ValueError) as exc:
            raise UnsupportedError(f"CuPy has no arrays of {dtype}: {exc}; give out= of your framework") from exc
