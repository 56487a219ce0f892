# cython: language_level=3, binding=True, freethreading_compatible=False
"""Exchange: the native loops of ``bpsfast bench ladder``, which send partitions to a service and back, step by step.

    WriteExchange    over queue pairs and a completion queue of `bpsfast.pyx.verbs`     exchange.h, exchange_step.h
    StreamExchange   over connected stream sockets                                      stream_exchange.h

Both serve several ends: a worker's, which pushes all its partitions at once and waits for their results, and a
service's, which sends back every partition that has arrived. Nothing is summed: what a sum costs does not depend on how
its operands came. Owner thread only; `run` holds no GIL. Memory, queue pairs and sockets are the caller's and stay
valid until `close`; not for use after a fork.
"""
cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport EAGAIN, ETIMEDOUT
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memset

import os

from pyx.ibverbs cimport BPS_VERBS_LIBRARY, bps_ibv_cq, bps_ibv_qp, bps_verbs_open
from pyx.words cimport bps_now_ns


cdef extern from "exchange_step.h" nogil:
    enum:
        BPS_SWITCH_REGISTER, BPS_SWITCH_RENDEZVOUS, BPS_SWITCH_COPY, BPS_SWITCH_TWO_SGES, BPS_SWITCH_HALF_DUPLEX
        BPS_MESSAGE_NBYTES, BPS_MESSAGES_PER_PART
    struct bps_exchange_part:
        char *source
        char *staged
        char *arrival
        char *destination
        uint64_t target
        uint32_t nbytes, source_lkey, target_rkey, arrival_rkey
    struct bps_exchange_end:
        bps_ibv_qp *qp
        int is_service
        uint32_t n_parts, max_send, messages_lkey, queue_capacity
        bps_exchange_part *parts
        char *messages
        uint32_t *queue
        uint64_t arrived, completed
    struct bps_exchange:
        bps_ibv_cq *cq
        uint32_t switches, n_ends, vendor_error
        bps_exchange_end *ends
        uint64_t awake_ns, moved_ns, failed_wr_id, registrations, requests, copies, writes, sges
        int failed
    int bps_exchange_receive(bps_exchange_end *, uint32_t, uint32_t, uint32_t)
    int bps_exchange_begin(bps_exchange *)
    int bps_exchange_go_on(bps_exchange *, uint64_t)
    void bps_exchange_end_free(bps_exchange_end *)

cdef extern from "stream_exchange.h" nogil:
    struct pollfd:
        pass
    struct bps_stream_part:
        char *source
        char *destination
        uint32_t nbytes
    struct bps_stream_end:
        int fd, is_service
        uint32_t n_parts
        bps_stream_part *parts
        uint32_t *queue
        uint64_t arrived, taken
    void bps_stream_begin(bps_stream_end *, uint32_t)
    int bps_stream_go_on(bps_stream_end *, uint32_t, pollfd *, uint64_t, uint64_t *)

REGISTER, RENDEZVOUS, COPY = BPS_SWITCH_REGISTER, BPS_SWITCH_RENDEZVOUS, BPS_SWITCH_COPY
TWO_SGES, HALF_DUPLEX = BPS_SWITCH_TWO_SGES, BPS_SWITCH_HALF_DUPLEX

_MAX_PARTS = 1 << 24  # an immediate has 24 bits for the partition
cdef uint64_t _SLICE_NS = 100_000_000  # how long a signal may have to wait


def messages_nbytes(n_parts):
    """Return the registered bytes that an end of a `WriteExchange` needs for its small messages."""
    return (1 + BPS_MESSAGES_PER_PART) * BPS_MESSAGE_NBYTES * n_parts


def receives(n_parts):
    """Return the receive requests that an end of a `WriteExchange` has posted."""
    return BPS_MESSAGES_PER_PART * n_parts


