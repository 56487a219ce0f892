"""Which parameters have a gradient on any rank: ranks tell each other with every step.

One process leaves a parameter alone that has no gradient: neither momentum nor weight decay moves it. With several
ranks a parameter that has none on this rank may have one on others, whose average counts; only if it has one nowhere,
it is left alone. So each step also sums a small tensor with one element per parameter. It is fused with the small
gradients that backward computes last, so it costs no round of its own. Two more elements say what all ranks have to
refuse together.
"""
from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

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


class GradientObserver(Protocol):
    """What is told of gradients."""

    #: In the order in which they are made.
    number: int
    #: The trained parameters, by name.
    parameters: dict[str, torch.Tensor]
    #: Who watches some of the same parameters, as long as they live.
    other_observers: list[weakref.ref[Any]]

    def superseded(self) -> None:
        """Stop sending before a step: a later observer has some of the same parameters."""

    def accumulated(self, name: str) -> None:
        """Hear that backward has accumulated the gradient of *name*."""


def observe_gradients(observer: GradientObserver, named: list[tuple[str, torch.Tensor]]) -> list[RemovableHandle]:
    """Call *observer* for each gradient of *named* parameters that require one, while it lives; return the hooks.

    If another observer has one of *named* (frozen ones included), the earlier of the two is overtaken and sends nothing
    before its step: a program usually steps the last optimizer only, so gradients sent by the earlier one would never
    be awaited. The parameters outlive *observer*: their hooks hold only a weak reference.
    """
    me = weakref.ref(observer)
    hooks, others = [], {}
    for name, parameter in named:
        before = _last_observers.get(parameter)
        other = None if before is None else before()
        if other is not None and other is not observer:
            others[other.number] = other
        if not parameter.requires_grad:
            continue
        if other is None or other.number < observer.number:
            _last_observers[parameter] = me
        hook = parameter.register_post_accumulate_grad_hook(_hook(me, name))
        weakref.finalize(observer, hook.remove).atexit = False
        hooks.append(hook)
    for other in others.values():
        min(other, observer, key=lambda each: each.number).superseded()
        other.other_observers.append(me)
        observer.other_observers.append(weakref.ref(other))
    return hooks


#: Of observers.
observer_numbers = itertools.count()


def is_shared(observer: GradientObserver) -> bool:
    """Whether any other observer of the parameters of *observer* lives."""
    observer.other_observers = [other for other in observer.other_observers if other() is not None]
    return bool(observer.other_observers)


#: By parameter: the number of the observer that has reduced its gradient since the last backward pass, if it is shared.
_reduced_by: Any = WeakIdKeyDictionary()


def note_reduced(observer: GradientObserver) -> None:
    """Note that *observer* has reduced the gradients that there are."""
    if is_shared(observer):
        for parameter in observer.parameters.values():
            _reduced_by[parameter] = observer.number


def is_reduced_by_another(observer: GradientObserver) -> bool:
    """Whether any gradient of *observer* was reduced by another one since the last backward pass: adding it up over the
    ranks again would not give the sum.
    """
    return any(_reduced_by.get(p, observer.number) != observer.number and p.grad is not None
               for p in observer.parameters.values())


#: By parameter: who watches it since the last `observe_gradients`.
_last_observers: Any = WeakIdKeyDictionary()


def _hook(exchange: weakref.ref[GradientObserver], name: str) -> Callable[[torch.Tensor], None]:
    def accumulated(parameter: torch.Tensor) -> None:
        if _reduced_by:
            _reduced_by.pop(parameter, None)
        found = exchange()
        if found is not None:
            found.accumulated(name)

    return accumulated
