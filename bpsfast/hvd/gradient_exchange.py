"""Reduces the gradients of Horovod's DistributedOptimizer: as `bpsfast.torch` does, or by negotiated operations.

`DenseExchange` declares gradients once for the whole job and sends them by priority, fused, without negotiation. It
adds sums, factors, sparse gradients and `join` to `torch.exchange.Exchange`. In the first step all ranks tell each
other which gradients are sparse; those are reduced by allgather. Each step also sums a counter to which only joined
ranks add 1. A joined rank takes part in each step with zeros until that counter shows that all ranks have joined.

A joined rank also takes part in the steps of optimizers that it no longer has but other ranks do. So in the first step
of an optimizer all ranks tell each other which earlier optimizers they still have, and free the memory of the others.

`NegotiatedExchange` reduces gradients by operations under the names of their parameters: for process sets, and for Min,
Max and Product.
"""
from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch

from ..orchestration.errors import BusyError, UnsupportedError
from ..torch.compression import CompressionLike
from ..torch.exchange import Exchange, retire_later, retire_unused
from ..torch.gradient_hooks import (
    UsedParameters,
    is_reduced_by_another,
    note_reduced,
    observe_gradients,
    observer_numbers,
    unfrozen,
)
from ..trainer.gradients import Gradients
from . import runtime
from .collective_ops import allreduce_async, allreduce_async_, grouped_allreduce_async_, sparse_allreduce_async
from .handle import Handle, synchronize
from .reduce_op import Average, Max, Product, ReduceOp, Sum
from .runtime import ProcessSet


class TooManyPassesError(BusyError, AssertionError):
    """A gradient was computed again before step used it. Call step, or raise backward_passes_per_step."""

    def __init__(self) -> None:
        super().__init__("Gradients were computed more than backward_passes_per_step times before call to step(). "
                         "Increase backward_passes_per_step to accumulate gradients locally.")


