# The class MemoryLoop of perf.pyx.


@cython.final
cdef class MemoryLoop:
    """One side of one run through shared memory: formatted lanes and doorbells (`ring`), the peer's data, a sink.

    *peer_data*: *depth* slots of *nbytes*; *sink*: *nbytes* that they are copied to, with stores that pass the caches
    from *stream_nbytes* on. *awake_s*: how long a wait keeps its core before it sleeps.
    """

    cdef bps_perf_memory memory
    cdef Py_buffer views[6]
    cdef int n_views

    def __init__(self, incoming, outgoing, own_bell, peer_bell, peer_data, sink, *, uint64_t nbytes, uint32_t depth,
                 awake_s=0.0, stall_s=30.0, uint64_t stream_nbytes=1 << 62):
        cdef bps_perf_memory *memory = &self.memory
        if self.n_views:
            raise ValueError("a MemoryLoop is initialised once")
        for buffer in (incoming, outgoing, own_bell, peer_bell, peer_data, sink):
            PyObject_GetBuffer(buffer, &self.views[self.n_views],
                               PyBUF_SIMPLE if buffer is peer_data else PyBUF_SIMPLE | PyBUF_WRITABLE)
            self.n_views += 1
        memory.incoming, memory.outgoing = <bps_lane *>self.views[0].buf, <bps_lane *>self.views[1].buf
        memory.incoming_capacity = bps_lane_capacity(memory.incoming, self.views[0].len)
        memory.outgoing_capacity = bps_lane_capacity(memory.outgoing, self.views[1].len)
        if min(memory.incoming_capacity, memory.outgoing_capacity) < 2 * depth or depth < 1:
            raise ValueError(f"lanes of {memory.incoming_capacity} and {memory.outgoing_capacity} entries for "
                             f"depth={depth}")
        if min(self.views[2].len, self.views[3].len) < <Py_ssize_t>sizeof(bps_doorbell) or nbytes < 1 \
                or <uint64_t>self.views[4].len < nbytes * depth or <uint64_t>self.views[5].len < nbytes:
            raise ValueError(f"doorbells of {self.views[2].len} and {self.views[3].len} bytes, data of "
                             f"{self.views[4].len} and sink of {self.views[5].len} bytes for {depth} slots of {nbytes}")
        memory.own_bell, memory.peer_bell = <bps_doorbell *>self.views[2].buf, <bps_doorbell *>self.views[3].buf
        memory.peer_data, memory.sink = <const char *>self.views[4].buf, <char *>self.views[5].buf
        memory.nbytes, memory.depth, memory.stream_nbytes = nbytes, depth, stream_nbytes
        memory.awake_ns, memory.stall_ns = _nanoseconds(awake_s), _nanoseconds(stall_s)

    def bandwidth(self, n_send, n_receive, duration_s=0.0):
        """Announce *n_send* slots (None: for *duration_s*), copy *n_receive*; return (sent, received, seconds).

        *n_receive* None: until `expect` says how many.
        """
        cdef bps_perf_memory *memory = &self.memory
        cdef uint64_t goal = <uint64_t>-1 if n_send is None else n_send
        cdef uint64_t duration_ns = _nanoseconds(duration_s)
        cdef int rc
        self._check_open()
        if n_receive is not None or memory.receive_goal == 0:
            BPS_SET64(memory.receive_goal, <uint64_t>-1 if n_receive is None else <uint64_t>n_receive)
        with nogil:
            rc = bps_perf_memory_bandwidth(memory, goal, duration_ns)
        if rc:
            raise OSError(rc, f"after {memory.sent} sent and {memory.received} received: {os.strerror(rc)}")
        return memory.sent, memory.received, max(0, <int64_t>(memory.ended_ns - memory.begun_ns)) / 1e9

    def latency(self, uint64_t n, bint first):
        """Take *n* turns; the side that is *first* begins. Return the nanoseconds of each, as uint64."""
        cdef _Samples samples = _Samples(n)
        cdef int rc
        self._check_open()
        with nogil:
            rc = bps_perf_memory_latency(&self.memory, n, first, samples.values)
        if rc:
            raise OSError(rc, f"after {self.memory.received} turns: {os.strerror(rc)}")
        return samples.data(n)

    def expect(self, uint64_t n):
        """Say how many slots end the run."""
        BPS_SET64(self.memory.receive_goal, n)

    def cancel(self):
        """End the loop, soon."""
        bps_store(&self.memory.cancel, 1)

    def close(self):
        """Let go of the memory, whoever still holds the loop; nobody runs it any more. Idempotent."""
        self._release()

    cdef int _check_open(self) except -1:
        if not self.n_views:
            raise ValueError("the loop is closed")
        return 0

    cdef void _release(self) noexcept:
        for i in range(self.n_views):
            PyBuffer_Release(&self.views[i])
        self.n_views = 0

    def __dealloc__(self):
        self._release()
