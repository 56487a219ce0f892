# cython: language_level=3, binding=True
"""TCP: one-sided writes over connected sockets (`tcp_stream.h`), moved by a few I/O threads (`io_thread.h`)."""
cimport cython
from libc.errno cimport ENOMEM
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

from pyx.words cimport *


cdef extern from "crc32c.h" nogil:
    uint32_t bps_crc32c(uint32_t, const void *, size_t, int)

cdef extern from "io_thread.h" nogil:
    struct bps_io_backend:
        pass
    struct bps_io_thread:
        pass
    int bps_io_open(bps_io_thread *, const bps_io_backend *)
    void bps_io_close(bps_io_thread *)

cdef extern from "io_epoll.h" nogil:
    const bps_io_backend bps_io_by_epoll

cdef extern from "io_uring.h" nogil:
    const bps_io_backend bps_io_by_uring

cdef extern from "tcp_stream.h" nogil:
    struct bps_pace:
        pass
    struct bps_seal:
        pass
    struct bps_protection:
        bps_seal *seal
        bint checks
    struct bps_flow:
        int fd
    struct bps_slots:
        uint32_t n
    struct bps_stream:
        bps_flow out
        bps_flow in_ "in"
        uint32_t peer, number
        void *engine
        bps_arrived_fn arrived
        bps_notify_fn notify
        bps_protection how_out, how_in
        bps_pace *pace_out
        bps_pace *pace_in
        bps_slots *slots
        pthread_mutex_t lock
        uint64_t posted, delivered, backlog
        bint is_started
        uint64_t bytes_sent, bytes_received, writes_sent, writes_received, writes_damaged
        bps_trace records
    int bps_stream_init(bps_stream *, bps_slots *)
    int bps_stream_start(bps_stream *, bps_io_thread *, bps_io_thread *)
    int bps_stream_post(void *, uint32_t, uint32_t, uint32_t, uint64_t, uint64_t, int, int *)
    void bps_stream_close(bps_stream *)
    void bps_stream_free(bps_stream *)
    int bps_slots_init(bps_slots *, uint32_t, uint32_t)
    void bps_slots_free(bps_slots *)
    void bps_slots_bind(bps_slots *, uint32_t, uint64_t, uint64_t, uint64_t, uint32_t, uint32_t)
    uint32_t bps_slots_next(bps_slots *, uint32_t)
    void bps_tune(int, int, int)


def crc32c(const unsigned char[::1] data not None, uint32_t begun=0, *, bint by_tables=False):
    """Return the CRC32C of *data*, which follows what *begun* is the checksum of (0: nothing).

    The processor's instruction for it makes it, if there is one and not *by_tables*. Any thread; without the GIL.
    """
    cdef uint32_t crc = begun
    cdef size_t nbytes = <size_t>data.shape[0]
    if nbytes:
        with nogil:
            crc = bps_crc32c(begun, &data[0], nbytes, by_tables)
    return crc


#: By which I/O threads learn that sockets can go on.
BACKENDS = ("epoll", "io_uring")


