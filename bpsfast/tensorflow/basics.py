"""What BytePS calls its basics, for TensorFlow: join the job, leave it, for a while, too; who this process is."""
from __future__ import annotations

from ..trainer import process
from ..trainer.process import barrier, local_rank, local_size, rank, resume, shutdown, size

__all__ = ["barrier", "init", "local_rank", "local_size", "rank", "resume", "shutdown", "size", "suspend"]


def init(lazy: bool = True, **settings: object) -> None:
    """Join the job (`bpsfast.init`). BytePS connects later if *lazy*; here it is always now, so errors show now."""
    process.init(**settings)


def suspend() -> None:
    """Leave the job until `resume`, which declares the same names in the same order; raises as `suspension.suspend`."""
    process.suspend(shutdown)
