"""DistributedOptimizer: the user's optimizer, whose gradients are averaged over all ranks before each step.

`exchange.Exchange` averages them; with *cross_barrier* a step overlaps the next forward pass (`cross_barrier`).
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..orchestration.errors import ConfigError, UnsupportedError
from ..trainer import process
from .async_optimizer import AsyncOptimizer
from .compression import Compression, CompressionLike, check_compression
from .cross_barrier import CrossBarrierExchange
from .exchange import Exchange, SparseExchange
from .gradient_hooks import Named
from .optimizer_extras import is_exchanged, settled_base, user_state_dict, warn_of_momentum
from .optimizer_wrapper import OptimizerWrapper, check_idle, check_passes, owned, parameters_of, user_step, wrap


class _SavesExtras(OptimizerWrapper):
    """The methods that `DistributedOptimizer` adds to the user's optimizer class, with and without *cross_barrier*."""

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's own state, codec states under "compression", the result of autotune under "tuned".

        Each node has its own codec states: for identical bits after a restart save those of every node
        (`optimizer_extras`). Call it between steps. With *cross_barrier* it makes the due updates first.
        """
        state = user_state_dict(self)
        return {**state, **self._exchange.state()} if self._exchange is not None else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned on this node. With *cross_barrier* it makes the due updates first.

        Raises `MismatchError` (in the first step if it is loaded before that) if the codec states are of another node,
        or of other gradients or codecs: remove "compression" from the state to begin without.
        """
        base, state = settled_base(self), dict(state_dict)
        if self._exchange is not None:
            self._exchange.load(state)
        base.load_state_dict(self, state)


