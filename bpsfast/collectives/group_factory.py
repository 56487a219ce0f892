"""Groups of a session: made by all their members, under a name that they agree on without a word."""
from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .group import Group

if TYPE_CHECKING:
    from ..trainer.session import Session


def make(session: Session, ranks: Sequence[int], timeout_s: float | None = None) -> Group:
    """Return a new group of *ranks* of *session*: its i-th member is the i-th of them.

    All of them call this, as often and in the same order for the same *ranks*; others need not. Nothing is exchanged
    before the first collective. *timeout_s*: how long a collective may take; None: the setting.

    Raises
    ------
    ConfigError
        If this rank is none of *ranks*, or they are not ranks of the job.
    """
    key = tuple(ranks)
    number = session.n_groups[key]
    session.n_groups[key] += 1
    is_all = key == tuple(range(session.size))
    who = "all" if is_all else hashlib.blake2b(repr(key).encode(), digest_size=8).hexdigest()
    return Group(session, key, f"bpsfast.group/{who}/{number}",
                 session.settings.timeout_s if timeout_s is None else timeout_s)
