# cython: language_level=3, binding=True
"""Direct: the ranks of one machine sum their inputs themselves, through shared memory, without their node (`direct.h`).

A `DirectPort` is what a rank has in common for all its channels: words by which ranks wake each other, and how it
waits. A `Channel` is the memory of sums that follow each other, of one tensor or of one group of ranks.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from pyx.words cimport bps_doorbell, bps_load, bps_now_ns, bps_reached

cdef extern from "Python.h":
    ctypedef struct PyThreadState:
        pass
    PyThreadState *PyEval_SaveThread() nogil
    void PyEval_RestoreThread(PyThreadState *) nogil

cdef extern from "direct.h" nogil:
    ctypedef void (*bps_sum_kernel)(void *)
    struct bps_direct_rank:
        uint32_t asleep
        int32_t cpu
    struct bps_direct_line:
        uint32_t published, reduced
    struct bps_separation:
        int few
    struct bps_direct_port:
        bps_direct_rank *ranks
        const void *board
        int n, me, node_pidfd, is_crowded
        uint64_t awake_ns
        uint64_t *waiting
        bps_separation separation
    struct bps_direct_call:
        uint64_t deadline_ns
        void *(*release)() noexcept
        void (*take)(void *) noexcept
        int (*check)() noexcept
        int n_waits
    struct bps_channel:
        bps_direct_port *port
        bps_direct_line *lines
        uint32_t chunks, calls
    struct bps_channel_layout:
        uint64_t nbytes
    struct bps_direct_sum:
        bps_sum_kernel kernel
        int64_t divisor
        uint64_t call
    enum: BPS_DIRECT_DONE, BPS_DIRECT_TIMED_OUT, BPS_DIRECT_ABORTED, BPS_DIRECT_NODE_DIED
    enum: BPS_DIRECT_DIFFERENT, BPS_DIRECT_RAISED, BPS_SUM_RANKS
    bps_channel_layout bps_direct_layout(int, uint64_t)
    void bps_channel_format(void *, int, uint32_t)
    void bps_channel_open(bps_channel *, bps_direct_port *, void *, uint64_t)
    int bps_direct_all_reduce(bps_channel *, char *, const char *, uint64_t, const bps_direct_sum *, bps_direct_call *)
    int bps_sum_level()
    bps_sum_kernel bps_sum_kernel_of(int, int, int)
    void bps_look_whether_few(bps_separation *)

#: What a call ends with.
DONE, TIMED_OUT, ABORTED, NODE_DIED = BPS_DIRECT_DONE, BPS_DIRECT_TIMED_OUT, BPS_DIRECT_ABORTED, BPS_DIRECT_NODE_DIED
#: The ranks do not make the same call.
DIFFERENT = BPS_DIRECT_DIFFERENT
#: The most ranks that sum directly.
MOST_RANKS = BPS_SUM_RANKS
#: Bytes of the words that all ranks have in common, for each of them.
RANK_NBYTES = sizeof(bps_direct_rank)
#: The order of dtypes and operations in kernels' numbers.
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8")
OPS = ("sum", "product", "min", "max", "band", "bor", "bxor")
#: The instruction sets that sums are compiled for, and the one that this processor gets.
LEVELS = ("base", "avx2", "avx512")

#: Calls of at most so many bytes keep the GIL while nobody has to be waited for: releasing it costs more than they do.
cdef uint64_t KEEPS_GIL_NBYTES = 64 << 10


def level():
    """Return the name of the instruction set that this processor gets."""
    return LEVELS[bps_sum_level()]


def channel_nbytes(int n_ranks, uint64_t most_nbytes):
    """Return the bytes of shared memory of a channel for sums of at most *most_nbytes* among *n_ranks*."""
    return bps_direct_layout(n_ranks, most_nbytes).nbytes


def format_channel(memory not None, int n_ranks, uint32_t first=0):
    """Make zeroed *memory* a channel of *n_ranks* whose chunks are counted from *first* on: once, before a rank uses it.
    """
    cdef unsigned char[::1] view = memory
    if <uint64_t>view.shape[0] < bps_direct_layout(n_ranks, 1).nbytes:
        raise ValueError(f"{view.shape[0]} bytes for a channel of {n_ranks} ranks")
    bps_channel_format(&view[0], n_ranks, first)


cdef void *_release() noexcept nogil:
    return PyEval_SaveThread()


cdef void _take(void *state) noexcept nogil:
    PyEval_RestoreThread(<PyThreadState *>state)


cdef int _check() noexcept with gil:
    """Run Python's signal handlers; whether one has raised. The thread that waits does not hold the GIL."""
    try:
        PyErr_CheckSignals()
    except BaseException as exc:
        _raised.append(exc)
        return 1
    return 0


cdef list _raised = []


