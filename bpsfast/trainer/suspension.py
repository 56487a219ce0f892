"""BytePS's suspend and resume: leave the job for a while, and join the next one, which declares the same names."""
from __future__ import annotations

import os
from collections.abc import Callable

from ..orchestration.errors import ClosedError, ConfigError, MismatchError, UnsupportedError
from . import process

#: Launchers under which a job of several ranks can be formed again; see `resume`.
_RESUMABLE = ("elastic", "dmlc")

_suspended: list[str] | None = None  # the names that were declared, in their order


def suspend(leave: Callable[[], None] = process.shutdown) -> None:
    """Leave the job, by *leave*, until `resume`, which declares the same names in the same order. On all ranks.

    Raises
    ------
    UnsupportedError
        In a job of several ranks whose launcher can only start it once; nothing is changed then.
    """
    global _suspended
    session = process.current()
    if session.size > 1 and session.place.launcher not in _RESUMABLE:
        raise UnsupportedError(
            f"suspend() in a job of {session.size} ranks that {session.place.launcher} has started, which keeps its "
            "members: nobody can leave it, nor join it later. Start the program by `bpsfast run --elastic` (and see "
            "bpsfast.elastic, which needs no suspend). Or, to go on with other numbers, save a checkpoint on rank 0, "
            "end the program, start it again with the new numbers, and broadcast rank 0's state to all")
    declared = sorted(session.order, key=lambda name: session.order[name])
    leave()
    _suspended = declared


def resume(num_workers: int, num_servers: int, global_rank: int, context: object = None) -> None:
    """Join a job again after `suspend`; *context* (BytePS's) changes nothing.

    Under BytePS's variables these numbers are written into them, as BytePS does: DMLC_NUM_WORKER (machines),
    DMLC_NUM_SERVER, BYTEPS_GLOBAL_RANK, and DMLC_WORKER_ID as it follows. Scheduler and servers have ended with
    `suspend`: somebody has to start them again, with the same numbers. Under ``bpsfast run --elastic`` the next job is
    that of all workers there are, and the numbers must be those of it: *num_workers* ranks, of which this is number
    *global_rank*. Elsewhere the next job is one of this rank alone. PyTorch's optimizers are made anew, or told by
    `bpsfast.torch.optimizer.rejoin`.

    Raises
    ------
    UnsupportedError
        For more than one worker where nothing says how they would find each other.
    MismatchError
        If the next job has other numbers; it is left again.
    ClosedError
        Without `suspend`.
    bpsfast.elastic.TrainingOver
        As `init`.
    """
    from ..elastic.coordinator_client import current_client

    global _suspended
    if num_workers < 1 or num_servers < 0 or global_rank < 0:
        raise ConfigError(f"resume(num_workers={num_workers}, num_servers={num_servers}, global_rank={global_rank}): "
                          "at least one worker is needed, and no number is negative")
    member, by_variables = current_client(), os.environ.get("DMLC_ROLE") == "worker"
    if not by_variables and global_rank >= num_workers:
        raise ConfigError(f"resume(num_workers={num_workers}, ..., global_rank={global_rank}): ranks are numbered from "
                          "0 to num_workers - 1")
    if num_workers > 1 and member is None and not by_variables:
        raise UnsupportedError(
            f"resume(num_workers={num_workers}, ...) would let this process join a larger job, and nothing says how "
            "its ranks find each other: that needs `bpsfast run --elastic`, or BytePS's variables. Or start a new job "
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
        process.init_again()
    process.current().order.update({name: place for place, name in enumerate(_suspended)})
    _suspended = None


def _check_numbers(num_workers: int, global_rank: int) -> None:
    found = process.rank(), process.size()
    if found != (global_rank, num_workers):
        process.shutdown()
        raise MismatchError(f"resume(num_workers={num_workers}, ..., global_rank={global_rank}), but the next job has "
                            f"{found[1]} ranks, of which this one is number {found[0]}: start as many workers as shall "
                            "take part, which keep their order")
