"""Nesterov's momentum of gradients whose codec has one, where no node makes it: it is made of their averages here.

Nodes make it of what they compress. Gradients that are too small for that, or whose compression does not pay, and all
of a job of one node, need it as well, for the optimizer has none. It is linear: the averages' momentum is the average
of the momenta. BytePS adds it in its trainer, for small tensors only.
"""
from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

import torch

from ..compression.choice import Choice, chosen_among
from .compression import CompressionLike, parted


class LocalMomentum:
    """Adds to a gradient its factor, of *factors* by name, times what it remembers of it. One thread at a time."""

    def __init__(self, factors: Mapping[str, float]) -> None:
        self._factors = factors
        #: By name: m = factor * m + gradient, in float32 at least.
        self.sums: dict[str, torch.Tensor] = {}

    def has(self, name: str) -> bool:
        """Whether *name* has momentum that is made here."""
        return name in self._factors

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Add its momentum to the new *gradient* of *name*, in place. Call it once a step, without grad mode."""
        factor = self._factors[name]
        wide = torch.promote_types(gradient.dtype, torch.float32)
        if name not in self.sums:
            self.sums[name] = torch.zeros_like(gradient, dtype=wide)
        total = self.sums[name].mul_(factor).add_(gradient)
        gradient.add_(total, alpha=factor)


def momenta(choice: Choice | None, kinds: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, float]:
    """Return by name the momentum that *choice* gives tensors of *kinds* (shapes and dtypes), small ones too."""
    return {name: codec.momentum for name, codec in chosen_among(choice, kinds, 0).items() if codec.momentum}


def has_momentum(compression: CompressionLike, named: Iterable[tuple[str, torch.Tensor]]) -> bool:
    """Whether *compression* gives any of the *named* tensors momentum: then even a rank alone has something to do."""
    kinds = {name: (tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in named}
    return bool(momenta(parted(compression)[1], kinds))


def warn_of_momentum(optimizer: torch.optim.Optimizer, factors: Mapping[str, float]) -> None:
    """Warn if *optimizer* has momentum besides that of its gradients' codecs."""
    own = max((group.get("momentum") or 0 for group in optimizer.param_groups), default=0)
    if factors and own:
        warnings.warn(f"the codec's momentum ({max(factors.values()):g}) comes before that of "
                      f"{type(optimizer).__name__} ({own:g}), so gradients get both: make the optimizer with "
                      "momentum=0, nesterov=False", stacklevel=3)
