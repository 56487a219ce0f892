"""The operation of JAX that a push_pull is: traced, ordered, differentiated, lowered to a call of our handler.

It has an ordered effect, as `io_callback(ordered=True)` has: a token runs through all push_pulls of a program, and from
program to program. So each rank makes them in the order in which its Python code was traced, whatever XLA does with the
rest. Without it two that do not depend on each other would run in an order of XLA's choice, one rank would wait in the
first and another in the second: a deadlock; and rounds of two calls under way could meet in the wrong order.

JAX has no public name for ordered effects. What is taken from `jax._src` is taken here, and looked for at import.
"""
from __future__ import annotations

import ctypes
import dataclasses
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import jax
from jax.interpreters import batching, mlir

from ..orchestration.errors import ProtocolError, UnsupportedError
from ..orchestration.messages import TensorSpec
from ..trainer import process
from ..trainer.bundle import Bundle, Leaf, specs_of
from ..trainer.session import Session
from . import call_frame

_BACKWARD = ".backward"


@dataclass(frozen=True)
class PushPullCall:
    """What one push_pull sums, all leaves at once. Hashable: JAX compiles once for each."""

    leaves: tuple[Leaf, ...]
    average: bool
    priority: int | None
    _bundles: list[Bundle] = field(default_factory=list, compare=False, repr=False)

    @cached_property
    def digest(self) -> str:
        """Name it: the same text for the same site in every process."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:32]

    def backward(self) -> PushPullCall:
        """Return the site that sums the gradients of this one's results."""
        leaves = tuple(replace(leaf, name=leaf.name + _BACKWARD) for leaf in self.leaves if leaf.is_differentiable)
        return PushPullCall(leaves, self.average, self.priority)

    def specs(self) -> list[TensorSpec]:
        """Describe the tensors to the job: small ones travel together."""
        return specs_of(self.leaves, self.average, [self.priority] * len(self.leaves))

    def bundle(self, session: Session) -> Bundle:
        """Return what sums it in *session*."""
        if not self._bundles or self._bundles[0].session is not session:
            self._bundles[:] = [Bundle(session, self.specs())]
        return self._bundles[0]


_sites: dict[str, PushPullCall] = {}


def register_call(site: PushPullCall) -> str:
    """Let `registered_call` find *site*, for as long as the process lives; return its digest."""
    return _sites.setdefault(site.digest, site).digest


def registered_call(digest: str) -> PushPullCall:
    """Return the site of that digest.

    Raises
    ------
    ProtocolError
        If the program that asks for it was compiled elsewhere.
    """
    try:
        return _sites[digest]
    except KeyError:
        raise ProtocolError("a compiled program sums what this process has never traced: programs with push_pull are "
                            "not moved between processes; jit the function here") from None

#: The name by which XLA knows the handler.
TARGET = "bpsfast_push_pull"

#: What was raised in the last calls that failed, with the text that XLA was given for it. Newest last.
_failures: deque[tuple[str, BaseException]] = deque(maxlen=16)
_misfit: str | None = None  # what does not fit; None: XLA has not told its layouts yet


def _handle(pointer: Any) -> int | None:
    """Do what XLA wants; never raises. Return the address of an error, or None."""
    global _misfit
    frame = pointer.contents
    try:
        metadata = call_frame.metadata_of(frame)
        if metadata is not None:
            _misfit = call_frame.answer_metadata(frame, metadata)
            return None
        _sum(frame)
    except BaseException as exc:  # ctypes would print it, and the program go on with what was in the buffers
        text = f"{type(exc).__module__.partition('.')[0]} {type(exc).__name__}: {exc}"
        _failures.append((text, exc))
        return call_frame.error(frame, text)
    return None


_pointer = call_frame.HANDLER(_handle)  # lives as long as XLA may call it


def _sum(frame: call_frame.Frame) -> None:
    site = registered_call(call_frame.text_of(frame)) if not (wrong := call_frame.check_frame(frame)) else None
    if site is None:
        raise UnsupportedError(_unsupported(wrong))
    bundle = site.bundle(process.current())
    bundle.run(call_frame.addresses(frame.arguments), call_frame.addresses(frame.results))


def failure(text: str) -> BaseException | None:
    """Return what was raised in the call whose error XLA reports as *text*."""
    return next((exc for said, exc in reversed(_failures) if said in text), None)


def _unsupported(wrong: str) -> str:
    return (f"jaxlib {jax.lib.__version__} calls handlers in a way that this bpsfast does not know: {wrong}. Install a "
            "jaxlib of the versions that setup.cfg names, or a newer bpsfast")


def register() -> None:
    """Tell XLA of the handler, for the CPU alone. XLA asks for its version once it has started that platform."""
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(ctypes.cast(_pointer, ctypes.c_void_p)), platform="cpu")


def require_fit() -> None:
    """Raise `UnsupportedError` unless this jaxlib calls handlers as is known here."""
    if _misfit is None:
        jax.devices("cpu")
    if _misfit != "":
        raise UnsupportedError(_unsupported(_misfit or "it has not asked for the version of the handler"))

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
        cause = failure(str(exc))
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
    require_fit()
    lowered: Sequence[Any] = _lowering(ctx, *operands, site=register_call(site))
    return lowered


_lowering = jax.ffi.ffi_lowering(TARGET, has_side_effect=True)


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
register()


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
