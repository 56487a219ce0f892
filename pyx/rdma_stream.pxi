# The class Stream of rdma.pyx.


cdef int _post(void *stream, uint32_t slot, uint32_t round, uint32_t flags, uint64_t address,
               uint64_t nbytes, int may_be_at_once, int *is_delivered) noexcept nogil:
    """`bps_post_fn`: an errno of `bps_rdma_post`, or EINVAL for a slot that the stream does not have."""
    if slot >= (<bps_rdma_stream *>stream).n_slots:
        return EINVAL
    return bps_rdma_post(<bps_rdma_stream *>stream, slot, round, flags, address, nbytes)


@cython.final
@cython.no_gc  # as for `Rail`: what is kept goes after the stream, in no order of the collector's
cdef class Stream:
    """One queue pair (its `handle`; in INIT at least) over *rail*; *keep* is held until `close`.

    *epoch* is stamped on every write and checked on every arrival. At most *max_send* writes are in the queue pair,
    others wait in a ring of ours; at most *max_receive* receive requests are posted, for any number of slots. Writes
    up to *inline_nbytes* travel inside the request; of writes that wait in a row, every *signal_every*-th asks for a
    completion. If none comes for *patience_s* seconds, far longer than the queue pair sends an unanswered packet
    again, the stream has failed: a peer that never posts receive requests is noticed by nothing else. One receive
    request is posted at once, for the peer's `prove`. `bind`, `aim` and `post` from any thread once it is connected.

    Raises
    ------
    ValueError
        From `post`, `aim` and `bind`, if the slot is beyond *n_slots*, does not fit, or the stream is closed.
    OSError
        The errno of a post.
    """

    cdef bps_rdma_stream *stream
    cdef Rail rail
    cdef object keep
    cdef bint is_open

    def __cinit__(self, Rail rail not None, uintptr_t queue_pair, *, uint32_t epoch, uint32_t n_slots,
                  uint32_t max_send, uint32_t max_receive, uint32_t inline_nbytes=0, uint32_t signal_every=1,
                  double patience_s=30.0, uint64_t trace_capacity=0, uint32_t trace_first_round=1,
                  uint32_t trace_last_round=0, keep=None):
        if signal_every < 1:
            raise ValueError("signal_every=0: nobody would learn that a write is delivered")
        if max_send < 1 or max_receive < 1:
            raise ValueError(f"max_send={max_send}, max_receive={max_receive}: nothing would ever be sent, or arrive")
        cdef bps_rdma_stream *stream = <bps_rdma_stream *>calloc(1, sizeof(bps_rdma_stream))
        if stream == NULL:
            raise MemoryError("stream")
        self.stream, self.rail, self.keep = stream, rail, keep
        pthread_mutex_init(&stream.lock, NULL)
        stream.regions, stream.qp = &rail._open().regions, <bps_ibv_qp *>queue_pair
        stream.epoch, stream.n_slots, stream.max_send, stream.max_receive = epoch, n_slots, max_send, max_receive
        stream.inline_nbytes, stream.signal_every = inline_nbytes, signal_every
        stream.patience_ns = <uint64_t>(1e9 * patience_s)
        stream.capacity = 256
        stream.in_ = <bps_slot_in *>calloc(n_slots, sizeof(bps_slot_in))
        stream.out = <bps_slot_out *>calloc(n_slots, sizeof(bps_slot_out))
        stream.queue = <bps_write *>calloc(stream.capacity, sizeof(bps_write))
        cdef int rc = bps_trace_open(&stream.records, trace_capacity, trace_first_round, trace_last_round)
        has_tables = stream.in_ != NULL and stream.out != NULL and stream.queue != NULL
        if rc or not has_tables or bps_rail_add_stream(rail.rail, stream):
            raise MemoryError(f"stream of {n_slots} slots and a trace of {trace_capacity} records")
        self.is_open = True
        rail.n_streams += 1
        rc = bps_rdma_receive(stream, 1)
        if rc:
            self.close()
            raise OSError(rc, f"ibv_post_recv: {os.strerror(rc)}; is the queue pair in INIT?")

    cdef bps_rdma_stream *_open(self) except NULL:
        if not self.is_open:
            raise ValueError(f"the stream to source {self.stream.peer} is closed")
        self.rail._open()
        return self.stream

    cdef bps_rdma_stream *_slot(self, uint32_t slot) except NULL:
        cdef bps_rdma_stream *stream = self._open()
        if slot >= stream.n_slots:
            raise ValueError(f"slot {slot} of {stream.n_slots}")
        return stream

    cdef int _refuse_closed(self, int rc) except -1:
        if rc == ESHUTDOWN:
            raise ValueError(f"the stream to source {self.stream.peer} was closed meanwhile")
        return 0

    @property
    def handle(self):
        """Address that the function at `post_address` takes first; valid as long as this object."""
        return <uintptr_t>self.stream

    @property
    def post_address(self):
        """Address of the `bps_post_fn` (hooks.h), which does as `post`."""
        return <uintptr_t>&_post

    @property
    def backlog_address(self):
        """0: the peer has bound each slot to one queue pair."""
        return 0

    @property
    def peer(self):
        """The engine's source id of the node at the other end, once started."""
        return self.stream.peer

    def prove(self, double timeout_s):
        """Write zero bytes to the peer, which does the same; whether both have arrived within *timeout_s* seconds."""
        cdef bps_rdma_stream *stream = self._open()
        cdef int rc
        cdef uint32_t both = BPS_PROOF_SENT | BPS_PROOF_RECEIVED, seen
        cdef uint64_t until = bps_now_ns() + <uint64_t>(1e9 * timeout_s), now
        with nogil:
            rc = bps_rdma_prove(stream)
        self._refuse_closed(rc)
        if rc:
            raise OSError(rc, f"ibv_post_send: {os.strerror(rc)}; is the queue pair in RTS?")
        with nogil:
            while True:
                seen = bps_load(&stream.proof)
                now = bps_now_ns()
                if seen & BPS_PROOF_FAILED or (seen & both) == both or now >= until:
                    break
                bps_wait(&stream.proof, seen, min(until - now, <uint64_t>100000000))
        return (seen & both) == both and not seen & BPS_PROOF_FAILED

    def start(self, *, uint32_t peer, uintptr_t engine, uintptr_t arrived, uintptr_t notify, uint32_t number=0,
              keep=None):
        """Report to an engine from now on, as its source *peer*; addresses, *number*: see `bpsfast.pyx.tcp.Stream`."""
        cdef bps_rdma_stream *stream = self._open()
        if stream.engine != NULL:
            raise ValueError("a stream is started once")
        self.keep = (self.keep, keep)
        bps_rdma_start(stream, peer, number, <void *>engine, <bps_arrived_fn>arrived, <bps_notify_fn>notify)

    def bind(self, uint32_t slot, uint64_t address_even, uint64_t address_odd, uint64_t nbytes, bint framed=False,
             uint32_t first_round=1):
        """Let the peer write *nbytes* of *slot*, from *first_round* on, once it is told where (`aim`, over there).

        *framed*: a write has up to *nbytes*, and its first eight bytes contain the number of those that follow; the
        peer passes the same to `aim`. The caller owns the memory, which is registered for remote writes, and keeps it
        until `close`.
        """
        cdef bps_rdma_stream *stream = self._slot(slot)
        if nbytes == 0 or nbytes >> 32 or not address_even or not address_odd:
            raise ValueError(f"slot {slot} of {nbytes} bytes at {address_even:#x} and {address_odd:#x}")
        cdef int rc
        with nogil:
            rc = bps_rdma_bind(stream, slot, address_even, address_odd, nbytes, framed, first_round)
        self._refuse_closed(rc)
        if rc == EAGAIN:
            raise ValueError(f"slot {slot} is bound before the peer's proof has come")
        if rc:
            raise OSError(rc, f"ibv_post_recv for slot {slot}: {os.strerror(rc)}")

    def unbind(self, uint32_t slot):
        """Forget a slot that was bound and never written into."""
        bps_rdma_unbind(self._slot(slot), slot)

    def aim(self, uint32_t slot, uint64_t address_even, uint64_t address_odd, uint64_t nbytes, uint32_t rkey,
            bint framed=False):
        """Write rounds of *slot* to these addresses of the peer: what its `bind` got, and the key of that memory."""
        cdef bps_rdma_stream *stream = self._slot(slot)
        if nbytes == 0 or nbytes >> 32:
            raise ValueError(f"slot {slot} of {nbytes} bytes: a write carries 1 to {(1 << 32) - 1}")
        with nogil:
            pthread_mutex_lock(&stream.lock)
            stream.out[slot].addresses[0], stream.out[slot].addresses[1] = address_even, address_odd
            stream.out[slot].rkey, stream.out[slot].nbytes, stream.out[slot].framed = rkey, nbytes, framed
            pthread_mutex_unlock(&stream.lock)

    def post(self, uint32_t slot, uint32_t round, uint32_t flags, uint64_t address, uint64_t nbytes):
        """Write *nbytes* at *address*, registered memory, into the peer's *slot*; they stay until EVENT_DELIVERED."""
        cdef bps_rdma_stream *stream = self._slot(slot)
        cdef int rc
        with nogil:
            rc = bps_rdma_post(stream, slot, round, flags, address, nbytes)
        self._refuse_closed(rc)
        if rc == ENOMEM:
            raise MemoryError("queue of a stream")
        if rc == EDESTADDRREQ:
            raise ValueError(f"the peer has not said where slot {slot} lies")
        if rc == EMSGSIZE:
            raise ValueError(f"slot {slot} has {stream.out[slot].nbytes} bytes at the peer, {nbytes} were posted")
        if rc == EFAULT:
            raise ValueError(f"slot {slot}: {nbytes} bytes at {address:#x} are not registered with the rail")

    def next_round(self, uint32_t slot):
        """Return the round of *slot* that has not arrived yet: for good, once the stream is closed."""
        cdef bps_rdma_stream *stream = self.stream
        cdef uint32_t found
        if slot >= stream.n_slots:
            raise ValueError(f"slot {slot} of {stream.n_slots}")
        pthread_mutex_lock(&stream.lock)
        found = stream.in_[slot].next_round
        pthread_mutex_unlock(&stream.lock)
        return found

    def failure(self):
        """Return why the stream has failed, or None: kind and code, what it was about (`rdma_stream.h`).

        Kinds: "completion" (code: its status), "post" (errno), "arrival" (its epoch), "event" (``ibv_event_type``),
        "poll" (errno), "silence" (seconds). `slot` is None where it is not known. `at_ns`: when, `proven_ns`: when the
        peer's proof had come (0: never), both in monotonic ns.
        """
        cdef bps_failure failure
        with nogil:
            pthread_mutex_lock(&self.stream.lock)
            failure = self.stream.failure
            pthread_mutex_unlock(&self.stream.lock)
        if failure.kind == 0:
            return None
        return {"kind": _KINDS[failure.kind], "code": failure.code, "vendor_error": failure.vendor_error,
                "slot": None if failure.slot == BPS_PROOF_SLOT else failure.slot, "round": failure.round,
                "nbytes": failure.nbytes, "is_receive": bool(failure.is_receive), "at_ns": failure.at_ns,
                "proven_ns": self.stream.proven_ns}

    def counters(self):
        """Return bytes and writes in both directions; `writes_waited`: posted while the queue pair was full.

        `receives_posted` requests stand ready for `slots_bound` slots.
        """
        cdef bps_rdma_stream *stream = self.stream
        return {"bytes_sent": stream.bytes_sent, "bytes_received": stream.bytes_received, "writes_sent": stream.sent,
                "writes_received": stream.writes_received, "writes_pending": stream.posted - stream.delivered,
                "writes_waited": stream.waited, "receives_posted": stream.n_receives, "slots_bound": stream.n_bound}

    def trace(self):
        """Return the records so far (`record.h`)."""
        return trace_bytes(&self.stream.records)

    def close(self):
        """Stop using the queue pair, which the caller then closes. Idempotent; undelivered writes are dropped."""
        cdef bps_rdma_stream *stream = self.stream
        if not self.is_open:
            return
        self.is_open = False
        if self.rail.forks == bps_forks:
            with nogil:
                bps_rdma_end(stream)
                bps_rail_remove_stream(self.rail.rail, stream)
            self.rail.n_streams -= 1
        self.keep = None

    def __dealloc__(self):
        cdef bps_rdma_stream *stream = self.stream
        if stream != NULL:
            self.close()
            free(stream.in_)
            free(stream.out)
            free(stream.queue)
            free(stream.records.records)
            pthread_mutex_destroy(&stream.lock)
            free(stream)
