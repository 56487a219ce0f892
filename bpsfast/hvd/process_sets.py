"""Process sets: some ranks of the job that do operations of their own, in an order of their own."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..orchestration.errors import ConfigError, UnsupportedError
from . import runtime


class ProcessSet:
    """Ranks of the job, sorted. It counts once `init` or `add_process_set` has given it its number."""

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm = None

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise ConfigError(
                "Apparently you tried to build a ProcessSet from an MPI communicator, but Horovod has not been built "
                "with MPI support: bpsfast.hvd needs the list of its ranks instead.")
        ranks = list(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ConfigError("ProcessSet should be initialized with a list of process ranks or an mpi4py Comm object; "
                              f"got {ranks}")
        self.ranks = sorted(ranks)

    def size(self) -> int | None:
        """Return the number of ranks in the set; None before it counts."""
        return None if self.process_set_id is None else len(runtime.current().ranks_of(self.process_set_id))

    def rank(self) -> int | None:
        """Return the place of this process in the set; None before it counts. Roots are ranks of the job all the same.

        Raises ConfigError if this process is not in the set.
        """
        if self.process_set_id is None:
            return None
        found = runtime.current()
        ranks = found.ranks_of(self.process_set_id)
        if found.rank not in ranks:
            raise ConfigError("Process is not part of provided process set.")
        return ranks.index(found.rank)

    def included(self) -> bool | None:
        """Return whether this process is in the set."""
        return None if self.ranks is None else runtime.current().rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm=None)"


#: All ranks; number 0. It knows its ranks from `init` on.
global_process_set = ProcessSet([])


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Make a set of some ranks, to which operations can then be limited, and return it. All ranks of the job call it.

    Raises
    ------
    ConfigError
        If there is such a set already, or a rank that the job does not have.
    HorovodInternalError
        If the ranks named different sets.
    """
    new = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    found = runtime.current()
    assert new.ranks is not None, "made of ranks"
    if not new.ranks or new.ranks[0] < 0 or new.ranks[-1] >= found.size or len(set(new.ranks)) < len(new.ranks):
        raise ConfigError(f"a process set of ranks {new.ranks} cannot be: the job has ranks 0 to {found.size - 1}, and "
                          "a set at least one of them, each once")
    if found.number_of(new.ranks) is not None:
        raise ConfigError(f"Attempted to add a duplicate process set: {new}")
    new.process_set_id = found.change("add_process_set", tuple(new.ranks))
    return new


def remove_process_set(process_set: ProcessSet) -> bool:
    """Give up *process_set*; all ranks of the job call it. Returns False if it does not count, or is the global one."""
    if not process_set.process_set_id:
        return False
    found = runtime.current()
    number = process_set.process_set_id
    exists = found.has(number)
    if exists:
        found.change("remove_process_set", tuple(found.ranks_of(number)))  # if ranks disagree, it stays, and counts
    process_set.process_set_id = None
    return exists


def begin_sets(process_sets: Any) -> None:
    """Add the sets that were given to `init`; "dynamic" and None: none, as they can always be added later."""
    global_process_set.process_set_id = 0
    global_process_set.ranks = list(range(runtime.current().size))
    if process_sets is None:
        return
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ConfigError(f"process_sets={process_sets!r}: expected None, \"dynamic\" or a list of ProcessSet")
        return
    for place, each in enumerate(process_sets):
        if not isinstance(each, ProcessSet):
            raise UnsupportedError(f"process_sets entry number {place} is a {type(each).__name__}, not a ProcessSet")
        if runtime.current().number_of(each.ranks or []) is not None:
            raise ConfigError(f"Horovod could not be initialized because process_sets entry number {place} is a "
                              f"duplicate: {each}")
        add_process_set(each)
