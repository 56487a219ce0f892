"""Sums of Keras's tensors on PyTorch, as gradients of a model in shared memory (`trainer.gradients`)."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..base.dtypes import NAMES
from ..orchestration.errors import UnsupportedError
from ..trainer import process
from ..trainer.gradients import Gradients
from ..trainer.process import barrier as barrier, init as init, shutdown as shutdown
from ..trainer.session import Session
from ..trainer.tensor_input import TensorInput, tensor_input
from .backend import GradientSet

_gradients: dict[GradientSet, Gradients] = {}
_session: list[Session] = []  # the session of `_gradients`


def dtype_of(tensor: Any) -> str:
    """Return the wire name of *tensor*'s dtype; raises `UnsupportedError` if it is not summed."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in NAMES:
        raise UnsupportedError(f"{tensor.dtype} cannot be summed; bpsfast sums {', '.join(NAMES)}")
    return name


def is_symbolic(tensor: Any) -> bool:
    """See `backend.TensorBackend`."""
    return bool(tensor.device.type == "meta")


def reduced(chosen: GradientSet, tensors: Sequence[torch.Tensor],
            learning_rate: Callable[[], Any]) -> list[torch.Tensor]:
    """Return the sums (means) of *tensors* as new tensors. What the next forward pass uses first travels first.

    Raises
    ------
    UnsupportedError, MismatchError, BusyError, ClosedError, StallError, PeerLostError
        As `bpsfast.push_pull`.
    """
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


def reduced_if(condition: Any, chosen: GradientSet, tensors: Sequence[torch.Tensor],
               learning_rate: Callable[[], Any]) -> list[torch.Tensor]:
    """As `reduced`: on PyTorch Keras calls this only where *condition* is true."""
    return reduced(chosen, tensors, learning_rate)


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
