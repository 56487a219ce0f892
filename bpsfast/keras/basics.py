"""What BytePS calls its basics, for Keras: join the job, leave it; who this process is."""
from __future__ import annotations

from ..trainer.process import local_rank, local_size, rank, size
from .backend import exchange

__all__ = ["barrier", "init", "local_rank", "local_size", "rank", "shutdown", "size"]


def init(lazy: bool = True, **settings: object) -> None:
    """Join the job (`bpsfast.init`). BytePS connects later if *lazy*; here it is always now, so errors show now."""
    exchange().init(**settings)


def shutdown() -> None:
    """Leave the job (`bpsfast.shutdown`), once the programs that the backend has started have ended."""
    exchange().shutdown()


def barrier(timeout_s: float | None = None) -> None:
    """Wait until all ranks have called this (`bpsfast.barrier`)."""
    exchange().barrier(timeout_s)
