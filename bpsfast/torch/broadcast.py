"""Broadcasts of parameters, buffers and optimizer state from one rank to all."""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..orchestration.errors import MismatchError, UnsupportedError
from ..trainer import process
from ..trainer.broadcaster import Broadcaster, check_root
from ..trainer.object_broadcast import Manifest, broadcast_object, difference
from .gradient_hooks import Named
from .ops import REACHED
from .optimizer_extras import load_user_state_dict, user_state_dict


class _Tensor(NamedTuple):
    """Placeholder in a pickled optimizer state for a tensor that is sent separately."""

    number: int


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int, prefix: str = "Parameter.") -> None:
    """Overwrite *params* on all ranks with those of rank *root_rank*.

    Parameters
    ----------
    params
        A ``state_dict()``, ``named_parameters()`` or another sequence of (name, tensor) or of tensors.

    Raises
    ------
    MismatchError
        If the ranks' tensors differ in name, dtype or shape; the text names the first.
    """
    if isinstance(params, Mapping):
        named = sorted(params.items())
    else:
        named = [item if isinstance(item, tuple) else (str(number), item) for number, item in enumerate(params)]
    tensors = []
    for name, tensor in named:
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedError(f"{prefix}{name} is a {type(tensor).__name__}, not a tensor: use broadcast_object")
        tensors.append((prefix + name, tensor))
    _broadcast_tensors(tensors, root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, prefix: str = "Parameter.") -> None:
    """Overwrite the state and the options of *optimizer* on all ranks with those of rank *root_rank*.

    A rank whose optimizer has no state yet gets it, without a step. Raises `UnsupportedError` for LBFGS, whose state is
    a history of closures, and `MismatchError` if the optimizers have different parameter groups.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError("the state of torch.optim.LBFGS cannot be broadcast: make it after broadcast_parameters")
    session = process.current()
    check_root(session, root_rank)
    title = f"{prefix}optimizer {type(optimizer).__name__}"
    share_optimizer_state(
        optimizer, session.rank, root_rank, lambda value: broadcast_object(value, root_rank, title),
        lambda tensors: _broadcast_tensors([(f"{prefix}{i}", each) for i, each in enumerate(tensors)], root_rank))


def share_optimizer_state(optimizer: torch.optim.Optimizer, rank: int, root_rank: int,
                          share_object: Callable[[Any], Any],
                          share_tensors: Callable[[list[torch.Tensor]], None]) -> None:
    """Overwrite the state of *optimizer*, of *rank*, with that of *root_rank*; all ranks call this.

    *share_object* returns the root's object on all ranks. *share_tensors* overwrites tensors with the root's, which
    have the same dtypes and shapes. Raises `MismatchError` if the optimizers have different parameter groups.
    """
    is_root = rank == root_rank
    tensors: list[torch.Tensor] = []

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return _Tensor(len(tensors) - 1)

    skeleton = _map_leaves(user_state_dict(optimizer), take) if is_root else None
    kinds = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    skeleton, kinds = share_object((skeleton, kinds))
    if not is_root:
        tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in kinds]
    share_tensors(tensors)
    if is_root:
        return
    try:
        load_user_state_dict(optimizer, _map_leaves(
            skeleton, lambda leaf: tensors[leaf.number] if isinstance(leaf, _Tensor) else leaf))
    except ValueError as exc:
        raise MismatchError(f"the optimizer of rank {rank} has other parameter groups than that of rank {root_rank}: "
                            f"{exc}") from exc


def broadcast_buffers(named: list[Named], root_rank: int, title: str) -> None:
    """As `broadcast_parameters`, in one message, for every forward pass. *title* must be the same on all ranks."""
    kinds = hashlib.sha256(repr(_manifest(named)).encode()).hexdigest()[:16]
    _stream(named, root_rank, f"{title}, {len(named)} tensors, whose names, dtypes and shapes have the digest {kinds}")


def _broadcast_tensors(named: list[Named], root_rank: int) -> None:
    """Send all tensors as one stream, after a list of their names, dtypes and shapes."""
    session = process.current()
    check_root(session, root_rank)
    mine = _manifest(named)
    theirs: Manifest = broadcast_object(mine, root_rank, "list of tensors")
    if session.size > 1:
        wrong = difference(mine, theirs, "tensor", session.rank, root_rank)
        _stream(named, root_rank, f"{len(theirs)} tensors", wrong)


def _stream(named: list[Named], root_rank: int, text: str, wrong: str = "") -> None:
    """Send all tensors in one message, or receive it, even if it is *wrong*: the next broadcast must not find it."""
    session = process.current()
    dense = [(tensor, tensor.detach().contiguous().cpu()) for _, tensor in named]  # itself, or a copy
    pieces = [(copy.data_ptr(), copy.numel() * copy.element_size()) for _, copy in dense]
    if session.rank == root_rank:
        session.extension(Broadcaster).send(text, pieces)
        return
    session.extension(Broadcaster).receive(root_rank, text, lambda nbytes: [] if wrong else pieces)
    if wrong:
        raise MismatchError(wrong)
    with torch.no_grad():
        for tensor, copy in dense:
            if copy.data_ptr() != tensor.data_ptr():
                tensor.copy_(copy)


def _manifest(named: list[Named]) -> Manifest:
    for name, tensor in named:
        if tensor.device.type not in REACHED or tensor.layout != torch.strided:
            raise UnsupportedError(f"{name} is a {tensor.layout} tensor on {tensor.device}: only dense tensors of the "
                                   "CPU and of GPUs can be broadcast")
    return [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in named]


def _map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of nested dicts, lists and tuples in which *change* has replaced everything else."""
    if isinstance(value, dict):
        return {key: _map_leaves(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_leaves(item, change) for item in value)
    return change(value)
