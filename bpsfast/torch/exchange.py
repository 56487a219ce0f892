"""Averages the gradients of one optimizer or model over all ranks, as backward computes them.

A hook on each parameter runs when backward has accumulated its gradient. It copies the gradient into shared memory (in
native code; not at all if it lies there) and announces it. `Exchange.synchronize` writes the averages into each
``p.grad``, which is always this rank's own writable memory: clipping, AMP and zero_grad may change it.

The gradients that the next forward pass needs first are sent first. The first backward pass shows the order: autograd
visits the forward pass in reverse. So in the first step `synchronize` declares the gradients and sends copies of them;
in later steps the hooks send them at once. Rank 0's order counts for all ranks.

A parameter without a gradient on any rank gets none (`gradient_hooks.UsedParameters`).
"""
from __future__ import annotations

import ctypes
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

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
from .gradient_hooks import Named, UsedParameters, is_shared, note_reduced, observe_gradients, observer_numbers
from .ops import REACHED, device_tensor_memory, wire_dtype_name
from .optimizer_extras import KEY, TUNED, LearningRates, LocalMomentum, OptimizerExtras, momenta, point_of_state


class _DirectPath(NamedTuple):
    """A gradient whose bytes are sent unchanged: its parameter and dtype, and `Gradients.fill`, which sends it."""

    parameter: torch.Tensor
    dtype: torch.dtype
    fill: Callable[[str, int, int], None]


