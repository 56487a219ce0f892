# cython: language_level=3, binding=True
"""Pace: a limit of bytes per second that several native threads share (`pace.h`)."""
cimport cython
from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memset


cdef extern from "pace.h" nogil:
    struct bps_pace:
        double ns_per_byte
        uint64_t piece_nbytes, next_ns, bytes, waited_ns
    uint64_t bps_pace_turn(bps_pace *, uint64_t, uint64_t)
    uint64_t bps_now_ns()

cdef extern from "lane.h" nogil:
    uint64_t bps_counted(const uint64_t *)

cdef enum:
    LEAST_PIECE_NBYTES = 4096
    MOST_PIECE_NBYTES = 1048576

#: What is moved at once takes about so long: each piece wakes a thread, at 0.5 ms that was most of the work.
cdef double PIECE_S = 0.002


@cython.final
cdef class Pace:
    """At most *rate_bytes* per second for all who are given its `address`; it must outlive them. Any thread."""

    cdef bps_pace pace

    def __cinit__(self, double rate_bytes):
        if not rate_bytes > 0:
            raise ValueError(f"a pace of {rate_bytes} bytes per second moves nothing")
        memset(&self.pace, 0, sizeof(self.pace))
        self.pace.ns_per_byte = 1e9 / rate_bytes
        self.pace.piece_nbytes = <uint64_t>min(max(PIECE_S * rate_bytes, LEAST_PIECE_NBYTES), MOST_PIECE_NBYTES)

    @property
    def address(self):
        """Where the `bps_pace` lies."""
        return <uintptr_t>&self.pace

    def turn(self, uint64_t nbytes):
        """Reserve the turn of *nbytes*; return when it begins, in nanoseconds of the monotonic clock."""
        return bps_pace_turn(&self.pace, nbytes, bps_now_ns())

    def counters(self):
        """Return the bytes that had a turn, and the nanoseconds that all of these together were delayed."""
        return {"bytes": bps_counted(&self.pace.bytes), "waited_ns": bps_counted(&self.pace.waited_ns)}
