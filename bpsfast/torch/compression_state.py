"""The state of a compressing hook of torch's DistributedDataParallel: options, packs of parameters, codec states."""
from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from ..collectives.serial_executor import SerialExecutor
from ..compression import formats
from ..compression.choice import chosen
from ..orchestration.codec import CodecSpec
from ..orchestration.errors import BusyError, ConfigError, MismatchError
from ..orchestration.messages import TensorSpec
from ..pyx.port import copy
from ..trainer import process
from ..trainer.session import Session
from ..trainer.tensor_input import TensorInput
from ..trainer.unit import Unit
from .ops import tensor_memory
from .optimizer_extras import LearningRates

#: Maximum time to close a state's thread; its jobs have deadlines of their own.
_CLOSE_TIMEOUT_S = 5.0
_OPTIONS = ("k", "scaled", "levels", "partition", "normalize", "error_feedback", "momentum", "seed")

_numbers = itertools.count()


class CompressionState:
    """What a model gives a hook of `bpsfast.torch.hooks`: ``model.register_comm_hook(state, topk_hook)``.

    One for each model, made in the same order on all ranks, unless they have names. May be pickled, without what the
    nodes keep of the gradients: `state_dict` has that. Hooks call it from one thread at a time.

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
        in packs below min_compress_bytes) there is none.
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
        """Return the options and the name that was given: group, optimizer and packs are this process's."""
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
        self._executor: SerialExecutor | None = None
        self._packs: Packs | None = None
        self._codec: CodecSpec | None = None
        self._loaded: dict[str, Any] | None = None  # and not taken over yet by all packs
        self._n_taken = 0  # of them

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Take learning rates for error feedback from the groups of *optimizer*: for a pack that of its first
        parameter, as it is at each backward pass. Does not keep *optimizer* alive, and is not pickled.
        """
        self._rates = LearningRates(optimizer)

    # -- what is kept ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank's node keeps of the gradients from step to step, to be saved with the model.

        Every node has its own, so one rank of each saves it (each rank may), and it is loaded on that node of a job of
        the same shape, settings and model. Between steps.

        Raises
        ------
        BusyError
            In the midst of a backward pass.
        """
        if self._n_taken and self._loaded is not None:
            raise BusyError(f"the state of {self.name!r} is asked for in the midst of its first backward pass, when "
                            f"{self._n_taken} of {len(self._loaded['packs'])} packs had taken over what was loaded")
        packs = self._open_packs()
        if packs is None or self._loaded is not None:
            return {"packs": list(self._loaded["packs"]), "nodes": dict(self._loaded["nodes"])} if self._loaded else {
                "packs": [], "nodes": {}}
        saved = {str(number): _kept(packs, pack) for number, pack in enumerate(packs.packs)}
        return {"packs": [pack.unit.nbytes for pack in packs.packs],
                "nodes": {number: state for number, state in saved.items() if state.numel()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned on this node; on all its ranks, before the first backward pass.

        Raises
        ------
        MismatchError
            If *state* is none, or training has begun in this job. If it is of another model, node or compression,
            the first backward pass says so.
        """
        if set(state) != {"packs", "nodes"} or not {*map(str, range(len(state["packs"])))}.issuperset(state["nodes"]):
            raise MismatchError(f"a state of {sorted(state)} is loaded, not one that CompressionState.state_dict made")
        if self._open_packs() is not None:
            raise MismatchError(f"state {self.name!r} has reduced gradients already: load into a new CompressionState, "
                                "before the first backward pass")
        self._loaded = {"packs": list(state["packs"]), "nodes": dict(state["nodes"])} if state["packs"] else None
        self._n_taken = 0

    def _open_packs(self) -> Packs | None:
        """Return the packs if they are of a job that has not ended."""
        return None if self._packs is None or self._packs.session.closed else self._packs

    def _take_over(self, packs: Packs, is_last: bool) -> None:
        """Give the nodes what was loaded of *packs*, before they are pushed for the first time.

        *is_last*: there are no more packs than these.
        """
        if self._loaded is None:
            return
        sizes, nodes = self._loaded["packs"], self._loaded["nodes"]
        found = [pack.unit.nbytes for pack in packs.packs]
        if found != sizes[:len(found)] or (is_last and len(found) != len(sizes)):
            raise MismatchError(f"the model's gradients travel in packs of {found[:8]} bytes, those of the loaded "
                                f"state in packs of {sizes[:8]}: it is of another model, or of other settings")
        for number, pack in list(enumerate(packs.packs))[self._n_taken:]:
            state = nodes.get(str(number))
            if (state is not None) != bool(_kept(packs, pack).numel()):
                raise MismatchError(f"the loaded state has {'one' if state is not None else 'none'} of "
                                    f"{pack.unit.name!r}, which {'is not' if state is not None else 'is'} compressed "
                                    "here: it is of another job or compression")
            if state is not None:
                packs.session.states.load(pack.unit, state.numpy())
            self._n_taken += 1
        if len(found) == len(sizes):
            self._loaded = None

    # -- what hooks do ---------------------------------------------------------------------------------------------

    def reduce(self, bucket: dist.GradBucket, codec: CodecSpec) -> torch.futures.Future[torch.Tensor]:
        """Begin to average *bucket* over all ranks, in place; return a future of its tensor.

        Waits for nobody, except for all ranks to declare what comes for the first time: so all of them bring buckets in
        the same order, as torch wants it anyway. The future may need later buckets of the same backward pass: nobody
        may wait for it before these have come.

        Raises
        ------
        ConfigError
            If the ranks of the group are not those of the job, or another model or hook has used this state.
        MismatchError
            If what was loaded is of another model, node or compression, or parameters have changed their dtype.
        ClosedError
            Without a job: see `bpsfast.init`.
        StallError
            If a rank does not declare its gradients.
        """
        packs = self._present()
        if self._codec is not None and codec != self._codec:
            raise ConfigError(f"state {self.name!r} has compressed by {self._codec} and is to compress by {codec}: "
                              "each hook needs a CompressionState of its own, whose options stay")
        tensor = bucket.buffer()
        memory, itemsize = tensor_memory(tensor), tensor.element_size()  # refuses sparse ones
        gradients = gradients_of(bucket)
        packs.make(bucket.index(), gradients, memory.dtype, itemsize, codec)
        self._codec = codec
        self._take_over(packs, bucket.is_last())
        rates = [self._rates.of(each.parameter) if self._rates is not None and self.error_feedback else None
                 for each in gradients]
        if self._executor is None:
            self._executor = SerialExecutor(f"bpsfast-{self.name}")
            weakref.finalize(self, self._executor.close, _CLOSE_TIMEOUT_S)
        completion = BucketCompletion(memory, tensor, len(gradients))
        packs.push(gradients, itemsize, rates, completion, self._executor)
        # An error that Python has set is a value to the reducer's C++, which takes it for a tensor; one raised here is
        # not.
        return completion.future.then(lambda done: done.value())

    def _present(self) -> Packs:
        """Return the packs in the process's job; those in another one are forgotten."""
        session = process.current()
        if self._packs is None or self._packs.session is not session:
            rank, size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
            if (rank, size) != (session.rank, session.size):
                raise ConfigError(f"this process is rank {rank} of {size} in the model's process group, and rank "
                                  f"{session.rank} of {session.size} in bpsfast's job: compressing hooks average over "
                                  "the job, so give the model a group of all its ranks, in their order")
            self._packs, self._codec, self._n_taken = Packs(session, self.name), None, 0
        return self._packs


def _kept(packs: Packs, pack: Pack) -> torch.Tensor:
    """Return what this node keeps of *pack*, nothing if it is not compressed."""
    return torch.from_numpy(packs.session.states.save(pack.unit)) if pack.unit.codec is not None else torch.empty(0)


class Gradient(NamedTuple):
    """One parameter's part of a bucket: whose it is, how many elements, and where they begin in the bucket."""

    parameter: torch.Tensor
    n_elements: int
    offset: int


class BucketCompletion:
    """The sums of one bucket of one backward pass: where they are written, and the future that they complete."""

    def __init__(self, memory: TensorInput, tensor: torch.Tensor, n_missing: int) -> None:
        self.address = memory.address
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._tensor = tensor  # what the address is of
        self._n_missing = n_missing
        self._is_over = False
        self._lock = threading.Lock()

    def part_done(self, error: BaseException | None) -> None:
        """Count one more sum, or *error*. The last sum or the first error completes the future."""
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

    completion: BucketCompletion
    offset: int


class Pack:
    """Parameters whose gradients are one tensor of the job. One thread puts gradients in, another takes sums out.

    torch makes its buckets anew after the first iteration, and may make others in a job that continues from a saved
    state. Error feedback belongs to certain elements, so what is compressed together must stay together. A parameter is
    put into a pack when its gradient comes for the first time, and stays there. A pack is pushed when the last of its
    gradients has come, in whichever bucket, and its sum is copied back to where each gradient came from.
    """

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
        for completion, _ in arrived.values():
            completion.part_done(error)

    def put(self, place: int, completion: BucketCompletion, offset: int,
            timeout_s: float) -> dict[int, _Arrival] | None:
        """Copy the gradient at byte *offset* of a bucket to its *place*; return all of them if it was the last.

        Waits for the pack's last sum if a backward pass failed while it was under way; raises as `Unit.wait`.
        """
        if self.unit.in_flight:
            self.unit.wait(self.unit.round, timeout_s)
        staging = self.unit.staging  # held while it is written: another thread may close the session
        copy(staging.address + self.offset_of[place], completion.address + offset, self.nbytes_of[place])
        self._arrived[place] = _Arrival(completion, offset)
        if len(self._arrived) < len(self.nbytes_of):
            return None
        arrived, self._arrived = self._arrived, {}
        return arrived

    def deliver(self, round: int, arrived: dict[int, _Arrival], timeout_s: float) -> None:
        """Wait for the sum of *round* and copy it to where its gradients came from; raises as `Unit.wait`."""
        self.unit.wait(round, timeout_s)
        for place, (completion, offset) in arrived.items():
            self.unit.deliver(round, completion.address + offset, self.offset_of[place], self.nbytes_of[place],
                              timeout_s)


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
        new = _split_bucket(gradients, self.session.settings.partition_bytes // itemsize)
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

    def push(self, gradients: Sequence[Gradient], itemsize: int, rates: Sequence[float | None],
             completion: BucketCompletion, executor: SerialExecutor) -> None:
        """Put the *gradients* of a bucket into their packs and push those that are whole; *executor* waits for them.

        A pack's learning rate is that of its first parameter, of *rates*; None: as before.
        """
        timeout_s = self.session.settings.timeout_s
        for each, rate in zip(gradients, rates, strict=True):
            found = self._place(each)
            assert found is not None, "make comes first"
            pack, place = found
            if place == 0 and rate is not None:
                pack.unit.learning_rate = rate
            arrived = pack.put(place, completion, each.offset * itemsize, timeout_s)
            if arrived is not None:
                round = pack.unit.push()
                executor.run(partial(pack.deliver, round, arrived, timeout_s), partial(_part_done, arrived),
                             inline=False)


def _split_bucket(gradients: Sequence[Gradient], most_elements: int) -> list[list[Gradient]]:
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


def _part_done(arrived: dict[int, _Arrival], error: BaseException | None) -> None:
    for completion, _ in arrived.values():
        completion.part_done(error)


def gradients_of(bucket: Any) -> list[Gradient]:
    """Return what *bucket*, a `torch.distributed.GradBucket`, has of each parameter."""
    start = bucket.buffer().storage_offset()
    return [Gradient(parameter, gradient.numel(), gradient.storage_offset() - start)
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)]
