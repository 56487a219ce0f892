"""The backend that Keras computes with, and how tensors of it are summed."""
from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol, cast

import keras

from ..orchestration.errors import UnsupportedError
from .gradient_set import GradientSet

#: Keras's backends, and the module that sums tensors of each.
_EXCHANGES = {"jax": "jax_backend", "tensorflow": "tensorflow_backend", "torch": "torch_backend"}


class TensorBackend(Protocol):
    """What the modules `jax_backend`, `tensorflow_backend` and `torch_backend` have."""

    def init(self, **settings: object) -> None:
        """Join the job."""

    def shutdown(self) -> None:
        """Leave the job."""

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait until all ranks are here."""

    def dtype_of(self, tensor: Any) -> str:
        """Return the wire name of *tensor*'s dtype; raises `UnsupportedError` if it is not summed."""

    def is_symbolic(self, tensor: Any) -> bool:
        """Whether *tensor* has no values yet: a program is being traced."""

    def reduced(self, chosen: GradientSet, tensors: Sequence[Any], learning_rate: Callable[[], Any]) -> list[Any]:
        """Return the sums (means) of *tensors* over all ranks, new ones; inside compiled programs, too.

        *learning_rate* returns that of the step, for error feedback, as far as the backend can hand it on.
        """

    def reduced_if(self, condition: Any, chosen: GradientSet, tensors: Sequence[Any],
                   learning_rate: Callable[[], Any]) -> list[Any]:
        """As `reduced`, if *condition*, which is the same on all ranks, is true; else return *tensors*."""


@cache
def exchange() -> TensorBackend:
    """Return what sums tensors of the backend that Keras has been imported with.

    Raises
    ------
    UnsupportedError
        If it computes with another one.
    """
    name = keras.backend.backend()
    if name not in _EXCHANGES:
        raise UnsupportedError(f"Keras computes with {name!r} here; bpsfast.keras sums tensors of "
                               f"{', '.join(_EXCHANGES)}: set KERAS_BACKEND before the first import of keras")
    return cast("TensorBackend", importlib.import_module(f".{_EXCHANGES[name]}", __package__))
