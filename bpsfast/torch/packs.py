"""Packs of parameters: what of a model is one tensor of the job, whatever buckets torch brings its gradients in.

torch makes its buckets anew after the first iteration, and may make others in a job that goes on from a saved state.
Error feedback belongs to certain elements, so what is compressed must stay together whatever torch does. Parameters
are put into packs when they come for the first time, and stay there; a pack is pushed as soon as the last of its
gradients has come, in whichever bucket, and its sum goes back to where each came from.
"""
from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..collectives.serial_executor import SerialExecutor
from ..compression.choice import chosen
from ..orchestration.codec import CodecSpec
from ..orchestration.errors import BusyError, ConfigError, MismatchError
from ..orchestration.messages import TensorSpec
from ..pyx.port import copy
from ..trainer.session import Session
from ..trainer.tensor_input import TensorInput
from ..trainer.unit import Unit


class Gradient(NamedTuple):
    """One parameter's part of a bucket: whose it is, how many elements, and where they begin in the bucket."""

    parameter: torch.Tensor
    n_elements: int
    offset: int


class BucketCompletion:
    """One bucket of one backward pass, whose sums are on their way: where they go, and the future that waits."""

    def __init__(self, memory: TensorInput, tensor: torch.Tensor, n_missing: int) -> None:
        self.address = memory.address
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._tensor = tensor  # what the address is of
        self._n_missing = n_missing
        self._is_over = False
        self._lock = threading.Lock()

    def landed(self, error: BaseException | None) -> None:
        """Note that one more sum is there, or *error*. Completes the future with the last sum or the first error."""
        with self._lock:
            self._n_missing -= 1
            if self._is_over or (error is None and self._n_missing):
                return
            self._is_over = True
        if error is None:
            self.future.set_result(self._tensor)
        else:
            self.future.set_exception(error)  # type: ignore[arg-type]  # torch's hint is wrong


class _Arrival(NamedTuple):
    """A gradient that waits for its pack: its bucket, and where it lies there, in bytes."""

    landing: BucketCompletion
    offset: int


class Pack:
    """Parameters whose gradients are one tensor of the job. One thread puts gradients in, another takes sums out."""

    def __init__(self, unit: Unit, dtype: str, nbytes_of: Sequence[int]) -> None:
        self.unit = unit
        self.dtype = dtype
        self.nbytes_of = nbytes_of
        self.offset_of = [sum(nbytes_of[:i]) for i in range(len(nbytes_of))]
        self._arrived: dict[int, _Arrival] = {}

    def forget(self) -> None:
        """Forget the gradients of a backward pass that did not come to its end."""
        arrived, self._arrived = self._arrived, {}
        error = BusyError(f"another backward pass began before all gradients of {self.unit.name!r} had come")
        for landing, _ in arrived.values():
            landing.landed(error)

    def put(self, place: int, landing: BucketCompletion, offset: int, timeout_s: float) -> dict[int, _Arrival] | None:
        """Copy the gradient at byte *offset* of a bucket to its *place*; return all of them if it was the last.

        Waits for the pack's last sum if a backward pass failed while it was under way; raises as `Unit.wait`.
        """
        if self.unit.in_flight:
            self.unit.wait(self.unit.round, timeout_s)
        staging = self.unit.staging  # held while it is written: another thread may close the session
        copy(staging.address + self.offset_of[place], landing.address + offset, self.nbytes_of[place])
        self._arrived[place] = _Arrival(landing, offset)
        if len(self._arrived) < len(self.nbytes_of):
            return None
        arrived, self._arrived = self._arrived, {}
        return arrived

    def deliver(self, round: int, arrived: dict[int, _Arrival], timeout_s: float) -> None:
        """Wait for the sum of *round* and copy it to where its gradients came from; raises as `Unit.wait`."""
        self.unit.wait(round, timeout_s)
        for place, (landing, offset) in arrived.items():
            self.unit.deliver(round, landing.address + offset, self.offset_of[place], self.nbytes_of[place], timeout_s)


