"""A base class for objects that must be closed, and a function that waits for events of one file descriptor."""
from __future__ import annotations

import abc
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
