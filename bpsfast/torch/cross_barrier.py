"""Steps without a barrier: a layer's next forward pass waits for the sums of its own parameters, and for no others.

    backward      each gradient leaves as soon as it is there
    step()        notes the options of this moment (learning rates, ...) and returns
    forward       before a layer runs: its sums are awaited, the user's own optimizer updates its parameters

The values are those of a step with a barrier, bit for bit: the same sums, the same update, before the same first use.
Source: ByteScheduler (SOSP'19) section 3.4. BytePS re-implements three optimizers for it; here any one works whose
update of a parameter depends on that parameter alone: it is run on one parameter at a time, with its state.

The first step has a barrier: during it `Readers` learns which module's forward pass reads what.
"""
from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..orchestration.errors import BusyError, UnsupportedError
from .compression import Compressor
from .exchange import Exchange
from .readers import Readers

#: Keep the whole history of steps, or look for a step along a line: one parameter at a time means nothing to them.
_UNABLE = (torch.optim.LBFGS,)


class _UnderWay(torch.Tensor):
    """What stands for a gradient that was sent and has not come back as the average: any use of it is an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse everything."""
        raise BusyError(
            "a gradient is read that is on its way to be averaged (cross_barrier): clipping by norm, unscaling and "
            "logging of gradients need all of them. Call optimizer.synchronize() before, and step() inside "
            "`with optimizer.skip_synchronize():` (that step then waits for all, as without cross_barrier)")


