/* Record: one timed stretch of work on one partition; traces are arrays of these.
 *
 *   begin_ns 8, end_ns 8, part 4, round 4, kind 2, thread 2, nbytes 4 (little endian, CLOCK_MONOTONIC)
 *
 * A trace has a fixed capacity: once full it counts what it drops, so tracing never allocates on the data path. Only
 * rounds from first_round to last_round are kept, so the middle of a long job can be traced.
 *
 * `thread` is the engine's thread, or their number for who received the last input of a small part and summed it; of WIRE and RECEIVE the source id of the peer. Of PUSH `nbytes` is the number of
 * partitions, from `part` on, that were announced together. APPLY and ANSWER are made under their store's lock, so
 * their beginnings show the order. RECEIVE over RDMA is a moment, because its beginning is not observable.
 */
#pragma once

#include <stdint.h>
#include <stdlib.h>

enum { BPS_COPY_IN = 1, BPS_QUEUE = 2, BPS_SUM = 3, BPS_WIRE = 4, BPS_WAIT = 5, BPS_DELIVER = 6, BPS_GATHER = 7,
       BPS_RECEIVE = 8, BPS_PUSH = 9, BPS_APPLY = 10, BPS_ANSWER = 11, BPS_TO_HOST = 12,
       BPS_TO_DEVICE = 13, BPS_DIRECT = 14 };

struct bps_record {
    uint64_t begin_ns, end_ns;
    uint32_t part, round;
    uint16_t kind, thread;
    uint32_t nbytes;
};

struct bps_trace {
    struct bps_record *records; /* NULL: tracing is off */
    uint64_t capacity, used;
    uint32_t first_round, last_round;
};

/* Room for `capacity` records (0: tracing stays off) of rounds from `first` to `last` (0: to the end). 0, or -1 without
 * memory. The owner frees `records`. */
static inline int bps_trace_open(struct bps_trace *trace, uint64_t capacity, uint32_t first, uint32_t last)
{
    trace->records = capacity ? (struct bps_record *)calloc(capacity, sizeof *trace->records) : NULL;
    trace->capacity = capacity;
    trace->first_round = first;
    trace->last_round = last ? last : UINT32_MAX;
    return capacity && trace->records == NULL ? -1 : 0;
}

static inline void bps_record_add(struct bps_trace *trace, int kind, int thread, uint32_t part, uint32_t round,
                                  uint64_t nbytes, uint64_t begin_ns, uint64_t end_ns)
{
    if (trace->records == NULL || round < trace->first_round || round > trace->last_round)
        return;
    uint64_t i = __atomic_fetch_add(&trace->used, 1, __ATOMIC_RELAXED);
    if (i < trace->capacity)
        trace->records[i] = (struct bps_record){begin_ns, end_ns, part, round, (uint16_t)kind, (uint16_t)thread,
                                                (uint32_t)nbytes};
}
