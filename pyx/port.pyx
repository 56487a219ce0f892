# cython: language_level=3, binding=True
"""Port: a rank's end of its node: announce inputs, wait for rounds, copy in and out, all without the GIL.

A rank holds one port. Announcing is a ring entry and a doorbell; waiting is a futex on the board word of the
partition, in slices of at most 100 ms that look at the node's process, the job's state, the deadline and
Python's pending signals: a wait never outlives its deadline or its node.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport EINTR
from libc.stdint cimport uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free

from pyx.words cimport (
    BPS_BOARD_HEADER, BPS_BOARD_MAGIC, BPS_BOARD_STRIDE, BPS_COPY_IN, BPS_DELIVER, BPS_DOORBELL_MAGIC,
    BPS_FLAG_EMPTY, BPS_PUSH, BPS_REASON_NBYTES, BPS_REASON_OFFSET, BPS_WAIT, bps_add, bps_board, bps_board_time,
    bps_board_word, bps_count, bps_counted, bps_doorbell, bps_entry, bps_lane, bps_lane_capacity, bps_lane_push,
    bps_linger, bps_load, bps_now_ns, bps_reached, bps_record_add, bps_ring_doorbell, bps_tally, bps_trace,
    bps_trace_open, bps_wait, pthread_mutex_destroy, pthread_mutex_init,
    pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock,
)


cdef extern from "copy.h":
    void bps_copy(void *, const void *, uint64_t, uint64_t) nogil

cdef extern from "<poll.h>" nogil:
    struct pollfd:
        int fd
        short events, revents
    int poll(pollfd *, unsigned long, int)
    short POLLIN

cdef extern from "<sched.h>" nogil:
    int sched_yield()


#: What a wait ends with.
DONE, TIMED_OUT, ABORTED, NODE_DIED = 0, 1, 2, 3

cdef enum:
    _DONE = 0
    _TIMED_OUT = 1
    _ABORTED = 2
    _NODE_DIED = 3
    _INTERRUPTED = 4
    SLICE_NS = 100000000

#: Copies of tensors of at least this many bytes bypass the caches; the parts of smaller ones are still there when the
#: engine, or the rank, reads them (plain against streaming: 1 MB 0.68, 4 MB 0.6, 16 MB up to 1.9 of the time).
cdef uint64_t STREAM_NBYTES = 16 << 20
cdef uint64_t NEVER = <uint64_t>-1


class LaneFull(TimeoutError):
    """The node lives, but has taken nothing from a full lane for too long."""


def copy(uintptr_t destination, uintptr_t source, uint64_t nbytes):
    """Copy *nbytes* between two addresses without the GIL; the ranges do not overlap."""
    with nogil:
        bps_copy(<void *>destination, <void *>source, nbytes, 1 << 20)


@cython.final
cdef class Port:
    """Attach to a node through its *lane*, *board* and *doorbell* buffers and *node_pidfd*.

    The three exports are held until `close`; the descriptor stays the caller's. Any thread may call any
    method; the order of two announcements from two threads is the order in which they get here. A wait sleeps only
    after *awake_us*. A node that
    takes nothing from a full lane for *patience_s* is given up.

    Raises
    ------
    ValueError
        If a buffer is not formatted.
    """

    cdef Py_buffer lane_view, board_view, doorbell_view
    cdef bps_lane *lane
    cdef void *board
    cdef bps_doorbell *doorbell
    cdef uint32_t capacity, n_words
    cdef int node_pidfd
    cdef uint64_t patience_ns, awake_ns, last_result_ns
    cdef uint64_t n_steps_begun, step_begin_ns, step_begin_exposed_ns
    cdef uint64_t last_step_ns, last_exposed_ns, last_communication_ns, last_hidden_ns
    cdef bps_trace records
    cdef pthread_mutex_t mutex
    cdef bint open

    def __cinit__(self, lane, board, doorbell, int node_pidfd, *, uint32_t awake_us=0, uint64_t trace_capacity=0,
                  uint32_t trace_first_round=1, uint32_t trace_last_round=0, double patience_s=60.0):
        pthread_mutex_init(&self.mutex, NULL)
        self.node_pidfd, self.patience_ns = node_pidfd, <uint64_t>(patience_s * 1e9)
        self.awake_ns = 1000 * <uint64_t>awake_us
        PyObject_GetBuffer(lane, &self.lane_view, PyBUF_SIMPLE | PyBUF_WRITABLE)
        PyObject_GetBuffer(board, &self.board_view, PyBUF_SIMPLE)
        PyObject_GetBuffer(doorbell, &self.doorbell_view, PyBUF_SIMPLE | PyBUF_WRITABLE)
        self.lane = <bps_lane *>self.lane_view.buf
        self.board = self.board_view.buf
        self.doorbell = <bps_doorbell *>self.doorbell_view.buf
        self.capacity = bps_lane_capacity(self.lane, self.lane_view.len)
        if self.capacity == 0:
            raise ValueError(f"the lane buffer of {self.lane_view.len} bytes is no formatted lane")
        if self.board_view.len < BPS_BOARD_HEADER or (<bps_board *>self.board).magic != BPS_BOARD_MAGIC:
            raise ValueError(f"the board buffer of {self.board_view.len} bytes is no formatted board")
        if self.doorbell_view.len < <Py_ssize_t>sizeof(bps_doorbell) or self.doorbell.magic != BPS_DOORBELL_MAGIC:
            raise ValueError(f"the doorbell buffer of {self.doorbell_view.len} bytes is no formatted doorbell")
        self.n_words = <uint32_t>((self.board_view.len - BPS_BOARD_HEADER) // BPS_BOARD_STRIDE)
        if bps_trace_open(&self.records, trace_capacity, trace_first_round, trace_last_round):
            raise MemoryError(f"trace of {trace_capacity} records")
        self.open = True

    cdef int _check(self, uint32_t part, uint32_t n_parts) except -1:
        if not self.open:
            raise ValueError("this port is closed")
        if n_parts > self.n_words or part > self.n_words - n_parts:
            raise ValueError(f"partitions {part} to {part + n_parts} are beyond the board's {self.n_words} words")
        return 0

    def submit(self, uint32_t part, uint32_t n_parts, uint32_t round, uint16_t segment, uint64_t offset,
               bint empty=False):
        """Announce that partitions *part* to *part* + *n_parts* lie in *segment* at *offset*, or contribute nothing.

        The bytes must not change until the round is complete.

        Raises
        ------
        ConnectionError
            If the node died or aborted while its lane was full.
        LaneFull
            If it lives, but takes nothing.
        """
        cdef int status = _INTERRUPTED
        cdef uint64_t begin_ns = bps_now_ns()
        self._check(part, n_parts)
        while status == _INTERRUPTED:
            with nogil:
                status = self._announce(part, n_parts, round, segment, offset, BPS_FLAG_EMPTY if empty else 0)
                if status == _DONE:
                    bps_record_add(&self.records, BPS_PUSH, 0, part, round, n_parts, begin_ns, bps_now_ns())
            self._raise(status, begin_ns)
        self._blocked(begin_ns)

    def copy_in(self, uintptr_t destination, uintptr_t source, uint64_t nbytes, uint32_t part, uint64_t stride,
                uint32_t round, uint16_t segment, uint64_t offset):
        """Copy *nbytes* into the segment, *stride* bytes at a time, announcing each partition once it is whole.

        *destination* is where *segment*, *offset* is mapped here. The engine sums the first partitions while
        the last ones are still being copied. Raises as `submit`.
        """
        cdef uint64_t at = 0, piece, begin_ns = 0, entered_ns = bps_now_ns()
        cdef uint32_t i = 0
        cdef int status = _DONE
        self._check(part, <uint32_t>((nbytes + stride - 1) // stride))
        while at < nbytes:
            with nogil:
                while at < nbytes:
                    piece = min(stride, nbytes - at)
                    if status == _DONE:
                        begin_ns = bps_now_ns()
                        bps_copy(<void *>(destination + at), <void *>(source + at), piece,
                                 0 if nbytes >= STREAM_NBYTES else NEVER)
                        bps_record_add(&self.records, BPS_COPY_IN, 0, part + i, round, piece, begin_ns, bps_now_ns())
                    status = self._announce(part + i, 1, round, segment, offset + at, 0)
                    if status != _DONE:
                        break
                    at += piece
                    i += 1
            self._raise(status, begin_ns)
        self._blocked(entered_ns)

    def stream_in(self, uintptr_t window, uintptr_t source, uint64_t nbytes, uint32_t part, uint64_t stride,
                  uint32_t round, uint16_t segment, uint64_t offset, uint32_t n_slots, uint32_t begin,
                  double timeout_s):
        """As `copy_in`, but through *n_slots* partitions' worth of memory, each reused once its partition is complete.

        *window* is where *segment*, *offset* is mapped here. Begins with the unit's partition number *begin* and
        returns (DONE or TIMED_OUT, the number of partitions announced so far): with DONE all are. A full lane counts as
        waiting. Raises as `submit`, and what a signal handler raises.
        """
        cdef uint32_t i = begin
        cdef uint32_t n_parts = <uint32_t>((nbytes + stride - 1) // stride)
        cdef uint64_t slot, piece, begin_ns, entered_ns = bps_now_ns()
        cdef uint64_t deadline_ns = entered_ns + <uint64_t>(timeout_s * 1e9)
        cdef int status = _DONE
        self._check(part, n_parts)
        while i < n_parts:
            with nogil:
                while i < n_parts:
                    status = _DONE if i < n_slots else self._wait_one(part + i - n_slots, round, deadline_ns)
                    if status != _DONE:
                        break
                    slot, piece = (i % n_slots) * stride, min(stride, nbytes - i * stride)
                    begin_ns = bps_now_ns()
                    bps_copy(<void *>(window + slot), <void *>(source + i * stride), piece, NEVER)
                    bps_record_add(&self.records, BPS_COPY_IN, 0, part + i, round, piece, begin_ns, bps_now_ns())
                    status = self._announce(part + i, 1, round, segment, offset + slot, 0)
                    if status != _DONE:
                        break
                    i += 1
            if status == _INTERRUPTED:
                PyErr_CheckSignals()
                if bps_now_ns() >= deadline_ns:
                    status = _TIMED_OUT
            if status == _TIMED_OUT:
                break
            self._raise(status if status != _INTERRUPTED else _DONE, 0)
        self._blocked(entered_ns)
        return status, i

    cdef int _announce(self, uint32_t part, uint32_t count, uint32_t round, uint16_t segment, uint64_t offset,
                       uint16_t flags) noexcept nogil:
        """Put one entry on the lane; _INTERRUPTED, and nothing done, after a slice of time in which it was full."""
        cdef bps_entry entry
        cdef int status = _DONE
        entry.part, entry.count, entry.round, entry.flags = part, count, round, flags
        entry.segment, entry.offset, entry.time_ns = segment, offset, bps_now_ns()
        pthread_mutex_lock(&self.mutex)
        while bps_lane_push(self.lane, self.capacity, &entry) != 0:  # the node empties it without waiting for us
            status = self._trouble(True)
            if status == _DONE and bps_now_ns() - entry.time_ns >= SLICE_NS:
                status = _INTERRUPTED
            if status != _DONE:
                break
            bps_ring_doorbell(self.doorbell, 1)
            sched_yield()
        pthread_mutex_unlock(&self.mutex)
        bps_ring_doorbell(self.doorbell, 1)  # who takes several partitions off the lane calls the others
        return status

    cdef int _raise(self, int status, uint64_t begin_ns) except -1:
        """Raise what *status* of an announcement that began at *begin_ns* means, or what a signal handler raises."""
        if status == _ABORTED:
            raise ConnectionError(f"the job was aborted: {self.state()[1]}")
        if status == _NODE_DIED:
            raise ConnectionError("the node process of this machine is gone")
        if status == _INTERRUPTED:
            PyErr_CheckSignals()
            if bps_now_ns() - begin_ns >= self.patience_ns:
                raise LaneFull(f"has taken nothing from a full lane for {self.patience_ns / 1e9:g} s: it hangs")
        return 0

    def done(self, uint32_t part, uint32_t n_parts, uint32_t round):
        """Return whether *round* of all these partitions is complete."""
        cdef uint32_t i
        self._check(part, n_parts)
        for i in range(part, part + n_parts):
            if not bps_reached(bps_load(bps_board_word(self.board, i)), round):
                return False
        return True

    def wait(self, uint32_t part, uint32_t n_parts, uint32_t round, double timeout_s):
        """Wait until *round* of all these partitions is complete; return DONE, TIMED_OUT, ABORTED or NODE_DIED.

        Raises
        ------
        KeyboardInterrupt
            Or whatever else a Python signal handler raises, within 100 ms of the signal.
        """
        cdef int status = _DONE
        cdef uint64_t entered_ns = bps_now_ns()
        cdef uint64_t deadline_ns = entered_ns + <uint64_t>(timeout_s * 1e9)
        cdef uint32_t left = n_parts
        self._check(part, n_parts)
        while left > 0:
            with nogil:
                while left > 0:  # the last one first: it mostly completes last, and then one sleep was enough
                    status = self._wait_one(part + left - 1, round, deadline_ns)
                    if status != _DONE:
                        break
                    left -= 1
            if status == _INTERRUPTED:
                PyErr_CheckSignals()
            elif status != _DONE:
                break
        self._blocked(entered_ns)
        return status

    def deliver(self, uintptr_t destination, uintptr_t source, uint64_t nbytes, uint32_t part, uint64_t stride,
                uint32_t round, double timeout_s):
        """Wait for the partitions that *source* is made of and copy each out as soon as it is complete.

        *source* is the result's start (or a place inside its first partition's *stride* bytes is the caller's
        arithmetic: partition boundaries are counted from *source*). Returns as `wait` does; on anything but
        DONE the destination is partly written.
        """
        cdef int status = _DONE
        cdef uint64_t entered_ns = bps_now_ns()
        cdef uint64_t deadline_ns = entered_ns + <uint64_t>(timeout_s * 1e9)
        cdef uint64_t at = 0, piece, begin_ns
        cdef uint32_t i = part
        self._check(part, <uint32_t>((nbytes + stride - 1) // stride))
        while at < nbytes:
            with nogil:
                while at < nbytes:
                    status = self._wait_one(i, round, deadline_ns)
                    if status != _DONE:
                        break
                    piece = min(stride, nbytes - at)
                    begin_ns = bps_now_ns()
                    bps_copy(<void *>(destination + at), <void *>(source + at), piece,
                             0 if nbytes >= STREAM_NBYTES else NEVER)
                    bps_record_add(&self.records, BPS_DELIVER, 0, i, round, piece, begin_ns, bps_now_ns())
                    at += piece
                    i += 1
            if status == _INTERRUPTED:
                PyErr_CheckSignals()
            elif status != _DONE:
                break
        self._blocked(entered_ns)
        return status

    cdef void _blocked(self, uint64_t entered_ns) noexcept nogil:
        """Count that the caller was in here since *entered_ns*."""
        bps_count(&self.lane.tally.exposed_ns, bps_now_ns() - entered_ns)

    cdef int _complete(self, uint32_t *word) noexcept nogil:
        """Note when the round in *word*, which was waited for, was published; return _DONE."""
        cdef uint64_t published_ns = bps_counted(bps_board_time(word))
        if published_ns > self.last_result_ns:  # two threads may do this at once: one of the two times is lost
            self.last_result_ns = published_ns
        return _DONE

    cdef int _wait_one(self, uint32_t part, uint32_t round, uint64_t deadline_ns) noexcept nogil:
        """Wait for one word; _INTERRUPTED after each slice, so that the caller looks at Python's signals."""
        cdef uint32_t *word = bps_board_word(self.board, part)
        cdef uint32_t seen = bps_load(word)
        cdef uint64_t begin_ns, now_ns
        cdef int status
        if bps_reached(seen, round):
            return self._complete(word)
        begin_ns = bps_now_ns()
        if bps_linger(word, seen, self.awake_ns) and bps_reached(bps_load(word), round):
            bps_record_add(&self.records, BPS_WAIT, 0, part, round, 0, begin_ns, bps_now_ns())
            return self._complete(word)
        while True:
            status = self._trouble(False)
            if status != _DONE:
                return status
            now_ns = bps_now_ns()
            if now_ns >= deadline_ns:
                return _TIMED_OUT
            bps_add(&self.lane.sleepers, 1)
            seen = bps_load(word)
            status = 0
            if not bps_reached(seen, round):
                status = bps_wait(word, seen, min(<uint64_t>SLICE_NS, deadline_ns - now_ns))
            bps_add(&self.lane.sleepers, <uint32_t>-1)
            if bps_reached(bps_load(word), round):
                bps_record_add(&self.records, BPS_WAIT, 0, part, round, 0, begin_ns, bps_now_ns())
                return self._complete(word)
            if status == EINTR or bps_now_ns() - now_ns >= SLICE_NS // 2:
                status = self._trouble(True)
                return _INTERRUPTED if status == _DONE else status

    cdef int _trouble(self, bint look_at_node) noexcept nogil:
        """_ABORTED or _NODE_DIED if the job is over. The node's process costs a system call to look at."""
        cdef pollfd node
        if bps_load(&(<bps_board *>self.board).state) != 0:
            return _ABORTED
        if look_at_node and self.node_pidfd >= 0:
            node.fd, node.events, node.revents = self.node_pidfd, POLLIN, 0
            if poll(&node, 1, 0) == 1:
                return _NODE_DIED
        return _DONE

    def state(self):
        """Return (0, "") while the job runs, (1, reason) once it was aborted."""
        cdef uint32_t state
        if not self.open:
            raise ValueError("this port is closed")
        state = bps_load(&(<bps_board *>self.board).state)
        if state == 0:
            return 0, ""
        reason = PyBytes_FromStringAndSize(<char *>self.board + BPS_REASON_OFFSET, BPS_REASON_NBYTES)
        return state, reason.split(b"\0", 1)[0].decode(errors="replace")

    def next_step(self):
        """End the step that goes on and begin the next; return the time in ns. Nothing, and 0, once closed.

        The first step is not counted. One thread at a time: the GIL is held, so `close` cannot come in between.
        """
        cdef bps_tally *tally
        cdef uint64_t now_ns = bps_now_ns(), exposed_ns
        if not self.open:
            return 0
        tally = &self.lane.tally
        exposed_ns = bps_counted(&tally.exposed_ns)
        if self.n_steps_begun > 1:
            self.last_step_ns = now_ns - self.step_begin_ns
            self.last_exposed_ns = min(exposed_ns - self.step_begin_exposed_ns, self.last_step_ns)
            self.last_communication_ns = max(self.last_result_ns, self.step_begin_ns) - self.step_begin_ns
            self.last_hidden_ns = self.last_communication_ns - min(self.last_communication_ns, self.last_exposed_ns)
            bps_count(&tally.step_ns, self.last_step_ns)
            bps_count(&tally.step_exposed_ns, self.last_exposed_ns)
            bps_count(&tally.communication_ns, self.last_communication_ns)
            bps_count(&tally.hidden_ns, self.last_hidden_ns)
            bps_count(&tally.steps, 1)
        self.n_steps_begun += 1
        self.step_begin_ns, self.step_begin_exposed_ns = now_ns, exposed_ns
        return now_ns

    def steps(self):
        """Return (number of steps, their sums, the last one); the latter each (step, exposed, communication, hidden).

        All in ns. Communication is hidden as far as it took longer than what was exposed.
        """
        cdef bps_tally *tally
        if not self.open:
            raise ValueError("this port is closed")
        tally = &self.lane.tally
        return (bps_counted(&tally.steps),
                (bps_counted(&tally.step_ns), bps_counted(&tally.step_exposed_ns),
                 bps_counted(&tally.communication_ns), bps_counted(&tally.hidden_ns)),
                (self.last_step_ns, self.last_exposed_ns, self.last_communication_ns, self.last_hidden_ns))

    def count_stall(self):
        """Add one stall to what the node sees of this rank; nothing once closed."""
        if self.open:
            bps_count(&self.lane.tally.stalls, 1)

    def trace(self):
        """Return the records so far (`record.h`)."""
        return PyBytes_FromStringAndSize(<char *>self.records.records,
                                         <Py_ssize_t>(32 * min(self.records.used, self.records.capacity)))

    def close(self):
        """Let go of the three buffers. Idempotent; no thread may be inside another method."""
        if self.open:
            self.open = False
            PyBuffer_Release(&self.lane_view)
            PyBuffer_Release(&self.board_view)
            PyBuffer_Release(&self.doorbell_view)

    def __dealloc__(self):
        PyBuffer_Release(&self.lane_view)
        PyBuffer_Release(&self.board_view)
        PyBuffer_Release(&self.doorbell_view)
        free(self.records.records)
        pthread_mutex_destroy(&self.mutex)