class StepProxy:
    """Takes part in the steps of one optimizer on a rank that has joined (`runtime.JoinProxy`).

    It outlives the optimizer and its *exchange*, as other ranks may still have theirs. *average*: divide sums by the
    number of ranks.
    """

    def __init__(self, exchange: DenseExchange, average: bool) -> None:
        found = runtime.current()
        self.number = found.n_optimizers
        found.n_optimizers += 1
        found.join_proxies.append(self)
        kinds, codecs = exchange.kinds, exchange.codecs
        self._title = f"DistributedOptimizer.{self.number}"
        self._names = sorted(exchange.parameters)
        self._places = dict(exchange.used.index_of)
        self._frozen = set(exchange.used.frozen)
        self._present = exchange.used.title
        #: The name of the counter of joined ranks; no other optimizer has the same.
        self._joined = f"bpsfast.hvd.joined of {min(self._places, default='nothing')}"
        self._kinds = {self._present: exchange.used.kind, self._joined: ((1,), "float32"),
                       **{name: kinds[name] for name in self._names}}
        self._frozen_kinds = {name: kinds[name] for name in self._frozen if name in kinds}
        #: `Gradients` of parameters that were frozen at first, by name.
        self.admitted: dict[str, Gradients] = {}
        self._choice = {name: codecs.get(name) for name in self._kinds}
        self._average = average
        self._prefix = exchange.prefix
        self._exchange = weakref.ref(exchange)
        self._homes = exchange.aliases
        #: Steps in which this rank took part with gradients of its own since `take_n_steps`.
        self.n_steps = 0
        self._question: Handle | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        #: The dense gradients, once they are declared to the job; and the names of the sparse ones, which are not.
        self.gradients: Gradients | None = None
        self.sparse: set[str] = set()

    def ask(self, sparse: set[str], joins: bool = False) -> None:
        """Tell the other ranks, once, which gradients are *sparse* here, and which earlier optimizers this rank still
        has: all of them if it *joins*.
        """
        left = {each.number for each in _step_proxies() if joins or each._exchange() is not None}
        mask = torch.tensor([*(name in sparse for name in self._names),
                             *(number in left for number in range(self.number))], dtype=torch.uint8)
        self._question = allreduce_async(mask, name=f"{self._title}.sparse", op=Max)

    def declare(self, order: list[str]) -> Gradients:
        """Wait for the answers to `ask`, and declare the other gradients, the most urgent first in *order*."""
        if self.gradients is None:
            assert self._question is not None, "`ask` was called"
            answer = self._question.wait().tolist()
            _retire([number for number, is_left in enumerate(answer[len(self._names):]) if not is_left])
            self.sparse = {name for name, is_sparse in zip(self._names, answer) if is_sparse}
            kinds = {name: kind for name, kind in self._kinds.items() if name not in self.sparse}
            dense = [name for name in order if name not in self.sparse]
            self.gradients = Gradients(kinds, prefix=self._prefix, order=[self._present, self._joined, *dense],
                                       average=self._average, compression=self._choice)
        return self.gradients

    def admit(self, names: list[str]) -> Gradients:
        """Declare gradients of parameters that were frozen at first; all steps from this one on include them."""
        unknown = [name for name in names if name not in self._frozen_kinds]
        if unknown:
            raise UnsupportedError(f"{', '.join(unknown[:4])}: gradients of this dtype are not summed")
        added = Gradients({name: self._frozen_kinds[name] for name in names}, prefix=self._prefix,
                          average=self._average)
        self._frozen.difference_update(names)
        self.admitted.update(dict.fromkeys(names, added))
        return added

    def retire(self) -> None:
        """Release the memory: no rank has the optimizer any more."""
        for each in dict.fromkeys((self.gradients, *self.admitted.values())):
            if each is not None:
                retire_later(each.retire, self._homes)

    def take_n_steps(self) -> int:
        """Return `n_steps`, and count from 0 again."""
        n_steps, self.n_steps = self.n_steps, 0
        return n_steps

    def begin(self) -> None:
        """Prepare to take part, before the other ranks hear that this one joins."""
        exchange = self._exchange()
        if exchange is not None:
            exchange.forget_passes()
        if self._question is None:
            self.ask(set(), joins=True)

    def start(self, over: threading.Event) -> None:
        """Take part in a thread of its own until all ranks have joined or *over* is set.

        A failure sets *over*, so that the other proxies end after the step under way.
        """
        self._thread = threading.Thread(target=self._run, args=(over,), name="bpsfast-hvd-joined", daemon=True)
        self._thread.start()

    def wait(self) -> Exception | None:
        """Wait for the end of that thread; return its error, None if all ranks have joined."""
        assert self._thread is not None, "`start` was called"
        self._thread.join()
        error, self._error = self._error, None
        return error

    def _run(self, over: threading.Event) -> None:
        try:
            gradients = self.declare(self._names)
            while not over.is_set() and not self._step(gradients):
                pass
        except Exception as exc:  # `wait` returns it
            self._error = exc
            over.set()

    def _step(self, gradients: Gradients) -> bool:
        """Take part in one step with zeros; return whether all ranks had joined before it."""
        gradients[self._joined][0] = 1
        gradients.ready(self._joined)
        gradients.zero_missing()
        for each in self.admitted.values():
            each.zero_missing()
        names = unfrozen(self._frozen, self._places, gradients.wait(self._present))
        if names:
            self.admit(names).zero_missing()
        for each in dict.fromkeys((gradients, *self.admitted.values())):
            each.step()
        n_joined = float(gradients.wait(self._joined)[0])
        return n_joined == (1.0 if self._average else float(runtime.current().size))