@cython.final
@cython.no_gc_clear
cdef class WriteExchange:
    """Exchange partitions by RDMA WRITE with immediate, in the ways that *switches* choose.

    *switches*: a sum of REGISTER, RENDEZVOUS, COPY, TWO_SGES, HALF_DUPLEX; *awake_us*: how long `run` yields before it
    sleeps until the next completion event, None: for ever. *keep* is held until `close`.

    Raises
    ------
    OSError
        When libibverbs cannot be loaded.
    """

    cdef bps_exchange exchange
    cdef object keep

    def __cinit__(self, uintptr_t completion_queue, *, uint32_t switches=0, awake_us=50, keep=None):
        cdef char why[512]
        cdef int rc = bps_verbs_open(BPS_VERBS_LIBRARY, why, sizeof(why))
        if rc:
            raise OSError(rc, f"libibverbs: {(<bytes>why).decode()}")
        self.exchange.cq, self.exchange.switches = <bps_ibv_cq *>completion_queue, switches
        self.exchange.awake_ns = <uint64_t>-1 if awake_us is None else 1000 * awake_us
        self.keep = keep

    def add_end(self, uintptr_t queue_pair, parts, *, bint is_service, uint32_t max_send, uintptr_t messages,
                uint32_t messages_lkey):
        """Add one end, over a queue pair in state INIT or later, and post its receive requests.

        *parts*: of each partition (source, staged, target, arrival, destination, nbytes, source lkey, target rkey,
        arrival rkey); the first five are addresses, staged and destination those of the copies. *messages*: address of
        `messages_nbytes` registered bytes.
        """
        cdef bps_exchange_end *end
        cdef bps_exchange_part *part
        cdef uint32_t n = len(parts)
        cdef uintptr_t source, staged, arrival, destination
        if self.exchange.cq == NULL:
            raise ValueError("the exchange is closed")
        if not 0 < n < _MAX_PARTS:
            raise ValueError(f"an end has 1 to {_MAX_PARTS - 1} partitions, got {n}")
        end = <bps_exchange_end *>realloc(self.exchange.ends, (self.exchange.n_ends + 1) * sizeof(bps_exchange_end))
        if end == NULL:
            raise MemoryError("end of an exchange")
        self.exchange.ends = end
        end += self.exchange.n_ends
        memset(end, 0, sizeof(bps_exchange_end))
        end.parts = <bps_exchange_part *>calloc(n, sizeof(bps_exchange_part))
        end.queue_capacity = 2 * BPS_MESSAGES_PER_PART * n
        end.queue = <uint32_t *>calloc(end.queue_capacity, sizeof(uint32_t))
        end.n_parts = n
        self.exchange.n_ends += 1
        if end.parts == NULL or end.queue == NULL:
            raise MemoryError(f"{n} partitions of an exchange")
        end.qp, end.is_service, end.max_send = <bps_ibv_qp *>queue_pair, is_service, max_send
        end.messages, end.messages_lkey = <char *>messages, messages_lkey
        for i, values in enumerate(parts):
            part = &end.parts[i]
            (source, staged, part.target, arrival, destination, part.nbytes, part.source_lkey, part.target_rkey,
             part.arrival_rkey) = values
            part.source, part.staged = <char *>source, <char *>staged
            part.arrival, part.destination = <char *>arrival, <char *>destination
        rc = bps_exchange_receive(end, self.exchange.n_ends - 1, 0, BPS_MESSAGES_PER_PART * n)
        if rc:
            raise OSError(rc, f"ibv_post_recv of {receives(n)} requests on queue pair {end.qp.qp_num}: "
                              f"{os.strerror(rc)}")

    def run(self, uint32_t n_steps, stall_s=60.0):
        """Do *n_steps* steps; return the seconds of each. The peers run as many at the same time.

        Raises
        ------
        OSError
            ETIMEDOUT when nothing moved for *stall_s*; EIO for a bad completion (`failure`); the errno of a verb.
        """
        cdef int rc = 0
        cdef uint64_t stall_ns = int(1e9 * stall_s), begin_ns
        if self.exchange.cq == NULL:
            raise ValueError("the exchange is closed")
        found = []
        for _ in range(n_steps):
            begin_ns = bps_now_ns()
            with nogil:
                rc = bps_exchange_begin(&self.exchange)
            while rc == 0:
                with nogil:
                    rc = bps_exchange_go_on(&self.exchange, _SLICE_NS)
                if rc != EAGAIN:
                    break
                PyErr_CheckSignals()
                rc = ETIMEDOUT if bps_now_ns() - self.exchange.moved_ns > stall_ns else 0
            if rc:
                raise OSError(rc, self._words(rc))
            found.append((bps_now_ns() - begin_ns) / 1e9)
        return found

    cdef str _words(self, int rc):
        cdef bps_exchange_end *end
        ends = []
        for i in range(self.exchange.n_ends):
            end = &self.exchange.ends[i]
            ends.append(f"{'service' if end.is_service else 'worker'} with {end.n_parts} partitions a step: "
                        f"{end.arrived} arrived, {end.completed} sent since it was made")
        return f"exchange over {'; '.join(ends)}: {os.strerror(rc)}"

    @property
    def failure(self):
        """The bad completion that ended `run`: (status, vendor error, end, kind, partition), or None."""
        cdef uint64_t wr_id = self.exchange.failed_wr_id
        if not self.exchange.failed:
            return None
        kind = ("write", "request", "reply", "receive")[(wr_id >> 24) & 3]
        return self.exchange.failed, self.exchange.vendor_error, wr_id >> 32, kind, wr_id & 0xffffff

    def counters(self):
        """Return what all steps together took: writes, sges, registrations, requests (address exchanges), copies."""
        return {"writes": self.exchange.writes, "sges": self.exchange.sges, "requests": self.exchange.requests,
                "registrations": self.exchange.registrations, "copies": self.exchange.copies}

    def close(self):
        """Forget the ends; close the queue pairs first, so that nothing is under way. Idempotent."""
        self._release()
        self.keep = None

    cdef void _release(self) noexcept:
        for i in range(self.exchange.n_ends):
            bps_exchange_end_free(&self.exchange.ends[i])
        free(self.exchange.ends)
        self.exchange.ends, self.exchange.n_ends, self.exchange.cq = NULL, 0, NULL

    def __dealloc__(self):
        self._release()


