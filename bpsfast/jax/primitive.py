"""The JAX primitive of push_pull: traced, ordered, differentiated, and lowered to a call of an FFI handler.

It has an ordered effect, as `io_callback(ordered=True)`: JAX passes a token from push_pull to push_pull, also from
program to program, so each rank makes them in the order in which Python traced them. Otherwise XLA would choose the
order of independent ones: ranks could wait for each other in different calls (a deadlock), or sum rounds of two
different calls.

JAX has no public name for ordered effects: only this module imports from `jax._src`, and it checks the names at import.

XLA calls the handler, which is written in Python, from its own threads with the buffers of a push_pull (`call_frame`).
No byte is copied: inputs are pushed from XLA's buffers, and sums are delivered into them.
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
from ..trainer import process
from ..trainer.bundle import Bundle, Leaf, specs_of
from ..trainer.session import Session
from . import call_frame

_BACKWARD = ".backward"
#: The name by which XLA knows the handler.
TARGET = "bpsfast_push_pull"


@dataclass(frozen=True)
class PushPullCall:
    """One push_pull of a program: the leaves that it sums together. Hashable, as JAX compiles once for each.

    Compiled programs refer to it by its digest, as JAX caches them on disk, and numbers would differ by process.
    """

    leaves: tuple[Leaf, ...]
    average: bool
    priority: int | None
    _bundles: list[Bundle] = field(default_factory=list, compare=False, repr=False)

    @cached_property
    def digest(self) -> str:
        """A hash of the call; the same in every process."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:32]

    def backward(self) -> PushPullCall:
        """Return the call that sums the gradients of this one's results."""
        leaves = tuple(replace(leaf, name=leaf.name + _BACKWARD) for leaf in self.leaves if leaf.is_differentiable)
        return PushPullCall(leaves, self.average, self.priority)

    def bundle(self, session: Session) -> Bundle:
        """Return the bundle that sums it in *session*."""
        if not self._bundles or self._bundles[0].session is not session:
            specs = specs_of(self.leaves, self.average, [self.priority] * len(self.leaves))
            self._bundles[:] = [Bundle(session, specs)]
        return self._bundles[0]


#: The calls that this process has traced, by their digests.
_calls: dict[str, PushPullCall] = {}

# -- the handler -------------------------------------------------------------------------------------------------------

#: The errors of the last failed calls, each with the text that XLA got for it; the newest is last.
_failures: deque[tuple[str, BaseException]] = deque(maxlen=16)
_misfit: str | None = None  # how XLA's layouts differ from `call_frame`'s ("": not at all); None: not known yet


def _handle(pointer: Any) -> int | None:
    """Answer a call of XLA. Never raises; returns the address of an error, or None."""
    global _misfit
    frame = pointer.contents
    try:
        metadata = call_frame.metadata_of(frame)
        if metadata is not None:
            _misfit = call_frame.answer_metadata(frame, metadata)
            return None
        _sum(frame)
    except BaseException as exc:  # else ctypes prints it, and the program continues with wrong buffers
        text = f"{type(exc).__module__.partition('.')[0]} {type(exc).__name__}: {exc}"
        _failures.append((text, exc))
        return call_frame.error(frame, text)
    return None


_pointer = call_frame.HANDLER(_handle)  # referred to here, as XLA may call it at any time
# XLA asks the handler for its version when it starts the CPU platform.
jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(ctypes.cast(_pointer, ctypes.c_void_p)), platform="cpu")


def _sum(frame: call_frame.Frame) -> None:
    wrong = call_frame.check_frame(frame)
    if wrong:
        raise UnsupportedError(_unsupported(wrong))
    call = _calls.get(call_frame.text_of(frame))
    if call is None:
        raise ProtocolError("a compiled program has a push_pull that this process has never traced. Programs with "
                            "push_pull cannot be moved between processes: jit the function here")
    call.bundle(process.current()).run(call_frame.addresses(frame.arguments), call_frame.addresses(frame.results))


def failure(text: str) -> BaseException | None:
    """Return the error of the call that XLA reports as *text*."""
    return next((exc for said, exc in reversed(_failures) if said in text), None)


def _unsupported(wrong: str) -> str:
    return (f"jaxlib {jax.lib.__version__} calls handlers in a way that this bpsfast does not know: {wrong}. Install a "
            "jaxlib of the versions that setup.cfg names, or a newer bpsfast")