class DenseExchange(Exchange):
    """Reduces the gradients of *named* parameters over all ranks by Average or Sum. Owner as `Exchange`.

    Gradients are divided by *predivide* before they are averaged, and the averages multiplied by it. *sparse_as_dense*:
    sparse gradients are sent as dense ones; the result is sparse again.
    """

    def __init__(self, named: list[tuple[str, torch.Tensor]], compression: CompressionLike, n_passes: int, op: ReduceOp,
                 predivide: float, sparse_as_dense: bool) -> None:
        super().__init__(named, compression, n_passes)
        self._op = op
        self._predivide = predivide
        self._sparse_as_dense = sparse_as_dense
        self._sparse: dict[str, Callable[[], torch.Tensor]] = {}  # of this step, under way
        self._join_proxy = StepProxy(self, op is Average)

    def accumulated(self, name: str) -> None:
        """As `Exchange.accumulated`, with Horovod's error."""
        if self._left[name] == 0 and not self.is_superseded:
            raise TooManyPassesError
        super().accumulated(name)

    def declare(self) -> Gradients:
        """Declare the gradients to the job, once; wait until all ranks have said which are sparse."""
        if self._gradients is None:
            if self._join_proxy.gradients is None:
                self._join_proxy.ask({name for name, p in self.parameters.items()
                                      if p.grad is not None and p.grad.is_sparse and not self._sparse_as_dense})
                order = self.order()
            else:
                order = self._order  # the proxy declared them while this rank had joined
            self._gradients = self._used_gradients = self._join_proxy.declare(order)
            self._order = [name for name in order if name not in self._join_proxy.sparse]
        return self._gradients

    def send_rest(self) -> None:
        """Send what no backward pass has sent: zeros for a missing dense gradient, no entries for a sparse one."""
        self.begin()
        for name in [*self.missing(), *self._join_proxy.sparse]:
            if name not in self._sparse and self.parameters[name].grad is not None:
                self._send(name)
        for name in self._join_proxy.sparse - set(self._sparse):
            shape = self.parameters[name].shape
            empty = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0, *shape[1:]), shape,
                                            dtype=self.parameters[name].dtype, check_invariants=False)
            self._begin_sparse(name, empty)
        if self._op is not Average:
            self.used.is_stale |= is_reduced_by_another(self)
        self.send_used()
        self._zero_missing()

    def begin(self) -> None:
        """As `Exchange.begin`; also add the gradients that the proxy admitted while this rank had joined."""
        super().begin()
        for name, gradients in self._join_proxy.admitted.items():
            if name not in self._added:
                self._add([name], gradients)

    def _added_gradients(self, names: list[str]) -> Gradients:
        return self._join_proxy.admit(names)

    def _direct_paths(self) -> dict[str, Any]:
        paths = super()._direct_paths() if self._predivide == 1 else {}
        return {name: path for name, path in paths.items() if name not in self._join_proxy.sparse}

    def _send(self, name: str) -> None:
        gradient = self.parameters[name].grad
        assert gradient is not None, "only called for parameters with a gradient"
        if not gradient.is_sparse:
            super()._send(name)
        elif self._gradients is None:
            if self._sparse_as_dense:  # else it is sent by `synchronize`
                self._copies[name] = gradient.detach().to_dense()
        elif name in self._join_proxy.sparse:
            self._begin_sparse(name, gradient)
        else:  # all ranks said that it is dense, or none had a gradient in the first step
            self._fill(name, gradient.detach().to_dense())

    def _begin_sparse(self, name: str, gradient: torch.Tensor) -> None:
        self._sparse[name] = sparse_allreduce_async(gradient.detach(), self.prefix + name, self._op)

    def _fill(self, name: str, gradient: torch.Tensor) -> None:
        if name in self._join_proxy.sparse:  # another rank has said so
            self._begin_sparse(name, gradient.to_sparse(1))
        else:
            super()._fill(name, gradient if self._predivide == 1 else gradient.detach() * (1 / self._predivide))

    def receive(self) -> None:
        """As `Exchange.receive`."""
        sparse, self._sparse = self._sparse, {}
        self.receive_used()
        with torch.no_grad():
            for name in sorted(sparse):
                total = sparse[name]()
                gradient = self.parameters[name].grad
                if gradient is not None or self.used.has(name):
                    self.parameters[name].grad = total if gradient is None or gradient.is_sparse else total.to_dense()
        self._join_proxy.n_steps += 1
        super().receive()

    @property
    def busy(self) -> bool:
        """Whether gradients are under way: after backward, before the step."""
        return super().busy or bool(self._sparse)

    def alias_gradients(self) -> None:
        """As `Exchange.alias_gradients`, unless a gradient is sparse: those have no shared memory."""
        if not any(p.grad is not None and p.grad.is_sparse for p in self.parameters.values()):
            super().alias_gradients()

    def _receive(self, name: str, parameter: torch.Tensor) -> None:
        sparse = parameter.grad if parameter.grad is not None and parameter.grad.is_sparse else None
        if sparse is not None:
            parameter.grad = torch.empty_like(parameter, requires_grad=False)
        super()._receive(name, parameter)
        gradient: Any = parameter.grad
        if gradient is None:
            return
        if self._predivide != 1:
            gradient.mul_(self._predivide)
        if sparse is not None and self._sparse_as_dense:
            parameter.grad = gradient.to_sparse(sparse.sparse_dim())

    def forget_passes(self) -> None:
        """Count the backward passes from the start."""
        super().forget_passes()
        self._sparse.clear()


