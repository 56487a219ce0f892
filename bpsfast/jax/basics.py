"""What BytePS calls its basics, for JAX: join the job, leave it; who this process is."""
from __future__ import annotations

import atexit
import contextlib

import jax

from ..trainer import current as process
from ..trainer.current import barrier, local_rank, local_size, rank, size

__all__ = ["barrier", "init", "local_rank", "local_size", "rank", "shutdown", "size"]


def init(**settings: object) -> None:
    """Join the job (`bpsfast.init`)."""
    process.init(**settings)
    # JAX runs programs after the call that started them has returned: they end before the job is left at exit.
    atexit.unregister(_settle)
    atexit.register(_settle)


def shutdown() -> None:
    """Wait for the push_pulls of programs that JAX has started, then leave the job (`bpsfast.shutdown`)."""
    _settle()
    process.shutdown()


def _settle() -> None:
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # it was, or will be, raised where the result is used
        jax.effects_barrier()
