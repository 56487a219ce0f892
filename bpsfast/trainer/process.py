"""The one session of this process, and what BytePS calls its basics: init, shutdown, rank, size, barrier."""
from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..base import logs
from ..orchestration.errors import BpsError, ClosedError
from .exit_handling import ExitWatch, shorten_tracebacks
from .joining import abandon as abandon_job, join, leave
from .session import Session

if TYPE_CHECKING:
    from ..base.settings import Settings
    from ..launch.process_role import ProcessRole

_current: Session | None = None
_watch: ExitWatch | None = None
_has_left = False


def init(**settings: object) -> None:
    """Join the job: attach to this machine's node, which is started if this process is the one to do so.

    Blocks until all ranks, nodes and helpers are there. A second call changes nothing.

    Parameters
    ----------
    settings
        Settings by name, as the command line would give them (`bpsfast env` lists them).

    Raises
    ------
    ConfigError, MismatchError, StallError, PeerLostError
        If the job cannot come together; the text names the setting, or who is missing.
    bpsfast.elastic.TrainingOver
        A SystemExit: the training of an elastic program has ended before this worker, which was added, has come.
    ClosedError
        After `shutdown`, where the launcher started scheduler and nodes: they have ended with the job.
    """
    if session() is not None:
        return
    from ..base.settings import load
    from ..launch import roles

    found = load(settings)
    logs.configure(found.log_level, "rank")
    if found.muster:
        from ..elastic.coordinator_client import open_client

        open_client(found).join()
        return
    begin(roles.detect(found), found)


def init_again() -> None:
    """As `init`, also where somebody has started scheduler and nodes anew since this process has left its job."""
    global _has_left
    _has_left = False
    init()


def begin(place: ProcessRole, found: Settings, why_void: Callable[[], str | None] = lambda: None) -> None:
    """Join the job as `init` does, at the *place* of this process that the settings *found* have led to.

    *why_void*: as of `joining.join`.
    """
    global _current, _watch
    if _has_left and place.is_joined_once:
        raise ClosedError(
            f"bpsfast.init() after shutdown(): the job of rank {place.rank} ended with its shutdown, and scheduler and "
            "nodes, which the launcher started, ended with it. A process joins such a job once: call shutdown() only "
            "at the end of the program")
    if place.rank >= 0:
        logs.set_identity(f"rank {place.rank}")
    is_launchers = place.launcher in ("bpsfast", "elastic")
    try:
        session, started = join(place, found, why_void)
    except BpsError:
        if is_launchers:
            shorten_tracebacks()
        raise
    logs.set_identity(f"rank {session.rank}", session.job)
    _current, _watch = session, ExitWatch(shutdown, started, brief=is_launchers)


def shutdown() -> None:
    """Leave the job; waits for the daemons this process started. Does nothing if there is no session.

    When an uncaught exception ends the program, the other ranks are told and raise `PeerLostError`.
    """
    global _current, _watch, _has_left
    session, watch = _current, _watch
    if session is None or watch is None:  # or it is another's to end
        return
    _current = _watch = None
    if session.pid != os.getpid():
        return
    _has_left = True
    leave(session, watch)


def abandon(reason: str) -> None:
    """Leave a job that has lost somebody, so that another one can be joined; *reason* is told to who is still in it.

    Does nothing if there is no session.
    """
    global _current, _watch
    session, watch = _current, _watch
    if session is None or watch is None:
        return
    _current = _watch = None
    abandon_job(session, watch, reason)


def session() -> Session | None:
    """Return this process's session if one is open."""
    found = _current
    return found if found is not None and not found.closed and found.pid == os.getpid() else None


def adopt(session: Session) -> None:
    """Let *session*, which somebody else has made and will end, be this process's, unless there is one."""
    global _current, _watch
    if _current is None or _current.closed or _current.pid != os.getpid():
        _current, _watch = session, None


def forget(session: Session) -> None:
    """Undo `adopt`."""
    global _current
    if _current is session:
        _current = None


def failure() -> str | None:
    """Return the exception that ends this program, in words, if one does."""
    return _watch.failure if _watch is not None else None


def current() -> Session:
    """Return this process's open session; raises `ClosedError` if there is none."""
    session = _current
    if session is None:
        raise ClosedError("bpsfast is not running in this process: call bpsfast.init() first (or it was shut down)")
    session.require_open()
    return session


def rank() -> int:
    """Return the number of this rank in the job."""
    return current().rank


def size() -> int:
    """Return the number of ranks in the job."""
    return current().size


def local_rank() -> int:
    """Return the number of this rank on its machine."""
    return current().local_rank


def local_size() -> int:
    """Return the number of ranks on this machine."""
    return current().local_size


def barrier(timeout_s: float | None = None) -> None:
    """Wait until all ranks are here; raises `StallError` after *timeout_s* (default: the setting)."""
    current().barrier(timeout_s)
