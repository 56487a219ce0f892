"""Sums gradients over all ranks: in `value_and_grad`, `grad`, and transformations and optimizers of optax."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..compression.choice import Choice, check_choice
from ..orchestration.errors import ConfigError
from ..trainer.arguments import averages, check_passes
from .ops import push_pull


def value_and_grad(fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, *,
                   average: bool = True, name: str = "gradient", priority: int | None = None,
                   compression: Choice | None = None, op: int | None = None) -> Callable[..., Any]:
    """As `jax.value_and_grad`, with gradients averaged (summed) over all ranks. The value is this rank's.

    The parameters after *has_aux* are those of `push_pull`.
    """
    check_choice(compression)
    mean = averages(average, op)
    local = jax.value_and_grad(fun, argnums, has_aux)

    @wraps(fun)
    def summed(*arguments: Any, **keywords: Any) -> Any:
        value, gradients = local(*arguments, **keywords)
        return value, push_pull(gradients, mean, name, priority, compression)

    return summed


def grad(fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, *, average: bool = True,
         name: str = "gradient", priority: int | None = None, compression: Choice | None = None,
         op: int | None = None) -> Callable[..., Any]:
    """As `jax.grad`, with gradients averaged (summed) over all ranks: see `value_and_grad`."""
    both = value_and_grad(fun, argnums, has_aux, average=average, name=name, priority=priority,
                          compression=compression, op=op)

    @wraps(fun)
    def summed(*arguments: Any, **keywords: Any) -> Any:
        value, gradients = both(*arguments, **keywords)
        return (gradients, value[1]) if has_aux else gradients

    return summed


def distributed_gradients(average: bool = True, name: str = "gradient", priority: int | None = None,
                          compression: Choice | None = None, *, op: int | None = None) -> optax.GradientTransformation:
    """Return a transformation for `optax.chain` that replaces gradients by their mean (sum) over all ranks.

    Parameters are those of `push_pull`. Two models that are trained at the same time need different names.
    """
    check_choice(compression)
    mean = averages(average, op)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        return push_pull(updates, mean, name, priority, compression), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


class PassesState(NamedTuple):
    """The state of `DistributedOptimizer` between backward passes."""

    #: Backward passes since the last update.
    n_passes: Any
    #: The sum of their gradients.
    gradients: Any
    #: The optimizer's state.
    inner: Any


def DistributedOptimizer(optimizer: optax.GradientTransformation, name: str = "gradient",
                         compression: Choice | None = None, backward_passes_per_step: int = 1, *, average: bool = True,
                         op: int | None = None, priority: int | None = None) -> optax.GradientTransformation:
    """Return *optimizer* as one that first averages its gradients over all ranks.

    With *backward_passes_per_step* n, the gradients of n calls of ``update`` are added on this rank, as BytePS does
    (not averaged: divide the loss by n for that). The nth call sums them over the ranks and updates; the others return
    zeros. The other parameters are those of `push_pull`.

    Raises ConfigError if an argument is invalid.
    """
    check_passes(backward_passes_per_step)
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ConfigError(f"{optimizer!r} is not an optimizer of optax: it has no init and update")
    summed = optax.chain(distributed_gradients(average, name, priority, compression, op=op), optimizer)
    if backward_passes_per_step == 1:
        return summed
    inner = optax.with_extra_args_support(summed)

    def init(params: Any) -> PassesState:
        return PassesState(jnp.zeros([], jnp.int32), jax.tree_util.tree_map(jnp.zeros_like, params), inner.init(params))

    def update(updates: Any, state: PassesState, params: Any = None, **extra: Any) -> tuple[Any, PassesState]:
        total = jax.tree_util.tree_map(jnp.add, state.gradients, updates)
        zeros = jax.tree_util.tree_map(jnp.zeros_like, total)

        def step() -> tuple[Any, PassesState]:
            found, after = inner.update(total, state.inner, params, **extra)
            return found, PassesState(jnp.zeros_like(state.n_passes), zeros, after)

        def wait() -> tuple[Any, PassesState]:
            return zeros, PassesState(state.n_passes + 1, total, state.inner)

        is_last = state.n_passes + 1 == backward_passes_per_step
        if isinstance(is_last, jax.core.Tracer):
            found: tuple[Any, PassesState] = jax.lax.cond(is_last, step, wait)
            return found
        return step() if is_last else wait()

    return optax.GradientTransformationExtraArgs(init, update)
