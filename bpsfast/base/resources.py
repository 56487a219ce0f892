"""A base class for objects that must be closed, and functions for file descriptors: events of one, and their limit."""
from __future__ import annotations

import abc
import resource
import select
from typing import Protocol, TypeVar

_C = TypeVar("_C", bound="Closing")


class Closing(abc.ABC):
    """A context manager that is closed at the end of its ``with`` block."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent."""

    def __enter__(self: _C) -> _C:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


def is_ready(source: int | _HasFileno, timeout_s: float | None, events: int = select.POLLIN) -> bool:
    """Wait for *events* of *source*, or its end, at most *timeout_s* (None: no limit); return whether they came."""
    poll = select.poll()
    poll.register(source, events)
    return bool(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1e3))


def allow_all_descriptors() -> None:
    """Let this process have as many file descriptors as its hard limit says.

    The soft limit is 1,024 by default, for programs that use select(); a job of a thousand nodes needs more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
