"""What BytePS calls its basics, for PyTorch: join the job, leave it, leave it for a while; who this process is."""
from __future__ import annotations

from ..orchestration.errors import ClosedError, ConfigError, UnsupportedError
from ..trainer import current as process
from ..trainer.current import barrier, local_rank, local_size, rank, size

__all__ = ["barrier", "init", "local_rank", "local_size", "rank", "resume", "shutdown", "size", "suspend"]

_suspended: list[str] | None = None  # the names that were declared, in their order


def init(lazy: bool = True) -> None:
    """Join the job (`bpsfast.init`). BytePS connects later if *lazy*; here it is always now, so errors show now."""
    process.init()


def shutdown() -> None:
    """Make the updates that are due (`cross_barrier`), then leave the job (`bpsfast.shutdown`)."""
    from .cross_barrier import settle_everything

    try:
        settle_everything()
    finally:
        process.shutdown()


def suspend() -> None:
    """Leave the job until `resume`, which declares the same names in the same order.

    Raises
    ------
    UnsupportedError
        In a job of several ranks, of which nothing is changed: a job keeps its members.
    """
    global _suspended
    session = process.current()
    if session.size > 1:
        raise UnsupportedError(
            f"suspend() in a job of {session.size} ranks, which keeps its members: nobody can leave it, nor join it "
            "later. To go on with other numbers save a checkpoint (torch.save on rank 0), end the program, and start "
            "it again with the new numbers: broadcast_parameters and broadcast_optimizer_state give rank 0's state to "
            "all")
    declared = sorted(session.order, key=lambda name: session.order[name])
    shutdown()
    _suspended = declared


def resume(num_workers: int, num_servers: int, global_rank: int, context: object = None) -> None:
    """Join a job again after `suspend`. Now that is a job of this rank alone: *num_workers* 1, *global_rank* 0.

    *num_servers* changes nothing there, *context* (BytePS's) nowhere.

    Raises
    ------
    UnsupportedError
        For other numbers.
    ClosedError
        Without `suspend`.
    """
    global _suspended
    if num_workers < 1 or num_servers < 0 or not 0 <= global_rank < num_workers:
        raise ConfigError(f"resume(num_workers={num_workers}, num_servers={num_servers}, global_rank={global_rank}): "
                          "at least one worker is needed, and a global_rank from 0 to num_workers - 1")
    if num_workers > 1:
        raise UnsupportedError(
            f"resume(num_workers={num_workers}, ...) would let this process join a larger job, and a job keeps its "
            "members. Start a new job with the new numbers, and give it the state of a checkpoint")
    if _suspended is None:
        raise ClosedError("resume() without suspend(): call init() to join the job")
    init()
    process.current().order.update({name: place for place, name in enumerate(_suspended)})
    _suspended = None
