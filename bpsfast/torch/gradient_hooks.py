"""Which parameters have a gradient on any rank: ranks tell each other with every step.

One process leaves a parameter alone that has no gradient: neither momentum nor weight decay moves it. With several
ranks a parameter that has none on this rank may have one on others, whose average counts; only if it has one nowhere,
it is left alone. So each step also sums a small tensor with one element per parameter. It is fused with the small
gradients that backward computes last, so it costs no round of its own. Two more elements say what all ranks have to
refuse together.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..orchestration.errors import BusyError, UnsupportedError

_N_SHOWN = 4


class UsedParameters:
    """What ranks tell each other of *named* parameters, which are those of all ranks. One thread at a time.

    Those that do not require gradients now are *frozen*; the others are *trained*.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.trained = {name: p for name, p in named if p.requires_grad}
        self.frozen = {name: p for name, p in named if not p.requires_grad}
        #: Of the tensor, among the names of gradients: optimizers whose parameters differ have others.
        self.title = f"bpsfast.present of {min((name for name, _ in named), default='nothing')}"
        #: A gradient has changed since it was sent, or was reduced before it was.
        self.is_stale = False
        #: What this rank has told last is a reason to refuse the step.
        self.refuses = False
        #: Returns the parameters that there are now.
        self.members: Callable[[], Iterable[torch.Tensor]] = tuple
        self._known = frozenset(id(p) for _, p in named)  # kept alive here
        self.places = {name: place for place, name in enumerate(sorted(name for name, _ in named))}
        self._heard: np.ndarray[Any, Any] = np.zeros(*self.kind)

    @property
    def kind(self) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of what travels."""
        return (len(self.places) + 2,), "float32"

    def words(self) -> np.ndarray[Any, Any]:
        """Return what this rank has to tell: which parameters have a gradient, whether one is stale, whether unknown
        parameters have any.
        """
        words: np.ndarray[Any, Any] = np.zeros(*self.kind)
        for name, p in (*self.trained.items(), *self.frozen.items()):
            words[self.places[name]] = p.grad is not None
        words[-2:] = self.is_stale, bool(self._unknown())
        self.refuses = bool(words[-2:].any())
        self.is_stale = False
        return words

    def hear(self, words: np.ndarray[Any, Any]) -> None:
        """Take what all ranks have told: the sums, averages or maxima of their words."""
        self._heard = words.copy()

    def has(self, name: str) -> bool:
        """Whether *name* has a gradient on any rank."""
        return bool(self._heard[self.places[name]])

    def unfrozen(self) -> list[str]:
        """Return the names of the frozen ones that have a gradient on any rank: the same on all ranks."""
        return unfrozen(self.frozen, self.places, self._heard)

    def admit(self, name: str) -> None:
        """Let the frozen *name* be a trained one."""
        self.trained[name] = self.frozen.pop(name)

    def require_known(self) -> None:
        """Raise an error on all ranks, or on none.

        Raises
        ------
        BusyError
            If a gradient of any rank was stale.
        UnsupportedError
            If any rank has a gradient of an unknown parameter.
        """
        if self._heard[-2]:
            raise BusyError("another optimizer has some of this one's parameters. Their gradients were under way when "
                            "it was made, and have been computed again since, or it has summed them: what was reduced "
                            "now is not what the gradients of all ranks give. Between two backward passes, call "
                            "synchronize() or step() of one of the optimizers alone")
        if self._heard[-1]:
            raise _unknown_error(self._unknown())

    def _unknown(self) -> list[torch.Tensor]:
        return [p for p in self.members() if p.grad is not None and id(p) not in self._known]


def unfrozen(frozen: Iterable[str], places: Mapping[str, int], heard: np.ndarray[Any, Any]) -> list[str]:
    """Return which of *frozen* have a gradient, as ranks have told: *heard*, in which *places* are those of names."""
    return [name for name in sorted(frozen) if heard[places[name]]]


def _unknown_error(strangers: Sequence[torch.Tensor]) -> UnsupportedError:
    """Return the error for gradients of parameters that were not wrapped; *strangers* are those of this rank."""
    shapes = [str(tuple(p.shape)) for p in strangers]
    where = f"this rank has gradients of parameters of shape {_listed(shapes)}" if shapes else (
        "another rank has gradients of parameters")
    return UnsupportedError(
        f"{where} that were added, or have taken another's place, after all ranks agreed on what is averaged: the "
        "update of this step is refused on all ranks. Make the optimizer anew with the parameters as they are now, and "
        "wrap it again (DistributedDataParallel: the module)")


def _listed(words: Sequence[str]) -> str:
    more = f" and {len(words) - _N_SHOWN} more" if len(words) > _N_SHOWN else ""
    return ", ".join(words[:_N_SHOWN]) + more
