"""How a DistributedOptimizer reduces the gradients of one step, on every backend."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from ..compression.choice import Choice
from ..orchestration.errors import MismatchError, UnsupportedError
from ..trainer import process
from .backend import exchange
from .compression import CompressorLike, NoneCompressor
from .gradient_set import gradient_set
from .paths import path_of


@dataclass(frozen=True)
class Reduction:
    """What is done to gradients: scaled by *prescale*, compressed, summed or averaged, scaled by *postscale*."""

    prefix: str | None = None
    average: bool = True
    compressor: CompressorLike = NoneCompressor
    choice: Choice | None = None
    prescale: float = 1.0
    postscale: float = 1.0

    def of(self, gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Callable[[], Any],
           condition: Any = None) -> list[Any]:
        """Return *gradients* reduced over all ranks; a None is left out, and stays.

        Parameters
        ----------
        gradients
            Of *variables*, in the same order; the same are None on all ranks.
        learning_rate
            Returns that of the step, for error feedback.
        condition
            Not None: they are reduced where it is true, else returned as they are.

        Raises
        ------
        MismatchError
            If gradients do not fit to the variables; nothing is sent then.
        UnsupportedError
            For a dtype that is not summed, and for variables that are overwritten by their gradients (float8).
        BusyError, ClosedError, StallError, PeerLostError
            As `bpsfast.push_pull`.
        """
        gradients, variables = list(gradients), list(variables)
        paths = [path_of(variable) for variable in variables]
        if len(gradients) != len(variables):
            raise MismatchError(f"{len(gradients)} gradients came for {len(variables)} variables, from "
                                f"{paths[0] if paths else 'none'!r} on")
        session = process.current()
        places = [place for place, gradient in enumerate(gradients) if gradient is not None]
        dense = {place: keras.ops.convert_to_tensor(gradients[place], sparse=False) for place in places}
        for place in places:
            _check(paths[place], dense[place], variables[place])
        places = [place for place in places if 0 not in dense[place].shape]
        if session.size == 1 or not places:
            factor = self.prescale * self.postscale
            for place in places if factor != 1.0 else ():
                gradients[place] = _scaled(dense[place], factor)
            return gradients
        small, contexts = [], []
        for place in places:
            tensor, context = self.compressor.compress(_scaled(dense[place], self.prescale))
            small.append(tensor)
            contexts.append(context)
        backend = exchange()
        kinds = [(tuple(tensor.shape), _dtype(paths[place], tensor)) for place, tensor in zip(places, small)]
        chosen = gradient_set([paths[place] for place in places], kinds, self.prefix, self.average, self.choice)
        if condition is None:
            sums = backend.reduced(chosen, small, learning_rate)
        else:
            sums = backend.reduced_if(condition, chosen, small, learning_rate)
        for place, total, context in zip(places, sums, contexts):
            gradients[place] = _scaled(self.compressor.decompress(total, context), self.postscale)
        return gradients


def _check(name: str, gradient: Any, variable: Any) -> None:
    if tuple(gradient.shape) != tuple(variable.shape):
        raise MismatchError(f"the gradient of {name!r} has shape {tuple(gradient.shape)}, the variable "
                            f"{tuple(variable.shape)}")
    if getattr(variable, "overwrite_with_gradient", False):
        raise UnsupportedError(f"variable {name!r} is overwritten by its gradient, as the scales of float8 are: their "
                               "mean is none of them, so DistributedOptimizer does not train such models; use another "
                               "dtype policy, as mixed_bfloat16")


def _dtype(name: str, tensor: Any) -> str:
    try:
        return exchange().dtype_of(tensor)
    except UnsupportedError as exc:
        raise UnsupportedError(f"the gradient of {name!r}: {exc}") from None


def _scaled(tensor: Any, factor: float) -> Any:
    return tensor if factor == 1.0 else tensor * factor
