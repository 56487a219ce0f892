"""Which parameters have a gradient on any rank: ranks tell each other with every step.

One process leaves a parameter alone that has no gradient: neither momentum nor weight decay moves it. With several
ranks a parameter that has none on this rank may have one on others, whose average counts; only if it has one nowhere,
it is left alone. So with the gradients of each step travels a small tensor, which has one element for each parameter,
and one for parameters that the ranks have not agreed on. It is fused with the small gradients that the next forward
pass needs first, which are the last ones to come, so that it is no round of its own.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ..orchestration.errors import UnsupportedError

_N_SHOWN = 4


class Presence:
    """What ranks tell each other of *named* parameters, which are those of all ranks. One thread at a time.

    Those that do not require gradients now are *frozen*; the others are *trained*.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.trained = {name: p for name, p in named if p.requires_grad}
        self.frozen = {name: p for name, p in named if not p.requires_grad}
        #: Of the tensor, among the names of gradients: optimizers whose parameters differ have others.
        self.title = f"bpsfast.present of {min((name for name, _ in named), default='nothing')}"
        #: Returns the parameters that there are now.
        self.members: Callable[[], Iterable[torch.Tensor]] = tuple
        self._known = frozenset(id(p) for _, p in named)  # kept alive here
        self._place = {name: place for place, name in enumerate(sorted(name for name, _ in named))}
        self._heard: np.ndarray[Any, Any] = np.zeros(*self.kind)

    @property
    def kind(self) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of what travels."""
        return (len(self._place) + 1,), "float32"

    def words(self) -> np.ndarray[Any, Any]:
        """Return what this rank has to tell: which parameters have a gradient, and whether unknown ones have."""
        words: np.ndarray[Any, Any] = np.zeros(*self.kind)
        for name, p in (*self.trained.items(), *self.frozen.items()):
            words[self._place[name]] = p.grad is not None
        words[-1] = bool(self._strangers())
        return words

    def hear(self, words: np.ndarray[Any, Any]) -> None:
        """Take what all ranks have told: the sums, averages or maxima of their words."""
        self._heard = words.copy()

    def has(self, name: str) -> bool:
        """Whether *name* has a gradient on any rank."""
        return bool(self._heard[self._place[name]])

    def require_known(self) -> None:
        """Raise `UnsupportedError` if any rank has a gradient that nobody averages: on all ranks, or on none."""
        thawed = [name for name in sorted(self.frozen) if self.has(name)]
        if thawed:
            raise _thawed_error(thawed)
        if self._heard[-1]:
            raise _strangers_error(self._strangers())

    def _strangers(self) -> list[torch.Tensor]:
        return [p for p in self.members() if p.grad is not None and id(p) not in self._known]


def _thawed_error(names: Sequence[str]) -> UnsupportedError:
    """Return that parameters *names*, which were frozen when they were wrapped, have gradients on some rank."""
    return UnsupportedError(
        f"{_listed([repr(name) for name in names])} did not require gradients when all ranks agreed on what is "
        "averaged, and have gradients now, which are averaged nowhere: the update of this step is refused on all "
        "ranks. Let them require gradients before they are wrapped (and freeze them after that), or wrap again")


def _strangers_error(strangers: Sequence[torch.Tensor]) -> UnsupportedError:
    """Return that some rank has gradients of parameters that nobody knew; *strangers* are this rank's."""
    shapes = [str(tuple(p.shape)) for p in strangers]
    where = f"this rank has gradients of parameters of shape {_listed(shapes)}" if shapes else (
        "another rank has gradients of parameters")
    return UnsupportedError(
        f"{where} that were added, or have taken another's place, after all ranks agreed on what is averaged: the "
        "update of this step is refused on all ranks. Make the optimizer anew with the parameters as they are now, and "
        "wrap again")


def _listed(words: Sequence[str]) -> str:
    more = f" and {len(words) - _N_SHOWN} more" if len(words) > _N_SHOWN else ""
    return ", ".join(words[:_N_SHOWN]) + more
