/* Store: what an owner keeps of a partition from round to round: pushes are applied to it, and answers are copies of
 * it.
 *
 * Each worker (a rank, a node's ranks, the whole job) pushes through a part of its own; all of them share the store.
 *
 *   round 1                      sets the weights: one worker pushes them, the others push nothing
 *   round 2, with momentum       sets the momentum, in the same way; if no worker does, it is zero
 *   any later round              is applied by the store's rule, under the store's lock: pushes are atomic
 *   a later one without input    with momentum: the answer is the momentum; else, as of any other round, the weights
 *
 * No answer is given before the weights were set, nor in round r before every other worker's push of round r -
 * staleness was applied. An answer is copied after that, so it contains all of them: bounded staleness as in
 * stale-synchronous parallel training (Ho et al., NIPS 2013).
 *
 * A store with momentum has one worker, whose rounds are answered at once. One with backups: see `backups.h`.
 *
 * The lists are guarded by the engine's lock, the memory by the store's own, which is held around kernels only.
 */
#pragma once

#include "core.h"

/* What a kernel does, see `bpsfast/kernels/stores.py`. */
enum { BPS_STORE_READ = 0, BPS_STORE_SET = 1, BPS_STORE_ADD = 2, BPS_STORE_NESTEROV = 3, BPS_STORE_SHARE = 4 };

typedef void (*bps_store_kernel)(void *values, void *weights, void *momentum, int64_t n_elements, int64_t what,
                                 double learning_rate, double mu);

struct bps_weight_store {
    pthread_mutex_t lock;
    bps_store_kernel kernel;
    void *weights, *momentum; /* not its own; momentum NULL: pushes are added */
    double learning_rate, mu;
    int64_t staleness; /* in rounds; negative: any */
    int64_t backups;   /* workers that are not waited for; negative: no versions (backups.h), every push counts */
    uint32_t version, n_taken; /* of the weights; and the pushes that the next one has so far */
    int is_stepping;           /* the next version is made, or a part is queued to do so */
    uint64_t begun_ns;         /* when the first push for the next version had come, */
    uint64_t last_begun_ns;    /* and for the last one */
    int is_set;
    uint32_t n_parts;
    uint32_t *taken;  /* room for as many, for who makes a version */
    uint32_t parts[]; /* the workers' */
};

/* A store of `momentum_nbytes` (0: without) for up to n_parts workers; NULL without memory. */
static inline struct bps_weight_store *bps_store_make(uint32_t n_parts, void *momentum, uint64_t momentum_nbytes)
{
    struct bps_weight_store *store =
        (struct bps_weight_store *)calloc(1, sizeof *store + 2 * n_parts * sizeof store->parts[0]);
    if (store == NULL)
        return NULL;
    store->taken = store->parts + n_parts;
    pthread_mutex_init(&store->lock, NULL);
    store->momentum = momentum;
    if (momentum != NULL)
        memset(momentum, 0, momentum_nbytes);
    return store;
}

/* Add a worker's part: one of those that the store was made for. */
static inline void bps_store_join(struct bps_weight_store *store, uint32_t index)
{
    store->parts[store->n_parts++] = index;
}

static inline void bps_store_free(struct bps_weight_store *store)
{
    pthread_mutex_destroy(&store->lock);
    free(store);
}

/* Whether the next version has as many pushes as it is made of. */
static inline int bps_store_is_quorum(const struct bps_weight_store *store)
{
    int64_t wanted = (int64_t)store->n_parts - store->backups;
    return store->n_taken != 0 && store->n_taken >= (wanted > 1 ? wanted : 1);
}

/* Whether another worker's part keeps the answer to `round` back. */
static inline int bps_store_is_behind(const struct bps_weight_store *store, const struct bps_part *other,
                                      uint32_t round)
{
    if (store->backups >= 0 && store->is_set)
        return !other->is_taken;
    return store->is_set ? store->staleness >= 0 && (int32_t)(round - other->applied) > store->staleness
                         : other->n_applied == 0;
}

/* Whether the round of a part that is complete, or was applied, may be answered. */
static inline int bps_store_answers(const struct bps_core *core, uint32_t index)
{
    const struct bps_weight_store *store = core->parts[index].store;
    if (store->backups >= 0)
        return store->is_set && !store->is_stepping && (!core->parts[index].is_taken || bps_store_is_quorum(store));
    for (uint32_t i = 0; store->is_set && store->staleness >= 0 && i < store->n_parts; i++)
        if (store->parts[i] != index
            && bps_store_is_behind(store, &core->parts[store->parts[i]], core->parts[index].round + 1))
            return 0;
    return store->is_set;
}

/* Queue the answers that may be given now; of those that come with a version, the part that makes it. */
static inline void bps_store_release(struct bps_core *core, struct bps_weight_store *store)
{
    for (uint32_t i = 0; i < store->n_parts; i++) {
        uint32_t index = store->parts[i];
        if (core->parts[index].held && bps_store_answers(core, index)) {
            core->parts[index].held = 0;
            store->is_stepping |= core->parts[index].is_taken;
            bps_heap_push(&core->heap, core->parts, index);
        }
    }
}

/* Take a part, of which nothing is under way, out of its store: nobody waits for its worker any more. The last part
 * frees the store. */
