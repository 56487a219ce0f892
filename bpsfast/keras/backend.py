"""Selects the module that sums tensors of Keras's backend (TensorFlow, PyTorch, JAX); joins and leaves jobs by it."""
from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Protocol, cast

import keras

from ..compression.choice import Choice, chosen_among
from ..orchestration.codec import CodecSpec
from ..orchestration.errors import UnsupportedError
from ..trainer import process
from ..trainer.process import local_rank, local_size, rank, size
from .variables import common_names, make_unique

#: A tensor's shape and the wire name of its dtype.
Kind = tuple[tuple[int, ...], str]


@dataclass(frozen=True)
class GradientSet:
    """Gradients of one step that are summed together, in the order in which the forward pass uses their variables.

    Hashable, as backends cache an object for each set. *names* are the same on all ranks; with *prefix* they are the
    job's names.
    """

    prefix: str
    names: tuple[str, ...]
    kinds: tuple[Kind, ...]
    average: bool
    codecs: tuple[CodecSpec | None, ...]

    @property
    def wire_names(self) -> list[str]:
        """The names of the tensors in the job."""
        return [self.prefix + name for name in self.names]

    @cached_property
    def has_error_feedback(self) -> bool:
        """Whether a codec needs the learning rate."""
        return any(codec is not None and codec.error_feedback for codec in self.codecs)


def gradient_set(paths: Sequence[str], kinds: Sequence[Kind], prefix: str | None, average: bool,
                 choice: Choice | None) -> GradientSet:
    """Return the set of the gradients of variables with these *paths*, of these *kinds*.

    Without a *prefix* one is made of names and kinds. Equal models then have the same names. That is correct, as one
    call ends before the next begins, but they share the errors that codecs feed back.
    """
    own, names = make_unique(paths), common_names(paths)
    codecs = chosen_among(choice, dict(zip(own, kinds)), process.current().settings.min_compress_bytes)
    chosen = tuple(codecs.get(path) for path in own)
    if prefix is None:
        digest = hashlib.sha256(repr((names, list(kinds), average, chosen)).encode()).hexdigest()[:12]
        prefix = f"gradient of {digest}"
    return GradientSet(f"{prefix}.", tuple(names), tuple(kinds), average, chosen)


#: Keras's backends, and the module that sums tensors of each.
_MODULES = {"jax": "jax_backend", "tensorflow": "tensorflow_backend", "torch": "torch_backend"}


class TensorBackend(Protocol):
    """The functions of the modules `jax_backend`, `tensorflow_backend` and `torch_backend`."""

    def init(self, **settings: object) -> None:
        """Join the job."""

    def shutdown(self) -> None:
        """Leave the job, after the programs that the backend has started."""

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait until all ranks have called this."""

    def dtype_of(self, tensor: Any) -> str:
        """Return the wire name of *tensor*'s dtype; raises `UnsupportedError` if it is not supported."""

    def is_symbolic(self, tensor: Any) -> bool:
        """Return whether *tensor* is part of a program that is being traced, and has no values."""

    def reduced(self, chosen: GradientSet, tensors: Sequence[Any], learning_rate: Callable[[], Any],
                condition: Any = None) -> list[Any]:
        """Return the sums (means) of *tensors* over all ranks as new tensors, in compiled programs, too.

        *learning_rate* returns the step's learning rate, for error feedback, if the backend supports it. *condition* is
        None, or the same on all ranks: JAX returns *tensors* where it is false; on TensorFlow and PyTorch Keras calls
        this only where it is true.
        """


@cache
def tensor_backend() -> TensorBackend:
    """Return the module that sums tensors of Keras's backend; raises UnsupportedError if there is none."""
    name = keras.backend.backend()
    if name not in _MODULES:
        raise UnsupportedError(f"Keras computes with {name!r} here; bpsfast.keras sums tensors of "
                               f"{', '.join(_MODULES)}: set KERAS_BACKEND before the first import of keras")
    return cast("TensorBackend", importlib.import_module(f".{_MODULES[name]}", __package__))

__all__ = ["barrier", "init", "local_rank", "local_size", "rank", "shutdown", "size"]


def init(lazy: bool = True, **settings: object) -> None:
    """Join the job (`bpsfast.init`), always at once: BytePS's *lazy* is ignored."""
    tensor_backend().init(**settings)


def shutdown() -> None:
    """Leave the job (`bpsfast.shutdown`), after the programs that the backend has started."""
    tensor_backend().shutdown()


def barrier(timeout_s: float | None = None) -> None:
    """Wait until all ranks have called this (`bpsfast.barrier`)."""
    tensor_backend().barrier(timeout_s)
