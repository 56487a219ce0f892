"""DistributedDataParallel: a module whose gradients are averages over all ranks when `backward` returns.

    construction  all ranks get rank 0's parameters and buffers
    forward       all ranks get rank 0's buffers, then run the module's own forward pass
    backward      each gradient is sent as soon as it is computed (`exchange`); the end waits for all averages

A hook on the module's output asks autograd to call back at the end of the backward pass that has begun there. So it
does not matter which parameters were used, and nested passes (checkpoints that compute again) do not end it. BytePS
counts gradients instead, in one count for the process.

Several modules may be used in one backward pass. All of them send their remaining gradients before any of them waits,
so ranks may use them in different orders, except in a step in which a parameter of one of them is thawed.
"""
from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch

from ..elastic.coordinator_client import current_client
from ..orchestration.errors import BpsError, BusyError, ClosedError, ConfigError, PeerLostError, UnsupportedError
from ..trainer import process
from .broadcast import broadcast_buffers, broadcast_parameters
from .compression import Compression, CompressionLike, check_compression
from .exchange import Exchange
from .gradient_hooks import Named
from .ops import REACHED
from .optimizer_extras import has_momentum, warn_of_momentum

_queue_at_end: Any = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]

#: Autograd's number of a running backward pass -> the exchanges whose gradients its end averages.
_to_end: dict[int, set[_ModuleExchange]] = {}


class _ModuleExchange(Exchange):
    """Averages the gradients of one module. They are sent while `sends` is true; otherwise they accumulate."""

    def __init__(self, named: list[Named], compression: CompressionLike) -> None:
        super().__init__(named, compression, n_passes=1)
        self.sends = True
        self.is_used = False  # by a forward pass, since the last step
        self.synchronized = True
        self._n_left = len(self.parameters)

    def accumulated(self, name: str) -> None:
        if not self.sends:
            self.synchronized = False
            return
        if not self._left[name] and not self.is_superseded:
            raise BusyError(f"the gradient of {name!r} has come twice in one backward pass, or the last pass was not "
                            "ended by synchronize(). Checkpoints that use one parameter twice need use_reentrant=False")
        super().accumulated(name)
        if self.is_superseded and not self.is_used:
            return
        self._n_left -= 1
        if not self._n_left:  # even if this pass did not begin at an output with a hook
            _end_later(self)

    def forget_passes(self) -> None:
        super().forget_passes()
        self._n_left, self.is_used = len(self.parameters), False

    def superseded(self) -> None:
        """As `Exchange.superseded`; earlier forward passes do not count, because other ranks may not have made them."""
        super().superseded()
        self.is_used = False

    def output_reached(self, _: torch.Tensor) -> None:
        """Handle a backward pass that has reached an output of the module."""
        if self.sends:
            self.synchronized = False
            _end_later(self)


def _end_later(exchange: _ModuleExchange) -> None:
    """Make the running backward pass, which calls this, average the gradients of *exchange* at its end."""
    number = torch._C._current_graph_task_id()
    _to_end.setdefault(number, set()).add(exchange)
    _queue_at_end(partial(_end_pass, number))


def _end_pass(number: int) -> None:
    """Average the gradients of all modules that backward pass *number* has used, unless that was done."""
    exchanges = _to_end.pop(number, set())
    _average(sorted((each for each in exchanges if not each.synchronized), key=lambda each: each.number))


def _forget_passes_of(exchange: _ModuleExchange) -> None:
    """Forget the passes that were to average *exchange*: one that an exception has interrupted never ends."""
    for number in [number for number, exchanges in _to_end.items() if exchange in exchanges]:
        _to_end[number].discard(exchange)
        if not _to_end[number]:
            del _to_end[number]


def _average(exchanges: Sequence[_ModuleExchange]) -> None:
    for exchange in exchanges:
        exchange.declare()
    for exchange in exchanges:
        exchange.send_rest()
    refused: list[BpsError] = []
    for exchange in exchanges:
        try:
            exchange.receive()
        except (BusyError, UnsupportedError) as exc:  # concerns one model; the others' gradients must be received too
            refused.append(exc)
    if refused:
        raise refused[0]


