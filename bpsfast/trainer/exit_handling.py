"""Shuts sessions down when their program exits or fails, and notes its uncaught exception for the other ranks.

Each session is shut down at exit. An uncaught exception is noted in ``sys.excepthook``, so that the other ranks are
told at once instead of waiting for a deadline. A forked child needs nothing from here: a session knows its process.
"""
from __future__ import annotations

import atexit
import inspect
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from traceback import FrameSummary, StackSummary, TracebackException, extract_tb
from types import TracebackType

from ..base.end_reports import report
from ..launch.daemons import Daemons
from ..orchestration.errors import BpsError, PeerLostError, ProtocolError


class ExitWatch:
    """Calls *shutdown* at exit and notes the exception that ends the program; `close` also closes *started*, the
    daemons of this process. *brief*: as after `shorten_tracebacks`.
    """

    def __init__(self, shutdown: Callable[[], None], started: Daemons, brief: bool = False) -> None:
        self.failure: str | None = None  # the exception that ends the program
        self.daemons = started
        self.brief = brief
        self._shutdown = shutdown
        _hook.watch(self)
        atexit.register(shutdown)

    @property
    def holds_daemons(self) -> bool:
        """Whether this process started the node or the scheduler."""
        return self.daemons.node is not None or self.daemons.scheduler is not None

    def close(self, detaches: bool = False) -> None:
        """Undo what the constructor did. If another hook was chained onto ours, that chain stays whole.

        *detaches*: do not wait for the daemons here. They end with their job, which other ranks may not have left yet;
        the end of the program waits for that.
        """
        _hook.forget(self)
        atexit.unregister(self._shutdown)
        if detaches:
            _detach(self.daemons)
        else:
            self.daemons.close()


def shorten_tracebacks() -> None:
    """Shorten the tracebacks of this program, under a launcher that shows the output of all ranks.

    A program that ends because a peer ended prints one line, so that the peer's traceback is easy to find. An error
    that bpsfast raises on purpose is printed with the program's own calls only. ``log_level=DEBUG`` prints everything.
    """
    _hook.shorten_tracebacks()


class _Hook:
    """The ``sys.excepthook`` of all exit watches, while there are some, or for good after `shorten_tracebacks`."""

    def __init__(self) -> None:
        self._is_brief = False
        self._watches: list[ExitWatch] = []
        self._ours: Callable[..., None] | None = None

    def watch(self, watch: ExitWatch) -> None:
        self._install()
        self._watches.append(watch)

    def shorten_tracebacks(self) -> None:
        self._install()
        self._is_brief = True

    def forget(self, watch: ExitWatch) -> None:
        """Remove *watch*; the last one removes the hook."""
        if watch in self._watches:
            self._watches.remove(watch)
        if not self._watches and not self._is_brief and self._ours is not None and sys.excepthook is self._ours:
            sys.excepthook, self._ours = self._previous, None

    def _install(self) -> None:
        if self._watches or self._is_brief:
            return
        previous = sys.excepthook

        def note(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
            for watch in self._watches:
                watch.failure = f"{kind.__name__}: {value}"
            if _is_of_peer(value):
                report("told")
            brief = ((self._is_brief or any(watch.brief for watch in self._watches)) and previous is sys.__excepthook__
                     and not logging.getLogger("bpsfast").isEnabledFor(logging.DEBUG))
            if brief and isinstance(value, PeerLostError):
                print(f"bpsfast.{kind.__name__}: {value} ({_place_in_program(traceback)})", file=sys.stderr)
            elif brief and isinstance(value, BpsError) and not isinstance(value, ProtocolError):
                sys.stderr.write("".join(_without_ours(TracebackException(kind, value, traceback)).format()))
            else:
                previous(kind, value, traceback)

        self._ours, self._previous = note, previous
        sys.excepthook = note


_hook = _Hook()
_detached_daemons: list[tuple[int, Daemons]] = []


def _detach(started: Daemons) -> None:
    _detached_daemons[:] = [each for each in _detached_daemons if not each[1].reap()]
    if not started.reap():
        _detached_daemons.append((os.getpid(), started))


@atexit.register
def _wait_for_jobs() -> None:
    """Wait for detached daemons. Runs after the shutdowns of all watches, which register later."""
    for pid, started in _detached_daemons:
        if pid == os.getpid():
            started.wait_for_job_end()


class _Stack(StackSummary):
    """A stack without the calls within bpsfast."""

    n_left_out = 0

    def format(self, **options: bool) -> list[str]:
        """Return the lines; the last one tells how many calls are left out."""
        return [*super().format(**options),
                f"  [{self.n_left_out} calls within bpsfast: BPSFAST_LOG_LEVEL=DEBUG shows them]\n"]


def _without_ours(told: TracebackException) -> TracebackException:
    """Remove bpsfast's calls from *told* and from its causes, where calls of the program remain."""
    seen: set[int] = set()
    chain: list[TracebackException | None] = [told]
    while chain:
        each = chain.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        chain += [each.__cause__, each.__context__]
        frames = _programs_own(each.stack)
        if frames and len(frames) < len(each.stack):
            stack = _Stack(frames)
            stack.n_left_out = len(each.stack) - len(frames)
            each.stack = stack
    return told


def _programs_own(stack: StackSummary) -> list[FrameSummary]:
    """Return the frames of code that is not bpsfast's; Cython names a function of `pyx/` by its module, too."""
    orchestration = Path(inspect.getfile(BpsError)).parent  # beside the package, if that is installed as editable
    folders = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], orchestration))
    return [frame for frame in stack if not frame.filename.startswith(folders)
            and not frame.name.startswith("bpsfast.pyx.")]


def _is_of_peer(error: BaseException | None) -> bool:
    """Whether *error* is, or comes from, the loss of a peer."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, PeerLostError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _place_in_program(traceback: TracebackType | None) -> str:
    """Return file and line of the innermost call that is not bpsfast's own."""
    frames = _programs_own(extract_tb(traceback))
    return f"ended in {frames[-1].filename}, line {frames[-1].lineno}" if frames else "ended in bpsfast"