class CrossBarrierExchange(Exchange):
    """Gradients whose updates wait until somebody reads the parameter. One thread at a time.

    Parameters
    ----------
    optimizer
        The wrapped one, whose class derives from *base*, the user's.
    n_steps
        After so many the updates are made in `step` again.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, base: type[torch.optim.Optimizer],
                 named: list[tuple[str, torch.Tensor]], compression: type[Compressor], n_passes: int,
                 n_steps: int) -> None:
        if issubclass(base, _UNABLE):
            raise UnsupportedError(f"cross_barrier updates one parameter at a time, which {base.__name__} cannot do: "
                                   "its step depends on all parameters. Use it without cross_barrier")
        super().__init__(named, compression, n_passes)
        self._optimizer = weakref.ref(optimizer)  # which owns this object
        self._base = base
        self._name_of = {id(parameter): name for name, parameter in named}
        self._n_left = n_steps
        self._readers = Readers(self.parameters)
        self._learning = True
        self._unread: tuple[str, ...] = ()  # by no module's forward pass: updated in `step`
        self._pending: dict[str, dict[str, Any]] = {}  # name -> options of its group when `step` was called
        self._sent: dict[str, torch.Tensor] = {}  # name -> the gradient's own memory
        self._clear: dict[str, bool] = {}  # name -> whether zero_grad wants None

    # -- on the way out --------------------------------------------------------------------------------------------

    def accumulated(self, name: str) -> None:
        """As `Exchange`'s; a parameter that was read before its update is an error."""
        if name in self._pending:
            raise BusyError(
                f"the forward pass has used {name!r} before its update of the last step: it is read outside of the "
                "forward pass of the module that holds it, or of one around that. Call optimizer.synchronize() before "
                "that forward pass, or do without cross_barrier")
        super().accumulated(name)

    def _send(self, name: str) -> None:
        super()._send(name)
        gradient = self.parameters[name].grad
        assert gradient is not None, "it was sent"
        self._hide(name, gradient)

    def _receive(self, name: str, parameter: torch.Tensor) -> None:
        mine = self._sent.pop(name, None)
        if mine is not None:
            parameter.grad = mine
        super()._receive(name, parameter)

    def _hide(self, name: str, gradient: torch.Tensor) -> None:
        self._sent[name] = gradient
        self.parameters[name].grad = gradient.detach().as_subclass(_UnderWay)

    # -- steps -----------------------------------------------------------------------------------------------------

    @property
    def crosses(self) -> bool:
        """Whether the next step leaves its updates to the forward pass."""
        return not self._learning and self._n_left > 0

    def defer(self, groups: Iterable[dict[str, Any]]) -> None:
        """End the step: updates follow, with the options that *groups* have now."""
        for name in self.gradients.missing():
            self.settle((name,))  # which this step's forward pass did not need
            if self.parameters[name].grad is not None:
                self._send(name)
        for name in self.gradients.zero_missing():
            self._hide(name, torch.empty_like(self.parameters[name], requires_grad=False))
        for group in groups:
            options = _options(group)
            self._pending.update((self._name_of[id(p)], options) for p in group["params"] if id(p) in self._name_of)
        self.gradients.step(wait=False)
        self.forget_passes()
        self._n_left -= 1
        self.settle(self._unread if self._n_left else tuple(self._pending))

    def settle(self, names: Iterable[str]) -> None:
        """Wait for the sums of those of *names* whose update is due, and make it. Raises as `bpsfast.push_pull`."""
        for name in names:
            if name in self._pending:
                with _outside():
                    self._settle(name, self.parameters[name])

    def _settle(self, name: str, parameter: torch.Tensor) -> None:
        shown = parameter.grad
        self._receive(name, parameter)
        self.gradients.finish(name)
        self._update(parameter, self._pending.pop(name))
        if not isinstance(shown, _UnderWay):  # cleared, or replaced, since it was sent
            parameter.grad = shown
        if name in self._clear:
            _zero(parameter, self._clear.pop(name))

    def settle_all(self) -> bool:
        """Make all updates that are due; return whether there were any. Raises as `settle`."""
        due = tuple(self._pending)
        self.settle(due)
        return bool(due)

    @contextmanager
    def whole_step(self, groups: Iterable[dict[str, Any]]) -> Iterator[None]:
        """Surround a step on all parameters at once; after the first of them, it is known who reads what.

        Raises
        ------
        UnsupportedError
            If the optimizer keeps something in its groups, which are copies when parameters are updated one by one.
        """
        groups = list(groups)
        before = [_options(group) for group in groups] if self._learning else []
        yield
        if not self._learning:
            return
        for old, group in zip(before, groups):
            changed = [key for key, value in group.items()
                       if key != "params" and not (key in old and _same(old[key], value))]
            if changed:
                raise UnsupportedError(
                    f"{self._base.__name__} changes {', '.join(changed)} of its parameter groups in a step, which "
                    "cross_barrier cannot do: it updates one parameter at a time. Do without it")
        self._learning = False
        me = weakref.ref(self)

        def before_reading(names: tuple[str, ...]) -> None:
            exchange = me()
            if exchange is not None:
                exchange.settle(names)

        self._unread = self._readers.know(before_reading)

    def _update(self, parameter: torch.Tensor, options: dict[str, Any]) -> None:
        """Let the user's optimizer make a step in which there is nothing but *parameter*."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        alone = self._base.__new__(self._base)
        # `step` of the instance is a scheduler's, and hooks ran when the user's step was called.
        alone.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
        alone.__dict__["_optimizer_step_pre_hooks"] = OrderedDict()
        alone.__dict__["_optimizer_step_post_hooks"] = OrderedDict()
        alone.param_groups = [{**options, "params": [parameter]}]
        self._base.step(alone)

    # -- clearing --------------------------------------------------------------------------------------------------

    def zero(self, set_to_none: bool) -> None:
        """Clear all gradients, those under way once their update is made."""
        for name, parameter in self.parameters.items():
            if name in self._pending:
                self._clear[name] = set_to_none
            else:
                _zero(parameter, set_to_none)


def _zero(parameter: torch.Tensor, set_to_none: bool) -> None:
    if set_to_none:
        parameter.grad = None
    elif parameter.grad is not None:
        parameter.grad.detach_().zero_()


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of what a group says besides its parameters."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items() if key != "params"}


def _same(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b


@contextmanager
def _outside() -> Iterator[None]:
    """Be outside of what the forward pass around may have switched on."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield
