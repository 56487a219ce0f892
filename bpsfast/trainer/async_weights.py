"""Asynchronous training (BytePS, OSDI'20, section 4.4): owners keep the weights, workers push their changes.

    weights = bpsfast.AsyncWeights({"layer 1": w1, "layer 2": w2}, staleness=3)
    w1 = weights["layer 1"].copy()
    each step:  w1[...] = weights.push_pull("layer 1", change)        the newest, with all changes so far
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..base.dtypes import TABLE, wire_name
from ..orchestration.errors import BusyError, ClosedError, ConfigError, MismatchError
from ..orchestration.messages import TensorSpec
from ..orchestration.store import StoreSpec, Worker, check, has_momentum
from . import process
from .broadcaster import check_root
from .session import Session
from .tensor_input import host_input
from .unit import Unit


class AsyncWeights:
    """Weights by name, kept by their owners and changed by all workers at their own pace. One thread at a time.

    The constructor waits until all ranks have called it. The weights start with those of rank *root_rank*; of other
    ranks' only the shapes count. A rank that has closed it or shut down is not waited for.

    Parameters
    ----------
    weights
        Name -> array (or what `push_pull` takes) of floats, the same names and shapes on all ranks, in forward order.
        Halves are kept as float32.
    worker
        What counts as a worker: each "node", which adds up the changes of its ranks first, or each "rank".
    staleness
        An answer waits until it contains the changes of all other workers up to this many rounds before; 0: those of
        the same round, and maybe the next one of a faster worker. None: an answer never waits.
    backups
        Workers step together, but a step does not wait for this many of them (backup workers, Chen et al., 2016). The
        weights move by the mean of the first changes that were computed on the newest version; a worker's change is the
        mean of its ranks'. A later change is dropped: its worker gets the newest weights and is counted as late
        (`stats(job=True)`; the node's counter `engine_left_out`). Decided for each partition. 0: a step waits for all
        workers. None: there are no common steps.
    prefix
        Prefix of each name in the job.

    Raises
    ------
    ConfigError
        If an argument is not possible.
    BusyError
        If weights with these names are in use.
    StallError
        If a rank does not call it in time.
    """

    def __init__(self, weights: Mapping[str, Any], *, worker: Worker = "node", staleness: int | None = None,
                 backups: int | None = None, root_rank: int = 0, prefix: str = "AsyncParam.") -> None:
        if staleness is not None and (not isinstance(staleness, int) or staleness < 0):
            raise ConfigError(f"staleness={staleness!r}: expected a number of rounds, or None for no bound")
        self._session = process.current()
        self._spec = StoreSpec(worker=worker, staleness=-1 if staleness is None else staleness,
                               backups=_checked(backups, worker, self._session))
        check(self._spec)
        self._root = root_rank
        self._prefix = prefix
        self._kinds = _kinds_of(weights)
        self._stored = self._declare()
        self._views: dict[str, np.ndarray[Any, Any]] = {}
        self._seed(weights)

    def _declare(self) -> dict[str, StoredTensor]:
        return {name: StoredTensor(self._prefix + name, shape, dtype, self._spec, average=self._spec.backups >= 0,
                                   priority=-position)
                for position, (name, (shape, dtype)) in enumerate(self._kinds.items())}

    def _seed(self, weights: Mapping[str, Any]) -> None:
        for name, stored in self._stored.items():
            stored.start_seed(weights[name], self._root)
        for name, stored in self._stored.items():
            self._views[name] = stored.seed(None, self._root)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        """Return the last answer for *name*: a read-only array, valid until the second next push of *name*."""
        stored = self._of(name)
        if name not in self._views:
            raise ClosedError(f"weights {stored.name!r} were closed: copy what you need before that")
        return self._views[name]

    def push(self, name: str, change: Any) -> None:
        """Begin to add *change* to the weights; do not write it before `pull`. Each rank of a worker must push.

        Raises
        ------
        MismatchError
            If there is no such name, or the change is of another dtype or size.
        BusyError
            If the last push of *name* was not pulled.
        """
        self._of(name).push(change)

    def pull(self, name: str, timeout_s: float | None = None) -> np.ndarray[Any, Any]:
        """Return the newest weights, which contain the last push of *name*, if any. Lifetime as of `[name]`.

        Raises
        ------
        StallError
            After *timeout_s* seconds, naming the workers that are too far behind.
        PeerLostError
            As `push_pull`.
        """
        stored = self._of(name)
        if not stored.in_flight:
            stored.push_nothing()
        self._views[name] = stored.wait(timeout_s)
        return self._views[name]

    def push_pull(self, name: str, change: Any, timeout_s: float | None = None) -> np.ndarray[Any, Any]:
        """Add *change* to the weights and return the newest ones. As `push` and `pull`."""
        self.push(name, change)
        return self.pull(name, timeout_s)

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return copies of all weights, the same on all ranks, which call this together after equally many pushes.

        Halves are returned in their own precision, not in float32.
        """
        for name, stored in self._stored.items():
            if stored.in_flight:
                self.pull(name)
        self._session.barrier()
        for stored in self._stored.values():
            stored.push_nothing()
        found = {name: self.pull(name).copy() for name in self._stored}
        self._session.barrier()  # before any rank pushes again
        return found

    def load(self, state: Mapping[str, Any]) -> None:
        """Set the weights to the root's *state*, on all ranks together.

        Raises
        ------
        MismatchError
            If *state* is of other weights; nothing has changed.
        """
        self.check(state)
        self.close()
        self._stored = self._declare()
        self._seed(state)

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise `MismatchError` if *state* is of other weights."""
        kinds = _kinds_of(state)
        if kinds != self._kinds:
            raise MismatchError(f"the saved state has weights {kinds}, here are {self._kinds}")

    def close(self) -> None:
        """Retire the weights on this rank; others no longer wait for it.

        Owners keep them until all have closed. Idempotent.
        """
        for stored in self._stored.values():
            stored.retire()
        self._views.clear()

    def _of(self, name: str) -> StoredTensor:
        if name not in self._stored:
            shown = ", ".join(list(self._stored)[:8])
            raise MismatchError(f"there are no weights {name!r}; the names are {shown}, ...")
        return self._stored[name]


def _checked(backups: int | None, worker: Worker, session: Session) -> int:
    """Return the number of backup workers, -1 for none; raises `ConfigError` if it is not possible."""
    if backups is None:
        return -1
    n_workers = session.size if worker == "rank" else session.n_nodes
    if not isinstance(backups, int) or not 0 <= backups < n_workers:
        raise ConfigError(f"backups={backups!r}, but there are {n_workers} workers (worker={worker!r}): expected "
                          "less than that, or None for no common steps")
    return backups


def _kinds_of(weights: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    inputs = {name: host_input(each) for name, each in weights.items()}
    return {name: (each.shape, each.dtype) for name, each in inputs.items()}


class StoredTensor:
    """Tensor *name* of *shape* and *dtype* that its owners keep, as *spec* says. One thread at a time.

    The constructor declares it and returns at once. The first calls are `start_seed` and `seed`, on all ranks; then a
    rank pushes and waits for the answer in turn. The owners keep it until all ranks have retired it, or the job ends.
    *average*: divide what is pushed by the number of ranks that push together. *priority*: as `push_pull`. Raises
    `ConfigError` if *spec* is not possible. Raises `BusyError` if the name is in use.
    """

    def __init__(self, name: str, shape: tuple[int, ...], dtype: Any, spec: StoreSpec, *, average: bool = False,
                 priority: int | None = None) -> None:
        check(spec)
        self._session = process.current()
        self.name, self.shape, self.dtype = name, tuple(shape), TABLE[wire_name(dtype)].numpy
        self._has_momentum = has_momentum(spec)
        self._found: Unit | None = None
        self._is_retired = False
        self._source: object = None  # keeps pushed shared memory alive until the answer
        declared = TensorSpec(name=name, dtype=wire_name(dtype), shape=self.shape, average=average, priority=priority,
                              store=spec)
        if self._session.tensors.knows(declared):
            raise BusyError(f"{name!r} is in use in this process (by another AsyncOptimizer or AsyncWeights): give "
                            "these weights other names, or close the other one first")
        self._session.tensors.declare([declared])

    @property
    def _unit(self) -> Unit:
        """The worker's unit; the first use waits until all ranks have declared the tensor. Raises `ClosedError`."""
        if self._is_retired:
            raise ClosedError(f"{self.name!r} was retired on this rank, by close() or by loading a state")
        if self._found is None:
            self._found = self._session.tensors.unit(self.name)
        return self._found

    @property
    def in_flight(self) -> bool:
        """Whether a push was not waited for yet."""
        return self._found is not None and self._found.in_flight

    @property
    def input(self) -> np.ndarray[Any, Any]:
        """This rank's input memory: what is written here between `wait` and `push_input` is sent without a copy."""
        return self._unit.staging.array[: self._unit.nbytes].view(self.dtype).reshape(self.shape)

    def start_seed(self, weights: Any, root_rank: int) -> None:
        """Begin to set the weights to rank *root_rank*'s, ignoring others'. `ConfigError`: there is no such rank."""
        check_root(self._session, root_rank)
        self._give(weights if self._session.rank == root_rank else None)

    def seed(self, momentum: Any, root_rank: int) -> np.ndarray[Any, Any]:
        """Wait for the weights; set the momentum, if one is kept, to rank *root_rank*'s (None: zeros). As `wait`."""
        weights = self.wait()
        if not self._has_momentum:
            return weights
        self._give(momentum if self._session.rank == root_rank else None)
        return self.wait()

    def _give(self, values: Any) -> None:
        if values is None:
            self.push_nothing()
        else:
            self.push(values)

    def push(self, values: Any) -> None:
        """Push *values*: anything that `push_pull` takes, of the tensor's dtype and number of elements.

        Raises `MismatchError` if it is something else; nothing was pushed. Raises `BusyError` if the last push was not
        waited for.
        """
        source = host_input(values)
        if source.nbytes != self._unit.nbytes or TABLE[source.dtype].numpy != self.dtype:
            raise MismatchError(f"{self.name!r} is kept as {self.shape} of {self.dtype}; {source.shape} of "
                                f"{source.dtype} was pushed")
        self._unit.push(source.address, source.nbytes)
        self._source = values

    def push_input(self) -> None:
        """Push what was written into `input`; raises `BusyError` as `push`."""
        self._unit.push()

    def push_nothing(self) -> None:
        """Take part in a round without a contribution; raises `BusyError` as `push`."""
        self._unit.push_nothing()

    def wait(self, timeout_s: float | None = None) -> np.ndarray[Any, Any]:
        """Wait for the answer to the last push: the weights, a read-only array that is valid until the second next
        push.

        Raises `StallError` or `PeerLostError` as `push_pull`; the text names the worker that the answer waits for.
        """
        unit = self._unit
        unit.wait(unit.round, self._session.settings.timeout_s if timeout_s is None else timeout_s)
        self._source = None
        member = unit.members[self.name]
        return unit.member_view(member, unit.round)

    def momentum(self) -> np.ndarray[Any, Any]:
        """Return the momentum, on all ranks together, of a tensor that has one. As `wait`."""
        self.push_nothing()
        return self.wait()

    def retire(self) -> None:
        """Wait for the last answer and retire the tensor: other workers no longer wait for this one. Idempotent.

        Its name may be declared again; arrays of `wait` and `input` must not be used any more.
        """
        self._is_retired = True
        if self._found is None:
            return
        unit, self._found = self._found, None
        if unit.in_flight:
            unit.wait(unit.round, self._session.settings.timeout_s)
        self._session.retire([unit], releases_staging=True)
