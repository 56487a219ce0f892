# cython: language_level=3, binding=True
"""TCP: one-sided writes over a connected socket, straight into the slot the receiver has bound.

A `Stream` owns one socket and two native threads. `post` queues a write: header (`wire.h`) and payload are sent from
the caller's memory; EVENT_DELIVERED comes when the peer's kernel has acknowledged every byte (SIOCOUTQ). Then credit
returns and the source may be reused. A small write that nothing is before, here or in the kernel, is sent by who posts
it, and delivered at once: to wake the sending thread takes longer, and one write more in the kernel delays no other.

The receiving thread checks each header against the bound slot before it takes a byte of payload, receives into the
slot's memory for that round's parity, and reports through the engine's hooks (`hooks.h`). It waits for nothing but the
wire, so every posted write completes whatever other nodes do. With encryption or checksums, damaged data is not
reported as arrived: the connection is lost with EBADMSG.
"""
cimport cython
from libc.errno cimport EBADMSG, EINVAL, ENOMEM, ESHUTDOWN
from libc.stdint cimport UINT64_MAX, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

from pyx.words cimport *


cdef extern from "wire.h":
    struct bps_header:
        uint32_t magic, immediate, slot, round, epoch, flags
        uint64_t nbytes
    enum: BPS_WIRE_MAGIC
    uint32_t bps_immediate(uint32_t, uint32_t, uint32_t) nogil

cdef extern from "sockets.h":
    void bps_tune(int, int) nogil
    void bps_acknowledge(int) nogil
    uint64_t bps_unacknowledged(int) nogil
    bint bps_has_arrived(int) nogil
    struct bps_pace:
        pass
    int bps_send_paced(int, void *, size_t, void *, size_t, bps_pace *, const uint32_t *) nogil
    int shutdown(int, int) nogil
    int close(int) nogil
    int SHUT_RDWR

cdef extern from "seal.h" nogil:
    struct bps_seal:
        pass
    size_t bps_seal_stage(bps_seal *, const void *, size_t, const void *, size_t)
    Py_ssize_t bps_seal_send_at_once(const bps_seal *, int, size_t)
    int bps_seal_send_rest(const bps_seal *, int, size_t, size_t)
    enum: BPS_SEAL_RECORD
    int bps_seal_send(bps_seal *, int, const void *, size_t, const void *, size_t, bps_pace *, const uint32_t *)
    uint64_t bps_seal_wire_nbytes(uint64_t, uint64_t)

cdef extern from "crc32c.h" nogil:
    uint32_t bps_crc32c(uint32_t, const void *, size_t, int)

cdef extern from "checked.h" nogil:
    Py_ssize_t bps_send_at_once(int, const bps_header *, const void *, size_t, int)
    int bps_send_rest(int, const bps_header *, const void *, size_t, int, size_t)
    uint64_t bps_checked_wire_nbytes(uint64_t)
    int bps_checked_send(int, const bps_header *, const void *, size_t, bps_pace *, const uint32_t *)

cdef extern from "slots.h" nogil:
    struct bps_slots:
        uint32_t n, epoch
    int bps_slots_init(bps_slots *, uint32_t, uint32_t)
    void bps_slots_free(bps_slots *)
    void bps_slots_bind(bps_slots *, uint32_t, uint64_t, uint64_t, uint64_t, uint32_t, uint32_t)
    uint32_t bps_slots_next(bps_slots *, uint32_t)
    int bps_slots_receive(bps_slots *, int, bps_seal *, int, bps_pace *, const uint32_t *, bps_header *, uint64_t *)

cdef extern from "acks.h" nogil:
    struct bps_acks:
        uint32_t n_looks
    uint64_t bps_acks_pause(bps_acks *, uint64_t, uint64_t)
    void bps_acks_learn(bps_acks *, uint64_t)

cdef enum:
    IDLE_NS = 1000000000
    AT_ONCE_NBYTES = 65536  # a larger payload costs who posts it more than the sending thread takes to wake