static inline void bps_store_leave(struct bps_core *core, uint32_t index)
{
    struct bps_weight_store *store = core->parts[index].store;
    uint32_t kept = 0;
    if (store == NULL)
        return;
    for (uint32_t i = 0, n = store->n_parts; i < n; i++) /* the others keep their order: sums are made in it */
        if (store->parts[i] != index)
            store->parts[kept++] = store->parts[i];
    store->n_parts = kept;
    core->parts[index].store = NULL;
    if (store->n_parts == 0)
        bps_store_free(store);
    else
        bps_store_release(core, store);
}

/* Which parts keep the answer of this one back: their number, at most `room`. Called with the lock held. */
static inline uint32_t bps_store_behind(const struct bps_core *core, uint32_t index, uint32_t *parts, uint32_t room)
{
    uint32_t n = 0;
    const struct bps_weight_store *store = core->parts[index].store;
    for (uint32_t i = 0; core->parts[index].held && i < store->n_parts && n < room; i++)
        if (store->parts[i] != index
            && bps_store_is_behind(store, &core->parts[store->parts[i]], core->parts[index].round + 1))
            parts[n++] = store->parts[i];
    return n;
}

/* Apply the sum in `values` (if anybody gave one), and put the answer there (if it may be given). No lock held. `nth`:
 * which round of the part it is; the first one sets the weights, and the second one the momentum. */
static inline void bps_store_step(struct bps_core *core, int thread, uint32_t index, uint32_t round, int nth,
                                  void *values, int is_given, int answers)
{
    struct bps_part *part = &core->parts[index];
    struct bps_weight_store *store = part->store;
    int rule = store->momentum != NULL ? BPS_STORE_NESTEROV : BPS_STORE_ADD;
    int sets_momentum = store->momentum != NULL && nth == 2;
    int reads_momentum = store->momentum != NULL && nth > 2 && !is_given;
    pthread_mutex_lock(&store->lock);
    uint64_t begin_ns = bps_now_ns();
    if (is_given) {
        store->kernel(values, sets_momentum ? store->momentum : store->weights, store->momentum,
                      (int64_t)part->n_elements, nth == 1 || sets_momentum ? BPS_STORE_SET : rule,
                      store->learning_rate, store->mu);
        uint64_t end_ns = bps_now_ns();
        bps_record_add(&core->trace, BPS_APPLY, thread, index, round, part->nbytes, begin_ns, end_ns);
        begin_ns = end_ns;
    }
    if (answers) {
        store->kernel(values, reads_momentum ? store->momentum : store->weights, NULL, (int64_t)part->n_elements,
                      BPS_STORE_READ, 0.0, 0.0);
        bps_record_add(&core->trace, BPS_ANSWER, thread, index, round, part->nbytes, begin_ns, bps_now_ns());
        part->seen = store->version;
    }
    pthread_mutex_unlock(&store->lock);
}

/* Sum the inputs of a complete part into its output, divided by `divisor`; how many there were, or -1 if one is not
 * mapped: the part is parked. Called with the lock held, and by whom the engine knows to be running; drops it
 * meanwhile. */
static inline int bps_store_sum(struct bps_core *core, struct bps_worker *worker, uint32_t index, int64_t divisor)
{
    struct bps_part *part = &core->parts[index];
    uint32_t round = part->round + 1;
    void **in = worker->pointers;
    int before = bps_collect(core, part, in, 0, part->n_before, part->nbytes, 0);
    int local = bps_collect(core, part, in, part->n_before, part->n_local, part->nbytes, before);
    int total = bps_collect(core, part, in, part->n_before + part->n_local, part->n_after, part->nbytes, local);
    if (total < 0) {
        bps_park(core, index);
        return total;
    }
    bps_leave(core);
    uint64_t begin_ns = bps_now_ns();
    if (total != 0)
        part->kernel((void *)part->outputs[round & 1], in, before, local - before, total - local,
                     (int64_t)part->n_elements, divisor, 0);
    bps_record_add(&core->trace, BPS_QUEUE, worker->index, index, round, part->nbytes, part->complete_ns, begin_ns);
    bps_record_add(&core->trace, BPS_SUM, worker->index, index, round, (uint64_t)total * part->nbytes, begin_ns,
                   bps_now_ns());
    pthread_mutex_lock(&core->lock);
    core->sums++;
    core->bytes_summed += (uint64_t)total * part->nbytes;
    return total;
}

/* Sum a complete part with a store, apply the sum, answer: now, or once that is allowed. As `bps_run_part`. */
static inline void bps_run_store(struct bps_core *core, struct bps_worker *worker, uint32_t index)
{
    struct bps_part *part = &core->parts[index];
    struct bps_weight_store *store = part->store;
    uint32_t round = part->round + 1, *word = NULL;
    int is_applied = part->applied == round, total = 0;
    int nth = part->n_applied + (!is_applied && part->n_applied < 3);
    int sets = nth == 1 || (nth == 2 && store->momentum != NULL);
    core->running++;
    if (!is_applied && (total = bps_store_sum(core, worker, index, sets ? 1 : part->divisor)) < 0) {
        bps_ran(core, NULL);
        return;
    }
    int answers = bps_store_answers(core, index);
    bps_leave(core);
    bps_store_step(core, worker->index, index, round, nth, (void *)part->outputs[round & 1], total != 0, answers);
    pthread_mutex_lock(&core->lock);
    part->applied = round;
    part->n_applied = (uint8_t)nth;
    store->is_set |= total != 0;
    bps_store_release(core, store);
    if (answers)
        word = bps_hand_out(core, index, round);
    else if (bps_store_answers(core, index)) /* what it waits for came meanwhile */
        bps_heap_push(&core->heap, core->parts, index);
    else
        part->held = 1;
    bps_ran(core, word);
}
