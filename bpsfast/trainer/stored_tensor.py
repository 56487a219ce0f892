"""One tensor that its owners keep (`orchestration/store.py`), on one rank: set once, then pushed to, answered from."""
from __future__ import annotations

from typing import Any

import numpy as np

from ..base.dtypes import TABLE, wire_name
from ..orchestration.errors import BusyError, ClosedError, ConfigError, MismatchError
from ..orchestration.messages import TensorSpec
from ..orchestration.store import StoreSpec, check, has_momentum
from . import process
from .tensor_input import host_input
from .unit import Unit


class StoredTensor:
    """Tensor *name* of *shape* and *dtype*, kept as *spec* says. One thread at a time.

    Declares it, and returns at once. The first calls are `start_seed` and `seed`, on all ranks; from then on a rank
    pushes, waits for the answer, and so on. The owners keep it until all ranks have retired it, or the job ends.

    Parameters
    ----------
    average
        Divide what is pushed by the number of ranks that push together.
    priority
        As `push_pull`.

    Raises
    ------
    ConfigError
        If *spec* is not possible.
    BusyError
        If the name is in use.
    """

    def __init__(self, name: str, shape: tuple[int, ...], dtype: Any, spec: StoreSpec, *, average: bool = False,
                 priority: int | None = None) -> None:
        check(spec)
        self._session = process.current()
        self.name, self.shape, self.dtype = name, tuple(shape), TABLE[wire_name(dtype)].numpy
        self._has_momentum = has_momentum(spec)
        self._found: Unit | None = None
        self._is_retired = False
        self._source: object = None  # what was pushed from shared memory must live until the answer
        declared = TensorSpec(name=name, dtype=wire_name(dtype), shape=self.shape, average=average, priority=priority,
                              store=spec)
        if self._session.tensors.knows(declared):
            raise BusyError(f"{name!r} is kept already, for somebody else in this process (another AsyncOptimizer or "
                            "AsyncWeights): give these weights other names, or close the other one first")
        self._session.tensors.declare([declared])

    @property
    def _unit(self) -> Unit:
        """The worker's unit; the first use waits until all ranks have declared the tensor. Raises `ClosedError`."""
        if self._is_retired:
            raise ClosedError(f"{self.name!r} was given up (close, or a state that was loaded): this rank has no part "
                              "in it any more")
        if self._found is None:
            self._found = self._session.tensors.unit(self.name)
        return self._found

    @property
    def in_flight(self) -> bool:
        """Whether a push was not waited for."""
        return self._found is not None and self._found.in_flight

    @property
    def place(self) -> np.ndarray[Any, Any]:
        """This rank's input memory: what is written here between a `wait` and a `push_place` travels without a copy."""
        return self._unit.staging.array[: self._unit.nbytes].view(self.dtype).reshape(self.shape)

    def start_seed(self, weights: Any, root_rank: int) -> None:
        """Begin to set the weights to rank *root_rank*'s; those of other ranks are not looked at.

        Raises
        ------
        ConfigError
            If there is no rank *root_rank*.
        """
        if not 0 <= root_rank < self._session.size:
            raise ConfigError(f"root_rank={root_rank}, but the job has ranks 0 to {self._session.size - 1}")
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

        Raises
        ------
        MismatchError
            If it is something else; nothing was pushed.
        BusyError
            If the last push was not waited for.
        """
        source = host_input(values)
        if source.nbytes != self._unit.nbytes or TABLE[source.dtype].numpy != self.dtype:
            raise MismatchError(f"{self.name!r} is kept as {self.shape} of {self.dtype}; {source.shape} of "
                                f"{source.dtype} was pushed")
        self._unit.push(source.address, source.nbytes)
        self._source = values

    def push_place(self) -> None:
        """Push what was written into `place`; raises `BusyError` as `push`."""
        self._unit.push_staging()

    def push_nothing(self) -> None:
        """Take part in a round without a contribution; raises `BusyError` as `push`."""
        self._unit.push_empty()

    def wait(self, timeout_s: float | None = None) -> np.ndarray[Any, Any]:
        """Wait for the answer to the last push: a read-only array, valid until the second next push.

        It is the weights, as they were when the answer was copied.

        Raises
        ------
        StallError, PeerLostError
            As `push_pull`; a worker that keeps the answer back is named.
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
        """Wait for the last answer and give the tensor up: other workers no longer wait for this one. Idempotent.

        Its name may be declared again; arrays of `wait` and `place` must not be used any more.
        """
        self._is_retired = True
        if self._found is None:
            return
        unit, self._found = self._found, None
        if unit.in_flight:
            unit.wait(unit.round, self._session.settings.timeout_s)
        staging = unit.staging if unit.has_staging else None
        self._session.retire([unit])
        if staging is not None:
            self._session.memory.release(staging)
