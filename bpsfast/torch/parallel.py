"""DistributedDataParallel: a module whose gradients are averages over all ranks when `backward` returns.

    construction  rank 0's parameters and buffers are given to all ranks
    forward       rank 0's buffers are given to all ranks, then the module's own forward pass
    backward      each gradient leaves as soon as it is there (`exchange`); at its end all averages are awaited

The end of a backward pass is what autograd calls last in the pass that has begun at the module's output: a hook on the
output asks for that. So it does not matter which parameters were used, and passes within the pass (checkpoints that
compute again) end nothing. BytePS counts gradients instead, in one count for the process.

Several modules may be used in one backward pass. Then all of them send what is left before any of them waits, so ranks
may come to them in different orders; but for a step in which a parameter of one of them is thawed.
"""
from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
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
from .ops import REACHED
from .optimizer_extras import has_momentum, warn_of_momentum

_queue_at_end: Any = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]

#: What the backward passes that go on (autograd's numbers of them) have to end.
_to_end: dict[int, set[_ModuleExchange]] = {}


class _ModuleExchange(Exchange):
    """The gradients of one module. They are sent while `sends` is true, else they add up."""

    def __init__(self, named: list[tuple[str, torch.Tensor]], compression: CompressionLike) -> None:
        super().__init__(named, compression, n_passes=1)
        self.sends = True
        self.is_used = False  # by a forward pass, since the last step
        self.synchronized = True
        self._n_left = len(self.parameters)

    def accumulated(self, name: str) -> None:
        """Send the gradient of *name*."""
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
        if not self._n_left:  # whether or not this pass goes through an output that is known
            _end_later(self)

    def forget_passes(self) -> None:
        """Expect all gradients again."""
        super().forget_passes()
        self._n_left, self.is_used = len(self.parameters), False

    def superseded(self) -> None:
        """As `Exchange.superseded`. Of forward passes before that none has to be ended: ranks may have done without."""
        super().superseded()
        self.is_used = False

    def output_reached(self, _: torch.Tensor) -> None:
        """Be told that a backward pass has come to an output of the module."""
        if self.sends:
            self.synchronized = False
            _end_later(self)


def _end_later(exchange: _ModuleExchange) -> None:
    """Let the backward pass that calls this end by averaging the gradients of *exchange*."""
    number = torch._C._current_graph_task_id()
    _to_end.setdefault(number, set()).add(exchange)
    _queue_at_end(partial(_end_pass, number))


def _end_pass(number: int) -> None:
    """Average the gradients of all modules that this backward pass has used, unless that was done."""
    exchanges = _to_end.pop(number, set())
    _average(sorted((each for each in exchanges if not each.synchronized), key=lambda each: each.number))


def _forget_passes_of(exchange: _ModuleExchange) -> None:
    """End nothing of *exchange* later: passes that an exception has ended never come to their end."""
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
        except (BusyError, UnsupportedError) as exc:  # of one model; the others' gradients have to be taken, too
            refused.append(exc)
    if refused:
        raise refused[0]


class DistributedDataParallel(torch.nn.Module):
    """*module*, trained by all ranks together: its gradients are the averages over all ranks. One thread at a time.

    All ranks make the same modules in the same order; a process may have several. ``state_dict`` is that of a module
    whose only child is ``module``, as of torch's class of this name. Unlike that class, and as in BytePS, it needs no
    process group, and every forward pass gives out the buffers, also while evaluating: evaluate on one rank alone by
    ``model.module``.

    Parameters
    ----------
    module
        On the CPU, or on this rank's GPU. Its parameters are all there: gradients of others are refused on all ranks,
        by the backward pass. They may be frozen and thawed: one that has a gradient on no rank gets none.
    device_ids
        BytePS's: at most one device, which changes nothing: the module is where it is.
    broadcast_buffers
        Give rank 0's buffers to all ranks before each forward pass.
    compression
        As of `DistributedOptimizer`; names are those of *module*'s parameters. For error feedback see
        `follow_learning_rates`.

    Raises
    ------
    UnsupportedError
        If a parameter or buffer is on neither, or of a dtype that is not summed.
    MismatchError
        If the ranks' modules differ; the text names the first difference.
    StallError, PeerLostError
        As `bpsfast.push_pull`; also from forward and backward. In an elastic program that goes on without lost workers,
        a loss during the construction is not raised: `bpsfast.elastic.run` will see it, and `TorchState` joins the
        module to the next job.
    ClosedError
        From forward, after such a loss, in a program that has not joined it.
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
        self._lost = ""  # why the job was lost while this was made, until it is joined to another one
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
        named: list[tuple[str, torch.Tensor]] = list(module.named_parameters())
        if process.size() == 1 and not has_momentum(compression, named):
            self._lost = ""
            return
        exchange = _ModuleExchange(named, compression)
        exchange.used.members = module.parameters
        try:
            broadcast_parameters(module.state_dict(), root_rank=0)
        except BaseException:
            exchange.abandon()  # whoever holds the traceback holds it, too
            raise
        self._exchange, self._lost = exchange, ""
        self._buffers_name = process.current().tensors.unnamed("buffers of DistributedDataParallel")  # of this job
        self._follow()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Give rank 0's buffers to all ranks; return what the module makes of the arguments."""
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
        """Let backward passes inside the block add up on this rank; the next one outside averages the whole."""
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
        """Tell error feedback the learning rates of *optimizer*, as its groups have them at each backward pass.

        Without that, what was not sent of a gradient counts as much in the next step as it did in its own.
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

        `backward` does it wherever it comes through an output of the module. This is for ranks whose loss does not
        depend on the module's output, for passes inside `no_sync`, and for passes that an exception has ended.
        """
        if self._exchange is not None and not self._exchange.synchronized:
            _forget_passes_of(self._exchange)
            _average([self._exchange])


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in what a module has returned."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors_in(getattr(value, field.name))
