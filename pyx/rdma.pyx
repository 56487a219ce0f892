# cython: language_level=3, binding=True, freethreading_compatible=False
"""RDMA: one-sided writes with immediate, straight into the slot that the peer has bound and told us of.

    Rail    a completion queue, its device's registered memory and one native thread     rail.h
      Lane  one queue pair to one peer, and the slots written over it                     rdma_lane.h

A `Lane` is to node code what `bpsfast.pyx.tcp.Stream` is: `post` queues a write from registered memory, EVENT_DELIVERED
comes with its send completion, after which credit may return and the source may be reused. The peer is told nothing in
advance: its completion brings slot, round and epoch in the immediate, is checked against what the slot waits for, and
is reported through the engine's hooks (`hooks.h`). Queue pairs, completion queues and registered memory are made by
`bpsfast.pyx.verbs` and passed in by `handle`; their objects are kept until `close`. After a fork the child's copies are
unusable (ValueError) and release nothing.
"""
cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.errno cimport EAGAIN, EDESTADDRREQ, EFAULT, EMSGSIZE, ENOMEM, ENOSPC, ESHUTDOWN, errno
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

import os

from pyx.ibverbs cimport BPS_VERBS_LIBRARY, bps_ibv_cq, bps_ibv_qp, bps_verbs_open
from pyx.words cimport (
    bps_arrived_fn, bps_load, bps_notify_fn, bps_now_ns, bps_record, bps_start_thread, bps_store, bps_trace, bps_wait,
    pthread_join, pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock,
    pthread_t,
)


cdef extern from "rdma_lane.h" nogil:
    struct bps_regions:
        pthread_mutex_t lock
        void *items
        uint32_t used
    struct bps_slot_in:
        uint64_t nbytes
    struct bps_slot_out:
        uint64_t addresses[2]
        uint64_t nbytes
        uint32_t rkey
    struct bps_write:
        uint64_t address
    struct bps_failure:
        int kind, code
        uint32_t vendor_error, slot, round, nbytes, is_receive
    struct bps_rdma_lane:
        bps_regions *regions
        bps_ibv_qp *qp
        uint32_t number, peer, epoch, n_slots, max_send, max_receive, inline_nbytes, signal_every
        uint32_t n_bound, n_receives, proof, closing, lost, told
        void *engine
        bps_arrived_fn arrived
        bps_notify_fn notify
        pthread_mutex_t lock
        bps_slot_in *in_ "in"
        bps_slot_out *out
        bps_write *queue
        uint64_t capacity, posted, sent, delivered, writes_received, bytes_sent, bytes_received, waited
        bps_failure failure
        bps_trace records
    enum: BPS_PROOF_SENT, BPS_PROOF_RECEIVED, BPS_PROOF_FAILED, BPS_PROOF_SLOT
    enum: BPS_FAILED_COMPLETION, BPS_FAILED_POST, BPS_FAILED_ARRIVAL, BPS_FAILED_EVENT, BPS_FAILED_POLL
    int bps_region_add(bps_regions *, uint64_t, uint64_t, uint32_t)
    int bps_lane_receive(bps_rdma_lane *, uint32_t)
    int bps_lane_bind(bps_rdma_lane *, uint32_t, uint64_t)
    void bps_lane_unbind(bps_rdma_lane *, uint32_t)
    int bps_lane_post(bps_rdma_lane *, uint32_t, uint32_t, uint32_t, uint64_t, uint64_t)
    int bps_lane_prove(bps_rdma_lane *)
    void bps_lane_start(bps_rdma_lane *, uint32_t, void *, bps_arrived_fn, bps_notify_fn)
    void bps_lane_end(bps_rdma_lane *)

