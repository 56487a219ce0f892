"""How a process becomes a rank of a job whose place it knows, and how it leaves: for one session or for several.

    session, started = join(place, settings)
    watch = Watch(leave_this_one, started)       # at exit, and when an exception ends the program
    ...
    leave(session, watch)

Sessions of one process know nothing of each other: each has its own daemons, key, local socket and memory.
"""
from __future__ import annotations

import os
from collections.abc import Callable

from .._version import __version__
from ..base.end_reports import report
from ..base.settings import Settings, take_job_key
from ..launch import daemons
from ..launch.daemons import Daemons
from ..launch.process_role import ProcessRole
from . import attachment
from .exit_handling import ExitWatch
from .session import Session

#: How long a rank that nobody needs any more waits for the others to leave as well.
_CLOSE_TIMEOUT_S = 5.0


def join(place: ProcessRole, settings: Settings,
         why_void: Callable[[], str | None] = lambda: None) -> tuple[Session, Daemons]:
    """Start what *place* has to start here, attach to the machine's node, and return once the whole job is there.

    *why_void* is asked again and again why the job will never be there; it returns None as long as nobody knows. Once
    this process has joined, BPSFAST_JOB_KEY is not in its environment any more (`take_job_key`).

    Raises
    ------
    ConfigError, MismatchError, StallError, PeerLostError
        If the job cannot come together; what was started is ended.
    """
    started = daemons.start(place, settings)
    try:
        attached = attachment.attach(started.role, started.role.settings(settings), __version__,
                                     lambda: started.failure() or why_void())
        session = Session(attached, settings, started.failure)
        report("joined")
    except BaseException:
        started.close(timeout_s=0.5)
        raise
    take_job_key()
    return session, started


def abandon(session: Session, watch: ExitWatch, reason: str) -> None:
    """Leave the job of *session*, which has lost somebody or shall end: whoever is still in it is told *reason*.

    The daemons that this process started end with it; they are not waited for longer than a job's end takes.
    """
    if session.pid != os.getpid():
        return
    session.close(False, reason, _CLOSE_TIMEOUT_S)
    watch.close()


def leave(session: Session, watch: ExitWatch, *, stays: bool = True) -> None:
    """Leave the job of *session*, and close *watch*. Does nothing in a fork of the process that joined.

    Daemons end with their starter, so who started some must live until the whole job has left. *stays*: wait for that
    here, up to `timeout_s`. Else this returns after a few seconds at most, the daemons go on by themselves, and the end
    of the program waits for them: ranks may then leave several jobs in any order.
    """
    if session.pid != os.getpid():
        return
    waits = stays and watch.holds_daemons
    session.close(watch.failure is None, watch.failure or "", session.settings.timeout_s if waits else _CLOSE_TIMEOUT_S)
    watch.close(detaches=not stays)
