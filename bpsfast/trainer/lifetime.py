"""What happens to a session when its program ends, fails or forks.

At exit the session is shut down. An exception that nobody caught is noted on its way to ``sys.excepthook``, so that
the other ranks hear of it at once instead of waiting for a deadline. A forked child needs nothing from here: the
session knows the process it belongs to.
"""
from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from types import TracebackType

from ..launch.daemons import Daemons


class Watch:
    """Call *shutdown* at exit, and remember the exception that ends the program; `close` also closes *started*."""

    def __init__(self, shutdown: Callable[[], None], started: Daemons) -> None:
        self.failure: str | None = None
        self._shutdown = shutdown
        self._started = started
        self._previous = sys.excepthook
        self._hook = self._note  # one bound method: it must be recognised again
        sys.excepthook = self._hook
        atexit.register(shutdown)

    @property
    def holds_daemons(self) -> bool:
        """Whether this process started the node or the scheduler."""
        return self._started.node is not None or self._started.scheduler is not None

    def _note(self, kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        self.failure = f"{kind.__name__}: {value}"
        self._previous(kind, value, traceback)

    def close(self) -> None:
        """Undo what the constructor did. If someone chained a hook onto ours, that chain stays whole."""
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous
        atexit.unregister(self._shutdown)
        self._started.close()