cdef extern from "rail.h" nogil:
    struct bps_rail:
        bps_ibv_cq *cq
        int wake_fd, event
        uint64_t awake_ns, completions, batches, sleeps
        pthread_mutex_t lanes_lock
        bps_rdma_lane **lanes
        bps_regions regions
        uint32_t stopping
        pthread_t thread
    void *bps_rail_run(void *)
    uint32_t bps_forks
    void bps_forked() noexcept
    int bps_rail_add_lane(bps_rail *, bps_rdma_lane *)
    void bps_rail_remove_lane(bps_rail *, bps_rdma_lane *)
    int eventfd(unsigned int, int)
    int eventfd_write(int, uint64_t)
    int close(int)
    int EFD_CLOEXEC, EFD_NONBLOCK
    int pthread_atfork(void (*)() noexcept nogil, void (*)() noexcept nogil, void (*)() noexcept nogil)

_KINDS = {BPS_FAILED_COMPLETION: "completion", BPS_FAILED_POST: "post", BPS_FAILED_ARRIVAL: "arrival",
          BPS_FAILED_EVENT: "event", BPS_FAILED_POLL: "poll"}


cdef bint _watches_forks = False


@cython.final
@cython.no_gc_clear
cdef class Rail:
    """Serve the completion queue at *completion_queue* (its `handle`; with events) by one native thread.

    *keep* is held until `close`. *awake_us*: how long the thread keeps its core, yielding, before it sleeps.
    Nobody else may poll the queue. Any thread; `close` by the owner, once all lanes are closed.

    Raises
    ------
    OSError
        When the library, the wake-up descriptor or the thread cannot be had.
    """

    cdef bps_rail *rail
    cdef object keep
    cdef int n_lanes
    cdef uint32_t forks

    def __cinit__(self, uintptr_t completion_queue, *, uint64_t awake_us=50, keep=None):
        cdef char why[512]
        cdef int rc = bps_verbs_open(BPS_VERBS_LIBRARY, why, sizeof(why))
        if rc:
            raise OSError(rc, f"libibverbs: {(<bytes>why).decode()}")
        self.rail = <bps_rail *>calloc(1, sizeof(bps_rail))
        if self.rail == NULL:
            raise MemoryError("rail")
        self.keep = keep
        global _watches_forks
        if not _watches_forks:
            pthread_atfork(NULL, NULL, bps_forked)
            _watches_forks = True
        self.forks = bps_forks
        self.rail.cq = <bps_ibv_cq *>completion_queue
        self.rail.awake_ns, self.rail.event = 1000 * awake_us, -1
        pthread_mutex_init(&self.rail.lanes_lock, NULL)
        pthread_mutex_init(&self.rail.regions.lock, NULL)
        self.rail.wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
        if self.rail.wake_fd < 0:
            raise OSError(errno, "eventfd of a rail")
        rc = bps_start_thread(&self.rail.thread, bps_rail_run, self.rail)
        if rc:
            close(self.rail.wake_fd)
            self.rail.wake_fd = -1
            raise OSError(rc, "pthread_create(rail)")

    cdef bps_rail *_open(self) except NULL:
        if self.rail.wake_fd < 0:
            raise ValueError("the rail is closed")
        if self.forks != bps_forks:
            raise ValueError(f"the rail belongs to the process that this one (pid {os.getpid()}) was forked from")
        return self.rail

    def know(self, uint64_t address, uint64_t nbytes, uint32_t lkey):
        """Let lanes send from *nbytes* at *address*, memory that is registered under *lkey* until `close`."""
        if bps_region_add(&self._open().regions, address, nbytes, lkey):
            raise MemoryError("table of registered memory")

    @property
    def event(self):
        """Number of the last asynchronous event of the device (``ibv_event_type``), -1 if there was none."""
        return self.rail.event

    def counters(self):
        """Return completions, the batches they came in, how often the thread slept, and regions known."""
        self._open()
        return {"completions": self.rail.completions, "batches": self.rail.batches, "sleeps": self.rail.sleeps,
                "regions": self.rail.regions.used}

    def close(self):
        """End the thread. Idempotent; after a fork the child's copy is only forgotten.

        Raises
        ------
        BufferError
            While lanes are open.
        """
        cdef bps_rail *rail = self.rail
        if rail == NULL or rail.wake_fd < 0:
            return
        if self.forks != bps_forks:
            rail.wake_fd = -1
            return
        if self.n_lanes:
            raise BufferError(f"the rail has {self.n_lanes} open lanes")
        bps_store(&rail.stopping, 1)
        eventfd_write(rail.wake_fd, 1)
        with nogil:
            pthread_join(rail.thread, NULL)
            close(rail.wake_fd)
        rail.wake_fd = -1
        self.keep = None

    def __dealloc__(self):
        if self.rail == NULL:
            return
        if self.rail.wake_fd > 0:
            self.n_lanes = 0
            self.close()
        if self.forks == bps_forks:
            free(self.rail.lanes)
            free(self.rail.regions.items)
            pthread_mutex_destroy(&self.rail.lanes_lock)
            pthread_mutex_destroy(&self.rail.regions.lock)
            free(self.rail)