class Packs:
    """All packs of one model in one job. All ranks bring the same gradients in the same order; one thread does."""

    def __init__(self, session: Session, name: str) -> None:
        self.session = session
        self._name = name
        self._places: dict[int, tuple[weakref.ref[torch.Tensor], Pack, int]] = {}  # by the parameter's identity
        self._last_index = -1  # of the bucket that came last
        self._indices: set[int] = set()  # of buckets that have come
        #: In the order in which they were made, which is the same on all ranks.
        self.packs: list[Pack] = []

    def make(self, index: int, gradients: Sequence[Gradient], dtype: str, itemsize: int, codec: CodecSpec) -> None:
        """Put the parameters of bucket *index* into packs, if they come for the first time, when all ranks have.

        Raises
        ------
        ConfigError
            If they are another model's.
        MismatchError
            If they came with other sizes or another dtype before, or other ranks have others.
        StallError
            If other ranks have none.
        """
        known = [each for each in gradients if self._place(each) is not None]
        for each in known:
            pack, place = self._place(each)  # type: ignore[misc]
            if (pack.dtype, pack.nbytes_of[place]) != (dtype, each.n_elements * itemsize):
                raise MismatchError(f"a parameter of {each.n_elements} elements comes as {dtype}, but came with "
                                    f"{pack.nbytes_of[place]} bytes of {pack.dtype} before: what is kept of it is of "
                                    "those; use another CompressionState")
        if index <= self._last_index:
            for pack in self.packs:
                pack.forget()
        self._last_index = index
        n_known = len(known)
        if n_known == len(gradients):
            self._indices.add(index)
            return
        if n_known or index in self._indices:
            raise ConfigError(f"bucket {index} of state {self._name!r} has parameters that its first buckets did not "
                              "have: each model needs a CompressionState of its own")
        new = _cut(gradients, self.session.settings.partition_bytes // itemsize)
        names = [f"{self._name} pack {len(self.packs) + i}" for i in range(len(new))]
        shapes = [(sum(each.n_elements for each in pack),) for pack in new]
        least = self.session.settings.min_compress_bytes
        # at once: in which order they come decides who owns them, and what owners keep is saved
        self.session.tensors.declare([
            TensorSpec(name=name, dtype=dtype, shape=shape, average=True, priority=len(self.packs) + i,
                       codec=chosen(codec, name, shape, dtype, least, is_alone=True))
            for i, (name, shape) in enumerate(zip(names, shapes, strict=True))])
        made = [Pack(self.session.tensors.unit(name), dtype, [each.n_elements * itemsize for each in pack])
                for name, pack in zip(names, new, strict=True)]
        self._places.update({id(each.parameter): (weakref.ref(each.parameter), to, place)
                             for to, pack in zip(made, new, strict=True) for place, each in enumerate(pack)})
        self.packs += made
        self._indices.add(index)

    def _place(self, gradient: Gradient) -> tuple[Pack, int] | None:
        """Return where a gradient belongs; None: its parameter is new."""
        found = self._places.get(id(gradient.parameter))
        return found[1:] if found is not None and found[0]() is gradient.parameter else None

    def push(self, gradients: Sequence[Gradient], itemsize: int, rates: Sequence[float | None], landing: BucketCompletion,
             conductor: SerialExecutor) -> None:
        """Put the *gradients* of a bucket into their packs and push those that are whole; *conductor* waits for them.

        A pack's learning rate is that of its first parameter, of *rates*; None: as before.
        """
        timeout_s = self.session.settings.timeout_s
        for each, rate in zip(gradients, rates, strict=True):
            found = self._place(each)
            assert found is not None, "make comes first"
            pack, place = found
            if place == 0 and rate is not None:
                pack.unit.learning_rate = rate
            arrived = pack.put(place, landing, each.offset * itemsize, timeout_s)
            if arrived is not None:
                round = pack.unit.push()
                conductor.run(partial(pack.deliver, round, arrived, timeout_s), partial(_landed, arrived), inline=False)


def _cut(gradients: Sequence[Gradient], most_elements: int) -> list[list[Gradient]]:
    """Cut a bucket into packs of at most so many elements, or of one parameter; those of the end of the bucket first.

    They are the ones that the next forward pass needs last, so later packs are the more urgent.
    """
    packs: list[list[Gradient]] = []
    n_elements = 0
    for each in reversed(gradients):
        if not packs or n_elements + each.n_elements > most_elements:
            packs.append([])
            n_elements = 0
        packs[-1].append(each)
        n_elements += each.n_elements
    return packs


def _landed(arrived: dict[int, _Arrival], error: BaseException | None) -> None:
    for landing, _ in arrived.values():
        landing.landed(error)


def gradients_of(bucket: Any) -> list[Gradient]:
    """Return what *bucket*, a `torch.distributed.GradBucket`, has of each parameter."""
    start = bucket.buffer().storage_offset()
    return [Gradient(parameter, gradient.numel(), gradient.storage_offset() - start)
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)]