cdef struct Write:
    bps_header header
    uint64_t address, end, posted_ns, sent_ns
    uint64_t done, staged  # bytes that have been sent already, and that the seal has for it (0: nothing yet)

cdef struct Link:
    int fd
    uint32_t peer, number
    void *engine
    bps_arrived_fn arrived
    bps_notify_fn notify
    bps_pace *pace_out          # NULL: as fast as it goes
    bps_pace *pace_in
    bps_seal *seal_out          # NULL: bytes travel as they are
    bps_seal *seal_in
    bint checks                 # unsealed writes have checksums
    bps_slots slots
    pthread_mutex_t lock        # the queue
    Write *queue                 # a ring: unsent from `sent`, unacknowledged from `delivered`, up to `posted`
    uint64_t capacity, posted, sent, delivered
    bint is_sending             # a thread that posts sends, not the sender
    uint32_t word, closing, lost
    uint64_t bytes_sent, bytes_received, writes_sent, writes_received, writes_damaged
    bps_acks acks
    bps_trace records
    pthread_t sender, receiver
    bint started


cdef void _lost(Link *link, int code) noexcept nogil:
    """Report the end of the connection once, unless we are the ones who close it."""
    cdef bint first
    pthread_mutex_lock(&link.lock)
    first = not link.lost and not link.closing
    link.lost = 1
    pthread_mutex_unlock(&link.lock)
    if first:
        link.notify(link.engine, BPS_EVENT_LOST, link.peer, 0, 0, <uint32_t>max(code, 0), link.number)


cdef uint64_t _wire_nbytes(const Link *link, uint64_t nbytes) noexcept nogil:
    """What a write of a payload of *nbytes* is on the wire, in either direction."""
    if link.seal_out != NULL:
        return bps_seal_wire_nbytes(sizeof(bps_header), nbytes)
    return bps_checked_wire_nbytes(nbytes) if link.checks else sizeof(bps_header) + nbytes


cdef void _deliver(Link *link) noexcept nogil:
    """Report the writes whose last byte the peer's kernel has acknowledged. Sender thread only."""
    cdef uint64_t acknowledged = 0, unacknowledged
    cdef bint is_delivered, is_first = True
    cdef Write post
    while True:
        pthread_mutex_lock(&link.lock)  # `post` may be moving the queue, or putting a write in front
        is_delivered = link.delivered < link.sent
        if is_delivered and is_first:
            # Not earlier: a thread that posts may be sending, of which `bytes_sent` does not know yet.
            unacknowledged = bps_unacknowledged(link.fd)  # more than was sent, where the kernel counts its overhead
            acknowledged = link.bytes_sent - unacknowledged if unacknowledged < link.bytes_sent else 0
            is_first = False
        if is_delivered:
            post = link.queue[link.delivered % link.capacity]
            is_delivered = post.end <= acknowledged
            link.delivered += is_delivered
        pthread_mutex_unlock(&link.lock)
        if not is_delivered:
            return
        bps_acks_learn(&link.acks, bps_now_ns() - post.sent_ns)
        bps_record_add(&link.records, BPS_WIRE, <int>link.peer, post.header.slot, post.header.round,
                       post.header.nbytes, post.posted_ns, bps_now_ns())
        link.notify(link.engine, BPS_EVENT_DELIVERED, link.peer, post.header.slot, post.header.round, 0,
                    post.header.nbytes)


