"""What BytePS calls its basics, for PyTorch: join the job, leave it, leave it for a while; who this process is."""
from __future__ import annotations

from ..trainer import process
from ..trainer.process import barrier, local_rank, local_size, rank, resume, size

__all__ = ["barrier", "init", "local_rank", "local_size", "rank", "resume", "shutdown", "size", "suspend"]


def init(lazy: bool = True) -> None:
    """Join the job (`bpsfast.init`). BytePS connects later if *lazy*; here it is always now, so errors show now."""
    process.init()


def shutdown() -> None:
    """Make the updates that are due (`cross_barrier`), then leave the job (`bpsfast.shutdown`)."""
    from .cross_barrier import settle_all_updates

    try:
        settle_all_updates()
    finally:
        process.shutdown()


def suspend() -> None:
    """Make the updates that are due, then leave the job until `resume`; raises as `suspension.suspend`."""
    process.suspend(shutdown)
