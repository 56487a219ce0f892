"""The state of a compressing hook of torch's DistributedDataParallel: its options, its buckets, who completes futures.

torch makes its buckets anew after the first iteration. What would not be sent of the first ones would be lost with
them, so a bucket is summed exactly the first time, and compressed from the second time on. A bucket whose parameters
change gets another name, and the old one is retired: what was left of it belonged to other parameters.
"""
from __future__ import annotations

import itertools
import weakref
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from ..collective.conductor import Conductor
from ..compression import formats
from ..orchestration.codec import CodecSpec
from ..orchestration.errors import ConfigError
from ..trainer import current as process, handle as operations
from ..trainer.session import Session
from .learning_rates import LearningRates
from .ops import tensor_memory

#: How long the end of a state may take; whatever it waits for has a deadline of its own.
_GOODBYE_S = 5.0
_OPTIONS = ("k", "scaled", "levels", "partition", "normalize", "error_feedback", "momentum", "seed")

_numbers = itertools.count()


class _Bucket(NamedTuple):
    """What is known of one bucket: its parameters, by identity, and how often it was made anew; 0: summed exactly."""

    parameters: tuple[int, ...]
    generation: int


class CompressionState:
    """What a model gives a hook of `bpsfast.torch.hooks`: ``model.register_comm_hook(state, topk_hook)``.

    One for each model, made in the same order on all ranks, unless they have names. May be pickled, without what the
    nodes keep of the gradients. Hooks call it from one thread at a time.

    Parameters
    ----------
    process_group
        That of the model; its ranks are those of bpsfast's job. None: the default group.
    k
        Of "topk" and "randomk": elements of a partition that are sent, below 1 their fraction.
    levels, partition, normalize, scaled, seed
        As of the functions of `bpsfast.compression`.
    error_feedback, momentum
        As there. With *momentum* the optimizer's own must be 0; where nothing is compressed (in a job of one node,
        in buckets below min_compress_bytes) there is none.
    name
        What its tensors' names begin with, on all ranks alike; None: the number of the state in this process.

    Raises
    ------
    ConfigError
        If an option is not possible.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, k: float = 0.01, scaled: bool = True,
                 levels: int = 4, partition: Literal["linear", "natural"] = "linear",
                 normalize: Literal["max", "l2"] = "max", error_feedback: bool = True, momentum: float = 0.0,
                 seed: int = 1, name: str | None = None) -> None:
        formats.randomk(k, seed=seed, error_feedback=error_feedback, momentum=momentum)
        formats.dithering(levels, partition=partition, normalize=normalize)
        formats.onebit(scaled)
        self.k, self.scaled, self.levels, self.seed = k, scaled, levels, seed
        self.partition, self.normalize = partition, normalize
        self.error_feedback, self.momentum = error_feedback, momentum
        self.process_group = process_group
        self._name = name
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        """Return the options and the name that was given: group, optimizer and buckets are this process's."""
        return {option: getattr(self, option) for option in _OPTIONS} | {"name": self._name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin anew with these options, in the default process group."""
        options = dict(state)
        self._name = options.pop("name")
        for option, value in options.items():
            setattr(self, option, value)
        self.process_group = None
        self._begin()

    def _begin(self) -> None:
        self.name = f"DDP {next(_numbers)}" if self._name is None else self._name
        self._rates: LearningRates | None = None
        self._conductor: Conductor | None = None
        self._session: weakref.ref[Session] | None = None
        self._forget()

    def _forget(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._parameters: set[int] = set()
        self._spent: list[str] = []  # names that were pushed for the last time, and are not retired yet

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Take learning rates for error feedback from the groups of *optimizer*: for a bucket that of its first
        parameter, as it is at each backward pass. Does not keep *optimizer* alive, and is not pickled.
        """
        self._rates = LearningRates(optimizer)

    def reduce(self, bucket: dist.GradBucket, codec: CodecSpec) -> torch.futures.Future[torch.Tensor]:
        """Begin to average *bucket* over all ranks, in place; return a future of its tensor. Waits for nobody.

        Raises
        ------
        ConfigError
            If the ranks of the group are not those of the job, or another model has used this state.
        ClosedError
            Without a job: see `bpsfast.init`.
        """
        session = self._present()
        parameters, index, tensor = bucket.parameters(), bucket.index(), bucket.buffer()
        known = self._known(index, tuple(map(id, parameters)))
        self._retire_spent(session)
        name, chosen = self._title(index, known), codec if known.generation else None
        if not known.generation:
            self._spent.append(name)
        rate = self._rates.of(parameters[0]) if self._rates is not None and parameters and self.error_feedback else None
        memory = tensor_memory(tensor)
        # the last bucket to come holds what the next forward pass needs first
        handle = operations.start(memory, name, True, index, memory, tensor, chosen, rate)
        if self._conductor is None:
            self._conductor = Conductor(f"bpsfast-{self.name}")
            weakref.finalize(self, self._conductor.close, _GOODBYE_S)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._conductor.run(handle.wait, partial(_complete, future, tensor), inline=False)
        # An error that Python has set is a value to the reducer's C++, which takes it for a tensor; one raised here is
        # not.
        return future.then(lambda done: done.value())

    def _present(self) -> Session:
        """Return the job's session; buckets of another one are forgotten."""
        session = process.current()
        if self._session is None or self._session() is not session:
            rank, size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
            if (rank, size) != (session.rank, session.size):
                raise ConfigError(f"this process is rank {rank} of {size} in the model's process group, and rank "
                                  f"{session.rank} of {session.size} in bpsfast's job: compressing hooks average over "
                                  "the job, so give the model a group of all its ranks, in their order")
            self._session = weakref.ref(session)
            self._forget()
        return session

    def _known(self, index: int, parameters: tuple[int, ...]) -> _Bucket:
        """Note that bucket *index* of these *parameters* is to be reduced; return what it is now."""
        before = self._buckets.get(index)
        if before is None:
            self._parameters.update(parameters)
            found = _Bucket(parameters, 0)
        elif not self._parameters.issuperset(parameters):
            raise ConfigError(f"bucket {index} of state {self.name!r} has parameters that its first buckets did not "
                              "have: each model needs a CompressionState of its own")
        elif before.generation and before.parameters == parameters:
            found = before
        else:
            found = _Bucket(parameters, before.generation + 1)
            if before.generation:
                self._spent.append(self._title(index, before))
        self._buckets[index] = found
        return found

    def _title(self, index: int, bucket: _Bucket) -> str:
        ending = {0: " at first", 1: ""}.get(bucket.generation, f", made {bucket.generation} times")
        return f"{self.name} bucket {index}{ending}"

    def _retire_spent(self, session: Session) -> None:
        """Give up what was pushed for the last time in an iteration before; all ranks do so at the same bucket."""
        left = []
        for name in self._spent:
            unit = session.tensors.unit_nowait(name)
            if unit is None or not unit.round or unit.in_flight:  # of this iteration, maybe not even begun
                left.append(name)
                continue
            memory = unit.staging if unit.has_staging else None
            session.retire([unit])
            if memory is not None:
                session.memory.release(memory)
        self._spent = left


def _complete(future: torch.futures.Future[torch.Tensor], tensor: torch.Tensor, error: BaseException | None) -> None:
    if error is None:
        future.set_result(tensor)
    else:
        future.set_exception(error)  # type: ignore[arg-type]  # torch's hint is wrong
