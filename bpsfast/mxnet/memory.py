"""Where the elements of an NDArray lie. MXNet computes later than it is told: what is read here has been computed."""
from __future__ import annotations

import ctypes
from math import prod
from typing import Any

import mxnet
import numpy as np
from mxnet.base import _LIB, check_call

from ..base.dtypes import TABLE, wire_name
from ..orchestration.errors import UnsupportedError
from ..trainer.tensor_input import TensorInput


def memory_of(tensor: Any) -> TensorInput:
    """Wait for all that MXNet still does with *tensor*, and return where it lies: it may be read and written.

    Raises
    ------
    UnsupportedError
        If it is no NDArray, sparse, not on the CPU, or of a dtype that is not summed.
    """
    if not isinstance(tensor, mxnet.nd.NDArray):
        raise UnsupportedError(f"expected an mxnet.nd.NDArray (bpsfast.push_pull takes others), got "
                               f"{type(tensor).__name__}")
    if tensor.stype != "default":
        raise UnsupportedError(f"a {tensor.stype} tensor of shape {tensor.shape} is not dense: use "
                               "tensor.tostype('default')")
    if tensor.context.device_type not in ("cpu", "cpu_pinned", "cpu_shared"):
        raise UnsupportedError(f"a tensor of shape {tensor.shape} is on {tensor.context}: use "
                               "tensor.as_in_context(mxnet.cpu())")
    dtype = _wire_name(tensor.dtype)
    shape = tuple(tensor.shape)
    check_call(_LIB.MXNDArrayWaitToWrite(tensor.handle))
    address = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(tensor.handle, ctypes.byref(address)))
    return TensorInput(address.value or 0, shape, dtype, prod(shape) * TABLE[dtype].itemsize, True, tensor)


def _wire_name(dtype: Any) -> str:
    names = np.dtype(dtype).names  # MXNet's bfloat16 is a structure of one uint16
    return "bfloat16" if names == ("bfloat16",) else wire_name(dtype)
