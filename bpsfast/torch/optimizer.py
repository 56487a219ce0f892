"""DistributedOptimizer: the user's optimizer, whose gradients are averaged over all ranks before each step.

The gradients' way is `exchange.Exchange`'s; with *cross_barrier* steps overlap the next forward pass (`cross_barrier`).
"""
from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..orchestration.errors import BusyError, ConfigError, UnsupportedError
from ..trainer import current as process
from .compression import Compression, CompressorLike, check_compressor
from .cross_barrier import CrossBarrierExchange
from .exchange import Exchange


class _DistributedOptimizer(torch.optim.Optimizer):
    """What is mixed into the user's optimizer class (see `DistributedOptimizer`)."""

    _base: type[torch.optim.Optimizer]
    _exchange: Exchange | None
    _skips: bool

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients (unless `synchronize` did, or inside `skip_synchronize`) and update the parameters.

        With a *closure*, the gradients of each of its evaluations are averaged.
        """
        if self._exchange is None or self._skips:
            return self._base.step(self) if closure is None else self._base.step(self, closure)
        if closure is None:
            if not self._exchange.synchronized:
                self.synchronize()
            self._exchange.synchronized = False
            return self._base.step(self)

        def averaged() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        result = self._base.step(self, averaged)
        self._exchange.synchronized = False
        return result

    def synchronize(self) -> None:
        """Wait until all gradients are averaged over all ranks and in place; before clipping them, for example.

        A parameter without a gradient contributes zeros, and gets the average as its gradient. The next `step` does
        not average again.

        Raises
        ------
        StallError, PeerLostError
            As `bpsfast.push_pull`.
        """
        if self._exchange is not None:
            self._exchange.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` inside the block use the gradients as they are."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate *passes* backward passes per step from now on. The sum over passes is not divided."""
        if passes < 1:
            raise ConfigError(f"backward_passes_per_step={passes}: at least one pass is needed")
        if self._exchange is not None:
            self._exchange.n_passes = passes
            self._exchange.forget_passes()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. With ``set_to_none=False`` they live in shared memory from the second step on: no copy.

        Raises
        ------
        BusyError
            If gradients are under way: between backward and step (or synchronize).
        """
        if self._exchange is not None and self._exchange.busy:
            raise BusyError("zero_grad() between backward() and step(): gradients are under way; call step() or "
                            "synchronize() first")
        self._base.zero_grad(self, set_to_none)
        if self._exchange is not None:
            self._exchange.forget_passes()
            if not set_to_none:
                self._exchange.house_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: all ranks agreed on the parameters when the optimizer was wrapped."""
        raise UnsupportedError("add the parameter group before DistributedOptimizer wraps the optimizer")


class _CrossBarrierOptimizer(torch.optim.Optimizer):
    """What is mixed in over that with *cross_barrier*, where there is anybody to exchange gradients with."""

    _base: type[torch.optim.Optimizer]
    _exchange: CrossBarrierExchange
    _skips: bool

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Note that the step is over and return; each parameter is updated before anybody uses it.

        After `synchronize` (to clip, for example) inside `skip_synchronize`, and in the first step, it is an ordinary
        step. The optimizer's own hooks on the step run now; torch's global ones run for each parameter.
        """
        if closure is not None:
            raise UnsupportedError("step(closure) evaluates the model within a step: do without cross_barrier")
        exchange = self._exchange
        if self._skips or exchange.synchronized or not exchange.crosses:
            if not (self._skips or exchange.synchronized):
                self.synchronize()
            with exchange.whole_step(self):
                self._base.step(self)
            exchange.synchronized = False
            return None
        for hook in self._optimizer_step_pre_hooks.values():
            hook(self, (), {})
        exchange.defer(self)
        for hook in self._optimizer_step_post_hooks.values():
            hook(self, (), {})
        return None

    def synchronize(self) -> None:
        """Wait until all gradients are averaged and in place, as without cross_barrier: on all ranks, after backward.
        """
        self._exchange.settle_all()
        self._exchange.synchronize()

    def settle(self) -> None:
        """Make the updates that are due now, and not when the parameters are used; nobody else has to do so.

        Raises
        ------
        StallError, PeerLostError
            As `bpsfast.push_pull`.
        """
        self._exchange.settle_all()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. Raises BusyError as without cross_barrier."""
        if self._exchange.busy:
            raise BusyError("zero_grad() between backward() and step(): gradients are under way; call step() or "
                            "synchronize() first")
        self._exchange.zero(set_to_none)
        self._exchange.forget_passes()

    def state_dict(self) -> dict[str, Any]:
        """Make the updates that are due, then as the optimizer's own."""
        self._exchange.settle_all()
        return self._base.state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the updates that are due, then as the optimizer's own."""
        self._exchange.settle_all()
        self._base.load_state_dict(self, state_dict)


