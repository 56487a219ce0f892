"""Steps without a barrier: the first use of a parameter waits for the sum of its gradient, and for no others.

    backward      each gradient is sent as soon as it is computed
    step()        records the present options (learning rates, ...) and returns; the update of every parameter is *due*
    first use     of such a parameter: waits for its sum, then runs the user's own optimizer on it

While its update is due, a parameter is of the class `DueParameter`. torch calls that class for every function that gets
the parameter, so no Python code can read an old value, in a forward pass or elsewhere, and no module has to be known.
The values are those of a step with a barrier, bit for bit: the same sums, the same update, before the same first use.
Source: ByteScheduler (SOSP'19) section 3.4. BytePS re-implements three optimizers for it; here any optimizer works
whose update of a parameter depends on that parameter alone: it is run on one at a time, with its state.
"""
from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..orchestration.errors import BusyError, UnsupportedError
from .compression import CompressionLike
from .exchange import Exchange
from .gradient_hooks import Named
from .ops import before_shutdown

_GRAD: Any = torch.Tensor.grad  # on the class it is a descriptor, which torch's stubs do not say
#: Functions that read no values and so cause no update.
_READS_NO_VALUES = frozenset([
    *(getattr(torch.Tensor, name).__get__ for name in (
        "grad", "_grad", "requires_grad", "shape", "dtype", "device", "layout", "ndim", "is_leaf", "grad_fn", "names",
        "is_sparse", "is_cuda", "is_meta", "is_quantized", "_backward_hooks", "_post_accumulate_grad_hooks")
      if hasattr(torch.Tensor, name)),
    _GRAD.__set__, _GRAD.__delete__, torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel,
    torch.Tensor.element_size, torch.Tensor.is_floating_point, torch.Tensor.is_complex,
    torch.Tensor.register_post_accumulate_grad_hook,
])

#: id of a due parameter -> the exchange that updates it, and its name. A strong reference: the update must be made even
#: if the program has dropped the optimizer.
_due: dict[int, tuple[CrossBarrierExchange, str]] = {}