def _step_proxies() -> list[StepProxy]:
    return [each for each in runtime.current().join_proxies if isinstance(each, StepProxy)]


_retiring = threading.Lock()


def _retire(numbers: list[int]) -> None:
    """Forget the proxies of the optimizers *numbers*, which no rank has any more."""
    found = runtime.current()
    with _retiring:  # on a joined rank each proxy runs in a thread of its own
        gone = [each for each in _step_proxies() if each.number in numbers]
        for each in gone:
            found.join_proxies.remove(each)
    for each in gone:
        each.retire()
    retire_unused()


class _Reduction(NamedTuple):
    """The gradients of one group under way: the dense ones as one operation, each sparse one by itself."""

    #: Handles of sparse gradients, and compressor contexts of dense ones, by name.
    sparse: dict[str, Any]
    contexts: dict[str, Any]
    #: None if no gradient of the group is dense.
    handle: Handle | None


class NegotiatedExchange:
    """Reduces the gradients of *named* parameters over *process_set*. Owner: the optimizer; one thread at a time.

    *groups*: lists of names whose gradients are one operation, which begins when the last of them is computed. The
    other parameters are those of `DistributedOptimizer`.
    """

    def __init__(self, named: list[tuple[str, torch.Tensor]], compression: Any, n_passes: int, op: ReduceOp,
                 predivide: float, groups: Sequence[Sequence[str]], sparse_as_dense: bool,
                 process_set: ProcessSet) -> None:
        self.used = UsedParameters(named)
        self.parameters = self.used.trained
        self.n_passes = n_passes
        self.synchronized = self.is_superseded = False
        self.number, self.other_observers = next(observer_numbers), list[weakref.ref[Any]]()
        self._compression = compression
        self._op, self._process_set = op, process_set
        self._factors = (1 / predivide, predivide) if op is Average else (1.0, 1.0)
        self._sparse_as_dense = sparse_as_dense
        self._group_of = {name: tuple(group) for group in groups for name in group}
        self._left = dict.fromkeys(self.parameters, n_passes)
        self._under_way: dict[tuple[str, ...], _Reduction] = {}
        title = f"process set {process_set.process_set_id}: "
        edition = runtime.current().session.tensors.model_number(title + name for name, _ in named)
        self.prefix = f"edition {edition}: " if edition else ""  # two optimizers may have parameters of the same names
        self._hooks = observe_gradients(self, named)

    @property
    def averaged(self) -> bool:
        """As `Exchange.averaged`."""
        return self.synchronized and any(p.grad is not None for p in self.parameters.values())

    @property
    def busy(self) -> bool:
        """Whether gradients are under way: after backward, before the step."""
        return bool(self._under_way)

    def accumulated(self, name: str) -> None:
        """Count a backward pass of *name*; after the last one of its whole group, begin to reduce the group."""
        if self.is_superseded:
            self.synchronized = False
            self.used.is_stale |= self._group_of.get(name, (name,)) in self._under_way
            return
        if self._left[name] == 0:
            raise TooManyPassesError
        self._left[name] -= 1
        self.synchronized = False
        group = self._group_of.get(name, (name,))
        if not any(self._left[each] for each in group):
            self._begin(group)

    def superseded(self) -> None:
        """Stop sending: a later exchange has some of the same parameters."""
        self.is_superseded = True

    def _begin(self, group: tuple[str, ...]) -> None:
        """Begin to reduce the gradients of *group*."""
        dense = {name: self._dense(name) for name in group}
        sparse = {name: sparse_allreduce_async(cast(torch.Tensor, self.parameters[name].grad).detach(),
                                               self.prefix + name, self._op, self._process_set)
                  for name, gradient in dense.items() if gradient is None}
        pairs = {name: self._compression.compress(gradient) for name, gradient in dense.items() if gradient is not None}
        sent = [narrow.contiguous() for narrow, _ in pairs.values()]
        options: dict[str, Any] = {"name": self.prefix + group[0], "op": self._op, "process_set": self._process_set,
                                   "prescale_factor": self._factors[0], "postscale_factor": self._factors[1]}
        handle = None
        if len(sent) > 1 or (sent and group[0] in self._group_of):
            handle = grouped_allreduce_async_(sent, **options)
        elif sent:
            handle = allreduce_async_(sent[0], **options)
        self._under_way[group] = _Reduction(sparse, {name: context for name, (_, context) in pairs.items()}, handle)

    def synchronize(self) -> None:
        """Send what no backward pass has sent, wait for everything, and write the results into the gradients.

        A parameter that has a gradient on no rank gets none. Raises `UnsupportedError` as `Exchange.receive`.
        """
        if self._op in (Sum, Product):
            self.used.is_stale |= is_reduced_by_another(self)
        flags = torch.from_numpy(self.used.flags())
        told = allreduce_async_(flags, name=self.prefix + self.used.title, op=Max, process_set=self._process_set)
        for name in self.parameters:
            group = self._group_of.get(name, (name,))
            if group not in self._under_way:
                self._begin(group)
        under_way, self._under_way = self._under_way, {}
        synchronize(told)
        self.used.receive(flags.numpy())
        unfrozen = self.used.unfrozen()
        for name in unfrozen:
            self.used.unfreeze(name)
            self._begin((name,))
            under_way[(name,)] = self._under_way.pop((name,))
        self._hooks += observe_gradients(self, [(name, self.parameters[name]) for name in unfrozen])
        with torch.no_grad():
            for reduction in under_way.values():
                self._finish(reduction)
        self.forget_passes()
        note_reduced(self)
        self.used.require_known()
        self.synchronized = True

    def _finish(self, reduction: _Reduction) -> None:
        """Wait for *reduction*, and write the results into the gradients."""
        for name, handle in reduction.sparse.items():
            self._take(name, synchronize(handle))
        if reduction.handle is None:
            return
        results = synchronize(reduction.handle)
        results = results if isinstance(results, list) else [results]
        for (name, context), result in zip(reduction.contexts.items(), results):
            self._take(name, self._compression.decompress(result, context))

    def _dense(self, name: str) -> torch.Tensor | None:
        """Return the dense gradient of *name* to send, zeros if there is none; None if it is to be sent sparse."""
        parameter = self.parameters[name]
        if parameter.grad is None:
            return torch.zeros_like(parameter, requires_grad=False)
        if not parameter.grad.is_sparse:
            return parameter.grad.detach()
        return parameter.grad.detach().to_dense() if self._sparse_as_dense else None

    def _take(self, name: str, total: torch.Tensor) -> None:
        """Write the reduced *total* into the gradient of *name*, unless no rank has one."""
        parameter = self.parameters[name]
        gradient = parameter.grad
        if gradient is None:
            parameter.grad = total.clone() if self.used.has(name) else None
        elif gradient.is_sparse:
            parameter.grad = total if total.is_sparse else total.to_sparse(gradient.sparse_dim())
        elif total.data_ptr() != gradient.data_ptr():
            gradient.detach().copy_(total)

    def forget_passes(self) -> None:
        """Count the backward passes from the start. The present gradients are no averages any more."""
        self.synchronized = False
        self._under_way.clear()
        self._left = dict.fromkeys(self.parameters, self.n_passes)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: learning rates do not count here."""

    def abandon(self) -> None:
        """As `Exchange.abandon`."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self.parameters.values():
            parameter.grad = None
        self._under_way.clear()

    def alias_gradients(self) -> None:
        """Do nothing: these gradients have no shared memory."""
