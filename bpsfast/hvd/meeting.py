"""How the ranks of a process set find the one of them that coordinates: by a notice in the job."""
from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from ..orchestration.errors import ConfigError
from ..orchestration.priority.negotiation import FollowerChannel, LeaderChannel, connect, listen
from ..trainer.session import Session

_KEY_NBYTES = 32


class _LeaderAddress(msgspec.Struct, frozen=True):
    """Where the first rank listens, and the set's key; or why it does not."""

    host: str = ""
    port: int = 0
    key: bytes = b""
    error: str = ""


def meet(session: Session, ranks: Sequence[int], title: str) -> LeaderChannel | FollowerChannel | None:
    """Return this rank's end of the lines between *ranks*; None if there is nobody else. Called by all of them.

    *title* tells this meeting from all others of the job, on all ranks alike. The first rank withdraws the notice of
    that key when all have met.

    Raises
    ------
    ConfigError
        On all ranks, if the first one cannot listen.
    StallError
        If the first rank does not come.
    """
    first = ranks[0]
    if len(ranks) == 1:
        return None
    if session.rank != first:
        notice = session.notices.lookup(title, session.settings.timeout_s, f"rank {first}")
        found = msgspec.msgpack.decode(notice, type=_LeaderAddress)
        if found.error:
            raise ConfigError(f"rank {first} cannot be reached by ranks {list(ranks[1:])}: {found.error}")
        return connect(found.host, found.port, found.key, f"rank {first}")
    key = os.urandom(_KEY_NBYTES)
    try:
        host = "127.0.0.1" if session.n_nodes == 1 else session.host
        line = listen(key, host)
    except ConfigError as exc:
        session.notices.publish(title, msgspec.msgpack.encode(_LeaderAddress(error=str(exc))))
        raise
    try:
        session.notices.publish(title, msgspec.msgpack.encode(_LeaderAddress(host, line.port, key)))
    except BaseException:
        line.close()
        raise
    return line
