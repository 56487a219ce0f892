"""Which gradients travel together: those of one step, in the order in which the forward pass uses them."""
from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..compression.choice import Choice, chosen_among
from ..orchestration.codec import CodecSpec
from ..trainer import process
from .paths import common_names, different

#: A tensor's shape and the wire name of its dtype.
Kind = tuple[tuple[int, ...], str]


@dataclass(frozen=True)
class GradientSet:
    """Tensors that are summed at once. Hashable: backends keep for each what they need to sum it.

    *names* are common to all ranks; *prefix* makes the job's names of them.
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


def gradient_set(paths: Sequence[str], kinds: Sequence[Kind], prefix: str | None, average: bool,
                 choice: Choice | None) -> GradientSet:
    """Return the set of the gradients of variables with these *paths*, of these *kinds*.

    Without a *prefix* it is made of names and kinds. Models that are alike then have the same names, which is right:
    one call is over before the next begins. Only what codecs have kept back of one is added to the other.
    """
    own, names = different(paths), common_names(paths)
    codecs = chosen_among(choice, dict(zip(own, kinds)), process.current().settings.min_compress_bytes)
    chosen = tuple(codecs.get(path) for path in own)
    if prefix is None:
        digest = hashlib.sha256(repr((names, list(kinds), average, chosen)).encode()).hexdigest()[:12]
        prefix = f"gradient of {digest}"
    return GradientSet(f"{prefix}.", tuple(names), tuple(kinds), average, chosen)
