"""DistributedOptimizer: the user's optimizer, whose gradients are reduced over all ranks before each step.

Gradients go the way of `bpsfast.torch` (`exchange.DenseExchange`) where they can, else by negotiated operations.
"""
from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch

from ..orchestration.errors import ConfigError, UnsupportedError
from ..torch.compression import parted
from ..torch.optimizer_extras import has_momentum
from ..torch.optimizer_wrapper import OptimizerWrapper, check_passes, owned, parameters_of, user_step, wrap
from . import runtime
from .collective_ops import Compression
from .gradient_exchange import DenseExchange, NegotiatedExchange
from .objects import broadcast_object
from .reduce_op import Average, ReduceOp, Sum, chosen, factor
from .runtime import ProcessSet, global_process_set


class _DistributedOptimizer(OptimizerWrapper):
    """What is mixed into the user's optimizer class (see `DistributedOptimizer`)."""

    _exchange: DenseExchange | NegotiatedExchange | None
    _parameter_names: dict[torch.Tensor, str]  # as Horovod's: programs look names up in it
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
        """Wait until all gradients are reduced over all ranks and in place; before clipping them, for example.

        A parameter without a gradient contributes zeros; if it has one on no rank, it gets none. Use `skip_synchronize`
        around the next `step`. Where other optimizers' losses have filled gradients of this one, which it shall not
        use (GANs), this and `zero_grad` discard them.

        Raises
        ------
        UnsupportedError
            On all ranks, if a parameter has a gradient that was not the optimizer's when it was wrapped.
        HorovodInternalError, StallError, PeerLostError
            What became of it.
        """
        if self._exchange is not None:
            self._exchange.synchronize()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer's own; backward passes are counted from the start."""
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
    must not be used any more. All ranks of *process_set* wrap the same parameters; where a program has several such
    optimizers, all ranks make them, and their first steps, in one order. Each has memory of its own, which is given
    back in the first step of another one that is made after it is gone on all ranks. Parameters may be wrapped again,
    as by `bpsfast.torch.DistributedOptimizer`; what that says of frozen, thawed and added ones holds here, too.

    Parameters
    ----------
    named_parameters
        (name, tensor) of at least all parameters of the optimizer; None: they are numbered.
    compression
        `Compression.fp16` lets gradients travel in half the bytes; or a class of your own; or codecs for what travels
        between nodes, as of `bpsfast.torch.DistributedOptimizer`, without momentum.
    backward_passes_per_step
        Gradients travel after this many backward passes; the sum over passes is not divided.
    op
        `Average`, `Sum`, `Min`, `Max` or `Product`.
    gradient_predivide_factor
        Averages are made of gradients divided by this, and multiplied by it.
    num_groups, groups
        How many groups of gradients, or which lists of parameters, are reduced as one. Averages and sums over all ranks
        travel by urgency, with the same values, whatever the groups.
    sparse_as_dense
        Sparse gradients travel as dense ones.

    Raises
    ------
    ConfigError
        If names are missing or not unique, or arguments contradict each other.
    UnsupportedError
        For Adasum; for parameters that are not on the CPU.
    """
    if factor("gradient_predivide_factor", gradient_predivide_factor) <= 0:
        raise ConfigError(f"gradient_predivide_factor={gradient_predivide_factor!r}: expected a positive number")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ConfigError("gradient_predivide_factor not supported with op != Average")
    if not isinstance(process_set, ProcessSet):
        raise ConfigError(f"process_set={process_set!r} is a {type(process_set).__name__}, not a ProcessSet: give what "
                          "add_process_set has returned")
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
    travels_densely = process_set.process_set_id == 0 and reduction in (Average, Sum)
    if codecs is not None and not travels_densely:
        raise UnsupportedError(f"codecs compress averages and sums over all ranks; this optimizer's gradients are "
                               f"reduced by {reduction.name} over {process_set}: use Compression.none or .fp16")
    if has_momentum(compression, named):
        raise UnsupportedError("codecs with momentum are for bpsfast.torch.DistributedOptimizer: use momentum=0 in the "
                               "codec, and the optimizer's own")
    wrapped = wrap(optimizer, backward_passes_per_step, _DistributedOptimizer)
    wrapped.op, wrapped.process_set = reduction, process_set
    wrapped._parameter_names = {p: name for name, p in sorted(every, key=lambda item: item[0])}
    if runtime.current().size == 1 or not named or not process_set.included():
        return wrapped
    if travels_densely:
        wrapped._exchange = DenseExchange(named, compression, backward_passes_per_step, reduction,
                                          gradient_predivide_factor, sparse_as_dense)
        wrapped._exchange.follow(wrapped)
    else:
        wrapped._exchange = NegotiatedExchange(
            named, compression, backward_passes_per_step, reduction, gradient_predivide_factor,
            _groups(groups, named, process_set), sparse_as_dense, process_set)
    wrapped._exchange.used.members = parameters_of(wrapped)
    return wrapped


def _named(optimizer: torch.optim.Optimizer,
           named_parameters: Iterable[tuple[str, torch.Tensor]] | None) -> list[tuple[str, torch.Tensor]]:
    """Return (name, parameter) of at least every parameter of *optimizer*, in the order given."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
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
    known, wanted = {id(p) for _, p in named}, {id(p) for p in own}
    if wanted - known:
        raise ConfigError("named_parameters was specified, but one or more model parameters were not named. Python "
                          "object ids: " + ", ".join(map(str, sorted(wanted - known))))
    return named


def _check_groups(groups: Any) -> None:
    if groups is None:
        return
    if not isinstance(groups, list):
        if not isinstance(groups, int) or groups <= 0:
            raise ConfigError("groups should be a non-negative integer or a list of list of torch.Tensor.")
        return
    seen: set[int] = set()
    for group in groups:
        for p in group:
            if not isinstance(p, torch.Tensor):
                raise ConfigError("groups must consist of torch.Tensor.")
            if id(p) in seen:
                raise ConfigError("A parameter can only appear once in groups.")
            seen.add(id(p))


def _groups(groups: Any, named: list[tuple[str, torch.Tensor]], process_set: ProcessSet) -> list[list[str]]:
    """Return the names of each group; those of the set's first rank where they are counted. No group: none."""
    if groups is None:
        return []
    name_of = {id(p): name for name, p in named if p.requires_grad}
    if isinstance(groups, list):
        return [[name_of[id(p)] for p in group if id(p) in name_of] for group in groups]
    assert process_set.ranks is not None, "it counts"
    names = broadcast_object(list(name_of.values()), process_set.ranks[0], None, process_set)
    each, more = divmod(len(names), groups)
    begins = [i * each + min(i, more) for i in range(groups + 1)]
    return [names[begin:end] for begin, end in pairwise(begins) if end > begin]
