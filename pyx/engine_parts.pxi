# Helpers of engine.pyx: limits, buffers, parts and their codecs.

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
        return bell

    cdef void *board(self) except NULL:
        if (self.view.len < BPS_BOARD_HEADER + BPS_MAX_PARTS * BPS_BOARD_STRIDE
                or (<bps_board *>self.view.buf).magic != BPS_BOARD_MAGIC):
            raise ValueError(f"the buffer of {self.view.len} bytes is no formatted board")
        return self.view.buf

    def __dealloc__(self):
        PyBuffer_Release(&self.view)


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


cdef int _check_owner_change(int status, str what, str owner="here") except -1:
    """Raise ValueError if *status*, of a call about *what*, is not BPS_OWNER_CHANGED; *owner*: where none owns it."""
    if status == BPS_NOT_FROZEN:
        raise ValueError(f"{what}: only a frozen engine changes owners")
    if status == BPS_NO_PART:
        raise ValueError(f"{what}: there is no such part, or it is owned {owner}")
    if status == BPS_OTHER_ROUND:
        raise ValueError(f"{what}: it is at another round here")
    return 0
