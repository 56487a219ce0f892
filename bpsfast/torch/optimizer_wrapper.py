"""The user's optimizer as one of a class derived from its own: what BytePS's and Horovod's wrappers have in common."""
from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ..orchestration.errors import BusyError, ConfigError, UnsupportedError
from ..trainer import process
from ..trainer.arguments import check_passes
from .ops import REACHED


class UnderWayError(BusyError, AssertionError):
    """zero_grad was called while gradients are under way. Call step or synchronize first. (Horovod asserts it.)"""


class OptimizerWrapper(torch.optim.Optimizer):
    """What is mixed into the user's class by `wrap`; `_exchange` sends gradients, None where there is nobody to."""

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

        Raises
        ------
        UnderWayError
            If gradients are under way: between backward and step (or synchronize).
        """
        check_idle(self._exchange)
        self._base.zero_grad(self, set_to_none)
        if self._exchange is not None:
            self._exchange.forget_passes()
            if not set_to_none:
                self._exchange.alias_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: all ranks agreed on the parameters when the optimizer was wrapped."""
        raise UnsupportedError("add the parameter group before DistributedOptimizer wraps the optimizer")


_MIXED_IN = ("skip_synchronize", "set_backward_passes_per_step", "zero_grad", "add_param_group")


def members_of(kind: type, *names: str) -> dict[str, Any]:
    """Return what *kind* itself defines under *names*, to be mixed in.

    torch wraps a `step` that has no such mark when a state is loaded, and would then run the step hooks twice: they are
    run by the user's own class already.
    """
    members = {name: kind.__dict__[name] for name in names}
    if "step" in members:
        members["step"].hooked = True
    return members


def wrap(optimizer: torch.optim.Optimizer, members: Mapping[str, Callable[..., Any]], passes: int) -> Any:
    """Return *optimizer* as of a class derived from its own, with *members* and those of `OptimizerWrapper`, without an
    exchange yet.

    It takes over groups, options and state; the original must not be used any more.

    Raises
    ------
    ConfigError
        If it was wrapped before.
    """
    wrapped = derive(optimizer, {**members_of(OptimizerWrapper, *_MIXED_IN), **members})
    wrapped._skips, wrapped._exchange, wrapped.backward_passes_per_step = False, None, passes
    return wrapped


def derive(optimizer: torch.optim.Optimizer, members: Mapping[str, Callable[..., Any]]) -> Any:
    """Return *optimizer* as of a class derived from its own, with *members* and `_base`, its own class.

    It takes over groups, options and state; the original must not be used any more, but learning-rate schedulers that
    were made for it go on. Pickled or copied it becomes the user's optimizer again, which refuses to step in a job of
    several ranks until it is wrapped. Raises `ConfigError` if it is such a one already.
    """
    base = type(optimizer)
    if hasattr(base, "_base"):
        raise ConfigError("the optimizer is a DistributedOptimizer, or an OuterOptimizer, already")
    derived: Any = type(base.__name__, (base,), {**members, "_base": base, "__reduce_ex__": _as_base})
    wrapped = derived.__new__(derived)
    # A scheduler may have replaced the original's `step` by one bound to the original: leave that behind.
    wrapped.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    _keep_scheduled(optimizer, wrapped)
    refusal = wrapped.__dict__.pop("_refusal", None)
    if refusal is not None:
        refusal.remove()
    return wrapped


def user_step(optimizer: Any, closure: Callable[[], Any] | None, after: Callable[[], Any]) -> Any:
    """Make the step of the user's optimizer; *after* is called each time *closure* has computed gradients, before they
    are used.
    """
    if closure is None:
        return optimizer._base.step(optimizer)

    def both() -> Any:
        loss = closure()
        after()
        return loss

    return optimizer._base.step(optimizer, both)


def _keep_scheduled(optimizer: torch.optim.Optimizer, wrapped: torch.optim.Optimizer) -> None:
    """Let schedulers of the original *optimizer* see that *wrapped* steps, and set the rates of what it has loaded."""
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
    """Return an empty optimizer of the class *base*, which takes over the state of one that was wrapped."""
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
    """Raise `UnderWayError` if gradients are under way."""
    if exchange is not None and exchange.busy:
        raise UnderWayError("optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                            "optimizer.synchronize(). This is prohibited as it can cause a race condition.")


def refuse_unknown(optimizer: torch.optim.Optimizer, known: Iterable[torch.Tensor]) -> None:
    """Raise `UnsupportedError` if *optimizer* has gradients of other parameters than those *known* to all ranks."""
    ids = {id(p) for p in known}
    shapes = [str(tuple(p.shape)) for group in optimizer.param_groups for p in group["params"]
              if p.grad is not None and id(p) not in ids]
    if shapes:
        raise UnsupportedError(
            f"the optimizer has gradients of parameters of shape {', '.join(shapes[:4])} that did not require any, or "
            "were not there, when it was wrapped: their updates would stay this rank's. Make the optimizer anew with "
            "the parameters as they are now, and wrap that")


def trained_parameters(optimizer: torch.optim.Optimizer,
                named: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Return (name, parameter) of every trained parameter of *optimizer* once, in the order of *named*.

    Raises as `owned`; and `ConfigError` if one has no name of its own.
    """
    found = [(name, p) for name, p in owned(optimizer, named, reached=("cpu",)) if p.requires_grad]
    n_wanted = len({id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad})
    n_named = len({name for name, _ in found})
    if n_named < n_wanted:
        raise ConfigError(f"{n_wanted - n_named} of {n_wanted} parameters of the optimizer have no name of their own "
                          "among those that were named")
    return found


def parameters_of(optimizer: torch.optim.Optimizer) -> Callable[[], list[torch.Tensor]]:
    """Return what returns the parameters that *optimizer* has by then, as long as it lives."""
    found = weakref.ref(optimizer)

    def parameters() -> list[torch.Tensor]:
        alive = found()
        return [] if alive is None else [p for group in alive.param_groups for p in group["params"]]

    return parameters


def owned(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.Tensor]],
          reached: tuple[str, ...] = REACHED) -> list[tuple[str, torch.Tensor]]:
    """Return (name, parameter) of every parameter of *optimizer* once, in the order of *named*.

    Raises
    ------
    ConfigError
        If *named* is not such pairs.
    UnsupportedError
        If one that is trained is on another kind of device than those *reached*.
    """
    pairs = list(named) if isinstance(named, Iterable) else [named]
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ConfigError(f"{type(pair).__name__} among the parameters: expected pairs of name and parameter, as "
                              "model.named_parameters() gives them")
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, p in pairs:
        if id(p) in wanted:
            found.setdefault(id(p), (name, p))
    for name, p in found.values():
        if p.requires_grad and p.device.type not in reached:
            raise UnsupportedError(f"parameter {name!r} is on {p.device}: move it to {' or '.join(reached)}")
    return list(found.values())
