"""Horovod's `init`, `shutdown`, `rank`, `size` and the like, and the start and stop of its timeline."""
from __future__ import annotations

from typing import Any

from ..orchestration.errors import ConfigError, UnsupportedError
from ..trainer.session import Session
from . import runtime
from .errors import NotInitializedError
from .runtime import begin_sets

__all__ = [
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job, as `bpsfast.init`. All ranks call it; a second call changes nothing.

    Parameters
    ----------
    comm
        None, an empty list, or all ranks: the launcher decides which processes are ranks.
    process_sets
        `ProcessSet` objects that are added at once, the same on all ranks; "dynamic" is accepted and changes nothing.

    Raises
    ------
    ConfigError
        If a set is a duplicate, or *comm* an MPI communicator.
    UnsupportedError
        If *comm* names some ranks only.
    MismatchError, StallError, PeerLostError
        As `bpsfast.init`.
    """
    if comm is not None and not isinstance(comm, list | tuple | range):
        raise ConfigError("Horovod has not been built with MPI support: bpsfast.hvd takes no communicator, ranks are "
                          "what the launcher says (bpsfast run, torchrun, mpirun)")
    if runtime.is_begun():
        return
    found = runtime.begin()
    if comm and sorted(comm) != list(range(found.size)):
        runtime.end()
        raise UnsupportedError(f"comm={list(comm)}: a part of the job's ranks 0 to {found.size - 1} is a process set, "
                               "not a job of its own")
    try:
        begin_sets(process_sets)
    except BaseException:
        runtime.end()
        raise


def shutdown() -> None:
    """Leave the job, if `init` has joined it. Operations under way fail, here and on the other ranks."""
    runtime.end()


def is_initialized() -> bool:
    """Return whether this process is between `init` and `shutdown`."""
    return runtime.is_begun()


def rank() -> int:
    """Return the number of this process in the job. These functions raise NotInitializedError before `init`."""
    return runtime.current().rank


def size() -> int:
    """Return the number of processes in the job."""
    return runtime.current().size


def local_rank() -> int:
    """Return the number of this process on its machine."""
    return runtime.current().session.local_rank


def local_size() -> int:
    """Return the number of processes on this machine."""
    return runtime.current().session.local_size


def cross_rank() -> int:
    """Return the index of this machine among those that have a process of this local rank."""
    return cross_rank_of(runtime.current().session)


def cross_size() -> int:
    """Return the number of machines that have a process of this local rank."""
    return cross_size_of(runtime.current().session)


def is_homogeneous() -> bool:
    """Return whether all machines have the same number of processes. Helpers, which have none, do not count."""
    return is_homogeneous_of(runtime.current().session)


def cross_rank_of(session: Session) -> int:
    """As `cross_rank`, in the job of *session*."""
    return sum(n_ranks > session.local_rank for n_ranks, _ in session.machines[: session.node])


def cross_size_of(session: Session) -> int:
    """As `cross_size`, in the job of *session*."""
    return sum(n_ranks > session.local_rank for n_ranks, _ in session.machines)


def is_homogeneous_of(session: Session) -> bool:
    """As `is_homogeneous`, of the job of *session*."""
    return len({n_ranks for n_ranks, _ in session.machines if n_ranks}) == 1


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Let rank 0 write the timeline *file_path* from now on. *mark_cycles* is ignored, as there are no cycles.

    Raises ConfigError if the file cannot be written.
    """
    _begun().start_timeline(str(file_path))


def stop_timeline() -> None:
    """End the timeline."""
    _begun().stop_timeline()


def _begun() -> runtime.Runtime:
    """Return what `init` has begun; raises `NotInitializedError`, also after `shutdown`."""
    if not runtime.is_begun():
        raise NotInitializedError
    return runtime.current()
