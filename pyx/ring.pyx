# cython: language_level=3, binding=True
"""Ring: Python access to the shared memory words by which the processes of a machine notify each other.

Formats the memory of lanes, boards and doorbells (`lane.h`, `board.h`, `futex.h` draw them), and offers the
two ends of a lane and a doorbell as objects, for tests and benches: the hot path uses them inside `port` and
`engine` without Python.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint16_t, uint32_t, uint64_t
from libc.string cimport memset

from pyx.words cimport *


#: Partitions a job can have: board words, and entries of a lane between nodes.
MAX_PARTS = BPS_MAX_PARTS
#: A rank's lane: 4096 entries; a full one makes the rank wait for its node, never the node for a rank.
LANE_NBYTES = BPS_LANE_HEADER + 4096 * sizeof(bps_entry)
#: A lane between two nodes never fills: at most one partial and one result of a partition are under way.
PEER_LANE_NBYTES = BPS_LANE_HEADER + 2 * BPS_MAX_PARTS * sizeof(bps_entry)
BOARD_NBYTES = BPS_BOARD_HEADER + BPS_MAX_PARTS * BPS_BOARD_STRIDE
DOORBELL_NBYTES = sizeof(bps_doorbell)


cdef void *_writable(object buffer, Py_buffer *view, size_t least, str what) except NULL:
    PyObject_GetBuffer(buffer, view, PyBUF_SIMPLE | PyBUF_WRITABLE)
    if <size_t>view.len < least:
        nbytes = view.len
        PyBuffer_Release(view)
        raise ValueError(f"a {what} needs at least {least} bytes, the buffer has {nbytes}")
    return view.buf


def format_lane(buffer):
    """Make *buffer* an empty lane, its capacity the largest power of two that fits."""
    cdef Py_buffer view
    cdef bps_lane *lane = <bps_lane *>_writable(buffer, &view, BPS_LANE_HEADER + sizeof(bps_entry), "lane")
    cdef uint32_t capacity = 1
    while BPS_LANE_HEADER + 2 * <uint64_t>capacity * sizeof(bps_entry) <= <uint64_t>view.len:
        capacity *= 2
    memset(lane, 0, BPS_LANE_HEADER)
    lane.magic, lane.capacity = BPS_LANE_MAGIC, capacity
    PyBuffer_Release(&view)


def format_board(buffer):
    """Make *buffer* a board on which nothing is published yet."""
    cdef Py_buffer view
    cdef bps_board *board = <bps_board *>_writable(buffer, &view, BPS_BOARD_HEADER + BPS_BOARD_STRIDE, "board")
    memset(board, 0, view.len)
    board.magic = BPS_BOARD_MAGIC
    board.n_words = <uint32_t>((view.len - BPS_BOARD_HEADER) // BPS_BOARD_STRIDE)
    PyBuffer_Release(&view)


def format_doorbell(buffer):
    """Make *buffer* a doorbell nobody has rung."""
    cdef Py_buffer view
    cdef bps_doorbell *bell = <bps_doorbell *>_writable(buffer, &view, sizeof(bps_doorbell), "doorbell")
    memset(bell, 0, sizeof(bps_doorbell))
    bell.magic = BPS_DOORBELL_MAGIC
    PyBuffer_Release(&view)


def tally(buffer):
    """Return what the rank at the other end of the lane in *buffer* has counted (`lane.h`); times in nanoseconds."""
    cdef Py_buffer view
    cdef bps_lane *lane = <bps_lane *>_writable(buffer, &view, BPS_LANE_HEADER, "lane")
    try:
        return {"steps": bps_counted(&lane.tally.steps), "step_ns": bps_counted(&lane.tally.step_ns),
                "exposed_ns": bps_counted(&lane.tally.step_exposed_ns),
                "communication_ns": bps_counted(&lane.tally.communication_ns),
                "hidden_ns": bps_counted(&lane.tally.hidden_ns), "stalls": bps_counted(&lane.tally.stalls),
                "direct_calls": bps_counted(&lane.direct_calls), "direct_bytes": bps_counted(&lane.direct_nbytes)}
    finally:
        PyBuffer_Release(&view)


@cython.final
cdef class Lane:
    """Either end of a formatted lane. One producer thread and one consumer thread at a time."""

    cdef Py_buffer view
    cdef bps_lane *lane
    cdef readonly uint32_t capacity

    def __cinit__(self, buffer):
        self.lane = <bps_lane *>_writable(buffer, &self.view, BPS_LANE_HEADER, "lane")
        self.capacity = bps_lane_capacity(self.lane, self.view.len)
        if self.capacity == 0:
            raise ValueError(f"the buffer of {self.view.len} bytes is no formatted lane")

    def push(self, uint32_t part, uint32_t count, uint32_t round, uint16_t flags, uint16_t segment, uint64_t offset):
        """Announce an input; return whether there was room."""
        cdef bps_entry entry
        entry.part, entry.count, entry.round, entry.flags = part, count, round, flags
        entry.segment, entry.offset, entry.time_ns = segment, offset, bps_now_ns()
        return bps_lane_push(self.lane, self.capacity, &entry) == 0

    def pop(self):
        """Return (part, count, round, flags, segment, offset), or None when the lane is empty."""
        cdef bps_entry entry
        if bps_lane_pop(self.lane, self.capacity, &entry) != 0:
            return None
        return entry.part, entry.count, entry.round, entry.flags, entry.segment, entry.offset

    def __dealloc__(self):
        PyBuffer_Release(&self.view)


@cython.final
cdef class Doorbell:
    """A formatted doorbell. Any number of threads and processes on either side."""

    cdef Py_buffer view
    cdef bps_doorbell *bell

    def __cinit__(self, buffer):
        self.bell = <bps_doorbell *>_writable(buffer, &self.view, sizeof(bps_doorbell), "doorbell")
        if self.bell.magic != BPS_DOORBELL_MAGIC:
            raise ValueError("the buffer is no formatted doorbell")

    def rings(self):
        """Return how often it was rung: what `wait` is given."""
        return bps_load(&self.bell.rings)

    def ring(self, int wake=2147483647):
        """Ring; wake at most *wake* sleepers."""
        bps_ring_doorbell(self.bell, wake)

    def wait(self, uint32_t seen, double timeout_s):
        """Sleep until it was rung since `rings` returned *seen*; return whether it was."""
        cdef uint64_t timeout_ns = <uint64_t>(timeout_s * 1e9)
        with nogil:
            bps_await_doorbell(self.bell, seen, 0, timeout_ns)
        return bps_load(&self.bell.rings) != seen

    def __dealloc__(self):
        PyBuffer_Release(&self.view)
