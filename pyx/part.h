/* Part: what an engine knows of one partition, and the heap of those that are ready to be summed.
 *
 * A part is `owned` (all inputs of the job meet here; the result is published and sent out) or a `member`
 * (only the local ranks' inputs meet here; their partial is forwarded to the owner, whose result comes back).
 * All functions run under the engine's lock.
 */
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "lag.h"
#include "lane.h"
#include "rows.h"

struct bps_input {
    uint32_t source;  /* the engine's number of the rank or node that delivers it */
    uint16_t segment; /* where it lies: the source's segment and offset, */
    uint8_t arrived, empty;
    uint64_t offset;
    uint64_t slot;    /* or, from a wire peer, this fixed address */
    uint64_t time_ns; /* when it came */
};

struct bps_codec;

struct bps_part {
    bps_kernel kernel;
    struct bps_codec *codec;  /* how it is compressed between nodes; NULL: not at all. The part's own */
    struct bps_input *inputs; /* in the order of the association: before, local, after; NULL: no such part */
    uint32_t *shm_peers;      /* owned: sources that only need to be told */
    uint64_t nbytes, n_elements, unit_offset; /* of rows: nbytes is the room of a frame */
    struct bps_rows rows;
    int64_t divisor;
    uint64_t outputs[2]; /* owned: result of even and odd rounds; member: [0] is the partial */
    uint64_t partial_offset;
    uint32_t n_before, n_local, n_after, n_inputs, n_shm_peers;
    uint32_t owner; /* member: source of the owner */
    uint16_t partial_segment;
    uint8_t owned, to_wire;
    uint8_t is_nontemporal; /* some input of this round came with BPS_FLAG_NONTEMPORAL */
    uint32_t generation;
    struct bps_weight_store *store; /* owned: what its pushes are applied to (store.h); NULL: the sum is the result */
    uint32_t applied;        /* of a store: the last round whose push was applied, */
    uint8_t n_applied;       /* and how many were: 3 stands for more */
    uint8_t held;            /* of a store: nothing but the answer is missing, and that waits for others */
    uint8_t is_backed;       /* its store has versions (backups.h): */
    uint8_t is_given, is_taken; /* there was a push; the next version has it; */
    uint32_t seen;           /* which version its worker was answered with */
    uint8_t is_kept;         /* member: its owner is gone, and `keeper` sends the result of kept_round */
    uint32_t keeper, kept_round;
    uint8_t was_given;       /* owned until round given_round, whose inputs go to a new owner: late ones are dropped */
    uint32_t given_round;
    uint32_t order;     /* integer rank given by the policy; 0 is most urgent */
    uint32_t pass;      /* the one that it joined when it was last complete; until it is summed it stays in it */
    uint32_t round;     /* last round whose inputs were all consumed */
    uint32_t n_missing; /* inputs of round+1 that have not arrived */
    uint64_t first_ns, complete_ns;
};

enum { BPS_WAITING = 0, BPS_COMPLETE = 1, BPS_STALE = -1, BPS_AHEAD = -2, BPS_NO_INPUT = -3, BPS_TWICE = -4 };

/* Note that `source` has delivered its input of `round`. */
static inline int bps_part_arrive(struct bps_part *part, uint32_t source, uint32_t round, uint32_t flags,
                                  uint16_t segment, uint64_t offset, uint64_t time_ns)
{
    int32_t ahead = (int32_t)(round - (part->round + 1));
    if (ahead != 0)
        return ahead < 0 ? BPS_STALE : BPS_AHEAD;
    for (uint32_t i = 0; i < part->n_inputs; i++) {
        struct bps_input *input = &part->inputs[i];
        if (input->source != source)
            continue;
        if (input->arrived)
            return BPS_TWICE;
        input->arrived = 1;
        input->empty = (flags & BPS_FLAG_EMPTY) != 0;
        part->is_nontemporal |= (flags & BPS_FLAG_NONTEMPORAL) != 0;
        input->segment = segment;
        input->offset = offset;
        input->time_ns = time_ns;
        return --part->n_missing == 0 ? BPS_COMPLETE : BPS_WAITING;
    }
    return BPS_NO_INPUT;
}

