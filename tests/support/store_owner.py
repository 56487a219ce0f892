"""An `EngineNode` whose ranks are workers that share a store, each with the part of its number."""
from __future__ import annotations

from bpsfast.kernels import stores
from bpsfast.pyx.engine import Engine
from bpsfast.pyx.pages import Segment
from bpsfast.pyx.port import DONE
from tests.support.engine_node import PART, EngineNode

MOST = 4  # workers


class Owner:
    def __init__(self, n_threads=2):
        self.engine_node = EngineNode(n_ranks=MOST, n_parts=MOST, n_threads=n_threads)
        self.memory = Segment(2 * PART)
        self.rounds = []

    def open(self, n, *, momentum=False, **options):
        v = self.engine_node
        store = Engine.make_store(
            n, kernel=stores.address("float32"), weights=self.memory.address,
            momentum=self.memory.address + PART if momentum else 0, momentum_nbytes=PART if momentum else 0, **options)
        for part in range(n):
            v.own(part, local=[v.ranks[part]], unit_offset=0, store=store)
        v.commit()
        self.rounds = [0] * n

    def push(self, worker, values=None):
        self.rounds[worker] += 1
        if values is not None:
            self.engine_node.input(worker)[worker] = values
        self.engine_node.ports[worker].submit(worker, 1, self.rounds[worker], 0, worker * PART, empty=values is None)

    def answered(self, worker):
        return self.engine_node.ports[worker].done(worker, 1, self.rounds[worker])

    def answer(self, worker, timeout_s=20.0):
        assert self.engine_node.ports[worker].wait(worker, 1, self.rounds[worker], timeout_s) == DONE
        return self.engine_node.output(self.rounds[worker])[worker].copy()

    def push_pull(self, worker, values=None):
        self.push(worker, values)
        return self.answer(worker)

    def retire(self, workers):
        self.engine_node.engine.retire(workers)
