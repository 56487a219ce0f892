# cython: language_level=3, binding=True
"""Direct sums: the ranks of one machine sum their inputs themselves, in shared memory, without their node (`direct.h`).

A `Channel` carries out the calls of a group, which follow each other. A `DirectTensor` is one tensor that is summed
again and again, with a channel of its own; its rounds are counted by `Rounds`, as those of every tensor.
"""
import functools

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.exc cimport PyErr_CheckSignals, PyErr_Clear
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.stdint cimport UINT64_MAX, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

from pyx.words cimport (
    BPS_DIRECT, bps_count, bps_count_alone, bps_counted, bps_load, bps_now_ns, bps_port, bps_reached, bps_record_add,
    bps_steps_next, bps_steps_result
)

cdef extern from "Python.h":
    ctypedef struct PyThreadState:
        pass
    PyThreadState *PyEval_SaveThread() nogil
    void PyEval_RestoreThread(PyThreadState *) nogil

cdef extern from "tensor_memory.h" nogil:
    struct bps_dl_tensor:
        void *data
        int ndim
        uint8_t code, bits
        uint16_t lanes
        int64_t *shape
        uint64_t byte_offset
    struct bps_dl_exchange:
        uint32_t major
        int (*view)(void *, bps_dl_tensor *)
    const char *BPS_DL_NAME
    int bps_dl_is(const bps_dl_tensor *, uint8_t, uint8_t, const int64_t *, int)
    struct bps_array_dtype:
        pass
    struct bps_array:
        char *data
        bps_array_dtype *dtype
    enum: BPS_ARRAY_C_CONTIGUOUS, BPS_ARRAY_WRITEABLE
    int bps_array_is(const bps_array *, const bps_array_dtype *, const int64_t *, int, int)

cdef extern from "direct.h" nogil:
    ctypedef void (*bps_sum_kernel)(void *)
    struct bps_doorbell:
        uint64_t waiting
    struct bps_direct_line:
        uint32_t published, reduced
    struct bps_separation:
        int few
    struct bps_direct_port:
        const void *board
        int n, me, node_pidfd, is_crowded
        uint64_t awake_ns
        uint64_t *waiting
        const uint32_t *awaited
        uint32_t want
        int awaited_rank
        bps_separation separation
    struct bps_direct_call:
        uint64_t deadline_ns, slice_ns
        void *(*release)() noexcept
        void (*take)(void *) noexcept
        int (*check)(void *) noexcept
        void *context
        int n_waits
    struct bps_channel:
        bps_direct_port port
        bps_direct_line *lines
        uint64_t cell_nbytes
        uint32_t chunks, calls
    struct bps_channel_layout:
        uint64_t nbytes
    struct bps_direct_sum:
        bps_sum_kernel kernel
        int64_t divisor
        uint64_t call
    enum: BPS_DIRECT_DONE, BPS_DIRECT_TIMED_OUT, BPS_DIRECT_ABORTED, BPS_DIRECT_NODE_DIED
    enum: BPS_DIRECT_DIFFERENT, BPS_DIRECT_RAISED, BPS_DIRECT_DECLINED, BPS_DIRECT_CHUNK, BPS_SUM_RANKS
    bps_channel_layout bps_direct_layout(int, uint64_t)
    uint64_t bps_channel_head(int)
    void bps_channel_format(void *, int, uint32_t)
    void bps_channel_open(bps_channel *, void *, uint64_t)
    int bps_direct_all_reduce(bps_channel *, char *, const char *, uint64_t, const bps_direct_sum *, bps_direct_call *)
    void bps_direct_prepare(const bps_channel *, uint64_t)
    void bps_direct_decline(bps_channel *, uint64_t)
    int bps_direct_broadcast(bps_channel *, int, char *, uint64_t, uint64_t, bps_direct_call *)
    int bps_direct_all_gather(bps_channel *, char **, const char *, const uint64_t *, uint64_t, bps_direct_call *)
    struct bps_direct_pieces:
        const char *from_ "from"[64]
        char *to[64]
        uint64_t given[64]
        uint64_t wanted[64]
        uint64_t offered[64]
    int bps_direct_all_to_all(bps_channel *, bps_direct_pieces *, uint64_t, bps_direct_call *)
    int bps_direct_barrier(bps_channel *, uint64_t, bps_direct_call *)
    int bps_sum_level()
    bps_sum_kernel bps_sum_kernel_of(int, int, int)
    void bps_look_whether_few(bps_separation *)

#: What a call ends with.
DONE, TIMED_OUT, ABORTED, NODE_DIED = BPS_DIRECT_DONE, BPS_DIRECT_TIMED_OUT, BPS_DIRECT_ABORTED, BPS_DIRECT_NODE_DIED
#: The ranks do not make the same call.
DIFFERENT = BPS_DIRECT_DIFFERENT
#: A rank does not take part (`DirectTensor.decline`).
DECLINED = BPS_DIRECT_DECLINED
#: The most ranks that sum directly.
MOST_RANKS = BPS_SUM_RANKS
#: A channel for so many bytes takes any number.
ANY_NBYTES = 4 * BPS_DIRECT_CHUNK
#: The order of dtypes and operations in kernels' numbers.
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8")
OPS = ("sum", "product", "min", "max", "band", "bor", "bxor")
#: DLPack's type codes (kDLInt, kDLUInt, kDLFloat, kDLBfloat) and bits of dtypes.
CODES = {"float32": 2, "float64": 2, "float16": 2, "bfloat16": 4, "int8": 0, "int16": 0, "int32": 0, "int64": 0,
         "uint8": 1}