class DueParameter(torch.nn.Parameter):
    """The class of a parameter while its update is due. Any use makes the update, which restores the class."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Update all due parameters among the arguments, unless *func* reads no values; then call it."""
        kwargs = kwargs or {}
        if func in _READS_NO_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for parameter in _due_among((*args, *kwargs.values())):
            _make_current(parameter)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        _make_current(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _make_current(self)
        return self.__reduce_ex__(protocol)


def _due_among(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if type(value) is DueParameter:
            yield value
        elif isinstance(value, list | tuple):
            yield from _due_among(value)
        elif isinstance(value, dict):
            yield from _due_among(value.values())


def _make_current(parameter: torch.Tensor) -> None:
    """Make the due update of *parameter*, which restores its class."""
    owner = _due.get(id(parameter))
    if owner is not None:
        owner[0].settle((owner[1],))
    parameter.__class__ = torch.nn.Parameter


def _restore_class(parameter: torch.Tensor) -> None:
    its_class = type(parameter)
    if its_class is DueParameter:
        parameter.__class__ = torch.nn.Parameter


def settle_all_updates() -> None:
    """Make all updates that are due in this process; raises as `bpsfast.push_pull`."""
    for exchange in dict.fromkeys(exchange for exchange, _ in list(_due.values())):
        exchange.settle_all()


before_shutdown.append(settle_all_updates)


class _PendingGradient(torch.Tensor):
    """Placeholder for a gradient that was sent and is not averaged yet: any use of it is an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise BusyError(
            "a gradient is used that is not averaged yet (cross_barrier): clipping by norm, unscaling and "
            "logging of gradients need the averages. Before step(): call optimizer.synchronize(), and step() inside "
            "`with optimizer.skip_synchronize():` (that step waits for all, as without cross_barrier). After step(): "
            "call optimizer.settle(), or clear gradients by optimizer.zero_grad()")


class CrossBarrierExchange(Exchange):
    """Averages gradients, and updates each parameter at its first use after the step. One thread at a time.

    *base* is the class of the user's optimizer, from which the wrapped one's derives. After *n_steps* steps `step`
    makes the updates again.
    """

    def __init__(self, base: type[torch.optim.Optimizer], named: list[Named], compression: CompressionLike,
                 n_passes: int, n_steps: int) -> None:
        if issubclass(base, torch.optim.LBFGS):
            raise UnsupportedError(f"cross_barrier updates one parameter at a time, which {base.__name__} cannot do: "
                                   "its step depends on all parameters. Use it without cross_barrier")
        for _, parameter in named:
            if type(parameter) is DueParameter:  # an update of another optimizer is due: only one can be at a time
                _make_current(parameter)
        super().__init__(named, compression, n_passes)
        self._base = base
        self._name_of = {id(parameter): name for name, parameter in self.parameters.items()}
        self._n_left = n_steps
        self._updates_singly = False  # whether a step has shown that the optimizer can update one parameter at a time
        self._has_flags = True  # whether the ranks' flags of the last deferred step were received
        self._may_be_refused = False  # whether that step may be refused, as far as this rank knows
        self._pending: dict[str, tuple[torch.optim.Optimizer, dict[str, Any]]] = {}  # name -> its group's options
        self._sent: dict[str, torch.Tensor | None] = {}  # name -> the gradient's own memory; None: there is none

    # -- sending ---------------------------------------------------------------------------------------------------

    def accumulated(self, name: str) -> None:
        """As `Exchange.accumulated`; raises `BusyError` if the parameter was used before its update."""
        if name in self._pending and not self.is_superseded:
            raise BusyError(
                f"the forward pass has used {name!r} before its update of the last step, as compiled code does, which "
                "Python cannot notice. Call optimizer.settle() after step(), or do without cross_barrier")
        super().accumulated(name)

    def _direct_paths(self) -> dict[str, Any]:
        return {}  # every gradient that was sent has to be hidden

    def _send(self, name: str) -> None:
        super()._send(name)
        self._hide(name, self._gradient(name))

    def _receive(self, name: str, parameter: torch.Tensor) -> None:
        if name in self._sent:
            parameter.grad = self._sent.pop(name)
        super()._receive(name, parameter)

    def _hide(self, name: str, gradient: torch.Tensor) -> None:
        self._sent[name] = gradient
        self.parameters[name].grad = gradient.detach().as_subclass(_PendingGradient)

    # -- steps -----------------------------------------------------------------------------------------------------

    @property
    def crosses(self) -> bool:
        """Whether the next step leaves its updates to the first use of each parameter."""
        return self._updates_singly and self._n_left > 0

    def defer(self, optimizer: torch.optim.Optimizer) -> None:
        """End the step: updates follow later, with the options that the groups of *optimizer* have now."""
        self.receive_used()
        for name in self.missing():
            self.settle((name,))  # it was not used in this step
            if self.parameters[name].grad is not None:
                self._send(name)
        self.send_used()
        self._zero_missing()
        for name, parameter in self.parameters.items():
            if parameter.grad is None:  # it gets an average if another rank has a gradient
                self._hide(name, torch.empty_like(parameter, requires_grad=False))
                self._sent[name] = None
        self.end_step(wait=False)
        self.forget_passes()
        for group in optimizer.param_groups:
            options = _options(group)
            for parameter in group["params"]:
                known = self._name_of.get(id(parameter))
                if known is not None:
                    self._pending[known] = optimizer, options
                    _due[id(parameter)] = self, known
                    if type(parameter) is torch.nn.Parameter:
                        parameter.__class__ = DueParameter
        for name in [name for name in self._sent if name not in self._pending]:  # the optimizer has dropped it
            parameter, own = self.parameters[name], self._sent.pop(name)
            if isinstance(parameter.grad, _PendingGradient):
                parameter.grad = own
            self.gradients.finish(name)
        self._has_flags = False
        self._may_be_refused = self.is_superseded or self.used.refuses or bool(self.used.frozen)
        self._n_left -= 1
        if not self._n_left:
            self.settle_all()
        self.settle([name for name in self._pending if type(self.parameters[name]) is not DueParameter])

    def settle(self, names: Iterable[str]) -> None:
        """Wait for the sums of those of *names* whose update is due, and update them. Raises as `bpsfast.push_pull`."""
        # A surrounding forward pass may have switched on other modes.
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            for name in names:
                if name in self._pending:
                    self._settle(name, self.parameters[name])

    def receive_used(self) -> None:
        """As `Exchange.receive_used`. If an update of that step is refused, all due updates are dropped, and this
        raises `UnsupportedError` or `BusyError` as `Exchange.receive` does.
        """
        super().receive_used()
        if self._has_flags:
            return
        self._has_flags = True
        try:
            self._require_known()
        except (UnsupportedError, BusyError):
            for name in self._pending:
                self.gradients.finish(name)
            self._forget_due()
            raise

    def _unfreeze(self, names: list[str]) -> None:
        """Do nothing: ranks would have to wait for each other in the step to add parameters."""

    def _require_known(self) -> None:
        unfrozen = self.used.unfrozen()
        if unfrozen:
            raise UnsupportedError(
                f"{', '.join(map(repr, unfrozen[:4]))} did not require gradients when the optimizer was wrapped, and "
                "have gradients on some rank now, which cross_barrier does not average: the update of this step is "
                "refused on all ranks. Let them require gradients before that (and freeze them after it), or do "
                "without cross_barrier")
        super()._require_known()

    def _settle(self, name: str, parameter: torch.Tensor) -> None:
        # The sum of the flags is complete once the last rank has ended its backward pass. The update of a parameter
        # with a gradient here does not wait for that, unless this rank knows a reason to refuse the step.
        if self._sent[name] is None or self._may_be_refused:
            self.receive_used()
        shown, own, its_class = parameter.grad, self._sent[name], type(parameter)
        _restore_class(parameter)
        try:
            self._receive(name, parameter)
            self.gradients.finish(name)
            if parameter.grad is not None:
                self._update(parameter, *self._pending[name])
        except BaseException:  # restore everything for a second try
            self._sent[name], parameter.grad, parameter.__class__ = own, shown, its_class
            raise
        if not isinstance(shown, _PendingGradient):  # cleared, or replaced, since it was sent
            parameter.grad = shown
        del self._pending[name], _due[id(parameter)]
        if not self._pending:
            self.receive_used()  # at the latest now: another rank may have refused the step

    def settle_all(self) -> None:
        """Make all due updates. Raises as `settle`."""
        self.receive_used()
        self.settle(tuple(self._pending))

    def abandon(self) -> None:
        """Discard all gradients and due updates: their sums will not arrive any more."""
        self._forget_due()
        super().abandon()

    def _forget_due(self) -> None:
        self._has_flags = True
        for name in self._pending:
            parameter = self.parameters[name]
            del _due[id(parameter)]
            _restore_class(parameter)
            if isinstance(parameter.grad, _PendingGradient):
                parameter.grad = self._sent[name]
        self._pending.clear()
        self._sent.clear()

    @contextmanager
    def whole_step(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Surround a step on all parameters at once; the first one shows whether one parameter at a time is possible.

        Raises `UnsupportedError` if the step changes state of the optimizer that does not belong to one parameter.
        """
        before = None if self._updates_singly else _shared_state(optimizer)
        yield
        if before is None:
            return
        after = _shared_state(optimizer)
        changed = [what for what, value in after.items() if not (what in before and _same(before[what], value))]
        if changed:
            raise UnsupportedError(
                f"{self._base.__name__} changes {', '.join(changed)} in a step: cross_barrier updates one parameter at "
                "a time, each with a copy of what belongs to all. Do without it")
        self._updates_singly = True

    def _update(self, parameter: torch.Tensor, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> None:
        """Run a step of the user's optimizer that has no parameter but *parameter*."""
        alone = self._base.__new__(self._base)
        # An instance's `step` was set by a scheduler, and hooks ran when the user's step was called.
        alone.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
        alone.__dict__["_optimizer_step_pre_hooks"] = OrderedDict()
        alone.__dict__["_optimizer_step_post_hooks"] = OrderedDict()
        alone.param_groups = [{**options, "params": [parameter]}]
        self._base.step(alone)

    def zero(self, set_to_none: bool) -> None:
        """Clear all gradients of the optimizer, pending ones too: their averages are used for the update only."""
        for other in self.used.members():
            if id(other) not in self._name_of and other.grad is not None:
                if set_to_none:
                    other.grad = None
                else:
                    other.grad.detach_().zero_()
        for name, parameter in self.parameters.items():
            if set_to_none:
                parameter.grad = None
                continue
            own = self._sent.get(name)
            if isinstance(parameter.grad, _PendingGradient) and own is None:
                self.settle((name,))  # only the average shows whether there is a gradient to clear
            if isinstance(parameter.grad, _PendingGradient):
                assert own is not None, "otherwise it was settled"
                parameter.grad = torch.zeros_like(own)
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the options of a parameter group."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items() if key != "params"}


def _shared_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return copies of the state of *optimizer* that does not belong to one parameter, by description."""
    found = {f"{key} of parameter group {i}": value for i, group in enumerate(optimizer.param_groups)
             for key, value in _options(group).items()}
    found |= {f"its {key}": value.clone() if isinstance(value, torch.Tensor) else value
              for key, value in vars(optimizer).items()
              if isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool)}
    return found | {f"the state of {key!r}": object() for key in optimizer.state if not isinstance(key, torch.Tensor)}


def _same(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b


def __getattr__(name: str) -> Any:
    """Return `bpsfast.torch`'s *name*: programs for BytePS ``import byteps.torch.cross_barrier as bps``."""
    api = sys.modules[__name__.rpartition(".")[0]]
    if name in api.__all__:
        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
