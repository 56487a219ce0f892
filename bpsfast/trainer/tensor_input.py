"""Converts whatever a user may push into an address, a shape and a dtype name, with an owner of the memory.

Accepted: NumPy arrays and scalars, objects with ``__dlpack__`` on the CPU or a GPU (torch, JAX, ...) or with
``__cuda_array_interface__`` (CuPy, Numba), and the buffer protocol (``array.array``, ``memoryview``, ``bytes``).
Nothing is copied or converted here. The error for memory that cannot be summed as it is names the call that converts
it.

DLPack capsules are read directly (dlpack.h, versions 0 and 1) because NumPy's reader refuses bfloat16.
"""
from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from ..base.dtypes import NAMES, TABLE, wire_name
from ..gpu import arrays
from ..gpu.device import DeviceLocation
from ..gpu.host import HostArray
from ..orchestration.errors import UnsupportedError

_CPU_DEVICES = {1, 3, 11, 13}  # kDLCPU, kDLCUDAHost, kDLROCMHost, kDLCUDAManaged: the CPU may read all of them
_DEVICE_NAMES = {2: "CUDA", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 14: "oneAPI", 17: "MAIA"}
_DLPACK_KINDS = {(0, 8): "int8", (0, 16): "int16", (0, 32): "int32", (0, 64): "int64", (1, 8): "uint8",
                 (2, 16): "float16", (2, 32): "float32", (2, 64): "float64", (4, 16): "bfloat16"}
_DLPACK_CODES = {0: "int", 1: "uint", 2: "float", 3: "opaque", 4: "bfloat", 5: "complex", 6: "bool"}
_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY


@dataclass(frozen=True)
class TensorInput:
    """Memory of one C-contiguous tensor.

    `dtype` is a wire dtype name, `owner` keeps the memory alive, `writable` says whether results may be
    written into it. `location`: on which device, and in which order; None: the CPU's, where it can be read at once.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    writable: bool
    owner: object
    location: DeviceLocation | None = None

    def array(self) -> np.ndarray[Any, Any]:
        """Return a NumPy array over the same memory, read-only unless `writable`; not of a GPU's."""
        if isinstance(self.owner, np.ndarray):
            return self.owner
        if self.nbytes == 0:
            return np.empty(self.shape, TABLE[self.dtype].numpy)
        memory = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
        memory._bpsfast_owner = self.owner  # type: ignore[attr-defined]  # the array keeps `memory` alive
        array = np.ctypeslib.as_array(memory).view(TABLE[self.dtype].numpy).reshape(self.shape)
        array.flags.writeable = self.writable
        return array

    def empty_like(self) -> Any:
        """Return a new array of this shape and dtype on the same device: of torch, of the host device, else of CuPy."""
        assert self.location is not None, "it lies on a device"
        owner = self.owner[1] if isinstance(self.owner, tuple) else self.owner  # with its DLPack capsule
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(owner, torch.Tensor):
            return torch.empty_like(owner, requires_grad=False, memory_format=torch.contiguous_format)
        if isinstance(owner, np.ndarray):
            fresh = np.empty(self.shape, TABLE[self.dtype].numpy).view(type(owner))
            if isinstance(owner, HostArray) and isinstance(fresh, HostArray):
                fresh.stream = owner.stream
            return fresh
        return arrays.zeros(self.shape, self.dtype, self.location.device.name)


def tensor_input(x: object) -> TensorInput:
    """Return the memory of *x*.

    Raises `UnsupportedError` if *x* is no tensor, on an unsupported device, not C-contiguous, or of a dtype that
    bpsfast does not sum.
    """
    if isinstance(x, np.ndarray):
        location = None if type(x) is np.ndarray else arrays.of_ndarray(x)
        return from_array(x) if location is None else replace(from_array(x), location=location)
    if isinstance(x, np.generic):
        copy = np.asarray(x)
        copy.flags.writeable = False  # a write to the copy would not change the scalar
        return from_array(copy)
    if hasattr(x, "__dlpack__") and not _is_cupy(x):
        return _from_dlpack(x)
    if hasattr(x, "__cuda_array_interface__"):
        return _from_array_interface(x)
    try:
        view = memoryview(x)  # type: ignore[arg-type]
    except TypeError:
        raise UnsupportedError(
            f"{_kind(x)} is no NumPy array, has no __dlpack__ and no buffer: convert it with np.asarray(x, dtype)"
        ) from None
    return from_array(np.asarray(view))


def host_input(x: object) -> TensorInput:
    """As `tensor_input`, but raises `UnsupportedError` if *x* lies on a device."""
    found = tensor_input(x)
    if found.location is not None:
        raise UnsupportedError(f"{_kind(x)} lies on {found.location.device.name}, which this call does not support: "
                               "copy it to the CPU first")
    return found


def from_array(array: np.ndarray[Any, Any]) -> TensorInput:
    """Return the memory of *array*."""
    dtype = wire_name(array.dtype)
    if not array.flags.c_contiguous:
        raise UnsupportedError(
            f"an array of shape {array.shape} with strides {array.strides} is not C-contiguous: "
            "pass np.ascontiguousarray(x)"
        )
    return TensorInput(array.ctypes.data, array.shape, dtype, array.nbytes, array.flags.writeable, array)


def _is_cupy(x: object) -> bool:
    return type(x).__module__.partition(".")[0] == "cupy"


def _from_array_interface(x: Any) -> TensorInput:
    """Read ``__cuda_array_interface__`` of *x*."""
    interface = x.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise UnsupportedError(f"{_kind(x)} has a mask, which is not supported")
    dtype = wire_name(x.dtype if _is_cupy(x) else interface["typestr"])
    itemsize, shape = TABLE[dtype].itemsize, tuple(interface["shape"])
    strides = interface.get("strides")
    if strides is not None and not _is_contiguous(shape, tuple(n // itemsize for n in strides)):
        raise UnsupportedError(f"{_kind(x)} of shape {shape} with strides {strides} is not C-contiguous: pass "
                               "cupy.ascontiguousarray(x), or what its framework has for that")
    address, is_read_only = interface["data"]
    return TensorInput(address, shape, dtype, prod(shape) * itemsize, not is_read_only, x, arrays.of_array_interface(x))


def _kind(x: object) -> str:
    return f"an object of type {type(x).__module__}.{type(x).__qualname__}"


# -- DLPack ----------------------------------------------------------------------------------------------------


class _Tensor(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    """DLManagedTensor: the tensor comes first."""

    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _ManagedVersioned(ctypes.Structure):
    """DLManagedTensorVersioned of DLPack 1.x."""

    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _Tensor),
    ]


_capsule_is = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is.argtypes, _capsule_is.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_int
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes, _capsule_pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p


def _from_dlpack(x: Any) -> TensorInput:
    """Read the capsule of *x*, without consuming it: its own destructor releases the tensor."""
    device_type, device_id = x.__dlpack_device__()
    stream, location = None, None
    if int(device_type) in arrays.GPU_TYPES:
        location, stream = arrays.of_dlpack(x, int(device_id))
    elif int(device_type) not in _CPU_DEVICES:
        name = _DEVICE_NAMES.get(int(device_type), f"DLPack device type {int(device_type)}")
        raise UnsupportedError(f"{_kind(x)} lives on {name} device {device_id}: copy it to the CPU first")
    capsule = _export(x, stream)
    if location is not None:
        location = arrays.location_after_export(location)
    if _capsule_is(capsule, b"dltensor_versioned"):
        versioned = _ManagedVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        if versioned.major > 1:
            raise UnsupportedError(f"{_kind(x)} exports DLPack {versioned.major}.{versioned.minor}; supported is 1.x")
        tensor, writable = versioned.tensor, not versioned.flags & _READ_ONLY
    else:
        # Before 1.0 there is no read-only flag, and JAX's memory must not be written.
        tensor, writable = _Managed.from_address(_capsule_pointer(capsule, b"dltensor")).tensor, False
    dtype = _DLPACK_KINDS.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        found = f"{_DLPACK_CODES.get(tensor.code, tensor.code)}{tensor.bits}" + f"x{tensor.lanes}" * (tensor.lanes != 1)
        raise UnsupportedError(f"{_kind(x)} has dtype {found}, which cannot be summed; bpsfast sums {', '.join(NAMES)}")
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else _c_strides(shape)
    if not _is_contiguous(shape, strides):
        raise UnsupportedError(
            f"{_kind(x)} of shape {shape} with strides {strides} (elements) is not C-contiguous: "
            "pass x.contiguous() or np.ascontiguousarray(x)"
        )
    nbytes = prod(shape) * tensor.bits // 8
    return TensorInput((tensor.data or 0) + tensor.byte_offset, shape, dtype, nbytes, writable, (capsule, x), location)


def _export(x: Any, stream: int | None) -> object:
    """Return a capsule of *x*, of DLPack 1 if possible, ready on *stream* (None: it is on the CPU)."""
    ordered = {} if stream is None else {"stream": stream}
    try:
        try:
            return x.__dlpack__(max_version=(1, 0), **ordered)
        except TypeError:  # the producer is older than DLPack 1.0
            return x.__dlpack__(**ordered)
    except (BufferError, RuntimeError, ValueError, TypeError) as exc:
        raise UnsupportedError(f"{_kind(x)} refuses to export its memory by DLPack: {exc}") from exc


def _c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements follow each other in C order; dimensions of length 1 may have any stride."""
    if 0 in shape:
        return True
    return all(n == 1 or have == want for n, have, want in zip(shape, strides, _c_strides(shape)))
