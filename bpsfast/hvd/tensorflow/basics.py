"""Horovod's `init`, `shutdown`, process sets and `barrier`, for TensorFlow."""
from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from ...orchestration.errors import UnsupportedError
from ...trainer import process
from .. import runtime as sets
from ..basics import cross_rank_of, cross_size_of, is_homogeneous_of
from ..runtime import ProcessSet, global_process_set
from .collective_ops import begun, is_global

__all__ = [
    "add_process_set",
    "barrier",
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "shutdown",
]


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job, as `bpsfast.init`, and add *process_sets*, the same on all ranks ("dynamic" changes nothing).

    Raises UnsupportedError if *comm* is given, as the launcher decides which processes are ranks, and for
    *process_sets* without PyTorch; ConfigError if a set is a duplicate.
    """
    if comm:
        raise UnsupportedError(f"init(comm={comm!r}): ranks are those that the launcher has started; a part of them is "
                               "a process set")
    process.init()
    if process_sets is None or (isinstance(process_sets, str) and process_sets.lower() == "dynamic"):
        return
    begun("a process set")
    sets.begin_sets(process_sets)


def shutdown() -> None:
    """Leave the job (`bpsfast.shutdown`)."""
    runtime = sys.modules.get("bpsfast.hvd.runtime")
    if runtime is not None:
        runtime.end()
    process.shutdown()


def is_initialized() -> bool:
    """Return whether this process is in a job."""
    return process.session() is not None


def cross_rank() -> int:
    """Return the index of this machine among those that have a process of this local rank."""
    return cross_rank_of(process.current())


def cross_size() -> int:
    """Return the number of machines that have a process of this local rank."""
    return cross_size_of(process.current())


def is_homogeneous() -> bool:
    """Return whether all machines have the same number of processes. Helpers, which have none, do not count."""
    return is_homogeneous_of(process.current())


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """As `bpsfast.hvd.torch.add_process_set`; raises UnsupportedError without PyTorch."""
    begun("a process set")
    return sets.add_process_set(process_set)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of *process_set* have called this."""
    if is_global(process_set):
        process.barrier()
    else:
        begun("barrier of a process set").barrier(process_set)


def join(device: int = -1) -> NoReturn:
    """Raise `UnsupportedError`: there is no join for TensorFlow."""
    raise UnsupportedError("join: gradients and allreduces of TensorFlow are made in the order of each rank's program, "
                           "without negotiation, so nobody knows what to contribute for a rank that has ended. Give "
                           "all ranks the same number of steps (tf.data: repeat() and steps_per_epoch), or use "
                           "bpsfast.hvd.torch, which has join")
