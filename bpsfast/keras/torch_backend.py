"""Sums Keras's tensors on PyTorch, by copies to and from shared memory of the node process (`trainer.gradients`)."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..torch.ops import wire_dtype_name
from ..trainer import process
from ..trainer.gradients import Gradients
from ..trainer.process import barrier as barrier, init as init, shutdown as shutdown
from ..trainer.session import Session
from ..trainer.tensor_input import TensorInput, tensor_input
from .backend import GradientSet

_gradients: dict[GradientSet, Gradients] = {}
_session: list[Session] = []  # the session of `_gradients`


def dtype_of(tensor: Any) -> str:
    """See `backend.TensorBackend`."""
    return wire_dtype_name(tensor.dtype)


def is_symbolic(tensor: Any) -> bool:
    """See `backend.TensorBackend`."""
    return bool(tensor.device.type == "meta")


def reduced(chosen: GradientSet, tensors: Sequence[torch.Tensor], learning_rate: Callable[[], Any],
            condition: Any = None) -> list[torch.Tensor]:
    """See `backend.TensorBackend`; raises as `bpsfast.push_pull`. Sends first what the next forward pass uses first."""
    sources = [tensor.detach().resolve_neg().contiguous() for tensor in tensors]
    inputs = [_memory(source) for source in sources]
    sums = [torch.empty_like(source) for source in sources]
    outputs = [_memory(each) for each in sums]
    gradients = _gradients_of(chosen, inputs)
    if chosen.has_error_feedback:
        gradients.learning_rate = float(learning_rate())
    for name, source in reversed(list(zip(chosen.names, inputs))):  # the order of the backward pass
        if source.location is not None:
            gradients.fill_from(name, source)
        else:
            gradients.fill(name, source.address, source.nbytes)
    for name, target in zip(chosen.names, outputs):
        if target.location is not None:
            gradients.deliver_to(name, target)
        else:
            gradients.deliver(name, target.address, target.nbytes)
    gradients.step()
    return sums


def _memory(tensor: torch.Tensor) -> TensorInput:
    return process.current().devices.located(tensor_input(tensor))


def _gradients_of(chosen: GradientSet, inputs: Sequence[TensorInput]) -> Gradients:
    session = process.current()
    if _session != [session]:
        _gradients.clear()
        _session[:] = [session]
    if chosen not in _gradients:
        devices = {None if each.location is None else each.location.device.name for each in inputs}
        _gradients[chosen] = Gradients(
            dict(zip(chosen.names, chosen.kinds)), average=chosen.average, prefix=chosen.prefix,
            compression=dict(zip(chosen.names, chosen.codecs)), on_device=devices.pop() if len(devices) == 1 else None)
    return _gradients[chosen]