@cython.final
cdef class DirectPort:
    """What rank *me* of the *n* ranks of a machine has in common for all its channels.

    Parameters
    ----------
    ranks
        Zeroed shared memory of `RANK_NBYTES` for each rank.
    board
        The node's board, whose state ends waits; None: nothing does but deadlines.
    node_pidfd
        The node's process; -1: none.
    awake_us
        How long a wait yields the CPU before it sleeps.

    Raises
    ------
    ValueError
        If a buffer is too small or *me* is no rank.
    """

    cdef Py_buffer ranks_view, board_view, doorbell_view
    cdef bps_direct_port port

    def __cinit__(self, ranks not None, int n, int me, *, board=None, doorbell=None, int node_pidfd=-1,
                  uint32_t awake_us=200, bint is_crowded=False):
        if not 0 <= me < n <= BPS_SUM_RANKS:
            raise ValueError(f"rank {me} of {n}: between 1 and {BPS_SUM_RANKS} ranks sum directly")
        PyObject_GetBuffer(ranks, &self.ranks_view, PyBUF_WRITABLE)
        if self.ranks_view.len < <Py_ssize_t>(n * sizeof(bps_direct_rank)):
            raise ValueError(f"{self.ranks_view.len} bytes for {n} ranks, which need {n * sizeof(bps_direct_rank)}")
        if board is not None:
            PyObject_GetBuffer(board, &self.board_view, PyBUF_SIMPLE)
        self.port.ranks = <bps_direct_rank *>self.ranks_view.buf
        self.port.board = self.board_view.buf
        self.port.n, self.port.me, self.port.node_pidfd = n, me, node_pidfd
        self.port.awake_ns = <uint64_t>awake_us * 1000
        self.port.is_crowded = is_crowded
        bps_look_whether_few(&self.port.separation)

    def __dealloc__(self):
        PyBuffer_Release(&self.ranks_view)
        PyBuffer_Release(&self.board_view)


@cython.final
cdef class Channel:
    """The shared *memory* of sums of at most *most_nbytes* that follow each other, zeroed before its first use.

    All ranks make the same calls in the same order, one thread at a time. After an error it is of no use any more.

    Raises
    ------
    ValueError
        If *memory* is too small (`channel_nbytes`).
    """

    cdef Py_buffer view
    cdef DirectPort owner
    cdef bps_channel channel
    cdef uint64_t most
    cdef bint busy
    cdef readonly uint64_t n_waits

    def __cinit__(self, DirectPort port not None, memory not None, uint64_t most_nbytes):
        PyObject_GetBuffer(memory, &self.view, PyBUF_WRITABLE)
        need = channel_nbytes(port.port.n, most_nbytes)
        if <uint64_t>self.view.len < need:
            raise ValueError(f"{self.view.len} bytes for a channel of {port.port.n} ranks, which needs {need}")
        self.owner = port
        self.most = most_nbytes
        bps_channel_open(&self.channel, &port.port, self.view.buf, most_nbytes)

    def all_reduce(self, uintptr_t destination, uintptr_t source, uint64_t nbytes, *, int dtype=0, int op=0,
                   int64_t divisor=1, uint64_t call=0, double timeout_s=60.0):
        """Combine *nbytes* at *source* of all ranks, and write the result to *destination*; how it ended (`DONE`, ...).

        *destination* may be *source*, and overlaps it in no other way. *dtype* and *op*: their places in `DTYPES` and
        `OPS`. *call*: a number that must be the same on all ranks. After anything but `DONE` the destination is partly
        written.

        Raises
        ------
        ValueError
            If there is no such sum, or too many bytes.
        RuntimeError
            If another thread is in a call.
        KeyboardInterrupt
            Or whatever else a Python signal handler raises while the call waits.
        """
        cdef bps_direct_sum sum
        cdef bps_direct_call how
        cdef int status
        if nbytes > self.most:
            raise ValueError(f"{nbytes} bytes in a channel for {self.most}")
        if self.busy:
            raise RuntimeError("another thread uses this channel")
        sum.kernel = bps_sum_kernel_of(dtype, op, bps_sum_level())
        if sum.kernel == NULL:
            raise ValueError(f"no sum of dtype {dtype} by op {op}")
        sum.divisor = divisor
        sum.call = call
        memset(&how, 0, sizeof(how))
        how.check = _check
        how.deadline_ns = bps_now_ns() + <uint64_t>(timeout_s * 1e9)
        self.busy = True
        if nbytes > KEEPS_GIL_NBYTES:
            with nogil:
                status = bps_direct_all_reduce(&self.channel, <char *>destination, <const char *>source, nbytes, &sum,
                                               &how)
        else:
            how.release, how.take = _release, _take
            status = bps_direct_all_reduce(&self.channel, <char *>destination, <const char *>source, nbytes, &sum, &how)
        self.busy = False
        self.n_waits += how.n_waits
        if status == BPS_DIRECT_RAISED:
            raise _raised.pop()
        return status

    def missing(self):
        """Return the ranks that have not done what this rank has done in the last call."""
        cdef uint32_t own = self.channel.lines[self.owner.port.me].published
        cdef int r
        return tuple(r for r in range(self.owner.port.n)
                     if not bps_reached(bps_load(&self.channel.lines[r].published), own))

    def __dealloc__(self):
        PyBuffer_Release(&self.view)
