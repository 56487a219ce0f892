"""The session of this process: init, shutdown, rank, size, barrier, suspend, resume; joining and leaving jobs.

`join_job` and `leave_job` make and end one session of several in a process. Sessions of one process are independent:
each has its own daemons, key, local socket and memory.
"""
from __future__ import annotations

import os
from collections.abc import Callable

from .._version import __version__
from ..base import hooks, logs
from ..base.end_reports import report
from ..base.settings import Settings, load, take_job_key
from ..launch import daemons, roles
from ..launch.daemons import Daemons
from ..launch.process_role import ProcessRole
from ..orchestration.errors import BpsError, ClosedError, ConfigError, MismatchError, UnsupportedError
from . import node_connection
from .exit_handling import ExitWatch, shorten_tracebacks
from .membership import Loss
from .session import Session

_current: Session | None = None
_watch: ExitWatch | None = None
_has_left = False
#: How long a rank that has left waits for the others to leave.
_CLOSE_TIMEOUT_S = 5.0
#: Launchers under which a job of several ranks can be started again; see `resume`.
_RESUMABLE = ("elastic", "dmlc")
_suspended: list[str] | None = None  # the declared names, in their order


def init(**settings: object) -> None:
    """Join the job: attach to this machine's node, which the first local rank starts unless a launcher has.

    Blocks until all ranks, nodes and helpers have joined. A second call does nothing.

    Parameters
    ----------
    settings
        Settings by name, as the command line would give them (`bpsfast env` lists them).

    Raises
    ------
    ConfigError, MismatchError, StallError, PeerLostError
        If the job cannot start; the text names the setting, or the missing process.
    bpsfast.elastic.TrainingOver
        A SystemExit: this worker was added to an elastic program whose training has ended meanwhile.
    ClosedError
        After `shutdown`, where the launcher started scheduler and nodes: they have ended with the job.
    """
    if session() is not None:
        return
    found = load(settings)
    logs.configure(found.log_level, "rank")
    if found.coordinator:
        hooks.open_elastic_client(found).join()
        return
    begin(roles.detect(found), found)


def init_again() -> None:
    """As `init`, also after `shutdown`, if scheduler and nodes have been started again."""
    global _has_left
    _has_left = False
    init()


def begin(role: ProcessRole, found: Settings, why_void: Callable[[], str | None] = lambda: None) -> None:
    """Join the job as `init` does, in *role*, by the settings *found*; *why_void*: as of `join_job`."""
    global _current, _watch
    if _has_left and role.is_joined_once:
        raise ClosedError(
            f"bpsfast.init() after shutdown(): the job of rank {role.rank} ended with its shutdown, and scheduler and "
            "nodes, which the launcher started, ended with it. A process joins such a job once: call shutdown() only "
            "at the end of the program")
    if role.rank >= 0:
        logs.set_identity(f"rank {role.rank}")
    is_launchers = role.launcher in ("bpsfast", "elastic")
    try:
        session, started = join_job(role, found, why_void)
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
    _leave(stays=True)


def leave() -> None:
    """As `shutdown`, but join the next job while the daemons of this one end; the end of the program waits for them."""
    _leave(stays=False)


def _leave(stays: bool) -> None:
    global _current, _watch, _has_left
    session, watch = _current, _watch
    if session is None or watch is None:  # or its maker closes it
        return
    _current = _watch = None
    if session.pid != os.getpid():
        return
    _has_left = True
    leave_job(session, watch, stays=stays)


def abandon(reason: str) -> None:
    """Leave a job that has lost a process, so that this one can join another job; tell *reason* to the remaining ranks.

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
    """Make *session*, which the caller has made and will close, this process's, unless there is one."""
    global _current, _watch
    if _current is None or _current.closed or _current.pid != os.getpid():
        _current, _watch = session, None


def forget(session: Session) -> None:
    """Undo `adopt`."""
    global _current
    if _current is session:
        _current = None


def failure() -> str | None:
    """Return the text of the exception that ends this program, if one does."""
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
    """Return the number of ranks that take part in the job (`members`)."""
    return len(current().membership.members)


def members() -> tuple[int, ...]:
    """Return the ranks that take part in the job now: all, without those that it has lost and goes on without.

    A lost rank is a member until a sum without it has been waited for. A rank keeps its number, so with the setting
    on_worker_loss = continue there may be gaps.
    """
    return current().membership.members


def losses() -> tuple[Loss, ...]:
    """Return the losses of ranks that the job has survived (the setting on_worker_loss), the earliest first."""
    return tuple(current().membership.losses)


def on_ranks_lost(callback: Callable[[Loss], object]) -> None:
    """Call *callback* with a `Loss` each time that the job goes on without a lost rank, until `shutdown`.

    It is called in the thread that waits for a sum, before that thread gets the first one without the lost ranks, and
    `members` and `size` change then: at the same place in all programs that wait for the same sums in the same order.
    It must not push or wait itself. What it raises reaches the caller of the wait. Use it to change what depends on the
    number of ranks: the learning rate, and who reads which samples.
    """
    current().membership.call_on_loss(callback)


def local_rank() -> int:
    """Return the number of this rank on its machine."""
    return current().local_rank


def local_size() -> int:
    """Return the number of ranks on this machine."""
    return current().local_size


def barrier(timeout_s: float | None = None) -> None:
    """Wait until all ranks have called this; raises `StallError` after *timeout_s* (default: the setting)."""
    current().barrier(timeout_s)


