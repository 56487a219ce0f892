"""What XLA calls to sum: an FFI handler written in Python, called from XLA's threads with the buffers of a push_pull.

Nothing is compiled, and no byte is copied on the way: inputs are pushed from XLA's buffers, sums delivered into them.
"""
from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

import jax

from ..orchestration.errors import UnsupportedError
from ..trainer import process
from . import call_frame
from .push_pull_call import registered_call

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
