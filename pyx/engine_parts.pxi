# Helpers of engine.pyx, included by it: limits, buffers, sources, parts and their codecs, stores, counters.

cdef enum:
    MAX_THREADS = 64
    WAKE_ALL = 2147483647

#: Most threads of an engine. (The bound of the setting engine_threads is the same: `test_bounds`.)
MOST_THREADS = MAX_THREADS


@cython.final
@cython.no_gc_clear
cdef class _Held:
    """Holds the export of a buffer that the threads read and write."""

    cdef Py_buffer view

    def __cinit__(self, buffer):
        PyObject_GetBuffer(buffer, &self.view, PyBUF_SIMPLE | PyBUF_WRITABLE)

    cdef bps_lane *lane(self, uint32_t *capacity) except NULL:
        capacity[0] = bps_lane_capacity(<bps_lane *>self.view.buf, self.view.len)
        if capacity[0] == 0:
            raise ValueError(f"the buffer of {self.view.len} bytes is no formatted lane")
        return <bps_lane *>self.view.buf

    cdef bps_doorbell *doorbell(self) except NULL:
        cdef bps_doorbell *bell = <bps_doorbell *>self.view.buf
        if self.view.len < <Py_ssize_t>sizeof(bps_doorbell) or bell.magic != BPS_DOORBELL_MAGIC:
            raise ValueError(f"the buffer of {self.view.len} bytes is no formatted doorbell")
        return <bps_doorbell *>self.view.buf

    cdef void *board(self) except NULL:
        if (self.view.len < BPS_BOARD_HEADER + BPS_MAX_PARTS * BPS_BOARD_STRIDE
                or (<bps_board *>self.view.buf).magic != BPS_BOARD_MAGIC):
            raise ValueError(f"the buffer of {self.view.len} bytes is no formatted board")
        return self.view.buf

    def __dealloc__(self):
        PyBuffer_Release(&self.view)


cdef uint32_t _add_source(bps_core *core, int kind, _Held incoming, _Held outgoing, _Held doorbell) except? 0xffffffff:
    """Return the id of a new source of *kind*, with these lanes and this doorbell, if it has them."""
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
    return index


cdef bps_codec *_codec(plan) except NULL:
    """Return a new codec as *plan* (`bpsfast.node.codec_state.PartCodec`) says; the part's own."""
    cdef bps_codec made
    cdef bps_codec *codec
    memset(&made, 0, sizeof(made))
    made.encode, made.decode = <bps_encode_fn><uintptr_t>plan.encode, <bps_decode_fn><uintptr_t>plan.decode
    made.feed, made.feed_back = <bps_feed_fn><uintptr_t>plan.feed, <bps_feed_fn><uintptr_t>plan.feed_back
    made.divide, made.narrow = <bps_divide_fn><uintptr_t>plan.divide, <bps_narrow_fn><uintptr_t>plan.narrow
    made.width, made.room_nbytes, made.scratch_nbytes = plan.width, plan.room_nbytes, plan.scratch_nbytes
    made.k, made.flags, made.mu = plan.k, plan.flags, plan.mu
    made.error, made.momentum = <void *><uintptr_t>plan.error, <void *><uintptr_t>plan.momentum
    made.error_back, made.frame = <void *><uintptr_t>plan.error_back, <char *><uintptr_t>plan.frame
    for i in range(2):
        made.generator[i] = made.generator_back[i] = plan.seed
        made.frames[i] = <char *><uintptr_t>plan.frames[i]
        made.results[i] = <void *><uintptr_t>plan.results[i]
    codec = <bps_codec *>malloc(sizeof(bps_codec))
    if codec == NULL:
        raise MemoryError("codec of a part")
    codec[0] = made
    return codec


cdef int _install(bps_core *core, uint32_t index, bps_part fresh, uintptr_t kernel, inputs, shm_peers, codec, rows,
                  uint32_t first_round, int64_t kept_round=-1) except -1:
    """Put *fresh* into the table as part *index*, with these *inputs*, (source, slot), and what is its own.

    Its rounds are counted from *first_round* on. With *kept_round* >= 0 in the place of an owner that is gone
    (`bps_change_owner`), or, a member's, of one that was owned here (`bps_give_up`).
    """
    cdef int status
    if not 0 < len(inputs) < BPS_MAX_SOURCES or index >= BPS_MAX_PARTS or kernel == 0:
        raise ValueError(f"part {index}: {len(inputs)} inputs, kernel at {kernel}")
    for source, _ in inputs:
        if source >= core.n_sources:
            raise ValueError(f"part {index}: source {source} of {core.n_sources}")
    if rows is not None:
        fresh.rows.n_rows, fresh.rows.max_rows, fresh.rows.row_elements, fresh.rows.row_nbytes = rows
        if fresh.rows.row_nbytes == 0 or fresh.nbytes < bps_rows_nbytes(&fresh.rows, fresh.rows.max_rows):
            raise ValueError(f"part {index}: {fresh.nbytes} bytes have no room for a frame of rows {tuple(rows)}")
    fresh.kernel = <bps_kernel>kernel
    fresh.n_inputs = fresh.n_missing = len(inputs)
    fresh.n_shm_peers = len(shm_peers)
    fresh.order = index
    fresh.round = fresh.applied = first_round - 1
    fresh.inputs = <bps_input *>calloc(len(inputs), sizeof(bps_input))
    fresh.shm_peers = <uint32_t *>calloc(len(shm_peers) + 1, sizeof(uint32_t))
    if fresh.inputs == NULL or fresh.shm_peers == NULL:
        bps_part_free(&fresh)
        raise MemoryError(f"inputs of part {index}")
    if codec is not None:
        try:
            fresh.codec = _codec(codec)
            fresh.codec.result_round = first_round - 1
        except BaseException:
            bps_part_free(&fresh)
            raise
    for i, (source, slot) in enumerate(inputs):
        fresh.inputs[i].source, fresh.inputs[i].slot = source, slot
    for i, peer in enumerate(shm_peers):
        fresh.shm_peers[i] = peer
    if kept_round >= 0:
        if fresh.owned:
            status = bps_change_owner(core, index, &fresh, <uint32_t>kept_round)
        else:
            status = bps_give_up(core, index, &fresh, <uint32_t>kept_round)
        owner = "here" if fresh.owned else "elsewhere"
        if status != BPS_OWNER_CHANGED:
            bps_part_free(&fresh)
            _check_owner_change(status, f"part {index} after round {kept_round}", owner)
    elif bps_table_put(core, index, &fresh):
        bps_part_free(&fresh)
        raise ValueError(f"part {index} is there already")
    return 0


