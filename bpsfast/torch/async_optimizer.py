"""AsyncOptimizer: each worker steps by itself, and pushes the changes of its parameters instead of gradients.

BytePS's DistributedOptimizer with BYTEPS_ENABLE_ASYNC: step, push new - old, take over the newest weights, which
contain the changes of all workers.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..orchestration.errors import MismatchError
from ..orchestration.store import Worker
from ..trainer import process
from ..trainer.async_weights import AsyncWeights
from .exchange import tensor_over
from .optimizer_wrapper import derive, local_step, trained_parameters


class _AsyncOptimizer(torch.optim.Optimizer):
    """The methods that `AsyncOptimizer` adds to the user's optimizer class."""

    _base: type[torch.optim.Optimizer]
    _weights: AsyncWeights
    _named: dict[str, torch.Tensor]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a local step, push the changes, and take over the newest weights.

        Raises as `AsyncWeights.pull`; and `UnsupportedError` on this rank, if a parameter has a gradient that did not
        require one, or was not there, when this was made.
        """
        before = {name: p.detach().clone(memory_format=torch.contiguous_format) for name, p in self._named.items()}
        result = local_step(self, closure, self._named.values())
        with torch.no_grad():
            for name, p in self._named.items():
                self._weights.push(name, torch.sub(p, before[name], out=before[name]))
        for name in self._named:
            self._weights.pull(name)
        _take(self._weights, self._named)
        return result

    def synchronize(self) -> None:
        """Do nothing: each rank steps with its own gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, and under "async" the weights that this rank received last."""
        weights = {name: p.detach().clone() for name, p in self._named.items()}
        return {**self._base.state_dict(self), "async": weights}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned, on all ranks together: with the weights that the root loads.

        Raises `MismatchError` if it has no such weights, and the inner optimizer's ValueError if its part of the state
        is of other groups; then nothing has changed.
        """
        if "async" not in state_dict:
            raise MismatchError("the saved state has no asynchronous weights: it is not an AsyncOptimizer's")
        saved = {name: each.contiguous() for name, each in state_dict["async"].items()}
        self._weights.check(saved)
        self._base.load_state_dict(self, {key: value for key, value in state_dict.items() if key != "async"})
        self._weights.load(saved)
        _take(self._weights, self._named)

    def close(self) -> None:
        """Push no more: other workers do not wait for this rank any longer. Its parameters stay as they are."""
        self._weights.close()


def AsyncOptimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]], *,
    worker: Worker = "node", staleness: int | None = None, backups: int | None = None, root_rank: int = 0,
) -> torch.optim.Optimizer:
    """Return *optimizer* as one that trains asynchronously: no step waits for another worker's.

    Blocks until all ranks have called it, and gives all of them rank *root_rank*'s parameters. The result is of a class
    derived from the optimizer's own; the original must not be used any more.

    Parameters
    ----------
    named_parameters
        (name, parameter) of at least all parameters of the optimizer, in forward order.
    worker, staleness, backups
        As `AsyncWeights`: ranks of one node sum their changes (with *backups*: average them), and so step together.

    Raises
    ------
    ConfigError
        If an argument is not possible, or names are missing.
    StallError
        If a rank does not call it in time.
    """
    named = dict(trained_parameters(optimizer, named_parameters))
    wrapped = derive(optimizer, _AsyncOptimizer)
    edition = process.current().tensors.model_number(f"AsyncParam.{name}" for name in named)
    wrapped._named = named
    wrapped._weights = AsyncWeights({name: p.detach().contiguous() for name, p in named.items()}, worker=worker,
                                    staleness=staleness, backups=backups, root_rank=root_rank,
                                    prefix=f"AsyncParam{edition or ''}.")
    _take(wrapped._weights, named)
    return wrapped  # type: ignore[no-any-return]


def _take(weights: AsyncWeights, named: dict[str, torch.Tensor]) -> None:
    """Copy the last answers into the parameters."""
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(tensor_over(weights[name], p.dtype))
