"""The learning rates of an optimizer's parameters, as its groups have them when they are asked for."""
from __future__ import annotations

import math
import weakref

import torch


class LearningRates:
    """Those of *optimizer*, which this does not keep alive. One thread at a time."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._group_of = {id(parameter): number for number, group in enumerate(optimizer.param_groups)
                          for parameter in group["params"]}

    def of(self, parameter: torch.Tensor) -> float | None:
        """Return the rate with which the next step will use the gradient of *parameter*; None: nobody knows, or 0."""
        optimizer, number = self._optimizer(), self._group_of.get(id(parameter))
        if optimizer is None or number is None:
            return None
        rate = float(optimizer.param_groups[number].get("lr") or 0)
        return rate if 0 < rate < math.inf else None
