"""How long one wait goes on: when it asks who is missing, when it warns, when it gives up."""
from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from ..base.end_reports import report
from ..orchestration.errors import StallError
from ..orchestration.messages import StallAnswer
from .stall_inspector import StallInspector, Subject
from .stall_query import DOUBT_S, StallQuery


class StallTimer:
    """One wait of the rank that is called *me*. A context manager, of one thread; made for every wait that sleeps.

    Parameters
    ----------
    what
        What is waited for, as errors say it ("for all ranks to declare 'x'"); "": the subject of the last answer.
    spent_s
        How long the wait has lasted already.
    """

    __slots__ = ("_begin", "_deadline", "_doubt", "_inquiry", "_inspector", "_me", "_stalled", "_timeout_s", "_warn",
                 "_what", "succeeded")

    def __init__(self, me: str, timeout_s: float, inquiry: StallQuery, inspector: StallInspector, what: str = "",
                 spent_s: float = 0.0) -> None:
        self._begin = time.monotonic() - spent_s
        self._me, self._what, self._timeout_s = me, what, timeout_s
        self._deadline, self._doubt = self._begin + timeout_s, self._begin + DOUBT_S
        self._warn = inspector.due(self._begin)
        self._inquiry = inquiry
        self._inspector = inspector
        self._stalled: Subject | None = None
        #: Whether the wait ended well; else, as with an exception, no warning is followed by "goes on".
        self.succeeded = True

    @property
    def rest_s(self) -> float:
        """Seconds until `look` may have something to do."""
        return max(0.0, min(self._doubt, self._deadline, self._warn) - time.monotonic())

    def look(self, ask: Callable[[], tuple[Subject, StallAnswer]], is_there: Callable[[], bool]) -> None:
        """Ask who is missing if it is time to; warn; give up. Nothing of that if it *is_there* once there is an answer.

        Raises
        ------
        StallError
            If time is up, or who is missing has left and will not come.
        """
        now = time.monotonic()
        late = now >= self._deadline
        if late or now >= self._warn or (now >= self._doubt and self._inquiry.has_departures()):
            subject, answer = ask()
            if is_there():
                return
            if late or answer.hopeless:
                if not late:  # somebody has left too early, and is to blame
                    report("told")
                waited_s = self._timeout_s if late else now - self._begin
                raise StallError(f"{self._me} waited {waited_s:.3g} s {self._what or f'for {subject.describe()}'}: "
                                 f"{answer.missing}")
            if now >= self._warn:
                self._stalled, self._warn = subject, self._inspector.tell(subject, answer, self._begin)
        self._doubt = max(self._doubt, now + DOUBT_S)

    def __enter__(self) -> StallTimer:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self._stalled is not None:
            self._inspector.end(self._stalled, went_on=kind is None and self.succeeded)
