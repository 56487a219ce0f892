/* Arrivals: what transports report to an engine, and what happens to it while the engine is frozen. */
#pragma once

#include "workers.h"

/* Larger sums are left to a worker: they would keep the receiving thread from its socket for longer than a worker takes
 * to wake. */
#define BPS_SUM_AT_ONCE_NBYTES (128u << 10)

/* Keep an arrival until the thaw: a peer that commits earlier may already write to the part that this node is to
 * own. */
static inline void bps_keep_early(struct bps_core *core, struct bps_early early)
{
    static const char reason[] = "CapacityError: the node of this machine ran out of memory for what arrived before a "
                                 "commit, and ended the job: give it more memory";
    if (core->n_early == core->early_capacity) {
        uint32_t capacity = core->early_capacity ? 2 * core->early_capacity : 256;
        struct bps_early *grown = realloc(core->early, capacity * sizeof *grown);
        if (grown == NULL) {
            bps_abort(core, reason, sizeof reason);
            return;
        }
        core->early = grown;
        core->early_capacity = capacity;
    }
    core->early[core->n_early++] = early;
}

/* Go on after a freeze, first with what came meanwhile; nothing of sources that were given up. Called with the lock. */
static inline void bps_thaw(struct bps_core *core)
{
    core->frozen = 0;
    for (uint32_t i = 0; i < core->n_early; i++) {
        const struct bps_early *early = &core->early[i];
        if (core->sources[early->source].kind != BPS_CLOSED)
            bps_arrive(core, early->source, early->part, early->round, early->flags, early->segment, early->offset,
                       early->time_ns);
    }
    core->n_early = 0;
}

/* Keep, as early arrivals, what peers of this host have announced to a frozen engine. Called with the lock. */
static inline void bps_keep_announced(struct bps_core *core)
{
    struct bps_entry entry;
    for (uint32_t i = 0; i < core->n_sources; i++)
        while (core->sources[i].kind == BPS_SHM_PEER && bps_next_entry(core, i, &entry) == 0)
            for (uint32_t k = entry.part; k < entry.part + entry.count; k++)
                bps_keep_early(core, (struct bps_early){i, k, entry.round, entry.flags, entry.time_ns, entry.segment,
                                                        bps_offset_of(core, &entry, k)});
}

/* Whether the one part that waits for a thread can be summed by this one, which has received its last input. */
static inline int bps_may_sum_at_once(const struct bps_core *core)
{
    if (core->spare_is_busy || core->frozen || core->stopping || core->heap.used != 1)
        return 0;
    const struct bps_part *part = &core->parts[core->heap.index[0]];
    return part->codec == NULL && part->store == NULL && part->rows.row_nbytes == 0
           && part->nbytes * part->n_inputs <= BPS_SUM_AT_ONCE_NBYTES;
}

/* `bps_arrived_fn`: a transport has received a payload whole. */
static void bps_on_arrived(void *engine, uint32_t source, uint32_t part, uint32_t round, uint32_t flags)
{
    struct bps_core *core = engine;
    uint64_t now_ns = bps_now_ns();
    int queued = 0, has_time = (flags & BPS_MORE_ARRIVED) == 0;
    flags &= ~BPS_MORE_ARRIVED;
    pthread_mutex_lock(&core->lock);
    if (core->frozen)
        bps_keep_early(core, (struct bps_early){source, part, round, flags, now_ns, 0, 0});
    else
        queued = bps_arrive(core, source, part, round, flags, 0, 0, now_ns);
    if (queued && has_time && bps_may_sum_at_once(core)) {
        core->spare_is_busy = 1;
        bps_run_part(core, &core->workers[core->n_workers], bps_heap_pop(&core->heap, core->parts));
        core->spare_is_busy = 0;
        queued = core->heap.used != 0;
    }
    bps_leave_and_wake(core, NULL, queued);
}

/* `bps_attach_fn`. */
static void bps_on_attach(void *engine, void *dispatch)
{
    struct bps_core *core = engine;
    pthread_mutex_lock(&core->lock);
    core->dispatch = dispatch;
    pthread_mutex_unlock(&core->lock);
}

/* `bps_notify_fn`: a transport has delivered a write, or lost its peer. */
static void bps_on_notify(void *engine, uint32_t kind, uint32_t source, uint32_t part, uint32_t round, uint32_t code,
                          uint64_t nbytes)
{
    struct bps_core *core = engine;
    if (kind == BPS_EVENT_DUE) {
        bps_ring_doorbell(core->doorbell, 1);
        return;
    }
    bps_event_out(core, kind, source, part, round, code, 0, nbytes);
    if (core->dispatch != NULL && kind == BPS_EVENT_DELIVERED)
        bps_dispatch_pump(core->dispatch);
}
