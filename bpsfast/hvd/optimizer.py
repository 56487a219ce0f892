"""DistributedOptimizer: the user's optimizer, whose gradients are reduced over all ranks before each step.

Averages and sums over all ranks are made as in `bpsfast.torch` (`gradient_exchange.DenseExchange`), other reductions by
negotiated operations.
"""
from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch

from ..orchestration.errors import ConfigError, UnsupportedError
from ..torch.compression import Compression, parted
from ..torch.optimizer_extras import has_momentum
from ..torch.optimizer_wrapper import OptimizerWrapper, owned, parameters_of, user_step, wrap
from ..trainer.arguments import check_passes
from . import runtime
from .gradient_exchange import DenseExchange, NegotiatedExchange
from .objects import broadcast_object
from .reduce_op import Average, ReduceOp, Sum, check_predivision, chosen
from .runtime import ProcessSet, checked_set, global_process_set


class _DistributedOptimizer(OptimizerWrapper):
    """The methods that `DistributedOptimizer` adds to the user's optimizer class."""

    _exchange: DenseExchange | NegotiatedExchange | None
    _parameter_names: dict[torch.Tensor, str]  # Horovod's attribute, which programs read
    op: ReduceOp
    process_set: ProcessSet

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients, unless `synchronize` did or inside `skip_synchronize`, and update the parameters.

        With a *closure*, the gradients of each of its evaluations are reduced.
        """
        exchange = self._exchange
        if self._skips or exchange is None:
            return self._base.step(self) if closure is None else self._base.step(self, closure)
        if closure is None:
            if exchange.averaged:
                warnings.warn("optimizer.step() called without optimizer.skip_synchronize() context after "
                              "optimizer.synchronize(). This can cause training slowdown. You may want to consider "
                              "using optimizer.skip_synchronize() context if you use optimizer.synchronize() in your "
                              "code.", stacklevel=2)
            else:
                self.synchronize()
        try:
            return user_step(self, closure, self.synchronize)
        finally:
            exchange.synchronized = False

    def synchronize(self) -> None:
        """Reduce all gradients over all ranks in place, before clipping them, for example.

        A parameter without a gradient contributes zeros; if no rank has one, it gets none. Use `skip_synchronize`
        around the next `step`. In GANs, where another optimizer's loss fills gradients of this one, call this and
        `zero_grad` to discard them.

        Raises
        ------
        UnsupportedError
            On all ranks, if a parameter has a gradient that was not the optimizer's when it was wrapped.
        HorovodInternalError, StallError, PeerLostError
            If the reduction fails.
        """
        if self._exchange is not None:
            self._exchange.synchronize()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer's own; also count the backward passes from the start."""
        self._skips = False
        if self._exchange is not None:
            self._exchange.forget_passes()
        self._base.load_state_dict(self, state_dict)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none, backward_passes_per_step: int = 1, op: int = Average,
    gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Any = None, sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> torch.optim.Optimizer:
    """Return *optimizer* as one that reduces its gradients over all ranks of *process_set* before each step.

    The result is of a class derived from the optimizer's own and takes over its groups, options and state; the original
    must not be used any more. All ranks of *process_set* wrap the same parameters. All ranks make several such
    optimizers, and their first steps, in the same order. Each has its own memory; it is released in the first step of
    another optimizer that is made after it is gone on all ranks. Parameters may be wrapped again, as by
    `bpsfast.torch.DistributedOptimizer`; its rules for frozen, thawed and added parameters hold here, too.

    Parameters
    ----------
    named_parameters
        (name, tensor) of at least all parameters of the optimizer; None: they are numbered.
    compression
        `Compression.fp16`, which sends half the bytes; a class of your own; or codecs, without momentum, for the
        traffic between nodes, as of `bpsfast.torch.DistributedOptimizer`.
    backward_passes_per_step
        Gradients are sent after this many backward passes; the sum over passes is not divided.
    op
        `Average`, `Sum`, `Min`, `Max` or `Product`.
    gradient_predivide_factor
        Gradients are divided by this before they are averaged, and the averages multiplied by it.
    num_groups, groups
        How many groups of gradients, or which lists of parameters, are reduced as one. Averages and sums over all ranks
        ignore groups, with the same results: they are sent by priority.
    sparse_as_dense
        Send sparse gradients as dense ones.

    Raises
    ------
    ConfigError
        If names are missing or not unique, or arguments contradict each other.
    UnsupportedError
        For Adasum; for parameters that are not on the CPU.
    """
    check_predivision(gradient_predivide_factor, op == Average)
    checked_set(process_set)
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
                      DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    check_passes(backward_passes_per_step)
    _check_groups(groups)
    _, codecs = parted(compression)
    reduction = chosen(op)
    every = _named(optimizer, named_parameters)
    named = owned(optimizer, every)
    is_dense_path = process_set.process_set_id == 0 and reduction in (Average, Sum)
    if codecs is not None and not is_dense_path:
        raise UnsupportedError(f"codecs compress averages and sums over all ranks; this optimizer's gradients are "
                               f"reduced by {reduction.name} over {process_set}: use Compression.none or .fp16")
    if has_momentum(compression, named):
        raise UnsupportedError("codecs with momentum are for bpsfast.torch.DistributedOptimizer: use momentum=0 in the "
                               "codec, and the optimizer's own")
    wrapped = wrap(optimizer, backward_passes_per_step, _DistributedOptimizer)
    wrapped.op, wrapped.process_set = reduction, process_set
    wrapped._parameter_names = {p: name for name, p in sorted(every, key=lambda item: item[0])}

    def exchange(passes: int) -> DenseExchange | NegotiatedExchange | None:
        if runtime.current().size == 1 or not named or not process_set.included():
            return None
        if is_dense_path:
            return DenseExchange(named, compression, passes, reduction, gradient_predivide_factor, sparse_as_dense)
        return NegotiatedExchange(named, compression, passes, reduction, gradient_predivide_factor,
                                  _groups(groups, named, process_set), sparse_as_dense, process_set)

    wrapped._make_exchange = exchange
    wrapped._exchange = exchange(backward_passes_per_step)
    if wrapped._exchange is not None:
        wrapped._exchange.used.members = parameters_of(wrapped)
        wrapped._exchange.follow(wrapped)
    return wrapped