cdef void *_send(void *argument) noexcept nogil:
    cdef Link *link = <Link *>argument
    cdef Write post
    cdef uint32_t seen
    cdef uint64_t sent_ns = 0
    cdef bint has_work, is_awaiting
    cdef int rc
    while True:
        seen = bps_load(&link.word)  # first: `close` changes it after `closing`
        if bps_load(&link.closing):
            return NULL
        pthread_mutex_lock(&link.lock)
        has_work = link.sent < link.posted and not link.is_sending
        if has_work:
            post = link.queue[link.sent % link.capacity]
        is_awaiting = link.delivered < link.sent
        if is_awaiting:
            sent_ns = link.queue[link.delivered % link.capacity].sent_ns
        pthread_mutex_unlock(&link.lock)
        if not has_work:
            if not is_awaiting:
                bps_wait(&link.word, seen, IDLE_NS)
            else:
                bps_wait(&link.word, seen, bps_acks_pause(&link.acks, sent_ns, bps_now_ns()))
                _deliver(link)
            continue
        if post.staged:
            rc = bps_seal_send_rest(link.seal_out, link.fd, post.staged, post.done)
        elif post.done:
            rc = bps_send_rest(link.fd, &post.header, <void *>post.address, post.header.nbytes, link.checks, post.done)
        elif link.seal_out != NULL:
            rc = bps_seal_send(link.seal_out, link.fd, &post.header, sizeof(bps_header), <void *>post.address,
                               post.header.nbytes, link.pace_out, &link.closing)
        elif link.checks:
            rc = bps_checked_send(link.fd, &post.header, <void *>post.address, post.header.nbytes, link.pace_out,
                                  &link.closing)
        else:
            rc = bps_send_paced(link.fd, &post.header, sizeof(bps_header), <void *>post.address, post.header.nbytes,
                                link.pace_out, &link.closing)
        if rc:
            _lost(link, rc)
            return NULL
        pthread_mutex_lock(&link.lock)
        bps_count(&link.bytes_sent, _wire_nbytes(link, post.header.nbytes))
        bps_count(&link.writes_sent, 1)
        link.queue[link.sent % link.capacity].end = link.bytes_sent
        link.queue[link.sent % link.capacity].sent_ns = bps_now_ns()
        link.sent += 1
        pthread_mutex_unlock(&link.lock)
        _deliver(link)


cdef void *_receive(void *argument) noexcept nogil:
    cdef Link *link = <Link *>argument
    cdef bps_header header
    cdef uint64_t begin_ns
    cdef int rc
    while True:
        rc = bps_slots_receive(&link.slots, link.fd, link.seal_in, link.checks, link.pace_in, &link.closing, &header,
                               &begin_ns)
        if rc:
            break
        bps_acknowledge(link.fd)
        bps_count(&link.bytes_received, _wire_nbytes(link, header.nbytes))
        bps_count(&link.writes_received, 1)
        bps_record_add(&link.records, BPS_RECEIVE, <int>link.peer, header.slot, header.round, header.nbytes, begin_ns,
                       bps_now_ns())
        if header.nbytes <= AT_ONCE_NBYTES and bps_has_arrived(link.fd):
            header.flags |= BPS_MORE_ARRIVED
        link.arrived(link.engine, link.peer, header.slot, header.round, header.flags)
    if rc == EBADMSG:
        bps_count(&link.writes_damaged, 1)
    _lost(link, rc)
    return NULL


cdef bint _may_send_at_once(Link *link, uint64_t nbytes) noexcept nogil:
    """Whether a write of *nbytes* may be sent by who posts it: a small one, which no pace delays, behind no other.
    Under the lock."""
    return (link.started and not link.is_sending and link.delivered == link.sent == link.posted
            and nbytes <= AT_ONCE_NBYTES and link.pace_out == NULL and bps_unacknowledged(link.fd) == 0)