NBITS = {"float32": 32, "float64": 64, "float16": 16, "bfloat16": 16, "int8": 8, "int16": 16, "int32": 32, "int64": 64,
         "uint8": 8}
_NAMES = {(CODES[name], NBITS[name]): name for name in DTYPES}
#: The instruction sets that sums are compiled for, and the one that this processor gets.
LEVELS = ("base", "avx2", "avx512")

#: In place of the number of a partition: a group's calls have none, and are not traced.
NO_PART_OF_GROUPS = 0xffffffff
cdef uint32_t NO_PART = 0xffffffff
#: While pushes of other tensors are deferred, a wait looks as often whether they can begin.
cdef uint64_t DEFERRED_SLICE_NS = 2000000
#: A call whose timeout is not read yet looks after so long.
cdef uint64_t FIRST_LOOK_NS = 1000000
#: By which the number of a call of a group changes what says which call it is (`collectives.machine_channel`).
CALL_FACTOR_OF_GROUPS = 0xD1B54A32D192ED03
cdef uint64_t CALL_FACTOR = 0xD1B54A32D192ED03
#: Calls of at most so many bytes keep the GIL while nobody has to be waited for: releasing it costs more than they do.
cdef uint64_t KEEPS_GIL_NBYTES = 64 << 10

#: Reading the clock takes a tenth of the time of a small call, so not all of them are timed.
cdef uint64_t SAMPLED_NBYTES = 4096, N_SAMPLED = 8


def level():
    """Return the name of the instruction set that this processor gets."""
    return LEVELS[bps_sum_level()]


def channel_nbytes(int n_ranks, uint64_t most_nbytes):
    """Return the bytes of shared memory of a channel for sums of at most *most_nbytes* among *n_ranks*.

    Raises
    ------
    ValueError
        If so many ranks cannot sum directly.
    """
    _require_ranks(n_ranks)
    return bps_direct_layout(n_ranks, most_nbytes).nbytes


def format_channel(uintptr_t address, int n_ranks, uint32_t first=0):
    """Make the memory at *address* a channel of *n_ranks*, whose chunks are numbered from *first* + 1 on.

    Once, before a rank opens it; `channel_nbytes` of memory lie there.
    """
    _require_ranks(n_ranks)
    bps_channel_format(<void *>address, n_ranks, first)


cdef int _require_ranks(int n_ranks) except -1:
    if not 1 <= n_ranks <= BPS_SUM_RANKS:
        raise ValueError(f"{n_ranks} ranks: between 1 and {BPS_SUM_RANKS} sum directly")
    return 0


cdef uint64_t _after(uint64_t now_ns, double timeout_s) noexcept:
    """Return the time *timeout_s* after *now_ns*; thirty years are as good as for ever."""
    return now_ns + <uint64_t>(min(max(timeout_s, 0.0), 1e9) * 1e9)


cdef void *_release() noexcept nogil:
    return PyEval_SaveThread()


cdef void _take(void *state) noexcept nogil:
    PyEval_RestoreThread(<PyThreadState *>state)


cdef int _check(void *context) noexcept with gil:
    """Run Python's signal handlers, and what the caller of the call looks at; whether one has raised."""
    cdef Channel channel = <Channel>context
    try:
        PyErr_CheckSignals()
        if channel.look is not None:
            channel.look()
    except BaseException as exc:
        channel.raised = exc
        return 1
    return 0


