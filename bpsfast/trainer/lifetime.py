"""What happens to a session when its program ends, fails or forks.

At exit the session is shut down. An exception that nobody caught is noted on its way to ``sys.excepthook``, so that
the other ranks hear of it at once instead of waiting for a deadline. A forked child needs nothing from here: the
session knows the process it belongs to.
"""
from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from pathlib import Path
from traceback import extract_tb
from types import TracebackType

from ..launch.daemons import Daemons
from ..orchestration.errors import PeerLostError


class Watch:
    """Call *shutdown* at exit, and remember the exception that ends the program; `close` also closes *started*.

    *brief*: a program that ends because a peer did says so in one line. Under a launcher that shows the output of all
    ranks, their tracebacks would bury the one that matters.
    """

    def __init__(self, shutdown: Callable[[], None], started: Daemons, brief: bool = False) -> None:
        self.failure: str | None = None
        self._brief = brief
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
        if self._brief and isinstance(value, PeerLostError) and self._previous is sys.__excepthook__:
            print(f"bpsfast.{kind.__name__}: {value} ({_place_in_program(traceback)})", file=sys.stderr)
        else:
            self._previous(kind, value, traceback)

    def close(self) -> None:
        """Undo what the constructor did. If someone chained a hook onto ours, that chain stays whole."""
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous
        atexit.unregister(self._shutdown)
        self._started.close()


def _place_in_program(traceback: TracebackType | None) -> str:
    """Return file and line of the innermost call that is not bpsfast's own."""
    package = str(Path(__file__).parents[1])
    frames = [frame for frame in extract_tb(traceback) if not frame.filename.startswith(package)]
    return f"ended in {frames[-1].filename}, line {frames[-1].lineno}" if frames else "ended in bpsfast"
