"""`elastic.run` calls a training function again in a new job when workers are lost or join; it restores a `State`.

    how a call of train(state) ends         what follows
    it returns on all ranks                 the end
    a worker is lost (`PeerLostError`)      restore the last commit; join the next job; sync; call again
    a worker hangs (`StallError`)           the same
    workers join, or leave with their host  join the next job; sync; call again
      (`WorkersJoined`)
    any other exception                     it is raised; the others lose this worker
"""
from __future__ import annotations

import contextlib
import copy
import functools
import logging
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..orchestration.errors import BpsError, PeerLostError, StallError
from ..trainer import process
from ..trainer.broadcaster import broadcast_bytes
from ..trainer.handle import push_pull
from . import drift
from .coordinator_client import CoordinatorClient, TrainingOver, WorkerDismissed, current_client


class WorkersJoined(Exception):
    """Raised by `State.commit` for `run`: workers wait to join, or are to leave as their host is taken away, and all
    ranks have agreed to form the next job now.
    """


class State(ABC):
    """The state of a training: committed, restored, and shared with all ranks. Used by the training thread only.

    Use `ObjectState` or `bpsfast.elastic.TorchState`, or derive from this class and define three methods; `__init__`
    calls the base class's. The names differ from those of Horovod's states, because there `sync` shares the values of
    rank 0, which may be a new worker without any here:

        Horovod     here
        save        keep      `save` calls it, and counts the commit
        restore     restore
        sync        give      `sync` calls it with the rank that has most commits, and calls `keep`
        reset       reset     if there is something to adapt

    A class that has ``save`` without ``keep``, or ``sync`` without ``give``, is refused with a TypeError.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for theirs, ours in (("save", "keep"), ("sync", "give")):
            if getattr(cls, theirs) is not getattr(State, theirs) and getattr(cls, ours) is getattr(State, ours):
                raise TypeError(f"{cls.__name__} defines {theirs}(), as states of Horovod do, and not {ours}(): define "
                                f"{ours}() instead, which State.{theirs}() calls (see bpsfast.elastic.State)")

    def __init__(self) -> None:
        #: Number of commits of the training. A new worker has seen only the last ones.
        self.n_commits = 0
        self._callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Call *callbacks* in each further job before its first `sync`. The number of ranks may have changed."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called when the next job was joined: call `reset`, then the callbacks."""
        self.reset()
        for callback in self._callbacks:
            callback()

    def commit(self) -> None:
        """Keep the present state, to which a loss goes back; then `check`. Between two steps, on all ranks.

        After a loss the steps since the last commit are repeated. Nothing is written to a disk.
        """
        self.save()
        self.check()

    def check(self) -> None:
        """Admit workers that wait to join, and let those go whose host is taken away. On all ranks, between two steps.

        All ranks sum how many such workers they know of, so all leave the job at the same step, or none does.

        Raises
        ------
        WorkersJoined
            There are such workers. `run` catches it; do not catch it yourself.
        """
        member = current_client()
        if member is None:
            return
        heard = np.array([member.newcomers() + member.leavers()], np.int64)
        if push_pull(heard, name="bpsfast.elastic/newcomers", average=False)[0]:
            raise WorkersJoined("workers wait to join, or are to leave: all ranks leave this job at the present step "
                                "for the next one")

    def check_host_updates(self) -> None:
        """Horovod's name of `check`."""
        self.check()

    def sync(self) -> None:
        """Share the state of the rank with most commits (the lowest such rank) with all, and keep it. On all ranks.

        Ranks with equally many commits should have the same state: what differs from the root's is logged as a warning.

        Raises
        ------
        PeerLostError
            A rank was lost meanwhile in a job that goes on without it. It may have been the only one with the state.
        """
        session = process.current()
        members = session.membership.members
        mine = self.digests() if self.n_commits else {}
        own = np.zeros((2, session.size), np.int64)
        own[:, session.rank] = self.n_commits, drift.total(mine)
        found, totals = push_pull(own, name="bpsfast.elastic/commits", average=False)
        root = int(np.argmax(found))
        n_commits = int(found[root])
        client = current_client()
        if client is not None and n_commits < client.n_commits:
            raise PeerLostError(f"a rank with {client.n_commits} commits was lost before it could share the state of "
                                f"the training; the others have {n_commits} at most")
        peers = found == n_commits
        if n_commits and len({*totals[peers].tolist()}) > 1:
            self._name_drift(mine, root, bool(peers[session.rank]))
        self.give(root)
        if session.membership.members != members:
            raise PeerLostError(f"rank {', '.join(str(rank) for rank in members if rank not in process.members())} was "
                                "lost while the state of the training was shared: it is shared again in the next job")
        self.n_commits = max(1, n_commits)  # even without a commit more than a newcomer's
        self.keep()

    def digests(self) -> dict[str, bytes]:
        """Return digests, by name, of what was kept last and is the same on all ranks; {}: none is known."""
        return {}

    def _name_drift(self, mine: dict[str, bytes], root: int, is_peer: bool) -> None:
        """Log what differs here from rank *root*'s state, which all ranks get; *is_peer*: with as many commits."""
        rank = process.rank()
        theirs = pickle.loads(broadcast_bytes(pickle.dumps(mine) if rank == root else None, root, "elastic digests"))
        names = drift.different(mine, theirs) if is_peer else []
        if names:
            more = f" and {len(names) - drift.MOST_NAMED} more" if len(names) > drift.MOST_NAMED else ""
            _log.warning("drift: after %d commits rank %d has other values than rank %d in %s%s; all ranks go on with "
                         "rank %d's. What each rank computes from its own data, such as the statistics of batch "
                         "normalization, has to be averaged, or left out of the state", self.n_commits, rank, root,
                         ", ".join(names[:drift.MOST_NAMED]), more, root)

    def reset(self) -> None:  # noqa: B027 (most states have nothing to do)
        """Adapt to the job that was joined, whose size may differ."""

    def save(self) -> None:
        """Keep the present state as a commit, without admitting workers. Between two steps, on all ranks."""
        self.keep()
        self.n_commits += 1

    @abstractmethod
    def keep(self) -> None:
        """Keep a copy of the present state for `restore`. `save` and `sync` call it."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to the copy that was kept last."""

    @abstractmethod
    def give(self, root: int) -> None:
        """Give all ranks the state of rank *root*. Called on all ranks; a loss may interrupt it anywhere."""