@cython.final
cdef class Channel:
    """A formatted channel in shared *memory*, as rank *me* of *n_ranks* uses it, for sums of at most *most_nbytes*.

    All ranks make the same calls in the same order. Any thread, one call at a time. All calls return how they ended:
    `DONE`, `TIMED_OUT` after *timeout_s* seconds, `ABORTED` or `NODE_DIED` if the job is over, or `DIFFERENT` if
    another rank makes another call; the number *what* and the bytes say which call it is. After anything but `DONE`
    the destination is partly written, and the channel cannot be used any more. A call that waits calls *look* about
    every tenth of a second, if that is not None; an exception of it, or of a signal handler, ends the call.

    Parameters
    ----------
    board
        The node's board, whose state ends waits; None: nothing but deadlines does.
    doorbell
        The node's doorbell, in which ranks note on which CPUs they wait awake; None: they do not move apart.
    node_pidfd
        The node's process; -1: none is watched.
    awake_us
        How long a wait yields the CPU before it sleeps.
    is_crowded
        Ranks share CPUs: nobody spins.

    Raises
    ------
    ValueError
        If *memory* is too small (`channel_nbytes`), or *me* is no rank.
    """

    cdef Py_buffer view, board_view, doorbell_view
    cdef bps_channel channel
    cdef uint64_t most
    cdef object look, raised
    cdef bint open
    #: Whether a call is under way.
    cdef readonly bint busy
    #: No call begins any more: the session is being closed, or this process is a fork of the rank's.
    cdef public bint refuses
    #: A call has failed, so the ranks are out of step: none begins any more.
    cdef readonly bint is_broken
    #: Waits that were not over after a few spins.
    cdef readonly uint64_t n_waits

    def __cinit__(self, memory not None, int n_ranks, int me, uint64_t most_nbytes, *, board=None, doorbell=None,
                  int node_pidfd=-1, uint32_t awake_us=200, bint is_crowded=False):
        cdef bps_direct_port *port = &self.channel.port
        need = channel_nbytes(n_ranks, most_nbytes)
        if not 0 <= me < n_ranks:
            raise ValueError(f"rank {me} of {n_ranks}")
        PyObject_GetBuffer(memory, &self.view, PyBUF_WRITABLE)
        if <uint64_t>self.view.len < need:
            raise ValueError(f"{self.view.len} bytes for a channel of {n_ranks} ranks, which needs {need}")
        if board is not None:
            PyObject_GetBuffer(board, &self.board_view, PyBUF_SIMPLE)
            port.board = self.board_view.buf
        if doorbell is not None:
            PyObject_GetBuffer(doorbell, &self.doorbell_view, PyBUF_WRITABLE)
            port.waiting = &(<bps_doorbell *>self.doorbell_view.buf).waiting
        port.n, port.me, port.node_pidfd = n_ranks, me, node_pidfd
        port.awake_ns = <uint64_t>awake_us * 1000
        port.is_crowded = is_crowded
        bps_look_whether_few(&port.separation)
        self.most = most_nbytes
        bps_channel_open(&self.channel, self.view.buf, most_nbytes)
        self.open = True

    @property
    def cell_nbytes(self):
        """The most bytes of a rank that go through a cell."""
        return self.channel.cell_nbytes

    cdef int _begin(self, bps_direct_call *call, uint64_t deadline_ns, object look, bint keeps_gil) except -1:
        if not self.open or self.refuses:
            raise ValueError("this channel is closed")
        if self.busy or self.is_broken:
            raise RuntimeError("another thread uses this channel" if self.busy else
                               "a call in this channel has failed, so its ranks are out of step")
        memset(call, 0, sizeof(bps_direct_call))
        call.deadline_ns = deadline_ns
        call.check, call.context = _check, <void *>self
        if keeps_gil:
            call.release, call.take = _release, _take
        self.look = look
        self.busy = True
        return 0

    cdef int _end(self, bps_direct_call *call, int status) except -1:
        self.busy = False
        self.n_waits += call.n_waits
        self.look = None
        self.is_broken = status != BPS_DIRECT_DONE and status != BPS_DIRECT_DECLINED
        if status == BPS_DIRECT_RAISED:
            raised, self.raised = self.raised, None
            raise raised
        return status

    cdef int _require(self, uint64_t nbytes) except -1:
        if nbytes > self.most and self.most <= BPS_DIRECT_CHUNK:
            raise ValueError(f"{nbytes} bytes in a channel for {self.most}")
        return 0

    def all_reduce(self, uintptr_t destination, uintptr_t source, uint64_t nbytes, int dtype, int op, int64_t divisor,
                   uint64_t what, double timeout_s, look=None):
        """Combine *nbytes* at *source* of all ranks, divide by *divisor*, and write the result to *destination*.

        *destination* is *source* or does not overlap it; 0: this rank needs no result. *dtype* and *op*: their places
        in `DTYPES` and `OPS`.

        Raises
        ------
        ValueError
            If there is no such sum, or too many bytes.
        RuntimeError
            If another thread is in a call, or a call has failed.
        """
        cdef bps_direct_sum sum
        cdef bps_direct_call call
        cdef int status
        cdef bint keeps_gil = nbytes <= KEEPS_GIL_NBYTES
        self._require(nbytes)
        sum.kernel, sum.divisor, sum.call = bps_sum_kernel_of(dtype, op, bps_sum_level()), divisor, what
        if sum.kernel == NULL:
            raise ValueError(f"there is no sum of dtype {dtype} by op {op}")
        self._begin(&call, _after(bps_now_ns(), timeout_s), look, keeps_gil)
        if keeps_gil:
            status = bps_direct_all_reduce(&self.channel, <char *>destination, <const char *>source, nbytes, &sum,
                                           &call)
        else:
            with nogil:
                status = bps_direct_all_reduce(&self.channel, <char *>destination, <const char *>source, nbytes, &sum,
                                               &call)
        return self._end(&call, status)

    def broadcast(self, int root, uintptr_t address, uint64_t nbytes, uint64_t what, double timeout_s, look=None):
        """Copy *nbytes* at *address* of rank *root* to *address* of the others; 0: a rank that does not need them.

        Raises as `all_reduce`.
        """
        cdef bps_direct_call call
        cdef int status
        cdef bint keeps_gil = nbytes <= KEEPS_GIL_NBYTES
        if not 0 <= root < self.channel.port.n:
            raise ValueError(f"root {root} of {self.channel.port.n} ranks")
        self._begin(&call, _after(bps_now_ns(), timeout_s), look, keeps_gil)
        if keeps_gil:
            status = bps_direct_broadcast(&self.channel, root, <char *>address, nbytes, what, &call)
        else:
            with nogil:
                status = bps_direct_broadcast(&self.channel, root, <char *>address, nbytes, what, &call)
        return self._end(&call, status)

    def all_gather(self, addresses, sizes, uintptr_t own, uint64_t what, double timeout_s, look=None):
        """Copy *sizes[r]* bytes, at most `cell_nbytes`, at *own* of each rank r to *addresses[r]* of all (0: to none).

        Raises as `all_reduce`.
        """
        cdef bps_direct_call call
        cdef char *places[64]
        cdef uint64_t nbytes[64]
        cdef int status, n = self.channel.port.n
        for r in range(n):
            places[r], nbytes[r] = <char *><uintptr_t>addresses[r], sizes[r]
            if nbytes[r] > self.channel.cell_nbytes:
                raise ValueError(f"{nbytes[r]} bytes in cells of {self.channel.cell_nbytes}")
        self._begin(&call, _after(bps_now_ns(), timeout_s), look, True)
        status = bps_direct_all_gather(&self.channel, places, <const char *>own, nbytes, what, &call)
        return self._end(&call, status)

    def all_to_all(self, sources, destinations, list offered, uint64_t what, double timeout_s, look=None):
        """Copy *sources[r]* of this rank to rank r, and what each rank r has for this one to *destinations[r]*.

        Both are pairs of an address and a number of bytes. *offered* gets how many bytes each rank has for this one;
        if that is not what its destination takes, nothing is copied there. In a channel for `ANY_NBYTES`. Raises as
        `all_reduce`.
        """
        cdef bps_direct_call call
        cdef bps_direct_pieces pieces
        cdef int status, n = self.channel.port.n
        cdef bint keeps_gil
        cdef uint64_t nbytes = 0
        if self.most <= BPS_DIRECT_CHUNK:
            raise ValueError(f"this channel is for sums of {self.most} bytes")
        for r in range(n):
            pieces.from_[r], pieces.given[r] = <const char *><uintptr_t>sources[r][0], sources[r][1]
            pieces.to[r], pieces.wanted[r] = <char *><uintptr_t>destinations[r][0], destinations[r][1]
            nbytes += pieces.given[r] + pieces.wanted[r]
        keeps_gil = nbytes <= KEEPS_GIL_NBYTES
        self._begin(&call, _after(bps_now_ns(), timeout_s), look, keeps_gil)
        if keeps_gil:
            status = bps_direct_all_to_all(&self.channel, &pieces, what, &call)
        else:
            with nogil:
                status = bps_direct_all_to_all(&self.channel, &pieces, what, &call)
        if self._end(&call, status) == BPS_DIRECT_DONE:
            offered[:] = [pieces.offered[r] for r in range(n)]
        return status

    def barrier(self, uint64_t what, double timeout_s, look=None):
        """Wait until all ranks call this. Raises as `all_reduce`."""
        cdef bps_direct_call call
        self._begin(&call, _after(bps_now_ns(), timeout_s), look, True)
        cdef int status = bps_direct_barrier(&self.channel, what, &call)
        return self._end(&call, status)

    def missing(self):
        """Return the ranks that are not as far as this one in the last call, or for which it still waits."""
        cdef bps_direct_port *port = &self.channel.port
        cdef bps_direct_line *own
        cdef int r
        if not self.open:
            raise ValueError("this channel is closed")
        own = &self.channel.lines[port.me]
        behind = [r for r in range(port.n)
                  if not bps_reached(bps_load(&self.channel.lines[r].published), own.published)]
        if (port.awaited != NULL and not bps_reached(bps_load(<uint32_t *>port.awaited), port.want)
                and port.awaited_rank not in behind):
            behind.append(port.awaited_rank)
        return tuple(sorted(behind))

    def close(self):
        """Release the buffers. Idempotent; no thread may be in a call."""
        if self.open:
            self.open = False
            PyBuffer_Release(&self.view)
            PyBuffer_Release(&self.board_view)
            PyBuffer_Release(&self.doorbell_view)

    def __dealloc__(self):
        PyBuffer_Release(&self.view)
        PyBuffer_Release(&self.board_view)
        PyBuffer_Release(&self.doorbell_view)


