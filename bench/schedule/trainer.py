"""One rank of `bench schedule`: trains a timed network by bpsfast, torch's DDP, or scheduled all-reduces over gloo."""
from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from bpsfast.bench.harness.contestant import GroupMember, JobMember, Operation
from bpsfast.bench.schedule.methods import divided
from bpsfast.bench.schedule.timed_network import TimedLayer, data, network
from bpsfast.tools.simulator.workload import Workload

_LEARNING_RATE, _MOMENTUM = 0.5, 0.9
_DDP_BUCKET_MIB = 25.0


class Trainer:
    """One rank. Variants of `operation`: ``step`` is a step of the job, ``alone`` a step without communication.

    *method*: "barrier" and "crossing" are `bpsfast.torch.DistributedOptimizer` without and with cross_barrier, in the
    order of the job's settings; "ddp" is DistributedDataParallel over gloo; "gloo fifo" and "gloo priority" are
    all-reduces over gloo by `bpsfast.torch.schedule`, with *partition_nbytes* and *credit_nbytes*, where the forward
    pass of a layer waits for its own. *model*, *divisor* and *compute_s*: see `methods.divided`.
    """

    def __init__(self, method: str, model: str, divisor: int, compute_s: float, partition_nbytes: int = 0,
                 credit_nbytes: int = 0) -> None:
        torch.set_num_threads(1)
        self._job = divided(model, divisor, compute_s)
        self._network = network(self._job)
        make: dict[str, Callable[[], _Averaging]] = {
            "barrier": lambda: _Ours(self._network, False), "crossing": lambda: _Ours(self._network, True),
            "ddp": lambda: _Ddp(self._network, divisor),
            "gloo fifo": lambda: _Scheduled(self._network, False, partition_nbytes, credit_nbytes),
            "gloo priority": lambda: _Scheduled(self._network, True, partition_nbytes, credit_nbytes)}
        self._method = make[method]()
        self.rank = self._method.rank
        self._n_steps = 0
        self._alone: _Alone | None = None

    def operation(self, variant: str, nbytes: int) -> Operation:
        """Return the operation of *variant*; *nbytes* is the network's."""
        if variant == "alone":
            self._alone = _Alone(self._job, self.rank)
            return Operation(self._alone.step, lambda known: None, lambda: 0)
        return Operation(self._step, lambda known: None, self._n_wrong)

    def _step(self) -> None:
        self._method.step(data(self.rank, self._n_steps))
        self._n_steps += 1

    def _n_wrong(self) -> int:
        """Count the weights that differ from those of a single process that trains on the data of all ranks."""
        assert self._n_steps == 1, "sums are checked once, after the first step"
        reference = network(self._job)
        optimizer = _sgd(reference)
        for layer in _layers(reference):
            layer.sleeps = False
        (sum(reference(data(rank, 0)).sum() for rank in range(self._method.size)) / self._method.size).backward()
        optimizer.step()
        self._method.settle()
        return sum(int((~torch.isclose(ours, theirs, rtol=1e-5, atol=1e-8)).sum())
                   for ours, theirs in zip(self._network.parameters(), reference.parameters()))

    def digest(self) -> tuple[int, str]:
        """Return the number of steps so far, and a hash of all weights."""
        self._method.settle()
        found = hashlib.sha256()
        for weight in self._network.parameters():
            found.update(weight.detach().numpy().tobytes())
        return self._n_steps, found.hexdigest()

    def phases(self) -> tuple[float, float, float]:
        """Return the median seconds of forward, backward and optimizer in the steps ``alone``."""
        assert self._alone is not None, "nothing was measured alone"
        forward_s, backward_s, optimizer_s = map(statistics.median, zip(*self._alone.phases_s))
        return forward_s, backward_s, optimizer_s

    def barrier(self) -> None:
        """Wait for the other ranks."""
        self._method.barrier()

    def close(self) -> None:
        """Leave the job."""
        self._method.close()


