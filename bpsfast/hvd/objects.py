"""Horovod's broadcasts of objects, parameters and optimizer states, and its allgather of objects, for PyTorch."""
from __future__ import annotations

from typing import Any

import torch

from ..orchestration.errors import ConfigError, UnsupportedError
from ..torch.broadcast import share_optimizer_state
from ..trainer.object_broadcast import dump_or_say_why, load
from . import runtime
from .collective_ops import begin_allgather, broadcast_bytes, broadcast_group_
from .errors import internal
from .runtime import ProcessSet, global_process_set


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> Any:
    """Return job rank *root_rank*'s *obj* on all ranks of *process_set* (a copy elsewhere).

    It is pickled, by cloudpickle if that is installed; only ranks of the job can send one. *name* None: all ranks call
    this in one order. If the root cannot pickle it, it raises that error, and the other ranks `HorovodInternalError`.
    """
    return _broadcast_object(obj, root_rank, name, process_set, "broadcast_object")


def _broadcast_object(obj: Any, root_rank: int, name: str | None, process_set: ProcessSet, label: str) -> Any:
    me = runtime.current().rank
    data, error = dump_or_say_why(obj, me) if me == root_rank else (None, None)
    data = broadcast_bytes(data, root_rank, name, process_set, label)
    if error is not None:
        raise error
    return obj if me == root_rank else _loaded(data)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the *obj* of each rank of *process_set*, in their order; pickled, and errors, as by `broadcast_object`."""
    packed, error = dump_or_say_why(obj, runtime.current().rank)
    data = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    size = torch.tensor([data.numel()])
    gathered, sizes = begin_allgather([data, size], name, process_set, label="allgather_object").wait()
    if error is not None:
        raise error
    return [_loaded(piece.numpy().tobytes()) for piece in gathered.split(sizes.tolist())]


def _loaded(data: bytes) -> Any:
    try:
        return load(data)
    except UnsupportedError as exc:
        raise internal(exc) from None


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite *params* on all ranks by those of job rank *root_rank*.

    Parameters
    ----------
    params
        A ``state_dict()``, or a list of tensors or of (name, tensor), as of ``model.named_parameters()``.

    Raises
    ------
    ConfigError
        If it is something else, or contains something else than tensors.
    HorovodInternalError
        On all ranks, if their tensors differ in name, dtype or shape; the text names the first.
    """
    if not isinstance(params, dict | list | tuple) and not hasattr(params, "__next__"):
        raise ConfigError(f"invalid params of type: {type(params)}")
    items = params.items() if isinstance(params, dict) else params
    named = [item if isinstance(item, tuple) else (f"{i:06}", item) for i, item in enumerate(items)]
    named = sorted(((str(name), tensor) for name, tensor in named if tensor is not None), key=lambda item: item[0])
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"invalid params of type: {name!r} is a {type(tensor).__name__}, no tensor; use "
                              "broadcast_object")
    broadcast_group_([tensor for _, tensor in named], root_rank, "broadcast_parameters", [name for name, _ in named])


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Overwrite the state and the options of *optimizer* on all ranks by those of job rank *root_rank*.

    A rank whose optimizer has no state yet gets it, and, as with Horovod, zeros for gradients that are None. Horovod
    makes a step for that, for which it needs *model*; here no step changes the parameters, and *model* is not used.

    Raises
    ------
    ConfigError
        For LBFGS, whose state is a history of closures.
    MismatchError
        If the optimizers have different parameter groups.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("cannot broadcast torch.optim.LBFGS state: make it after broadcast_parameters")
    fresh = [p for group in optimizer.param_groups for p in group["params"]] if not optimizer.state else []
    share_optimizer_state(
        optimizer, runtime.current().rank, root_rank,
        lambda value: _broadcast_object(value, root_rank, None, global_process_set, "broadcast_optimizer_options"),
        lambda tensors: broadcast_group_(tensors, root_rank, "broadcast_optimizer_state"))
    for p in fresh:
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p, requires_grad=False)
