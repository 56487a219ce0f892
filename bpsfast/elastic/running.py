"""`run`: call the user's training function again and again, in one job after another, until it has returned everywhere.

    what ends a call of train(state)        what follows
    it returns, on all ranks                the end
    a worker is lost (`PeerLostError`)      restore the last commit; the next job; sync; again
    workers join (`WorkersJoined`)          the next job; sync; again
    anything else                           is raised: it is the program's own, and ends the job for all
"""
from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from ..orchestration.errors import PeerLostError
from ..trainer import process
from .coordinator_client import CoordinatorClient, TrainingOver, current_client
from .training import State, WorkersJoined as WorkersJoined

_log = logging.getLogger("bpsfast.elastic")
_Result = TypeVar("_Result")


def run(train: Callable[..., _Result]) -> Callable[..., _Result]:
    """Return *train*, whose first argument is a `State`, as a function that survives lost and added workers.

    It joins a job if `bpsfast.init` was not called, gives all ranks one state (`State.sync`) and calls *train*. When
    *train* ends because a worker was lost, the state goes back to the last commit, the survivors form the next job (as
    the policy of ``bpsfast run --lost-worker`` says), `State.on_reset` is called, and *train* is called again: it has
    to go on from what is in the state. It returns once *train* has returned on all ranks.

    Before the first call, and outside of *train*, nothing may be called that waits for other ranks: a worker that is
    started for a lost one runs the same program, and would do so alone.

    Outside of `bpsfast run --elastic` (under torchrun, which starts all ranks anew) *train* is called once, and
    errors are raised.

    Raises
    ------
    PeerLostError, StallError
        No next job can be formed; the text says who is missing, or "no quorum".
    TrainingOver
        The training has ended meanwhile, without this worker: a SystemExit, of code 0. Also from `bpsfast.init`.
    """
    @functools.wraps(train)
    def wrapped(state: State, *args: Any, **kwargs: Any) -> _Result:
        if process.session() is None:
            process.init()
        member = current_client()
        if member is None:
            state.sync()
            return train(state, *args, **kwargs)
        return _in_jobs(member, state, lambda: train(state, *args, **kwargs))

    return wrapped


def _in_jobs(member: CoordinatorClient, state: State, train: Callable[[], _Result]) -> _Result:
    is_further = False
    while True:
        returned: list[_Result] = []
        reason = ""
        try:
            if is_further:
                state.on_reset()
            state.sync()
            member.has_state = True
            returned = [train()]
            process.barrier()  # nobody is gone while others may still have to go back to a commit
        except WorkersJoined:
            process.shutdown()
        except Exception as exc:
            lost = peer_loss_of(exc)
            if lost is None or member.lost_worker == "abort":
                raise
            reason, lost = str(lost), None  # its traceback holds what belongs to the job that is left
            _log.warning("back to the last commit, for the job has lost somebody: %s", reason)
            process.abandon(reason)
            if not returned:  # else this may have been the end, and what it has led to is the result
                state.restore()
        else:
            member.done()
            return returned[0]
        try:
            member.join(state.n_commits, reason)
        except TrainingOver as over:
            if returned:  # another rank knows already that all have come to the end
                return returned[0]
            _log.warning("%s", over)
            raise
        if returned:
            state.restore()
        is_further = True


def peer_loss_of(exc: BaseException) -> PeerLostError | None:
    """Return the `PeerLostError` that *exc* is, or was raised from; None if it is of another kind."""
    found: BaseException | None = exc
    while found is not None and not isinstance(found, PeerLostError):
        found = found.__cause__
    return found
