"""Words in shared memory, by `cimport *`: futex.h, lane.h, steps.h, board.h, record.h, hooks.h."""
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport uint16_t, uint32_t, uint64_t


cdef extern from "futex.h" nogil:
    struct bps_doorbell:
        uint32_t magic, rings, sleepers
    enum: BPS_DOORBELL_MAGIC
    uint32_t bps_load(uint32_t *)
    void bps_store(uint32_t *, uint32_t)
    uint32_t bps_add(uint32_t *, uint32_t)
    uint64_t bps_now_ns()
    int bps_wait(uint32_t *, uint32_t, uint64_t)
    void bps_wake(uint32_t *, int)
    void bps_ring_doorbell(bps_doorbell *, int)
    int bps_wait_awake(const uint32_t *, uint32_t, uint64_t)
    void bps_await_doorbell(bps_doorbell *, uint32_t, uint64_t, uint64_t)

cdef extern from "lane.h" nogil:
    struct bps_entry:
        uint32_t part, count, round
        uint16_t flags, segment
        uint64_t offset, time_ns
    struct bps_tally:
        uint64_t exposed_ns, steps, step_ns, step_exposed_ns, communication_ns, hidden_ns, stalls
    struct bps_lane:
        uint32_t magic, capacity, sleepers
        bps_tally tally
        uint64_t direct_calls, direct_nbytes
    void bps_count(uint64_t *, uint64_t)
    void bps_count_alone(uint64_t *, uint64_t)
    uint64_t bps_counted(uint64_t *)
    enum: BPS_LANE_MAGIC, BPS_LANE_HEADER, BPS_FLAG_EMPTY, BPS_FLAG_NONTEMPORAL, BPS_FLAG_RATE
    int bps_lane_push(bps_lane *, uint32_t, bps_entry *)
    int bps_lane_pop(bps_lane *, uint32_t, bps_entry *)
    uint32_t bps_lane_capacity(bps_lane *, uint64_t)

cdef extern from "steps.h" nogil:
    struct bps_step:
        uint64_t step_ns, exposed_ns, communication_ns, hidden_ns
    struct bps_steps:
        uint64_t n_begun, sample_ns
        bps_step last
    void bps_steps_blocked(bps_tally *, uint64_t)
    void bps_steps_result(bps_steps *, uint64_t)
    void bps_steps_next(bps_steps *, bps_tally *, uint64_t)

cdef extern from "board.h" nogil:
    struct bps_board:
        uint32_t magic, state, n_words, n_redone, n_lost
    enum: BPS_BOARD_MAGIC, BPS_BOARD_HEADER, BPS_BOARD_STRIDE, BPS_REASON_OFFSET, BPS_REASON_NBYTES, BPS_MAX_PARTS
    uint32_t *bps_board_word(void *, uint32_t)
    uint32_t bps_board_redone(const void *)
    int bps_reached(uint32_t, uint32_t)

cdef extern from "record.h" nogil:
    struct bps_record:
        uint64_t begin_ns
    struct bps_trace:
        bps_record *records
        uint64_t capacity, used
    enum: BPS_COPY_IN, BPS_WAIT, BPS_DELIVER, BPS_WIRE, BPS_RECEIVE, BPS_PUSH, BPS_TO_DEVICE, BPS_TO_HOST, BPS_DIRECT
    int bps_trace_open(bps_trace *, uint64_t, uint32_t, uint32_t)
    void bps_record_add(bps_trace *, int, int, uint32_t, uint32_t, uint64_t, uint64_t, uint64_t)

cdef extern from "hooks.h" nogil:
    ctypedef void (*bps_arrived_fn)(void *, uint32_t, uint32_t, uint32_t, uint32_t) noexcept nogil
    ctypedef void (*bps_notify_fn)(void *, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint64_t) noexcept nogil
    enum: BPS_EVENT_FORWARD, BPS_EVENT_RESULT, BPS_EVENT_DELIVERED, BPS_EVENT_LOST
    enum: BPS_MORE_ARRIVED

cdef extern from "thread.h" nogil:
    ctypedef unsigned long pthread_t
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *, void *)
    int pthread_mutex_lock(pthread_mutex_t *)
    int pthread_mutex_unlock(pthread_mutex_t *)
    int pthread_mutex_destroy(pthread_mutex_t *)
    int pthread_join(pthread_t, void **)
    int bps_start_thread(pthread_t *, void *(*)(void *) noexcept nogil, void *)

cdef extern from "port.h" nogil:
    struct bps_port:
        bps_lane *lane
        void *board
        bps_doorbell *doorbell
        uint32_t capacity, n_words
        int node_pidfd
        pthread_mutex_t mutex
        bps_trace records
        bps_steps steps
    enum: BPS_DONE, BPS_TIMED_OUT, BPS_ABORTED, BPS_NODE_DIED, BPS_INTERRUPTED
    void bps_port_stay_awake(bps_port *, uint64_t)
    int bps_port_announce(bps_port *, bps_entry *)
    int bps_port_wait(bps_port *, uint32_t, uint32_t, uint64_t)

cdef extern from "pipelined_transfer.h" nogil:
    struct bps_chunk:
        uint32_t part
    enum: BPS_DIFFERENT, BPS_FINGERPRINT
    int bps_pipelined_transfer(bps_port *, const bps_chunk *, uint32_t, uint32_t, uint32_t *, uint32_t *, uint64_t)


cdef inline bytes trace_bytes(const bps_trace *trace):
    """Return the records so far (`record.h`)."""
    return PyBytes_FromStringAndSize(<char *>trace.records, <Py_ssize_t>(32 * min(trace.used, trace.capacity)))
