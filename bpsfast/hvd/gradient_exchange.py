"""The gradients of Horovod's DistributedOptimizer: sent as those of `bpsfast.torch`, or by negotiated operations.

`DenseExchange` declares gradients once for the whole job and sends them by priority, fused, without negotiation. It
adds sums, factors, sparse gradients and `join` to `torch.exchange.Exchange`. In the first step all ranks tell each
other which gradients are sparse; those go by allgather. With the gradients of each step travels a number that only
joined ranks contribute to. A joined rank takes part in each step with zeros, and sees from that number when all have
joined.

A joined rank also takes part in the steps of optimizers that it no longer has, while any rank has them. So in the first
step of an optimizer the ranks also tell each other which earlier optimizers are left, and free the memory of others.

`NegotiatedExchange` reduces gradients by operations under the names of their parameters: for process sets, and for Min,
Max and Product.
"""
from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

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
    """A gradient was computed again before it was used. Call step, or raise backward_passes_per_step."""

    def __init__(self) -> None:
        super().__init__("Gradients were computed more than backward_passes_per_step times before call to step(). "
                         "Increase backward_passes_per_step to accumulate gradients locally.")


class StepProxy:
    """Takes part in the steps of one optimizer on a rank that has joined. Outlives the optimizer and its *exchange*,
    because other ranks may still have theirs. *average*: the sums are divided by the number of ranks.
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
        #: The number's name among those of the gradients; like `Presence.title` that of no other optimizer's.
        self._joined = f"bpsfast.hvd.joined of {min(self._places, default='nothing')}"
        self._kinds = {self._present: exchange.used.kind, self._joined: ((1,), "float32"),
                       **{name: kinds[name] for name in self._names}}
        self._frozen_kinds = {name: kinds[name] for name in self._frozen if name in kinds}
        #: Of what was frozen at first, by name.
        self.admitted: dict[str, Gradients] = {}
        self._choice = {name: codecs.get(name) for name in self._kinds}
        self._average = average
        self._prefix = exchange.prefix
        self._exchange = weakref.ref(exchange)
        self._homes = exchange.aliases
        self._n_steps = 0
        self._question: Handle | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        #: The gradients as the job knows them, once they are declared; and those that are sparse, which it does not.
        self.gradients: Gradients | None = None
        self.sparse: set[str] = set()

    def ask(self, sparse: set[str], joins: bool = False) -> None:
        """Tell the other ranks which gradients are *sparse* here, and which earlier optimizers are left: all of them if
        this rank *joins*. Once.
        """
        left = {each.number for each in _step_proxies() if joins or each._exchange() is not None}
        mask = torch.tensor([*(name in sparse for name in self._names),
                             *(number in left for number in range(self.number))], dtype=torch.uint8)
        self._question = allreduce_async(mask, name=f"{self._title}.sparse", op=Max)

    def declare(self, order: list[str]) -> Gradients:
        """Tell the job of the gradients that are sparse nowhere; the most urgent first in *order*. Waits for `ask`."""
        if self.gradients is None:
            assert self._question is not None, "asked before"
            answer = self._question.wait().tolist()
            _retire([number for number, is_left in enumerate(answer[len(self._names):]) if not is_left])
            self.sparse = {name for name, is_sparse in zip(self._names, answer) if is_sparse}
            kinds = {name: kind for name, kind in self._kinds.items() if name not in self.sparse}
            dense = [name for name in order if name not in self.sparse]
            self.gradients = Gradients(kinds, prefix=self._prefix, order=[self._present, self._joined, *dense],
                                       average=self._average, compression=self._choice)
        return self.gradients

    def admit(self, names: list[str]) -> Gradients:
        """Tell the job of gradients that were frozen at first; they are part of all steps from this one on."""
        unknown = [name for name in names if name not in self._frozen_kinds]
        if unknown:
            raise UnsupportedError(f"{', '.join(unknown[:4])}: gradients of this dtype are not summed")
        added = Gradients({name: self._frozen_kinds[name] for name in names}, prefix=self._prefix,
                          average=self._average)
        self._frozen.difference_update(names)
        self.admitted.update(dict.fromkeys(names, added))
        return added

    def retire(self) -> None:
        """Give back the memory: no rank has the optimizer any more."""
        for each in dict.fromkeys((self.gradients, *self.admitted.values())):
            if each is not None:
                retire_later(each.retire, self._homes)

    def count_step(self) -> None:
        """Count a step in which this rank took part with gradients of its own."""
        self._n_steps += 1

    def count_anew(self) -> int:
        """Return how many there were since the last call."""
        n_steps, self._n_steps = self._n_steps, 0
        return n_steps

    def begin(self) -> None:
        """Prepare to take part: before the other ranks hear that this one joins."""
        exchange = self._exchange()
        if exchange is not None:
            exchange.forget_passes()
        if self._question is None:
            self.ask(set(), joins=True)

    def start(self, over: threading.Event) -> None:
        """Take part from now on, in a thread of its own, until all ranks have joined, or *over* is set.

        It is set if this fails: then the others, too, end after the step under way.
        """
        self._thread = threading.Thread(target=self._run, args=(over,), name="bpsfast-hvd-joined", daemon=True)
        self._thread.start()

    def wait(self) -> Exception | None:
        """Wait until it takes part no more; return why, if not because all ranks have joined."""
        assert self._thread is not None, "started"
        self._thread.join()
        error, self._error = self._error, None
        return error

    def _run(self, over: threading.Event) -> None:
        try:
            gradients = self.declare(self._names)
            while not over.is_set() and not self._step(gradients):
                pass
        except Exception as exc:  # raised where it is waited for
            self._error = exc
            over.set()

    def _step(self, gradients: Gradients) -> bool:
        """Take part in one step; return whether all ranks had joined before it."""
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

    Parameters
    ----------
    predivide
        Averages are made of gradients divided by this, and multiplied by it.
    sparse_as_dense
        Sparse gradients travel as dense ones, and come back sparse.
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
        """As `Exchange.accumulated`; in Horovod's words."""
        if self._left[name] == 0 and not self.is_superseded:
            raise TooManyPassesError
        super().accumulated(name)

    def declare(self) -> Gradients:
        """Tell the job of the gradients, if nobody has; the first time, wait for all ranks to say which are sparse."""
        if self._gradients is None:
            if self._join_proxy.gradients is None:
                self._join_proxy.ask({name for name, p in self.parameters.items()
                                    if p.grad is not None and p.grad.is_sparse and not self._sparse_as_dense})
                order = self.order()
            else:
                order = self._order  # declared while this rank had joined
            self._gradients = self._used_gradients = self._join_proxy.declare(order)
            self._order = [name for name in order if name not in self._join_proxy.sparse]
        return self._gradients

    def send_rest(self) -> None:
        """Send what no backward pass has sent: zeros where there is no gradient, nothing where it would be sparse."""
        self.begin()
        for name in [*self.missing(), *self._join_proxy.sparse]:
            if name not in self._sparse and self.parameters[name].grad is not None:
                self._send(name)
        for name in self._join_proxy.sparse - set(self._sparse):
            shape = self.parameters[name].shape
            nothing = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0, *shape[1:]), shape,
                                              dtype=self.parameters[name].dtype, check_invariants=False)
            self._begin_sparse(name, nothing)
        if self._op is not Average:
            self.used.is_stale |= is_reduced_by_another(self)
        self.send_used()
        self._zero_missing()

    def begin(self) -> None:
        """As `Exchange.begin`; and know what was admitted while this rank had joined."""
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
        else:  # as all ranks said; or it had no gradient in the first step, and none said that it is sparse
            self._fill(name, gradient.detach().to_dense())

    def _begin_sparse(self, name: str, gradient: torch.Tensor) -> None:
        self._sparse[name] = sparse_allreduce_async(gradient.detach(), self.prefix + name, self._op)

    def _fill(self, name: str, gradient: torch.Tensor) -> None:
        if name in self._join_proxy.sparse:  # on another rank
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
        self._join_proxy.count_step()
        super().receive()

    @property
    def busy(self) -> bool:
        """Whether gradients are under way: after backward, before the step."""
        return super().busy or bool(self._sparse)

    def alias_gradients(self) -> None:
        """As `Exchange.alias_gradients`, unless there are sparse ones, which have no place."""
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
    """Forget the stand-ins of the optimizers *numbers*, which no rank has any more."""
    found = runtime.current()
    with _retiring:  # on a joined rank each stand-in runs in a thread of its own
        gone = [each for each in _step_proxies() if each.number in numbers]
        for each in gone:
            found.join_proxies.remove(each)
    for each in gone:
        each.retire()
    retire_unused()