class Exchange:
    """Averages the gradients of *named* parameters over all ranks. One thread at a time.

    An optimizer or a module owns it. All ranks make exchanges in one order. Codecs are chosen by the names given here.
    A parameter that is frozen now takes part from the first step on in which it has a gradient on any rank.
    """

    def __init__(self, named: list[Named], compression: CompressionLike, n_passes: int) -> None:
        compression, self._choice = parted(compression)
        retire_unused()
        self.number = next(observer_numbers)
        self.used = UsedParameters(named)
        self.parameters = self.used.trained
        self.n_passes = n_passes
        self._left = dict.fromkeys(self.parameters, n_passes)
        self._compression = compression
        self._wire: dict[str, torch.dtype] = {}
        self.kinds: dict[str, tuple[tuple[int, ...], str]] = {}  # shape and dtype of what is sent
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
        self.extras = OptimizerExtras(self._momentum)
        self._rates: LearningRates | None = None
        self._gradients: Gradients | None = None
        self._added: dict[str, Gradients] = {}  # of parameters that were frozen at first, by name
        self._direct: dict[str, _DirectPath] = {}  # from the second step on
        self._seen: dict[str, None] = {}  # in the order in which the first step's backward came to them
        self._copies: dict[str, torch.Tensor] = {}  # copies of the first step's gradients
        #: Gradients on a device: the tensor that is sent and becomes the average.
        self._device_copies: dict[str, torch.Tensor] = {}
        self._order = list(self.parameters)
        self.has_parameters = bool(named)  # frozen ones, too
        edition = process.current().tensors.model_number(name for name, _ in named)
        self.prefix = f"Gradient{edition or ''}."  # of names in the job; the number keeps exchanges apart
        self._used_gradients: Gradients | None = None  # the ones among which the flags of `used` are sent
        self._has_sent_used = False  # in this step, and the sums were not received
        self.aliases: GradientAliases = []  # arrays over shared memory in which gradients live
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
        flags = [self._used_gradients] if self._used_gradients is not None else []
        return list(dict.fromkeys([self.gradients, *flags, *self._added.values()]))

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
        device = self._device(self.parameters.values())
        flags = {self.used.title: self.used.kind}
        # The host waits for the flags, but for nothing that comes from a device.
        kinds = flags if device is None else {}
        order = [*kinds, *order]
        sent = set(order)
        kinds = {**kinds, **{name: kind for name, kind in self.kinds.items() if name in sent}}
        found = self._used_gradients = Gradients(
            kinds, prefix=self.prefix, order=order, compression={name: self.codecs.get(name) for name in kinds},
            tuned=self.extras.tuned, on_device=device)
        self._retire_at_end(found.retire, self.aliases)
        if device is not None:
            self._used_gradients = Gradients(flags, prefix=self.prefix)
            self._retire_at_end(self._used_gradients.retire, [])
        return found

    def _retire_at_end(self, retire: Callable[[], bool], aliases: GradientAliases) -> None:
        """Call `retire_later` once this exchange is gone."""
        weakref.finalize(self, retire_later, retire, aliases).atexit = False

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Use the learning rates of the groups of *optimizer* at each backward pass for error feedback."""
        self._rates = LearningRates(optimizer)

    def state(self) -> dict[str, Any]:
        """Return the parts of `OptimizerExtras` by their names in a state_dict, without empty ones. Between steps."""
        point = self.extras.tuned if self._gradients is None else self._gradients.tuned
        parts = {KEY: self.extras.save(self._gradients), TUNED: {} if point is None else point._asdict()}
        return {name: part for name, part in parts.items() if part}

    def load(self, state: dict[str, Any]) -> None:
        """Remove from *state* what `state` returned on this node, and load it; raises as `OptimizerExtras.load`."""
        parts, tuned = state.pop(KEY, None), state.pop(TUNED, None)
        if tuned:
            self.extras.tuned = point_of_state(tuned)
        if parts:
            self.extras.load(parts, self._gradients)

    def order(self) -> list[str]:
        """Return the names as the next forward pass uses them, as far as the last backward pass has shown it."""
        return self._order if _is_compiled() else forward_order(self.parameters, self._seen)

    @property
    def averaged(self) -> bool:
        """Whether the gradients are averages: `synchronize` came after the last backward pass, and some are left."""
        return self.synchronized and any(p.grad is not None for p in self.parameters.values())

    @property
    def busy(self) -> bool:
        """Whether gradients were sent and not received: after backward, before the step."""
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
        """Return by name the gradients that are sent unchanged: `accumulated` passes on their memory at once."""
        if process.current().settings.host_device:
            return {}
        return {name: _DirectPath(self.parameters[name], self._wire[name], self.gradients.fill)
                for name in self._order
                if name not in self._contexts and name not in self._added
                and not (name in self.codecs and self.codecs[name].error_feedback)}

    def _send(self, name: str) -> None:
        """Send the present gradient. In the first step keep a copy, which `synchronize` sends after declaring it."""
        gradient = self._gradient(name)
        if gradient.layout != torch.strided:
            raise UnsupportedError(f"the gradient of {name!r} is {gradient.layout}: only dense gradients are summed "
                                   "(sparse=False in the embedding; DistributedOptimizer without cross_barrier "
                                   "takes sparse ones, too)")
        if self._gradients is None:
            self._copies[name] = gradient.detach().clone()
        else:
            self._fill(name, gradient)

    def _gradient(self, name: str) -> torch.Tensor:
        gradient = self.parameters[name].grad
        assert gradient is not None, "only called for parameters with a gradient"
        return gradient

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
                own = torch.from_numpy(self.of(name).region(name).array).view(self._wire[name])
                own.view(self.parameters[name].shape).copy_(sent)  # casts into the segment
                self.of(name).ready(name)
            else:
                self.of(name).fill(name, sent.data_ptr(), sent.numel() * sent.element_size())

    def _device(self, parameters: Iterable[torch.Tensor]) -> str | None:
        """Return the device of *parameters* as `Gradients` names it; None: the CPU, or several devices."""
        found = [self._on_device(p.detach().contiguous()).location for p in parameters]
        names = {None if each is None else each.device.name for each in found}
        return names.pop() if len(names) == 1 else None

    def _is_on_device(self, tensor: torch.Tensor) -> bool:
        """Whether the streams of a device copy *tensor*."""
        if not process.current().settings.host_device:
            return tensor.is_cuda
        return self._on_device(tensor).location is not None

    def _on_device(self, tensor: torch.Tensor) -> TensorInput:
        return process.current().devices.located(device_tensor_memory(tensor))

    def synchronize(self) -> None:
        """Send what no backward pass has sent, wait for all sums, and write the averages into the gradients."""
        self.send_rest()
        self.receive()

    def begin(self) -> None:
        """Declare the gradients and send the copies of the first step, which waits until all ranks have declared."""
        is_first = self._gradients is None
        self.extras.restore(self.declare())
        if is_first:
            self._direct = self._direct_paths()
        copies, self._copies = self._copies, {}
        for name, gradient in copies.items():
            self._fill(name, gradient)

    def send_rest(self) -> None:
        """Send what no backward pass has sent, and zeros where there is no gradient."""
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
        self._retire_at_end(added.retire, self.aliases)
        return added

    def _require_known(self) -> None:
        """Raise `UnsupportedError` on all ranks if any of them has a gradient that is not averaged."""
        self.used.require_known()

    def receive(self) -> None:
        """Wait for all sums, write the averages into the gradients, and end the step.

        A parameter without a gradient on any rank gets none. Raises `UnsupportedError` on all ranks if any of them has
        a gradient of a parameter that was not there when this was made.
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
        elif target.dtype == self._wire[name]:
            dense = target if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype)
            self.of(name).deliver(name, dense.data_ptr(), dense.numel() * dense.element_size())
            if dense is not target:
                target.copy_(dense)
        else:
            target.copy_(tensor_over(self.of(name).wait(name), self._wire[name]))
        if name in self.momenta and self.of(name).codec(name) is None:
            self._momentum.add(name, target)

    def _receive_on_device(self, name: str, target: torch.Tensor) -> None:
        """Make torch's current stream find the average in *target*, on a device; the host waits for no copy."""
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
        """Return *gradient* compressed by the user's compressor, and the context for decompressing it."""
        small, context = self._compression.compress(gradient)
        if not isinstance(small, torch.Tensor) or small.layout != torch.strided or small.device.type not in REACHED:
            raise UnsupportedError(f"{_title(self._compression)}.compress has returned for the gradient of {name!r} a "
                                   f"{type(small).__name__}, which is no dense tensor on the CPU or a GPU")
        kind = tuple(small.shape), wire_dtype_name(small.dtype)
        if kind != self.kinds.get(name, kind):
            raise MismatchError(f"{_title(self._compression)}.compress has made a tensor of shape {kind[0]} and dtype "
                                f"{kind[1]} of the gradient of {name!r}; of zeros it has made {self.kinds[name][0]} "
                                f"and {self.kinds[name][1]}: it must be the same for all")
        return small, context

    def forget_passes(self) -> None:
        """Count the backward passes from 0 again; the present gradients do not count as averages any more."""
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
        parameters exists, which would overwrite gradients that are being summed.
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
                alias = region.array.view()
                self.aliases.append(weakref.ref(alias))
                parameter.grad = torch.from_numpy(alias).view(self._wire[name]).view(parameter.shape).zero_()

    def superseded(self) -> None:
        """Stop sending before a step: a later exchange has some of the same parameters."""
        self.is_superseded = True
        own = {array.ctypes.data for alias in self.aliases if (array := alias()) is not None}
        for parameter in self.parameters.values() if own else ():
            gradient = parameter.grad
            if gradient is not None and gradient.layout == torch.strided and gradient.data_ptr() in own:
                parameter.grad = gradient.clone()  # the later exchange would overwrite input that is being summed


