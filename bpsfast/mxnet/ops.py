"""push_pull and broadcast of NDArrays, with BytePS's signatures (`byteps.mxnet.ops`)."""
from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import mxnet
import numpy as np
from mxnet.base import _LIB, check_call

from ..base.dtypes import TABLE, wire_name
from ..compression import from_byteps
from ..compression.choice import Choice
from ..orchestration.codec import CodecSpec
from ..orchestration.errors import UnsupportedError
from ..trainer import handle as operations, process
from ..trainer.broadcaster import broadcast
from ..trainer.tensor_input import TensorInput


def memory_of(tensor: Any) -> TensorInput:
    """Wait until MXNet has finished with *tensor*, and return its memory, which may be read and written.

    Raises UnsupportedError if it is not a dense NDArray on the CPU of a supported dtype.
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

_codecs: dict[str, CodecSpec] = {}  # by tensor name, from `byteps_declare_tensor`


def byteps_declare_tensor(name: str, **kwargs: Any) -> None:
    """Declare *name*, in the same order on all ranks: at equal priority, names declared earlier are sent first.

    *kwargs* are BytePS's keywords of compression (`bpsfast.compression.from_byteps`).
    """
    codec = from_byteps(kwargs)
    session = process.current()
    session.tensors.note_order(name)
    if codec is not None:
        _codecs[name] = codec


def byteps_push_pull(tensor: Any, version: int = 0, priority: int = 0, name: str | None = None,
                     is_average: bool = True) -> None:
    """Replace *tensor* by its sum (mean) over all ranks.

    BytePS queues this with MXNet's engine; here the call returns when it is complete (`push_pull_all` overlaps
    several). *version* is BytePS's, and ignored.

    Raises UnsupportedError, MismatchError, BusyError, ClosedError, StallError, or PeerLostError as `bpsfast.push_pull`.
    """
    push_pull_all([(name, tensor, priority)], is_average)


def push_pull_all(tensors: Sequence[tuple[str | None, Any, int]], is_average: bool = True,
                  compression: Choice | None = None, learning_rate: float | None = None) -> None:
    """Replace each of *tensors* (name, tensor, priority) by its sum (mean); send all before the first is awaited."""
    tensors_of_job = process.current().tensors
    memories = [memory_of(tensor) for _, tensor, _ in tensors]
    handles = []
    for (name, tensor, priority), memory in zip(tensors, memories):
        priority = tensors_of_job.noted_priority(name, priority)
        codec = _codecs.get(name or "", compression)
        handles.append(operations.start(memory, name, is_average, priority, memory, tensor, codec,
                                        learning_rate if codec is not None else None))
    for handle in handles:
        handle.wait()


def broadcast_parameters(params: Mapping[str, Any], root_rank: int = 0) -> None:
    """Overwrite *params* on all ranks with those of rank *root_rank*, in the order of their names.

    *params* may be a Gluon ParameterDict (``net.collect_params()``) whose parameters are initialized.

    Raises
    ------
    UnsupportedError
        If *params* is not a mapping, or a parameter's shape is not known yet.
    MismatchError
        If the ranks' tensors differ.
    """
    if not hasattr(params, "items"):
        raise UnsupportedError(f"expected a mapping of names to tensors, got {type(params).__name__}")
    for name, value in sorted(params.items()):
        broadcast(memory_of(data_of(name, value)).array(), root_rank, name)


def data_of(name: str, value: Any) -> Any:
    """Return the tensor of *value*, a tensor or a Gluon parameter."""
    if not isinstance(value, mxnet.gluon.Parameter):
        return value
    try:
        return value.data()
    except (mxnet.gluon.parameter.DeferredInitializationError, RuntimeError) as exc:
        raise UnsupportedError(f"parameter {name!r} has no data yet: initialize the network, and run it once, or let "
                               f"DistributedTrainer broadcast it ({exc})") from exc