@cython.final
cdef class Rounds:
    """The rounds of one tensor or unit, as this rank counts them. Any thread; each call is one step under the GIL.

    Parameters
    ----------
    port
        The rank's port, or None: no steps are counted. A step of the rank begins when a unit is pushed again that was
        pushed in the present one.
    last
        The round before the first; rounds count modulo 2^32.
    sample
        Called with the time when a sample of the speed is due (`Port.sample_from`); None: never.
    """

    cdef object port, sample
    cdef bps_port *native
    cdef uint64_t step
    #: How many were begun, modulo 2^32.
    cdef readonly uint32_t n_begun
    #: The last round that was begun, and whether it is not finished. Nodes count rounds, too, so those that are summed
    #: directly do not count.
    cdef readonly uint32_t round
    cdef readonly bint in_flight
    #: Whether a round was ever begun.
    cdef readonly bint has_begun
    #: No round begins any more.
    cdef public bint is_retired
    #: Bytes of input in all rounds.
    cdef readonly uint64_t pushed_nbytes

    def __cinit__(self, port, uint32_t last, sample=None):
        if port is not None:
            self.native = <bps_port *>PyCapsule_GetPointer(port.native, "bps_port")
        self.port, self.sample, self.round = port, sample, last

    cdef int _begin(self, uint64_t nbytes, uint64_t now_ns) except -1:
        """Begin the next round; return whether it could begin."""
        if self.in_flight or self.is_retired:
            return 0
        if self.native != NULL and self.native.lane != NULL:
            if self.step == self.native.steps.n_begun:
                bps_steps_next(&self.native.steps, &self.native.lane.tally, now_ns)
            self.step = self.native.steps.n_begun
        self.in_flight = self.has_begun = True
        self.round += 1
        self.n_begun += 1
        self.pushed_nbytes += nbytes
        return 1

    cdef int _sample(self, uint64_t now_ns) except -1:
        """Take a sample of the speed, if one is due. Other threads run meanwhile, so no round is to be under way."""
        if self.native != NULL and now_ns >= self.native.steps.sample_ns and self.sample is not None:
            self.sample(now_ns)
        return 0

    cdef int _summed_directly(self, uint64_t now_ns) except -1:
        """Finish the round, of which no node knows."""
        self.round -= 1
        self.in_flight = False
        self._sample(now_ns)
        return 0

    def begin(self, uint64_t nbytes):
        """Begin the next round, with *nbytes* of input, and return it; None if the last one is not finished, or after
        the end.
        """
        return self.round if self._begin(nbytes, bps_now_ns()) else None

    def finish(self, uint32_t round):
        """Note that *round* was waited for: the next one may begin. Nothing if it is not the last one."""
        if round == self.round:
            self.in_flight = False
            self._sample(bps_now_ns())

    def follow(self, Rounds other not None):
        """Count as begun in the step in which *other* was: this unit takes its place."""
        self.step = other.step


