"""Submits Horovod's operations on tensors or NumPy arrays, and returns handles by which the caller polls and waits."""
from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from ..base.dtypes import NAMES
from ..orchestration.errors import ConfigError, UnsupportedError
from ..orchestration.priority.negotiation import Kind, Request, Spec
from ..torch.ops import require_dense
from . import runtime
from .errors import TensorTypeError
from .runtime import ProcessSet
from .service import Operation


class Handle:
    """One submitted operation. Any thread may wait; all get the same result."""

    def __init__(self, operation: Operation, give: Callable[[Any], Any]) -> None:
        self._operation = operation
        self._give = give
        self._result: list[Any] = []

    def __repr__(self) -> str:
        return f"<Handle {self._operation.request.name} {'done' if self.done() else 'under way'}>"

    def done(self) -> bool:
        """Return whether `wait` will not block."""
        return self._operation.done()

    def wait(self) -> Any:
        """Wait for the operation and return its result, or raise its error."""
        result = self._operation.wait()
        if not self._result:
            self._result.append(self._give(result))
        return self._result[0]


def poll(handle: Handle) -> bool:
    """Return whether `synchronize` of *handle* will not block.

    Raises ConfigError if *handle* is not a handle, or is the function that `sparse_allreduce_async` returns.
    """
    if not isinstance(handle, Handle):
        raise _no_handle(handle)
    return handle.done()


def synchronize(handle: Any) -> Any:
    """Wait for *handle* and return its result; that of `sparse_allreduce_async` may also be called.

    Raises
    ------
    ConfigError
        *handle* is not a handle.
    HorovodInternalError
        The operation failed. The error is also of the bpsfast class of its cause (`MismatchError`: the ranks asked for
        different things; `PeerLostError`, `StallError`, `ClosedError`).
    """
    if not isinstance(handle, Handle) and not callable(handle):
        raise _no_handle(handle)
    return handle.wait() if isinstance(handle, Handle) else handle()


def _no_handle(given: Any) -> ConfigError:
    return ConfigError(f"{reprlib.repr(given)} is a {type(given).__name__}, no handle of an operation")


def begin(process_set: ProcessSet, kind: Kind, name: str | None, inputs: Sequence[torch.Tensor],
          outputs: Sequence[torch.Tensor], give: Callable[[Any], Any], *, grouped: bool = False, label: str = "",
          names: Sequence[str] | None = None, shapes: Sequence[tuple[int, ...] | None] | None = None,
          **fields: Any) -> Handle:
    """Submit an operation to all ranks of *process_set*.

    *inputs* and *outputs* are contiguous CPU tensors without autograd; *outputs* is empty if the response tells their
    shapes. *give* turns the executor's result into the caller's. *label*, by default the kind, is the prefix of the
    operation's name. *names* and *shapes* of *inputs* replace names made of *name*, and their own shapes; all ranks
    must give the same names. *fields* are further fields of `Request`, which the caller has checked.

    Raises ConfigError if *name* is not a string that can be encoded, or this rank is not in *process_set*; also as
    `NegotiationService.submit`.
    """
    service = runtime.current().service(process_set, kind)
    label = label or (f"grouped_{kind}" if grouped else kind)

    def make(title: str) -> Operation:
        n = len(inputs)
        own = names or [f"{title}_{i + 1}of{n}" if grouped else title for i in range(n)]
        specs = tuple(
            Spec(own[i], str(tensor.dtype).removeprefix("torch."),
                 tensor.element_size(), tuple(tensor.shape) if shapes is None else shapes[i])
            for i, tensor in enumerate(inputs))
        return Operation(Request(rank=service.rank, name=title, kind=kind, specs=specs, **fields), inputs, outputs)

    for each in (*(names or ()), *(() if name is None else (name,))):
        _check_name(each)
    if name is None:
        return Handle(service.submit_unnamed(label, make), give)
    return Handle(service.submit(make(f"{label}.{name}")), give)


def _check_name(name: object) -> None:
    """Raise `ConfigError` if *name* cannot be sent, which would end the set's service."""
    try:
        str.encode(name)  # type: ignore[arg-type]
    except (TypeError, UnicodeEncodeError) as exc:
        raise ConfigError(f"name={reprlib.repr(name)}: expected a string, or None ({exc})") from None


def readable(x: Any, reduces: bool) -> torch.Tensor:
    """Return *x* as a contiguous CPU tensor without autograd, without a copy if that is possible.

    Raises TensorTypeError if it is not a dense tensor or array on the CPU, or if the operation *reduces* and does not
    support its dtype.
    """
    tensor = _from_array(x) if isinstance(x, np.ndarray) else x
    try:
        require_dense(tensor, "a torch.Tensor or a NumPy array", "sparse_allreduce_async, or tensor.to_dense()",
                      "tensor.cpu()")
    except UnsupportedError as exc:
        raise TensorTypeError(str(exc)) from None
    if reduces and str(tensor.dtype).removeprefix("torch.") not in NAMES:
        raise TensorTypeError(f"Tensor type {tensor.type()} is not supported. bpsfast reduces {', '.join(NAMES)}")
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def writable(x: Any, reduces: bool) -> torch.Tensor:
    """As `readable`, never a copy; raises ConfigError if *x* is not contiguous or not writable."""
    if isinstance(x, np.ndarray) and not x.flags.writeable:
        raise ConfigError(f"an array of shape {x.shape} is read-only: its contents cannot be replaced")
    tensor = readable(x, reduces)
    address = x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr()
    if tensor.numel() and tensor.data_ptr() != address:
        raise ConfigError("Tensor is required to be contiguous.")
    return tensor


def like(x: Any, tensor: torch.Tensor) -> Any:
    """Return *tensor* as a NumPy array if *x* is one, else as it is."""
    if not isinstance(x, np.ndarray):
        return tensor
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def like_each(given: Sequence[Any], results: Sequence[torch.Tensor], grouped: bool) -> Any:
    """Return `like` of each of *given* and its result: a list if *grouped*, else the only one."""
    found = [like(x, tensor) for x, tensor in zip(given, results)]
    return found if grouped else found[0]


def wants_gradient(*values: Any) -> bool:
    """Return whether autograd records operations on any of *values*."""
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in values)


def _from_array(array: np.ndarray[Any, Any]) -> torch.Tensor:
    if not array.flags.c_contiguous or not array.flags.writeable:
        array = array.copy()
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as exc:  # torch has no such dtype, or it is byte-swapped
        raise TensorTypeError(f"an array of dtype {array.dtype.str} is no tensor: {exc}") from exc
