"""Which process of a job failed first, when several have ended with an error: the others only followed.

Ends alone do not tell: who raised an exception may take seconds to end, while those that it leaves behind end at once.
So a process is no cause if it was told of another one's failure before its own end began (`end_reports`), if a daemon's
exit code says so, or, where nothing was reported, if its last output blames somebody else. Of the others it is the one
that began to end first.
"""
from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ..base import logs
from ..base.end_reports import End
from ..base.exit_codes import ABORTED
from .duplicate_output import CHAINED, TRACEBACK
from .output import Transcript
from .processes import EndReport, Kind, Process

#: What a process says that ended only because another one did: it is not the cause, whatever it says after that.
_CONSEQUENCE = re.compile(
    rb"(?:[\w.]+\.)?(?:PeerLostError: |StallError: .*: has called shutdown)|KeyboardInterrupt\b|" + logs.CONSEQUENCE)


class Failures:
    """Processes that have failed, and what they said: *errors* is the error output of each."""

    def __init__(self, errors: Mapping[Process, Transcript]) -> None:
        self._errors = errors
        self._failed: list[Process] = []
        self._ends: defaultdict[Process, End] = defaultdict(End)

    def __bool__(self) -> bool:
        return bool(self._failed)

    def add(self, process: Process) -> None:
        """Note that *process* has ended otherwise than well, and not because the launcher ended it."""
        self._failed.append(process)

    def take(self, reports: Iterable[EndReport]) -> None:
        """Take what processes have reported of their ends."""
        for process, word, time_s in reports:
            self._ends[process].take(word, time_s)

    def follows(self, process: Process) -> bool:
        """Whether the failure of *process* follows from another one's."""
        if process.command.kind is not Kind.RANK and process.code == ABORTED:
            return True
        return self._ends[process].follows or any(
            _CONSEQUENCE.match(line) for line in traceback_of(self._errors[process].tail))

    def first(self) -> tuple[Process | None, bool]:
        """Return the process that failed first, and whether it is the cause: False if all have followed from others.

        A daemon that exits in silence follows an abort, too; it is the cause only if nothing else is.
        """
        in_order = sorted(self._failed, key=lambda process: self._ends[process].began_s(process.ended_s))
        causes = [process for process in in_order if not self.follows(process)]
        loud = [process for process in causes if process.command.kind is Kind.RANK or (process.code or 0) < 0
                or any(line.strip() for line in self._errors[process].tail)]
        found = next(iter([*loud, *causes, *in_order]), None)
        return found, bool(causes)


def traceback_of(tail: Sequence[bytes], n_lines: int = 20) -> list[bytes]:
    """Return the last traceback in *tail* (with the exceptions it came from), else its last lines."""
    lines = list(tail)
    starts = [i for i, line in enumerate(lines) if line.startswith(TRACEBACK)]
    if not starts:
        return lines[-n_lines:]
    first = starts[-1]
    for start in reversed(starts[:-1]):
        if not any(line.rstrip().endswith(CHAINED) for line in lines[start:first]):
            break
        first = start
    return lines[first:]
