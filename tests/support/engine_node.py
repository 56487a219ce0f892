"""A node in one process: an engine, and the ports, lanes and memory of its ranks."""
import numpy as np

from bpsfast import kernels
from bpsfast.pyx import ring
from bpsfast.pyx.engine import Engine
from bpsfast.pyx.pages import Segment
from bpsfast.pyx.port import Port

PART = 4096
N = PART // 4


class EngineNode:
    """One engine with its board, its ranks' lanes and inputs, and an output region; all in this process."""

    def __init__(self, n_ranks=2, n_parts=4, n_threads=2, **options):
        self.n_ranks, self.n_parts = n_ranks, n_parts
        self.board, self.bell = Segment(ring.BOARD_NBYTES, populate=False), Segment(ring.DOORBELL_NBYTES)
        ring.format_board(self.board)
        ring.format_doorbell(self.bell)
        self.lanes = [Segment(ring.LANE_NBYTES) for _ in range(n_ranks)]
        for lane in self.lanes:
            ring.format_lane(lane)
        self.engine = Engine(self.board, self.bell, n_threads=n_threads, **options)
        self.ranks = [self.engine.add_rank(lane) for lane in self.lanes]
        self.inputs = [Segment(n_parts * PART) for _ in range(n_ranks)]
        for source, segment in zip(self.ranks, self.inputs):
            self.engine.map_segment(source, 0, segment.address, segment.nbytes)
        self.outputs = Segment(2 * n_parts * PART)
        self.ports = [Port(lane, self.board, self.bell, -1) for lane in self.lanes]

    def own(self, part, **changes):
        arguments = dict(
            nbytes=PART, n_elements=N, unit_offset=part * PART, kernel=kernels.address("float32"), divisor=1,
            before=[], local=self.ranks, after=[], shm_peers=[], to_wire=False,
            outputs=[self.outputs.address + (parity * self.n_parts + part) * PART for parity in (0, 1)],
        )
        self.engine.add_owned(part, **{**arguments, **changes})

    def commit(self, order=None):
        self.engine.freeze(5)
        self.engine.commit(self.engine.generation + 1, order or list(range(self.n_parts)))

    def input(self, rank):
        return np.frombuffer(self.inputs[rank], np.float32).reshape(self.n_parts, N)

    def output(self, round):
        return np.frombuffer(self.outputs, np.float32).reshape(2, self.n_parts, N)[round % 2]

    def close(self):
        for port in self.ports:
            port.close()
        self.engine.close()