cdef inline uint64_t _note(bps_port *port, uint32_t part, uint32_t round, uint64_t nbytes, uint64_t began_ns,
                           const bps_direct_call *call, bint is_direct):
    """Note a call that is over: as blocking the trainer, and for node and trace if it *is_direct*; return about when.

    Of small calls that did not wait one in `N_SAMPLED` is timed, and stands for the others.
    """
    cdef uint64_t end_ns = began_ns, weight = 1
    if port.lane == NULL:
        return bps_now_ns()
    if nbytes <= SAMPLED_NBYTES and call.n_waits == 0 and is_direct and port.records.records == NULL:
        weight = N_SAMPLED if bps_counted(&port.lane.direct_calls) % N_SAMPLED == 0 else 0
    if weight != 0:
        end_ns = bps_now_ns()
        bps_count(&port.lane.tally.exposed_ns, weight * (end_ns - began_ns))
    if is_direct:
        if part != NO_PART:
            bps_record_add(&port.records, BPS_DIRECT, 0, part, round, nbytes, began_ns, end_ns)
        bps_steps_result(&port.steps, end_ns)
        bps_count_alone(&port.lane.direct_calls, 1)
        bps_count_alone(&port.lane.direct_nbytes, nbytes)
    return end_ns


@cython.final
cdef class DirectTensor:
    """One tensor that the ranks of a machine sum directly, with all that a repeated call checks and counts, in C.

    A round is summed directly if all ranks do that; a rank that pushes its input to the node instead declines, and the
    others then do the same. So ranks may use any form of push_pull in any round.

    Parameters
    ----------
    channel, rounds
        The tensor's own, which nothing else uses; see there.
    port
        The rank's port.
    waits
        What looks at other things while a call waits, and raises the error of one that fails: `look(began_ns)`,
        `end(outcome, began_ns)`, `failed(exception)`, `refusal()`, `start_deferred()`, `sum_by_node(round, source,
        destination, timeout_s)`; `timeout_s()`: that of the present call, of which few need to know it.
    deferred
        The rank's deferred pushes: not empty means that others may wait for one.
    part
        The tensor's first partition, in traces.
    dtype, nbytes, divisor
        What is summed, and by what the sum is divided.

    Raises
    ------
    ValueError
        If tensors of *dtype* cannot be summed.
    """

    cdef Channel channel
    cdef Rounds rounds
    cdef bps_port *native
    cdef object port, waits, deferred, look
    cdef bps_direct_sum sum
    cdef bps_direct_call *call
    cdef uint64_t nbytes, began_ns
    cdef uint32_t part
    cdef bint has_looked
    #: Calls that were summed directly, and those in which a rank declined.
    cdef readonly uint64_t n_sums, n_declined

    def __cinit__(self, Channel channel not None, Rounds rounds not None, port, waits, dict deferred not None,
                  uint32_t part, str dtype, uint64_t nbytes, int64_t divisor):
        self.channel, self.rounds, self.port, self.waits, self.deferred = channel, rounds, port, waits, deferred
        self.native = <bps_port *>PyCapsule_GetPointer(port.native, "bps_port")
        self.part, self.nbytes = part, nbytes
        self.sum.kernel = bps_sum_kernel_of(DTYPES.index(dtype), 0, bps_sum_level())
        self.sum.divisor, self.sum.call = divisor, 1
        channel._require(nbytes)
        self.look = self._looks

    def _looks(self):
        if self.call.deadline_ns == UINT64_MAX:
            self.call.deadline_ns = _after(self.began_ns, self.waits.timeout_s())
            self.call.slice_ns = DEFERRED_SLICE_NS if self.deferred else 0
            return
        self.has_looked = True
        self.waits.look(self.began_ns)

    def begin(self, uint64_t nbytes):
        """As `Rounds.begin`, for a round whose input this rank pushes to the node: it declines."""
        if (self.channel.refuses or self.channel.is_broken or not self.channel.open
                or not self.rounds._begin(nbytes, bps_now_ns())):
            return None
        bps_direct_decline(&self.channel.channel, self.nbytes)
        return self.rounds.round

    def all_reduce(self, uintptr_t source, uintptr_t destination):
        """Sum the tensor at *source* of all ranks into *destination*, which is the same memory or does not overlap it.

        Raises
        ------
        BusyError, ClosedError, StallError, PeerLostError
            As `Unit.push` and `Unit.wait`. The round, and with it the name, is then lost to all ranks, and
            *destination* is partly written.
        """
        self._sum(<char *>destination, <char *>source)

    cdef int _sum(self, char *destination, char *source) except -1:
        cdef bps_direct_call call
        cdef Channel channel = self.channel
        cdef bint keeps_gil = self.nbytes <= KEEPS_GIL_NBYTES
        cdef uint64_t now_ns = 0, began_ns = bps_now_ns()
        cdef int status
        if self.deferred:
            self.waits.start_deferred()
        if channel.refuses or channel.is_broken or not self.rounds._begin(self.nbytes, began_ns):
            raise self.waits.refusal()
        self.began_ns, self.has_looked = began_ns, False
        try:
            if channel.refuses:  # since other threads have run
                raise self.waits.refusal()
            channel._begin(&call, UINT64_MAX, self.look, keeps_gil)
            call.slice_ns, self.call = FIRST_LOOK_NS, &call
            if keeps_gil:
                status = bps_direct_all_reduce(&channel.channel, destination, source, self.nbytes, &self.sum, &call)
            else:
                with nogil:
                    status = bps_direct_all_reduce(&channel.channel, destination, source, self.nbytes, &self.sum, &call)
            channel._end(&call, status)
            now_ns = _note(self.native, self.part, self.rounds.n_begun, self.nbytes, began_ns, &call,
                           status == BPS_DIRECT_DONE)
            if self.has_looked or (status != BPS_DIRECT_DONE and status != BPS_DIRECT_DECLINED):
                self.waits.end(status, began_ns)
        except BaseException as exc:
            self.waits.failed(exc)
            raise
        if status == BPS_DIRECT_DECLINED:
            self.n_declined += 1
            self.waits.sum_by_node(self.rounds.round, <uintptr_t>source, <uintptr_t>destination,
                                   max(0.0, self.waits.timeout_s() - (now_ns - began_ns) / 1e9))
            return 0
        self.n_sums += 1
        return self.rounds._summed_directly(now_ns)


