# cython: language_level=3, binding=True
"""Pace: a limit of bytes per second that several native threads share (`pace.h`)."""
cimport cython
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.string cimport memset


cdef extern from "pace.h" nogil:
    struct bps_pace:
        double ns_per_byte
        uint64_t piece_nbytes, next_ns, bytes, waited_ns
    int bps_await_turn(bps_pace *, uint64_t, const uint32_t *)

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

    def await_turn(self, uint64_t nbytes):
        """Wait for the turn of *nbytes*, without the GIL."""
        cdef uint32_t closing = 0
        with nogil:
            bps_await_turn(&self.pace, nbytes, &closing)

    def counters(self):
        """Return the bytes that had a turn, and the nanoseconds that all threads together waited for theirs."""
        return {"bytes": bps_counted(&self.pace.bytes), "waited_ns": bps_counted(&self.pace.waited_ns)}