cdef list _codec_words(bps_core *core, uint32_t part, words):
    """See `Engine.codec_words`."""
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
        if codec.rate == 0:  # nobody has told one here: it goes on as it was
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


cdef bps_weight_store *_store(uint32_t n_parts, void *momentum, uint64_t momentum_nbytes) except NULL:
    """Return a new store for so many parts."""
    cdef bps_weight_store *store = bps_store_make(n_parts, momentum, momentum_nbytes)
    if store == NULL:
        raise MemoryError(f"a store for {n_parts} workers")
    return store


cdef list _behind(bps_core *core, uint32_t part):
    """See `Engine.behind`."""
    cdef uint32_t found[BPS_MAX_SOURCES]
    cdef uint32_t i, n = 0
    pthread_mutex_lock(&core.lock)
    if part < core.n_parts and core.parts[part].inputs != NULL:
        n = bps_store_behind(core, part, found, BPS_MAX_SOURCES)
    pthread_mutex_unlock(&core.lock)
    return [found[i] for i in range(n)]


cdef list _lags(bps_core *core, bint owned):
    """Return (source, count, sum, max, p99, times last, sum when last), in ns; see `Engine.lags`."""
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


cdef int _check_owner_change(int status, str what, str owner="here") except -1:
    """Raise ValueError if *status*, of a call about *what*, is not BPS_OWNER_CHANGED; *owner*: where none owns it."""
    if status == BPS_NOT_FROZEN:
        raise ValueError(f"{what}: only a frozen engine changes owners")
    if status == BPS_NO_PART:
        raise ValueError(f"{what}: there is no such part, or it is owned {owner}")
    if status == BPS_OTHER_ROUND:
        raise ValueError(f"{what}: it is at another round here")
    return 0


cdef tuple _progress(bps_core *core, uint32_t part):
    """See `Engine.progress`."""
    cdef uint32_t passed_on = 0, complete = 0
    if bps_progress(core, part, &passed_on, &complete) != BPS_OWNER_CHANGED:
        raise ValueError(f"there is no part {part}")
    return passed_on, complete


cdef dict _counters(bps_core *core):
    """See `Engine.counters`. Threads count under the lock, so the counters are read under it."""
    cdef uint64_t sums, summed, published, published_nbytes, forwarded, stale, left_out, allocations
    pthread_mutex_lock(&core.lock)
    sums, summed, published, published_nbytes = core.sums, core.bytes_summed, core.published, core.published_nbytes
    forwarded, stale, left_out, allocations = core.forwarded, core.stale, core.left_out, core.allocations
    pthread_mutex_unlock(&core.lock)
    return {"sums": sums, "bytes_summed": summed, "published": published, "published_bytes": published_nbytes,
            "forwarded": forwarded, "stale": stale, "left_out": left_out,
            "allocations": allocations + bps_counted(&core.events.grown),
            "trace_dropped": max(0, <int64_t>bps_counted(&core.trace.used) - <int64_t>core.trace.capacity)
            if core.trace.records else 0}


cdef uint64_t _pushed_nbytes(bps_core *core, uint32_t source):
    """See `Engine.pushed_nbytes`."""
    cdef uint64_t nbytes
    pthread_mutex_lock(&core.lock)
    nbytes = core.sources[source].pushed_nbytes
    pthread_mutex_unlock(&core.lock)
    return nbytes


cdef list _report(bps_core *core):
    """See `Engine.report`."""
    cdef uint32_t i, n, room = core.n_parts
    cdef bps_row *rows = <bps_row *>calloc(room + 1, sizeof(bps_row))
    if rows == NULL:
        raise MemoryError(f"a report of {room} parts")
    n = bps_table_report(core, rows, room)
    try:
        return [(rows[i].part, rows[i].round, rows[i].n_missing) for i in range(n)]
    finally:
        free(rows)
