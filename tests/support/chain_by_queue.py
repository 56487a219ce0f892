"""A chain of layers through the job's own queues, which the scheduling theorem's tests compare with the best order.

A byte of the oracle is a page here, and a unit of the oracle's time is a second.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from bpsfast.tools.simulator.all_reduce import Ring, ScheduledAllReduce
from bpsfast.tools.simulator.network import Clock, Costs, Load, uniform
from bpsfast.tools.simulator.partition_layout import full
from bpsfast.tools.simulator.push_pull import Done, SimulatedPushPull
from bpsfast.tools.simulator.simulation import Worker
from bpsfast.tools.simulator.workload import Layer, PartitionedWorkload, Workload, partitioned, workload

from .best_order import Chain, Op

PAGE = 4096
#: Two ranks: an all-reduce moves its bytes in each direction. One rank and one helper: pushes and pulls.
RANKS, RANK_AND_HELPER = uniform(2, 0, PAGE), uniform(1, 1, PAGE)


def job_of(chain: Chain) -> Workload:
    """Return the chain as the simulator's workload, with one tensor for each layer."""
    layers = [Layer(f"layer {i}", forward, backward, (f"w{i}",))
              for i, (forward, backward) in enumerate(zip(chain.forward, chain.backward))]
    return workload("chain", layers, {f"w{i}": (size * PAGE // 4,) for i, size in enumerate(chain.sizes)})


def all_reduces(clock: Clock, plan: PartitionedWorkload, done: Done, credit: int,
                overhead: float = 0) -> ScheduledAllReduce:
    """Return the scheduled all-reduces of *plan*; each partition takes *overhead* in addition to its bytes."""
    ring = Ring(slice_nbytes=1 << 40, overhead_s=overhead / 2)  # two lock-steps
    return ScheduledAllReduce(clock, RANKS, ring, plan, credit_nbytes=credit * PAGE, priority=True, done=done)


def services(clock: Clock, plan: PartitionedWorkload, done: Done, credit: int, overhead: float,
             links: Sequence[int]) -> SimulatedPushPull:
    """Return a helper's summation service; *links* are the times of a byte in both directions."""
    machines = RANK_AND_HELPER._replace(costs=Costs(overhead_s=overhead))
    layout = full(machines, plan, "ps")
    push, pull = links
    parts = tuple(part._replace(push=Load(push * part.nbytes, push * part.nbytes),
                                result=Load(pull * part.nbytes, pull * part.nbytes)) for part in layout.parts)
    return SimulatedPushPull(clock, layout._replace(parts=parts), machines.costs, credit_nbytes=credit * PAGE,
                             priority=True,
                    done=done)


def iteration_s(chain: Chain, part: int, links: Sequence[int], credit: int = 0, overhead: float = 0) -> float:
    """Return the iteration time of the queues without a barrier; *credit* in the links' bytes."""
    job = job_of(chain)
    plan = partitioned(job, part * PAGE)
    clock = Clock()
    workers: list[Worker] = []

    def done(worker: int, unit: int) -> None:
        workers[worker].unit_done(unit)

    exchange = (all_reduces(clock, plan, done, credit, overhead) if links == (1,) else
                services(clock, plan, done, credit, overhead, links))
    workers.append(Worker(clock, 0, job.layers, plan.units_of_layer, 3, True, exchange.gradient_ready))
    workers[0].begin()
    clock.run()
    return workers[0].began_s[2] - workers[0].began_s[1]  # between the ends of two backward passes


def window_s(part: int, link: int, credit: int, overhead: float = 0) -> float:
    """Return the longest time that a link works on partitions already taken from its queue."""
    return max(1, credit // (part * link)) * (part * link + overhead)


def graph_s(ops: Sequence[Op], sizes: Sequence[int]) -> float:
    """Return the end of all *ops*, which the accelerator runs in order of readiness, with all-reduces of pages."""
    names = tuple(f"w{i}" for i in range(len(sizes)))
    shapes = {name: (size * PAGE // 4,) for name, size in zip(names, sizes)}
    job = workload("graph", [Layer("all", 0, 0, names)], shapes)
    clock = Clock()
    sums: set[int] = {-1}
    seen: set[int] = set()
    over: set[int] = set()
    waiting: deque[int] = deque()
    running: list[int] = []

    def look() -> None:
        for i, op in enumerate(ops):
            if i not in seen and op.ready <= clock.now and over.issuperset(op.after) and op.needs in sums:
                seen.add(i)
                waiting.append(i)
        if waiting and not running:
            running.append(waiting.popleft())
            clock.at(clock.now + ops[running[0]].seconds, end)

    def end() -> None:
        op = running.pop()
        over.add(op)
        if ops[op].makes >= 0:
            exchange.gradient_ready(0, ops[op].makes)
        look()

    def done(worker: int, unit: int) -> None:
        sums.add(unit)
        look()

    exchange = all_reduces(clock, partitioned(job, PAGE), done, 0)
    for op in ops:
        clock.at(op.ready, look)
    clock.run()
    assert len(over) == len(ops), "an op waits for what never comes"
    return clock.now