class DistributedDataParallel(torch.nn.Module):
    """*module*, trained by all ranks together: its gradients are the averages over all ranks. One thread at a time.

    All ranks make the same modules in the same order; a process may have several. ``state_dict`` is that of a module
    whose only child is ``module``, as in torch's class of this name. Unlike that class, and as in BytePS, it needs no
    process group, and every forward pass broadcasts the buffers, also in evaluation: to evaluate on one rank alone, use
    ``model.module``.

    Parameters
    ----------
    module
        On the CPU, or on this rank's GPU. Parameters must not be added later: the backward pass refuses their gradients
        on all ranks. They may be frozen and thawed; one without a gradient on any rank gets none.
    device_ids
        BytePS's: at most one device, and it changes nothing: the module stays where it is.
    broadcast_buffers
        Broadcast rank 0's buffers before each forward pass.
    compression
        As of `DistributedOptimizer`; names are those of *module*'s parameters. For error feedback see
        `follow_learning_rates`.

    Raises
    ------
    UnsupportedError
        If a parameter or buffer is on another device, or of a dtype that is not summed.
    MismatchError
        If the ranks' modules differ; the text names the first difference.
    StallError, PeerLostError
        As `bpsfast.push_pull`; also from forward and backward. In an elastic program that goes on without lost workers,
        a loss during the construction is not raised: `bpsfast.elastic.run` notices it, and `TorchState` lets the module
        join the next job.
    ClosedError
        From forward, after such a loss, if the module has not joined another job.
    """

    def __init__(self, module: torch.nn.Module, device_ids: Sequence[Any] | None = None, broadcast_buffers: bool = True,
                 compression: CompressionLike = Compression.none) -> None:
        super().__init__()
        check_compression(compression)
        if device_ids is not None and len(device_ids) > 1:
            raise ConfigError(f"device_ids={list(device_ids)}: a rank has one device; start a rank for each")
        for name, p in module.named_parameters():
            if p.device.type not in REACHED:
                raise UnsupportedError(f"parameter {name!r} is on {p.device}: only those of the CPU and of GPUs are "
                                       "averaged")
        self.module = module
        self.device_ids = None if device_ids is None else list(device_ids)
        self.broadcast_buffers = broadcast_buffers
        self._exchange: _ModuleExchange | None = None
        self._compression = compression
        self._followed: weakref.ref[torch.optim.Optimizer] | None = None
        self._lost = ""  # why the job was lost while this was made, until it joins another one
        try:
            self.rejoin()
        except PeerLostError as exc:
            member = current_client()
            if member is None or member.lost_worker == "abort":
                raise
            self._lost = str(exc)

    def rejoin(self) -> None:
        """Average gradients in the job that was joined last, and take rank 0's parameters, as the constructor does.

        On all ranks of that job, in the order in which they make their modules, or had made them. It follows the
        learning rates of the same optimizer.
        """
        module, compression = self.module, self._compression
        if self._exchange is not None:
            _forget_passes_of(self._exchange)
            self._exchange.abandon()
            self._exchange = None
        named: list[Named] = list(module.named_parameters())
        if process.size() == 1 and not has_momentum(compression, named):
            self._lost = ""
            return
        exchange = _ModuleExchange(named, compression)
        exchange.used.members = module.parameters
        try:
            broadcast_parameters(module.state_dict(), root_rank=0)
        except BaseException:
            exchange.abandon()  # the traceback may keep it alive
            raise
        self._exchange, self._lost = exchange, ""
        self._buffers_name = process.current().tensors.unnamed("buffers of DistributedDataParallel")  # of this job
        self._follow()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Broadcast rank 0's buffers to all ranks, then run the module."""
        if self._lost:
            raise ClosedError(f"this module belongs to no job: a worker was lost while it was made ({self._lost}). "
                              "Give it to the training's TorchState, which joins it to the next job, or call rejoin()")
        exchange = self._exchange
        if exchange is None:
            return self.module(*inputs, **kwargs)
        if self.broadcast_buffers:
            buffers = list(self.module.named_buffers())
            if buffers:
                broadcast_buffers(buffers, 0, self._buffers_name)
        output = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled() and exchange.has_parameters:
            exchange.synchronized, exchange.is_used = False, True
            for tensor in _tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(exchange.output_reached)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the backward passes inside the block on this rank; the next one outside averages the total."""
        exchange = self._exchange
        if exchange is None:
            yield
            return
        before, exchange.sends = exchange.sends, False
        try:
            yield
        finally:
            exchange.sends = before

    def follow_learning_rates(self, optimizer: torch.optim.Optimizer) -> None:
        """Use the learning rates of the groups of *optimizer* at each backward pass for error feedback.

        Otherwise the residual of a gradient is added to the next one unscaled, even if the learning rate has changed.
        """
        self._followed = weakref.ref(optimizer)
        self._follow()

    def _follow(self) -> None:
        optimizer = None if self._followed is None else self._followed()
        if self._exchange is not None and optimizer is not None:
            self._exchange.follow(optimizer)
            warn_of_momentum(optimizer, self._exchange.momenta)

    def synchronize(self) -> None:
        """Average the gradients, if that has not happened since the last forward pass.

        `backward` does so if it passes through an output of the module. Call this on ranks whose loss does not depend
        on the module's output, after passes inside `no_sync`, and after passes that an exception has interrupted.
        """
        if self._exchange is not None and not self._exchange.synchronized:
            _forget_passes_of(self._exchange)
            _average([self._exchange])


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in what a module has returned."""
    items: Iterable[Any] = ()
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list | tuple):
        items = value
    elif is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, field.name) for field in fields(value)]
    for item in items:
        yield from _tensors_in(item)
