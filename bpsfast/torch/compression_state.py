"""The state of a compressing hook of torch's DistributedDataParallel: options, packs, and what is kept of these."""
from __future__ import annotations

import itertools
import weakref
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..collectives.serial_executor import SerialExecutor
from ..compression import formats
from ..orchestration.codec import CodecSpec
from ..orchestration.errors import BusyError, ConfigError, MismatchError
from ..trainer import process
from .learning_rates import LearningRates
from .ops import tensor_memory
from .packs import BucketCompletion, Pack, Packs, gradients_of

#: How long the end of a state may take; whatever it waits for has a deadline of its own.
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
        self._conductor: SerialExecutor | None = None
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
        if self._conductor is None:
            self._conductor = SerialExecutor(f"bpsfast-{self.name}")
            weakref.finalize(self, self._conductor.close, _CLOSE_TIMEOUT_S)
        landing = BucketCompletion(memory, tensor, len(gradients))
        packs.push(gradients, itemsize, rates, landing, self._conductor)
        # An error that Python has set is a value to the reducer's C++, which takes it for a tensor; one raised here is
        # not.
        return landing.future.then(lambda done: done.value())

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