@cython.final
cdef class StreamExchange:
    """Exchange partitions over connected stream sockets, which stay the caller's."""

    cdef bps_stream_end *ends
    cdef pollfd *waited
    cdef uint32_t n_ends

    def add_end(self, int fd, parts, *, bint is_service):
        """Add one end. *parts*: of each partition (source, destination, nbytes), the first two being addresses."""
        cdef bps_stream_end *end
        cdef uint32_t n = len(parts)
        cdef uintptr_t source, destination
        if n < 1:
            raise ValueError("an end has one partition at least")
        end = <bps_stream_end *>realloc(self.ends, (self.n_ends + 1) * sizeof(bps_stream_end))
        if end == NULL:
            raise MemoryError("end of an exchange")
        self.ends = end
        end += self.n_ends
        memset(end, 0, sizeof(bps_stream_end))
        self.n_ends += 1
        free(self.waited)
        self.waited = <pollfd *>calloc(self.n_ends, sizeof(pollfd))
        end.parts = <bps_stream_part *>calloc(n, sizeof(bps_stream_part))
        end.queue = <uint32_t *>calloc(n, sizeof(uint32_t))
        if end.parts == NULL or end.queue == NULL or self.waited == NULL:
            raise MemoryError(f"{n} partitions of an exchange")
        end.fd, end.is_service, end.n_parts = fd, is_service, n
        for i, values in enumerate(parts):
            source, destination, end.parts[i].nbytes = values
            end.parts[i].source, end.parts[i].destination = <char *>source, <char *>destination

    def run(self, uint32_t n_steps, stall_s=60.0):
        """Do *n_steps* steps; return the seconds of each. The peers run as many at the same time.

        Raises
        ------
        OSError
            ETIMEDOUT when nothing moved for *stall_s*; ECONNRESET when a peer has closed; the errno of a socket call.
        """
        cdef int rc
        cdef uint64_t stall_ns = int(1e9 * stall_s), begin_ns, moved_ns
        found = []
        for _ in range(n_steps):
            begin_ns = moved_ns = bps_now_ns()
            bps_stream_begin(self.ends, self.n_ends)
            while True:
                with nogil:
                    rc = bps_stream_go_on(self.ends, self.n_ends, self.waited, _SLICE_NS, &moved_ns)
                if rc == EAGAIN:
                    PyErr_CheckSignals()
                    rc = ETIMEDOUT if bps_now_ns() - moved_ns > stall_ns else EAGAIN
                if rc != EAGAIN:
                    break
            if rc:
                ends = "; ".join(f"{'service' if self.ends[i].is_service else 'worker'} with {self.ends[i].n_parts} "
                                 f"partitions a step: {self.ends[i].arrived} arrived, {self.ends[i].taken} sent"
                                 for i in range(self.n_ends))
                raise OSError(rc, f"exchange over sockets: {ends}: {os.strerror(rc)}")
            found.append((bps_now_ns() - begin_ns) / 1e9)
        return found

    def close(self):
        """Forget the ends. Idempotent."""
        self._release()

    cdef void _release(self) noexcept:
        for i in range(self.n_ends):
            free(self.ends[i].parts)
            free(self.ends[i].queue)
        free(self.ends)
        free(self.waited)
        self.ends, self.waited, self.n_ends = NULL, NULL, 0

    def __dealloc__(self):
        self._release()
