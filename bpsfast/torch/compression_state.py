"""CompressionState: options, packs of parameters and codec states of a compressing DistributedDataParallel hook."""
from __future__ import annotations

import itertools
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
from ..trainer.unit import Unit
from .ops import tensor_memory
from .optimizer_extras import LearningRates
from .partwise_future import PartwiseFuture, raising

#: Maximum time to close a state's thread; its jobs have deadlines of their own.
_CLOSE_TIMEOUT_S = 5.0
_OPTIONS = ("k", "scaled", "levels", "partition", "normalize", "error_feedback", "momentum", "seed")

_numbers = itertools.count()


class CompressionState:
    """The state of a hook of `bpsfast.torch.hooks`: ``model.register_comm_hook(state, topk_hook)``.

    Each model needs its own; all ranks make them in the same order, unless they have names. It may be pickled, without
    the nodes' codec states, which `state_dict` returns. Hooks call it from one thread at a time.

    Parameters
    ----------
    process_group
        That of the model; its ranks are those of bpsfast's job. None: the default group.
    k
        For "topk" and "randomk": how many elements of a partition are sent; below 1: the fraction.
    levels, partition, normalize, scaled, seed
        As in the functions of `bpsfast.compression`.
    error_feedback, momentum
        As there. With *momentum* the optimizer's own must be 0; gradients that are not compressed (in a job of one
        node, in packs below min_compress_bytes) get none.
    name
        Prefix of its tensors' names, the same on all ranks; None: the number of the state in this process.

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
        """Return the options and the given name, without group, optimizer and packs, which belong to this process."""
        return {option: getattr(self, option) for option in _OPTIONS} | {"name": self._name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin anew with these options, in the default process group."""
        for option in _OPTIONS:
            setattr(self, option, state[option])
        self._name, self.process_group = state["name"], None
        self._begin()

    def _begin(self) -> None:
        self.name = f"DDP {next(_numbers)}" if self._name is None else self._name
        self._rates: LearningRates | None = None
        self._executor: SerialExecutor | None = None
        self._packs: Packs | None = None
        self._codec: CodecSpec | None = None
        self._loaded: dict[str, Any] | None = None  # a saved state, until all packs have received theirs
        self._n_restored = 0  # packs that have received theirs

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Use the learning rates of the groups of *optimizer* at each backward pass for error feedback.

        A pack has that of its first parameter. Does not keep *optimizer* alive, and is not pickled.
        """
        self._rates = LearningRates(optimizer)

    # -- codec states ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the codec states of this rank's node, to be saved with the model between steps.

        Every node has its own, so one rank of each saves it (each rank may), and it is loaded on that node of a job of
        the same shape, settings and model. Raises `BusyError` during a backward pass.
        """
        if self._n_restored and self._loaded is not None:
            raise BusyError(f"the state of {self.name!r} is asked for during its first backward pass, when "
                            f"{self._n_restored} of {len(self._loaded['packs'])} packs had taken over what was loaded")
        packs = self._open_packs()
        if packs is None or self._loaded is not None:
            loaded = self._loaded or {"packs": [], "nodes": {}}
            return {"packs": list(loaded["packs"]), "nodes": dict(loaded["nodes"])}
        saved = {str(number): _codec_state(packs, pack) for number, pack in enumerate(packs.packs)}
        return {"packs": [pack.unit.nbytes for pack in packs.packs],
                "nodes": {number: state for number, state in saved.items() if state.numel()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned on this node; on all its ranks, before the first backward pass.

        Raises `MismatchError` if *state* is something else, or training has begun in this job. If it is of another
        model, node or compression, the first backward pass raises it.
        """
        if set(state) != {"packs", "nodes"} or not {*map(str, range(len(state["packs"])))}.issuperset(state["nodes"]):
            raise MismatchError(f"a state of {sorted(state)} is loaded, not one that CompressionState.state_dict made")
        if self._open_packs() is not None:
            raise MismatchError(f"state {self.name!r} has reduced gradients already: load into a new CompressionState, "
                                "before the first backward pass")
        self._loaded = {"packs": list(state["packs"]), "nodes": dict(state["nodes"])} if state["packs"] else None
        self._n_restored = 0

    def _open_packs(self) -> Packs | None:
        """Return the packs if they are of a job that has not ended."""
        return None if self._packs is None or self._packs.session.closed else self._packs

    def _restore(self, packs: Packs, is_last: bool) -> None:
        """Send the nodes the loaded states of *packs* before the first push. *is_last*: there are no more packs."""
        if self._loaded is None:
            return
        sizes, nodes = self._loaded["packs"], self._loaded["nodes"]
        found = [pack.unit.nbytes for pack in packs.packs]
        if found != sizes[:len(found)] or (is_last and len(found) != len(sizes)):
            raise MismatchError(f"the model's gradients travel in packs of {found[:8]} bytes, those of the loaded "
                                f"state in packs of {sizes[:8]}: it is of another model, or of other settings")
        for number, pack in list(enumerate(packs.packs))[self._n_restored:]:
            state = nodes.get(str(number))
            if (state is not None) != bool(_codec_state(packs, pack).numel()):
                raise MismatchError(f"the loaded state has {'one' if state is not None else 'none'} of "
                                    f"{pack.unit.name!r}, which {'is not' if state is not None else 'is'} compressed "
                                    "here: it is of another job or compression")
            if state is not None:
                packs.session.states.load(pack.unit, state.numpy())
            self._n_restored += 1
        if len(found) == len(sizes):
            self._loaded = None

    # -- called by hooks -------------------------------------------------------------------------------------------

    def reduce(self, bucket: dist.GradBucket, codec: CodecSpec) -> torch.futures.Future[torch.Tensor]:
        """Begin to average *bucket* over all ranks, in place; return a future of its tensor.

        Blocks only until all ranks have declared gradients that come for the first time; so all ranks bring buckets in
        the same order, as torch requires anyway. The future may depend on later buckets of the same backward pass, so
        do not wait for it before these have come.

        Raises `ConfigError` if the ranks of the group are not those of the job, or another model or hook has used this
        state; `MismatchError` if the loaded state is of another model, node or compression, or parameters have changed
        their dtype; `ClosedError` without a job; `StallError` if a rank does not declare its gradients.
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
        self._restore(packs, bucket.is_last())
        rates = [self._rates.of(each.parameter) if self._rates is not None and self.error_feedback else None
                 for each in gradients]
        if self._executor is None:
            self._executor = SerialExecutor(f"bpsfast-{self.name}")
            weakref.finalize(self, self._executor.close, _CLOSE_TIMEOUT_S)
        completion = PartwiseFuture(tensor, len(gradients))
        packs.push(gradients, itemsize, rates, completion, self._executor)
        return raising(completion.future)

    def _present(self) -> Packs:
        """Return the packs in the process's present job, and drop those of an earlier one."""
        session = process.current()
        if self._packs is None or self._packs.session is not session:
            rank, size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
            if (rank, size) != (session.rank, session.size):
                raise ConfigError(f"this process is rank {rank} of {size} in the model's process group, and rank "
                                  f"{session.rank} of {session.size} in bpsfast's job: compressing hooks average over "
                                  "the job, so give the model a group of all its ranks, in their order")
            self._packs, self._codec, self._n_restored = Packs(session, self.name), None, 0
        return self._packs


def _codec_state(packs: Packs, pack: Pack) -> torch.Tensor:
    """Return this node's codec state of *pack*, which is empty if it is not compressed."""
    return torch.from_numpy(packs.session.states.save(pack.unit)) if pack.unit.codec is not None else torch.empty(0)


class Gradient(NamedTuple):
    """One parameter's part of a bucket; *offset*: the index of its first element there."""

    parameter: torch.Tensor
    n_elements: int
    offset: int


class _Arrival(NamedTuple):
    """A gradient that waits for the rest of its pack: its bucket, and its byte offset there."""

    completion: PartwiseFuture
    offset: int


class Pack:
    """Parameters whose gradients are one tensor of the job. One thread adds gradients, another takes sums out.

    torch rebuilds its buckets after the first iteration, and may build others in a job that continues from a saved
    state. Error feedback belongs to certain elements, so gradients that are compressed together must stay together. A
    parameter is assigned to a pack when its gradient comes for the first time, and stays there. A pack is pushed when
    the last of its gradients has come, in any bucket, and its sum is copied back to where each gradient came from.
    """

    def __init__(self, unit: Unit, dtype: str, nbytes_of: Sequence[int]) -> None:
        self.unit = unit
        self.dtype = dtype
        self.nbytes_of = nbytes_of
        self.offset_of = [sum(nbytes_of[:i]) for i in range(len(nbytes_of))]
        self._arrived: dict[int, _Arrival] = {}

    def forget(self) -> None:
        """Drop the gradients of a backward pass that was not completed."""
        arrived, self._arrived = self._arrived, {}
        _part_done(arrived, BusyError(f"another backward pass began before all gradients of {self.unit.name!r} had "
                                      "come"))

    def put(self, index: int, completion: PartwiseFuture, offset: int, timeout_s: float) -> dict[int, _Arrival] | None:
        """Copy the *index*-th gradient from byte *offset* of a bucket; if it was the last one, return all arrivals.

        Waits for the pack's last sum if a backward pass failed while it was under way; raises as `Unit.wait`.
        """
        if self.unit.in_flight:
            self.unit.wait(self.unit.round, timeout_s)
        staging = self.unit.staging  # held while it is written: another thread may close the session
        copy(staging.address + self.offset_of[index], completion.tensor.data_ptr() + offset, self.nbytes_of[index])
        self._arrived[index] = _Arrival(completion, offset)
        if len(self._arrived) < len(self.nbytes_of):
            return None
        arrived, self._arrived = self._arrived, {}
        return arrived

    def deliver(self, round: int, arrived: dict[int, _Arrival], timeout_s: float) -> None:
        """Wait for the sum of *round* and copy it to where its gradients came from; raises as `Unit.wait`."""
        self.unit.wait(round, timeout_s)
        for index, (completion, offset) in arrived.items():
            self.unit.deliver(round, completion.tensor.data_ptr() + offset, self.offset_of[index],
                              self.nbytes_of[index], timeout_s)


class Packs:
    """All packs of one model in one job. All ranks bring the same gradients in the same order; one thread at a time."""

    def __init__(self, session: Session, name: str) -> None:
        self.session = session
        self._name = name
        #: By the id of a parameter: itself, its pack and its index there.
        self._pack_of: dict[int, tuple[weakref.ref[torch.Tensor], Pack, int]] = {}
        self._last_index = -1  # of the bucket that came last
        self._indices: set[int] = set()  # of buckets that have come
        self.packs: list[Pack] = []  # in the order in which they were made, which is the same on all ranks

    def make(self, index: int, gradients: Sequence[Gradient], dtype: str, itemsize: int, codec: CodecSpec) -> None:
        """Assign the parameters of bucket *index* to packs, if they come for the first time; blocks for all ranks.

        Raises `ConfigError` if they are another model's, `MismatchError` if they came with other sizes or another dtype
        before, or if other ranks' differ, and `StallError` if other ranks bring none.
        """
        n_known = 0
        for each in gradients:
            found = self._found(each)
            if found is None:
                continue
            n_known += 1
            pack, i = found
            if (pack.dtype, pack.nbytes_of[i]) != (dtype, each.n_elements * itemsize):
                raise MismatchError(f"a parameter of {each.n_elements} elements comes as {dtype}, but came with "
                                    f"{pack.nbytes_of[i]} bytes of {pack.dtype} before: its codec state is of those; "
                                    "use another CompressionState")
        if index <= self._last_index:
            for pack in self.packs:
                pack.forget()
        self._last_index = index
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
        # In one call: their order decides who owns them, and owners' codec states are saved.
        self.session.tensors.declare([
            TensorSpec(name=name, dtype=dtype, shape=shape, average=True, priority=len(self.packs) + i,
                       codec=chosen(codec, name, shape, dtype, least, is_alone=True))
            for i, (name, shape) in enumerate(zip(names, shapes, strict=True))])
        made = [Pack(self.session.tensors.unit(name), dtype, [each.n_elements * itemsize for each in pack])
                for name, pack in zip(names, new, strict=True)]
        self._pack_of.update({id(each.parameter): (weakref.ref(each.parameter), to, i)
                              for to, pack in zip(made, new, strict=True) for i, each in enumerate(pack)})
        self.packs += made
        self._indices.add(index)

    def _found(self, gradient: Gradient) -> tuple[Pack, int] | None:
        """Return the pack of a gradient and its index there; None: its parameter is new."""
        found = self._pack_of.get(id(gradient.parameter))
        return found[1:] if found is not None and found[0]() is gradient.parameter else None

    def push(self, gradients: Sequence[Gradient], itemsize: int, rates: Sequence[float | None],
             completion: PartwiseFuture, executor: SerialExecutor) -> None:
        """Copy the *gradients* of a bucket into their packs and push complete packs; *executor* waits for the sums.

        A pack's learning rate is that of its first parameter, of *rates*; None: unchanged.
        """
        timeout_s = self.session.settings.timeout_s
        for each, rate in zip(gradients, rates, strict=True):
            found = self._found(each)
            assert found is not None, "make comes first"
            pack, index = found
            if index == 0 and rate is not None:
                pack.unit.learning_rate = rate
            arrived = pack.put(index, completion, each.offset * itemsize, timeout_s)
            if arrived is not None:
                round = pack.unit.push()
                executor.run(partial(pack.deliver, round, arrived, timeout_s), partial(_part_done, arrived),
                             inline=False)


def _split_bucket(gradients: Sequence[Gradient], most_elements: int) -> list[list[Gradient]]:
    """Cut a bucket into packs of at most *most_elements* elements, or of one parameter; the end of the bucket first.

    The next forward pass needs the end of a bucket last, so later packs are more urgent.
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
    """Return the parts of *bucket*, a `torch.distributed.GradBucket`, by parameter."""
    start = bucket.buffer().storage_offset()
    return [Gradient(parameter, gradient.numel(), gradient.storage_offset() - start)
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)]
