"""What BytePS calls its basics, for JAX: join the job, leave it; who this process is."""
from __future__ import annotations

import atexit

from ..trainer import current as process
from ..trainer.current import local_rank, local_size, rank, size
from .primitive import settle

__all__ = ["barrier", "init", "local_rank", "local_size", "rank", "shutdown", "size"]


def init(**settings: object) -> None:
    """Join the job (`bpsfast.init`)."""
    process.init(**settings)
    # JAX runs programs after the call that started them has returned: they end before the job is left at exit.
    atexit.unregister(settle)
    atexit.register(settle)


def shutdown() -> None:
    """Wait for the programs that JAX has started, then leave the job (`bpsfast.shutdown`)."""
    settle()
    process.shutdown()


def barrier(timeout_s: float | None = None) -> None:
    """Wait for the programs that JAX has started, then until all ranks have called this (`bpsfast.barrier`).

    If one of those programs has failed, jitted functions with push_pull go on from here: without this they fail alike.
    """
    settle()
    process.barrier(timeout_s)
