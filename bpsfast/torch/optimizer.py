"""DistributedOptimizer: the user's optimizer, whose gradients are averaged over all ranks before each step.

A hook on each parameter runs when backward has accumulated its gradient: it copies the gradient into the segment
(once, natively; not at all if it lives there) and announces it. `synchronize` delivers the averages into each
``p.grad``, which is always the rank's own writable memory: clipping, AMP and zero_grad write into it.
"""
from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from ..orchestration.errors import BusyError, ConfigError, UnsupportedError
from ..trainer import current as process
from ..trainer.gradients import Gradients
from .compression import Compression, Compressor
from .ops import wire_dtype_name


class _Exchange:
    """The gradients of one optimizer's parameters on their way: hooks, counts, copies."""

    def __init__(self, named: list[tuple[str, torch.Tensor]], compression: type[Compressor], n_passes: int) -> None:
        self.parameters = dict(named)
        self.n_passes = n_passes
        self._left = dict.fromkeys(self.parameters, n_passes)
        self._wire = {name: compression.wire_dtype(p.dtype) for name, p in named}
        self.gradients = Gradients({name: (tuple(p.shape), wire_dtype_name(self._wire[name])) for name, p in named},
                                   prefix="Gradient.")
        self.synchronized = False
        # The parameters outlive the optimizer: their hooks must not keep it alive, nor act after it.
        me = weakref.ref(self)
        for name, parameter in named:
            handle = parameter.register_post_accumulate_grad_hook(_hook(me, name))
            weakref.finalize(self, handle.remove)

    def accumulated(self, name: str) -> None:
        """Count a backward pass of *name*; after the last one its gradient goes out."""
        if self._left[name] == 0:
            raise BusyError(
                f"the gradient of {name!r} was computed over backward_passes_per_step={self.n_passes} times before "
                "step() or synchronize(): call step() after that many backward passes, or raise the number"
            )
        self._left[name] -= 1
        self.synchronized = False
        if self._left[name] == 0:
            self._send(name)

    def _send(self, name: str) -> None:
        """Copy the gradient into its place in the segment, in the dtype that travels, and announce it."""
        gradient = self.parameters[name].grad
        assert gradient is not None, "only called for parameters with a gradient"
        if gradient.layout != torch.strided:
            raise UnsupportedError(f"the gradient of {name!r} is {gradient.layout}: only dense gradients are summed "
                                   "(sparse=False in the embedding)")
        with torch.no_grad():
            if gradient.dtype != self._wire[name]:
                self._place(name).copy_(gradient)
                self.gradients.ready(name)
            else:
                dense = gradient.detach().contiguous()
                self.gradients.fill(name, dense.data_ptr(), dense.numel() * dense.element_size())

    def _place(self, name: str) -> torch.Tensor:
        """Return this rank's input memory of *name* as a tensor of the travelling dtype."""
        raw = torch.from_numpy(self.gradients.region(name).array)
        return raw.view(self._wire[name]).view(self.parameters[name].shape)

    def synchronize(self) -> None:
        """Send what no backward pass has sent, wait for everything, and write the averages into the gradients."""
        for name in self.gradients.missing():
            if self.parameters[name].grad is not None:
                self._send(name)
        self.gradients.zero_missing()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                self._receive(name, parameter)
        self.gradients.step()
        self.forget_passes()
        self.synchronized = True

    def _receive(self, name: str, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            gradient = parameter.grad = torch.empty_like(parameter, requires_grad=False)
        target = gradient.detach()
        if target.dtype == self._wire[name] and target.is_contiguous():
            self.gradients.deliver(name, target.data_ptr(), target.numel() * target.element_size())
        elif target.dtype == self._wire[name]:
            dense = torch.empty(target.shape, dtype=target.dtype)
            self.gradients.deliver(name, dense.data_ptr(), dense.numel() * dense.element_size())
            target.copy_(dense)
        else:
            target.copy_(_tensor_over(self.gradients.wait(name), self._wire[name]))

    def forget_passes(self) -> None:
        """Count the backward passes from the start."""
        self._left = dict.fromkeys(self.parameters, self.n_passes)

    def house_gradients(self) -> None:
        """Let zeroed gradients live in the segment: backward then accumulates there, and nothing is copied in."""
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            if gradient is None or gradient.dtype != self._wire[name] or not gradient.is_contiguous():
                continue
            place = self._place(name)
            if gradient.data_ptr() != place.data_ptr():
                parameter.grad = place.zero_()


def _hook(exchange: weakref.ref[_Exchange], name: str) -> Callable[[torch.Tensor], None]:
    def accumulated(_: torch.Tensor) -> None:
        found = exchange()
        if found is not None:
            found.accumulated(name)

    return accumulated


def _tensor_over(view: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over a read-only result, only to be read from at once: torch knows no read-only tensors."""
    if view.nbytes == 0:
        return torch.empty(view.shape, dtype=dtype)
    memory = (ctypes.c_uint8 * view.nbytes).from_address(view.ctypes.data)
    return torch.from_numpy(np.ctypeslib.as_array(memory)).view(dtype).view(view.shape)


class _DistributedOptimizer(torch.optim.Optimizer):
    """What is mixed into the user's optimizer class (see `DistributedOptimizer`)."""

    _base: type[torch.optim.Optimizer]
    _exchange: _Exchange | None
    _skips: bool

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients (unless `synchronize` did, or inside `skip_synchronize`) and update the parameters.

        With a *closure*, the gradients of each of its evaluations are averaged.
        """
        if self._exchange is None or self._skips:
            return self._base.step(self) if closure is None else self._base.step(self, closure)
        if closure is None:
            if not self._exchange.synchronized:
                self.synchronize()
            self._exchange.synchronized = False
            return self._base.step(self)

        def averaged() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        result = self._base.step(self, averaged)
        self._exchange.synchronized = False
        return result

    def synchronize(self) -> None:
        """Wait until all gradients are averaged over all ranks and in place; before clipping them, for example.

        A parameter without a gradient contributes zeros, and gets the average as its gradient. The next `step` does
        not average again.

        Raises
        ------
        StallError, PeerLostError
            As `bpsfast.push_pull`.
        """
        if self._exchange is not None:
            self._exchange.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` inside the block use the gradients as they are."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate *passes* backward passes per step from now on. The sum over passes is not divided."""
        if passes < 1:
            raise ConfigError(f"backward_passes_per_step={passes}: at least one pass is needed")
        if self._exchange is not None:
            self._exchange.n_passes = passes
            self._exchange.forget_passes()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. With ``set_to_none=False`` they live in shared memory from now on and need no copy.

        Raises
        ------
        BusyError
            If gradients are under way: between backward and step (or synchronize).
        """
        if self._exchange is not None and self._exchange.gradients.busy:
            raise BusyError("zero_grad() between backward() and step(): gradients are under way; call step() or "
                            "synchronize() first")
        self._base.zero_grad(self, set_to_none)
        if self._exchange is not None:
            self._exchange.forget_passes()
            if not set_to_none:
                self._exchange.house_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: all ranks agreed on the parameters when the optimizer was wrapped."""
        raise UnsupportedError("add the parameter group before DistributedOptimizer wraps the optimizer")


# torch wraps the `step` of a class that has no such mark (when a state is loaded), and would then run the step hooks
# twice: they are run by the user's own class already.
_DistributedOptimizer.step.hooked = True  # type: ignore[attr-defined]

_MIXED_IN = ("step", "synchronize", "skip_synchronize", "set_backward_passes_per_step", "zero_grad", "add_param_group")


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none, backward_passes_per_step: int = 1,
) -> torch.optim.Optimizer:
    """Return *optimizer* as one that averages its gradients over all ranks before each step.

    The result is of a class derived from the optimizer's own and takes over its groups, options and state; the
    original must not be used any more. Gradients that the next forward pass needs first travel first: parameters
    should be given in forward order, as ``model.named_parameters()`` does.

    Parameters
    ----------
    named_parameters
        (name, tensor) of at least all parameters of the optimizer; None: they are numbered.
    compression
        `Compression.fp16` and `Compression.bf16` let gradients travel in half the bytes.
    backward_passes_per_step
        Gradients travel after this many backward passes; the sum over passes is not divided.

    Raises
    ------
    ConfigError
        If names are missing or not unique.
    """
    if backward_passes_per_step < 1:
        raise ConfigError(f"backward_passes_per_step={backward_passes_per_step}: at least one pass is needed")
    base = type(optimizer)
    if hasattr(base, "skip_synchronize"):
        raise ConfigError("the optimizer is a DistributedOptimizer already")
    named = _named(optimizer, named_parameters)
    members = {name: _DistributedOptimizer.__dict__[name] for name in _MIXED_IN}
    derived: Any = type(base.__name__, (base,), {**members, "_base": base})
    wrapped = derived.__new__(derived)
    # A scheduler may have replaced the original's `step` by one bound to the original: leave that behind.
    wrapped.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    wrapped._skips = False
    exchanges = process.size() > 1 and named
    wrapped._exchange = _Exchange(named, compression, backward_passes_per_step) if exchanges else None
    return wrapped


def _named(optimizer: torch.optim.Optimizer,
           named_parameters: Iterable[tuple[str, torch.Tensor]] | None) -> list[tuple[str, torch.Tensor]]:
    """Return (name, parameter) of every trained parameter of *optimizer*, in the order given."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        session = process.current()
        return [(session.tensors.unnamed("push_pull.noname"), p) for p in own if p.requires_grad]
    named = list(named_parameters)
    if any(not isinstance(item, tuple) or len(item) != 2 for item in named):
        raise ConfigError("named_parameters must be (name, tensor) pairs, as model.named_parameters() gives them")
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise ConfigError(f"named_parameters names {', '.join(twice)} more than once")
    known, wanted = {id(p) for _, p in named}, {id(p) for p in own}
    absent = sum(id(p) not in known for p in own)
    if absent:
        raise ConfigError(f"{absent} of {len(own)} parameters of the optimizer are not in named_parameters")
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, p in named:
        if id(p) in wanted and p.requires_grad:
            found.setdefault(id(p), (name, p))
    for name, p in found.values():
        if p.device.type != "cpu":
            raise UnsupportedError(f"parameter {name!r} is on {p.device}: only CPU parameters are supported")
    return list(found.values())
