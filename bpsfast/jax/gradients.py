"""`jax.grad` and `jax.value_and_grad` whose gradients are summed over all ranks."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import jax

from ..compression.choice import Choice, check_choice
from ..trainer.arguments import averages
from .ops import push_pull


def value_and_grad(fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, *,
                   average: bool = True, name: str = "gradient", priority: int | None = None,
                   compression: Choice | None = None, op: int | None = None) -> Callable[..., Any]:
    """As `jax.value_and_grad`, with gradients averaged (summed) over all ranks. The value is this rank's own.

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
