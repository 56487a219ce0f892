# Extern declarations of the engine's core for engine.pyx, header by header: from part.h to owner_change.h.
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from "lag.h" nogil:
    struct bps_lag:
        uint64_t n, sum_ns, max_ns, n_last, last_sum_ns
    uint64_t bps_lag_p99(bps_lag *)

cdef extern from "rows.h" nogil:
    struct bps_rows:
        uint64_t n_rows, max_rows, row_elements, row_nbytes
    uint64_t bps_rows_nbytes(const bps_rows *, uint64_t)

cdef extern from "part.h" nogil:
    struct bps_weight_store
    ctypedef void (*bps_kernel)(void *, void **, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t) noexcept nogil
    struct bps_input:
        uint32_t source
        uint8_t arrived
        uint64_t slot
    struct bps_codec
    struct bps_part:
        bps_kernel kernel
        bps_codec *codec
        bps_input *inputs
        uint32_t *shm_peers
        uint64_t nbytes, n_elements, unit_offset
        bps_rows rows
        int64_t divisor
        uint64_t outputs[2]
        uint64_t partial_offset
        uint32_t n_before, n_local, n_after, n_inputs, n_shm_peers, owner
        uint16_t partial_segment
        uint8_t owned, to_wire
        uint32_t generation, order, round, applied, n_missing
        bps_weight_store *store
    void bps_part_free(bps_part *)

cdef extern from "codec.h" nogil:
    ctypedef int64_t (*bps_encode_fn)(void *, int64_t, const void *, int64_t, void *, uint64_t *, int64_t, int64_t,
                                      void *) noexcept nogil
    ctypedef int64_t (*bps_decode_fn)(void *, int64_t, const void *, int64_t, int64_t, int64_t, int64_t, void *
                                      ) noexcept nogil
    ctypedef void (*bps_feed_fn)(void *, const void *, void *, void *, int64_t, double, double) noexcept nogil
    ctypedef void (*bps_divide_fn)(void *, int64_t, double) noexcept nogil
    ctypedef void (*bps_narrow_fn)(void *, const void *, int64_t) noexcept nogil
    struct bps_codec:
        bps_encode_fn encode
        bps_decode_fn decode
        bps_feed_fn feed, feed_back
        bps_divide_fn divide
        bps_narrow_fn narrow
        uint64_t width, room_nbytes, scratch_nbytes
        int64_t k, flags
        double mu, rate, last_rate, last_rate_back
        void *error
        void *momentum
        void *error_back
        uint64_t generator[2]
        uint64_t generator_back[2]
        char *frame
        char *frames[2]
        void *results[2]
        uint32_t result_round

cdef extern from "events.h" nogil:
    struct bps_event:
        uint32_t kind, source, part, round, code
        uint64_t address, nbytes
    struct bps_events:
        bps_event *taken
        uint64_t grown
    void bps_events_await(bps_events *, uint64_t)
    uint32_t bps_events_take(bps_events *)
    void bps_events_wake(bps_events *)

cdef extern from "core.h" nogil:
    enum: BPS_RANK, BPS_SHM_PEER, BPS_WIRE_PEER, BPS_MAX_SOURCES, BPS_MAX_SEGMENTS, BPS_NOBODY
    struct bps_source:
        int kind
        bps_lane *lane
        bps_lane *outgoing
        uint32_t capacity, outgoing_capacity
        uint64_t pushed_nbytes
        bps_doorbell *doorbell
    struct bps_core:
        pthread_mutex_t lock
        bps_part *parts
        uint32_t n_parts, generation, n_sources
        bps_source *sources
        int frozen, stopping, fifo
        void *board
        bps_doorbell *doorbell
        uint64_t nontemporal_nbytes, awake_ns
        bps_trace trace
        bps_events events
        bps_lag *local_lags
        bps_lag *owner_lags
        uint64_t sums, bytes_summed, published, published_nbytes, forwarded, stale, left_out, allocations
    void bps_abort(bps_core *, const char *, size_t)

cdef extern from "arrivals.h" nogil:
    void bps_on_arrived(void *, uint32_t, uint32_t, uint32_t, uint32_t)
    void bps_on_attach(void *, void *)
    void bps_on_notify(void *, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint64_t)

cdef extern from "store.h" nogil:
    ctypedef void (*bps_store_kernel)(void *, void *, void *, int64_t, int64_t, double, double) noexcept nogil
    struct bps_weight_store:
        bps_store_kernel kernel
        void *weights
        double learning_rate, mu
        int64_t staleness, backups
        uint32_t n_parts
    bps_weight_store *bps_store_make(uint32_t, void *, uint64_t)
    void bps_store_free(bps_weight_store *)
    uint32_t bps_store_behind(const bps_core *, uint32_t, uint32_t *, uint32_t)

cdef extern from "lifecycle.h" nogil:
    bps_core *bps_core_make(int, uint64_t, uint32_t, uint32_t)
    void bps_core_free(bps_core *)
    int bps_start(bps_core *, int)
    void bps_stop(bps_core *)
    int bps_freeze(bps_core *, uint64_t)
    int bps_map_segment(bps_core *, uint32_t, uint32_t, uint64_t, uint64_t)

cdef extern from "table.h" nogil:
    enum: BPS_RETIRED, BPS_ABSENT
    struct bps_row:
        uint32_t part, round, n_missing
    struct bps_gap:
        uint32_t round, n
        int owned
        uint32_t sources[BPS_MAX_SOURCES]
    int bps_table_put(bps_core *, uint32_t, bps_part *)
    void bps_table_remove(bps_core *, uint32_t)
    int bps_table_retire(bps_core *, const uint32_t *, uint32_t, uint32_t *)
    uint32_t bps_table_report(bps_core *, bps_row *, uint32_t)
    int bps_table_missing(bps_core *, uint32_t, bps_gap *)
    int bps_table_commit(bps_core *, uint32_t, const uint32_t *, uint32_t)

cdef extern from "owner_change.h" nogil:
    enum: BPS_OWNER_CHANGED, BPS_NOT_FROZEN, BPS_NO_PART, BPS_OTHER_ROUND
    int bps_detach(bps_core *, uint32_t)
    int bps_progress(bps_core *, uint32_t, uint32_t *, uint32_t *)
    int bps_was_told(bps_core *, uint32_t, uint32_t, uint32_t)
    int bps_has_come(bps_core *, uint32_t, uint32_t, uint32_t)
    void bps_drop_early(bps_core *, uint32_t, uint32_t, uint32_t)
    int bps_set_keeper(bps_core *, uint32_t, uint32_t)
    int bps_set_divisor(bps_core *, uint32_t, int64_t)
    int bps_lose_input(bps_core *, uint32_t, uint32_t)
    int bps_redo(bps_core *, uint32_t, uint32_t, int)
    int bps_await_again(bps_core *, uint32_t, uint32_t)
    int bps_follow(bps_core *, uint32_t, uint32_t, uint32_t, uint32_t)
    int bps_change_owner(bps_core *, uint32_t, bps_part *, uint32_t)
    int bps_give_up(bps_core *, uint32_t, bps_part *, uint32_t)