GradientAliases = list[weakref.ref[np.ndarray[Any, Any]]]
#: Arguments of `retire_later`, until they were retired.
_to_retire: deque[tuple[Callable[[], bool], GradientAliases]] = deque()


def retire_later(retire: Callable[[], bool], aliases: GradientAliases) -> None:
    """Make `retire_unused` call *retire* when no array of *aliases* is left. Any thread, also in a finalizer.

    *retire* releases memory in the job, if that is possible at the time, and returns whether it was (`Gradients`).
    """
    _to_retire.append((retire, aliases))


def retire_unused() -> None:
    """Retire what was given to `retire_later`, as far as possible now. Not in finalizers: it sends messages."""
    for _ in range(len(_to_retire)):
        try:
            retire, aliases = _to_retire.popleft()
        except IndexError:  # another thread retires them
            return
        try:
            if any(alias() is not None for alias in aliases) or not retire():
                _to_retire.append((retire, aliases))
        except BpsError:
            pass  # the job is over, or has refused the gradients


def forward_order(names: Iterable[str], seen: Iterable[str]) -> list[str]:
    """Return *names* in the order of the forward pass, which is the reverse of the order *seen* in backward.

    A name that was not seen follows the name before it in *names*: a later pass may use it next to that one.
    """
    position_of = {name: position for position, name in enumerate(reversed(list(dict.fromkeys(seen))))}
    after, keys = -1, {}
    for name in names:
        after = keys[name] = position_of.get(name, after)
    return sorted(keys, key=keys.__getitem__)


