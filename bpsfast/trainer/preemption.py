"""Preemption: SIGTERM to any rank, or to the launcher, ends the training of all ranks after the same step.

Every call of `preempted` sums over all ranks whether one has got the signal, and returns what the sum of the call
before says. In a step that waits for all ranks itself, that sum is complete, and the call does not wait. All ranks get
the same sums, so all of them leave at the same call, and nothing else has to be agreed.
"""
from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

import numpy as np

from ..base import hooks
from ..orchestration.errors import UnsupportedError
from . import handle, process
from .session import Session

_NAME = "bpsfast preempted"


def preempted() -> bool:
    """Return whether the training is to end now: a rank, or the launcher, was told to end by SIGTERM.

    All ranks call it once a step, at the same place, and get True at the same call, which follows the signal by a step
    in jobs of several ranks; then the program saves what it needs and returns::

        for batch in batches:
            train(batch)
            if bpsfast.preempted():
                save()
                break

    From the first call on, SIGTERM does not end this process while it is in a job, nor once it has come; it still ends
    processes that this one forks. A handler of Python that the program had set is called as well. `bpsfast run` gives
    the ranks ``--grace`` seconds to end, and sends the signal to the process that it started for each rank, not to
    children of that: the command must become the program (``exec python train.py`` in a shell). Under torchrun, which
    sends it to all processes of a rank, the workers of data loaders end at once.

    Make the first call in the main thread, and never two at once. Costs a push_pull of four bytes in the background.
    Asynchronous training is held together by it: no rank gets further ahead than a call.

    Raises
    ------
    UnsupportedError
        If the first call is not made in the main thread, where alone Python sets signal handlers.
    ClosedError, StallError, PeerLostError
        As `push_pull`: another rank does not call it, or is lost.
    """
    return process.current().extension(Preemption).step()


class SigtermNotice:
    """Notes that this process has got SIGTERM, instead of ending by it, from `install` on.

    *is_wanted* returns whether the process is in a job: otherwise it ends, as before.
    """

    def __init__(self, is_wanted: Any) -> None:
        self.has_come = False
        self._is_wanted = is_wanted
        self._before: Any = None
        self._pid = 0

    def install(self) -> None:
        """Set the handler, once. Raises `UnsupportedError` outside the main thread."""
        if self._pid == os.getpid():
            return
        if threading.current_thread() is not threading.main_thread():
            raise UnsupportedError("the first call of bpsfast.preempted() is made in thread "
                                   f"{threading.current_thread().name!r}: make it in the main thread, where alone "
                                   "Python sets signal handlers")
        self._pid, self._before = os.getpid(), signal.signal(signal.SIGTERM, self._note)

    def leave(self) -> None:
        """Set the earlier handler again, unless the program has set another one since: in a fork, for example."""
        self._pid = 0
        if signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.has_come and not self._is_wanted():
            self.leave()
            os.kill(os.getpid(), number)
            return
        self.has_come = True
        if callable(self._before):
            self._before(number, frame)


def _is_in_job() -> bool:
    """Whether this process is in a job, or between two of an elastic program."""
    return process.session() is not None or hooks.current_elastic_client() is not None


_notice = SigtermNotice(_is_in_job)
os.register_at_fork(after_in_child=_notice.leave)


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
