"""The gradients of one optimizer's parameters on their way: hooks, counts, copies.

A hook on each parameter runs when backward has accumulated its gradient: it copies the gradient into the segment
(once, natively; not at all if it lives there) and announces it. `synchronize` delivers the averages into each
``p.grad``, which is always the rank's own writable memory: clipping, AMP and zero_grad write into it.

What the next forward pass needs first travels first. The first backward pass shows that order: autograd goes through
the forward pass backwards, and the last gradient of a parameter to come is that of its first use. So gradients of the
first step are kept, and declared and sent by `synchronize`; those of later steps are sent by the hooks, at once. Rank
0's order counts for all.
"""
from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from ..compression.choice import chosen_among
from ..orchestration.errors import BusyError, MismatchError, UnsupportedError
from ..trainer import current as process
from ..trainer.gradients import Gradients
from ..trainer.tensor_input import TensorInput
from .compression import CompressionLike, cast_dtype, parted
from .kept import KEY, TUNED, Kept, tuned_point, tuned_state
from .learning_rates import LearningRates
from .local_momentum import LocalMomentum, momenta
from .ops import REACHED, far_memory, wire_dtype_name


class Exchange:
    """Averages the gradients of *named* parameters over all ranks. Owner: the optimizer or the model; one thread at a
    time. Codecs are chosen by the names as they are given here.
    """

    def __init__(self, named: list[tuple[str, torch.Tensor]], compression: CompressionLike, n_passes: int) -> None:
        compression, self._choice = parted(compression)
        self.parameters = dict(named)
        self.n_passes = n_passes
        self._left = dict.fromkeys(self.parameters, n_passes)
        self._compression = compression
        self._wire: dict[str, torch.dtype] = {}
        self.kinds: dict[str, tuple[tuple[int, ...], str]] = {}  # shape and dtype of what travels
        self._contexts: dict[str, Any] = {}  # of what the user's compressor has compressed; those it does not: not here
        for name, p in named:
            cast = cast_dtype(compression, p.dtype)
            if cast is None:
                sample, self._contexts[name] = self._compress(name, _zeros(p))
            self._wire[name] = sample.dtype if cast is None else cast
            self.kinds[name] = tuple(sample.shape if cast is None else p.shape), wire_dtype_name(self._wire[name])
        self.codecs = chosen_among(self._choice, self.kinds, process.current().settings.min_compress_bytes)
        self.momenta = momenta(self._choice, self.kinds)
        self._momentum = LocalMomentum(self.momenta)
        self.kept = Kept(self._momentum)
        self._rates: LearningRates | None = None
        self._gradients: Gradients | None = None
        self._seen: dict[str, None] = {}  # in the order in which the first step's backward came to them
        self._copies: dict[str, torch.Tensor] = {}  # copies of the first step's gradients
        self._afar: dict[str, torch.Tensor] = {}  # on a device: what travels of a gradient, and becomes the average
        self._order = list(self.parameters)
        self.prefix = "Gradient."  # of the names, which are the job's
        self.synchronized = False
        self._hooks = watch(self, named)

    @property
    def gradients(self) -> Gradients:
        """The gradients as the job knows them, since `declare`."""
        assert self._gradients is not None, "`begin` declares them; hooks keep copies before"
        return self._gradients

    def declare(self) -> Gradients:
        """Tell the job of the gradients, if nobody has. Waits for nobody."""
        if self._gradients is None:
            self._order = self.order()
            self._gradients = Gradients(self.kinds, prefix=self.prefix, order=self._order, compression=self._choice,
                                        tuned=self.kept.tuned, afar=self._device())
        return self._gradients

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the learning rates for error feedback from the groups of *optimizer*, as they are at each backward."""
        self._rates = LearningRates(optimizer)

    def state(self) -> dict[str, Any]:
        """Return what is kept (`kept`) by its names in a state_dict; those of which nothing is are not there. Between
        steps.
        """
        point = self.kept.tuned if self._gradients is None else self._gradients.tuned
        parts = {KEY: self.kept.save(self._gradients), TUNED: tuned_state(point)}
        return {name: part for name, part in parts.items() if part}

    def load(self, state: dict[str, Any]) -> None:
        """Take from *state* what `state` returned on this node, and out of it; raises as `Kept.load`."""
        parts, tuned = state.pop(KEY, None), state.pop(TUNED, None)
        if tuned:
            self.kept.tuned = tuned_point(tuned)
        if parts:
            self.kept.load(parts, self._gradients)

    def order(self) -> list[str]:
        """Return the names as the next forward pass uses them, as far as the last backward pass has shown it."""
        return self._order if _is_compiled() else forward_order(self.parameters, self._seen)

    @property
    def busy(self) -> bool:
        """Whether gradients are under way: after backward, before the step."""
        return bool(self._copies) or (self._gradients is not None and self._gradients.busy)

    def accumulated(self, name: str) -> None:
        """Count a backward pass of *name*; after the last one its gradient goes out."""
        if self._left[name] == 0:
            raise BusyError(
                f"the gradient of {name!r} was computed over backward_passes_per_step={self.n_passes} times before "
                "step() or synchronize(): call step() after that many backward passes, or raise the number"
            )
        self._left[name] -= 1
        self.synchronized = False
        if self._gradients is None:
            self._seen.setdefault(name)
        if self._left[name] == 0:
            self._send(name)

    def _send(self, name: str) -> None:
        """Let the gradient go as it is now; in the first step with `synchronize`, which may wait for other ranks."""
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
        """Copy *gradient* into its place in the segment, as it travels, and announce it."""
        if self._rates is not None and name in self.codecs and self.codecs[name].error_feedback:
            rate = self._rates.of(self.parameters[name])
            if rate is not None:
                self.gradients.learning_rate = {name: rate}
        with torch.no_grad():
            if name in self._contexts:
                gradient, self._contexts[name] = self._compress(name, gradient.detach())
            sent = gradient.detach().contiguous()
            if self._is_afar(sent):
                sent = sent.to(self._wire[name])
                memory = self._on_device(sent)
                self.gradients.fill_from(name, memory, memory)
                self._afar[name] = sent
            elif sent.dtype != self._wire[name]:
                self._place(name).copy_(sent)
                self.gradients.ready(name)
            else:
                self.gradients.fill(name, sent.data_ptr(), sent.numel() * sent.element_size())

    def _device(self) -> str | None:
        """Return the device of the parameters, as `Gradients` calls it; None: the CPU, or several."""
        places = [self._on_device(p.detach().contiguous()).place for p in self.parameters.values()]
        names = {None if place is None else place.device.name for place in places}
        return names.pop() if len(names) == 1 else None

    def _is_afar(self, tensor: torch.Tensor) -> bool:
        """Whether *tensor* is copied by the streams of a device."""
        if not process.current().settings.host_device:
            return tensor.is_cuda
        return self._on_device(tensor).place is not None

    def _on_device(self, tensor: torch.Tensor) -> TensorInput:
        return process.current().devices.placed(far_memory(tensor))

    def _place(self, name: str) -> torch.Tensor:
        """Return this rank's input memory of *name* as a tensor of the travelling dtype."""
        raw = torch.from_numpy(self.gradients.region(name).array)
        return raw.view(self._wire[name]).view(self.parameters[name].shape)

    def synchronize(self) -> None:
        """Send what no backward pass has sent, wait for everything, and write the averages into the gradients."""
        self.send_rest()
        self.receive()

    def begin(self) -> None:
        """Send what the first step has kept; waits until all ranks have declared their gradients, if anything was."""
        self.kept.settle(self.declare())
        copies, self._copies = self._copies, {}
        for name, gradient in copies.items():
            self._fill(name, gradient)

    def send_rest(self) -> None:
        """Send what no backward pass has sent, zeros where there is no gradient."""
        self.begin()
        for name in self.gradients.missing():
            if self.parameters[name].grad is not None:
                self._send(name)
        self._zero_missing()

    def _zero_missing(self) -> list[str]:
        """Let every gradient that was not sent contribute zeros; return their names."""
        missing = self.gradients.missing()
        for name in missing:
            if name in self._contexts:
                self._fill(name, _zeros(self.parameters[name]))
        self.gradients.zero_missing()
        return missing

    def receive(self) -> None:
        """Wait for everything, and write the averages into the gradients: the step is over."""
        with torch.no_grad():
            for name in self._order:
                self._receive(name, self.parameters[name])
        self.gradients.step()
        self.forget_passes()
        self.synchronized = True

    def _receive(self, name: str, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            gradient = parameter.grad = torch.empty_like(parameter, requires_grad=False)
        target = gradient.detach()
        if name in self._afar or target.is_cuda:
            self._receive_afar(name, target)
        elif name in self._contexts:
            sums = tensor_over(self.gradients.wait(name), self._wire[name])
            target.copy_(self._decompress(name, sums.clone(), target))  # it may write into what it gets
        elif target.dtype == self._wire[name] and target.is_contiguous():
            self.gradients.deliver(name, target.data_ptr(), target.numel() * target.element_size())
        elif target.dtype == self._wire[name]:
            dense = torch.empty(target.shape, dtype=target.dtype)
            self.gradients.deliver(name, dense.data_ptr(), dense.numel() * dense.element_size())
            target.copy_(dense)
        else:
            target.copy_(tensor_over(self.gradients.wait(name), self._wire[name]))
        if name in self.momenta and self.gradients.codec(name) is None:
            self._momentum.add(name, target)

    def _receive_afar(self, name: str, target: torch.Tensor) -> None:
        """Let torch's current stream find the average in *target*, on a device. The host waits for no copy."""
        sums = self._afar.get(name)
        if sums is None:  # nothing was sent: it has no gradient on this rank
            sums = torch.empty(self.kinds[name][0], dtype=self._wire[name], device=target.device)
        self.gradients.deliver_to(name, self._on_device(sums))
        self._afar.pop(name, None)
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
        """Count the backward passes from the start."""
        self._copies.clear()
        self._afar.clear()
        self._left = dict.fromkeys(self.parameters, self.n_passes)

    def abandon(self) -> None:
        """Forget all gradients, which may lie in memory of a job that is over, and hear of no others.

        Another exchange may follow while somebody, a traceback for example, still holds this one.
        """
        for hook in self._hooks:
            hook.remove()
        for parameter in self.parameters.values():
            parameter.grad = None

    def house_gradients(self) -> None:
        """Let zeroed gradients live in the segment: backward then accumulates there, and nothing is copied in.

        Not before the first step: until then there is no place for them.
        """
        if self._gradients is None:
            return
        for name in self._order:
            parameter = self.parameters[name]
            gradient = parameter.grad
            if name in self._contexts or gradient is None or gradient.layout != torch.strided:
                continue
            if gradient.dtype != self._wire[name] or not gradient.is_contiguous() or gradient.is_cuda:
                continue
            place = self._place(name)
            if gradient.data_ptr() != place.data_ptr():
                parameter.grad = place.zero_()


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


class Watcher(Protocol):
    """What is told of gradients."""

    def accumulated(self, name: str) -> None:
        """Hear that backward has accumulated the gradient of *name*."""


def watch(watcher: Watcher, named: list[tuple[str, torch.Tensor]]) -> list[RemovableHandle]:
    """Tell *watcher* of the gradients of *named* parameters, as long as it lives; return the hooks.

    They outlive it: their hooks must not keep it alive, nor act after it.
    """
    me = weakref.ref(watcher)
    hooks = [parameter.register_post_accumulate_grad_hook(_hook(me, name)) for name, parameter in named]
    for hook in hooks:
        weakref.finalize(watcher, hook.remove)
    return hooks


def _hook(exchange: weakref.ref[Watcher], name: str) -> Callable[[torch.Tensor], None]:
    def accumulated(_: torch.Tensor) -> None:
        found = exchange()
        if found is not None:
            found.accumulated(name)

    return accumulated


def tensor_over(view: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over a read-only result, only to be read from at once: torch knows no read-only tensors."""
    if view.nbytes == 0:
        return torch.empty(view.shape, dtype=dtype)
    memory = (ctypes.c_uint8 * view.nbytes).from_address(view.ctypes.data)
    return torch.from_numpy(np.ctypeslib.as_array(memory)).view(dtype).view(view.shape)
