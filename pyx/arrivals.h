/* Arrivals: what transports report to an engine, and what happens to it while the engine is frozen. */
#pragma once

#include "core.h"

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
            bps_arrive(core, early->source, early->part, early->round, early->flags, 0, 0, early->time_ns);
    }
    core->n_early = 0;
}

/* `bps_arrived_fn`: a transport has received a payload whole. */
static void bps_on_arrived(void *engine, uint32_t source, uint32_t part, uint32_t round, uint32_t flags)
{
    struct bps_core *core = engine;
    uint64_t now_ns = bps_now_ns();
    int queued = 0;
    pthread_mutex_lock(&core->lock);
    if (core->frozen)
        bps_keep_early(core, (struct bps_early){source, part, round, flags, now_ns});
    else
        queued = bps_arrive(core, source, part, round, flags, 0, 0, now_ns);
    pthread_mutex_unlock(&core->lock);
    if (queued)
        bps_ring_doorbell(core->doorbell, 1);
}

/* `bps_notify_fn`: a transport has something for Python. */
static void bps_on_notify(void *engine, uint32_t kind, uint32_t source, uint32_t part, uint32_t round, uint32_t code,
                          uint64_t nbytes)
{
    bps_event_out(engine, kind, source, part, round, code, 0, nbytes);
}
