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
    BPS_DIRECT, bps_count, bps_count_alone, bps_load, bps_now_ns, bps_port, bps_reached, bps_record_add,
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

cdef extern from "direct_calls.h" nogil:
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
    struct bps_direct_gather:
        const char *own
        char *places[64]
        uint64_t nbytes[64]
    struct bps_direct_scatter:
        const char *from_ "from"[64]
        char *to
        uint64_t nbytes[64]
    struct bps_direct_pieces:
        const char *from_ "from"[64]
        char *to[64]
        uint64_t given[64]
        uint64_t wanted[64]
        uint64_t offered[64]
    struct bps_direct_work:
        int kind, root
        const char *from_ "from"
        char *to
        uint64_t nbytes
        bps_direct_sum sum
        bps_direct_gather gather
        bps_direct_scatter scatter
        bps_direct_pieces pieces
    enum: BPS_DIRECT_SUM, BPS_DIRECT_COPY, BPS_DIRECT_GATHER, BPS_DIRECT_SCATTER, BPS_DIRECT_PIECES, BPS_DIRECT_BARRIER
    enum: BPS_DIRECT_DONE, BPS_DIRECT_TIMED_OUT, BPS_DIRECT_ABORTED, BPS_DIRECT_NODE_DIED
    enum: BPS_DIRECT_DIFFERENT, BPS_DIRECT_RAISED, BPS_DIRECT_DECLINED, BPS_DIRECT_CHUNK, BPS_SUM_RANKS
    bps_channel_layout bps_direct_layout(int, uint64_t)
    uint64_t bps_channel_head(int)
    void bps_channel_format(void *, int, uint32_t)
    void bps_channel_open(bps_channel *, void *, uint64_t)
    int bps_direct_do(bps_channel *, bps_direct_work *, bps_direct_call *)
    void bps_direct_prepare(const bps_channel *, uint64_t)
    void bps_direct_decline(bps_channel *, uint64_t)
    int bps_sum_level()
    bps_sum_kernel bps_sum_kernel_of(int, int, int)
    void bps_look_whether_few(bps_separation *)

cdef extern from "large_tensors.h" nogil:
    struct bps_large_tensors:
        pass
    int bps_large_count(bps_large_tensors *, uint64_t, uint64_t)
    int bps_large_collapse(uint64_t, uint64_t)
    int bps_huge_pages_exist()

#: Under the GIL.
cdef bps_large_tensors LARGE_TENSORS

#: What a call ends with.
DONE, TIMED_OUT, ABORTED, NODE_DIED = BPS_DIRECT_DONE, BPS_DIRECT_TIMED_OUT, BPS_DIRECT_ABORTED, BPS_DIRECT_NODE_DIED
#: The ranks do not make the same call.
DIFFERENT = BPS_DIRECT_DIFFERENT
#: A rank does not take part (`DirectTensor.decline`).
DECLINED = BPS_DIRECT_DECLINED
#: The most ranks that sum directly.
MOST_RANKS = BPS_SUM_RANKS
#: A channel that is made for this number of bytes takes sums of any number of bytes.
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
#: The interval at which a wait looks whether deferred pushes of other tensors can begin.
cdef uint64_t DEFERRED_SLICE_NS = 2000000
#: How long a call waits before it reads its timeout.
cdef uint64_t FIRST_LOOK_NS = 1000000
#: By which the number of a call of a group changes what says which call it is (`collectives.machine_channel`).
CALL_FACTOR_OF_GROUPS = 0xD1B54A32D192ED03
cdef uint64_t CALL_FACTOR = 0xD1B54A32D192ED03
#: Calls of at most so many bytes keep the GIL while nobody has to be waited for: releasing it costs more than they do.
cdef uint64_t KEEPS_GIL_NBYTES = 64 << 10


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


cdef int _sum_of(bps_direct_sum *sum, int dtype, int op, int64_t divisor) except -1:
    sum.kernel, sum.divisor = bps_sum_kernel_of(dtype, op, bps_sum_level()), divisor
    if sum.kernel == NULL:
        raise ValueError(f"there is no sum of dtype {dtype} by op {op}")
    return 0