class AttributeState(State):
    """Keyword arguments as attributes, of which `_keep` keeps deep copies."""

    def __init__(self, **objects: Any) -> None:
        super().__init__()
        self._names = tuple(objects)
        for name, value in objects.items():
            setattr(self, name, value)
        self._saved: dict[str, Any] = {}
        self.keep()

    if TYPE_CHECKING:
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def _keep(self) -> None:
        self._saved = {name: copy.deepcopy(self._state_of(getattr(self, name))) for name in self._names}

    def _state_of(self, value: Any) -> Any:
        """Return what is kept of the attribute *value*."""
        return value

    def digests(self) -> dict[str, bytes]:
        """See `State`."""
        return drift.digests(self._saved, self._as_array)

    def _as_array(self, value: Any) -> np.ndarray[Any, Any] | None:
        """Return a tensor in what is kept as an array of NumPy; None of anything else."""
        return None


class ObjectState(AttributeState):
    """Keyword arguments as attributes: NumPy arrays, numbers and other objects that can be copied and pickled.

    Arrays keep their memory: `restore` and `sync` write into them, if shape and dtype are the same. Only these
    attributes are part of the state.

        state = ObjectState(weights=np.zeros(10), step=0)
    """

    def keep(self) -> None:
        """See `State`."""
        self._keep()

    def restore(self) -> None:
        """See `State`."""
        self._set(copy.deepcopy(self._saved))

    def give(self, root: int) -> None:
        """See `State`; everything is pickled."""
        is_root = process.rank() == root
        values = {name: getattr(self, name) for name in self._names}
        data = broadcast_bytes(pickle.dumps(values) if is_root else None, root, "elastic state")
        if not is_root:
            self._set(pickle.loads(data))

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            mine = getattr(self, name, None)
            if isinstance(mine, np.ndarray) and isinstance(value, np.ndarray) and mine.flags.writeable and (
                    (mine.shape, mine.dtype) == (value.shape, value.dtype)):
                mine[...] = value
            else:
                setattr(self, name, value)


