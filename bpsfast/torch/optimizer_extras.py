"""What a job keeps from step to step, as part of an optimizer's state_dict: of compressed gradients, and of tuning.

Of compressed gradients every node has its own: what its ranks' gradients left unsent, and what it owns of the job's.
So one rank of each node saves it (each rank may), and it is loaded on that node of a job of the same shape. Before the
first step there is none; what is loaded by then waits for the gradients to be declared. What the setting autotune has
found is rank 0's, and is used if it is loaded before the first step.
"""
from __future__ import annotations

from typing import Any

import torch

from ..orchestration.errors import MismatchError
from ..trainer.gradients import Gradients
from ..trainer.tuning_search import TuningPoint
from .local_momentum import LocalMomentum

#: Their names in a state_dict, beside "state" and "param_groups".
KEY, TUNED = "compression", "tuned"


class OptimizerExtras:
    """The states of one exchange's gradients. One thread at a time."""

    def __init__(self, momentum: LocalMomentum) -> None:
        self._momentum = momentum
        self._loaded: dict[str, torch.Tensor] = {}  # and not taken over yet
        #: What was found best before, for gradients that are not declared yet.
        self.tuned: TuningPoint | None = None

    def save(self, gradients: Gradients | None) -> dict[str, Any]:
        """Return it, {} if nothing is kept; *gradients* None: none was declared yet."""
        nodes = dict(self._loaded)
        if gradients is not None:
            self.settle(gradients)
            nodes = {name: torch.from_numpy(state) for name, state in gradients.states().items() if state.nbytes}
        parts = {"nodes": nodes, "momentum": {name: each.clone() for name, each in self._momentum.sums.items()}}
        return parts if any(parts.values()) else {}

    def load(self, parts: dict[str, Any], gradients: Gradients | None) -> None:
        """Go on from what `save` returned on this node.

        Raises
        ------
        MismatchError
            If it is of other gradients, of another node or of another compression. Of gradients that are not declared
            yet that is found out in the first step.
        """
        if set(parts) != {"nodes", "momentum"}:
            raise MismatchError(f"state_dict[{KEY!r}] has {sorted(parts)}, not what DistributedOptimizer saves: "
                                "remove it to begin with nothing kept")
        for name in parts["momentum"]:
            if not self._momentum.has(name):
                raise MismatchError(f"there is a momentum of gradient {name!r}, which has none here")
        self._momentum.sums.clear()
        self._momentum.sums.update({name: each.clone() for name, each in parts["momentum"].items()})
        self._loaded = dict(parts["nodes"])
        if gradients is not None:
            self.settle(gradients)

    def settle(self, gradients: Gradients) -> None:
        """Hand over to the nodes what was loaded before *gradients* were declared. Before they are pushed again."""
        loaded, self._loaded = self._loaded, {}
        if loaded:
            gradients.load_states({name: state.numpy() for name, state in loaded.items()})


def state_of_point(point: TuningPoint | None) -> dict[str, int]:
    """Return *point* as a state_dict has it."""
    return {} if point is None else dict(point._asdict())


def point_of_state(state: dict[str, int]) -> TuningPoint:
    """Return the point that `state_of_point` has made *state* of.

    Raises
    ------
    MismatchError
        If it is none.
    """
    if set(state) != set(TuningPoint._fields) or not all(isinstance(each, int) and each >= 0 for each in state.values()):
        raise MismatchError(f"state_dict[{TUNED!r}] is {state}, not what DistributedOptimizer saves: remove it")
    return TuningPoint(**state)


def user_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of the user's optimizer alone, which all ranks have alike: nothing that nodes or owners keep."""
    base: Any = getattr(optimizer, "_base", None)
    if base is None:
        return optimizer.state_dict()
    _settle(optimizer)
    state: dict[str, Any] = base.state_dict(optimizer)
    return state


def load_user_state_dict(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Give the user's optimizer what `user_state_dict` returned."""
    base: Any = getattr(optimizer, "_base", type(optimizer))
    _settle(optimizer)
    base.load_state_dict(optimizer, state)


def _settle(optimizer: Any) -> None:
    """Let a crossing optimizer make the updates that are due."""
    settle_all = getattr(getattr(optimizer, "_exchange", None), "settle_all", None)
    if settle_all is not None:
        settle_all()