cdef const bps_dl_exchange *_exchange(kind) except NULL:
    """Return the DLPack exchange table of a type of tensors; raises TypeError if it has none that we can read."""
    table = getattr(kind, "__dlpack_c_exchange_api__", None)
    if table is None or not hasattr(kind, "is_neg") or not PyCapsule_IsValid(table, BPS_DL_NAME):
        raise TypeError(f"{kind} is no type of tensors of torch with a DLPack exchange table")
    cdef const bps_dl_exchange *found = <const bps_dl_exchange *>PyCapsule_GetPointer(table, BPS_DL_NAME)
    if found.major != 1 or found.view == NULL:
        raise TypeError(f"{kind} has an exchange table of DLPack {found.major}; supported is 1")
    return found


@cython.final
cdef class DirectPush:
    """push_pull of a tensor with objects like the first one, *like*: NumPy arrays, or tensors of torch on the CPU.

    Arguments that differ from the first ones are left to Python, which checks them. Any thread.

    Parameters
    ----------
    tensor
        What is summed.
    is_array
        *like* is an array of NumPy, and of no class derived from that.
    dtype, shape
        Those of the tensor; *dtype* is one of `DTYPES`.
    average, priority
        The arguments of the first call.
    shared
        (first address, address after the last one) of the shared memory in which the first input lay; sums of inputs
        there go to arrays of this object. (0, 0): it lay elsewhere.

    Raises
    ------
    TypeError
        If objects of that type have to be read by Python.
    """

    cdef DirectTensor tensor
    cdef object kind
    cdef const bps_dl_exchange *exchange
    cdef uint8_t code, bits
    cdef object dtype
    cdef int64_t shape[8]
    cdef int ndim
    cdef object average, priority
    cdef uintptr_t shared_begin, shared_end
    cdef list results, views
    cdef int parity

    def __cinit__(self, DirectTensor tensor not None, like, bint is_array, str dtype, tuple shape, average, priority,
                  tuple shared):
        cdef int i
        self.tensor, self.kind, self.average, self.priority = tensor, type(like), average, priority
        self.shared_begin, self.shared_end = shared
        self.ndim = len(shape)
        if self.ndim > 8:
            raise TypeError(f"{self.ndim} dimensions")
        for i in range(self.ndim):
            self.shape[i] = shape[i]
        if is_array:
            self.dtype = like.dtype
            other = self.kind((0, *shape), self.dtype)
            if ((<bps_array *><void *>like).data != <char *><uintptr_t>like.ctypes.data
                    or not self._is_like(<bps_array *><void *>like, False)
                    or self._is_like(<bps_array *><void *>other, False)):
                raise TypeError(f"{self.kind} is laid out in another way than NumPy's arrays")
            if self.shared_begin:
                self.results = [self.kind(shape, self.dtype) for _ in range(2)]
                self.views = [each.view() for each in self.results]
                for each in self.views:
                    each.flags.writeable = False
            return
        self.exchange = _exchange(self.kind)
        self.bits = NBITS[dtype]
        self.code = CODES[dtype]

    def push_pull(self, x, out, average, priority):
        """Sum *x* into *out* (None: into an own array, if *x* lies in shared memory) and return that.

        Returns None, and does nothing, if an argument is not like the first one. Raises as `DirectTensor.all_reduce`.
        """
        return self._push_any(x, out, average, priority)

    cdef object _push_any(self, x, out, average, priority):
        bps_direct_prepare(&self.tensor.channel.channel, self.tensor.nbytes)
        if (average is not self.average or type(x) is not self.kind or self.tensor.rounds.is_retired
                or self.tensor.channel.refuses or (priority is not self.priority and priority != self.priority)):
            return None
        if self.exchange != NULL:
            return self._push_tensor(x, out)
        return self._push_array(x, out)

    cdef object _push_tensor(self, x, out):
        cdef bps_dl_tensor source, destination
        if out is None or not self._view(x, &source):
            return None
        destination = source
        if out is not x and (type(out) is not self.kind or not self._view(out, &destination)):
            return None
        return self._push(<char *>source.data + source.byte_offset, <char *>destination.data + destination.byte_offset,
                          out)

    cdef bint _view(self, x, bps_dl_tensor *found) except -1:
        """Read a tensor of torch; return whether that is one like the first."""
        if self.exchange.view(<void *>x, found) != 0:
            PyErr_Clear()
            return False
        return bps_dl_is(found, self.code, self.bits, self.shape, self.ndim) and x.is_neg() is False

    cdef object _push_array(self, x, out):
        cdef bps_array *source = <bps_array *><void *>x
        cdef int own
        if not self._is_like(source, x is out):
            return None
        if out is x:
            return self._push(source.data, source.data, out)
        if out is not None:
            if type(out) is not self.kind or not self._is_like(<bps_array *><void *>out, True):
                return None
            return self._push(source.data, (<bps_array *><void *>out).data, out)
        if not (self.shared_begin <= <uintptr_t>source.data
                and <uintptr_t>source.data + self.tensor.nbytes <= self.shared_end):
            return None
        own = self.parity ^ 1
        out = self.results[own]
        if self._push(source.data, (<bps_array *><void *>out).data, out) is None:
            return None
        self.parity = own  # after a call that has failed the last result stays
        return self.views[own]

    cdef bint _is_like(self, const bps_array *array, bint writes) noexcept:
        """Whether that is a contiguous array like the first, which can be written if it is to be."""
        return bps_array_is(array, <bps_array_dtype *><void *>self.dtype, self.shape, self.ndim,
                            BPS_ARRAY_C_CONTIGUOUS | (BPS_ARRAY_WRITEABLE if writes else 0))

    cdef object _push(self, char *source, char *destination, out):
        cdef uint64_t apart = source - destination if source > destination else destination - source
        if 0 < apart < self.tensor.nbytes:
            return None
        self.tensor._sum(destination, source)
        return out