/* Whether what a wire peer has sent is for a part's new owner, which gets it as well: it was on its way already when
 * this node gave the part up. */
static inline int bps_part_is_for_new_owner(const struct bps_part *part, uint32_t source, uint32_t round)
{
    return part->was_given && round == part->given_round && (part->inputs == NULL || source != part->owner);
}

/* How many inputs of the last round, or of one that is complete, are not empty; `*only`: the last of them. */
static inline uint32_t bps_part_filled(struct bps_part *part, struct bps_input **only)
{
    uint32_t n_filled = 0;
    *only = NULL;
    for (uint32_t i = 0; i < part->n_inputs; i++)
        if (!part->inputs[i].empty) {
            n_filled++;
            *only = &part->inputs[i];
        }
    return n_filled;
}

/* Count in `lags`, by source, how late these n inputs of a complete round came. */
static inline void bps_count_lags(const struct bps_input *inputs, uint32_t n, struct bps_lag *lags)
{
    uint64_t first_ns = UINT64_MAX, last_ns = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t time_ns = inputs[i].time_ns;
        if (inputs[i].empty)
            return; /* in a broadcast, a rank that has no data is not early */
        first_ns = time_ns < first_ns ? time_ns : first_ns;
        last_ns = time_ns > last_ns ? time_ns : last_ns;
    }
    int somebody_is_last = 0;
    for (uint32_t i = 0; i < n; i++) {
        int is_last = !somebody_is_last && inputs[i].time_ns == last_ns;
        somebody_is_last |= is_last;
        bps_lag_add(&lags[inputs[i].source], inputs[i].time_ns - first_ns, is_last);
    }
}

/* Forget this round's arrivals: the next round may come as soon as this returns. */
static inline void bps_part_next_round(struct bps_part *part)
{
    part->round++;
    part->n_missing = part->n_inputs;
    part->is_nontemporal = 0;
    part->first_ns = 0;
    for (uint32_t i = 0; i < part->n_inputs; i++)
        part->inputs[i].arrived = 0;
}

static inline void bps_part_free(struct bps_part *part)
{
    free(part->codec);
    free(part->inputs);
    free(part->shm_peers);
    memset(part, 0, sizeof *part);
}

/* A complete part joins the oldest pass that waits, or the one after the last that it was in: the next step of fast
 * ranks does not overtake what slow ones wait for (`orchestration/priority/send_queue.py`). */
static inline void bps_part_join(struct bps_part *part, uint32_t oldest)
{
    part->pass++;
    if ((int32_t)(oldest - part->pass) > 0)
        part->pass = oldest;
}

/* Whether `a` is summed before `b`: an older pass first, then by rank. */
static inline int bps_part_before(const struct bps_part *a, const struct bps_part *b)
{
    return a->pass != b->pass ? (int32_t)(a->pass - b->pass) < 0 : a->order < b->order;
}

/* Heap of part indexes, the first by `bps_part_before` on top. Orders change only between `clear` and the pushes of a
 * commit. */
struct bps_heap {
    uint32_t *index;
    uint32_t used;
};

static inline void bps_heap_push(struct bps_heap *heap, const struct bps_part *parts, uint32_t part)
{
    uint32_t i = heap->used++;
    while (i > 0) {
        uint32_t up = (i - 1) / 2;
        if (!bps_part_before(&parts[part], &parts[heap->index[up]]))
            break;
        heap->index[i] = heap->index[up];
        i = up;
    }
    heap->index[i] = part;
}

static inline uint32_t bps_heap_pop(struct bps_heap *heap, const struct bps_part *parts)
{
    uint32_t top = heap->index[0], last = heap->index[--heap->used], i = 0;
    for (;;) {
        uint32_t down = 2 * i + 1;
        if (down >= heap->used)
            break;
        if (down + 1 < heap->used && bps_part_before(&parts[heap->index[down + 1]], &parts[heap->index[down]]))
            down++;
        if (!bps_part_before(&parts[heap->index[down]], &parts[last]))
            break;
        heap->index[i] = heap->index[down];
        i = down;
    }
    heap->index[i] = last;
    return top;
}