cdef bint _send_at_once(Link *link, Write *post) noexcept nogil:
    """Send *post* as far as the socket takes it; return whether it has taken all. Under the lock, which is dropped
    meanwhile; no other thread sends until it is taken again."""
    cdef Py_ssize_t sent = -1
    link.is_sending = True
    pthread_mutex_unlock(&link.lock)
    if link.seal_out == NULL:
        sent = bps_send_at_once(link.fd, &post.header, <void *>post.address, post.header.nbytes, link.checks)
    else:
        post.staged = bps_seal_stage(link.seal_out, &post.header, sizeof(bps_header), <void *>post.address,
                                     post.header.nbytes)
        if post.staged:
            sent = bps_seal_send_at_once(link.seal_out, link.fd, post.staged)
    pthread_mutex_lock(&link.lock)
    link.is_sending = False
    post.done = max(sent, 0)  # an error comes again when the sending thread goes on, and is reported there
    if post.done != _wire_nbytes(link, post.header.nbytes):
        return False
    bps_count(&link.bytes_sent, post.done)
    bps_count(&link.writes_sent, 1)
    bps_record_add(&link.records, BPS_WIRE, <int>link.peer, post.header.slot, post.header.round, post.header.nbytes,
                   post.posted_ns, bps_now_ns())
    return True


cdef int _queue(Link *link, const Write *post, bint is_first) noexcept nogil:
    """Queue *post* for the sending thread, last or *is_first*; return 0 or ENOMEM. Under the lock."""
    cdef Write *grown
    cdef uint64_t i
    if link.posted - link.delivered + 2 > link.capacity:
        grown = <Write *>calloc(2 * link.capacity, sizeof(Write))
        if grown == NULL:
            return ENOMEM
        for i in range(link.delivered, link.posted):
            grown[i % (2 * link.capacity)] = link.queue[i % link.capacity]
        free(link.queue)
        link.queue = grown
        link.capacity *= 2
    if is_first:  # nothing is under way
        link.delivered -= 1
        link.sent -= 1
        link.queue[link.sent % link.capacity] = post[0]
    else:
        link.queue[link.posted % link.capacity] = post[0]
        link.posted += 1
    return 0


cdef int _post(void *stream, uint32_t slot, uint32_t round, uint32_t flags, uint64_t address, uint64_t nbytes,
               int *is_delivered) noexcept nogil:
    """`bps_post_fn`: ESHUTDOWN if the stream is closed, EINVAL for a slot that it does not have, ENOMEM."""
    cdef Link *link = <Link *>stream
    cdef Write post
    cdef bint was_begun, has_work
    cdef int rc = 0
    is_delivered[0] = False
    if slot >= link.slots.n:
        return EINVAL
    post.header.magic = BPS_WIRE_MAGIC
    post.header.immediate = bps_immediate(slot, round, link.slots.epoch)
    post.header.slot, post.header.round, post.header.flags = slot, round, flags
    post.header.epoch = link.slots.epoch
    post.header.nbytes = 0 if flags & BPS_FLAG_EMPTY else nbytes
    post.address, post.posted_ns, post.done, post.staged = address, bps_now_ns(), 0, 0
    post.end, post.sent_ns = UINT64_MAX, 0
    pthread_mutex_lock(&link.lock)
    was_begun = not link.closing and _may_send_at_once(link, post.header.nbytes)
    # The kernel then has its own copy, and nothing else to send: to wait for its acknowledgement only delays credit.
    is_delivered[0] = was_begun and _send_at_once(link, &post)
    if not is_delivered[0]:  # one that was begun goes before those that other threads have posted meanwhile
        rc = ESHUTDOWN if link.closing else _queue(link, &post, was_begun)
    has_work = link.sent < link.posted
    if has_work:
        bps_add(&link.word, 1)
    pthread_mutex_unlock(&link.lock)
    if has_work:
        bps_wake(&link.word, 1)
    return rc


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


