"""Gradients of an optimizer that travel as `bpsfast.torch`'s do: declared, by urgency, fused, without negotiation.

What Horovod adds to that: sums instead of averages, a factor before and after, sparse gradients (which do not travel
this way, once all ranks have told each other in the first step which these are), and `join`: with the gradients of each
step travels a number, to which only ranks that have joined contribute. So those, who take part in each step with zeros,
know when all have joined.
"""
from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..orchestration.codec import CodecSpec
from ..orchestration.errors import BusyError
from ..torch.compression import CompressionLike
from ..torch.exchange import Exchange
from ..trainer.gradients import Gradients
from . import runtime
from .allreduce_ops import allreduce_async, sparse_allreduce_async
from .handle import Handle
from .reduce_op import Average, Max, ReduceOp

#: The number's name among those of the gradients.
_JOINED = "bpsfast.hvd.joined"


class TooManyPassesError(BusyError, AssertionError):
    """A gradient was computed again before it was used. Call step, or raise backward_passes_per_step."""

    def __init__(self) -> None:
        super().__init__("Gradients were computed more than backward_passes_per_step times before call to step(). "
                         "Increase backward_passes_per_step to accumulate gradients locally.")


class StandIn:
    """What takes part in the steps of one optimizer on a rank that has joined. Outlives it: that of others may live.

    *title* is the same on all ranks; *kinds* are shapes and dtypes by name, *codecs* how some of them are compressed
    between nodes, *average*: of the sums.
    """

    def __init__(self, title: str, kinds: dict[str, tuple[tuple[int, ...], str]], codecs: dict[str, CodecSpec],
                 average: bool, prefix: str) -> None:
        self._title = title
        self._names = sorted(kinds)
        self._kinds = {**kinds, _JOINED: ((1,), "float32")}
        self._choice = {name: codecs.get(name) for name in self._kinds}
        self._average = average
        self._prefix = prefix
        self._n_steps = 0
        self._question: Handle | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        #: The gradients as the job knows them, once they are declared; and those that are sparse, which it does not.
        self.gradients: Gradients | None = None
        self.sparse: set[str] = set()
        #: Called when the rank joins: what the optimizer has begun is forgotten.
        self.forget: Callable[[], None] = lambda: None

    def ask(self, sparse: set[str]) -> None:
        """Tell the other ranks which gradients are *sparse* here. Once."""
        mask = torch.tensor([name in sparse for name in self._names], dtype=torch.uint8)
        self._question = allreduce_async(mask, name=f"{self._title}.sparse", op=Max)

    def declare(self, order: list[str]) -> Gradients:
        """Tell the job of the gradients that are sparse nowhere; the most urgent first in *order*. Waits for `ask`."""
        if self.gradients is None:
            assert self._question is not None, "asked before"
            self.sparse = {name for name, is_sparse in zip(self._names, self._question.wait()) if is_sparse}
            kinds = {name: kind for name, kind in self._kinds.items() if name not in self.sparse}
            dense = [name for name in order if name not in self.sparse]
            self.gradients = Gradients(kinds, prefix=self._prefix, order=[*dense, _JOINED], average=self._average,
                                       compression=self._choice)
        return self.gradients

    def count_step(self) -> None:
        """Count a step in which this rank took part with gradients of its own."""
        self._n_steps += 1

    def count_anew(self) -> int:
        """Return how many there were since the last call."""
        n_steps, self._n_steps = self._n_steps, 0
        return n_steps

    def begin(self) -> None:
        """Prepare to take part: before the other ranks hear that this one joins."""
        self.forget()
        if self._question is None:
            self.ask(set())

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
        gradients[_JOINED][0] = 1
        gradients.ready(_JOINED)
        gradients.zero_missing()
        gradients.step()
        n_joined = float(gradients.wait(_JOINED)[0])
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
        found = runtime.current()
        number = len(found.stand_ins)
        self.prefix = f"Gradient{number or ''}."  # two models may have the same names
        self._stand_in = StandIn(f"DistributedOptimizer.{number}", self.kinds, self.codecs, op is Average,
                                 self.prefix)
        found.stand_ins.append(self._stand_in)
        me = weakref.ref(self)
        self._stand_in.forget = lambda: _forget(me)

    def accumulated(self, name: str) -> None:
        """As `Exchange.accumulated`; in Horovod's words."""
        if self._left[name] == 0:
            raise TooManyPassesError
        super().accumulated(name)

    def declare(self) -> Gradients:
        """Tell the job of the gradients, if nobody has; the first time, wait for all ranks to say which are sparse."""
        if self._gradients is None:
            if self._stand_in.gradients is None:
                self._stand_in.ask({name for name, p in self.parameters.items()
                                    if p.grad is not None and p.grad.is_sparse and not self._sparse_as_dense})
                order = self.order()
            else:
                order = self._order  # declared while this rank had joined
            self._gradients = self._stand_in.declare(order)
            self._order = [name for name in order if name not in self._stand_in.sparse]
        return self._gradients

    def send_rest(self) -> None:
        """Send what no backward pass has sent: zeros where there is no gradient, nothing where it would be sparse."""
        self.begin()
        for name in [*self.gradients.missing(), *self._stand_in.sparse]:
            if name in self.parameters and name not in self._sparse and self.parameters[name].grad is not None:
                self._send(name)
        for name in self._stand_in.sparse - set(self._sparse):
            shape = self.parameters[name].shape
            nothing = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0, *shape[1:]), shape,
                                              dtype=self.parameters[name].dtype, check_invariants=False)
            self._begin_sparse(name, nothing)
        self._zero_missing()

    def _send(self, name: str) -> None:
        gradient = self.parameters[name].grad
        assert gradient is not None, "only called for parameters with a gradient"
        if not gradient.is_sparse:
            super()._send(name)
        elif not self._sparse_as_dense:
            if self._gradients is not None:  # else it is sent by `synchronize`
                self._begin_sparse(name, gradient)
        elif self._gradients is None:
            self._copies[name] = gradient.detach().to_dense()
        else:
            self._fill(name, gradient.detach().to_dense())

    def _begin_sparse(self, name: str, gradient: torch.Tensor) -> None:
        self._sparse[name] = sparse_allreduce_async(gradient.detach(), self.prefix + name, self._op)

    def _fill(self, name: str, gradient: torch.Tensor) -> None:
        if name in self._stand_in.sparse:  # on another rank
            self._begin_sparse(name, gradient.to_sparse(1))
        else:
            super()._fill(name, gradient if self._predivide == 1 else gradient.detach() * (1 / self._predivide))

    def receive(self) -> None:
        """Wait for everything, and write the results into the gradients: the step is over."""
        sparse, self._sparse = self._sparse, {}
        super().receive()
        with torch.no_grad():
            for name in sorted(sparse):
                total = sparse[name]()
                gradient = self.parameters[name].grad
                self.parameters[name].grad = total if gradient is None or gradient.is_sparse else total.to_dense()
        self._stand_in.count_step()

    @property
    def busy(self) -> bool:
        """Whether gradients are under way: after backward, before the step."""
        return super().busy or bool(self._sparse)

    def house_gradients(self) -> None:
        """As `Exchange.house_gradients`, unless there are sparse ones, which have no place."""
        if not any(p.grad is not None and p.grad.is_sparse for p in self.parameters.values()):
            super().house_gradients()

    def _receive(self, name: str, parameter: torch.Tensor) -> None:
        sparse = parameter.grad if parameter.grad is not None and parameter.grad.is_sparse else None
        if sparse is not None:
            parameter.grad = torch.empty_like(parameter, requires_grad=False)
        super()._receive(name, parameter)
        gradient: Any = parameter.grad
        if self._predivide != 1:
            gradient.mul_(self._predivide)
        if sparse is not None:
            parameter.grad = gradient.to_sparse(sparse.sparse_dim())

    def forget_passes(self) -> None:
        """Count the backward passes from the start."""
        super().forget_passes()
        self._sparse.clear()


def _forget(exchange: weakref.ref[DenseExchange]) -> None:
    found = exchange()
    if found is not None:
        found.forget_passes()
