"""Objects, parameters and optimizer states of one rank on all of them; objects of all ranks on all of them."""
from __future__ import annotations

import pickle
from typing import Any

import torch

from ..orchestration.errors import ConfigError
from ..torch.broadcast import load_state, take_tensors
from ..torch.kept import own_state
from ..trainer.objects import dump
from . import runtime
from .allgather_ops import grouped_allgather
from .broadcast_ops import broadcast_bytes, broadcast_group_
from .process_sets import ProcessSet, global_process_set


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> Any:
    """Return job rank *root_rank*'s *obj* on all ranks of *process_set* (a copy elsewhere).

    It is pickled, by cloudpickle if that is installed; only members of the job can send one. *name* None: all ranks
    call this in one order.
    """
    is_root = runtime.current().rank == root_rank
    title = _title(name, "broadcast_object", process_set)
    data = broadcast_bytes(dump(obj) if is_root else None, root_rank, title, process_set)
    return obj if is_root else pickle.loads(data)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the *obj* of all ranks of *process_set*, in their order. Pickled as by `broadcast_object`."""
    data = torch.frombuffer(bytearray(dump(obj)), dtype=torch.uint8)
    size = torch.tensor([data.numel()])
    gathered, sizes = grouped_allgather([data, size], _title(name, "allgather_object", process_set), process_set)
    return [pickle.loads(piece.numpy().tobytes()) for piece in gathered.split(sizes.tolist())]


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite *params* on all ranks by those of job rank *root_rank*.

    Parameters
    ----------
    params
        A ``state_dict()``, or a list of tensors or of (name, tensor), as of ``model.named_parameters()``.

    Raises
    ------
    ConfigError
        If it is something else, or holds what is no tensor.
    HorovodInternalError
        On all ranks, if their tensors differ in name, dtype or shape; the text names the first.
    """
    if isinstance(params, dict):
        items: list[Any] = list(params.items())
    elif isinstance(params, list | tuple) or hasattr(params, "__next__"):
        items = list(params)
    else:
        raise ConfigError(f"invalid params of type: {type(params)}")
    named = [item if isinstance(item, tuple) else (f"{i:06}", item) for i, item in enumerate(items)]
    named = sorted(((str(name), tensor) for name, tensor in named if tensor is not None), key=lambda item: item[0])
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"invalid params of type: {name!r} is a {type(tensor).__name__}, no tensor; use "
                              "broadcast_object")
    title = _title(None, "broadcast_parameters", global_process_set)
    broadcast_group_([tensor for _, tensor in named], root_rank, title, [name for name, _ in named])


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Overwrite the state and the options of *optimizer* on all ranks by those of job rank *root_rank*.

    A rank whose optimizer has no state yet gets it; no step is made for that, so *model*, by which Horovod finds
    sparse parameters to make one, is not used.

    Raises
    ------
    ConfigError
        For LBFGS, whose state is a history of closures.
    MismatchError
        If the optimizers have different parameter groups.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("cannot broadcast torch.optim.LBFGS state: make it after broadcast_parameters")
    is_root = runtime.current().rank == root_rank
    tensors: list[torch.Tensor] = []
    skeleton = take_tensors(own_state(optimizer), tensors) if is_root else None
    kinds = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    title = _title(None, "broadcast_optimizer_state", global_process_set)
    skeleton, kinds = broadcast_object((skeleton, kinds), root_rank, f"{title}.options")
    if not is_root:
        tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in kinds]
    broadcast_group_(tensors, root_rank, title)
    if not is_root:
        load_state(optimizer, skeleton, tensors, runtime.current().rank, root_rank)


def _title(name: str | None, what: str, process_set: ProcessSet) -> str:
    return f"{what}.{name}" if name is not None else runtime.service_of(process_set, what).unnamed(what)
