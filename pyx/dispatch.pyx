# cython: language_level=3, binding=True
"""Dispatch: which write a node sends next, and to which peer (`dispatch.h`, `send_queue.h`).

An engine that has a `Dispatch` gives it what it has summed and has to send, in the thread that has
summed it; the streams give credit back, in theirs. So no Python runs for a partition. The policy is outside: ranks,
shares and readers come with `commit`.
"""
cimport cython
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy, memset

from array import array as _array

from pyx.words cimport *

cdef extern from "send_queue.h" nogil:
    struct bps_outgoing:
        uint32_t part, round, flags
        uint64_t address, nbytes, since_ns
    struct bps_send_peer:
        uint64_t in_flight_nbytes, peak_nbytes
        int is_held
    struct bps_send_queue:
        bps_send_peer *peers
        uint32_t n
        uint64_t credit_nbytes
    struct bps_write_order:
        int fifo
    enum: BPS_SEND_NOBODY
    int bps_send_add(bps_send_queue *, uint32_t, int64_t)
    void bps_send_plan(bps_send_queue *, const uint64_t *, uint32_t)
    void bps_send_set_credit(bps_send_queue *, uint64_t)
    void bps_send_hold(bps_send_queue *, uint32_t)
    void bps_send_resume(bps_send_queue *, uint32_t)

cdef extern from "hooks.h" nogil:
    ctypedef void (*bps_attach_fn)(void *, void *)
    ctypedef int (*bps_post_fn)(void *, uint32_t, uint32_t, uint32_t, uint64_t, uint64_t, int, int *)

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_lock(pthread_mutex_t *)
    int pthread_mutex_unlock(pthread_mutex_t *)

cdef extern from "dispatch.h" nogil:
    struct bps_post_target:
        void *stream
        bps_post_fn post
        const uint64_t *backlog
    struct bps_route:
        bps_post_target *targets
        uint32_t n_targets, n_nodes, n_turns
        uint8_t *counts
        uint32_t n_counts
    struct bps_readers:
        uint32_t n
        uint32_t *sources
    struct bps_known_part:
        uint32_t first
        const bps_readers *readers
    struct bps_posted:
        uint64_t key
    struct bps_sent:
        uint64_t since_ns, posted_ns, nbytes, order
        uint32_t source, part, round
    struct bps_dispatch:
        pthread_mutex_t lock
        bps_send_queue queue
        bps_write_order order_of_writes
        bps_route *routes
        uint32_t n_routes
        uint32_t *order
        uint32_t n_order
        bps_known_part *parts
        bps_posted *posted
        uint32_t posted_capacity
        uint32_t is_abandoned
        void *engine
        bps_notify_fn notify
        int failure
        uint32_t failed_source
        bps_outgoing failed
        uint64_t n_events, n_partitions, peak_queued, n_queued
        bps_sent *sent
        uint64_t sent_capacity, n_sent
        uint32_t first_round, last_round
    int bps_dispatch_open(bps_dispatch *, uint64_t)
    void bps_dispatch_free(bps_dispatch *)
    int bps_dispatch_has(const bps_dispatch *, uint32_t)
    int bps_dispatch_room(bps_dispatch *, uint32_t)
    int bps_dispatch_enter(bps_dispatch *, bps_outgoing *, int)
    int bps_dispatch_put(bps_dispatch *, uint32_t, const bps_outgoing *)
    void bps_dispatch_take(bps_dispatch *, uint32_t, uint32_t, bps_outgoing *)
    void bps_dispatch_pump(bps_dispatch *)
    void bps_dispatch_forget(bps_dispatch *, uint32_t)
    void bps_dispatch_remove(bps_dispatch *, uint32_t)
    void bps_dispatch_settle(bps_dispatch *, uint32_t)
    int bps_dispatch_repeat(bps_dispatch *, uint32_t, uint32_t, uint32_t)


cdef struct Reported:
    uint32_t kind, source
    bps_outgoing write


