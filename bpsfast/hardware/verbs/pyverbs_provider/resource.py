"""What all objects share: one owner, parents that outlive their children, close once, nothing after a fork."""
from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import weakref
from typing import Any

from . import pointers
from .library import told, words

#: What the kernel answers to everything once it has taken the device away, all its objects included.
_DEVICE_GONE = frozenset({errno.EIO, errno.ENODEV})

_forks = 0
_live: weakref.WeakSet[VerbsResource] = weakref.WeakSet()


def _forked() -> None:
    """In a forked child: keep pyverbs from destroying, when its objects go, what the parent uses."""
    global _forks
    _forks += 1
    for each in list(_live):
        each._leak_in_child()


os.register_at_fork(after_in_child=_forked)


class VerbsResource:
    """Holds one object of pyverbs. A subclass sets it by `_own` when it was made, and names itself in `_name`.

    Raises ValueError when used after `close`, or in a process forked from the one that made it.
    """

    _raw: Any = None
    _name = "object"
    _verb = "close"
    children = 0
    handle: Any
    _dropped = False  # nobody holds it any more, but for its children

    def _own(self, raw: Any, *parents: VerbsResource) -> None:
        self._raw, self._parents, self._made_in = raw, parents, _forks
        for parent in parents:
            parent.children += 1
        _live.add(self)

    def _open(self) -> Any:
        """Return pyverbs's object."""
        if self._raw is None:
            raise ValueError(f"{self._name} is closed")
        if not self._is_ours:
            raise ValueError(f"{self._name} belongs to the process that this one (pid {os.getpid()}) was forked from: "
                             "open the device again here")
        return self._raw

    @property
    def _is_ours(self) -> bool:
        return self._made_in == _forks

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._raw is None

    def close(self) -> None:
        """Release it. Idempotent.

        Raises
        ------
        BufferError
            While what belongs to it is open, or another thread is in a call of it.
        """
        if self._raw is None:
            return
        if self._is_ours:
            if busy := self._busy():
                raise BufferError(f"{self._name} {busy}")
            try:
                with words(lambda rc: f"{self._verb}({self._name}): {told(rc)}"):
                    self._raw.close()
            except OSError as exc:
                if exc.errno not in _DEVICE_GONE:
                    raise
                self._abandon()
        self._raw = None
        for parent in self._parents:
            parent.children -= 1
        self._released()
        for parent in self._parents:
            if parent._dropped:
                with contextlib.suppress(Exception):
                    parent.close()

    def _busy(self) -> str:
        return f"has {self.children} open children" if self.children else ""

    def _abandon(self) -> None:
        """Leave what libibverbs has of it behind: no call can free that any more, and pyverbs shall not try again."""
        pointers.forget(self._raw, self.handle)

    def _released(self) -> None:
        """Let go of what was held for the device."""

    def _leak_in_child(self) -> None:
        self._add_reference(self._raw)

    @staticmethod
    def _add_reference(raw: Any) -> None:
        if raw is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(raw))

    def __del__(self) -> None:
        self._dropped = True  # the collector asks parents and children in any order: the last child closes its parent
        with contextlib.suppress(Exception):
            self.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
