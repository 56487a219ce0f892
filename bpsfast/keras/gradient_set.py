"""Which gradients travel together: those of one step, in the order in which the forward pass uses them."""
from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..compression.choice import Choice, chosen_among
from ..orchestration.codec import CodecSpec
from ..trainer import current as process

#: A tensor's shape and the wire name of its dtype.
Kind = tuple[tuple[int, ...], str]


@dataclass(frozen=True)
class GradientSet:
    """Tensors that are summed at once. Hashable: backends keep for each what they need to sum it.

    *names* are those of the variables, by which codecs are chosen; *prefix* makes the job's names of them.
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
        """Whether a codec wants to know the learning rate."""
        return any(codec is not None and codec.error_feedback for codec in self.codecs)


def gradient_set(names: Sequence[str], kinds: Sequence[Kind], prefix: str | None, average: bool,
                 choice: Choice | None) -> GradientSet:
    """Return the set of tensors with these *names* of variables, made different, and *kinds*.

    Without a *prefix* it is made of names and kinds: another model's tensors have other names, also if its variables
    have the same paths.
    """
    unique = _different(names)
    codecs = chosen_among(choice, dict(zip(unique, kinds)), process.current().settings.min_compress_bytes)
    chosen = tuple(codecs.get(name) for name in unique)
    if prefix is None:
        digest = hashlib.sha256(repr((unique, list(kinds), average, chosen)).encode()).hexdigest()[:12]
        prefix = f"gradient of {digest}"
    return GradientSet(f"{prefix}.", tuple(unique), tuple(kinds), average, chosen)


def _different(names: Sequence[str]) -> list[str]:
    """Return *names*, those that were there before with a number behind them."""
    counts: dict[str, int] = {}
    found = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        found.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return found