def known_first(dict pushes not None):
    """Decorate `bpsfast.push_pull`: a `DirectPush` in *pushes* makes calls with its name that are like its first."""
    def decorate(function):
        def push_pull(x, average=True, name=None, priority=None, out=None, compression=None, learning_rate=None):
            if type(name) is str and compression is None and learning_rate is None:
                known = pushes.get(name)
                if known is not None:
                    summed = (<DirectPush>known)._push_any(x, out, average, priority)
                    if summed is not None:
                        return summed
            return function(x, average, name, priority, out, compression, learning_rate)

        return functools.wraps(function)(push_pull)

    return decorate


def known_first_in_place(dict pushes not None):
    """The same for `bpsfast.torch.push_pull_inplace`."""
    def decorate(function):
        def push_pull(tensor, average=True, name=None, version=0, priority=0, *, compression=None, learning_rate=None):
            if type(name) is str and compression is None and learning_rate is None:
                known = pushes.get(name)
                if known is not None and (<DirectPush>known)._push_any(tensor, tensor, average, priority) is not None:
                    return tensor
            return function(tensor, average, name, version, priority, compression=compression,
                            learning_rate=learning_rate)

        return functools.wraps(function)(push_pull)

    return decorate


@cython.final
cdef class CallCount:
    """How many calls of a group have begun; its members count alike. Under the group's lock."""

    cdef public uint64_t n
    #: Whether a call is under way. Who holds the lock and finds it set was called inside that call (a signal handler).
    cdef public bint is_inside