class NegotiatedExchange:
    """Reduces the gradients of *named* parameters over *process_set*. Owner: the optimizer; one thread at a time.

    *groups*: lists of names whose gradients go as one operation, when the last of them is there. The other parameters
    are those of `DistributedOptimizer`.
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
        self._fields = {"op": op, "process_set": process_set}
        if op is Average:
            self._fields |= {"prescale_factor": 1 / predivide, "postscale_factor": predivide}
        self._sparse_as_dense = sparse_as_dense
        self._group_of = {name: tuple(group) for group in groups for name in group}
        self._left = dict.fromkeys(self.parameters, n_passes)
        self._under_way: dict[tuple[str, ...], _Reduction] = {}
        title = f"process set {process_set.process_set_id}: "
        edition = runtime.current().session.tensors.edition(title + name for name, _ in named)
        self.prefix = f"edition {edition}: " if edition else ""  # of operations: two optimizers may have the same names
        observe_gradients(self, named)

    @property
    def averaged(self) -> bool:
        """As of `Exchange`."""
        return self.synchronized and any(p.grad is not None for p in self.parameters.values())

    @property
    def busy(self) -> bool:
        """Whether gradients are under way: after backward, before the step."""
        return bool(self._under_way)

    def accumulated(self, name: str) -> None:
        """Count a backward pass of *name*; after the last one of its whole group, the group goes out."""
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
        """As of `Exchange`."""
        self.is_superseded = True

    def _begin(self, group: tuple[str, ...]) -> None:
        self._under_way[group] = _Reduction(group, self)

    def synchronize(self) -> None:
        """Send what no backward pass has sent, wait for everything, and write the results into the gradients.

        A parameter that has a gradient on no rank gets none. Raises `UnsupportedError` as `Exchange.receive`.
        """
        if self._fields["op"] in (Sum, Product):
            self.used.is_stale |= is_reduced_by_another(self)
        words = torch.from_numpy(self.used.flags())
        told = allreduce_async_(words, name=self.prefix + self.used.title, op=Max,
                                process_set=self._fields["process_set"])  # type: ignore[arg-type]
        for name in self.parameters:
            group = self._group_of.get(name, (name,))
            if group not in self._under_way:
                self._begin(group)
        under_way, self._under_way = self._under_way, {}
        synchronize(told)
        self.used.receive(words.numpy())
        unfrozen = self.used.unfrozen()
        for name in unfrozen:
            self.used.unfreeze(name)
            self._begin((name,))
            under_way[(name,)] = self._under_way.pop((name,))
        observe_gradients(self, [(name, self.parameters[name]) for name in unfrozen])
        with torch.no_grad():
            for reduction in under_way.values():
                reduction.finish()
        self.forget_passes()
        note_reduced(self)
        self.used.require_known()
        self.synchronized = True

    def begin_reduction(self, group: tuple[str, ...], gradients: list[torch.Tensor]) -> Any:
        """Begin to reduce what travels of the gradients of *group*; return a handle."""
        if len(gradients) > 1 or group[0] in self._group_of:
            return grouped_allreduce_async_(gradients, name=self.prefix + group[0],
                                            **self._fields)  # type: ignore[arg-type]
        return allreduce_async_(gradients[0], name=self.prefix + group[0], **self._fields)  # type: ignore[arg-type]

    def compress(self, gradient: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what travels of a dense *gradient*, contiguous, and what `decompress` needs."""
        narrow, context = self._compression.compress(gradient)
        return narrow.contiguous(), context

    def decompress(self, narrow: torch.Tensor, context: Any) -> torch.Tensor:
        """Return the gradient that the reduced *narrow* stands for."""
        found: torch.Tensor = self._compression.decompress(narrow, context)
        return found

    def dense(self, name: str) -> torch.Tensor | None:
        """Return the gradient of *name* as it travels, zeros if there is none; None if it is to travel sparse."""
        parameter = self.parameters[name]
        if parameter.grad is None:
            return torch.zeros_like(parameter, requires_grad=False)
        if not parameter.grad.is_sparse:
            return parameter.grad.detach()
        return parameter.grad.detach().to_dense() if self._sparse_as_dense else None

    def take(self, name: str, total: torch.Tensor) -> None:
        """Write the reduced *total* into the gradient of *name*, unless it has one on no rank."""
        parameter = self.parameters[name]
        gradient = parameter.grad
        if gradient is None:
            parameter.grad = total.clone() if self.used.has(name) else None
        elif gradient.is_sparse:
            parameter.grad = total if total.is_sparse else total.to_sparse(gradient.sparse_dim())
        elif total.data_ptr() != gradient.data_ptr():
            gradient.detach().copy_(total)

    def begin_sparse(self, name: str) -> Any:
        """Begin to add up the sparse gradient of *name*; return a handle."""
        gradient = self.parameters[name].grad
        assert gradient is not None, "looked at before"
        return sparse_allreduce_async(gradient.detach(), self.prefix + name, self._fields["op"],  # type: ignore[arg-type]
                                      self._fields["process_set"])  # type: ignore[arg-type]

    def forget_passes(self) -> None:
        """As of `Exchange`."""
        self.synchronized = False
        self._under_way.clear()
        self._left = dict.fromkeys(self.parameters, self.n_passes)

    def alias_gradients(self) -> None:
        """Gradients stay where they are: they have no place in shared memory."""


class _Reduction:
    """The gradients of one group on their way: the dense ones as one operation, each sparse one by itself."""

    def __init__(self, group: tuple[str, ...], exchange: NegotiatedExchange) -> None:
        self._exchange = exchange
        found = {name: exchange.dense(name) for name in group}
        self._sparse = {name: exchange.begin_sparse(name) for name, gradient in found.items() if gradient is None}
        pairs = {name: exchange.compress(gradient) for name, gradient in found.items() if gradient is not None}
        self._contexts = {name: context for name, (_, context) in pairs.items()}
        self._handle = exchange.begin_reduction(group, [narrow for narrow, _ in pairs.values()]) if pairs else None

    def finish(self) -> None:
        """Wait, and write the results into the gradients."""
        for name, handle in self._sparse.items():
            self._exchange.take(name, synchronize(handle))
        if self._handle is None:
            return
        results = synchronize(self._handle)
        results = results if isinstance(results, list) else [results]
        for (name, context), narrow in zip(self._contexts.items(), results):
            self._exchange.take(name, self._exchange.decompress(narrow, context))
