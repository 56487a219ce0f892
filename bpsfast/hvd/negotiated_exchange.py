"""Gradients of an optimizer that are reduced by operations under the names of their parameters.

That is how Horovod does it always, and here what is left where gradients cannot be declared once for the whole job: for
a process set, and for Min, Max and Product.
"""
from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..torch.exchange import is_reduced_by_another, note_reduced, numbers, watch
from ..torch.gradient_hooks import UsedParameters
from . import runtime
from .collective_ops import allreduce_async_, grouped_allreduce_async_, sparse_allreduce_async
from .gradient_exchange import TooManyPassesError
from .handle import synchronize
from .process_sets import ProcessSet
from .reduce_op import Average, Max, Product, ReduceOp, Sum


class NegotiatedExchange:
    """Reduces the gradients of *named* parameters over *process_set*. Owner: the optimizer; one thread at a time.

    *groups*: lists of names whose gradients go as one operation, when the last of them is there. The other parameters
    are those of `DistributedOptimizer`.
    """

    def __init__(self, named: list[tuple[str, torch.Tensor]], compression: Any, n_passes: int, op: ReduceOp,
                 predivide: float, groups: Sequence[Sequence[str]], sparse_as_dense: bool,
                 process_set: ProcessSet) -> None:
        self.presence = UsedParameters(named)
        self.parameters = self.presence.trained
        self.n_passes = n_passes
        self.synchronized = self.is_superseded = False
        self.number, self.other_observers = next(numbers), list[weakref.ref[Any]]()
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
        watch(self, named)

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
            self.presence.is_stale |= self._group_of.get(name, (name,)) in self._under_way
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
            self.presence.is_stale |= is_reduced_by_another(self)
        words = torch.from_numpy(self.presence.words())
        told = allreduce_async_(words, name=self.prefix + self.presence.title, op=Max,
                                process_set=self._fields["process_set"])  # type: ignore[arg-type]
        for name in self.parameters:
            group = self._group_of.get(name, (name,))
            if group not in self._under_way:
                self._begin(group)
        under_way, self._under_way = self._under_way, {}
        synchronize(told)
        self.presence.hear(words.numpy())
        unfrozen = self.presence.unfrozen()
        for name in unfrozen:
            self.presence.admit(name)
            self._begin((name,))
            under_way[(name,)] = self._under_way.pop((name,))
        watch(self, [(name, self.parameters[name]) for name in unfrozen])
        with torch.no_grad():
            for reduction in under_way.values():
                reduction.finish()
        self.forget_passes()
        note_reduced(self)
        self.presence.require_known()
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
            parameter.grad = total.clone() if self.presence.has(name) else None
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