class _Averaging(Protocol):
    """A method to average gradients."""

    rank: int
    size: int

    def step(self, x: torch.Tensor) -> None:
        """Train once."""

    def settle(self) -> None:
        """Make the pending updates."""

    def barrier(self) -> None:
        """Wait for the other ranks."""

    def close(self) -> None:
        """Leave the job."""


class _Ours(JobMember):
    def __init__(self, net: torch.nn.Module, crosses: bool) -> None:
        import bpsfast.torch as bps

        super().__init__(bps)
        self._network = net
        self._crosses = crosses
        self._optimizer: Any = bps.DistributedOptimizer(
            _sgd(net), list(net.named_parameters()), cross_barrier=crosses)

    def step(self, x: torch.Tensor) -> None:
        self._optimizer.zero_grad()
        self._network(x).sum().backward()
        self._optimizer.step()

    def settle(self) -> None:
        if self._crosses:
            self._optimizer.settle()


class _Ddp(GroupMember):
    """DistributedDataParallel over gloo."""

    def __init__(self, net: torch.nn.Module, divisor: int) -> None:
        super().__init__("gloo")
        # buckets are as much smaller as the tensors
        self._network = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=_DDP_BUCKET_MIB / divisor)
        self._optimizer = _sgd(net)

    def step(self, x: torch.Tensor) -> None:
        self._optimizer.zero_grad()
        self._network(x).sum().backward()
        self._optimizer.step()

    def settle(self) -> None:
        """Do nothing, because a step leaves no pending updates."""


class _Scheduled(GroupMember):
    """A trainer with `bpsfast.torch.schedule`: each layer has its own optimizer and waits for its own gradients."""

    def __init__(self, net: torch.nn.Module, by_urgency: bool, partition_nbytes: int, credit_nbytes: int) -> None:
        super().__init__("gloo")
        from bpsfast.torch import schedule

        self._network = net
        self._group = self._dist.new_group()
        self._schedule = schedule(self._group, partition_nbytes=partition_nbytes, credit_nbytes=credit_nbytes)
        self._layers = _layers(net)
        self._optimizers = [_sgd(layer) if layer.weights else None for layer in self._layers]
        self._futures: list[list[Any]] = [[] for _ in self._layers]
        for index, layer in enumerate(self._layers):
            layer.register_forward_pre_hook(lambda *_, index=index: self._update(index))
            for at, weight in enumerate(layer.weights):
                weight.register_post_accumulate_grad_hook(
                    lambda weight, index=index, at=at: self._futures[index].append(self._schedule.all_reduce(
                        weight.grad, name=f"{index}.{at}", priority=-index if by_urgency else 0, average=True)))

    def _update(self, index: int) -> None:
        """Wait for the gradients of one layer, and update it."""
        futures, self._futures[index] = self._futures[index], []
        for future in futures:
            future.wait()
        optimizer = self._optimizers[index]
        if futures and optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    def step(self, x: torch.Tensor) -> None:
        self._network(x).sum().backward()

    def settle(self) -> None:
        for index in range(len(self._layers)):
            self._update(index)

    def close(self) -> None:
        self.settle()
        self._schedule.close()
        super().close()


class _Alone:
    """The same network without communication: forward, backward and optimizer of a step."""

    def __init__(self, job: Workload, rank: int) -> None:
        self._network = network(job)
        self._optimizer = _sgd(self._network)
        self._x = data(rank, 0)
        self.phases_s: list[tuple[float, float, float]] = []

    def step(self) -> None:
        """Train once."""
        self._optimizer.zero_grad()
        begin_s = time.perf_counter()
        loss = self._network(self._x).sum()
        forward_s = time.perf_counter()
        loss.backward()
        backward_s = time.perf_counter()
        self._optimizer.step()
        self.phases_s.append((forward_s - begin_s, backward_s - forward_s, time.perf_counter() - backward_s))


def _sgd(net: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=_LEARNING_RATE, momentum=_MOMENTUM)


def _layers(net: torch.nn.Module) -> list[TimedLayer]:
    return [layer for layer in net.modules() if isinstance(layer, TimedLayer)]
