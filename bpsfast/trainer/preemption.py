"""Preemption: SIGTERM to any rank, or to the launcher, ends the training of all ranks after the same step.

Every call of `preempted` sums over all ranks whether one has got the signal, and returns what the sum of the call
before says: that one is complete, because all ranks have begun this step, so no call waits for the network. All ranks
get the same sums, so all of them leave at the same call, and nothing else has to be agreed.
"""
from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

import numpy as np

from ..orchestration.errors import UnsupportedError
from . import handle, process
from .session import Session

_NAME = "bpsfast preempted"


def preempted() -> bool:
    """Return whether the training is to end now: a rank, or the launcher, was told to end by SIGTERM.

    All ranks call it once a step, at the same place, and get True at the same call, one step after the signal at the
    earliest; then the program saves what it needs and returns::

        for batch in batches:
            train(batch)
            if bpsfast.preempted():
                save()
                break

    From the first call until `bpsfast.shutdown` SIGTERM does not end this process, but its forks as before; a handler
    that the program had set is called as well. `bpsfast run` gives the ranks ``--grace`` seconds to end.

    Main thread, at the first call; no other one at a time. Costs one push_pull of four bytes in the background.

    Raises
    ------
    UnsupportedError
        If the first call is not made in the main thread, where alone Python sets signal handlers.
    ClosedError, StallError, PeerLostError
        See there: other ranks have made fewer calls, or are lost.
    """
    return process.current().extension(Preemption).step()


class SigtermNotice:
    """Notes that this process has got SIGTERM, instead of ending by it, from `install` until `restore`.

    Raises `UnsupportedError` outside the main thread.
    """

    def __init__(self) -> None:
        self.has_come = False
        self._before: Any = None
        self._pid = 0

    def install(self) -> None:
        """Set the handler. Nothing if it is set."""
        if self._pid == os.getpid():
            return
        if threading.current_thread() is not threading.main_thread():
            raise UnsupportedError("the first call of bpsfast.preempted() is made in thread "
                                   f"{threading.current_thread().name!r}: make it in the main thread, where alone "
                                   "Python sets signal handlers")
        self._pid, self._before = os.getpid(), signal.signal(signal.SIGTERM, self._note)

    def restore(self) -> None:
        """Set the earlier handler again, unless the signal has come, or the program has set another one since."""
        if self._pid != os.getpid() or self.has_come or threading.current_thread() is not threading.main_thread():
            return
        self._pid = 0
        if signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._before)

    def leave_to_default(self) -> None:
        """In a fork: end by SIGTERM, as processes do that others end so (the workers of a data loader)."""
        if self._pid and signal.getsignal(signal.SIGTERM) == self._note:
            self._pid = 0
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True
        if callable(self._before):
            self._before(number, frame)


_notice = SigtermNotice()
os.register_at_fork(after_in_child=_notice.leave_to_default)


class Preemption:
    """What `preempted` keeps of one session."""

    def __init__(self, session: Session) -> None:
        self._is_alone = session.size == 1
        self._is_over = False
        self._sum: handle.Handle | None = None
        _notice.install()

    def step(self) -> bool:
        """See `preempted`."""
        if self._is_over or self._is_alone:
            self._is_over |= _notice.has_come
            return self._is_over
        if self._sum is not None:
            self._is_over = bool(self._sum.wait()[0])
        if not self._is_over:
            told = np.full(1, _notice.has_come, np.float32)
            self._sum = handle.push_pull_async(told, average=False, name=_NAME, out=told)
        return self._is_over

    def close(self) -> None:
        """Let SIGTERM end this process again, if it has not come."""
        _notice.restore()
