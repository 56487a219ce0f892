/* Backups: workers step together, but do not wait for the last ones (Chen et al., "Revisiting Distributed Synchronous
 * SGD", 2016).
 *
 * A store with backups has *versions*. The next version is the last one plus the mean of the first pushes that were
 * computed on it: from all workers except `backups`. It is made when there are that many, in the order of workers, and
 * answers all of them. A push that was computed on an older version, or comes later, is left out, and answered with the
 * newest version. So is an empty push, at once.
 *
 * Versions are made one at a time, by the thread with the last push that is needed (or, if a worker leaves that was
 * waited for, by a thread that takes one of the waiting parts). Memory and version number change under the store's lock
 * only, so a thread that copies an answer knows its version.
 */
#pragma once

#include "store.h"

/* When the last input of a complete round came. */
static inline uint64_t bps_backups_came_ns(const struct bps_part *part)
{
    uint64_t last_ns = 0;
    for (uint32_t i = 0; i < part->n_inputs; i++)
        last_ns = part->inputs[i].time_ns > last_ns ? part->inputs[i].time_ns : last_ns;
    return last_ns;
}

/* Count how late a push was, compared with the first one for the same version. */
static inline void bps_backups_count_lag(struct bps_core *core, const struct bps_part *part, uint64_t begun_ns,
                                         int is_last)
{
    uint64_t came_ns = bps_backups_came_ns(part);
    if (part->unit_offset != 0)
        return;
    for (uint32_t i = 0; i < part->n_inputs; i++)
        bps_lag_add(&core->owner_lags[part->inputs[i].source], came_ns > begun_ns ? came_ns - begun_ns : 0, is_last);
}

/* Take a push into the next version, if it was computed on the last one and is not too late. */
static inline void bps_backups_take(struct bps_part *part)
{
    struct bps_weight_store *store = part->store;
    if (part->seen != store->version || store->is_stepping)
        return;
    uint64_t came_ns = bps_backups_came_ns(part);
    if (store->n_taken == 0 || came_ns < store->begun_ns)
        store->begun_ns = came_ns;
    part->is_taken = 1;
    store->n_taken++;
    store->is_stepping = bps_store_is_quorum(store);
}

/* Make the next version, and answer all pushes that are in it. Called with the lock held; drops it meanwhile. */
static inline void bps_backups_step(struct bps_core *core, int thread, struct bps_weight_store *store)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < store->n_parts; i++)
        if (core->parts[store->parts[i]].is_taken)
            store->taken[n++] = store->parts[i];
    int is_everybody = n == store->n_parts;
    bps_leave(core);
    pthread_mutex_lock(&store->lock);
    for (uint32_t i = 0; i < n; i++) {
        struct bps_part *part = &core->parts[store->taken[i]];
        uint32_t round = part->round + 1;
        uint64_t begin_ns = bps_now_ns();
        store->kernel((void *)part->outputs[round & 1], store->weights, NULL, (int64_t)part->n_elements,
                      BPS_STORE_SHARE, (double)n, 0.0);
        bps_record_add(&core->trace, BPS_APPLY, thread, store->taken[i], round, part->nbytes, begin_ns, bps_now_ns());
    }
    __atomic_store_n(&store->version, store->version + 1, __ATOMIC_RELAXED);
    for (uint32_t i = 0; i < n; i++) {
        struct bps_part *part = &core->parts[store->taken[i]];
        uint32_t round = part->round + 1;
        uint64_t begin_ns = bps_now_ns();
        store->kernel((void *)part->outputs[round & 1], store->weights, NULL, (int64_t)part->n_elements,
                      BPS_STORE_READ, 0.0, 0.0);
        bps_record_add(&core->trace, BPS_ANSWER, thread, store->taken[i], round, part->nbytes, begin_ns, bps_now_ns());
        part->seen = store->version;
    }
    pthread_mutex_unlock(&store->lock);
    pthread_mutex_lock(&core->lock);
    uint64_t last_ns = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t came_ns = bps_backups_came_ns(&core->parts[store->taken[i]]);
        last_ns = came_ns > last_ns ? came_ns : last_ns;
    }
    for (uint32_t i = 0; i < n; i++) {
        struct bps_part *part = &core->parts[store->taken[i]];
        bps_backups_count_lag(core, part, store->begun_ns, is_everybody && bps_backups_came_ns(part) == last_ns);
        part->is_taken = part->held = 0;
        uint32_t *word = bps_hand_out(core, store->taken[i], part->round + 1);
        if (word != NULL)
            bps_wake(word, INT_MAX);
    }
    store->last_begun_ns = store->begun_ns;
    store->n_taken = 0;
    store->is_stepping = 0;
}

/* Sum a complete part of a store that is set; take its push into the next version, or answer with the last one. As
 * `bps_run_part`. */
static inline void bps_run_backups(struct bps_core *core, struct bps_worker *worker, uint32_t index)
{
    struct bps_part *part = &core->parts[index];
    struct bps_weight_store *store = part->store;
    uint32_t round = part->round + 1, *word = NULL;
    core->running++;
    if (part->applied != round) {
        int total = bps_store_sum(core, worker, index, part->divisor);
        if (total < 0) {
            bps_ran(core, NULL);
            return;
        }
        part->applied = round;
        part->n_applied = part->n_applied < 3 ? part->n_applied + 1 : 3;
        part->is_given = total != 0;
        if (part->is_given)
            bps_backups_take(part);
    }
    if (part->is_taken && store->is_stepping) {
        bps_backups_step(core, worker->index, store);
        bps_store_release(core, store);
    } else if (part->is_taken || store->is_stepping) {
        part->held = 1;
    } else {
        if (part->is_given) {
            core->left_out++;
            bps_backups_count_lag(core, part, store->last_begun_ns, 1);
        }
        bps_leave(core);
        bps_store_step(core, worker->index, index, round, 3, (void *)part->outputs[round & 1], 0, 1);
        pthread_mutex_lock(&core->lock);
        word = bps_hand_out(core, index, round);
    }
    bps_ran(core, word);
}
