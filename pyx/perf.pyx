# cython: language_level=3, binding=True, freethreading_compatible=False
"""Perf: the native loops of ``bpsfast perf``, without the GIL: over queue pairs, shared memory, tcp streams.

    VerbsLoop    queue pairs and completion queues of `bpsfast.pyx.verbs`, by their handles      perf.h
    MemoryLoop   lanes, doorbells and memory that two processes share                            perf_memory.h
    Mailbox      takes the engine's place behind a `bpsfast.pyx.tcp.Stream`, and counts
    handover_ns  the time of a cache line between two CPUs                                       handover.h

One thread runs a loop; `cancel` and `expect` come from any other. Loops raise OSError: ECANCELED, ETIMEDOUT when
nothing moved for `stall_s`, EIO for a bad completion (`VerbsLoop.failure`), or the errno of a verb.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.errno cimport ENOSYS, ETIMEDOUT
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

import os

from pyx.ibverbs cimport *
from pyx.words cimport *


cdef extern from "perf.h" nogil:
    struct bps_perf_pair:
        bps_ibv_qp *qp
        uint64_t source, landing, remote
        uint32_t lkey, rkey
        uint64_t posted, completed, unsignalled
    struct bps_perf:
        bps_ibv_cq *send_cq
        bps_ibv_cq *recv_cq
        bps_perf_pair *pairs
        uint32_t n_pairs, opcode, nbytes, depth, receive_depth, receive_nbytes, moderation, inlined
        int receives
        uint64_t idle_ns, stall_ns, nap_ns, receive_goal
        uint32_t cancel
        uint64_t sent, received, begun_ns, ended_ns
        uint64_t all_sent
        uint64_t *posted_ns
        uint64_t *completed_ns
        int failed, failed_pair, failed_receive
        uint32_t vendor_error
    int bps_perf_post_receives(bps_perf *, uint32_t, uint32_t)
    int bps_perf_bandwidth(bps_perf *, uint64_t, uint64_t)
    int bps_perf_latency(bps_perf *, uint64_t, int, uint64_t *)

cdef extern from "perf_memory.h" nogil:
    struct bps_perf_memory:
        bps_lane *incoming
        bps_lane *outgoing
        uint32_t incoming_capacity, outgoing_capacity
        bps_doorbell *own_bell
        bps_doorbell *peer_bell
        const char *peer_data
        char *sink
        uint64_t nbytes, stream_nbytes, awake_ns, stall_ns
        uint32_t depth, cancel
        uint64_t receive_goal, sent, received, begun_ns, ended_ns
    int bps_perf_memory_bandwidth(bps_perf_memory *, uint64_t, uint64_t)
    int bps_perf_memory_latency(bps_perf_memory *, uint64_t, int, uint64_t *)

cdef extern from *:
    """
    #define BPS_SET64(word, value) __atomic_store_n(&(word), (value), __ATOMIC_RELEASE)
    #define BPS_GET64(word) __atomic_load_n(&(word), __ATOMIC_ACQUIRE)
    """
    void BPS_SET64(uint64_t, uint64_t) nogil
    uint64_t BPS_GET64(uint64_t) nogil


#: operation -> its opcode
_OPCODES = {"write": BPS_WR_RDMA_WRITE, "write_imm": BPS_WR_RDMA_WRITE_WITH_IMM, "send": BPS_WR_SEND,
            "read": BPS_WR_RDMA_READ}
#: Times are recorded of so many sends at most.
MAX_RECORDS = 1 << 22


cdef uint64_t _nanoseconds(seconds) except? 0:
    """Return a duration; None is for ever."""
    return <uint64_t>-1 if seconds is None else <uint64_t>(seconds * 1e9)


cdef class _Samples:
    """Room for n times in nanoseconds."""

    cdef uint64_t *values
    cdef Py_ssize_t n

    def __cinit__(self, Py_ssize_t n):
        self.n = n
        self.values = <uint64_t *>calloc(max(1, n), sizeof(uint64_t))
        if self.values == NULL:
            raise MemoryError(f"{n} samples")

    cdef bytes data(self, Py_ssize_t n):
        return PyBytes_FromStringAndSize(<char *>self.values, 8 * min(n, self.n))

    def __dealloc__(self):
        free(self.values)


@cython.final
cdef class VerbsLoop:
    """One side of one run over *pairs* that complete into the queues *send_cq* and *recv_cq* (addresses of both).

    *pairs*: for each queue pair its address, and of our memory the address that leaves, the address where the peer's
    data lands and the lkey, of the peer's the address and the rkey. *operation*: write, write_imm, send or read.
    *moderation*: every how manieth send is signalled; at most *depth*, the sends in flight. *receive_depth*: receives
    of *receive_nbytes* that are kept posted, if *receives*: `post_receives` posts them, once for all loops over the
    same pairs, as each loop leaves as many as it found. *idle_s*: sleep on the queues' event channels after so long
    without a completion (None: never); with *nap_s* by the clock instead, so long at most, once messages come. *keep*
    is held: the queue pairs and the memory live as long as the loop.
    """

    cdef bps_perf perf
    cdef object keep

    def __init__(self, uintptr_t send_cq, uintptr_t recv_cq, pairs, *, operation, uint32_t nbytes, uint32_t depth,
                 uint32_t receive_depth, uint32_t receive_nbytes, bint receives, uint32_t moderation,
                 bint inlined=False, idle_s=None, nap_s=0.0, stall_s=30.0, keep=None):
        cdef bps_perf *perf = &self.perf
        cdef char why[512]
        if perf.pairs != NULL:
            raise ValueError("a VerbsLoop is initialised once")
        if operation not in _OPCODES or nbytes < 1 or not pairs or not 1 <= moderation <= depth or receive_depth < 1:
            raise ValueError(f"operation={operation!r}, nbytes={nbytes}, {len(pairs)} pairs, moderation={moderation}, "
                             f"depth={depth}, receive_depth={receive_depth}")
        if bps_verbs_open(BPS_VERBS_LIBRARY, why, sizeof(why)):
            raise OSError(ENOSYS, f"libibverbs is gone: {(<bytes>why).decode()}")
        perf.pairs = <bps_perf_pair *>calloc(len(pairs), sizeof(bps_perf_pair))
        if perf.pairs == NULL:
            raise MemoryError("perf pairs")
        perf.n_pairs = len(pairs)
        for i, (qp, source, landing, lkey, remote, rkey) in enumerate(pairs):
            perf.pairs[i].qp = <bps_ibv_qp *><uintptr_t>qp
            perf.pairs[i].source, perf.pairs[i].landing, perf.pairs[i].lkey = source, landing, lkey
            perf.pairs[i].remote, perf.pairs[i].rkey = remote, rkey
        perf.send_cq, perf.recv_cq = <bps_ibv_cq *>send_cq, <bps_ibv_cq *>recv_cq
        perf.opcode, perf.nbytes, perf.depth, perf.receive_depth = _OPCODES[operation], nbytes, depth, receive_depth
        perf.moderation, perf.inlined = moderation, inlined
        perf.receive_nbytes, perf.receives = receive_nbytes, receives
        perf.idle_ns, perf.stall_ns = _nanoseconds(idle_s), _nanoseconds(stall_s)
        perf.nap_ns = min(_nanoseconds(nap_s), 999_999_999)
        perf.all_sent = <uint64_t>-1
        self.keep = keep

    def post_receives(self):
        """Post *receive_depth* receives on every pair, before the peer begins."""
        cdef uint32_t i
        cdef int rc = 0
        with nogil:
            for i in range(self.perf.n_pairs):
                rc = bps_perf_post_receives(&self.perf, i, self.perf.receive_depth)
                if rc:
                    break
        if rc:
            raise OSError(rc, f"ibv_post_recv of {self.perf.receive_depth} receives: {os.strerror(rc)}")

    def bandwidth(self, n_send, n_receive, duration_s=0.0):
        """Send *n_send* operations on each pair (None: for *duration_s*) and take *n_receive* receives in all.

        *n_receive* None: until `expect` says how many. Returns (sent, received, seconds, times of the posts, times of
        the completions): uint64 nanoseconds, empty where *n_send* is None or beyond `MAX_RECORDS`.
        """
        cdef bps_perf *perf = &self.perf
        cdef uint64_t goal = <uint64_t>-1 if n_send is None else n_send
        cdef uint64_t duration_ns = _nanoseconds(duration_s)
        cdef uint64_t n = 0 if n_send is None else goal * perf.n_pairs
        cdef int rc
        cdef _Samples posted = _Samples(n if n <= <uint64_t>MAX_RECORDS else 0)
        cdef _Samples completed = _Samples(posted.n)
        if n_receive is not None or perf.receive_goal == 0:
            BPS_SET64(perf.receive_goal, <uint64_t>-1 if n_receive is None else <uint64_t>n_receive)
        perf.posted_ns = posted.values if posted.n else NULL
        perf.completed_ns = completed.values if posted.n else NULL
        try:
            with nogil:
                rc = bps_perf_bandwidth(perf, goal, duration_ns)
        finally:
            perf.posted_ns = perf.completed_ns = NULL
        self._check(rc)
        return (perf.sent, perf.received, max(0, <int64_t>(perf.ended_ns - perf.begun_ns)) / 1e9,
                posted.data(perf.sent), completed.data(perf.sent))

    def latency(self, uint64_t n, bint first):
        """Take *n* turns; the side that is *first* begins. Return the nanoseconds of each, as uint64."""
        cdef _Samples samples = _Samples(n)
        cdef int rc
        with nogil:
            rc = bps_perf_latency(&self.perf, n, first, samples.values)
        self._check(rc)
        return samples.data(n)

    cdef int _check(self, int rc) except -1:
        if rc:
            raise OSError(rc, f"after {self.perf.sent} sends and {self.perf.received} receives: {os.strerror(rc)}")
        return 0

    @property
    def failure(self):
        """The bad completion that ended the loop: (status, vendor error, pair, whether of a receive), or None."""
        if not self.perf.failed:
            return None
        return self.perf.failed, self.perf.vendor_error, self.perf.failed_pair, bool(self.perf.failed_receive)

    @property
    def all_sent(self):
        """How many sends there were in all, once there will be no more; None before."""
        n = BPS_GET64(self.perf.all_sent)
        return None if n == <uint64_t>-1 else n

    def expect(self, uint64_t n):
        """Say how many receives end the run."""
        BPS_SET64(self.perf.receive_goal, n)

    def cancel(self):
        """End the loop, soon."""
        bps_store(&self.perf.cancel, 1)

    def __dealloc__(self):
        free(self.perf.pairs)


cdef extern from "handover.h" nogil:
    int bps_handover(int, int, uint64_t, double *)


def handover_ns(int first, int second, double timeout_s=0.2):
    """Return how many ns a cache line takes from CPU *first* to CPU *second*: the least of several short series.

    Two threads of its own are bound to them meanwhile. Raises OSError: EINVAL if this process may not use one of the
    CPUs, ETIMEDOUT if they did not come so far, as where others keep them busy.
    """
    cdef double ns = 0
    cdef int rc
    cdef uint64_t timeout_ns = <uint64_t>(timeout_s * 1e9)
    if first < 0 or second < 0 or first == second:
        raise ValueError(f"a cache line goes between two CPUs, not from {first} to {second}")
    with nogil:
        rc = bps_handover(first, second, timeout_ns, &ns)
    if rc == ETIMEDOUT:
        raise OSError(rc, f"CPUs {first} and {second} are busy: no cache lines came through in {timeout_s:g} s")
    if rc:
        raise OSError(rc, f"cache lines between CPUs {first} and {second}: {os.strerror(rc)}")
    return ns


include "perf_memory.pxi"
include "perf_mailbox.pxi"
