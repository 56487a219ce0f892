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
