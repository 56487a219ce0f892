"""SIGTERM and SIGINT as a call instead of a death: a daemon that is stopped says goodbye."""
from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType


class StopSignals:
    """While entered, SIGTERM and SIGINT call *handler* with the signal's name. Does nothing outside the main thread.

    The handler runs between two bytecodes of the main thread: it should only note what happened.
    """

    def __init__(self, handler: Callable[[str], None]) -> None:
        self._handler = handler
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self._handler(signal.Signals(number).name)
