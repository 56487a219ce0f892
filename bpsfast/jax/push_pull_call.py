"""A site: what one push_pull of a program sums. Compiled programs name it by its digest.

Not by a number: JAX keeps compiled programs on disk, and a number that another process gave would mean something else.
"""
from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..orchestration.errors import ProtocolError
from ..orchestration.messages import TensorSpec
from ..trainer.bundle import Bundle, Leaf, specs_of
from ..trainer.session import Session

_BACKWARD = ".backward"


@dataclass(frozen=True)
class PushPullCall:
    """What one push_pull sums, all leaves at once. Hashable: JAX compiles once for each."""

    leaves: tuple[Leaf, ...]
    average: bool
    priority: int | None
    _bundles: list[Bundle] = field(default_factory=list, compare=False, repr=False)

    @cached_property
    def digest(self) -> str:
        """Name it: the same text for the same site in every process."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:32]

    def backward(self) -> PushPullCall:
        """Return the site that sums the gradients of this one's results."""
        leaves = tuple(replace(leaf, name=leaf.name + _BACKWARD) for leaf in self.leaves if leaf.is_differentiable)
        return PushPullCall(leaves, self.average, self.priority)

    def specs(self) -> list[TensorSpec]:
        """Describe the tensors to the job: small ones travel together."""
        return specs_of(self.leaves, self.average, [self.priority] * len(self.leaves))

    def bundle(self, session: Session) -> Bundle:
        """Return what sums it in *session*."""
        if not self._bundles or self._bundles[0].session is not session:
            self._bundles[:] = [Bundle(session, self.specs())]
        return self._bundles[0]


_sites: dict[str, PushPullCall] = {}


def register_call(site: PushPullCall) -> str:
    """Let `registered_call` find *site*, for as long as the process lives; return its digest."""
    return _sites.setdefault(site.digest, site).digest


def registered_call(digest: str) -> PushPullCall:
    """Return the site of that digest.

    Raises
    ------
    ProtocolError
        If the program that asks for it was compiled elsewhere.
    """
    try:
        return _sites[digest]
    except KeyError:
        raise ProtocolError("a compiled program sums what this process has never traced: programs with push_pull are "
                            "not moved between processes; jit the function here") from None
