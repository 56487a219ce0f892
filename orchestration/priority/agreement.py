"""Do the ranks of a set ask for the same? In Horovod's words, which people search for, and then who differs. Pure.

Source: Horovod's `ConstructResponse` (controller.cc): what is compared, in which order.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .negotiation import Request

_SAME_SHAPE = ("allreduce", "broadcast", "reducescatter")
_SAME_BUT_ROWS = ("allgather", "alltoall")


def disagreement(requests: Sequence[Request]) -> str:
    """Return how *requests* for one name (of different ranks, at least one) contradict each other; "": not at all."""
    first = requests[0]
    for other in requests[1:]:
        text = _difference(first, other)
        if text:
            return f"{text} ({first.name}: ranks {first.rank} and {other.rank})"
    for spec in first.specs:
        if first.kind in ("allgather", "alltoall", "reducescatter") and not spec.shape:
            return f"Process-set rank zero tried to {first.kind.upper()} a rank-zero tensor. ({first.name})"
    return ""


def _difference(a: Request, b: Request) -> str:
    """Return the first difference of two requests that must be alike."""
    if a.kind != b.kind:
        return f"Mismatched operations: One rank did an {a.kind.upper()}, but another rank did an {b.kind.upper()}."
    what = a.kind.upper()
    if len(a.specs) != len(b.specs):
        return (f"Mismatched {what} group sizes: One rank sent a group of {len(a.specs)} tensors, but another rank "
                f"sent a group of {len(b.specs)} tensors.{_odd_one(a, b)}")
    for ours, theirs in zip(a.specs, b.specs):
        which = f" Tensor {ours.name}." if len(a.specs) > 1 else ""
        if ours.name != theirs.name:
            return f"Mismatched {what} tensor names: One rank sent {ours.name}, but another rank sent {theirs.name}."
        if ours.dtype != theirs.dtype:
            return (f"Mismatched data types: One rank had type {ours.dtype}, but another rank had type "
                    f"{theirs.dtype}.{which}")
        text = _shapes(a.kind, ours.shape, theirs.shape)
        if text:
            return f"Mismatched {what} tensor shapes: {text}{which}"
    if (a.prescale, a.postscale) != (b.prescale, b.postscale):
        return (f"Mismatched prescale and/or postscale factors: One rank sent factors ({a.prescale:g}, "
                f"{a.postscale:g}), but another rank sent factors ({b.prescale:g}, {b.postscale:g}).")
    if a.op != b.op:
        return (f"Mismatched reduction operation: One rank sent reduction op {a.op}, but another rank sent reduction "
                f"op {b.op}.")
    if a.root != b.root:
        return (f"Mismatched {what} root ranks: One rank specified root rank {a.root}, but another rank specified root "
                f"rank {b.root}.")
    if a.ranks != b.ranks:
        return (f"Mismatched process sets: One rank named ranks {_list(a.ranks)}, but another rank named ranks "
                f"{_list(b.ranks)}.")
    return ""


def _odd_one(a: Request, b: Request) -> str:
    """Say which tensor only one of them has, the first of those."""
    ours, theirs = ({spec.name: None for spec in each.specs} for each in (a, b))
    odd = next((name for name in (*ours, *theirs) if (name in ours) != (name in theirs)), "")
    return f" Only one of them sent {odd}." if odd else ""


def _shapes(kind: str, ours: tuple[int, ...] | None, theirs: tuple[int, ...] | None) -> str:
    if ours is None or theirs is None or ours == theirs:
        return ""
    if kind in _SAME_SHAPE:
        return (f"One rank sent a tensor of shape {_list(ours)}, but another rank sent a tensor of shape "
                f"{_list(theirs)}.")
    if kind in _SAME_BUT_ROWS and len(ours) != len(theirs):
        return f"One rank sent a tensor of rank {len(ours)}, but another rank sent a tensor of rank {len(theirs)}."
    for dim, (one, another) in enumerate(zip(ours, theirs)):
        if dim and one != another:
            return (f"One rank sent a tensor with dimension {dim} equal to {one}, but another rank sent a tensor with "
                    f"dimension {dim} equal to {another}.")
    return ""


def _list(values: Sequence[Any]) -> str:
    return f"[{', '.join(map(str, values))}]"