# torch wraps the `step` of a class that has no such mark (when a state is loaded), and would then run the step hooks
# twice: they are run by the user's own class already.
_DistributedOptimizer.step.hooked = True  # type: ignore[attr-defined]
_CrossBarrierOptimizer.step.hooked = True  # type: ignore[attr-defined]

_CROSSING = ("step", "synchronize", "settle", "zero_grad", "state_dict", "load_state_dict")
_MIXED_IN = ("step", "synchronize", "skip_synchronize", "set_backward_passes_per_step", "zero_grad", "add_param_group")


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: CompressorLike = Compression.none, backward_passes_per_step: int = 1, *, cross_barrier: bool = False,
    num_steps: int = 10**6,
) -> torch.optim.Optimizer:
    """Return *optimizer* as one that averages its gradients over all ranks before each step.

    The result is of a class derived from the optimizer's own and takes over its groups, options and state; the
    original must not be used any more. Gradients that the next forward pass needs first travel first, in the order that
    the first backward pass shows; if torch has compiled anything, in that of *named_parameters*.

    Parameters
    ----------
    named_parameters
        (name, tensor) of at least all parameters of the optimizer; None: they are numbered.
    compression
        `Compression.fp16` and `Compression.bf16` let gradients travel in half the bytes; or one of your own
        (`bpsfast.torch.compression`).
    backward_passes_per_step
        Gradients travel after this many backward passes; the sum over passes is not divided.
    cross_barrier
        `step` returns at once, and whoever uses a parameter next waits for that one only: same values, less waiting
        (see `cross_barrier`). Gradients cannot be used from backward on; `synchronize` makes them. Not for models that
        are compiled or scripted: their code uses parameters behind Python's back.
    num_steps
        After so many steps, a step waits for all again.

    Raises
    ------
    ConfigError
        If names are missing or not unique.
    UnsupportedError
        If an optimizer cannot update one parameter at a time (also in its first step), or a gradient cannot be summed.
    """
    if backward_passes_per_step < 1:
        raise ConfigError(f"backward_passes_per_step={backward_passes_per_step}: at least one pass is needed")
    check_compressor(compression)
    base = type(optimizer)
    if hasattr(base, "skip_synchronize"):
        raise ConfigError("the optimizer is a DistributedOptimizer already")
    named = _named(optimizer, named_parameters)
    exchanges = process.size() > 1 and bool(named)
    members = {name: _DistributedOptimizer.__dict__[name] for name in _MIXED_IN}
    if exchanges and cross_barrier:
        members |= {name: _CrossBarrierOptimizer.__dict__[name] for name in _CROSSING}
    derived: Any = type(base.__name__, (base,), {**members, "_base": base})
    wrapped = derived.__new__(derived)
    # A scheduler may have replaced the original's `step` by one bound to the original: leave that behind.
    wrapped.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    wrapped._skips = False
    if exchanges and cross_barrier:
        wrapped._exchange = CrossBarrierExchange(base, named, compression, backward_passes_per_step, num_steps)
    else:
        wrapped._exchange = Exchange(named, compression, backward_passes_per_step) if exchanges else None
    return wrapped


def CrossBarrier(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: CompressorLike = Compression.none, backward_passes_per_step: int = 1, num_steps: int = 10**6,
) -> torch.optim.Optimizer:
    """Return *optimizer* as `DistributedOptimizer` does with *cross_barrier*; BytePS's name and arguments for it.

    *named_parameters* None: those of *model*.
    """
    named = model.named_parameters() if named_parameters is None else named_parameters
    return DistributedOptimizer(optimizer, named, compression, backward_passes_per_step, cross_barrier=True,
                                num_steps=num_steps)


def _named(optimizer: torch.optim.Optimizer,
           named_parameters: Iterable[tuple[str, torch.Tensor]] | None) -> list[tuple[str, torch.Tensor]]:
    """Return (name, parameter) of every trained parameter of *optimizer*, in the order given."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        session = process.current()
        return [(session.tensors.unnamed("push_pull.noname"), p) for p in own if p.requires_grad]
    named = list(named_parameters)
    if any(not isinstance(item, tuple) or len(item) != 2 for item in named):
        raise ConfigError("named_parameters must be (name, tensor) pairs, as model.named_parameters() gives them")
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise ConfigError(f"named_parameters names {', '.join(twice)} more than once")
    known, wanted = {id(p) for _, p in named}, {id(p) for p in own}
    absent = sum(id(p) not in known for p in own)
    if absent:
        raise ConfigError(f"{absent} of {len(own)} parameters of the optimizer are not in named_parameters")
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, p in named:
        if id(p) in wanted and p.requires_grad:
            found.setdefault(id(p), (name, p))
    for name, p in found.values():
        if p.device.type != "cpu":
            raise UnsupportedError(f"parameter {name!r} is on {p.device}: only CPU parameters are supported")
    return list(found.values())