def _named(optimizer: torch.optim.Optimizer,
           named_parameters: Iterable[tuple[str, torch.Tensor]] | None) -> list[tuple[str, torch.Tensor]]:
    """Return (name, parameter) of at least every parameter of *optimizer*, in the order given."""
    if named_parameters is None:
        named = [(f"allreduce.noname.{i}.{j}", p) for i, group in enumerate(optimizer.param_groups)
                 for j, p in enumerate(group["params"])]
    else:
        named = list(named_parameters)
    if any(not isinstance(item, tuple) for item in named):
        raise ConfigError("named_parameters should be a sequence of tuples (name, parameter), usually produced by "
                          "model.named_parameters().")
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise ConfigError("Parameter names in named_parameters must be unique. Found duplicates: " + ", ".join(twice))
    unnamed = {id(p) for group in optimizer.param_groups for p in group["params"]} - {id(p) for _, p in named}
    if unnamed:
        raise ConfigError("named_parameters was specified, but one or more model parameters were not named. Python "
                          "object ids: " + ", ".join(map(str, sorted(unnamed))))
    return named


def _check_groups(groups: Any) -> None:
    if isinstance(groups, list):
        members = [p for group in groups for p in group]
        if any(not isinstance(p, torch.Tensor) for p in members):
            raise ConfigError("groups must consist of torch.Tensor.")
        if len({id(p) for p in members}) < len(members):
            raise ConfigError("A parameter can only appear once in groups.")
    elif groups is not None and (not isinstance(groups, int) or groups <= 0):
        raise ConfigError("groups should be a non-negative integer or a list of list of torch.Tensor.")


def _groups(groups: Any, named: list[tuple[str, torch.Tensor]], process_set: ProcessSet) -> list[list[str]]:
    """Return the names of each group; for a number of groups those that the set's first rank makes."""
    if groups is None:
        return []
    name_of = {id(p): name for name, p in named if p.requires_grad}
    if isinstance(groups, list):
        return [[name_of[id(p)] for p in group if id(p) in name_of] for group in groups]
    assert process_set.ranks is not None, "a set of the job has ranks"
    names = broadcast_object(list(name_of.values()), process_set.ranks[0], None, process_set)
    each, more = divmod(len(names), groups)
    begins = [i * each + min(i, more) for i in range(groups + 1)]
    return [names[begin:end] for begin, end in pairwise(begins) if end > begin]
