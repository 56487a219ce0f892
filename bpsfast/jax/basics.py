"""What BytePS calls its basics, for JAX: join the job, leave it; who this process is."""
from __future__ import annotations

import atexit

from ..trainer import process
from ..trainer.process import local_rank, local_size, rank, size
from .primitive import wait_for_programs

__all__ = ["barrier", "init", "local_rank", "local_size", "rank", "shutdown", "size"]


def init(**settings: object) -> None:
    """Join the job (`bpsfast.init`)."""
    process.init(**settings)
    # JAX runs programs after the call that started them has returned: they end before the job is left at exit.
    atexit.unregister(wait_for_programs)
    atexit.register(wait_for_programs)


def shutdown() -> None:
    """Wait for the programs that JAX has started, then leave the job (`bpsfast.shutdown`)."""
    wait_for_programs()
    process.shutdown()


def barrier(timeout_s: float | None = None) -> None:
    """Wait for the programs that JAX has started, then until all ranks have called this (`bpsfast.barrier`).

    If one of those programs has failed, jitted functions with push_pull go on from here: without this they fail alike.
    """
    wait_for_programs()
    process.barrier(timeout_s)