def join_job(role: ProcessRole, settings: Settings,
             why_void: Callable[[], str | None] = lambda: None) -> tuple[Session, Daemons]:
    """Start the daemons that *role* calls for, attach to the machine's node, and return once all have joined.

    *why_void* is called now and then; it returns why the job cannot start any more, or None. Once this process has
    joined, BPSFAST_JOB_KEY is not in its environment any more (`take_job_key`). Raises `ConfigError`, `MismatchError`,
    `StallError` or `PeerLostError` if the job cannot start; the daemons that were started have been ended.
    """
    started = daemons.start(role, settings)
    try:
        attached = node_connection.attach(started.role, started.role.settings(settings), __version__,
                                          lambda: started.failure() or why_void())
        session = Session(attached, settings, started.failure)
        report("joined")
    except BaseException:
        started.close(timeout_s=0.5)
        raise
    take_job_key()
    return session, started


def abandon_job(session: Session, watch: ExitWatch, reason: str) -> None:
    """Abort the job of *session* with *reason*, which the other ranks raise, and leave it.

    The daemons that this process started end with the job.
    """
    if session.pid != os.getpid():
        return
    session.close(False, reason, _CLOSE_TIMEOUT_S)
    watch.close()


def leave_job(session: Session, watch: ExitWatch, *, stays: bool = True) -> None:
    """Leave the job of *session*, and close *watch*. Does nothing in a fork of the process that joined.

    Daemons end with the process that started them, so it must live until all ranks have left. *stays*: wait for that
    here, up to the setting timeout_s. Else this returns after a few seconds at most, and the exit of the program waits
    for the daemons: ranks may then leave several jobs in any order.
    """
    if session.pid != os.getpid():
        return
    waits = stays and watch.holds_daemons
    session.close(watch.failure is None, watch.failure or "", session.settings.timeout_s if waits else _CLOSE_TIMEOUT_S)
    watch.close(detaches=not stays)


def suspend(leave: Callable[[], None] = shutdown) -> None:
    """Leave the job, by *leave*, until `resume`, which declares the same names in the same order. On all ranks.

    Raises
    ------
    UnsupportedError
        In a job of several ranks whose launcher can start it only once; nothing has changed then.
    """
    global _suspended
    session = current()
    if session.size > 1 and session.role.launcher not in _RESUMABLE:
        raise UnsupportedError(
            f"suspend() in a job of {session.size} ranks that {session.role.launcher} has started, which keeps its "
            "members: no rank can leave it or join it later. Start the program by `bpsfast run --elastic` (and see "
            "bpsfast.elastic, which needs no suspend). Or, to go on with other numbers, save a checkpoint on rank 0, "
            "end the program, start it again with the new numbers, and broadcast rank 0's state to all")
    declared = session.tensors.order()
    leave()
    _suspended = declared


def resume(num_workers: int, num_servers: int, global_rank: int, context: object = None) -> None:
    """Join a job again after `suspend`; *context* (BytePS's) changes nothing.

    Under BytePS's variables the numbers are written into them, as BytePS does: DMLC_NUM_WORKER (machines),
    DMLC_NUM_SERVER, BYTEPS_GLOBAL_RANK, and DMLC_WORKER_ID, which follows from them. Scheduler and servers have ended
    with `suspend` and must be started again with the same numbers. Under ``bpsfast run --elastic`` the next job has all
    workers that exist then, and the numbers must match it: *num_workers* ranks, of which this is number *global_rank*.
    Elsewhere the next job has this rank alone. Make PyTorch optimizers again, or call `bpsfast.torch.optimizer.rejoin`
    for them.

    Raises
    ------
    UnsupportedError
        For more than one worker without a launcher or variables by which they find each other.
    MismatchError
        If the next job has other numbers; this process has left it again.
    ClosedError
        Without `suspend`.
    bpsfast.elastic.TrainingOver
        As `init`.
    """
    global _suspended
    if num_workers < 1 or num_servers < 0 or global_rank < 0:
        raise ConfigError(f"resume(num_workers={num_workers}, num_servers={num_servers}, global_rank={global_rank}): "
                          "at least one worker is needed, and no number is negative")
    member, by_variables = hooks.current_elastic_client(), os.environ.get("DMLC_ROLE") == "worker"
    if not by_variables and global_rank >= num_workers:
        raise ConfigError(f"resume(num_workers={num_workers}, ..., global_rank={global_rank}): ranks are numbered from "
                          "0 to num_workers - 1")
    if num_workers > 1 and member is None and not by_variables:
        raise UnsupportedError(
            f"resume(num_workers={num_workers}, ...) would join a larger job, and there is no way for its ranks to "
            "find each other: that needs `bpsfast run --elastic`, or BytePS's variables. Or start a new job "
            "with the new numbers, and give it the state of a checkpoint")
    if _suspended is None:
        raise ClosedError("resume() without suspend(): call init() to join the job")
    if member is not None:
        member.join()
        _check_numbers(num_workers, global_rank)
    else:
        if by_variables:
            local_size = int(os.environ.get("BYTEPS_LOCAL_SIZE", "1"))
            os.environ.update(DMLC_NUM_WORKER=str(num_workers), DMLC_NUM_SERVER=str(num_servers),
                              BYTEPS_GLOBAL_RANK=str(global_rank), DMLC_WORKER_ID=str(global_rank // local_size))
        init_again()
    for name in _suspended:
        current().tensors.note_order(name)
    _suspended = None


def _check_numbers(num_workers: int, global_rank: int) -> None:
    found = rank(), size()
    if found != (global_rank, num_workers):
        shutdown()
        raise MismatchError(f"resume(num_workers={num_workers}, ..., global_rank={global_rank}), but the next job has "
                            f"{found[1]} ranks, and this one is number {found[0]}: start as many workers as the "
                            "job should have, in the same order")