@cython.final
cdef class Stream:
    """One connection to node *peer* (a source id of the engine) over the socket *fd*, which becomes the stream's own.

    *engine*, *arrived*, *notify*: addresses from `Engine.handle`, `arrived_address`, `notify_address`; *pace_out*,
    *pace_in*: addresses of the `Pace` that it keeps to in each direction, with others (0: none); *seal_out*, *seal_in*:
    of the `Seal` of each direction (0: bytes travel as they are), which nobody else uses from now on. *checks*: writes
    that are not sealed have checksums, of both sides. *number*: that of the link, which EVENT_LOST tells. *keep* is
    held so that all these outlive the stream's threads. *epoch* is stamped on every write and checked on every arrival.
    `bind` and `post` from any thread; a slot has at most one unacknowledged write of each direction.

    Raises
    ------
    MemoryError
        From the constructor, for its tables or trace; *fd* is then still the caller's, as with a wrong argument.
    ValueError
        From `post` and `bind`, if the slot is beyond *n_slots* or the stream is closed.
    """

    cdef Link *link
    cdef object keep

    def __cinit__(self, int fd, *, uint32_t peer, uintptr_t engine, uintptr_t arrived, uintptr_t notify,
                  uint32_t epoch, uint32_t n_slots, int send_buffer_nbytes=0, uint64_t trace_capacity=0,
                  uint32_t trace_first_round=1, uint32_t trace_last_round=0, uintptr_t pace_out=0, uintptr_t pace_in=0,
                  uintptr_t seal_out=0, uintptr_t seal_in=0, bint checks=False, uint32_t number=0, keep=None):
        cdef Link *link = <Link *>calloc(1, sizeof(Link))
        if link == NULL:
            raise MemoryError("stream")
        self.link, self.keep = link, keep
        link.fd = -1
        pthread_mutex_init(&link.lock, NULL)
        link.peer, link.number = peer, number
        link.engine = <void *>engine
        link.arrived, link.notify = <bps_arrived_fn>arrived, <bps_notify_fn>notify
        link.pace_out, link.pace_in = <bps_pace *>pace_out, <bps_pace *>pace_in
        link.seal_out, link.seal_in = <bps_seal *>seal_out, <bps_seal *>seal_in
        link.checks = checks
        link.capacity = 1024
        link.posted = link.sent = link.delivered = 1  # one may come before those that wait
        link.queue = <Write *>calloc(link.capacity, sizeof(Write))
        without_slots = bps_slots_init(&link.slots, n_slots, epoch)
        rc = bps_trace_open(&link.records, trace_capacity, trace_first_round, trace_last_round)
        if rc or without_slots or link.queue == NULL:
            raise MemoryError(f"stream of {n_slots} slots and a trace of {trace_capacity} records")
        link.fd = fd  # nothing can raise any more: it is ours
        bps_tune(fd, send_buffer_nbytes)

    @property
    def peer(self):
        """The engine's source id of the node at the other end."""
        return self.link.peer

    @property
    def handle(self):
        """Address that the function at `post_address` takes first; valid as long as this object."""
        return <uintptr_t>self.link

    @property
    def post_address(self):
        """Address of the `bps_post_fn` (hooks.h), which does as `post`."""
        return <uintptr_t>&_post

    cdef Link *_open(self) except NULL:
        if self.link.fd < 0:
            raise ValueError(f"the stream to source {self.link.peer} is closed")
        return self.link

    cdef Link *_slot(self, uint32_t slot) except NULL:
        cdef Link *link = self._open()
        if slot >= link.slots.n:
            raise ValueError(f"slot {slot} of {link.slots.n}")
        return link

    def bind(self, uint32_t slot, uint64_t address_even, uint64_t address_odd, uint64_t nbytes, bint framed=False,
             uint32_t next_round=1):
        """Let the peer write *nbytes* of *slot*: even rounds at one address, odd rounds at the other.

        *framed*: up to so many, of which the first eight say how many follow. *next_round* is the first that is to
        come. The memory is the caller's and stays until `close`. Bind before the peer may write.
        """
        cdef Link *link = self._slot(slot)
        bps_slots_bind(&link.slots, slot, address_even, address_odd, nbytes, framed, next_round)

    def unbind(self, uint32_t slot):
        """Take no more writes to *slot*: the peer has none under way. No matter if it is not bound."""
        cdef Link *link = self._slot(slot)
        bps_slots_bind(&link.slots, slot, 0, 0, 0, False, 0)

    def next_round(self, uint32_t slot):
        """Return the round of *slot* that has not arrived whole: for good, once the stream is closed."""
        if slot >= self.link.slots.n:
            raise ValueError(f"slot {slot} of {self.link.slots.n}")
        return bps_slots_next(&self.link.slots, slot)

    def start(self):
        """Start both threads."""
        cdef Link *link = self._open()
        if link.started:
            raise ValueError("a stream is started once")
        rc = bps_start_thread(&link.receiver, _receive, link)
        if rc:
            raise OSError(rc, f"pthread_create(receiver of source {link.peer})")
        rc = bps_start_thread(&link.sender, _send, link)
        if rc:
            shutdown(link.fd, SHUT_RDWR)
            with nogil:
                pthread_join(link.receiver, NULL)
            raise OSError(rc, f"pthread_create(sender of source {link.peer})")
        link.started = True

    def post(self, uint32_t slot, uint32_t round, uint32_t flags, uint64_t address, uint64_t nbytes):
        """Queue a write of *nbytes* at *address* into the peer's *slot*; the bytes stay until EVENT_DELIVERED."""
        cdef int rc, is_delivered
        cdef Link *link = self._slot(slot)
        with nogil:
            rc = _post(link, slot, round, flags, address, nbytes, &is_delivered)
            if is_delivered:
                link.notify(link.engine, BPS_EVENT_DELIVERED, link.peer, slot, round, 0,
                            0 if flags & BPS_FLAG_EMPTY else nbytes)
        if rc == ENOMEM:
            raise MemoryError("stream queue")
        if rc:
            raise ValueError(f"the stream to source {self.link.peer} was closed meanwhile")

    def counters(self):
        """Return bytes and writes in both directions, headers included; `writes_damaged`: came otherwise than sent."""
        cdef Link *link = self.link
        cdef uint64_t pending
        pthread_mutex_lock(&link.lock)
        pending = link.posted - link.delivered
        pthread_mutex_unlock(&link.lock)
        return {"bytes_sent": bps_counted(&link.bytes_sent), "bytes_received": bps_counted(&link.bytes_received),
                "writes_sent": bps_counted(&link.writes_sent), "writes_received": bps_counted(&link.writes_received),
                "writes_damaged": bps_counted(&link.writes_damaged), "writes_pending": pending}

    def trace(self):
        """Return the records so far (`record.h`)."""
        return trace_bytes(&self.link.records)

    def close(self):
        """Cut the connection, stop both threads, close the socket. Idempotent; undelivered writes are dropped."""
        cdef Link *link = self.link
        cdef uint32_t seen
        if link.fd < 0:
            return
        with nogil:
            pthread_mutex_lock(&link.lock)
            bps_store(&link.closing, 1)
            bps_add(&link.word, 1)
            pthread_mutex_unlock(&link.lock)
            shutdown(link.fd, SHUT_RDWR)
            bps_wake(&link.word, 2)
            if link.started:
                pthread_join(link.sender, NULL)
                pthread_join(link.receiver, NULL)
            pthread_mutex_lock(&link.lock)
            while link.is_sending:  # which waits for nothing
                seen = bps_load(&link.word)
                pthread_mutex_unlock(&link.lock)
                bps_wait(&link.word, seen, 1000000)
                pthread_mutex_lock(&link.lock)
            pthread_mutex_unlock(&link.lock)
            close(link.fd)
        link.fd = -1
        self.keep = None

    def __del__(self):
        if self.link != NULL:
            self.close()  # in a garbage cycle: before the collector takes away `keep`, which the threads use

    def __dealloc__(self):
        cdef Link *link = self.link
        if link != NULL:
            if link.fd >= 0:
                self.close()
            bps_slots_free(&link.slots)
            free(link.queue)
            free(link.records.records)
            pthread_mutex_destroy(&link.lock)
            free(link)
