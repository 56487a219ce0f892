"""Averages the gradients of one optimizer or model over all ranks, as backward computes them.

A hook on each parameter runs when backward has accumulated its gradient. It copies the gradient into shared memory (in
native code; not at all if it lies there) and announces it. `Exchange.synchronize` writes the averages into each
``p.grad``, which is always this rank's own writable memory: clipping, AMP and zero_grad may change it.

The gradients that the next forward pass needs first are sent first. The first backward pass shows the order: autograd
visits the forward pass in reverse. So the gradients of the first step are kept, declared and sent by `synchronize`, and
the hooks send those of later steps at once. Rank 0's order counts for all ranks.

A parameter without a gradient on any rank gets none (`gradient_hooks.UsedParameters`).
"""
from __future__ import annotations

import ctypes
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ..base.dtypes import TABLE
from ..compression.choice import chosen_among
from ..orchestration.errors import BpsError, BusyError, MismatchError, UnsupportedError
from ..orchestration.messages import TensorSpec
from ..trainer import process
from ..trainer.gradients import Gradients
from ..trainer.sparse_table import SparseTable
from ..trainer.tensor_input import TensorInput
from .compression import CompressionLike, cast_dtype, parted
from .gradient_hooks import (
    UsedParameters,
    is_shared,
    note_reduced,
    observe_gradients,
    observer_numbers,
)
from .ops import REACHED, device_tensor_memory, wire_dtype_name
from .optimizer_extras import (
    KEY,
    TUNED,
    LearningRates,
    LocalMomentum,
    OptimizerExtras,
    momenta,
    point_of_state,
    state_of_point,
)


class _DirectPath(NamedTuple):
    """A gradient that travels as it is: its parameter, its dtype, and `Gradients.fill` of its gradients."""

    parameter: torch.Tensor
    dtype: torch.dtype
    fill: Callable[[str, int, int], None]