_log = logging.getLogger("bpsfast.elastic")
_Result = TypeVar("_Result")


def _lost_ranks() -> tuple[int, ...]:
    """Return the ranks that this process's job has gone on without."""
    return tuple(sorted(process.current().membership.known_lost))


def run(train: Callable[..., _Result]) -> Callable[..., _Result]:
    """Return *train*, whose first argument is a `State`, as a function that survives lost and added workers.

    It joins a job if `bpsfast.init` was not called, gives all ranks one state (`State.sync`) and calls *train*. When
    *train* ends because a worker was lost or hangs, the state goes back to the last commit, the survivors form the next
    job (as the policy of ``bpsfast run --lost-worker`` says), `State.on_reset` is called, and *train* is called again:
    it has to go on from what is in the state. It returns once *train* has returned on all ranks.

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
    return run_in_jobs(train, lambda: None, lambda: None)


def run_in_jobs(train: Callable[..., _Result], joined: Callable[[], None],
                leaving: Callable[[], None]) -> Callable[..., _Result]:
    """As `run`, for an API that has a part of its own in each job.

    *joined* begins it, if it has not begun, once this process has joined a job; *leaving* ends it before the process
    leaves a job, which may have lost workers.
    """
    @functools.wraps(train)
    def wrapped(state: State, *args: Any, **kwargs: Any) -> _Result:
        if process.session() is None:
            process.init()
        member = current_client()
        if member is None:
            joined()
            state.sync()
            return train(state, *args, **kwargs)
        return _in_jobs(member, state, lambda: train(state, *args, **kwargs), joined, leaving)

    return wrapped


def _in_jobs(member: CoordinatorClient, state: State, train: Callable[[], _Result], joined: Callable[[], None],
             leaving: Callable[[], None]) -> _Result:
    is_further = False
    while True:
        returned: list[_Result] = []
        reason = ""
        try:
            joined()
            if is_further:
                state.on_reset()
            state.sync()
            member.has_state = True
            returned = [train()]
            process.barrier()  # no rank leaves while others may still have to go back to a commit
        except WorkersJoined:
            member.lost = _lost_ranks()
            leaving()
            process.leave()
        except Exception as exc:
            lost = loss_of(exc)
            if lost is None or member.lost_worker == "abort":
                raise
            what = "has lost a worker" if isinstance(lost, PeerLostError) else "waits for a worker in vain"
            reason, lost = str(lost), None  # its traceback refers to objects of the job that is left
            _log.warning("back to the last commit, because the job %s: %s", what, reason)
            with contextlib.suppress(BpsError):  # the job cannot be left in order any more
                leaving()
            process.abandon(reason)
            if not returned:  # else this may have been the end, and what it has led to is the result
                state.restore()
        else:
            member.lost = _lost_ranks()
            member.done()
            return returned[0]
        try:
            member.join(state.n_commits, reason)
        except TrainingOver as over:
            if returned and not isinstance(over, WorkerDismissed):  # another rank knows that all have come to the end
                return returned[0]
            _log.warning("%s", over)
            raise
        if returned:
            state.restore()
        is_further = True


def loss_of(exc: BaseException) -> PeerLostError | StallError | None:
    """Return the error of a lost worker, or of one that hangs, that *exc* is or was raised from; None if there is none.

    A worker that hangs is not known to be lost. The coordinator ends it if it does not come to the next job in time.
    """
    found: BaseException | None = exc
    while found is not None and not isinstance(found, PeerLostError | StallError):
        found = found.__cause__
    return found
