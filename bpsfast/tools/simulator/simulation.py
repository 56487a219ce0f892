"""Simulates one training job: a workload on a cluster under one strategy."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...orchestration.errors import ConfigError
from .all_reduce import Ring, RingAllReduce, ScheduledAllReduce, check_ring
from .network import Clock, Cluster
from .partition_layout import folded, full, is_symmetric
from .push_pull import Done, SimulatedPushPull
from .workload import Layer, PartitionedWorkload, Workload, partitioned

#: Called with (worker, layer) when the gradients of a layer are ready.
Ready = Callable[[int, int], None]


class Worker:
    """A worker that computes the chain of layers and waits for sums.

    *units_of_layer*: the units whose sums the forward pass of a layer needs. *cross_barrier*: start the forward pass of
    a layer when its own sums are there; else (the barrier of a framework) when all are. *optimizer_s*: time between the
    last sum and the next forward pass, once per step.
    """

    def __init__(self, clock: Clock, index: int, layers: Sequence[Layer], units_of_layer: Sequence[Sequence[int]],
                 n_steps: int, cross_barrier: bool, ready: Ready, optimizer_s: float = 0.0) -> None:
        self._clock, self.index, self._layers, self._units_of_layer = clock, index, layers, units_of_layer
        self._cross_barrier, self._ready, self._optimizer_s = cross_barrier, ready, optimizer_s
        self._steps_left = n_steps
        self._missing: set[int] = set()
        self._waits_for: int | None = None
        self._all_units = frozenset(unit for units in units_of_layer for unit in units)
        #: Start of each step's forward pass, and finally the time of the last sum.
        self.began_s: list[float] = []

    def begin(self) -> None:
        """Start a step, or record the end of the last one."""
        self.began_s.append(self._clock.now)
        if self._steps_left == 0:
            return
        self._steps_left -= 1
        self._forward(0)

    def unit_done(self, unit: int) -> None:
        """Record that the sum of *unit* is there."""
        self._missing.discard(unit)
        if self._waits_for is None:
            return
        layer = self._waits_for
        if layer < 0:
            if not self._missing:
                self._waits_for = None
                self._optimize()
        elif not self._lacks(layer):
            self._waits_for = None
            self._forward(layer)

    def _lacks(self, layer: int) -> bool:
        return any(unit in self._missing for unit in self._units_of_layer[layer])

    def _forward(self, layer: int) -> None:
        if layer == len(self._layers):
            self._backward(layer - 1)
        elif self._lacks(layer):
            self._waits_for = layer
        else:
            self._clock.at(self._clock.now + self._layers[layer].forward_s, self._forward, layer + 1)

    def _backward(self, layer: int) -> None:
        if layer >= 0:
            self._clock.at(self._clock.now + self._layers[layer].backward_s, self._made, layer)
        elif self._missing and not (self._cross_barrier and self._steps_left):
            self._waits_for = -1
        else:
            self._optimize()

    def _made(self, layer: int) -> None:
        """Record the gradients of *layer*, then report them: a lone worker gets its sums at once."""
        if layer == len(self._layers) - 1:
            self._missing = set(self._all_units)
        self._ready(self.index, layer)
        self._backward(layer - 1)

    def _optimize(self) -> None:
        self._clock.at(self._clock.now + self._optimizer_s, self.begin)

#: Messages per step from which a full simulation takes ten seconds; `fold` None then folds.
FOLD_MESSAGES = 250_000


class Options(NamedTuple):
    """How a job communicates.

    `priority`: send what the next forward pass needs first; else, to each machine, in order of arrival.
    `cross_barrier`: the forward pass of a layer waits for its own sums only.
    `overlap`: send gradients as they are made; else (accelerators that cannot overlap) after the backward pass.
    `interleave`: place partition by partition in forward order, not the largest first, so that owners of any part of
    the gradients are mixed.
    `credit_nbytes`, `partition_nbytes`, `fusion_nbytes`: as the settings of these names; fusion 0: every tensor alone.
    `optimizer_s`: time between a step's last sum and the next forward pass.
    `ring`: the ring of "ring", which has its own fusion; for "all-reduce" its members, slices and links.
    `fold`: let one machine stand for its role (`partition_layout.folded`); None: if it saves much time and only the
    grain is lost.
    """

    priority: bool = True
    cross_barrier: bool = False
    overlap: bool = True
    interleave: bool = False
    credit_nbytes: int = 16_777_216
    partition_nbytes: int = 4_096_000
    fusion_nbytes: int = 0
    optimizer_s: float = 0.0
    ring: Ring = Ring()
    fold: bool | None = None


DEFAULTS = Options()


class Outcome(NamedTuple):
    """The result. `first_s`: the first step, from its first forward pass to its last sum or the next forward pass.

    `wire_nbytes`: bytes that each simulated card sent and received in all steps (for a ring, those of one worker).
    """

    strategy: str
    step_s: float
    first_s: float
    compute_s: float
    wire_nbytes: tuple[tuple[float, float], ...]
    summed_nbytes: float
    n_steps: int
    n_events: int
    is_folded: bool

    @property
    def efficiency(self) -> float:
        """Share of a step that is computing: the speed relative to linear scaling."""
        return self.compute_s / self.step_s if self.step_s else 1.0


def simulate(job: Workload, cluster: Cluster, strategy: str = "optimal", options: Options = DEFAULTS,
             n_steps: int = 4) -> Outcome:
    """Run *n_steps* steps of *job* on *cluster*.

    *strategy*: "ring" (Horovod's all-reduce in order of arrival), "all-reduce" (`bpsfast.torch.schedule`'s, in order of
    priority), or a placement of summation services.

    `Outcome.step_s` is the mean over all steps but the first and the last, if there are four or more: the first starts
    with an idle network, and no forward pass follows the last. Raises `ConfigError` if the strategy is unknown or does
    not suit the cluster, or an option is invalid.
    """
    if n_steps < 1:
        raise ConfigError(f"a simulation needs one step or more, got {n_steps}")
    for name in ("credit_nbytes", "fusion_nbytes", "optimizer_s"):
        if not getattr(options, name) >= 0:
            raise ConfigError(f"{name} must not be negative, got {getattr(options, name)}")
    if options.partition_nbytes < 4096:
        raise ConfigError(f"partition_nbytes must be a page of 4096 bytes or more, got {options.partition_nbytes}")
    clock = Clock()
    workers: list[Worker] = []
    plan, exchange, n_workers, is_folded = _exchange(clock, job, cluster, strategy, options,
                                                     lambda worker, unit: workers[worker].unit_done(unit))
    layers_left = [list(plan.layers_of_unit) for _ in range(n_workers)]

    def made(worker: int, layer: int) -> None:
        layers = [layer] if options.overlap else [] if layer else range(len(job.layers) - 1, -1, -1)
        left = layers_left[worker]
        for made_layer in layers:
            for unit in reversed(plan.units_of_layer[made_layer]):
                left[unit] -= 1
                if not left[unit]:
                    left[unit] = plan.layers_of_unit[unit]
                    exchange.gradient_ready(worker, unit)

    workers += [Worker(clock, index, job.layers, plan.units_of_layer, n_steps, options.cross_barrier, made,
                       options.optimizer_s) for index in range(n_workers)]
    for worker in workers:
        clock.at(0.0, worker.begin)
    clock.run()
    # every worker started n_steps steps and ended once: a missing sum would end the simulation early
    assert all(len(worker.began_s) == n_steps + 1 for worker in workers), "a worker waits for a sum that never arrives"
    first_s = max(worker.began_s[1] for worker in workers)
    if n_steps >= 4:
        step_s = max((worker.began_s[-2] - worker.began_s[1]) / (n_steps - 2) for worker in workers)
    else:
        step_s = max(worker.began_s[-1] for worker in workers) / n_steps
    wire: tuple[tuple[float, float], ...]
    if isinstance(exchange, SimulatedPushPull):
        wire = tuple((card.tx.nbytes, card.rx.nbytes) for card in exchange.network.cards)
        summed = exchange.summed_nbytes
    else:
        wire, summed = ((exchange.wire_nbytes, exchange.wire_nbytes),), 0.0
    return Outcome(strategy, step_s, first_s, job.compute_s, wire, summed, n_steps, clock.n_events, is_folded)


def _exchange(clock: Clock, job: Workload, cluster: Cluster, strategy: str, options: Options, done: Done) -> tuple[
        PartitionedWorkload, RingAllReduce | ScheduledAllReduce | SimulatedPushPull, int, bool]:
    """Return the partitions, what sums them, the number of simulated workers, and whether the layout is folded."""
    if strategy in ("ring", "all-reduce"):
        check_ring(options.ring)
    if strategy == "ring":
        plan = partitioned(job, 1 << 62)  # a ring splits by itself: every tensor is one unit of one or two partitions
        return plan, RingAllReduce(clock, cluster, options.ring, [unit.nbytes for unit in plan.units], done), 1, False
    plan = partitioned(job, options.partition_nbytes, options.fusion_nbytes)
    limits: dict[str, Any] = {"credit_nbytes": options.credit_nbytes, "priority": options.priority, "done": done}
    if strategy == "all-reduce":
        return plan, ScheduledAllReduce(clock, cluster, options.ring, plan, **limits), 1, False
    n_messages = 2 * cluster.n_workers * sum(len(unit.parts) for unit in plan.units)
    fold = options.fold
    if fold is None:
        fold = n_messages > FOLD_MESSAGES and is_symmetric(cluster, strategy)
    layout = folded(cluster, plan, strategy) if fold else full(cluster, plan, strategy, options.interleave)
    return plan, SimulatedPushPull(clock, layout, cluster.costs, **limits), layout.n_workers, fold
