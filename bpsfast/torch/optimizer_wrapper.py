"""Wraps a user's optimizer in a class derived from its own. `bpsfast.torch` and `bpsfast.hvd` add their steps to it."""
from __future__ import annotations

import contextlib
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..orchestration.errors import BusyError, ConfigError, UnsupportedError
from ..trainer import process
from ..trainer.arguments import check_passes
from .gradient_hooks import Named
from .ops import REACHED


class UnderWayError(BusyError, AssertionError):
    """zero_grad was called while gradients are being averaged. Call step or synchronize first. (Horovod asserts it.)"""


class OptimizerWrapper(torch.optim.Optimizer):
    """Methods that `wrap` adds to the user's class. `_exchange` averages the gradients; None: nothing is exchanged."""

    _base: type[torch.optim.Optimizer]
    _exchange: Any
    _skips: bool
    backward_passes_per_step: int

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` inside the block use the gradients as they are."""
        before, self._skips = self._skips, True
        try:
            yield
        finally:
            self._skips = before

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate *passes* backward passes per step from now on. The sum over passes is not divided."""
        check_passes(passes)
        self.backward_passes_per_step = passes
        if self._exchange is not None:
            self._exchange.n_passes = passes
            self._exchange.forget_passes()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. With ``set_to_none=False`` they live in shared memory from the second step on: no copy.

        Raises `UnderWayError` if gradients are being averaged: between backward and step (or synchronize).
        """
        check_idle(self._exchange)
        self._base.zero_grad(self, set_to_none)
        if self._exchange is not None:
            self._exchange.forget_passes()
            if not set_to_none:
                self._exchange.alias_gradients()


def wrap(optimizer: torch.optim.Optimizer, passes: int, *mixins: type) -> Any:
    """Return *optimizer* as `derive` does, with the methods of `OptimizerWrapper` too, and without an exchange yet."""
    wrapped = derive(optimizer, OptimizerWrapper, *mixins)
    wrapped._skips, wrapped._exchange, wrapped.backward_passes_per_step = False, None, passes
    return wrapped


def derive(optimizer: torch.optim.Optimizer, *mixins: type) -> Any:
    """Return *optimizer* in a class derived from its own (`_base`), with the methods that *mixins* define themselves.

    It takes over groups, options and state. Do not use the original any more; learning-rate schedulers that were made
    for it keep working. When it is pickled or copied, the copy is of the user's class, and refuses to step in a job of
    several ranks until it is wrapped. Raises `ConfigError` if *optimizer* was wrapped before.
    """
    base = type(optimizer)
    if hasattr(base, "_base"):
        raise ConfigError("the optimizer is a DistributedOptimizer, or an OuterOptimizer, already")
    methods = {name: value for mixin in mixins for name, value in vars(mixin).items()
               if inspect.isfunction(value) and not name.startswith("__")}
    # When a state is loaded, torch wraps a `step` without this mark; then the step hooks, which the user's own class
    # runs, would run twice.
    methods["step"].hooked = True  # type: ignore[attr-defined]
    derived: Any = type(base.__name__, (base,), {**methods, "_base": base, "__reduce_ex__": _as_base,
                                                 "add_param_group": _refuse_group})
    wrapped = derived.__new__(derived)
    # A scheduler may have replaced the original's `step` by one bound to the original: leave that behind.
    wrapped.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    _keep_scheduled(optimizer, wrapped)
    refusal = wrapped.__dict__.pop("_refusal", None)
    if refusal is not None:
        refusal.remove()
    return wrapped


def _refuse_group(self: Any, param_group: dict[str, Any]) -> None:
    """Raise an error: all ranks agreed on the parameters when the optimizer was wrapped."""
    raise UnsupportedError("add the parameter group before the optimizer is wrapped")


def user_step(optimizer: Any, closure: Callable[[], Any] | None, after: Callable[[], Any]) -> Any:
    """Run the step of the user's class; call *after* each time *closure* has computed gradients, before their use."""
    if closure is None:
        return optimizer._base.step(optimizer)

    def both() -> Any:
        loss = closure()
        after()
        return loss

    return optimizer._base.step(optimizer, both)


def local_step(optimizer: Any, closure: Callable[[], Any] | None, known: Iterable[torch.Tensor]) -> Any:
    """Run the step of the user's class with this rank's own gradients.

    Raises `UnsupportedError` if *optimizer* has gradients of other parameters than those *known* to all ranks.
    """
    ids = {id(p) for p in known}

    def check() -> None:
        shapes = [str(tuple(p.shape)) for p in _all_parameters(optimizer) if p.grad is not None and id(p) not in ids]
        if shapes:
            raise UnsupportedError(
                f"the optimizer has gradients of parameters of shape {', '.join(shapes[:4])} that did not require any, "
                "or were not there, when it was wrapped: their updates would stay this rank's. Make the optimizer anew "
                "with the parameters as they are now, and wrap that")

    check()
    return user_step(optimizer, closure, check)


def _keep_scheduled(optimizer: torch.optim.Optimizer, wrapped: torch.optim.Optimizer) -> None:
    """Keep schedulers of the original *optimizer* working: they see the steps of *wrapped*, and the state it loads."""
    original: Any = weakref.ref(optimizer)  # schedulers keep it

    def stepped(*_: Any) -> None:
        if original() is not None:
            original()._opt_called = True  # torch's schedulers warn without it

    def loaded(other: torch.optim.Optimizer) -> None:
        if original() is not None:
            original().param_groups, original().state = other.param_groups, other.state

    wrapped.register_step_post_hook(stepped)
    wrapped.register_load_state_dict_post_hook(loaded)


def _as_base(self: Any, protocol: object) -> tuple[Any, ...]:
    return _unwrapped, (self._base,), self.__getstate__()


def _unwrapped(base: type[torch.optim.Optimizer]) -> Any:
    """Return an empty optimizer of the class *base*, for `__setstate__` of an unpickled one."""
    optimizer: Any = base.__new__(base)
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._refusal = optimizer.register_step_pre_hook(_refuse_alone)
    return optimizer


def _refuse_alone(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    session = process.session()
    if session is not None and session.size > 1:
        raise ConfigError(f"this {type(optimizer).__name__} is a pickled or copied DistributedOptimizer, which would "
                          f"step by the gradients of rank {session.rank} alone: wrap it by DistributedOptimizer again")


def check_idle(exchange: Any) -> None:
    """Raise `UnderWayError` if gradients are being averaged."""
    if exchange is not None and exchange.busy:
        raise UnderWayError("optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                            "optimizer.synchronize(). This is prohibited as it can cause a race condition.")


def _all_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def trained_parameters(optimizer: torch.optim.Optimizer, named: Iterable[Named]) -> list[Named]:
    """Return (name, parameter) of every trained parameter of *optimizer* once, in the order of *named*.

    Raises as `owned`; and `ConfigError` if one has no name of its own.
    """
    found = [(name, p) for name, p in owned(optimizer, named, reached=("cpu",)) if p.requires_grad]
    n_wanted = len({id(p) for p in _all_parameters(optimizer) if p.requires_grad})
    n_named = len({name for name, _ in found})
    if n_named < n_wanted:
        raise ConfigError(f"{n_wanted - n_named} of {n_wanted} parameters of the optimizer have no name of their own "
                          "among those that were named")
    return found


def parameters_of(optimizer: torch.optim.Optimizer) -> Callable[[], list[torch.Tensor]]:
    """Return a function that returns the present parameters of *optimizer*, without keeping it alive."""
    found = weakref.ref(optimizer)

    def parameters() -> list[torch.Tensor]:
        alive = found()
        return [] if alive is None else _all_parameters(alive)

    return parameters


def owned(optimizer: torch.optim.Optimizer, named: Iterable[Named], reached: tuple[str, ...] = REACHED) -> list[Named]:
    """Return (name, parameter) of every parameter of *optimizer* once, in the order of *named*.

    Raises `ConfigError` if *named* is not such pairs, and `UnsupportedError` if a trained parameter is on another kind
    of device than those *reached*.
    """
    pairs = list(named) if isinstance(named, Iterable) else [named]
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ConfigError(f"{type(pair).__name__} among the parameters: expected pairs of name and parameter, as "
                              "model.named_parameters() gives them")
    wanted = {id(p) for p in _all_parameters(optimizer)}
    found: dict[int, Named] = {}
    for name, p in pairs:
        if id(p) in wanted:
            found.setdefault(id(p), (name, p))
    for name, p in found.values():
        if p.requires_grad and p.device.type not in reached:
            raise UnsupportedError(f"parameter {name!r} is on {p.device}: move it to {' or '.join(reached)}")
    return list(found.values())
