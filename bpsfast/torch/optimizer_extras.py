"""State of a DistributedOptimizer besides the user's optimizer: codec states, momentum, learning rates, tuning results.

Every node has its own codec states: the residuals of its ranks' gradients, and the states of the partitions that it
owns. One rank of each node saves them (each rank may), and they are loaded on the same node of a job of the same shape.
States that are loaded before the first step wait until the gradients are declared. The result of the setting autotune
is rank 0's, and is used if it is loaded before the first step.
"""
from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..compression.choice import Choice, chosen_among
from ..orchestration.errors import MismatchError
from ..trainer import process
from ..trainer.gradients import Gradients
from ..trainer.tuning_search import TuningPoint
from .compression import CompressionLike, parted
from .gradient_hooks import Named

#: Their names in a state_dict, beside "state" and "param_groups".
KEY, TUNED = "compression", "tuned"


class OptimizerExtras:
    """Codec states, momenta and the tuning result of one exchange's gradients. One thread at a time."""

    def __init__(self, momentum: LocalMomentum) -> None:
        self._momentum = momentum
        self._loaded: dict[str, torch.Tensor] = {}  # codec states that the nodes have not received yet
        #: The best point of an earlier job, for gradients that are not declared yet.
        self.tuned: TuningPoint | None = None

    def save(self, gradients: Gradients | None) -> dict[str, Any]:
        """Return the states and momenta, {} if there are none. *gradients* None: they were not declared yet."""
        nodes = dict(self._loaded)
        if gradients is not None:
            self.restore(gradients)
            nodes = {name: torch.from_numpy(state) for name, state in gradients.states().items() if state.nbytes}
        parts = {"nodes": nodes, "momentum": {name: each.clone() for name, each in self._momentum.sums.items()}}
        return parts if any(parts.values()) else {}

    def load(self, parts: dict[str, Any], gradients: Gradients | None) -> None:
        """Continue from what `save` returned on this node.

        Raises `MismatchError` if it is of other gradients, another node or another compression; for gradients that are
        not declared yet, the first step raises it.
        """
        if set(parts) != {"nodes", "momentum"}:
            raise MismatchError(f"state_dict[{KEY!r}] has {sorted(parts)}, not what DistributedOptimizer saves: "
                                "remove it to begin with nothing kept")
        for name in parts["momentum"]:
            if name not in self._momentum.factors:
                raise MismatchError(f"there is a momentum of gradient {name!r}, which has none here")
        self._momentum.sums.clear()
        self._momentum.sums.update({name: each.clone() for name, each in parts["momentum"].items()})
        self._loaded = dict(parts["nodes"])
        if gradients is not None:
            self.restore(gradients)

    def restore(self, gradients: Gradients) -> None:
        """Send the nodes the states that were loaded before *gradients* were declared; call it before the first push.
        """
        loaded, self._loaded = self._loaded, {}
        if loaded:
            gradients.load_states({name: state.numpy() for name, state in loaded.items()})


def point_of_state(state: dict[str, int]) -> TuningPoint:
    """Return the tuning point that a saved *state* contains; raises `MismatchError` if it contains none."""
    is_point = set(state) == set(TuningPoint._fields)
    if not is_point or not all(isinstance(each, int) and each >= 0 for each in state.values()):
        raise MismatchError(f"state_dict[{TUNED!r}] is {state}, not what DistributedOptimizer saves: remove it")
    return TuningPoint(**state)


def user_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of the user's optimizer alone, which is the same on all ranks."""
    state: dict[str, Any] = settled_base(optimizer).state_dict(optimizer)
    return state


def load_user_state_dict(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what `user_state_dict` returned into the user's optimizer."""
    settled_base(optimizer).load_state_dict(optimizer, state)


def settled_base(optimizer: Any) -> Any:
    """Return the user's class of *optimizer*, after the due updates of one with cross_barrier."""
    settle_all = getattr(getattr(optimizer, "_exchange", None), "settle_all", None)
    if settle_all is not None:
        settle_all()
    return getattr(optimizer, "_base", type(optimizer))


class LocalMomentum:
    """Computes the Nesterov momentum of gradients whose codec has one but whose node does not compress them.

    Such are gradients below min_compress_bytes, and all gradients of a job of one node; the optimizer has no momentum.
    The momentum of the averages is the average of the momenta. *factors*: the momentum of each gradient, by name. One
    thread at a time.
    """

    def __init__(self, factors: Mapping[str, float]) -> None:
        self.factors = factors
        #: By name: m = factor * m + gradient, in float32 at least.
        self.sums: dict[str, torch.Tensor] = {}

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Add the momentum of *name* to its new *gradient*, in place. Call it once a step, under no_grad."""
        factor = self.factors[name]
        wide = torch.promote_types(gradient.dtype, torch.float32)
        if name not in self.sums:
            self.sums[name] = torch.zeros_like(gradient, dtype=wide)
        total = self.sums[name].mul_(factor).add_(gradient)
        gradient.add_(total, alpha=factor)


def momenta(choice: Choice | None, kinds: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, float]:
    """Return by name the momentum that *choice* gives tensors of *kinds* (shape, dtype), small ones included."""
    return {name: codec.momentum for name, codec in chosen_among(choice, kinds, 0).items() if codec.momentum}


def has_momentum(compression: CompressionLike, named: Iterable[Named]) -> bool:
    """Whether *compression* gives any of the *named* tensors momentum, which a single rank has to compute too."""
    kinds = {name: (tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in named}
    return bool(momenta(parted(compression)[1], kinds))


def is_exchanged(named: list[Named], compression: CompressionLike) -> bool:
    """Whether gradients of the *named* parameters need an `Exchange`: there are other ranks, or momentum to compute."""
    return bool(named) and (process.size() > 1 or has_momentum(compression, named))


def warn_of_momentum(optimizer: torch.optim.Optimizer, factors: Mapping[str, float]) -> None:
    """Warn if *optimizer* has momentum besides that of its gradients' codecs."""
    own = max((group.get("momentum") or 0 for group in optimizer.param_groups), default=0)
    if factors and own:
        warnings.warn(f"the codec's momentum ({max(factors.values()):g}) is applied before that of "
                      f"{type(optimizer).__name__} ({own:g}), so gradients get both: make the optimizer with "
                      "momentum=0, nesterov=False", stacklevel=3)


class LearningRates:
    """Looks up the learning rates of an *optimizer*'s parameters, without keeping it alive. One thread at a time."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._group_of = {id(parameter): number for number, group in enumerate(optimizer.param_groups)
                          for parameter in group["params"]}

    def of(self, parameter: torch.Tensor) -> float | None:
        """Return the learning rate of *parameter* in the next step; None if it is unknown or 0."""
        optimizer, number = self._optimizer(), self._group_of.get(id(parameter))
        if optimizer is None or number is None:
            return None
        rate = float(optimizer.param_groups[number].get("lr") or 0)
        return rate if 0 < rate < math.inf else None