def _zeros(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def _title(compression: object) -> str:
    return getattr(compression, "__name__", type(compression).__name__)


def _is_compiled() -> bool:
    """Whether torch has compiled anything: compiled code delivers all gradients at once, in no useful order."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"]["ok"])


def tensor_over(view: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over the read-only result *view*; read it at once, never write it (torch cannot forbid that)."""
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

    def __init__(self, named: list[Named], compression: CompressionLike, n_passes: int, sparse_as_dense: bool) -> None:
        super().__init__(named, compression, n_passes)
        self._sparse_as_dense = sparse_as_dense
        self._sparse: list[str] = []  # on some rank, in the first step
        self._tables: dict[str, SparseTable] = {}

    def declare(self) -> Gradients:
        """Declare the gradients to the job; the first time, wait until all ranks have told which are sparse."""
        if self._gradients is None:
            self._sparse = self._sparse_anywhere()
            by_rows = [] if self._sparse_as_dense else self._sparse
            self._refuse_compressed(by_rows)
            self._order = [name for name in self.order() if name not in by_rows]
            self._gradients = self._declared(self._order)
            for name in by_rows:
                shape, dtype = self.kinds[name]
                table = self._tables[name] = SparseTable(process.current(), self.prefix + name, shape, dtype)
                self._retire_at_end(table.retire, [])
        return self._gradients

    def _sparse_anywhere(self) -> list[str]:
        """Return the names of gradients that are sparse on some rank, in the same order on all ranks."""
        names = list(self.used.index_of)  # of all parameters: other ranks may have frozen others
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
            self.codecs.pop(name, None)  # rows are not compressed: unused ones are not sent anyway

    @property
    def busy(self) -> bool:
        return super().busy or any(table.busy for table in self._tables.values())

    def send_rest(self) -> None:
        """As `Exchange.send_rest`; where a gradient that would be sparse is missing, no rows are sent."""
        self.begin()
        for name, table in self._tables.items():
            if not table.busy:
                self._push(name, self.parameters[name].grad)
        super().send_rest()

    def _send(self, name: str) -> None:
        gradient = self._gradient(name)
        if self._gradients is None and gradient.is_sparse:
            self._copies[name] = gradient.detach().clone()
        elif gradient.is_sparse or name in self._tables:
            self._fill(name, gradient)
        else:
            super()._send(name)

    def _fill(self, name: str, gradient: torch.Tensor) -> None:
        if name in self._tables:
            self._push(name, gradient)
        else:  # dense by the ranks' agreement, or not used in the first step, so that no rank called it sparse
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
        self.receive_used()
        with torch.no_grad():
            for name in self._tables:
                self._receive_rows(name, self.parameters[name])
        super().receive()

    def _receive_rows(self, name: str, parameter: torch.Tensor) -> None:
        indices, rows = self._tables[name].wait()
        if parameter.grad is None and not self.used.has(name):
            return
        bits = rows.view(np.int16) if rows.dtype == TABLE["bfloat16"].numpy else rows  # unknown to `from_numpy`
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
        if is_dense or name not in self._sparse:  # dense on all ranks, unless they agreed that it is sparse
            parameter.grad = gradient if is_dense else None
            super()._receive(name, parameter)
            return
        total = parameter.grad = torch.empty_like(parameter, requires_grad=False)
        super()._receive(name, parameter)
        parameter.grad = total.to_sparse(1 if gradient is None else gradient.sparse_dim())
