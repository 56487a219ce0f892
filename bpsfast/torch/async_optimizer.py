"""AsyncOptimizer: each worker steps by itself, and pushes how its parameters have changed instead of its gradients.

What BytePS's DistributedOptimizer does with BYTEPS_ENABLE_ASYNC: step, push new - old, take over the newest weights,
which have the others' changes in them.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..orchestration.errors import MismatchError, UnsupportedError
from ..orchestration.store import Worker
from ..trainer import process
from ..trainer.async_weights import AsyncWeights
from .exchange import tensor_over
from .optimizer_wrapper import derive, members_of, refuse_unknown, trained_parameters, user_step


class _AsyncOptimizer(torch.optim.Optimizer):
    """What is mixed into the user's optimizer class (see `AsyncOptimizer`)."""

    _base: type[torch.optim.Optimizer]
    _weights: AsyncWeights
    _named: dict[str, torch.Tensor]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a local step, push the changes, and take over the newest weights.

        Raises
        ------
        UnsupportedError
            On this rank, if a parameter has a gradient that did not require one, or was not there, when this was made.
        StallError, PeerLostError
            As `AsyncWeights.pull`.
        """
        def check() -> None:
            refuse_unknown(self, self._named.values())

        check()
        before = {name: p.detach().clone(memory_format=torch.contiguous_format) for name, p in self._named.items()}
        result = user_step(self, closure, check)
        with torch.no_grad():
            for name, p in self._named.items():
                self._weights.push(name, torch.sub(p, before[name], out=before[name]))
        for name in self._named:
            self._weights.pull(name)
        _take(self._weights, self._named)
        return result

    def synchronize(self) -> None:
        """Do nothing: gradients stay each rank's own."""

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, and under "async" the weights as this rank has seen them last."""
        weights = {name: p.detach().clone() for name, p in self._named.items()}
        return {**self._base.state_dict(self), "async": weights}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned, on all ranks together: with the weights that the root loads.

        Raises
        ------
        MismatchError
            If it has no such weights; nothing has changed.
        ValueError
            From the inner optimizer, if its part of the state is of other groups; nothing has changed.
        """
        if "async" not in state_dict:
            raise MismatchError("the saved state has no asynchronous weights: it is not an AsyncOptimizer's")
        saved = {name: each.contiguous() for name, each in state_dict["async"].items()}
        self._weights.check(saved)
        self._base.load_state_dict(self, {key: value for key, value in state_dict.items() if key != "async"})
        self._weights.load(saved)
        _take(self._weights, self._named)

    def close(self) -> None:
        """Push no more: others do not wait for this rank any longer. Its parameters stay as they are."""
        self._weights.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: all ranks agreed on the parameters when the optimizer was wrapped."""
        raise UnsupportedError("add the parameter group before the optimizer is wrapped")


_MEMBERS = members_of(_AsyncOptimizer, "step", "synchronize", "state_dict", "load_state_dict", "close",
                      "add_param_group")


def AsyncOptimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]], *,
    worker: Worker = "node", staleness: int | None = None, backups: int | None = None, root_rank: int = 0,
) -> torch.optim.Optimizer:
    """Return *optimizer* as one that trains asynchronously: no step waits for another worker's.

    Waits until all ranks have come here, and gives all of them rank *root_rank*'s parameters. The result is of a class
    derived from the optimizer's own; the original must not be used any more.

    Parameters
    ----------
    named_parameters
        (name, parameter) of at least all parameters of the optimizer, in forward order.
    worker, staleness, backups
        As `AsyncWeights`: ranks of one node add their changes up (with *backups*: average them), and so take their
        steps together.

    Raises
    ------
    ConfigError
        If an argument is not possible, or names are missing.
    StallError
        If a rank does not come.
    """
    named = dict(trained_parameters(optimizer, named_parameters))
    wrapped = derive(optimizer, _MEMBERS)
    edition = process.current().tensors.model_number(f"AsyncParam.{name}" for name in named)
    wrapped._named = named
    wrapped._weights = AsyncWeights({name: p.detach().contiguous() for name, p in named.items()}, worker=worker,
                                    staleness=staleness, backups=backups, root_rank=root_rank,
                                    prefix=f"AsyncParam{edition or ''}.")
    _take(wrapped._weights, named)
    return wrapped  # type: ignore[no-any-return]


def _take(weights: AsyncWeights, named: dict[str, torch.Tensor]) -> None:
    """Write the last answers into the parameters."""
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(tensor_over(weights[name], p.dtype))
