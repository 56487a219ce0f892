"""The operation of JAX that a push_pull is: traced, ordered, differentiated, lowered to a call of our handler.

It has an ordered effect, as `io_callback(ordered=True)` has: a token runs through all push_pulls of a program, and from
program to program. So each rank makes them in the order in which its Python code was traced, whatever XLA does with the
rest. Without it two that do not depend on each other would run in an order of XLA's choice, one rank would wait in the
first and another in the second: a deadlock; and rounds of two calls under way could meet in the wrong order.

JAX has no public name for ordered effects. What is taken from `jax._src` is taken here, and looked for at import.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
from jax.interpreters import batching, mlir

from ..orchestration.errors import UnsupportedError
from . import handler
from .push_pull_call import PushPullCall, register_call

try:
    from jax._src import core, dispatch, effects
    from jax._src.interpreters.mlir import TokenSet

    _SETS = (effects.lowerable_effects, effects.ordered_effects, effects.control_flow_allowed_effects,
             effects.custom_derivatives_allowed_effects)
    _TOKEN = core.abstract_token
    dispatch.runtime_tokens.clear  # noqa: B018 - is it there?
except (ImportError, AttributeError) as exc:
    raise ImportError(f"bpsfast.jax needs ordered effects, which it does not find in jax {jax.__version__}: {exc}. "
                      "Install a jax of the versions that setup.cfg names, or a newer bpsfast") from exc


class PushPullEffect(effects.Effect):
    """Push_pulls happen in the order of the program."""

    def __str__(self) -> str:
        return "PushPull"


_effect = PushPullEffect()
for _set in _SETS:
    _set.add_type(PushPullEffect)

_push_pull = core.Primitive("bpsfast_push_pull")
_push_pull.multiple_results = True
_unordered = core.Primitive("bpsfast_push_pull_at_once")  # without a token: see `_run`
_unordered.multiple_results = True


def wait_for_programs() -> None:
    """Wait for the programs that this thread has started, as far as they have effects.

    What one of them has failed with is raised where its results are used. Its token keeps the error, too, and would
    hand it on to every program that comes: it is forgotten.
    """
    try:
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError:
        dispatch.runtime_tokens.clear()


@_push_pull.def_effectful_abstract_eval
def _shapes_in_order(*leaves: Any, site: PushPullCall) -> tuple[list[Any], set[Any]]:
    return _shapes(*leaves, site=site), {_effect}


@_unordered.def_abstract_eval
def _shapes(*leaves: Any, site: PushPullCall) -> list[Any]:
    return [core.ShapedArray(leaf.shape, leaf.dtype) for leaf in leaves]


@_push_pull.def_impl
def _run(*leaves: Any, site: PushPullCall) -> Any:
    """Sum outside jit: after all programs under way; wait, and raise what was raised.

    That keeps the order without a token, with which JAX takes a long way to XLA: milliseconds for some hundred leaves.
    """
    wait_for_programs()
    try:
        return jax.block_until_ready(_now(site)(*leaves))
    except jax.errors.JaxRuntimeError as exc:
        cause = handler.failure(str(exc))
        if cause is None:
            raise
        raise cause from None


@cache
def _now(site: PushPullCall) -> Callable[..., Any]:
    return jax.jit(lambda *leaves: _unordered.bind(*leaves, site=site))


def _lower(ctx: Any, *leaves: Any, site: PushPullCall) -> Sequence[Any]:
    """Lower for the CPU: the token is the call's first argument and first result."""
    token = ctx.tokens_in.get(_effect)
    with_token = dataclasses.replace(ctx, avals_in=[_TOKEN, *ctx.avals_in], avals_out=[_TOKEN, *ctx.avals_out])
    token, *sums = _lower_unordered(with_token, token, *leaves, site=site)
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(TokenSet({_effect: token})))
    return sums


def _lower_unordered(ctx: Any, *operands: Any, site: PushPullCall) -> Sequence[Any]:
    handler.require_fit()
    lowered: Sequence[Any] = _lowering(ctx, *operands, site=register_call(site))
    return lowered


_lowering = jax.ffi.ffi_lowering(handler.TARGET, has_side_effect=True)


def _refuse_lowering(ctx: Any, *leaves: Any, site: PushPullCall) -> Sequence[Any]:
    platforms = ", ".join(ctx.module_context.platforms)
    raise UnsupportedError(f"push_pull inside jit is for the CPU, not for {platforms}: call push_pull outside jit (jit "
                           "the gradients, then the update), where arrays of GPUs are taken, or jit for the CPU: "
                           "jax.default_device(jax.devices('cpu')[0])")


def _refuse_batching(leaves: Any, dims: Any, *, site: PushPullCall) -> Any:
    raise UnsupportedError(f"push_pull of {site.leaves[0].name!r} inside vmap: ranks sum one tensor for each call, not "
                           "one for each example; call it outside vmap, with the whole batch")


mlir.register_lowering(_push_pull, _refuse_lowering)
mlir.register_lowering(_push_pull, _lower, platform="cpu")
mlir.register_lowering(_unordered, _lower_unordered, platform="cpu")
batching.primitive_batchers[_push_pull] = _refuse_batching
handler.register()


def run(site: PushPullCall, leaves: Sequence[Any]) -> list[Any]:
    """Sum *leaves* over all ranks."""
    return list(_push_pull.bind(*leaves, site=site))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def differentiable(site: PushPullCall, *leaves: Any) -> list[Any]:
    """As `run`; the sum is linear: its gradient is the sum (mean) of the ranks' gradients, under names of its own."""
    return run(site, leaves)


def _forward(site: PushPullCall, *leaves: Any) -> tuple[list[Any], None]:
    return differentiable(site, *leaves), None


def _backward(site: PushPullCall, _: None, cotangents: Sequence[Any]) -> tuple[Any, ...]:
    """Sum the gradients; integers have none."""
    back = site.backward()
    real = [each for leaf, each in zip(site.leaves, cotangents) if leaf.is_differentiable]
    sums = iter(differentiable(back, *real) if real else ())
    return tuple(next(sums) if leaf.is_differentiable else None for leaf in site.leaves)


differentiable.defvjp(_forward, _backward)
