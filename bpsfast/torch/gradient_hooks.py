"""Calls back for each gradient that backward accumulates; finds which parameters have a gradient on any rank.

In one process neither momentum nor weight decay moves a parameter without a gradient. In a job a parameter that has no
gradient on this rank may have one on others, whose average counts; only a parameter without a gradient on any rank is
left alone. So each step also sums a small tensor with one element per parameter, and two more for conditions that all
ranks must refuse together (`UsedParameters`). It is fused with the small gradients that backward computes last and
costs no extra round.
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

#: A parameter with its name.
Named = tuple[str, torch.Tensor]

#: Maximum number of shapes in an error message.
_N_SHOWN = 4


class UsedParameters:
    """Knows which of the *named* parameters, the same on all ranks, have a gradient on any rank. One thread at a time.

    Those that do not require gradients now are *frozen*; the others are *trained*.
    """

    def __init__(self, named: Sequence[Named]) -> None:
        self.trained = {name: p for name, p in named if p.requires_grad}
        self.frozen = {name: p for name, p in named if not p.requires_grad}
        #: The tensor's name among those of gradients; other parameters give another name.
        self.title = f"bpsfast.present of {min((name for name, _ in named), default='nothing')}"
        #: A gradient has changed since it was sent, or was reduced before it was sent.
        self.is_stale = False
        #: The last flags of this rank are a reason to refuse the step.
        self.refuses = False
        #: Returns the parameters that the optimizer or module has now.
        self.members: Callable[[], Iterable[torch.Tensor]] = tuple
        self._known = frozenset(id(p) for _, p in named)  # kept alive here
        by_name = dict(sorted(named, key=lambda item: item[0]))
        #: By name: the index of a parameter's flag.
        self.index_of = {name: index for index, name in enumerate(by_name)}
        self._parameters = list(by_name.values())
        self._sums: np.ndarray[Any, Any] = np.zeros(*self.kind)

    @property
    def kind(self) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of the tensor of flags."""
        return (len(self.index_of) + 2,), "float32"

    def flags(self) -> np.ndarray[Any, Any]:
        """Return this rank's flags: for each parameter if it has a gradient; if one is stale; if unknown ones have any.
        """
        reasons = self.is_stale, bool(self._unknown())
        self.refuses = any(reasons)
        self.is_stale = False
        return np.array([*(p.grad is not None for p in self._parameters), *reasons], np.float32)

    def receive(self, flags: np.ndarray[Any, Any]) -> None:
        """Take over the sum, average or maximum of all ranks' flags."""
        self._sums = flags.copy()

    def has(self, name: str) -> bool:
        """Whether *name* has a gradient on any rank."""
        return bool(self._sums[self.index_of[name]])

    def unfrozen(self) -> list[str]:
        """Return the names of frozen parameters that have a gradient on any rank: the same on all ranks."""
        return unfrozen(self.frozen, self.index_of, self._sums)

    def unfreeze(self, name: str) -> None:
        """Count the frozen *name* among the trained ones."""
        self.trained[name] = self.frozen.pop(name)

    def require_known(self) -> None:
        """Raise an error on all ranks, or on none: `BusyError` if a gradient of any rank was stale, `UnsupportedError`
        if any rank has a gradient of an unknown parameter.
        """
        if self._sums[-2]:
            raise BusyError("another optimizer has some of this one's parameters, and has summed their gradients, or "
                            "they were computed again after they were sent: the step is refused on all ranks. Between "
                            "two backward passes, call synchronize() or step() of one of the optimizers only")
        if self._sums[-1]:
            shapes = [str(tuple(p.shape)) for p in self._unknown()]
            more = f" and {len(shapes) - _N_SHOWN} more" if len(shapes) > _N_SHOWN else ""
            where = f"this rank has gradients of parameters of shape {', '.join(shapes[:_N_SHOWN])}{more}" if shapes \
                else "another rank has gradients of parameters"
            raise UnsupportedError(
                f"{where} that were added, or have taken another's place, after all ranks agreed on what is averaged: "
                "the update of this step is refused on all ranks. Make the optimizer anew with the parameters as they "
                "are now, and wrap it again (DistributedDataParallel: the module)")

    def _unknown(self) -> list[torch.Tensor]:
        return [p for p in self.members() if p.grad is not None and id(p) not in self._known]


def unfrozen(frozen: Iterable[str], index_of: Mapping[str, int], flags: np.ndarray[Any, Any]) -> list[str]:
    """Return which names of *frozen* have a gradient by the summed *flags*."""
    return [name for name in sorted(frozen) if flags[index_of[name]]]


class GradientObserver(Protocol):
    """What `observe_gradients` needs of an exchange."""

    number: int  # in the order in which observers are made
    parameters: dict[str, torch.Tensor]  # the trained ones, by name
    other_observers: list[weakref.ref[Any]]  # of some of the same parameters

    def superseded(self) -> None:
        """Stop sending before a step: a later observer has some of the same parameters."""

    def accumulated(self, name: str) -> None:
        """Handle the gradient of *name*, which backward has accumulated."""


#: The next observer's number.
observer_numbers = itertools.count()
#: Parameter -> its latest observer.
_last_observers: Any = WeakIdKeyDictionary()
#: Shared parameter -> number of the observer that has reduced its gradient since the last backward pass.
_reduced_by: Any = WeakIdKeyDictionary()


def observe_gradients(observer: GradientObserver, named: list[Named]) -> list[RemovableHandle]:
    """Call *observer* for each gradient of *named* parameters that require one, while it exists; return the hooks.

    If two observers share a parameter, frozen ones included, the earlier one is superseded and sends nothing before its
    step: a program usually steps the last optimizer only, so gradients sent by the earlier one would never be awaited.
    The parameters outlive *observer*: their hooks hold only a weak reference.
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


def _hook(observer: weakref.ref[GradientObserver], name: str) -> Callable[[torch.Tensor], None]:
    reduced = _reduced_by.data  # a plain dict: reading it costs no Python call

    def accumulated(parameter: torch.Tensor) -> None:
        if reduced:
            _reduced_by.pop(parameter, None)
        found = observer()
        if found is not None:
            found.accumulated(name)

    return accumulated


def is_shared(observer: GradientObserver) -> bool:
    """Whether any other observer of the parameters of *observer* exists."""
    observer.other_observers = [other for other in observer.other_observers if other() is not None]
    return bool(observer.other_observers)


def note_reduced(observer: GradientObserver) -> None:
    """Note that *observer* has reduced the present gradients."""
    if is_shared(observer):
        for parameter in observer.parameters.values():
            _reduced_by[parameter] = observer.number


def is_reduced_by_another(observer: GradientObserver) -> bool:
    """Whether another observer has reduced a gradient of *observer* since the last backward pass.

    The sum of such a gradient over the ranks would be wrong.
    """
    return any(_reduced_by.get(p, observer.number) != observer.number and p.grad is not None
               for p in observer.parameters.values())
