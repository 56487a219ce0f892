"""A part of a model's parameters that makes its outer steps together: one tensor that its owners keep."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..orchestration.errors import MismatchError
from ..orchestration.store import StoreSpec
from ..trainer.async_weights import StoredTensor
from .ops import wire_dtype_name

Named = tuple[str, torch.Tensor]


def cut(named: Sequence[Named], n_fragments: int) -> list[list[Named]]:
    """Return *named* parameters in up to *n_fragments* runs of about as many elements each, in their order."""
    total = sum(p.numel() for _, p in named)
    runs: list[list[Named]] = [[] for _ in range(n_fragments)]
    before = 0
    for name, p in named:
        middle = before + p.numel() / 2
        runs[min(int(middle * n_fragments / max(total, 1)), n_fragments - 1)].append((name, p))
        before += p.numel()
    return [run for run in runs if run]


class Fragment:
    """*named* parameters of one kind (float64, or others, which travel as float32), their outer weights and when they
    are exchanged. One thread at a time; all ranks alike.

    Parameters
    ----------
    name
        The job's, of the tensor that the owners keep.
    offset
        They are sent in the steps that are *offset* modulo the number of inner steps.
    """

    def __init__(self, name: str, named: Sequence[Named], spec: StoreSpec, offset: int, priority: int) -> None:
        self.parameters = [p for _, p in named]
        self.offset = offset
        self.due = 0  # the step in which the answer is taken over; 0: none is under way
        self._is_here = False  # the answer that is due is in `outer` already
        self._name, self._spec, self._priority = name, spec, priority
        self._dtype = torch.float64 if self.parameters[0].dtype == torch.float64 else torch.float32
        self.outer = torch.empty(sum(p.numel() for p in self.parameters), dtype=self._dtype)
        self._views = self._views_of(self.outer)
        self._stored = self._declare()

    def _declare(self) -> StoredTensor:
        return StoredTensor(self._name, tuple(self.outer.shape), wire_dtype_name(self._dtype), self._spec, average=True,
                            priority=self._priority)

    def _views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        sizes = [p.numel() for p in self.parameters]
        return [piece.view(p.shape) for piece, p in zip(flat.split(sizes), self.parameters)]

    # -- set, and set again ----------------------------------------------------------------------------------------

    def start_seed(self, root_rank: int) -> None:
        """Begin to give all ranks the parameters of rank *root_rank*."""
        with torch.no_grad():
            for view, p in zip(self._views, self.parameters):
                view.copy_(p)
        self._stored.start_seed(self.outer.numpy(), root_rank)

    def seed(self, root_rank: int) -> None:
        """Take the parameters of rank *root_rank* over. Raises as `push_pull`."""
        self._take(self._stored.seed(None, root_rank))
        self._write(0.0)

    def start_anew(self, state: dict[str, Any], root_rank: int) -> None:
        """Begin to set everything to a saved *state* that passes `check`; the owners take it from rank *root_rank*'s.
        """
        self._stored.retire()
        self._stored = self._declare()
        self._stored.start_seed(state["outer"].numpy(), root_rank)

    def load(self, state: dict[str, Any], root_rank: int) -> None:
        """End what `start_anew` began."""
        self._take(self._stored.seed(state["momentum"].numpy(), root_rank))
        self.due, self._is_here = state["due"], bool(state["due"])
        with torch.no_grad():
            for piece, p in zip(self._views_of(state["local"]), self.parameters):
                p.copy_(piece)

    def check(self, state: dict[str, Any]) -> None:
        """Raise `MismatchError` if a saved *state* is of other parameters."""
        if set(state) != {"outer", "momentum", "local", "due"}:
            raise MismatchError(f"{self._name!r} in the saved state has {sorted(state)}, not what OuterOptimizer saves")
        for what in ("outer", "momentum", "local"):
            found = state[what]
            if found.shape != self.outer.shape or found.dtype != self._dtype:
                raise MismatchError(f"{what} of {self._name!r} in the saved state are {tuple(found.shape)} of "
                                    f"{found.dtype}; this optimizer's parameters make {tuple(self.outer.shape)} of "
                                    f"{self._dtype}")

    def state(self) -> dict[str, Any]:
        """Return all there is of it, on all ranks together: copies. Waits for an answer that is under way."""
        if self._stored.in_flight:
            self._receive()
        local = torch.empty_like(self.outer)
        for view, p in zip(self._views_of(local), self.parameters):
            view.copy_(p.detach())
        return {"outer": self.outer.clone(), "momentum": torch.from_numpy(self._stored.momentum().copy()),
                "local": local, "due": self.due}

    # -- outer steps -----------------------------------------------------------------------------------------------

    def send(self, due: int) -> None:
        """Send how far the parameters have moved, for an answer that is taken over in step *due*."""
        with torch.no_grad():
            for target, view, p in zip(self._views_of(torch.from_numpy(self._stored.place)), self._views,
                                       self.parameters):
                torch.sub(view, p, out=target)
        self._stored.push_place()
        self.due = due

    def take_over(self, mix: float) -> None:
        """Wait for the answer and go on from it, with *mix* of where the parameters are now. Raises as `push_pull`."""
        if not self._is_here:
            self._receive()
        self.due, self._is_here = 0, False
        self._write(mix)

    def _receive(self) -> None:
        self._take(self._stored.wait())
        self._is_here = True

    def _take(self, weights: np.ndarray[Any, Any]) -> None:
        self.outer.numpy()[:] = weights

    def _write(self, mix: float) -> None:
        with torch.no_grad():
            for view, p in zip(self._views, self.parameters):
                p.copy_(view if mix == 0 else mix * p.to(self._dtype) + (1 - mix) * view)