@cython.final
cdef class IoThreads:
    """*n* native threads that send and receive for any number of streams. Any thread.

    Of each stream one of them sends and another receives, if there are two; streams take turns. They end after `close`
    with the last open stream, and with this object. *backend*: "epoll" or "io_uring".

    Raises `OSError` if they cannot be started, for io_uring also where the kernel has not all of it, or forbids it.
    """

    cdef bps_io_thread **threads
    cdef readonly int n
    cdef int n_out, n_in, n_streams, n_open
    cdef bint is_closed

    def __cinit__(self, int n, str backend="epoll"):
        if n < 1 or backend not in BACKENDS:
            raise ValueError(f"{n} I/O threads by {backend}")
        self.threads = <bps_io_thread **>calloc(n, sizeof(bps_io_thread *))
        if self.threads == NULL:
            raise MemoryError("I/O threads")
        while self.n < n:
            thread = <bps_io_thread *>calloc(1, sizeof(bps_io_thread))
            by = &bps_io_by_uring if backend == "io_uring" else &bps_io_by_epoll
            rc = ENOMEM if thread == NULL else bps_io_open(thread, by)
            if rc:
                free(thread)
                failed = self.n
                self._end()
                raise OSError(rc, f"I/O thread {failed} of {n} could not be started ({backend})")
            self.threads[self.n] = thread
            self.n += 1
        self.n_out = max(1, n // 2)
        self.n_in = max(1, n - self.n_out)

    cdef int _choose(self, bps_io_thread **out, bps_io_thread **in_) except -1:
        """Choose the threads of the next stream."""
        if self.is_closed:
            raise ValueError("these I/O threads were closed")
        out[0] = self.threads[self.n_streams % self.n_out]
        in_[0] = self.threads[self.n - 1 - self.n_streams % self.n_in]
        self.n_streams += 1
        return 0

    def close(self):
        """Let no stream start any more, and end the threads as soon as none is open. Idempotent."""
        self.is_closed = True
        if not self.n_open:
            self._end()

    cdef void _leave(self):
        """A stream that was started is closed."""
        self.n_open -= 1
        if self.is_closed and not self.n_open:
            self._end()

    cdef void _end(self):
        while self.n:
            self.n -= 1
            thread = self.threads[self.n]  # another call may go on with the next one while this one has no GIL
            with nogil:
                bps_io_close(thread)
            free(thread)

    def __dealloc__(self):
        self._end()
        free(self.threads)


@cython.final
cdef class Slots:
    """*n* slots into which a peer writes over all streams of a link, in writes stamped with *epoch*. Any thread.

    Raises `MemoryError`, and `ValueError` for a slot beyond *n*.
    """

    cdef bps_slots slots

    def __cinit__(self, uint32_t n, *, uint32_t epoch):
        if bps_slots_init(&self.slots, n, epoch):
            raise MemoryError(f"{n} slots")

    def __dealloc__(self):
        bps_slots_free(&self.slots)

    cdef int _check(self, uint32_t slot) except -1:
        if slot >= self.slots.n:
            raise ValueError(f"slot {slot} of {self.slots.n}")
        return 0

    def bind(self, uint32_t slot, uint64_t address_even, uint64_t address_odd, uint64_t nbytes, bint framed=False,
             uint32_t next_round=1):
        """Let the peer write *nbytes* of *slot*: even rounds at one address, odd rounds at the other.

        *framed*: a write has up to *nbytes*, and its first eight bytes contain the number of those that follow.
        *next_round*: the round that the peer writes first. The caller owns the memory and keeps it until the streams
        are closed. Bind before the peer may write.
        """
        self._check(slot)
        bps_slots_bind(&self.slots, slot, address_even, address_odd, nbytes, framed, next_round)

    def unbind(self, uint32_t slot):
        """Take no more writes to *slot*: the peer has none under way. No matter if it is not bound."""
        self._check(slot)
        bps_slots_bind(&self.slots, slot, 0, 0, 0, False, 0)

    def next_round(self, uint32_t slot):
        """Return the round of *slot* that has not arrived whole: for good, once the streams are closed."""
        self._check(slot)
        return bps_slots_next(&self.slots, slot)


@cython.final
cdef class Stream:
    """One connection to node *peer* (a source id of the engine) over the socket *fd*, which becomes the stream's own.

    *slots*: where the peer writes, those of all streams of a link. *engine*, *arrived*, *notify*: addresses from
    `Engine.handle`, `arrived_address`, `notify_address`; *pace_out*, *pace_in*: addresses of the `Pace` that it keeps
    to in each direction, with others (0: none); *seal_out*, *seal_in*: addresses of the `Seal` of each direction, used
    by this stream only (0: not encrypted). *checks*: writes that are not encrypted carry checksums; both sides must
    agree. *send_buffer_nbytes*: of the socket; 0: the kernel chooses. *unsent_nbytes*: how much of that may wait to be
    sent; 0: all. *number*: that of the link, which EVENT_LOST tells. *keep* is held so that all these outlive the
    stream. The epoch of the slots is stamped on every write and checked on every arrival. `post` from any thread; a
    slot has at most one unacknowledged write of each direction.

    Raises
    ------
    MemoryError
        From the constructor, for its tables or trace; *fd* is then still the caller's, as with a wrong argument.
    ValueError
        From `post`, if the slot is beyond the number of *slots* or the stream is closed.
    """

    cdef bps_stream *stream
    cdef readonly Slots slots
    cdef IoThreads threads
    cdef object keep
    cdef bint is_begun, is_closed

    def __cinit__(self, int fd, IoThreads threads not None, *, uint32_t peer, uintptr_t engine, uintptr_t arrived,
                  uintptr_t notify, Slots slots not None, int send_buffer_nbytes=0, int unsent_nbytes=0,
                  uint64_t trace_capacity=0, uint32_t trace_first_round=1, uint32_t trace_last_round=0,
                  uintptr_t pace_out=0, uintptr_t pace_in=0, uintptr_t seal_out=0, uintptr_t seal_in=0,
                  bint checks=False, uint32_t number=0, keep=None):
        cdef bps_stream *stream = <bps_stream *>calloc(1, sizeof(bps_stream))
        if stream == NULL:
            raise MemoryError("stream")
        self.stream, self.keep, self.threads, self.slots = stream, keep, threads, slots
        lacks = bps_stream_init(stream, &slots.slots)
        stream.peer, stream.number = peer, number
        stream.engine = <void *>engine
        stream.arrived, stream.notify = <bps_arrived_fn>arrived, <bps_notify_fn>notify
        stream.pace_out, stream.pace_in = <bps_pace *>pace_out, <bps_pace *>pace_in
        stream.how_out.seal, stream.how_in.seal = <bps_seal *>seal_out, <bps_seal *>seal_in
        stream.how_out.checks = stream.how_in.checks = checks
        if bps_trace_open(&stream.records, trace_capacity, trace_first_round, trace_last_round) or lacks:
            raise MemoryError(f"stream with a trace of {trace_capacity} records")
        stream.out.fd = stream.in_.fd = fd  # nothing can raise any more: it is ours
        bps_tune(fd, send_buffer_nbytes, unsent_nbytes)

    @property
    def peer(self):
        """The engine's source id of the node at the other end."""
        return self.stream.peer

    @property
    def handle(self):
        """Address that the function at `post_address` takes first; valid as long as this object."""
        return <uintptr_t>self.stream

    @property
    def post_address(self):
        """Address of the `bps_post_fn` (hooks.h), which does as `post`."""
        return <uintptr_t>&bps_stream_post

    @property
    def backlog_address(self):
        """Address of the number of bytes of the writes that were not delivered, 64 bits."""
        return <uintptr_t>&self.stream.backlog

    cdef bps_stream *_open(self) except NULL:
        if self.is_closed or self.stream.out.fd < 0:
            raise ValueError(f"the stream to source {self.stream.peer} is closed")
        return self.stream

    def start(self):
        """Send and receive from now on. Raises `OSError` if the kernel cannot watch the socket; then it is cut off."""
        cdef bps_stream *stream = self._open()
        cdef bps_io_thread *out
        cdef bps_io_thread *in_
        if self.is_begun:
            raise ValueError("a stream is started once")
        self.threads._choose(&out, &in_)
        self.is_begun = True
        self.threads.n_open += 1  # first: without the GIL another thread may close the last one that was open
        with nogil:
            rc = bps_stream_start(stream, out, in_)
        if rc:
            self.threads._leave()
            raise OSError(rc, f"the connection of source {stream.peer} cannot be watched")

    def post(self, uint32_t slot, uint32_t round, uint32_t flags, uint64_t address, uint64_t nbytes):
        """Queue a write of *nbytes* at *address* into the peer's *slot*; the bytes stay until EVENT_DELIVERED."""
        cdef int rc, is_delivered = False
        cdef bps_stream *stream = self._open()
        self.slots._check(slot)
        with nogil:
            rc = bps_stream_post(stream, slot, round, flags, address, nbytes, True, &is_delivered)
            if is_delivered:
                stream.notify(stream.engine, BPS_EVENT_DELIVERED, stream.peer, slot, round, 0,
                              0 if flags & BPS_FLAG_EMPTY else nbytes)
        if rc == ENOMEM:
            raise MemoryError("stream queue")
        if rc:
            raise ValueError(f"the stream to source {stream.peer} was closed meanwhile")

    def counters(self):
        """Return bytes and writes in both directions, headers included; `writes_damaged`: came otherwise than sent."""
        cdef bps_stream *stream = self.stream
        cdef uint64_t pending
        pthread_mutex_lock(&stream.lock)
        pending = stream.posted - stream.delivered
        pthread_mutex_unlock(&stream.lock)
        return {"bytes_sent": bps_counted(&stream.bytes_sent), "bytes_received": bps_counted(&stream.bytes_received),
                "writes_sent": bps_counted(&stream.writes_sent),
                "writes_received": bps_counted(&stream.writes_received),
                "writes_damaged": bps_counted(&stream.writes_damaged), "writes_pending": pending}

    def trace(self):
        """Return the records so far (`record.h`)."""
        return trace_bytes(&self.stream.records)

    def close(self):
        """Cut the connection and close the socket. Idempotent; undelivered writes are dropped."""
        if self.is_closed or self.stream.out.fd < 0:
            return
        self.is_closed = True  # under the GIL: only one caller goes on
        with nogil:
            bps_stream_close(self.stream)
        if self.stream.is_started:
            self.threads._leave()
        self.keep = None

    def __del__(self):
        if self.stream != NULL:
            self.close()  # in a garbage cycle: before the collector takes away `keep`, which the threads use

    def __dealloc__(self):
        if self.stream != NULL:
            if self.stream.out.fd >= 0:
                self.close()
            bps_stream_free(self.stream)
