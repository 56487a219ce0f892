# cython: language_level=3, binding=True
"""Port: a rank's connection to its node: announces inputs, waits for rounds, copies in and out, all without the GIL.

A rank has one port. It announces by a ring entry and a doorbell, and waits by a futex on the board word of the
partition, in slices of at most 100 ms, after which it checks the node's process, the job's state, the deadline and
Python's pending signals: a wait never outlives its deadline or its node.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memcpy

from pyx.words cimport *


#: What a wait ends with.
DONE, TIMED_OUT, ABORTED, NODE_DIED = BPS_DONE, BPS_TIMED_OUT, BPS_ABORTED, BPS_NODE_DIED
#: The status of `Port.pipelined_transfer` if ranks gave different fingerprints.
DIFFERENT = BPS_DIFFERENT
#: Flag of a chunk that is a fingerprint of the call.
FINGERPRINT = BPS_FINGERPRINT

#: Copies of tensors of at least this many bytes bypass the caches; the parts of smaller ones are still there when the
#: engine, or the rank, reads them (plain against streaming: 1 MB 0.68, 4 MB 0.6, 16 MB up to 1.9 of the time).
cdef uint64_t NONTEMPORAL_NBYTES = 16 << 20
cdef uint64_t NEVER = <uint64_t>-1


class LaneFull(TimeoutError):
    """The node lives, but has taken nothing from a full lane for too long."""


cdef extern from "copy.h":
    void bps_copy(void *, const void *, uint64_t, uint64_t) nogil


def copy(uintptr_t destination, uintptr_t source, uint64_t nbytes, uint64_t stream_nbytes=1 << 20):
    """Copy *nbytes* between two addresses without the GIL; the ranges do not overlap.

    From *stream_nbytes* on, stores bypass the caches.
    """
    with nogil:
        bps_copy(<void *>destination, <void *>source, nbytes, stream_nbytes)


cdef tuple _steps(bps_tally *tally, bps_step *last):
    """See `Port.steps`."""
    return (bps_counted(&tally.steps),
            (bps_counted(&tally.step_ns), bps_counted(&tally.step_exposed_ns),
             bps_counted(&tally.communication_ns), bps_counted(&tally.hidden_ns)),
            (last.step_ns, last.exposed_ns, last.communication_ns, last.hidden_ns))


@cython.final
cdef class Port:
    """Attach to a node through its *lane*, *board* and *doorbell* buffers and *node_pidfd*.

    The three exports are held until `close`; the descriptor stays the caller's. Any thread may call any
    method; the order of two announcements from two threads is the order in which they get here. A wait sleeps only
    after *awake_us*, or four times that while waits are short. A node that takes nothing from a full lane for
    *patience_s* is given up.

    Raises `ValueError` if a buffer is not formatted.
    """

    cdef Py_buffer lane_view, board_view, doorbell_view
    cdef bps_port port
    cdef uint64_t patience_ns
    cdef bint open

    def __cinit__(self, lane, board, doorbell, int node_pidfd, *, uint32_t awake_us=0, uint64_t trace_capacity=0,
                  uint32_t trace_first_round=1, uint32_t trace_last_round=0, double patience_s=60.0):
        cdef bps_port *port = &self.port
        pthread_mutex_init(&port.mutex, NULL)
        self.patience_ns = <uint64_t>(patience_s * 1e9)
        port.node_pidfd = node_pidfd
        bps_port_stay_awake(port, 1000 * <uint64_t>awake_us)
        PyObject_GetBuffer(lane, &self.lane_view, PyBUF_SIMPLE | PyBUF_WRITABLE)
        PyObject_GetBuffer(board, &self.board_view, PyBUF_SIMPLE)
        PyObject_GetBuffer(doorbell, &self.doorbell_view, PyBUF_SIMPLE | PyBUF_WRITABLE)
        port.lane = <bps_lane *>self.lane_view.buf
        port.board = self.board_view.buf
        port.doorbell = <bps_doorbell *>self.doorbell_view.buf
        port.capacity = bps_lane_capacity(port.lane, self.lane_view.len)
        if port.capacity == 0:
            raise ValueError(f"the lane buffer of {self.lane_view.len} bytes is no formatted lane")
        if self.board_view.len < BPS_BOARD_HEADER or (<bps_board *>port.board).magic != BPS_BOARD_MAGIC:
            raise ValueError(f"the board buffer of {self.board_view.len} bytes is no formatted board")
        if self.doorbell_view.len < <Py_ssize_t>sizeof(bps_doorbell) or port.doorbell.magic != BPS_DOORBELL_MAGIC:
            raise ValueError(f"the doorbell buffer of {self.doorbell_view.len} bytes is no formatted doorbell")
        port.n_words = <uint32_t>((self.board_view.len - BPS_BOARD_HEADER) // BPS_BOARD_STRIDE)
        if bps_trace_open(&port.records, trace_capacity, trace_first_round, trace_last_round):
            raise MemoryError(f"trace of {trace_capacity} records")
        self.open = True

    cdef int _check(self, uint32_t part, uint32_t n_parts) except -1:
        if not self.open:
            raise ValueError("this port is closed")
        if n_parts > self.port.n_words or part > self.port.n_words - n_parts:
            raise ValueError(f"partitions {part} to {part + n_parts} are beyond the board's {self.port.n_words} words")
        return 0

    def submit(self, uint32_t part, uint32_t n_parts, uint32_t round, uint16_t segment, uint64_t offset,
               bint empty=False, uint64_t nbytes=0):
        """Announce that partitions *part* to *part* + *n_parts* lie in *segment* at *offset*, or contribute nothing.

        The bytes must not change until the round is complete. *nbytes*: of all that is pushed at once; from 16 MiB on,
        sums bypass the caches, which would lose them before the rank reads them.

        Raises
        ------
        ConnectionError
            If the node died or aborted while its lane was full.
        LaneFull
            If it lives, but takes nothing.
        """
        cdef int status = BPS_INTERRUPTED
        cdef uint64_t begin_ns = bps_now_ns()
        cdef uint16_t flags = BPS_FLAG_EMPTY if empty else 0
        flags |= BPS_FLAG_NONTEMPORAL if nbytes >= NONTEMPORAL_NBYTES else 0
        self._check(part, n_parts)
        try:
            while status == BPS_INTERRUPTED:
                with nogil:
                    status = self._announce(part, n_parts, round, segment, offset, flags)
                    if status == BPS_DONE:
                        bps_record_add(&self.port.records, BPS_PUSH, 0, part, round, n_parts, begin_ns, bps_now_ns())
                self._raise(status, begin_ns)
        finally:
            bps_steps_blocked(&self.port.lane.tally, begin_ns)

    def land(self, uint32_t part, uint32_t round, uint16_t segment, uint64_t offset, uint64_t nbytes,
             uint64_t begin_ns):
        """Announce partition *part*, whose copy from a device began at *begin_ns*. As `submit`, but for threads that
        work beside the trainer's: it is not blocked.
        """
        cdef int status = BPS_INTERRUPTED
        cdef uint64_t entered_ns = bps_now_ns()
        self._check(part, 1)
        bps_record_add(&self.port.records, BPS_TO_HOST, 0, part, round, nbytes, begin_ns, entered_ns)
        while status == BPS_INTERRUPTED:
            with nogil:
                status = self._announce(part, 1, round, segment, offset, 0)
            self._raise(status, entered_ns)

    def look(self, uint32_t part, uint32_t round, double timeout_s):
        """Wait for one partition as `wait`, and as `land`: beside the trainer."""
        cdef int status = BPS_INTERRUPTED
        cdef uint64_t deadline_ns = bps_now_ns() + <uint64_t>(timeout_s * 1e9)
        self._check(part, 1)
        while status == BPS_INTERRUPTED:
            with nogil:
                status = bps_port_wait(&self.port, part, round, deadline_ns)
        return status

    def note_arrival(self, uint32_t part, uint32_t round, uint64_t nbytes, uint64_t begin_ns):
        """Note for the trace that a partition's result, whose copy began at *begin_ns*, is on a device."""
        self._check(part, 1)
        bps_record_add(&self.port.records, BPS_TO_DEVICE, 0, part, round, nbytes, begin_ns, bps_now_ns())

    def copy_in(self, uintptr_t destination, uintptr_t source, uint64_t nbytes, uint32_t part, uint64_t stride,
                uint32_t round, uint16_t segment, uint64_t offset):
        """Copy *nbytes* into the segment, *stride* bytes at a time, announcing each partition once it is whole.

        *destination* is where *segment*, *offset* is mapped here. The engine sums the first partitions while
        the last ones are still being copied. Raises as `submit`.
        """
        cdef uint64_t at = 0, piece, begin_ns = 0, entered_ns = bps_now_ns()
        cdef uint32_t i = 0
        cdef int status = BPS_DONE
        cdef bint is_nontemporal = nbytes >= NONTEMPORAL_NBYTES
        self._check(part, <uint32_t>((nbytes + stride - 1) // stride))
        try:
            while at < nbytes:
                with nogil:
                    while at < nbytes:
                        piece = min(stride, nbytes - at)
                        if status == BPS_DONE:
                            begin_ns = bps_now_ns()
                            bps_copy(<void *>(destination + at), <void *>(source + at), piece,
                                     0 if is_nontemporal else NEVER)
                            bps_record_add(&self.port.records, BPS_COPY_IN, 0, part + i, round, piece, begin_ns,
                                           bps_now_ns())
                        status = self._announce(part + i, 1, round, segment, offset + at,
                                                BPS_FLAG_NONTEMPORAL if is_nontemporal else 0)
                        if status != BPS_DONE:
                            break
                        at += piece
                        i += 1
                self._raise(status, begin_ns)
        finally:
            bps_steps_blocked(&self.port.lane.tally, entered_ns)

    cdef int _announce(self, uint32_t part, uint32_t count, uint32_t round, uint16_t segment, uint64_t offset,
                       uint16_t flags) noexcept nogil:
        cdef bps_entry entry
        entry.part, entry.count, entry.round, entry.flags = part, count, round, flags
        entry.segment, entry.offset = segment, offset
        return bps_port_announce(&self.port, &entry)

    cdef int _raise(self, int status, uint64_t begin_ns) except -1:
        """Raise what *status* of an announcement that began at *begin_ns* means, or what a signal handler raises."""
        if status == BPS_ABORTED:
            raise ConnectionError(f"the job was aborted: {self.state()[1]}")
        if status == BPS_NODE_DIED:
            raise ConnectionError("the node process of this machine is gone")
        if status == BPS_INTERRUPTED:
            PyErr_CheckSignals()
            if bps_now_ns() - begin_ns >= self.patience_ns:
                raise LaneFull(f"has taken nothing from a full lane for {self.patience_ns / 1e9:g} s: it hangs")
        return 0

    def set_rate(self, uint32_t part, uint32_t n_parts, uint32_t round, double rate):
        """Announce that inputs of these partitions are computed for learning rate *rate* from *round* on, the next one.

        Raises as `submit`.
        """
        cdef int status = BPS_INTERRUPTED
        cdef uint64_t begin_ns = bps_now_ns(), bits
        memcpy(&bits, &rate, sizeof(bits))
        self._check(part, n_parts)
        while status == BPS_INTERRUPTED:
            with nogil:
                status = self._announce(part, n_parts, round, 0, bits, BPS_FLAG_RATE)
            self._raise(status, begin_ns)

    def done(self, uint32_t part, uint32_t n_parts, uint32_t round):
        """Return whether *round* of all these partitions is complete."""
        cdef uint32_t i, redone
        self._check(part, n_parts)
        redone = bps_board_redone(self.port.board)
        for i in range(part, part + n_parts):
            if not bps_reached(bps_load(bps_board_word(self.port.board, i)), round):
                return False
        return redone == bps_board_redone(self.port.board)

    def wait(self, uint32_t part, uint32_t n_parts, uint32_t round, double timeout_s):
        """Wait until *round* of all these partitions is complete; return DONE, TIMED_OUT, ABORTED or NODE_DIED.

        Raises KeyboardInterrupt, or whatever else a Python signal handler raises, within 100 ms of the signal.
        """
        cdef int status = BPS_DONE
        cdef uint64_t entered_ns = bps_now_ns()
        cdef uint64_t deadline_ns = entered_ns + <uint64_t>(timeout_s * 1e9)
        cdef uint32_t left = n_parts, redone
        self._check(part, n_parts)
        redone = bps_board_redone(self.port.board)
        try:
            while left > 0:
                with nogil:
                    while left > 0:  # the last one first: it mostly completes last, and then one sleep was enough
                        status = bps_port_wait(&self.port, part + left - 1, round, deadline_ns)
                        if status != BPS_DONE:
                            break
                        left -= 1
                        if left == 0 and redone != bps_board_redone(self.port.board):
                            redone, left = bps_board_redone(self.port.board), n_parts  # some may have gone back
                if status == BPS_INTERRUPTED:
                    PyErr_CheckSignals()
                elif status != BPS_DONE:
                    break
        finally:
            bps_steps_blocked(&self.port.lane.tally, entered_ns)
        return status

    def deliver(self, uintptr_t destination, uintptr_t source, uint64_t nbytes, uint32_t part, uint64_t stride,
                uint32_t round, double timeout_s):
        """Wait for the partitions that *source* is made of and copy each out as soon as it is complete.

        Where the loss of a rank may make words go back, the caller has waited for the whole unit.

        *source* is the result's start (or a place inside its first partition's *stride* bytes is the caller's
        arithmetic: partition boundaries are counted from *source*). Returns as `wait` does; on anything but
        DONE the destination is partly written.
        """
        cdef int status = BPS_DONE
        cdef uint64_t entered_ns = bps_now_ns()
        cdef uint64_t deadline_ns = entered_ns + <uint64_t>(timeout_s * 1e9)
        cdef uint64_t at = 0, piece, begin_ns
        cdef uint32_t i = part
        self._check(part, <uint32_t>((nbytes + stride - 1) // stride))
        try:
            while at < nbytes:
                with nogil:
                    while at < nbytes:
                        status = bps_port_wait(&self.port, i, round, deadline_ns)
                        if status != BPS_DONE:
                            break
                        piece = min(stride, nbytes - at)
                        begin_ns = bps_now_ns()
                        bps_copy(<void *>(destination + at), <void *>(source + at), piece,
                                 0 if nbytes >= NONTEMPORAL_NBYTES else NEVER)
                        bps_record_add(&self.port.records, BPS_DELIVER, 0, i, round, piece, begin_ns, bps_now_ns())
                        at += piece
                        i += 1
                if status == BPS_INTERRUPTED:
                    PyErr_CheckSignals()
                elif status != BPS_DONE:
                    break
        finally:
            bps_steps_blocked(&self.port.lane.tally, entered_ns)
        return status

    def pipelined_transfer(self, const unsigned char[::1] chunks not None, uint32_t ahead, uint32_t n_in,
                           uint32_t n_out, double timeout_s):
        """Put in and take out all *chunks* (`pipelined_transfer.h: bps_chunk`), *n_in* and *n_out* of them before.

        Returns (status, n_in, n_out), the status as `wait` does, or DIFFERENT. Addresses in *chunks* stay valid
        meanwhile, and are not checked.

        Raises `ConnectionError` and `LaneFull` as `submit`; KeyboardInterrupt as `wait`.
        """
        cdef const bps_chunk *first
        cdef uint32_t n = <uint32_t>(chunks.shape[0] // <Py_ssize_t>sizeof(bps_chunk))
        cdef uint64_t entered_ns = bps_now_ns()
        cdef uint64_t deadline_ns = entered_ns + <uint64_t>(timeout_s * 1e9)
        cdef int status = BPS_DONE
        if n == 0:
            return status, 0, 0
        first = <const bps_chunk *>&chunks[0]
        for i in range(n):
            self._check(first[i].part, 1)
        try:
            while True:
                with nogil:
                    status = bps_pipelined_transfer(&self.port, first, n, ahead, &n_in, &n_out, deadline_ns)
                if status != BPS_INTERRUPTED:
                    break
                self._raise(status, entered_ns if n_in == n_out else bps_now_ns())
                if bps_now_ns() >= deadline_ns:
                    status = BPS_TIMED_OUT
                    break
        finally:
            bps_steps_blocked(&self.port.lane.tally, entered_ns)
        return status, n_in, n_out

    def state(self):
        """Return (0, "") while the job runs, (1, reason) once it was aborted."""
        cdef uint32_t state
        if not self.open:
            raise ValueError("this port is closed")
        state = bps_load(&(<bps_board *>self.port.board).state)
        if state == 0:
            return 0, ""
        reason = PyBytes_FromStringAndSize(<char *>self.port.board + BPS_REASON_OFFSET, BPS_REASON_NBYTES)
        return state, reason.split(b"\0", 1)[0].decode(errors="replace")

    @property
    def n_lost(self):
        """How many ranks the job has lost, and gone on without."""
        if not self.open:
            raise ValueError("this port is closed")
        return bps_load(&(<bps_board *>self.port.board).n_lost)

    @property
    def native(self):
        """The native port, for `pyx.direct`, as long as this object lives."""
        return PyCapsule_New(&self.port, "bps_port", NULL)

    def sample_from(self, uint64_t time_ns):
        """Set when `Rounds` asks for the next sample of the speed."""
        self.port.steps.sample_ns = time_ns

    def steps(self):
        """Return (number of steps, their sums, the last one); the latter each (step, exposed, communication, hidden).

        All in ns. Communication is hidden as far as it took longer than what was exposed.
        """
        if not self.open:
            raise ValueError("this port is closed")
        return _steps(&self.port.lane.tally, &self.port.steps.last)

    def note_direct(self, uint64_t begin_ns, uint64_t nbytes):
        """Note a direct call with *nbytes* of input, which has begun at *begin_ns* and is over."""
        cdef uint64_t now_ns
        if self.open:
            now_ns = bps_now_ns()
            bps_steps_result(&self.port.steps, now_ns)
            bps_count(&self.port.lane.tally.exposed_ns, now_ns - begin_ns)
            bps_count_alone(&self.port.lane.direct_calls, 1)
            bps_count_alone(&self.port.lane.direct_nbytes, nbytes)

    def count_stall(self):
        """Add one stall to what the node sees of this rank; nothing once closed."""
        if self.open:
            bps_count(&self.port.lane.tally.stalls, 1)

    def trace(self):
        """Return the records so far (`record.h`)."""
        return trace_bytes(&self.port.records)

    def close(self):
        """Release the three buffers. Idempotent; no thread may be inside another method."""
        if self.open:
            self.open = False
            self.port.lane = NULL  # so `Rounds` counts no steps any more
            PyBuffer_Release(&self.lane_view)
            PyBuffer_Release(&self.board_view)
            PyBuffer_Release(&self.doorbell_view)

    def __dealloc__(self):
        PyBuffer_Release(&self.lane_view)
        PyBuffer_Release(&self.board_view)
        PyBuffer_Release(&self.doorbell_view)
        free(self.port.records.records)
        pthread_mutex_destroy(&self.port.mutex)