@cython.final
@cython.no_gc_clear
cdef class Dispatch:
    """Sends for *engine*, whose sources are the peers here. All methods may be called from any thread.

    *credit_nbytes*: bytes that may be under way to one peer. *fifo*: send in the order of arrival, else the most urgent
    first. *trace_capacity*: records kept for `sent` (0: none) of rounds from *trace_first_round* to *trace_last_round*
    (0: all). *engine* None: nobody but `report` reports, and who reports sends all that can be sent.

    After a failure nothing is sent any more: the engine reports EVENT_LOST of `NOBODY`, and `failure` says why. Streams
    and the engine are held; `abandon` lets the streams go.
    """

    cdef bps_dispatch dispatch
    cdef object engine
    cdef bps_attach_fn attach
    cdef dict streams  # by source: held, because `dispatch` posts to them
    cdef dict sets  # readers -> address of the `bps_readers`

    def __cinit__(self, uint64_t credit_nbytes, engine=None, *, bint fifo=False, uint64_t trace_capacity=0,
                  uint32_t trace_first_round=1, uint32_t trace_last_round=0):
        self.streams, self.sets = {}, {}
        if bps_dispatch_open(&self.dispatch, trace_capacity):
            raise MemoryError(f"a trace of {trace_capacity} records")
        self.dispatch.queue.credit_nbytes = credit_nbytes
        self.dispatch.order_of_writes.fifo = fifo
        self.dispatch.first_round, self.dispatch.last_round = trace_first_round, trace_last_round
        if engine is not None:
            self.dispatch.engine = <void *><uintptr_t>engine.handle
            self.dispatch.notify = <bps_notify_fn><uintptr_t>engine.notify_address
            self.engine, self.attach = engine, <bps_attach_fn><uintptr_t>engine.attach_address
            self.attach(self.dispatch.engine, &self.dispatch)

    def __dealloc__(self):
        if self.attach != NULL:
            self.attach(self.dispatch.engine, NULL)
        for address in self.sets.values():
            free(<void *><uintptr_t>address)
        bps_dispatch_free(&self.dispatch)

    def add(self, uint32_t source, int64_t place):
        """Add a peer. *place* breaks ties between peers (`NicQueue.add`)."""
        cdef int rc
        pthread_mutex_lock(&self.dispatch.lock)
        rc = bps_send_add(&self.dispatch.queue, source, place)
        pthread_mutex_unlock(&self.dispatch.lock)
        if rc:
            raise MemoryError(f"peer {source}")
        self._pump()

    def route(self, uint32_t source, streams, *, uint32_t n_nodes, uint32_t n_turns=0, counts=None):
        """Post to these *streams* what goes to *source*, which is held or has nothing waiting.

        A write goes to the stream with the smallest backlog, or, if streams do not tell theirs (address 0), to that of
        its part, as it does among equals: in a job of *n_nodes* as many parts in a row share one. Parts take turns on
        the first *n_turns* (0: on all), or, a part in *counts*, on as many as that says.
        """
        cdef bps_dispatch *d = &self.dispatch
        cdef bps_route *routes
        cdef bps_route fresh, old
        cdef uint32_t i, n = <uint32_t>len(streams), n_counts = max(counts or {}, default=-1) + 1
        cdef bint has_room
        fresh.targets = <bps_post_target *>calloc(n + 1, sizeof(bps_post_target))
        fresh.counts = <uint8_t *>calloc(n_counts + 1, 1)
        if fresh.targets == NULL or fresh.counts == NULL:
            free(fresh.targets)
            free(fresh.counts)
            raise MemoryError(f"{n} streams")
        fresh.n_targets, fresh.n_nodes, fresh.n_turns, fresh.n_counts = n, max(n_nodes, <uint32_t>1), n_turns, n_counts
        try:
            for i in range(n):
                fresh.targets[i].stream = <void *><uintptr_t>streams[i].handle
                fresh.targets[i].post = <bps_post_fn><uintptr_t>streams[i].post_address
                fresh.targets[i].backlog = <const uint64_t *><uintptr_t>streams[i].backlog_address
            for part, count in (counts or {}).items():
                fresh.counts[<uint32_t>part] = min(count, 255)
        except BaseException:
            free(fresh.targets)
            free(fresh.counts)
            raise
        held = tuple(streams)
        pthread_mutex_lock(&d.lock)
        if source >= d.n_routes:
            routes = <bps_route *>realloc(d.routes, 2 * (<size_t>source + 1) * sizeof(bps_route))
            if routes != NULL:
                memset(routes + d.n_routes, 0, (2 * (<size_t>source + 1) - d.n_routes) * sizeof(bps_route))
                d.routes, d.n_routes = routes, 2 * (source + 1)
        has_room = source < d.n_routes
        old = fresh
        if has_room:
            old = d.routes[source]
            d.routes[source] = fresh
        pthread_mutex_unlock(&d.lock)
        free(old.targets)
        free(old.counts)
        if not has_room:
            raise MemoryError(f"the streams of peer {source}")
        self.streams[source] = held

    def commit(self, order, first_parts, readers):
        """Use these from now on: *order*, the ranks of first parts; of parts that are new, or have changed, the first
        part of their unit, and the peers that get their result: {part: first}, {part: (source, ...)}.
        """
        cdef bps_dispatch *d = &self.dispatch
        cdef uint32_t part, first, most, n
        cdef int rc
        cdef uint32_t[::1] ranks
        cdef uint32_t *fresh
        cdef const bps_readers *set_
        numbers = _array("I", order)
        n = <uint32_t>len(numbers)
        fresh = <uint32_t *>calloc(n + 1, sizeof(uint32_t))
        if fresh == NULL:
            raise MemoryError(f"{n} ranks")
        if n:
            ranks = numbers
            memcpy(fresh, &ranks[0], n * sizeof(uint32_t))
        try:
            most = max(max(first_parts, default=0), max(readers, default=0))
        except BaseException:
            free(fresh)
            raise
        pthread_mutex_lock(&d.lock)
        rc = bps_dispatch_room(d, most)
        d.order, fresh = fresh, d.order
        d.n_order = n
        pthread_mutex_unlock(&d.lock)
        free(fresh)
        if rc:
            raise MemoryError(f"a table of {most + 1} parts")
        for key, value in first_parts.items():
            part, first = key, value
            pthread_mutex_lock(&d.lock)
            d.parts[part].first = first
            pthread_mutex_unlock(&d.lock)
        for key, value in readers.items():
            part, set_ = key, self._set(value)
            pthread_mutex_lock(&d.lock)
            d.parts[part].readers = set_
            pthread_mutex_unlock(&d.lock)

    cdef const bps_readers *_set(self, tuple sources) except NULL:
        """Return what is made once of the same readers."""
        cdef bps_readers *made
        cdef uint32_t i
        address = self.sets.get(sources)
        if address is None:
            made = <bps_readers *>calloc(1, sizeof(bps_readers) + len(sources) * sizeof(uint32_t))
            if made == NULL:
                raise MemoryError(f"{len(sources)} readers")
            for i in range(<uint32_t>len(sources)):
                made.sources[i] = sources[i]
            made.n = <uint32_t>len(sources)
            address = self.sets[sources] = <uintptr_t>made
        return <const bps_readers *><uintptr_t>address

    def plan(self, shares):
        """Set how many bytes each peer is sent in a step (`NicQueue.plan`)."""
        cdef uint32_t n = max(shares, default=-1) + 1
        cdef uint64_t *by_peer = <uint64_t *>calloc(n + 1, sizeof(uint64_t))
        if by_peer == NULL:
            raise MemoryError("shares")
        for peer, nbytes in shares.items():
            by_peer[<uint32_t>peer] = nbytes
        pthread_mutex_lock(&self.dispatch.lock)
        bps_send_plan(&self.dispatch.queue, by_peer, n)
        pthread_mutex_unlock(&self.dispatch.lock)
        free(by_peer)
        self._pump()

    def set_credit(self, uint64_t nbytes):
        """Allow *nbytes* under way to one peer from now on, those under way included."""
        pthread_mutex_lock(&self.dispatch.lock)
        bps_send_set_credit(&self.dispatch.queue, nbytes)
        pthread_mutex_unlock(&self.dispatch.lock)
        self._pump()

    def forget(self, parts):
        """Drop all knowledge of *parts*, of which nothing waits or is under way: their numbers will be used again."""
        cdef uint32_t part
        for each in parts:
            part = each
            pthread_mutex_lock(&self.dispatch.lock)
            bps_dispatch_forget(&self.dispatch, part)
            pthread_mutex_unlock(&self.dispatch.lock)

    def hold(self, uint32_t source):
        """Post nothing more to *source* until `resume`; return whether it was a peer that was not held."""
        cdef bint is_new
        with nogil:
            pthread_mutex_lock(&self.dispatch.lock)
            is_new = bps_dispatch_has(&self.dispatch, source) and not self.dispatch.queue.peers[source].is_held
            if is_new:
                bps_send_hold(&self.dispatch.queue, source)
            bps_dispatch_settle(&self.dispatch, source)
            pthread_mutex_unlock(&self.dispatch.lock)
        self._pump()  # the next write may be another peer's
        return is_new

    def resume(self, uint32_t source, awaited):
        """Post to *source* again, over the streams of its new `route`; return whether it is a peer.

        *awaited* is for each part the round that has not arrived there: it is posted again if it was before. What else
        was under way is forgotten.
        """
        cdef uint32_t i, n
        cdef uint32_t[::1] parts, rounds
        cdef bint is_there
        pairs = [*awaited.items(), (0, 0)]  # a memoryview is of one item at least
        parts, rounds = _array("I", [part for part, _ in pairs]), _array("I", [round for _, round in pairs])
        n = <uint32_t>len(pairs) - 1
        pthread_mutex_lock(&self.dispatch.lock)
        is_there = bps_dispatch_has(&self.dispatch, source)
        if is_there:
            bps_send_resume(&self.dispatch.queue, source)
            for i in range(n):
                if bps_dispatch_repeat(&self.dispatch, source, parts[i], rounds[i]):
                    break  # a failure, which is reported
        pthread_mutex_unlock(&self.dispatch.lock)
        self._pump()
        return is_there

    def remove(self, uint32_t source):
        """Forget *source*, with all that waits for it; no matter if it is no peer. Its streams may then be closed."""
        with nogil:
            pthread_mutex_lock(&self.dispatch.lock)
            if bps_dispatch_has(&self.dispatch, source):
                bps_dispatch_remove(&self.dispatch, source)
            bps_dispatch_settle(&self.dispatch, source)
            pthread_mutex_unlock(&self.dispatch.lock)
        self.streams.pop(source, None)
        self._pump()

    def send_result(self, uint32_t source, uint32_t part, uint32_t round, uint64_t address, uint64_t nbytes):
        """Send the result of *round* of *part* to *source* alone, if it is a peer; whether it is."""
        cdef bps_outgoing write
        cdef bint is_there
        memset(&write, 0, sizeof(write))
        write.part, write.round, write.address, write.nbytes = part, round, address, nbytes
        write.since_ns = bps_now_ns()
        pthread_mutex_lock(&self.dispatch.lock)
        is_there = bps_dispatch_has(&self.dispatch, source)
        if is_there and bps_dispatch_enter(&self.dispatch, &write, 1) == 0:
            bps_dispatch_put(&self.dispatch, source, &write)
        pthread_mutex_unlock(&self.dispatch.lock)
        self._pump()
        return is_there

    def abandon(self):
        """Post nothing more, to nobody: once this returns, streams may be closed."""
        with nogil:
            pthread_mutex_lock(&self.dispatch.lock)
            self.dispatch.is_abandoned = True
            bps_dispatch_settle(&self.dispatch, BPS_SEND_NOBODY)
            pthread_mutex_unlock(&self.dispatch.lock)
        self.streams.clear()

    def report(self, events):
        """Take *events*, all before anything is posted, as an engine and its streams report them: (kind, source, part,
        round, flags, address, nbytes).
        """
        cdef uint32_t i, n = <uint32_t>len(events)
        cdef Reported *found = <Reported *>calloc(n + 1, sizeof(Reported))
        if found == NULL:
            raise MemoryError(f"{n} events")
        try:
            for i in range(n):
                (found[i].kind, found[i].source, found[i].write.part, found[i].write.round, found[i].write.flags,
                 found[i].write.address, found[i].write.nbytes) = events[i]
        except BaseException:
            free(found)
            raise
        pthread_mutex_lock(&self.dispatch.lock)
        for i in range(n):
            bps_dispatch_take(&self.dispatch, found[i].kind, found[i].source, &found[i].write)
        pthread_mutex_unlock(&self.dispatch.lock)
        free(found)
        self._pump()

    cdef void _pump(self):
        with nogil:
            bps_dispatch_pump(&self.dispatch)

    @property
    def failure(self):
        """Why nothing is sent any more: (errno, source, part, round, nbytes, address) of the first write that could not
        be. None: it goes on. ENOENT: no commit has told of the part; ENOTCONN: the source has no streams.
        """
        if self.dispatch.failure == 0:
            return None
        write = self.dispatch.failed
        return self.dispatch.failure, self.dispatch.failed_source, write.part, write.round, write.nbytes, write.address

    def sent(self):
        """Return what was posted, if that is traced: since when it could be, when it was (monotonic ns), source, part,
        round, nbytes, order (`WriteOrder`; with fifo by round and urgency)."""
        cdef uint64_t i
        found = []
        for i in range(self.dispatch.n_sent):
            each = self.dispatch.sent[i]
            found.append((each.since_ns, each.posted_ns, each.source, each.part, each.round, each.nbytes, each.order))
        return found

    def posted(self, uint32_t source):
        """Return the parts of which `resume` can repeat a write to *source*."""
        cdef uint64_t *keys
        cdef uint32_t i, n
        pthread_mutex_lock(&self.dispatch.lock)  # no objects are made under it: that may run the garbage collector
        n = self.dispatch.posted_capacity
        keys = <uint64_t *>calloc(n + 1, sizeof(uint64_t))
        if keys != NULL:
            for i in range(n):
                keys[i] = self.dispatch.posted[i].key
        pthread_mutex_unlock(&self.dispatch.lock)
        if keys == NULL:
            raise MemoryError(f"{n} keys")
        found = {<uint32_t>keys[i] for i in range(n) if keys[i] >> 32 == (<uint64_t>1 << 31 | source)}
        free(keys)
        return found

    def counters(self):
        """Return what was handled, and the state of the queue; bytes under way to all peers, at most to one."""
        cdef bps_dispatch *d = &self.dispatch
        cdef uint64_t in_flight = 0, peak = 0, n_events, n_partitions, n_queued, peak_queued, credit_nbytes
        cdef uint32_t i
        pthread_mutex_lock(&d.lock)
        for i in range(d.queue.n):
            in_flight += d.queue.peers[i].in_flight_nbytes
            peak = max(peak, d.queue.peers[i].peak_nbytes)
        n_events, n_partitions, n_queued, peak_queued = d.n_events, d.n_partitions, d.n_queued, d.peak_queued
        credit_nbytes = d.queue.credit_nbytes
        pthread_mutex_unlock(&d.lock)
        return {"events": n_events, "partitions": n_partitions, "queued": n_queued, "peak_queued": peak_queued,
                "credit_nbytes": credit_nbytes, "in_flight_nbytes": in_flight, "peak_in_flight_nbytes": peak}