cdef uint64_t _after(uint64_t now_ns, double timeout_s) noexcept:
    """Return the time *timeout_s* after *now_ns*; thirty years are as good as for ever."""
    return now_ns + <uint64_t>(min(max(timeout_s, 0.0), 1e9) * 1e9)


cdef int _count_large(uint64_t address, uint64_t nbytes) except -1:
    """Count a sum of a tensor, which may get huge pages now."""
    if bps_large_count(&LARGE_TENSORS, address, nbytes):
        with nogil:
            bps_large_collapse(address, nbytes)
    return 0


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
        if channel.refuses:  # a signal handler has forked or closed: in a fork, the call is the parent's
            raise RuntimeError("a call is under way in a channel that was closed, or is that of a parent process")
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
    huge_pages
        Large tensors that are summed again and again get huge pages, if the system has any (`large_tensors.h`).

    Raises
    ------
    ValueError
        If *memory* is too small (`channel_nbytes`), or *me* is no rank.
    """

    cdef Py_buffer view, board_view, doorbell_view
    cdef bps_channel channel
    cdef uint64_t most
    cdef object look, raised
    cdef bint open, has_huge_pages
    #: Whether a call is under way.
    cdef readonly bint busy
    #: No call begins any more: the session is being closed, or this process is a fork of the rank's.
    cdef public bint refuses
    #: A call has failed, so the ranks are out of step: none begins any more.
    cdef readonly bint is_broken
    #: Waits that were not over after a few spins.
    cdef readonly uint64_t n_waits

    def __cinit__(self, memory not None, int n_ranks, int me, uint64_t most_nbytes, *, board=None, doorbell=None,
                  int node_pidfd=-1, uint32_t awake_us=200, bint is_crowded=False, bint huge_pages=False):
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
        self.has_huge_pages = huge_pages and n_ranks > 1 and bps_huge_pages_exist()
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

    cdef int _do(self, bps_direct_work *work, bps_direct_call *call, bint keeps_gil) except -1:
        """Do *work* as *call*, which has begun, and end it; return how it ended."""
        cdef int status
        if keeps_gil:
            status = bps_direct_do(&self.channel, work, call)
        else:
            with nogil:
                status = bps_direct_do(&self.channel, work, call)
            if self.has_huge_pages and work.kind == BPS_DIRECT_SUM and status == BPS_DIRECT_DONE:
                _count_large(<uint64_t><uintptr_t>work.from_, work.nbytes)
                if work.to != NULL and work.to != work.from_:
                    _count_large(<uint64_t><uintptr_t>work.to, work.nbytes)
        return self._end(call, status)

    cdef int _call(self, bps_direct_work *work, uint64_t nbytes, uint64_t what, double timeout_s, look) except -1:
        """Do *work*, which moves *nbytes*, as a call of its own."""
        cdef bps_direct_call call
        cdef bint keeps_gil = nbytes <= KEEPS_GIL_NBYTES
        work.sum.call = what
        self._begin(&call, _after(bps_now_ns(), timeout_s), look, keeps_gil)
        return self._do(work, &call, keeps_gil)

    cdef int _require(self, uint64_t nbytes) except -1:
        if nbytes > self.most and self.most <= BPS_DIRECT_CHUNK:
            raise ValueError(f"{nbytes} bytes in a channel for {self.most}")
        return 0

    cdef int _require_any_nbytes(self) except -1:
        if self.most <= BPS_DIRECT_CHUNK:
            raise ValueError(f"this channel is for sums of {self.most} bytes")
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
        cdef bps_direct_work work
        self._require(nbytes)
        work.kind, work.nbytes = BPS_DIRECT_SUM, nbytes
        work.to, work.from_ = <char *>destination, <const char *>source
        _sum_of(&work.sum, dtype, op, divisor)
        return self._call(&work, nbytes, what, timeout_s, look)

    def broadcast(self, int root, uintptr_t address, uint64_t nbytes, uint64_t what, double timeout_s, look=None):
        """Copy *nbytes* at *address* of rank *root* to *address* of the others; 0: a rank that does not need them.

        Raises as `all_reduce`.
        """
        cdef bps_direct_work work
        if not 0 <= root < self.channel.port.n:
            raise ValueError(f"root {root} of {self.channel.port.n} ranks")
        self._require(nbytes)
        work.kind, work.root, work.to, work.nbytes = BPS_DIRECT_COPY, root, <char *>address, nbytes
        return self._call(&work, nbytes, what, timeout_s, look)

    def all_gather(self, addresses, sizes, uintptr_t own, uint64_t what, double timeout_s, look=None):
        """Copy *sizes[r]* bytes at *own* of each rank r to *addresses[r]* of all (0: to none).

        More than `cell_nbytes` in a channel for `ANY_NBYTES`. Raises as `all_reduce`.
        """
        cdef bps_direct_work work
        cdef uint64_t nbytes = 0
        work.kind, work.gather.own = BPS_DIRECT_GATHER, <const char *>own
        for r in range(self.channel.port.n):
            work.gather.places[r], work.gather.nbytes[r] = <char *><uintptr_t>addresses[r], sizes[r]
            nbytes += work.gather.nbytes[r]
            if work.gather.nbytes[r] > self.channel.cell_nbytes:
                self._require_any_nbytes()
        return self._call(&work, nbytes, what, timeout_s, look)

    def reduce_scatter(self, sources, uintptr_t destination, int dtype, int op, int64_t divisor, uint64_t what,
                       double timeout_s, look=None):
        """Combine *sources[r]*, an address and a number of bytes, of all ranks to *destination* of each rank r.

        Otherwise as `all_reduce`; *destination* may be this rank's source. In a channel for `ANY_NBYTES`.
        """
        cdef bps_direct_work work
        cdef uint64_t nbytes = 0
        self._require_any_nbytes()
        work.kind, work.scatter.to = BPS_DIRECT_SCATTER, <char *>destination
        _sum_of(&work.sum, dtype, op, divisor)
        for r in range(self.channel.port.n):
            work.scatter.from_[r], work.scatter.nbytes[r] = <const char *><uintptr_t>sources[r][0], sources[r][1]
            nbytes += work.scatter.nbytes[r]
        return self._call(&work, nbytes, what, timeout_s, look)

    def all_to_all(self, sources, destinations, list offered, uint64_t what, double timeout_s, look=None):
        """Copy *sources[r]* of this rank to rank r, and what each rank r has for this one to *destinations[r]*.

        Both are pairs of an address and a number of bytes. *offered* gets how many bytes each rank has for this one;
        if that is not what its destination takes, nothing is copied there. In a channel for `ANY_NBYTES`. Raises as
        `all_reduce`.
        """
        cdef bps_direct_work work
        cdef bps_direct_pieces *pieces = &work.pieces
        cdef int status, n = self.channel.port.n
        cdef uint64_t nbytes = 0
        self._require_any_nbytes()
        work.kind = BPS_DIRECT_PIECES
        for r in range(n):
            pieces.from_[r], pieces.given[r] = <const char *><uintptr_t>sources[r][0], sources[r][1]
            pieces.to[r], pieces.wanted[r] = <char *><uintptr_t>destinations[r][0], destinations[r][1]
            nbytes += pieces.given[r] + pieces.wanted[r]
        status = self._call(&work, nbytes, what, timeout_s, look)
        if status == BPS_DIRECT_DONE:
            offered[:] = [pieces.offered[r] for r in range(n)]
        return status

    def barrier(self, uint64_t what, double timeout_s, look=None):
        """Wait until all ranks call this. Raises as `all_reduce`."""
        cdef bps_direct_work work
        work.kind = BPS_DIRECT_BARRIER
        return self._call(&work, 0, what, timeout_s, look)

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


include "direct_repeated.pxi"
include "direct_options.pxi"
include "direct_collectives.pxi"