@cython.final
cdef class DirectSums:
    """Sums in place, of tensors of one type, among the members of a group, for a caller that waits: all in C.

    All-reduces of torch.distributed that differ in an argument are left to Python, which checks them.

    Parameters
    ----------
    channel
        The group's.
    port
        The rank's port.
    deferred
        The rank's deferred pushes, for which others may wait.
    kind
        The type of the tensors: it has a DLPack exchange table, and tensors an `is_neg()`.
    options
        The type of a call's options, which have a `reduceOp` and an `asyncOp`.
    hash_of_sum
        The hash of the `reduceOp` that is to sum.
    turn
        Its `is_idle` says that no other call of the group waits or runs.
    lock, count
        The group's; the lock, an RLock, is held during a call.
    what
        `number_of(dtype, n_elements)`: the number by which members recognize such a sum; `timeout_s(options)`;
        `start_deferred()`; `look(began_ns)`: called while a call waits for long; `end(status, began_ns, dtype,
        n_elements)`: called after that, or if a call has failed, whose error it raises; `failed(error, dtype,
        n_elements)`: returns what to raise, with its cause; `close()`: called after a call, also one that has failed,
        if `refuses` was set meanwhile: closes the group if that was to be closed.

    Raises
    ------
    TypeError
        If objects of that type have to be read by Python.
    """

    cdef Channel channel
    cdef bps_port *native
    cdef dict deferred
    cdef object kind, options, turn, what, looks, acquire, release
    cdef CallCount count
    cdef Py_hash_t hash_of_sum
    cdef const bps_dl_exchange *exchange
    cdef bps_direct_sum sum
    cdef uint64_t number, nbytes, began_ns
    cdef int64_t shape[8]
    cdef int ndim
    cdef uint8_t code, bits
    cdef object dtype, n_elements, opts
    cdef bps_direct_call *call
    cdef bint has_looked
    #: No call begins any more.
    cdef public bint refuses
    #: Calls that were made here.
    cdef readonly uint64_t n_sums

    def __cinit__(self, Channel channel not None, port, dict deferred not None, kind, options, Py_hash_t hash_of_sum,
                  turn, lock, CallCount count not None, what):
        self.channel, self.deferred, self.kind, self.options, self.turn = channel, deferred, kind, options, turn
        self.hash_of_sum, self.count, self.what = hash_of_sum, count, what
        self.acquire, self.release = lock.acquire, lock.release
        self.native = <bps_port *>PyCapsule_GetPointer(port.native, "bps_port")
        self.exchange = _exchange(kind)
        self.looks = self._looks
        self.ndim, self.sum.divisor = -1, 1

    def all_reduce(self, tensors, opts):
        """Sum the one of *tensors* of all members in place, if *opts* ask for that and the caller waits.

        Returns False, and does nothing, if the call has to be made by Python.
        """
        cdef bps_dl_tensor found
        if (self.refuses or type(opts) is not self.options or type(tensors) is not list or len(<list>tensors) != 1
                or self.turn.is_idle is not True or opts.asyncOp is not False
                or hash(opts.reduceOp) != self.hash_of_sum or self.acquire(False) is not True):
            return False
        if self.count.is_inside:
            self.release()
            return False
        self.count.is_inside = True
        if self.channel.open:
            bps_direct_prepare(&self.channel.channel, self.nbytes)
        try:
            if not self._can((<list>tensors)[0], &found):
                return False
            if self.deferred:
                self.what.start_deferred()
            if self.refuses or self.channel.refuses:  # since other threads have run
                return False
            self.count.n += 1
            self.n_sums += 1
            self._sum(<char *>found.data + found.byte_offset, opts)
        finally:
            self.count.is_inside = False
            self.release()
            if self.refuses:
                self.what.close()
        return True

    cdef bint _can(self, x, bps_dl_tensor *found) except -1:
        """Whether *x* can be summed here now; under the lock, because it prepares for tensors like *x*."""
        if (type(x) is not self.kind or self.channel.busy or self.channel.refuses or self.channel.is_broken
                or not self.channel.open):
            return False
        if self.exchange.view(<void *>x, found) != 0:
            PyErr_Clear()
            return False
        if not bps_dl_is(found, self.code, self.bits, self.shape, self.ndim) and not (
                self._learn(found) and bps_dl_is(found, self.code, self.bits, self.shape, self.ndim)):
            return False
        return x.is_neg() is False

    cdef bint _learn(self, const bps_dl_tensor *tensor) except -1:
        """Prepare for tensors like *tensor*; return whether they can be summed."""
        cdef int i
        if tensor.lanes != 1 or tensor.ndim > 8:
            return False
        name = _NAMES.get((tensor.code, tensor.bits))
        if name is None:
            return False
        n_elements, self.ndim = 1, -1  # no tensor is like that one, should the next call raise
        for i in range(tensor.ndim):
            n_elements *= tensor.shape[i]
        self.number = self.what.number_of(name, n_elements)
        for i in range(tensor.ndim):
            self.shape[i] = tensor.shape[i]
        self.code, self.bits, self.ndim = tensor.code, tensor.bits, tensor.ndim
        self.dtype, self.n_elements = name, n_elements
        self.nbytes = n_elements * (tensor.bits // 8)
        self.sum.kernel = bps_sum_kernel_of(DTYPES.index(name), 0, bps_sum_level())
        return self.nbytes != 0

    cdef int _sum(self, char *at, opts) except -1:
        cdef bps_direct_call call
        cdef Channel channel = self.channel
        cdef bint keeps_gil = self.nbytes <= KEEPS_GIL_NBYTES
        cdef int status
        try:
            self.began_ns, self.has_looked = bps_now_ns(), False
            self.sum.call = self.number ^ (self.count.n * CALL_FACTOR)
            channel._begin(&call, UINT64_MAX, self.looks, keeps_gil)
            call.slice_ns = FIRST_LOOK_NS
            self.opts, self.call = opts, &call
            if keeps_gil:
                status = bps_direct_all_reduce(&channel.channel, at, at, self.nbytes, &self.sum, &call)
            else:
                with nogil:
                    status = bps_direct_all_reduce(&channel.channel, at, at, self.nbytes, &self.sum, &call)
            self.opts, self.call = None, NULL
            channel._end(&call, status)
            _note(self.native, NO_PART, 0, self.nbytes, self.began_ns, &call, status == BPS_DIRECT_DONE)
            if self.has_looked or status != BPS_DIRECT_DONE:
                self.what.end(status, self.began_ns, self.dtype, self.n_elements)
        except BaseException as exc:
            failure = self.what.failed(exc, self.dtype, self.n_elements)
            if failure is exc:
                raise
            raise failure
        return 0

    def _looks(self):
        """Look at other things while a call waits. Few calls wait so long, so its timeout is read only here."""
        if self.opts is not None:
            opts, self.opts = self.opts, None
            self.call.deadline_ns = _after(self.began_ns, self.what.timeout_s(opts))
            self.call.slice_ns = DEFERRED_SLICE_NS if self.deferred else 0
            return
        self.has_looked = True
        self.what.look(self.began_ns)
