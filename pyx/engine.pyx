# cython: language_level=3, binding=True
"""The summing engine of a node: native threads sum partitions whose inputs are complete, by priority, and pass them on.

For each partition the engine knows its inputs, a kernel, an output and its destinations (`part.h`). When the last
input of a round arrives (a lane entry, or a transport's call of the arrived hook) the partition is ready; threads pop
the ready ones of the oldest step by their integer rank, run the kernel without any lock, and (`core.h`)

    owner   publish on the board, tell peers of this host by lane, give what goes to others to the dispatch
    member  announce the partial to an owner on this host, or give it to the dispatch

so no Python runs per partition. The policy is outside: integer ranks come with `commit`. An engine without a dispatch
reports what is to be sent as EVENT_RESULT and EVENT_FORWARD. Results are double-buffered by the parity of the round;
inputs are never written. What the methods do is in the headers.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from array import array as _array

from pyx.words cimport *


include "core.pxi"


EVENT_FORWARD, EVENT_RESULT = BPS_EVENT_FORWARD, BPS_EVENT_RESULT
EVENT_DELIVERED, EVENT_LOST = BPS_EVENT_DELIVERED, BPS_EVENT_LOST
FLAG_EMPTY = BPS_FLAG_EMPTY
#: The source of an EVENT_LOST that is the engine's own: `Engine.failure` says why.
NOBODY = <uint32_t>BPS_NOBODY


include "engine_parts.pxi"


@cython.final
@cython.no_gc_clear
cdef class Engine:
    """Sum on *n_threads* native threads; publish on *board*; sleep on *doorbell* (formatted shared buffers).

    *nontemporal_nbytes*: partitions of at least so many bytes are summed with streaming stores (others, too, if that is
    asked for where they are pushed).
    *awake_us*: how long an idle thread waits for work before it sleeps (one at a time does).
    *trace_capacity*: records kept for `trace` (0: tracing is off). *fifo*: what is complete first is summed first.
    All methods may be called from any thread, `events` and `close` from one; after `close` they raise ValueError.
    Addresses given to `add_owned`, `add_member` and `map_segment` stay valid until `close`: the engine does not own
    them.
    """

    cdef bps_core *core
    cdef tuple held  # no list: the collector would empty it while the threads run

    def __cinit__(self, board, doorbell, *, int n_threads, uint64_t nontemporal_nbytes=1 << 20,
                  uint32_t awake_us=0, uint64_t trace_capacity=0, uint32_t trace_first_round=1,
                  uint32_t trace_last_round=0, bint fifo=False):
        cdef _Held held_board = _Held(board)
        cdef _Held held_doorbell = _Held(doorbell)
        cdef int rc
        self.held = (held_board, held_doorbell)
        if not 1 <= n_threads <= MAX_THREADS:
            raise ValueError(f"n_threads must be 1 to {MAX_THREADS}, got {n_threads}")
        held_board.board()
        held_doorbell.doorbell()
        self.core = bps_core_make(n_threads, trace_capacity, trace_first_round, trace_last_round)
        if self.core == NULL:
            raise MemoryError(f"engine tables and a trace of {trace_capacity} records")
        self.core.board, self.core.doorbell = held_board.board(), held_doorbell.doorbell()
        self.core.fifo = fifo
        self.core.nontemporal_nbytes, self.core.awake_ns = nontemporal_nbytes, 1000 * <uint64_t>awake_us
        rc = bps_start(self.core, n_threads)
        if rc:
            raise OSError(rc, f"pthread_create({n_threads} engine threads)")

    @property
    def handle(self):
        """Address that the two hooks take as their first argument; valid until the engine is collected."""
        return <uintptr_t>self.core

    @property
    def arrived_address(self):
        """Address of the `bps_arrived_fn` (hooks.h)."""
        return <uintptr_t>&bps_on_arrived

    @property
    def notify_address(self):
        """Address of the `bps_notify_fn` (hooks.h)."""
        return <uintptr_t>&bps_on_notify

    @property
    def attach_address(self):
        """Address of the `bps_attach_fn` (hooks.h), for a `bpsfast.pyx.dispatch.Dispatch`."""
        return <uintptr_t>&bps_on_attach

    @property
    def generation(self):
        """The generation committed last (0: none)."""
        return self.core.generation

    cdef bps_core *_open(self) except NULL:
        if self.core.stopping:
            raise ValueError("the engine is closed")
        return self.core

    cdef _add_source(self, int kind, _Held incoming, _Held outgoing, _Held doorbell):
        """Return the id of a new source of *kind*, with these lanes and this doorbell, if it has them."""
        cdef bps_core *core = self._open()
        cdef bps_source source
        memset(&source, 0, sizeof(source))
        source.kind = kind
        if incoming is not None:
            source.lane = incoming.lane(&source.capacity)
        if outgoing is not None:
            source.outgoing = outgoing.lane(&source.outgoing_capacity)
            source.doorbell = doorbell.doorbell()
        pthread_mutex_lock(&core.lock)
        index = core.n_sources
        if index < BPS_MAX_SOURCES:
            core.sources[index] = source
            core.n_sources += 1
        pthread_mutex_unlock(&core.lock)
        if index == BPS_MAX_SOURCES:
            raise ValueError(f"an engine has at most {BPS_MAX_SOURCES} sources")
        self.held += (incoming, outgoing, doorbell)
        return index

    def add_rank(self, lane):
        """Take inputs from a local rank's *lane*; return its source id. The export is held until `close`."""
        return self._add_source(BPS_RANK, _Held(lane), None, None)

    def add_shm_peer(self, incoming, outgoing, doorbell):
        """Exchange announcements with a node on this host; return its source id."""
        return self._add_source(BPS_SHM_PEER, _Held(incoming), _Held(outgoing), _Held(doorbell))

    def add_wire_peer(self):
        """Return a source id for a node whose bytes a transport receives."""
        return self._add_source(BPS_WIRE_PEER, None, None, None)

    def map_segment(self, uint32_t source, uint32_t segment, uint64_t address, uint64_t nbytes):
        """Set where *segment* of *source* is mapped in this process; parts that waited for it go on."""
        cdef bps_core *core = self._open()
        if source >= core.n_sources or segment >= BPS_MAX_SEGMENTS:
            raise ValueError(f"segment {segment} of source {source}: there are {core.n_sources} sources, "
                             f"and at most {BPS_MAX_SEGMENTS} segments each")
        if bps_map_segment(core, source, segment, address, nbytes):
            raise MemoryError(f"table for segment {segment} of source {source}")

    def add_owned(self, uint32_t part, *, uint64_t nbytes, uint64_t n_elements, uint64_t unit_offset,
                  uintptr_t kernel, int64_t divisor, before, local, after, outputs, shm_peers, bint to_wire,
                  codec=None, rows=None, uintptr_t store=0, uint32_t first_round=1, int64_t kept_round=-1):
        """Own *part*: sum all inputs of the job for it, publish, pass the result on.

        *before* and *after* are (source, slot address) of the nodes before and after this one in node order
        (slot 0: the source announces where it lies), *local* the source ids of this machine's ranks in
        local-rank order; *outputs* are the result's addresses for even and odd rounds; *shm_peers* are told by
        lane, *to_wire* also yields EVENT_RESULT. *unit_offset* is the part's place in its unit. *codec*: how it is
        compressed (a `bpsfast.node.codec_state.PartCodec`); what comes from *before* and *after* are then frames.
        *store*, if not 0, was made for it: see `make_store`. Active from the next `commit` on; what arrives earlier
        waits for it.

        *rows*, (rows in the part, most rows in a frame, elements of a row, bytes of a row): inputs and result are
        frames of rows (`rows.h`) of at most *nbytes*, and *n_elements* means nothing. Rounds are counted modulo 2^32,
        from *first_round* on.

        *kept_round* >= 0, only while frozen: own it from the round after that one on, in the place of an owner that is
        gone. What a member's part of the same number has taken in of that round counts.
        """
        cdef bps_part fresh
        memset(&fresh, 0, sizeof(fresh))
        fresh.store = <bps_weight_store *>store
        fresh.owned, fresh.to_wire, fresh.divisor = True, to_wire, divisor
        fresh.outputs[0], fresh.outputs[1] = outputs
        fresh.n_before, fresh.n_local, fresh.n_after = len(before), len(local), len(after)
        fresh.nbytes, fresh.n_elements, fresh.unit_offset = nbytes, n_elements, unit_offset
        _install(self._open(), part, fresh, kernel, [*before, *((source, 0) for source in local), *after], shm_peers,
                 codec, rows, first_round, kept_round)

    @staticmethod
    def make_store(uint32_t n_parts, *, uintptr_t kernel, uintptr_t weights, uintptr_t momentum=0,
                   uint64_t momentum_nbytes=0, double learning_rate=1.0, double mu=0.0, int64_t staleness=-1,
                   int64_t backups=-1):
        """Return what *n_parts* parts, one of each worker, are to be added with: pushes go to a store (`store.h`).

        *kernel* is of `bpsfast.kernels.stores`; *weights* and *momentum* (0: pushes are added) are the store's memory,
        which stays the caller's. It goes with the last of its parts; who adds none calls `drop_store`. *backups* >= 0:
        workers step together, but for so many (`backups.h`).
        """
        cdef bps_weight_store *store = bps_store_make(n_parts, <void *>momentum, momentum_nbytes)
        if store == NULL:
            raise MemoryError(f"a store for {n_parts} workers")
        store.kernel, store.weights = <bps_store_kernel>kernel, <void *>weights
        store.learning_rate, store.mu = learning_rate, mu
        store.staleness, store.backups = staleness, backups
        return <uintptr_t>store

    @staticmethod
    def drop_store(uintptr_t store):
        """Forget a store that no part was added with."""
        bps_store_free(<bps_weight_store *>store)

    def behind(self, uint32_t part):
        """Return the parts of other workers whose pushes the answer to *part* waits for."""
        cdef bps_core *core = self._open()
        cdef uint32_t found[BPS_MAX_SOURCES]
        cdef uint32_t i, n = 0
        pthread_mutex_lock(&core.lock)
        if part < core.n_parts and core.parts[part].inputs != NULL:
            n = bps_store_behind(core, part, found, BPS_MAX_SOURCES)
        pthread_mutex_unlock(&core.lock)
        return [found[i] for i in range(n)]

    def add_member(self, uint32_t part, *, uint64_t nbytes, uint64_t n_elements, uint64_t unit_offset,
                   uintptr_t kernel, local, uint32_t owner, partial, codec=None, rows=None, uint32_t first_round=1,
                   int64_t kept_round=-1):
        """Take part in *part*: sum this machine's ranks into *partial* and forward it to source *owner*.

        *partial* is (address, segment, offset) of the partial's place; a single rank's input is forwarded as it
        is. The owner's result is published when it arrives. *codec*, *rows*, *first_round*: see `add_owned`; with a
        codec the place is its frame's. *kept_round* >= 0, only while frozen: the part is owned here, and *owner* takes
        it over after that round, the last that was summed; what ranks here have pushed since counts.
        """
        cdef bps_part fresh
        memset(&fresh, 0, sizeof(fresh))
        fresh.divisor, fresh.owner, fresh.n_local = 1, owner, len(local)
        fresh.outputs[0], fresh.partial_segment, fresh.partial_offset = partial
        fresh.nbytes, fresh.n_elements, fresh.unit_offset = nbytes, n_elements, unit_offset
        _install(self._open(), part, fresh, kernel, [(source, 0) for source in local], (), codec, rows, first_round,
                 kept_round)

    def give_up(self, uint32_t part, uint32_t kept_round):
        """Forget *part*, owned here and pushed by no rank here, after *kept_round*.

        Only while frozen (else ValueError).
        """
        _check_owner_change(bps_give_up(self._open(), part, NULL, kept_round), f"part {part} after round {kept_round}",
                            "elsewhere")

    def detach(self, uint32_t source):
        """Close *source*, which is gone: ignore it, and send it nothing. Only while frozen (else ValueError)."""
        _check_owner_change(bps_detach(self._open(), source), f"source {source}")

    def progress(self, uint32_t part):
        """Return the last rounds of *part* that were passed on from here, or summed, and that are complete here."""
        cdef uint32_t passed_on = 0, complete = 0
        if bps_progress(self._open(), part, &passed_on, &complete) != BPS_OWNER_CHANGED:
            raise ValueError(f"there is no part {part}")
        return passed_on, complete

    def was_told(self, uint32_t part, uint32_t source, uint32_t round):
        """Whether a transport has reported that the bytes of *source* for *round* of *part* have arrived whole.

        That is its input, if this node owns the part, else the result. A frozen engine keeps it for the commit.
        """
        return bool(bps_was_told(self._open(), part, source, round))

    def follow(self, uint32_t part, uint32_t owner, uint32_t kept_round, uint32_t keeper=NOBODY):
        """Take part in *part* under a new owner, a source, from the round after *kept_round* on. Only while frozen.

        What was passed on of that round is passed on again. *kept_round* itself, if it is not complete here, comes from
        the source *keeper*; without one its result is in place already. Raises ValueError if the part is not that far.
        """
        _check_owner_change(bps_follow(self._open(), part, owner, kept_round, keeper),
                            f"part {part} after round {kept_round}")

    def has_come(self, uint32_t part, uint32_t source, uint32_t round):
        """As `was_told`, and *source* may be a peer of this host."""
        return bool(bps_has_come(self._open(), part, source, round))

    def drop_early(self, uint32_t part, uint32_t source, uint32_t round):
        """Drop what *source* has sent of *round* of *part* while this engine was frozen."""
        bps_drop_early(self._open(), part, source, round)

    def set_keeper(self, uint32_t part, uint32_t keeper):
        """Expect the kept result of *part*, which is owned elsewhere, from source *keeper*: the one before is lost.

        Only while frozen (else ValueError).
        """
        _check_owner_change(bps_set_keeper(self._open(), part, keeper), f"part {part} kept by {keeper}")

    def set_divisor(self, uint32_t part, int64_t divisor):
        """Divide the results of *part* by *divisor* from the next sum on. Only while frozen (else ValueError)."""
        _check_owner_change(bps_set_divisor(self._open(), part, divisor), f"part {part} of {divisor} ranks")

    def lose_input(self, uint32_t part, uint32_t source):
        """Take the input of *source*, which is lost, out of *part*, if it has one. Only while frozen.

        A part without inputs is forgotten. Returns whether there are inputs left. Raises ValueError if there is no such
        part.
        """
        cdef bps_core *core = self._open()
        _check_owner_change(bps_lose_input(core, part, source), f"part {part} without {source}")
        return core.parts[part].inputs != NULL

    def redo(self, uint32_t part, uint32_t kept_round, bint sums_again):
        """Go back to *kept_round* of *part*: the next round is summed again, without a rank. Only while frozen.

        *sums_again*: by this node, whose inputs of that round are all in place. Raises ValueError if the part is
        compressed, has a store, or is not at one of these rounds.
        """
        _check_owner_change(bps_redo(self._open(), part, kept_round, sums_again), f"part {part} after {kept_round}")

    def await_again(self, uint32_t part, uint32_t source):
        """Wait for another input of *source* in the round that comes next: the one that came does not count.

        Only while frozen (else ValueError).
        """
        _check_owner_change(bps_await_again(self._open(), part, source), f"part {part} from {source}")

    def remove(self, uint32_t part):
        """Forget a part whose generation was refused before it was committed."""
        bps_table_remove(self.core, part)

    def retire(self, parts):
        """Forget committed *parts* that nobody pushes or waits for any more, and clear their words for others.

        Raises `ValueError` if one is not there, or something of it is under way: an input has come, or its result has
        not. None is then forgotten.
        """
        numbers = _array("I", parts)
        cdef uint32_t[::1] index = numbers if numbers else _array("I", [0])
        cdef uint32_t culprit = 0
        cdef int status = bps_table_retire(self._open(), &index[0], <uint32_t>len(numbers), &culprit)
        if status == BPS_ABSENT:
            raise ValueError(f"part {culprit} is to be retired, but there is none")
        if status != BPS_RETIRED:
            raise ValueError(f"part {culprit} is to be retired while something of it is under way")

    def codec_words(self, uint32_t part, words=None):
        """Return what codec and owner's codec of *part* draw from next, and the bits of the learning rates
        that what they have not sent was computed for: six words.

        With *words* they become these. Nothing of the part may be under way.
        """
        cdef bps_core *core = self._open()
        cdef bps_codec *codec = NULL
        cdef uint64_t found[6]
        cdef int i
        if words is not None:
            for i in range(6):
                found[i] = words[i]
        pthread_mutex_lock(&core.lock)
        if part < core.n_parts:
            codec = core.parts[part].codec
        if codec != NULL and words is not None:
            memcpy(codec.generator, found, 16)
            memcpy(codec.generator_back, found + 2, 16)
            memcpy(&codec.last_rate, found + 4, 8)
            memcpy(&codec.last_rate_back, found + 5, 8)
            if codec.rate == 0:  # none was set here: it goes on as it was
                codec.rate = codec.last_rate
        if codec != NULL:
            memcpy(found, codec.generator, 16)
            memcpy(found + 2, codec.generator_back, 16)
            memcpy(found + 4, &codec.last_rate, 8)
            memcpy(found + 5, &codec.last_rate_back, 8)
        pthread_mutex_unlock(&core.lock)
        if codec == NULL:
            raise ValueError(f"part {part} has no codec")
        return [found[i] for i in range(6)]

    def freeze(self, double timeout_s):
        """Start no kernel any more; return once none runs. `commit` ends it.

        Raises `TimeoutError` if a kernel still runs after *timeout_s*; the engine is then not frozen.
        """
        cdef uint64_t timeout_ns = <uint64_t>(timeout_s * 1e9)
        cdef int running
        cdef bps_core *core = self._open()
        with nogil:
            running = bps_freeze(core, timeout_ns)
        if running:
            raise TimeoutError(f"{running} kernels still run {timeout_s} s after freeze")

    def report(self):
        """Return (part, last consumed round, inputs missing for the next) of every part: what a commit decides on."""
        cdef bps_core *core = self._open()
        cdef uint32_t i, n, room = core.n_parts
        cdef bps_row *rows = <bps_row *>calloc(room + 1, sizeof(bps_row))
        if rows == NULL:
            raise MemoryError(f"a report of {room} parts")
        n = bps_table_report(core, rows, room)
        try:
            return [(rows[i].part, rows[i].round, rows[i].n_missing) for i in range(n)]
        finally:
            free(rows)

    def missing(self, uint32_t part):
        """Return (round, sources that have not delivered it, whether the part is owned).

        A member that lacks only the result names the owner. What ranks announced before the call counts.
        """
        cdef bps_gap gap
        cdef uint32_t i
        if bps_table_missing(self._open(), part, &gap):
            raise ValueError(f"there is no part {part}")
        return gap.round, [gap.sources[i] for i in range(gap.n)], bool(gap.owned)

    def commit(self, uint32_t generation, order):
        """Activate what was added, give each part its integer rank ``order[part]`` (0 is most urgent), go on.

        Raises `ValueError` if the engine is not frozen, the generation is not the next, or a part has no rank.
        """
        cdef bps_core *core = self._open()
        ranks = _array("I", order)
        cdef uint32_t[::1] rank_of = ranks if ranks else _array("I", [0])
        if bps_table_commit(core, generation, &rank_of[0], <uint32_t>len(ranks)):
            raise ValueError(f"commit({generation}) after {core.generation}, frozen: {bool(core.frozen)}, "
                             f"{len(ranks)} ranks for {core.n_parts} parts")

    def arrived(self, uint32_t source, uint32_t part, uint32_t round, uint32_t flags):
        """Report that a wire peer's bytes have arrived, as a transport does through `arrived_address`."""
        with nogil:
            bps_on_arrived(self.core, source, part, round, flags)

    def events(self, double timeout_s):
        """Return all events since the last call as (kind, source, part, round, code, address, nbytes), or [] in time.

        One reader thread; `events.h` says what each kind means.
        """
        cdef bps_events *queue = &self.core.events
        cdef uint64_t timeout_ns = <uint64_t>(timeout_s * 1e9)
        cdef bps_event *event
        cdef uint32_t i, n
        with nogil:
            bps_events_await(queue, timeout_ns)
            n = bps_events_take(queue)
        found = []  # no lock is held: making objects may run the garbage collector, and that anything
        for i in range(n):
            event = &queue.taken[i]
            found.append((event.kind, event.source, event.part, event.round, event.code, event.address, event.nbytes))
        return found

    def wake(self):
        """Make `events` return: the call that waits, or else the next one. Any thread."""
        bps_events_wake(&self.core.events)

    def abort(self, str reason):
        """Write *reason* on the board and wake every rank: all waits end with it. The first reason stays.

        Does nothing after `close`, which has released the board.
        """
        cdef bps_core *core = self.core
        cdef bytes text = reason.encode()[:BPS_REASON_NBYTES - 1] + b"\0"
        cdef char *source = text
        cdef uint32_t i
        if core.stopping:
            return
        bps_abort(core, source, len(text))
        for i in range(core.n_parts):
            bps_wake(bps_board_word(core.board, i), WAKE_ALL)

    def set_n_lost(self, uint32_t n):
        """Say on the board how many ranks the job has lost, and goes on without."""
        bps_store(&(<bps_board *>self._open().board).n_lost, n)

    @property
    def failure(self):
        """Why the job was aborted on this board, "Class: text"; "" while it was not, and after `close`."""
        cdef bps_core *core = self.core
        if core.stopping or bps_load(&(<bps_board *>core.board).state) == 0:
            return ""
        return (<char *>core.board + BPS_REASON_OFFSET).decode(errors="replace")

    def counters(self):
        """Return what the engine has done since it was made. `allocations` grows with commits, never with rounds."""
        cdef bps_core *core = self.core
        cdef uint64_t sums, summed, published, published_nbytes, forwarded, stale, left_out, allocations
        pthread_mutex_lock(&core.lock)  # threads count under it
        sums, summed, published, published_nbytes = core.sums, core.bytes_summed, core.published, core.published_nbytes
        forwarded, stale, left_out, allocations = core.forwarded, core.stale, core.left_out, core.allocations
        pthread_mutex_unlock(&core.lock)
        return {"sums": sums, "bytes_summed": summed, "published": published, "published_bytes": published_nbytes,
                "forwarded": forwarded, "stale": stale, "left_out": left_out,
                "allocations": allocations + bps_counted(&core.events.grown),
                "trace_dropped": max(0, <int64_t>bps_counted(&core.trace.used) - <int64_t>core.trace.capacity)
                if core.trace.records else 0}

    def pushed_nbytes(self, uint32_t source):
        """Return how many bytes of inputs *source* has delivered."""
        cdef bps_core *core = self.core
        cdef uint64_t nbytes
        if source >= core.n_sources:
            raise ValueError(f"there is no source {source}")
        pthread_mutex_lock(&core.lock)
        nbytes = core.sources[source].pushed_nbytes
        pthread_mutex_unlock(&core.lock)
        return nbytes

    def lags(self, bint owned):
        """Return how late the first inputs of units were, by source, compared to the earliest one of the same round.

        All inputs are compared, of units whose first partition is *owned* here; else ranks of this machine among each
        other, of all units. Rows (source, count, total_ns, max_ns, p99_ns, times last, total_ns when last); sources
        without any are left out.
        """
        cdef bps_core *core = self._open()
        cdef bps_lag *lag
        cdef uint32_t i, n = core.n_sources
        cdef uint64_t *rows = <uint64_t *>calloc(6 * <size_t>n + 1, sizeof(uint64_t))
        cdef uint64_t *row
        if rows == NULL:
            raise MemoryError(f"lags of {n} sources")
        pthread_mutex_lock(&core.lock)  # no objects are made under it
        for i in range(n):
            lag, row = (&core.owner_lags[i] if owned else &core.local_lags[i]), rows + 6 * i
            row[0], row[1], row[2] = lag.n, lag.sum_ns, lag.max_ns
            row[3], row[4], row[5] = bps_lag_p99(lag), lag.n_last, lag.last_sum_ns
        pthread_mutex_unlock(&core.lock)
        try:
            return [(i, rows[6 * i], rows[6 * i + 1], rows[6 * i + 2], rows[6 * i + 3], rows[6 * i + 4],
                     rows[6 * i + 5]) for i in range(n) if rows[6 * i]]
        finally:
            free(rows)

    def trace(self):
        """Return the records so far (`record.h`)."""
        return trace_bytes(&self.core.trace)

    def close(self):
        """Stop the threads and release all buffers. Idempotent. Close every transport first."""
        if self.core.stopping:
            return
        with nogil:
            bps_stop(self.core)
        self.held = ()

    def __dealloc__(self):
        if self.core != NULL:
            if not self.core.stopping:
                bps_stop(self.core)
            bps_core_free(self.core)