@cython.final
@cython.no_gc_clear
cdef class Lane:
    """One queue pair (its `handle`; in INIT at least) over *rail*; *keep* is held until `close`.

    *epoch* is stamped on every write and checked on every arrival. At most *max_send* writes are in the queue pair,
    others wait in a ring of ours; at most *max_receive* slots may be bound. Writes up to *inline_nbytes* travel
    inside the request; of writes that wait in a row, every *signal_every*-th asks for a completion. One receive request
    is posted at once, for the peer's `prove`. `bind`, `aim` and `post` from any thread once it is connected.

    Raises
    ------
    ValueError
        From `post`, `aim` and `bind`, if the slot is beyond *n_slots*, does not fit, or the lane is closed.
    OSError
        ENOSPC from `bind` when *max_receive* slots are bound; else the errno of a post.
    """

    cdef bps_rdma_lane *lane
    cdef Rail rail
    cdef object keep
    cdef bint is_open

    def __cinit__(self, Rail rail not None, uintptr_t queue_pair, *, uint32_t epoch, uint32_t n_slots,
                  uint32_t max_send, uint32_t max_receive, uint32_t inline_nbytes=0, uint32_t signal_every=1,
                  uint64_t trace_capacity=0, keep=None):
        if signal_every < 1:
            raise ValueError("signal_every=0: nobody would learn that a write is delivered")
        cdef bps_rdma_lane *lane = <bps_rdma_lane *>calloc(1, sizeof(bps_rdma_lane))
        if lane == NULL:
            raise MemoryError("lane")
        self.lane, self.rail, self.keep = lane, rail, keep
        pthread_mutex_init(&lane.lock, NULL)
        lane.regions, lane.qp = &rail._open().regions, <bps_ibv_qp *>queue_pair
        lane.epoch, lane.n_slots, lane.max_send, lane.max_receive = epoch, n_slots, max_send, max_receive
        lane.inline_nbytes, lane.signal_every = inline_nbytes, signal_every
        lane.capacity = 256
        lane.in_ = <bps_slot_in *>calloc(n_slots, sizeof(bps_slot_in))
        lane.out = <bps_slot_out *>calloc(n_slots, sizeof(bps_slot_out))
        lane.queue = <bps_write *>calloc(lane.capacity, sizeof(bps_write))
        if trace_capacity:
            lane.records.records = <bps_record *>calloc(trace_capacity, 32)
            lane.records.capacity = trace_capacity
        if lane.in_ == NULL or lane.out == NULL or lane.queue == NULL or (
                trace_capacity and lane.records.records == NULL) or bps_rail_add_lane(rail.rail, lane):
            raise MemoryError(f"lane of {n_slots} slots")
        self.is_open = True
        rail.n_lanes += 1
        cdef int rc = bps_lane_receive(lane, 1)
        if rc:
            self.close()
            raise OSError(rc, f"ibv_post_recv: {os.strerror(rc)}; is the queue pair in INIT?")

    cdef bps_rdma_lane *_open(self) except NULL:
        if not self.is_open:
            raise ValueError(f"the lane to source {self.lane.peer} is closed")
        self.rail._open()
        return self.lane

    cdef bps_rdma_lane *_slot(self, uint32_t slot) except NULL:
        cdef bps_rdma_lane *lane = self._open()
        if slot >= lane.n_slots:
            raise ValueError(f"slot {slot} of {lane.n_slots}")
        return lane

    cdef int _refuse_closed(self, int rc) except -1:
        if rc == ESHUTDOWN:
            raise ValueError(f"the lane to source {self.lane.peer} was closed meanwhile")
        return 0

    @property
    def peer(self):
        """The engine's source id of the node at the other end, once started."""
        return self.lane.peer

    def prove(self, double timeout_s):
        """Write zero bytes to the peer, which does the same; whether both have arrived within *timeout_s* seconds."""
        cdef bps_rdma_lane *lane = self._open()
        cdef int rc
        cdef uint32_t both = BPS_PROOF_SENT | BPS_PROOF_RECEIVED, seen
        cdef uint64_t until = bps_now_ns() + <uint64_t>(1e9 * timeout_s), now
        with nogil:
            rc = bps_lane_prove(lane)
        self._refuse_closed(rc)
        if rc:
            raise OSError(rc, f"ibv_post_send: {os.strerror(rc)}; is the queue pair in RTS?")
        with nogil:
            while True:
                seen = bps_load(&lane.proof)
                now = bps_now_ns()
                if seen & BPS_PROOF_FAILED or (seen & both) == both or now >= until:
                    break
                bps_wait(&lane.proof, seen, min(until - now, <uint64_t>100000000))
        return (seen & both) == both and not seen & BPS_PROOF_FAILED

    def start(self, *, uint32_t peer, uintptr_t engine, uintptr_t arrived, uintptr_t notify, keep=None):
        """Report to an engine from now on, as its source *peer*; addresses as for `bpsfast.pyx.tcp.Stream`."""
        cdef bps_rdma_lane *lane = self._open()
        if lane.engine != NULL:
            raise ValueError("a lane is started once")
        self.keep = (self.keep, keep)
        bps_lane_start(lane, peer, <void *>engine, <bps_arrived_fn>arrived, <bps_notify_fn>notify)

    def bind(self, uint32_t slot, uint64_t address_even, uint64_t address_odd, uint64_t nbytes):
        """Let the peer write *nbytes* of *slot*, from round 1 on, once it is told where (`aim`, over there).

        The memory is the caller's, registered for remote writes, and stays until `close`.
        """
        cdef bps_rdma_lane *lane = self._slot(slot)
        if nbytes == 0 or nbytes >> 32 or not address_even or not address_odd:
            raise ValueError(f"slot {slot} of {nbytes} bytes at {address_even:#x} and {address_odd:#x}")
        cdef int rc
        with nogil:
            rc = bps_lane_bind(lane, slot, nbytes)
        self._refuse_closed(rc)
        if rc == EAGAIN:
            raise ValueError(f"slot {slot} is bound before the peer's proof has come")
        if rc == ENOSPC:
            raise OSError(rc, f"{lane.n_bound} slots are bound, the queue pair was made for {lane.max_receive}")
        if rc:
            raise OSError(rc, f"ibv_post_recv for slot {slot}: {os.strerror(rc)}")

    def unbind(self, uint32_t slot):
        """Forget a slot that was bound and never written into."""
        bps_lane_unbind(self._slot(slot), slot)

    def aim(self, uint32_t slot, uint64_t address_even, uint64_t address_odd, uint64_t nbytes, uint32_t rkey):
        """Write rounds of *slot* to these addresses of the peer: what its `bind` got, and the key of that memory."""
        cdef bps_rdma_lane *lane = self._slot(slot)
        if nbytes == 0 or nbytes >> 32:
            raise ValueError(f"slot {slot} of {nbytes} bytes: a write carries 1 to {(1 << 32) - 1}")
        with nogil:
            pthread_mutex_lock(&lane.lock)
            lane.out[slot].addresses[0], lane.out[slot].addresses[1] = address_even, address_odd
            lane.out[slot].rkey, lane.out[slot].nbytes = rkey, nbytes
            pthread_mutex_unlock(&lane.lock)

    def post(self, uint32_t slot, uint32_t round, uint32_t flags, uint64_t address, uint64_t nbytes):
        """Write *nbytes* at *address*, registered memory, into the peer's *slot*; they stay until EVENT_DELIVERED."""
        cdef bps_rdma_lane *lane = self._slot(slot)
        cdef int rc
        with nogil:
            rc = bps_lane_post(lane, slot, round, flags, address, nbytes)
        self._refuse_closed(rc)
        if rc == ENOMEM:
            raise MemoryError("queue of a lane")
        if rc == EDESTADDRREQ:
            raise ValueError(f"the peer has not said where slot {slot} lies")
        if rc == EMSGSIZE:
            raise ValueError(f"slot {slot} has {lane.out[slot].nbytes} bytes at the peer, {nbytes} were posted")
        if rc == EFAULT:
            raise ValueError(f"slot {slot}: {nbytes} bytes at {address:#x} are not registered with the rail")

    def failure(self):
        """Return why the lane has failed, or None: kind and code, what it was about (`rdma_lane.h`).

        Kinds: "completion" (code: its status), "post" (errno), "arrival" (its epoch), "event" (``ibv_event_type``),
        "poll" (errno). `slot` is None where it is not known.
        """
        cdef bps_failure failure
        pthread_mutex_lock(&self.lane.lock)
        failure = self.lane.failure
        pthread_mutex_unlock(&self.lane.lock)
        if failure.kind == 0:
            return None
        return {"kind": _KINDS[failure.kind], "code": failure.code, "vendor_error": failure.vendor_error,
                "slot": None if failure.slot == BPS_PROOF_SLOT else failure.slot, "round": failure.round,
                "nbytes": failure.nbytes, "is_receive": bool(failure.is_receive)}

    def counters(self):
        """Return bytes and writes in both directions; `writes_waited`: posted while the queue pair was full.

        `receives_posted` requests stand ready for `slots_bound` slots.
        """
        cdef bps_rdma_lane *lane = self.lane
        return {"bytes_sent": lane.bytes_sent, "bytes_received": lane.bytes_received, "writes_sent": lane.sent,
                "writes_received": lane.writes_received, "writes_pending": lane.posted - lane.delivered,
                "writes_waited": lane.waited, "receives_posted": lane.n_receives, "slots_bound": lane.n_bound}

    def trace(self):
        """Return the records so far (`record.h`)."""
        cdef bps_rdma_lane *lane = self.lane
        return PyBytes_FromStringAndSize(<char *>lane.records.records,
                                         <Py_ssize_t>(32 * min(lane.records.used, lane.records.capacity)))

    def close(self):
        """Stop using the queue pair, which the caller then closes. Idempotent; undelivered writes are dropped."""
        cdef bps_rdma_lane *lane = self.lane
        if not self.is_open:
            return
        self.is_open = False
        if self.rail.forks == bps_forks:
            with nogil:
                bps_lane_end(lane)
                bps_rail_remove_lane(self.rail.rail, lane)
            self.rail.n_lanes -= 1
        self.keep = None

    def __dealloc__(self):
        cdef bps_rdma_lane *lane = self.lane
        if lane != NULL:
            self.close()
            free(lane.in_)
            free(lane.out)
            free(lane.queue)
            free(lane.records.records)
            pthread_mutex_destroy(&lane.lock)
            free(lane)