class _DistributedOptimizer(OptimizerWrapper):
    """The methods that `DistributedOptimizer` adds to the user's optimizer class without *cross_barrier*."""

    _exchange: Exchange | None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients (unless `synchronize` did, or inside `skip_synchronize`) and update the parameters.

        With a *closure*, the gradients of each of its evaluations are averaged.
        """
        if self._exchange is None or self._skips:
            return self._base.step(self) if closure is None else self._base.step(self, closure)
        if closure is None and not self._exchange.averaged:
            self.synchronize()
        try:
            return user_step(self, closure, self.synchronize)
        finally:
            self._exchange.synchronized = False

    def synchronize(self) -> None:
        """Wait until all gradients are averaged over all ranks and in place; before clipping them, for example.

        A parameter without a gradient contributes zeros and gets the average; without one on any rank it gets none. The
        next `step` does not average again, unless a backward pass or `zero_grad` comes before. Raises as
        `bpsfast.push_pull`; and `UnsupportedError` on all ranks, if a parameter has a gradient that was not the
        optimizer's when it was wrapped.
        """
        if self._exchange is not None:
            self._exchange.synchronize()


class _CrossBarrierOptimizer(OptimizerWrapper):
    """The methods that `DistributedOptimizer` adds instead with *cross_barrier*, where gradients are exchanged."""

    _exchange: CrossBarrierExchange

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Record that the step is due and return; each parameter is updated before its next use.

        After `synchronize` (to clip, for example) inside `skip_synchronize`, and in the first step, it is an ordinary
        step. The optimizer's own hooks on the step run now; torch's global ones run for each parameter.
        """
        if closure is not None:
            raise UnsupportedError("step(closure) evaluates the model within a step: do without cross_barrier")
        exchange = self._exchange
        if self._skips or exchange.averaged or not exchange.crosses:
            if not (self._skips or exchange.averaged):
                self.synchronize()
            try:
                with exchange.whole_step(self):
                    self._base.step(self)
            finally:
                exchange.synchronized = False
            return None
        for hook in self._optimizer_step_pre_hooks.values():
            hook(self, (), {})
        exchange.defer(self)
        for hook in self._optimizer_step_post_hooks.values():
            hook(self, (), {})
        return None

    def synchronize(self) -> None:
        """Wait until all gradients are averaged and in place, as without cross_barrier; all ranks, after backward."""
        self._exchange.settle_all()
        self._exchange.synchronize()

    def settle(self) -> None:
        """Make the due updates now, instead of when the parameters are used; raises as `bpsfast.push_pull`.

        Other ranks need not do so.
        """
        self._exchange.settle_all()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. Raises UnderWayError as without cross_barrier."""
        check_idle(self._exchange)
        self._exchange.zero(set_to_none)
        self._exchange.forget_passes()


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: CompressionLike = Compression.none, backward_passes_per_step: int = 1, *, cross_barrier: bool = False,
    num_steps: int = 10**6, sparse_as_dense: bool = False,
) -> torch.optim.Optimizer:
    """Return *optimizer* as one that averages its gradients over all ranks before each step.

    The result is of a class derived from the optimizer's own and takes over its groups, options and state; the
    original must not be used any more. Gradients that the next forward pass needs first travel first, in the order that
    the first backward pass shows; if torch has compiled anything, in that of *named_parameters*. With the setting
    async_training (BytePS's BYTEPS_ENABLE_ASYNC) it is an `AsyncOptimizer`: no gradients travel.

    A parameter without a gradient on any rank is left alone, as in one process: so parameters may be frozen and thawed
    while others are trained, and ranks may use different parts of a model. One that was not the optimizer's when it was
    wrapped is refused on all ranks in the first step for which it has a gradient. Parameters may be wrapped again, by
    an optimizer for others of them or with other arguments, on all ranks in the same order: the last optimizer sends
    their gradients during backward, an earlier one in its step. The memory of an optimizer that is gone on all ranks is
    released.

    Parameters
    ----------
    named_parameters
        (name, tensor) of at least all parameters of the optimizer; None: they are numbered.
    compression
        `Compression.fp16` and `Compression.bf16` halve the bytes of gradients; or a compressor of your own
        (`bpsfast.torch.compression`); or a codec for what travels between nodes (`Compression.topk(0.01,
        error_feedback=True)`), or a choice of codecs by name (`bpsfast.compression.choice`). Error feedback uses the
        learning rates of the groups. A codec's momentum replaces the optimizer's own, which must be 0.
    backward_passes_per_step
        Gradients travel after this many backward passes; the sum over passes is not divided.
    cross_barrier
        `step` returns at once, and the next use of a parameter waits for that one only: same values, less waiting (see
        `cross_barrier`). Parameters that are frozen when the optimizer is wrapped are not trained, but refused on all
        ranks, if they have gradients later. From backward on gradients cannot be used, unless `synchronize` is called.
        Not for compiled or scripted models, whose code uses parameters without telling Python.
    num_steps
        After this many steps, `step` waits for all gradients again.
    sparse_as_dense
        Send sparse gradients (``torch.nn.Embedding(sparse=True)``) as dense ones. Otherwise only rows travel that some
        rank has. Not with *cross_barrier*.

    Raises
    ------
    ConfigError
        If names are missing or not unique.
    UnsupportedError
        If an optimizer cannot update one parameter at a time (also in its first step), or a gradient cannot be summed.
    """
    check_passes(backward_passes_per_step)
    check_compression(compression)
    if cross_barrier and sparse_as_dense:
        raise UnsupportedError("sparse_as_dense goes without cross_barrier, which takes dense gradients only: use "
                               "sparse=False in the embedding")
    base = type(optimizer)
    named = _named(optimizer, named_parameters)
    settings = process.current().settings
    if settings.async_training and process.size() > 1 and named:
        if cross_barrier or compression is not Compression.none:
            raise UnsupportedError("BPSFAST_ASYNC_TRAINING (BYTEPS_ENABLE_ASYNC) goes with neither cross_barrier nor "
                                   "compression: no gradients travel")
        staleness = None if settings.async_staleness < 0 else settings.async_staleness
        backups = None if settings.async_backups < 0 else settings.async_backups
        return AsyncOptimizer(optimizer, named, staleness=staleness, backups=backups)
    crosses = cross_barrier and is_exchanged(named, compression)
    wrapped = wrap(optimizer, backward_passes_per_step, _SavesExtras,
                   _CrossBarrierOptimizer if crosses else _DistributedOptimizer)

    def exchange(n_passes: int) -> Exchange | None:
        if crosses:
            return CrossBarrierExchange(base, named, compression, n_passes, num_steps)
        is_needed = is_exchanged(named, compression)  # the size of the job may have changed
        return SparseExchange(named, compression, n_passes, sparse_as_dense) if is_needed else None

    wrapped._make_exchange = exchange
    rejoin(wrapped)
    if wrapped._exchange is not None:
        warn_of_momentum(wrapped, wrapped._exchange.momenta)
    return wrapped


def rejoin(optimizer: torch.optim.Optimizer) -> None:
    """Let *optimizer*, which `DistributedOptimizer` has made, average its gradients in the job that was joined last.

    All ranks of that job call it between the same steps, except those that have made their optimizer anew. The nodes of
    the previous job kept what compressed gradients had left unsent; that is lost. Raises `UnsupportedError` if it is
    another optimizer, or one that trains asynchronously or by outer steps: make that anew.
    """
    wrapped: Any = optimizer
    if not hasattr(wrapped, "_make_exchange"):
        raise UnsupportedError(f"{type(optimizer).__name__} is no DistributedOptimizer, and cannot join another job: "
                               "make it anew, in a reset callback of the state")
    abandon(wrapped)
    wrapped._exchange = wrapped._make_exchange(wrapped.backward_passes_per_step)
    if wrapped._exchange is not None:
        wrapped._exchange.used.members = parameters_of(wrapped)
        wrapped._exchange.follow(wrapped)


def abandon(optimizer: torch.optim.Optimizer) -> None:
    """Discard the gradients and due updates of an *optimizer* of `DistributedOptimizer` (others: do nothing)."""
    exchange = getattr(optimizer, "_exchange", None)
    if exchange is not None:
        exchange.abandon()


def CrossBarrier(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: CompressionLike = Compression.none, backward_passes_per_step: int = 1, num_steps: int = 10**6,
) -> torch.optim.Optimizer:
    """Return *optimizer* as `DistributedOptimizer` does with *cross_barrier*; BytePS's name and arguments for it.

    *named_parameters* None: those of *model*.
    """
    named = model.named_parameters() if named_parameters is None else named_parameters
    return DistributedOptimizer(optimizer, named, compression, backward_passes_per_step, cross_barrier=True,
                                num_steps=num_steps)


def _named(optimizer: torch.optim.Optimizer, named_parameters: Iterable[Named] | None) -> list[Named]:
    """Return (name, parameter) of every parameter of *optimizer*, in the order given."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        session = process.current()
        return [(session.tensors.unnamed("push_pull.noname"), p) for p in own]
    named = list(named_parameters)
    if any(not isinstance(item, tuple) or len(item) != 2 for item in named):
        raise ConfigError("named_parameters must be (name, tensor) pairs, as model.named_parameters() gives them")
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise ConfigError(f"named_parameters names {', '.join(twice)} more than once")
    known = {id(p) for _, p in named}
    absent = sum(id(p) not in known for p in own)
    if absent:
        raise ConfigError(f"{absent} of {len(own)} parameters of the optimizer are not in named_parameters")
    return owned(optimizer, named)
