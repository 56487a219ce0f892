# The class Mailbox of perf.pyx.


cdef struct _Box:
    uint32_t arrived, delivered, lost, code, sleepers, word


cdef void _changed(_Box *box) noexcept nogil:
    bps_add(&box.word, 1)
    if bps_load(&box.sleepers):
        bps_wake(&box.word, 1)


cdef void _arrived(void *engine, uint32_t source, uint32_t part, uint32_t round, uint32_t flags) noexcept nogil:
    bps_add(&(<_Box *>engine).arrived, 1)
    _changed(<_Box *>engine)


cdef void _notify(void *engine, uint32_t kind, uint32_t source, uint32_t part, uint32_t round, uint32_t code,
                  uint64_t nbytes) noexcept nogil:
    cdef _Box *box = <_Box *>engine
    if kind == BPS_EVENT_DELIVERED:
        bps_add(&box.delivered, 1)
    elif kind == BPS_EVENT_LOST:
        bps_store(&box.code, code)
        bps_add(&box.lost, 1)
    _changed(box)


@cython.final
cdef class Mailbox:
    """Counts what a stream reports: pass `handle`, `arrived_address` and `notify_address` in the engine's place.

    The counts go modulo 2^32 and are those of all streams that report here. One thread waits.
    """

    cdef _Box *box
    cdef readonly uintptr_t arrived_address, notify_address

    def __cinit__(self):
        self.box = <_Box *>calloc(1, sizeof(_Box))
        if self.box == NULL:
            raise MemoryError("mailbox")
        self.arrived_address, self.notify_address = <uintptr_t>&_arrived, <uintptr_t>&_notify

    @property
    def handle(self):
        """What the hooks are called with."""
        return <uintptr_t>self.box

    @property
    def arrived(self):
        """Writes of the peer that arrived."""
        return bps_load(&self.box.arrived)

    @property
    def delivered(self):
        """Own writes that the peer's kernel acknowledged."""
        return bps_load(&self.box.delivered)

    @property
    def lost(self):
        """The errno of the connection that was lost, 0 for one that the peer closed, None while all are there."""
        return bps_load(&self.box.code) if bps_load(&self.box.lost) else None

    def wait(self, arrived, delivered, double timeout_s, double awake_s=0.0):
        """Wait until so many have *arrived* or been *delivered* (None: whatever), or a connection is lost.

        Keeps its core for the first *awake_s*. Returns whether one of that happened within *timeout_s*.
        """
        cdef _Box *box = self.box
        cdef bint heeds_arrived = arrived is not None, heeds_delivered = delivered is not None
        cdef uint32_t n_arrived = arrived if heeds_arrived else 0, n_delivered = delivered if heeds_delivered else 0
        cdef uint64_t awake_ns = _nanoseconds(awake_s), end_ns = bps_now_ns() + _nanoseconds(timeout_s), now_ns
        cdef uint32_t seen
        cdef bint happened = False
        with nogil:
            while True:
                seen = bps_load(&box.word)
                if bps_load(&box.lost) or (heeds_arrived and <int>(bps_load(&box.arrived) - n_arrived) >= 0) \
                        or (heeds_delivered and <int>(bps_load(&box.delivered) - n_delivered) >= 0):
                    happened = True
                    break
                now_ns = bps_now_ns()
                if now_ns >= end_ns:
                    break
                if not bps_wait_awake(&box.word, seen, awake_ns):
                    bps_add(&box.sleepers, 1)
                    bps_wait(&box.word, seen, end_ns - now_ns)
                    bps_add(&box.sleepers, <uint32_t>-1)
        return happened

    def __dealloc__(self):
        free(self.box)
