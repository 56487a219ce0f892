/* Lifecycle: makes, starts, freezes, stops and frees the core of an engine. */
#pragma once

#include "arrivals.h"
#include "workers.h"

/* Start no kernel any more and wait until none runs; how many still run at the deadline (then not frozen). */
static inline int bps_freeze(struct bps_core *core, uint64_t timeout_ns)
{
    struct timespec until;
    uint64_t deadline_ns = bps_now_ns() + timeout_ns;
    pthread_mutex_lock(&core->lock);
    core->frozen = 1;
    while (core->running != 0 && bps_now_ns() < deadline_ns) {
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += 1;
        pthread_cond_timedwait(&core->idle, &core->lock, &until);
    }
    int running = core->running;
    if (running != 0)
        bps_thaw(core);
    bps_leave_and_wake(core, NULL, running != 0 ? INT_MAX : 0); /* for what was queued meanwhile */
    return running;
}

static inline void bps_stop(struct bps_core *core)
{
    pthread_mutex_lock(&core->lock);
    core->stopping = 1;
    bps_leave(core);
    bps_ring_doorbell(core->doorbell, INT_MAX);
    for (int i = 0; i < core->n_workers; i++)
        pthread_join(core->workers[i].thread, NULL);
    core->n_workers = 0;
    for (uint32_t i = 0; i < core->n_sources; i++)
        core->sources[i].kind = BPS_CLOSED;
}

static inline void bps_core_free(struct bps_core *core)
{
    for (uint32_t i = 0; core->parts != NULL && i < core->n_parts; i++) {
        bps_store_leave(core, i);
        bps_part_free(&core->parts[i]);
    }
    for (uint32_t i = 0; core->sources != NULL && i < core->n_sources; i++) {
        free(core->sources[i].addresses);
        free(core->sources[i].nbytes);
    }
    free(core->parts);
    free(core->heap.index);
    free(core->parked);
    free(core->early);
    free(core->sources);
    free(core->local_lags);
    free(core->owner_lags);
    free(core->workers);
    free(core->events.items);
    free(core->events.taken);
    free(core->trace.records);
    free(core);
}

/* All tables of an engine without threads; NULL without memory. */
static inline struct bps_core *bps_core_make(int n_workers, uint64_t trace_capacity, uint32_t first_round,
                                             uint32_t last_round)
{
    struct bps_core *core = calloc(1, sizeof *core);
    if (core == NULL)
        return NULL;
    pthread_mutex_init(&core->lock, NULL);
    pthread_cond_init(&core->idle, NULL);
    core->parts = calloc(BPS_MAX_PARTS, sizeof *core->parts);
    core->heap.index = calloc(BPS_MAX_PARTS, sizeof *core->heap.index);
    core->parked = calloc(BPS_MAX_PARTS, sizeof *core->parked);
    core->sources = calloc(BPS_MAX_SOURCES, sizeof *core->sources);
    core->local_lags = calloc(BPS_MAX_SOURCES, sizeof *core->local_lags);
    core->owner_lags = calloc(BPS_MAX_SOURCES, sizeof *core->owner_lags);
    core->workers = calloc((size_t)n_workers + 1, sizeof *core->workers);
    if (bps_events_init(&core->events, 4096) != 0 || !core->parts || !core->heap.index || !core->parked
        || !core->sources || !core->local_lags || !core->owner_lags || !core->workers
        || bps_trace_open(&core->trace, trace_capacity, first_round, last_round) != 0) {
        bps_core_free(core);
        return NULL;
    }
    return core;
}

/* Start the threads; 0 or an errno with none left running. */
static inline int bps_start(struct bps_core *core, int n_workers)
{
    bps_look_for_cpus(&core->cpus, n_workers);
    core->workers[n_workers].core = core;
    core->workers[n_workers].index = n_workers;
    for (int i = 0; i < n_workers; i++) {
        core->workers[i].cpu_use.cpu = -1;
        core->workers[i].cpu_use.allowed = core->cpus.all;
        core->workers[i].core = core;
        core->workers[i].index = i;
        int rc = bps_start_thread(&core->workers[i].thread, bps_work, &core->workers[i]);
        if (rc != 0) {
            bps_stop(core);
            return rc;
        }
        pthread_mutex_lock(&core->lock);
        core->n_workers++;
        bps_leave(core);
    }
    return 0;
}

/* Grow a source's segment table so that `segment` fits; 0, or -1 without memory. Under the lock. */
static inline int bps_source_map(struct bps_source *source, uint32_t segment, uint64_t address, uint64_t nbytes)
{
    if (segment >= source->n_segments) {
        uint32_t wanted = segment < 16 ? 32 : 2 * segment;
        uint64_t *addresses = realloc(source->addresses, wanted * sizeof *addresses);
        if (addresses == NULL)
            return -1;
        source->addresses = addresses;
        uint64_t *sizes = realloc(source->nbytes, wanted * sizeof *sizes);
        if (sizes == NULL)
            return -1;
        source->nbytes = sizes;
        memset(addresses + source->n_segments, 0, (wanted - source->n_segments) * sizeof *addresses);
        source->n_segments = wanted;
    }
    source->addresses[segment] = address;
    source->nbytes[segment] = nbytes;
    return 0;
}

/* Map a segment of a source: parts that waited for it go on, those that wait for another one wait again. */
static inline int bps_map_segment(struct bps_core *core, uint32_t source, uint32_t segment, uint64_t address,
                                uint64_t nbytes)
{
    pthread_mutex_lock(&core->lock);
    int rc = bps_source_map(&core->sources[source], segment, address, nbytes);
    uint32_t n_parked = core->n_parked;
    core->n_parked = 0;
    for (uint32_t i = 0; i < n_parked; i++) /* parks again behind what is read here */
        bps_ready(core, core->parked[i]);
    bps_leave_and_wake(core, NULL, INT_MAX);
    return rc;
}
