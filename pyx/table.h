/* Table of parts: insertion, removal, queries, order. Every function takes the engine's lock itself. */
#pragma once

#include "arrivals.h"
#include "store.h"

enum { BPS_RETIRED = 0, BPS_ABSENT = 1, BPS_UNDER_WAY = 2 };

struct bps_row {
    uint32_t part, round, n_missing; /* the last round consumed, and the inputs missing for the next */
};

/* What a part waits for. */
struct bps_gap {
    uint32_t round, n;
    int owned;
    uint32_t sources[BPS_MAX_SOURCES];
};

/* Put `fresh` in, active from the next commit on; 0, or -1 if there is such a part. */
static inline int bps_table_put(struct bps_core *core, uint32_t index, struct bps_part *fresh)
{
    pthread_mutex_lock(&core->lock);
    int is_free = core->parts[index].inputs == NULL;
    if (is_free) {
        if (fresh->store != NULL) {
            fresh->is_backed = fresh->store->backups >= 0;
            bps_store_join(fresh->store, index);
        }
        fresh->generation = core->generation + 1;
        core->parts[index] = *fresh;
        bps_store(bps_board_word(core->board, index), fresh->round);
        core->n_parts = core->n_parts > index + 1 ? core->n_parts : index + 1;
        core->allocations++;
    }
    bps_leave(core);
    return is_free ? 0 : -1;
}

/* Forget free places at the end, for which no commit has ranks. Called with the lock held. */
static inline void bps_table_trim(struct bps_core *core)
{
    while (core->n_parts != 0 && core->parts[core->n_parts - 1].inputs == NULL)
        core->n_parts--;
}

/* Take out a part that was not committed yet. */
static inline void bps_table_remove(struct bps_core *core, uint32_t index)
{
    pthread_mutex_lock(&core->lock);
    if (index < core->n_parts && core->parts[index].generation > core->generation) {
        bps_store_leave(core, index);
        bps_part_free(&core->parts[index]);
    }
    bps_table_trim(core);
    bps_leave(core);
}

/* BPS_RETIRED if the committed part is there and nothing of it is under way. Called with the lock held. */
static inline int bps_table_retirable(struct bps_core *core, uint32_t index)
{
    if (index >= core->n_parts || core->parts[index].inputs == NULL ||
        core->parts[index].generation > core->generation)
        return BPS_ABSENT;
    const struct bps_part *part = &core->parts[index];
    int is_quiet = part->n_missing == part->n_inputs && bps_load(bps_board_word(core->board, index)) == part->round;
    return is_quiet ? BPS_RETIRED : BPS_UNDER_WAY;
}

/* Take out n committed parts and clear their words for others; else none, and `culprit` is which one cannot be. */
static inline int bps_table_retire(struct bps_core *core, const uint32_t *index, uint32_t n, uint32_t *culprit)
{
    int status = BPS_RETIRED;
    pthread_mutex_lock(&core->lock);
    bps_drain(core);
    for (uint32_t i = 0; i < n && status == BPS_RETIRED; i++) {
        *culprit = index[i];
        status = bps_table_retirable(core, index[i]);
    }
    for (uint32_t i = 0; i < n && status == BPS_RETIRED; i++) {
        bps_store_leave(core, index[i]);
        bps_part_free(&core->parts[index[i]]);
        bps_store(bps_board_word(core->board, index[i]), 0);
    }
    bps_table_trim(core);
    bps_leave_and_wake(core, NULL, 1); /* what was drained may be complete */
    return status;
}

/* Fill up to `room` rows; how many. */
static inline uint32_t bps_table_report(struct bps_core *core, struct bps_row *rows, uint32_t room)
{
    uint32_t n = 0;
    pthread_mutex_lock(&core->lock);
    for (uint32_t i = 0; i < core->n_parts && n < room; i++)
        if (core->parts[i].inputs != NULL)
            rows[n++] = (struct bps_row){i, core->parts[i].round, core->parts[i].n_missing};
    bps_leave(core);
    return n;
}

/* Say what a part waits for: a member that lacks only the result waits for its owner. 0, or -1 if it is not there. */
static inline int bps_table_missing(struct bps_core *core, uint32_t index, struct bps_gap *gap)
{
    pthread_mutex_lock(&core->lock);
    bps_drain(core);
    int is_there = index < core->n_parts && core->parts[index].inputs != NULL;
    if (is_there) {
        const struct bps_part *part = &core->parts[index];
        gap->round = part->round + 1;
        gap->owned = part->owned;
        gap->n = 0;
        for (uint32_t i = 0; i < part->n_inputs; i++)
            if (!part->inputs[i].arrived)
                gap->sources[gap->n++] = part->inputs[i].source;
        int has_nothing = part->n_missing == part->n_inputs;
        if (!part->owned && has_nothing && bps_load(bps_board_word(core->board, index)) != part->round) {
            gap->round = part->round;
            gap->sources[0] = part->owner;
            gap->n = 1;
        }
    }
    bps_leave_and_wake(core, NULL, 1); /* what was drained may be complete */
    return is_there ? 0 : -1;
}

/* Activate what was put in, give part i the rank `order[i]` of n, and thaw; 0, or -1: not frozen, another generation
 * is next, or a part has no rank. */
static inline int bps_table_commit(struct bps_core *core, uint32_t generation, const uint32_t *order, uint32_t n)
{
    pthread_mutex_lock(&core->lock);
    int is_next = core->frozen && generation == core->generation + 1 && n >= core->n_parts;
    if (is_next) {
        core->generation = generation;
        for (uint32_t i = 0; i < core->n_parts; i++)
            core->parts[i].order = order[i];
        core->heap.used = core->n_parked = 0;
        for (uint32_t i = 0; i < core->n_parts; i++) {
            struct bps_codec *codec = core->parts[i].codec;
            if (codec != NULL)
                codec->queued = 0;
            if (codec != NULL && codec->has_result)
                bps_queue(core, i);
            if (core->parts[i].inputs != NULL && core->parts[i].n_missing == 0 && !core->parts[i].held)
                bps_ready(core, i);
        }
        bps_thaw(core);
    }
    bps_leave_and_wake(core, NULL, is_next ? INT_MAX : 0);
    return is_next ? 0 : -1;
}