class Exchange:
    """Averages the gradients of *named* parameters over all ranks. One thread at a time.

    An optimizer or a module owns it. All ranks make exchanges in one order. Codecs are chosen by the names given here.

    Parameters that are frozen now take part from the step on in which one has a gradient on any rank.
    """

    def __init__(self, named: list[tuple[str, torch.Tensor]], compression: CompressionLike, n_passes: int) -> None:
        compression, self._choice = parted(compression)
        retire_unused()
        self.number = next(observer_numbers)
        self.used = UsedParameters(named)
        self.parameters = self.used.trained
        self.n_passes = n_passes
        self._left = dict.fromkeys(self.parameters, n_passes)
        self._compression = compression
        self._wire: dict[str, torch.dtype] = {}
        self.kinds: dict[str, tuple[tuple[int, ...], str]] = {}  # shape and dtype of what travels
        self._contexts: dict[str, Any] = {}  # compressor contexts; absent for uncompressed gradients
        for name, p in named:
            try:
                self._note_kind(name, p)
            except UnsupportedError:
                if p.requires_grad:  # a frozen parameter of this dtype is refused once it has a gradient
                    raise
        trained = {name: self.kinds[name] for name in self.parameters}
        self.codecs = chosen_among(self._choice, trained, process.current().settings.min_compress_bytes)
        self.momenta = momenta(self._choice, self.kinds)
        self._momentum = LocalMomentum(self.momenta)
        self.kept = OptimizerExtras(self._momentum)
        self._rates: LearningRates | None = None
        self._gradients: Gradients | None = None
        self._added: dict[str, Gradients] = {}  # of parameters that were frozen at first, by name
        self._direct: dict[str, _DirectPath] = {}  # from the second step on
        self._seen: dict[str, None] = {}  # in the order in which the first step's backward came to them
        self._copies: dict[str, torch.Tensor] = {}  # copies of the first step's gradients
        #: On a device: the tensor that travels of a gradient and becomes the average.
        self._device_copies: dict[str, torch.Tensor] = {}
        self._order = list(self.parameters)
        self.has_parameters = bool(named)  # frozen ones, too
        edition = process.current().tensors.model_number(name for name, _ in named)
        self.prefix = f"Gradient{edition or ''}."  # of the names, which are the job's; BytePS has one edition
        self._used_gradients: Gradients | None = None  # with which gradients that travels
        self._has_sent_used = False  # in this step, and the sums were not received
        self.aliases: GradientAliases = []  # in the segment, of gradients that live there
        self.synchronized = False
        self.is_superseded = False
        self.other_observers: list[weakref.ref[Any]] = []
        self._hooks = observe_gradients(self, named)

    def _note_kind(self, name: str, parameter: torch.Tensor) -> None:
        """Note shape and dtype of what is sent of the gradients of *name*."""
        cast = cast_dtype(self._compression, parameter.dtype)
        if cast is None:
            sample, self._contexts[name] = self._compress(name, _zeros(parameter))
        wire = sample.dtype if cast is None else cast
        self.kinds[name] = tuple(sample.shape if cast is None else parameter.shape), wire_dtype_name(wire)
        self._wire[name] = wire

    @property
    def gradients(self) -> Gradients:
        """The gradients as the job knows them, since `declare`."""
        assert self._gradients is not None, "`begin` declares them; hooks keep copies before"
        return self._gradients

    def of(self, name: str) -> Gradients:
        """Return the `Gradients` that contain *name*."""
        return self._added.get(name, self.gradients) if self._added else self.gradients

    def _declared_all(self) -> list[Gradients]:
        told = [self._used_gradients] if self._used_gradients is not None else []
        return list(dict.fromkeys([self.gradients, *told, *self._added.values()]))

    def missing(self) -> list[str]:
        """Return the names of the gradients that were not sent in this step."""
        return [name for each in self._declared_all() for name in each.missing() if name in self.parameters]

    def declare(self) -> Gradients:
        """Declare the gradients to the job, once. Does not wait for other ranks."""
        if self._gradients is None:
            self._order = self.order()
            self._gradients = self._declared(self._order)
        return self._gradients

    def _declared(self, order: list[str]) -> Gradients:
        """Declare the gradients in *order*, and the flags of `UsedParameters`."""
        device, travelling = self._device(self.parameters.values()), set(order)
        kinds = {name: kind for name, kind in self.kinds.items() if name in travelling}
        told = {self.used.title: self.used.kind}
        # The host waits for the flags, but for nothing that comes from a device.
        beside = told if device is None else {}
        found = self._used_gradients = Gradients(
            {**beside, **kinds}, prefix=self.prefix, order=[*beside, *order],
            compression={name: self.codecs.get(name) for name in (*beside,
                                                                  *kinds)}, tuned=self.kept.tuned, on_device=device)
        weakref.finalize(self, retire_later, found, self.aliases).atexit = False
        if not beside:
            self._used_gradients = Gradients(told, prefix=self.prefix)
            weakref.finalize(self, retire_later, self._used_gradients, []).atexit = False
        return found

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the learning rates for error feedback from the groups of *optimizer*, as they are at each backward."""
        self._rates = LearningRates(optimizer)

    def state(self) -> dict[str, Any]:
        """Return the parts of `OptimizerExtras` by their names in a state_dict, without empty ones. Between steps."""
        point = self.kept.tuned if self._gradients is None else self._gradients.tuned
        parts = {KEY: self.kept.save(self._gradients), TUNED: state_of_point(point)}
        return {name: part for name, part in parts.items() if part}

    def load(self, state: dict[str, Any]) -> None:
        """Remove from *state* what `state` returned on this node, and load it; raises as `OptimizerExtras.load`."""
        parts, tuned = state.pop(KEY, None), state.pop(TUNED, None)
        if tuned:
            self.kept.tuned = point_of_state(tuned)
        if parts:
            self.kept.load(parts, self._gradients)

    def order(self) -> list[str]:
        """Return the names as the next forward pass uses them, as far as the last backward pass has shown it."""
        return self._order if _is_compiled() else forward_order(self.parameters, self._seen)

    @property
    def averaged(self) -> bool:
        """Whether the gradients are averages: `synchronize` has run since the last backward pass, and not all gradients
        were discarded.
        """
        return self.synchronized and any(p.grad is not None for p in self.parameters.values())

    @property
    def busy(self) -> bool:
        """Whether gradients are under way: after backward, before the step."""
        return bool(self._copies) or (self._gradients is not None and any(each.busy for each in self._declared_all()))

    def accumulated(self, name: str) -> None:
        """Count a backward pass of *name*; after the last one send its gradient."""
        if self.is_superseded:
            self.synchronized = False
            self.used.is_stale |= not self._left[name]
            return
        if self._left[name] == 0:
            raise BusyError(
                f"the gradient of {name!r} was computed over backward_passes_per_step={self.n_passes} times before "
                "step() or synchronize(): call step() after that many backward passes, or raise the number"
            )
        self._left[name] = left = self._left[name] - 1
        self.synchronized = False
        if self._gradients is None:
            self._seen.setdefault(name)
        if left:
            return
        direct = self._direct.get(name)
        if direct is not None:
            gradient: Any = direct.parameter.grad
            if (gradient.dtype is direct.dtype and gradient.layout is torch.strided and not gradient.is_cuda
                    and gradient.is_contiguous()):
                direct.fill(name, gradient.data_ptr(), gradient.nbytes)
                return
        self._send(name)

    def _direct_paths(self) -> dict[str, _DirectPath]:
        """Return by name the gradients that travel as they are: `accumulated` passes their memory on at once."""
        if process.current().settings.host_device:
            return {}
        return {name: _DirectPath(self.parameters[name], self._wire[name], self.gradients.fill)
                for name in self._order
                if name not in self._contexts and name not in self._added
                and not (name in self.codecs and self.codecs[name].error_feedback)}

    def _send(self, name: str) -> None:
        """Send the present gradient. In the first step keep a copy, which `synchronize` sends after declaring it."""
        gradient = self.parameters[name].grad
        assert gradient is not None, "only called for parameters with a gradient"
        if gradient.layout != torch.strided:
            raise UnsupportedError(f"the gradient of {name!r} is {gradient.layout}: only dense gradients are summed "
                                   "(sparse=False in the embedding; DistributedOptimizer without cross_barrier "
                                   "takes sparse ones, too)")
        if self._gradients is None:
            self._copies[name] = gradient.detach().clone()
        else:
            self._fill(name, gradient)

    def _fill(self, name: str, gradient: torch.Tensor) -> None:
        """Copy *gradient* into shared memory in the form in which it is sent, and announce it."""
        if self._rates is not None and name in self.codecs and self.codecs[name].error_feedback:
            rate = self._rates.of(self.parameters[name])
            if rate is not None:
                self.of(name).learning_rate = {name: rate}
        with torch.no_grad():
            if name in self._contexts:
                gradient, self._contexts[name] = self._compress(name, gradient.detach())
            sent = gradient.detach().contiguous()
            if self._is_on_device(sent):
                sent = sent.to(self._wire[name])
                memory = self._on_device(sent)
                self.of(name).fill_from(name, memory, memory)
                self._device_copies[name] = sent
            elif sent.dtype != self._wire[name]:
                self._place(name).copy_(sent)
                self.of(name).ready(name)
            else:
                self.of(name).fill(name, sent.data_ptr(), sent.numel() * sent.element_size())

    def _device(self, parameters: Iterable[torch.Tensor]) -> str | None:
        """Return the device of *parameters* as `Gradients` names it; None: the CPU, or several devices."""
        places = [self._on_device(p.detach().contiguous()).location for p in parameters]
        names = {None if place is None else place.device.name for place in places}
        return names.pop() if len(names) == 1 else None

    def _is_on_device(self, tensor: torch.Tensor) -> bool:
        """Whether the streams of a device copy *tensor*."""
        if not process.current().settings.host_device:
            return tensor.is_cuda
        return self._on_device(tensor).location is not None

    def _on_device(self, tensor: torch.Tensor) -> TensorInput:
        return process.current().devices.located(device_tensor_memory(tensor))

    def _place(self, name: str) -> torch.Tensor:
        """Return this rank's input memory of *name* as a tensor of the dtype that is sent."""
        raw = torch.from_numpy(self.of(name).region(name).array)
        return raw.view(self._wire[name]).view(self.parameters[name].shape)

    def synchronize(self) -> None:
        """Send what no backward pass has sent, wait for everything, and write the averages into the gradients."""
        self.send_rest()
        self.receive()

    def begin(self) -> None:
        """Declare the gradients and send the copies of the first step, which waits until all ranks have declared."""
        is_first = self._gradients is None
        self.kept.settle(self.declare())
        if is_first:
            self._direct = self._direct_paths()
        copies, self._copies = self._copies, {}
        for name, gradient in copies.items():
            self._fill(name, gradient)

    def send_rest(self) -> None:
        """Send what no backward pass has sent, zeros where there is no gradient."""
        self.begin()
        for name in self.missing():
            if self.parameters[name].grad is not None:
                self._send(name)
        self.send_used()  # after what may raise, so that a second try sends the flags of that time
        self._zero_missing()

    def send_used(self) -> None:
        """Send this rank's flags of used parameters, once a step."""
        if self._has_sent_used:
            return
        assert self._used_gradients is not None, "declared before"
        self._used_gradients[self.used.title][:] = self.used.flags()
        self._used_gradients.ready(self.used.title)
        self._has_sent_used = True

    def receive_used(self) -> None:
        """Wait for the sums of the flags, if they were sent."""
        if self._has_sent_used:
            assert self._used_gradients is not None, "the flags were sent with them"
            self.used.receive(self._used_gradients.wait(self.used.title))
            self._used_gradients.finish(self.used.title)
            self._has_sent_used = False

    def end_step(self, wait: bool = True) -> None:
        """Let gradients be sent again; see `Gradients.step`."""
        for each in self._declared_all():
            each.step(wait=wait)

    def _zero_missing(self) -> None:
        """Send zeros for every gradient that was not sent."""
        for name in self.missing():
            if name in self._contexts:
                self._fill(name, _zeros(self.parameters[name]))
        for each in self._declared_all():
            each.zero_missing()

    def _unfreeze(self, names: list[str]) -> None:
        """Average *names* from this step on: they were frozen, and have a gradient on some rank now."""
        self._add(names, self._added_gradients(names))
        for name in names:
            gradient = self.parameters[name].grad
            if gradient is not None:
                self._fill(name, gradient.to_dense() if gradient.is_sparse else gradient)
        self._zero_missing()

    def _add(self, names: list[str], added: Gradients) -> None:
        for name in names:
            self.used.unfreeze(name)
        self._added.update(dict.fromkeys(names, added))
        self._order += names
        self._hooks += observe_gradients(self, [(name, self.parameters[name]) for name in names])

    def _added_gradients(self, names: list[str]) -> Gradients:
        for name in names:
            if name not in self.kinds:
                self._note_kind(name, self.used.frozen[name])
        kinds = {name: self.kinds[name] for name in names}
        added = Gradients(kinds, prefix=self.prefix, on_device=self._device(self.used.frozen[name] for name in names))
        weakref.finalize(self, retire_later, added, self.aliases).atexit = False
        return added

    def _require_known(self) -> None:
        """Raise `UnsupportedError` on all ranks if any of them has a gradient that is not averaged."""
        self.used.require_known()

    def receive(self) -> None:
        """Wait for everything, and write the averages into the gradients: the step is over.

        A parameter that has a gradient on no rank gets none.

        Raises
        ------
        UnsupportedError
            On all ranks, if on any of them a parameter has a gradient that was not there when this was made.
        """
        self.receive_used()
        unfrozen = self.used.unfrozen()
        if unfrozen:
            self._unfreeze(unfrozen)
        with torch.no_grad():
            for name in self._order:
                self._receive(name, self.parameters[name])
        self.end_step()
        self.forget_passes()
        note_reduced(self)
        self._require_known()
        self.synchronized = True
        retire_unused()

    def _receive(self, name: str, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            if not self.used.has(name):
                return
            gradient = parameter.grad = torch.empty_like(parameter, requires_grad=False)
        target = gradient.detach()
        if name in self._device_copies or target.is_cuda:
            self._receive_on_device(name, target)
        elif name in self._contexts:
            sums = tensor_over(self.of(name).wait(name), self._wire[name])
            target.copy_(self._decompress(name, sums.clone(), target))  # it may write into what it gets
        elif target.dtype == self._wire[name] and target.is_contiguous():
            self.of(name).deliver(name, target.data_ptr(), target.numel() * target.element_size())
        elif target.dtype == self._wire[name]:
            dense = torch.empty(target.shape, dtype=target.dtype)
            self.of(name).deliver(name, dense.data_ptr(), dense.numel() * dense.element_size())
            target.copy_(dense)
        else:
            target.copy_(tensor_over(self.of(name).wait(name), self._wire[name]))
        if name in self.momenta and self.of(name).codec(name) is None:
            self._momentum.add(name, target)

    def _receive_on_device(self, name: str, target: torch.Tensor) -> None:
        """Let torch's current stream find the average in *target*, on a device. The host waits for no copy."""
        sums = self._device_copies.get(name)
        if sums is None:  # nothing was sent: it has no gradient on this rank
            sums = torch.empty(self.kinds[name][0], dtype=self._wire[name], device=target.device)
        self.of(name).deliver_to(name, self._on_device(sums))
        self._device_copies.pop(name, None)
        if name in self._contexts:
            target.copy_(self._decompress(name, sums, target))
        elif sums.data_ptr() != target.data_ptr():
            target.copy_(sums)

    def _decompress(self, name: str, sums: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        own: torch.Tensor = self._compression.decompress(sums, self._contexts[name])
        if own.shape != target.shape:
            raise MismatchError(f"{_title(self._compression)}.decompress has made a tensor of shape "
                                f"{tuple(own.shape)} of the gradient of {name!r}, whose shape is "
                                f"{tuple(target.shape)}")
        return own

    def _compress(self, name: str, gradient: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what travels of *gradient* by the user's compressor, and what decompressing it needs."""
        small, context = self._compression.compress(gradient)
        if not isinstance(small, torch.Tensor) or small.layout != torch.strided or small.device.type not in REACHED:
            raise UnsupportedError(f"{_title(self._compression)}.compress has made of the gradient of {name!r} what is "
                                   f"no dense tensor on the CPU or a GPU: {type(small).__name__}")
        kind = tuple(small.shape), wire_dtype_name(small.dtype)
        if kind != self.kinds.get(name, kind):
            raise MismatchError(f"{_title(self._compression)}.compress has made a tensor of shape {kind[0]} and dtype "
                                f"{kind[1]} of the gradient of {name!r}; of zeros it has made {self.kinds[name][0]} "
                                f"and {self.kinds[name][1]}: it must be the same for all")
        return small, context

    def forget_passes(self) -> None:
        """Count the backward passes from the start. The present gradients are no averages any more."""
        self.synchronized = False
        self._copies.clear()
        self._device_copies.clear()
        self._left = dict.fromkeys(self.parameters, self.n_passes)

    def abandon(self) -> None:
        """Discard all gradients, which may lie in memory of a job that is over, and remove the hooks.

        Another exchange may follow while a traceback, for example, still refers to this one.
        """
        for hook in self._hooks:
            hook.remove()
        for parameter in self.parameters.values():
            parameter.grad = None
        self._has_sent_used = False

    def alias_gradients(self) -> None:
        """Let zeroed gradients alias shared memory: backward then accumulates there, and nothing is copied.

        Does nothing before the first step, when there is no such memory, and while another optimizer of the same
        parameters lives, which would overwrite gradients that are being summed.
        """
        if self._gradients is None or is_shared(self):
            return
        for name in self._order:
            parameter = self.parameters[name]
            gradient = parameter.grad
            if name in self._contexts or gradient is None or gradient.layout != torch.strided:
                continue
            if gradient.dtype != self._wire[name] or not gradient.is_contiguous() or gradient.is_cuda:
                continue
            region = self.of(name).region(name)
            if gradient.data_ptr() != region.address:
                home = region.array.view()
                self.aliases.append(weakref.ref(home))
                parameter.grad = torch.from_numpy(home).view(self._wire[name]).view(parameter.shape).zero_()

    def superseded(self) -> None:
        """Stop sending before a step: a later exchange has some of the same parameters."""
        self.is_superseded = True
        own = {array.ctypes.data for home in self.aliases if (array := home()) is not None}
        for parameter in self.parameters.values() if own else ():
            gradient = parameter.grad
            if gradient is not None and gradient.layout == torch.strided and gradient.data_ptr() in own:
                parameter.grad = gradient.clone()  # the later exchange would overwrite input that is being summed


class Retirable(Protocol):
    """An object with memory in the job."""

    def retire(self) -> bool:
        """Return the memory if that is possible now; see `Gradients.retire`."""


GradientAliases = list[weakref.ref[np.ndarray[Any, Any]]]
#: Objects that no exchange uses any more and that were not retired yet.
_to_retire: deque[tuple[Retirable, GradientAliases]] = deque()


def retire_later(owner: Retirable, aliases: GradientAliases) -> None:
    """Let `retire_unused` retire *owner* when no array of *aliases* is left. Any thread, also in a finalizer."""
    _to_retire.append((owner, aliases))


def retire_unused() -> None:
    """Retire the objects of `retire_later` whose arrays are not used any more. Not in finalizers: it sends messages."""
    for _ in range(len(_to_retire)):
        try:
            owner, aliases = _to_retire.popleft()
        except IndexError:  # another thread retires them
            return
        try:
            if any(home() is not None for home in aliases) or not owner.retire():
                _to_retire.append((owner, aliases))
        except BpsError:
            pass  # their job is over, or has refused them


def forward_order(names: Iterable[str], seen: Iterable[str]) -> list[str]:
    """Return *names* as the forward pass uses them, by the order in which backward has *seen* them.

    What was not seen follows what stands before it in *names*: some later pass may use it, as its neighbour.
    """
    place = {name: rank for rank, name in enumerate(reversed(list(dict.fromkeys(seen))))}
    after, keys = -1, {}
    for position, name in enumerate(names):
        after = place.get(name, after)
        keys[name] = after, position
    return sorted(keys, key=lambda name: keys[name])


def _zeros(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def _title(compression: object) -> str:
    return getattr(compression, "__name__", type(compression).__name__)


def _is_compiled() -> bool:
    """Whether torch has compiled anything: its code hands over all gradients at once, in no order."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"]["ok"])


def tensor_over(view: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over a read-only result, only to be read from at once: torch knows no read-only tensors."""
    if view.nbytes == 0:
        return torch.empty(view.shape, dtype=dtype)
    memory = (ctypes.c_uint8 * view.nbytes).from_address(view.ctypes.data)
    return torch.from_numpy(np.ctypeslib.as_array(memory)).view(dtype).view(view.shape)


class SparseExchange(Exchange):
    """Averages gradients over all ranks, sparse ones (`torch.nn.Embedding(sparse=True)`) row by row.

    The first backward pass shows on all ranks together which gradients are sparse: a rank that has not used an
    embedding has no gradient of it. The result is sparse where the gradient was: coalesced, with the rows of all ranks.
    *sparse_as_dense*: sparse gradients travel as dense ones.
    """

    def __init__(self, named: list[tuple[str, torch.Tensor]], compression: CompressionLike, n_passes: int,
                 sparse_as_dense: bool) -> None:
        super().__init__(named, compression, n_passes)
        self._sparse_as_dense = sparse_as_dense
        self._sparse: list[str] = []  # on some rank, in the first step
        self._tables: dict[str, SparseTable] = {}

    def declare(self) -> Gradients:
        """Tell the job of the gradients; the first time, wait for all ranks to say which are sparse."""
        if self._gradients is None:
            self._sparse = self._sparse_anywhere()
            by_rows = [] if self._sparse_as_dense else self._sparse
            self._refuse_compressed(by_rows)
            self._order = [name for name in self.order() if name not in by_rows]
            self._gradients = self._declared(self._order)
            for name in by_rows:
                shape, dtype = self.kinds[name]
                table = self._tables[name] = SparseTable(process.current(), self.prefix + name, shape, dtype)
                weakref.finalize(self, retire_later, table, []).atexit = False
        return self._gradients

    def _sparse_anywhere(self) -> list[str]:
        """Return the names of gradients that are sparse on some rank, in an order that is that of all."""
        names = list(self.used.places)  # of all parameters: ranks may have others frozen
        if not names:
            return []
        gradients = [self.parameters[name].grad if name in self.parameters else None for name in names]
        session = process.current()
        title = f"sparse of {self.prefix}{names[0]} to {names[-1]}, {len(names)} tensors"
        session.tensors.declare([TensorSpec(name=title, dtype="int32", shape=(len(names),), average=False)])
        unit = session.tensors.unit(title)
        staging = unit.staging
        staging.array[:unit.nbytes].view(np.int32)[:] = [each is not None and each.is_sparse for each in gradients]
        unit.push()
        unit.wait(unit.round, session.settings.timeout_s)
        n_ranks = unit.view(unit.round).view(np.int32).tolist()
        session.retire([unit])
        session.memory.release(staging)
        return [name for name, n in zip(names, n_ranks) if n]

    def _refuse_compressed(self, names: list[str]) -> None:
        for name in names:
            if name in self._contexts:
                raise UnsupportedError(f"the gradient of {name!r} is sparse, which a compressor of your own cannot "
                                       "compress: use sparse_as_dense=True, or Compression.none, .fp16, .bf16")
            if name in self.momenta:
                raise UnsupportedError(f"the gradient of {name!r} is sparse, to which no codec's momentum applies: "
                                       "use sparse_as_dense=True, or no codec for it")
            self.codecs.pop(name, None)  # rows that nobody has used are not sent as it is

    @property
    def busy(self) -> bool:
        """Whether gradients are under way: after backward, before the step."""
        return super().busy or any(table.busy for table in self._tables.values())

    def send_rest(self) -> None:
        """Send what no backward pass has sent: zeros where there is no gradient, no rows where it would be sparse."""
        self.begin()
        for name, table in self._tables.items():
            if not table.busy:
                self._push(name, self.parameters[name].grad)
        super().send_rest()

    def _send(self, name: str) -> None:
        gradient = self.parameters[name].grad
        assert gradient is not None, "only called for parameters with a gradient"
        if self._gradients is None and gradient.is_sparse:
            self._copies[name] = gradient.detach().clone()
        elif gradient.is_sparse or name in self._tables:
            self._fill(name, gradient)
        else:
            super()._send(name)

    def _fill(self, name: str, gradient: torch.Tensor) -> None:
        if name in self._tables:
            self._push(name, gradient)
        else:  # as all ranks said; or it was not used in the first step, and none said that it is sparse
            super()._fill(name, gradient.to_dense() if gradient.is_sparse else gradient)

    def _push(self, name: str, gradient: torch.Tensor | None) -> None:
        """Send the rows of *gradient*; None: there are none."""
        parameter, dtype = self.parameters[name], self._wire[name]
        if gradient is None:
            rows = torch.empty(0, *parameter.shape[1:], dtype=dtype)
            self._tables[name].push(np.empty(0, np.int64), rows)
            return
        gradient = gradient.detach() if gradient.is_sparse else gradient.detach().to_sparse(1)
        if gradient.sparse_dim() != 1:
            raise UnsupportedError(f"the gradient of {name!r} has {gradient.sparse_dim()} sparse dimensions; rows "
                                   "have one: use sparse_as_dense=True")
        self._tables[name].push(gradient._indices()[0].cpu().numpy(), gradient._values().to(dtype).contiguous().cpu())

    def receive(self) -> None:
        """As `Exchange.receive`."""
        self.receive_used()
        with torch.no_grad():
            for name in self._tables:
                self._receive_rows(name, self.parameters[name])
        super().receive()

    def _receive_rows(self, name: str, parameter: torch.Tensor) -> None:
        indices, rows = self._tables[name].wait()
        if parameter.grad is None and not self.used.has(name):
            return
        bits = rows.view(np.int16) if rows.dtype == TABLE["bfloat16"].numpy else rows  # which NumPy has not
        values = torch.from_numpy(bits).view(self._wire[name]).to(parameter.device, parameter.dtype)
        total = torch.sparse_coo_tensor(torch.from_numpy(indices)[None].to(parameter.device), values, parameter.shape,
                                        check_invariants=False, is_coalesced=True)
        is_dense = parameter.grad is not None and not parameter.grad.is_sparse
        parameter.grad = total.to_dense() if is_dense else total

    def _receive(self, name: str, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None and not self.used.has(name):
            return
        is_dense = gradient is not None and not gradient.is_sparse
        if is_dense or name not in self._sparse:  # dense on all ranks, where they have not agreed that it is sparse
            parameter.grad = gradient if is_dense else None
            super()._receive(name, parameter)
            return
        total = parameter.grad = torch.empty_like(parameter, requires_grad=False)
        super()._receive(name, parameter)
        parameter.grad = total.to_sparse(1 if gradient is None else gradient.sparse_dim())