def require_fit() -> None:
    """Raise `UnsupportedError` unless this jaxlib calls handlers as `call_frame` describes it."""
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
    raise ImportError(f"bpsfast.jax needs ordered effects, which jax {jax.__version__} does not have: {exc}. "
                      "Install a jax of the versions that setup.cfg names, or a newer bpsfast") from exc


class PushPullEffect(effects.Effect):
    """The effect that keeps push_pulls in the order of the program."""

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
    """Wait for the programs with effects that this thread has started.

    A program's error is raised where its results are used. Its token, which would pass the error to every later
    program, is dropped.
    """
    try:
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError:
        dispatch.runtime_tokens.clear()


@_push_pull.def_effectful_abstract_eval
def _shapes_in_order(*leaves: Any, call: PushPullCall) -> tuple[list[Any], set[Any]]:
    return _shapes(*leaves, call=call), {_effect}


@_unordered.def_abstract_eval
def _shapes(*leaves: Any, call: PushPullCall) -> list[Any]:
    return [core.ShapedArray(leaf.shape, leaf.dtype) for leaf in leaves]


@_push_pull.def_impl
def _run(*leaves: Any, call: PushPullCall) -> Any:
    """Sum outside jit: wait for all programs under way, then for the sums; raise the error of the call.

    So the order needs no token, which would cost JAX milliseconds for some hundred leaves.
    """
    wait_for_programs()
    try:
        return jax.block_until_ready(_now(call)(*leaves))
    except jax.errors.JaxRuntimeError as exc:
        cause = failure(str(exc))
        if cause is None:
            raise
        raise cause from None


@cache
def _now(call: PushPullCall) -> Callable[..., Any]:
    return jax.jit(lambda *leaves: _unordered.bind(*leaves, call=call))


def _lower(ctx: Any, *leaves: Any, call: PushPullCall) -> Sequence[Any]:
    """Lower for the CPU: the token is the call's first argument and first result."""
    token = ctx.tokens_in.get(_effect)
    with_token = dataclasses.replace(ctx, avals_in=[_TOKEN, *ctx.avals_in], avals_out=[_TOKEN, *ctx.avals_out])
    token, *sums = _lower_unordered(with_token, token, *leaves, call=call)
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(TokenSet({_effect: token})))
    return sums


def _lower_unordered(ctx: Any, *operands: Any, call: PushPullCall) -> Sequence[Any]:
    require_fit()
    _calls.setdefault(call.digest, call)
    lowered: Sequence[Any] = _lowering(ctx, *operands, call=call.digest)
    return lowered


_lowering = jax.ffi.ffi_lowering(TARGET, has_side_effect=True)


def _refuse_lowering(ctx: Any, *leaves: Any, call: PushPullCall) -> Sequence[Any]:
    platforms = ", ".join(ctx.module_context.platforms)
    raise UnsupportedError(f"push_pull inside jit is for the CPU, not for {platforms}: call push_pull outside jit (jit "
                           "the gradients, then the update), which takes arrays of GPUs, or jit for the CPU: "
                           "jax.default_device(jax.devices('cpu')[0])")


def _refuse_batching(leaves: Any, dims: Any, *, call: PushPullCall) -> Any:
    raise UnsupportedError(f"push_pull of {call.leaves[0].name!r} inside vmap: a call sums one tensor, not one for "
                           "each example. Call it outside vmap, with the whole batch")


mlir.register_lowering(_push_pull, _refuse_lowering)
mlir.register_lowering(_push_pull, _lower, platform="cpu")
mlir.register_lowering(_unordered, _lower_unordered, platform="cpu")
batching.primitive_batchers[_push_pull] = _refuse_batching


def run(call: PushPullCall, leaves: Sequence[Any]) -> list[Any]:
    """Sum *leaves* over all ranks."""
    return list(_push_pull.bind(*leaves, call=call))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def differentiable(call: PushPullCall, *leaves: Any) -> list[Any]:
    """As `run`. The gradient of the sum is the sum (mean) of the ranks' gradients, under names of its own."""
    return run(call, leaves)


def _forward(call: PushPullCall, *leaves: Any) -> tuple[list[Any], None]:
    return differentiable(call, *leaves), None


def _backward(call: PushPullCall, _: None, cotangents: Sequence[Any]) -> tuple[Any, ...]:
    """Sum the gradients; integers have none."""
    back = call.backward()
    real = [each for leaf, each in zip(call.leaves, cotangents) if leaf.is_differentiable]
    sums = iter(differentiable(back, *real) if real else ())
    return tuple(next(sums) if leaf.is_differentiable else None for leaf in call.leaves)


differentiable.defvjp(_forward, _backward)
