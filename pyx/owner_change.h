/* Owner change: what happens to a part whose owner is lost, or gives it up, or of which a rank is lost, between a
 * freeze and its commit. All functions take the engine's lock.
 *
 * The last round of such a part that any survivor has completed is `after`. Its result is kept: nodes that lack it get
 * it from a keeper. If the next round has begun, it is pushed again to the new owner, from where its inputs still are:
 * a rank writes the next inputs only once all of this round is complete (docs/design/recovery.md).
 */
#pragma once

#include "table.h"

enum { BPS_OWNER_CHANGED = 0, BPS_NOT_FROZEN = 1, BPS_NO_PART = 2, BPS_OTHER_ROUND = 3 };

/* Close a source: nothing that it sends counts any more, and nothing is sent to it. */
static inline int bps_detach(struct bps_core *core, uint32_t source)
{
    pthread_mutex_lock(&core->lock);
    int is_frozen = core->frozen;
    if (is_frozen)
        core->sources[source].kind = BPS_CLOSED;
    bps_leave(core);
    return is_frozen ? BPS_OWNER_CHANGED : BPS_NOT_FROZEN;
}

/* Which rounds of a part were passed on from here, or summed, and are complete here. */
static inline int bps_progress(struct bps_core *core, uint32_t index, uint32_t *passed_on, uint32_t *complete)
{
    pthread_mutex_lock(&core->lock);
    int is_there = index < core->n_parts && core->parts[index].inputs != NULL;
    if (is_there) {
        *passed_on = core->parts[index].round;
        *complete = bps_load(bps_board_word(core->board, index));
    }
    bps_leave(core);
    return is_there ? BPS_OWNER_CHANGED : BPS_NO_PART;
}

/* Whether the engine was told that `source` has delivered its bytes of a round: its input of the part, or, to a member,
 * the result. A transport has them in place before it says so. */
static inline int bps_was_told(struct bps_core *core, uint32_t index, uint32_t source, uint32_t round)
{
    pthread_mutex_lock(&core->lock);
    int was_told = 0;
    if (index < core->n_parts && core->parts[index].inputs != NULL) {
        const struct bps_part *part = &core->parts[index];
        was_told = bps_reached(part->owned ? part->round : bps_load(bps_board_word(core->board, index)), round);
        for (uint32_t i = 0; i < part->n_inputs && part->owned; i++)
            was_told |= part->inputs[i].source == source && part->inputs[i].arrived && part->round + 1 == round;
    }
    for (uint32_t i = 0; i < core->n_early; i++) {
        const struct bps_early *early = &core->early[i];
        was_told |= early->source == source && early->part == index && early->round == round;
    }
    bps_leave(core);
    return was_told;
}

/* Send the partial of the last round again: as it is where it was, or the only input. */
static inline void bps_pass_on_again(struct bps_core *core, uint32_t index)
{
    struct bps_part *part = &core->parts[index];
    struct bps_input *only;
    uint32_t n_filled = bps_part_filled(part, &only);
    if (n_filled == 0)
        bps_pass_on(core, index, part->round, 1, 0, 0, 0);
    else if (n_filled == 1 && part->codec == NULL)
        bps_pass_on(core, index, part->round, 0, only->segment, only->offset,
                    (uint64_t)bps_resolve(core, only, part->nbytes));
    else
        bps_pass_on(core, index, part->round, 0, part->partial_segment, part->partial_offset, part->outputs[0]);
}

/* What a change of a part's owner comes to; the round matters only where there is the part. */
static inline int bps_change_status(const struct bps_core *core, int has_part, int is_at_round)
{
    if (!core->frozen)
        return BPS_NOT_FROZEN;
    return !has_part ? BPS_NO_PART : is_at_round ? BPS_OWNER_CHANGED : BPS_OTHER_ROUND;
}

/* Whether a part has passed on `after` or the round that follows it: nothing else can be. */
static inline int bps_is_at(const struct bps_part *part, uint32_t after)
{
    return part->round == after || part->round == after + 1;
}

/* Whether the result of `after` is here whole and only not decoded yet: `keeper` has sent it after an earlier loss,
 * and sends it only once. (A result of the lost owner is dropped: a copy comes, and nothing else is written there
 * before.) */
static inline int bps_has_kept_result(const struct bps_part *part, uint32_t after, uint32_t keeper)
{
    return part->codec != NULL && part->codec->has_result && part->codec->result_round == after && !part->is_kept &&
           part->kept_round == after && part->keeper == keeper;
}

/* Give a member's part the new owner `owner`. A result of `after` that is not complete here comes from `keeper`; if
 * that is BPS_NOBODY, it is in place already and only has to be published. */
static inline int bps_follow(struct bps_core *core, uint32_t index, uint32_t owner, uint32_t after, uint32_t keeper)
{
    uint32_t *word = NULL;
    pthread_mutex_lock(&core->lock);
    struct bps_part *part = &core->parts[index];
    int is_member = index < core->n_parts && part->inputs != NULL && !part->owned;
    int status = bps_change_status(core, is_member, is_member && bps_is_at(part, after));
    if (status == BPS_OWNER_CHANGED) {
        part->owner = owner;
        int has_kept = bps_has_kept_result(part, after, keeper);
        if (part->codec != NULL && part->codec->has_result && !has_kept) { /* not decoded yet: as if not arrived */
            part->codec->has_result = 0;
            part->codec->result_round--;
        }
        part->is_kept = part->was_given = 0;
        if (!has_kept && !bps_reached(bps_load(bps_board_word(core->board, index)), after)) {
            part->is_kept = keeper != BPS_NOBODY;
            part->keeper = keeper;
            part->kept_round = after;
            if (keeper == BPS_NOBODY)
                word = bps_publish(core, index, after, bps_nbytes_at(part, NULL));
        }
        if (part->round != after)
            bps_pass_on_again(core, index);
    }
    bps_leave_and_wake(core, word, 0);
    return status;
}

/* Take over what a member of this node has pushed of a part. */
static inline void bps_inherit(struct bps_part *fresh, const struct bps_part *old, uint32_t after)
{
    for (uint32_t i = 0; i < fresh->n_inputs; i++)
        for (uint32_t j = 0; j < old->n_inputs; j++)
            if (fresh->inputs[i].source == old->inputs[j].source) {
                uint64_t slot = fresh->inputs[i].slot;
                fresh->inputs[i] = old->inputs[j];
                fresh->inputs[i].slot = slot;
                fresh->inputs[i].arrived |= old->round != after;
                fresh->n_missing -= fresh->inputs[i].arrived;
            }
    fresh->pass = old->pass;
}

/* Own the part from the round after `after` on: `fresh` replaces the member's part, if there was one, whose memory
 * stays with its owner. */
static inline int bps_change_owner(struct bps_core *core, uint32_t index, struct bps_part *fresh, uint32_t after)
{
    pthread_mutex_lock(&core->lock);
    struct bps_part *old = &core->parts[index];
    int is_free = old->inputs == NULL, is_member = !is_free && !old->owned && old->generation <= core->generation;
    int status = bps_change_status(core, is_free || is_member, is_free || bps_is_at(old, after));
    if (status == BPS_OWNER_CHANGED) {
        if (old->inputs != NULL) {
            bps_inherit(fresh, old, after);
            bps_part_free(old);
        } else
            bps_store(bps_board_word(core->board, index), after);
        fresh->round = after;
        fresh->generation = core->generation + 1;
        *old = *fresh;
        core->n_parts = core->n_parts > index + 1 ? core->n_parts : index + 1;
        core->allocations++;
    }
    bps_leave(core);
    return status;
}

/* Give up a part that this node owns, after round `after`, the last that it has summed. `fresh` is its member's part
 * from then on, with what ranks here have pushed; NULL: it has none. */
static inline int bps_give_up(struct bps_core *core, uint32_t index, struct bps_part *fresh, uint32_t after)
{
    pthread_mutex_lock(&core->lock);
    struct bps_part *old = &core->parts[index];
    int is_owned = index < core->n_parts && old->inputs != NULL && old->owned && old->store == NULL;
    int status = bps_change_status(core, is_owned, is_owned && old->round == after);
    if (status == BPS_OWNER_CHANGED) {
        if (fresh != NULL) {
            bps_inherit(fresh, old, after);
            fresh->round = after;
            fresh->generation = core->generation + 1;
        }
        bps_part_free(old);
        if (fresh != NULL)
            *old = *fresh;
        old->was_given = 1;
        old->given_round = after + 1;
        bps_table_trim(core);
    }
    bps_leave(core);
    return status;
}

/* -- a rank is lost ------------------------------------------------------------------------------------------------ */

/* Keep what peers of this host have announced, then say as `bps_was_told`. */
static inline int bps_has_come(struct bps_core *core, uint32_t index, uint32_t source, uint32_t round)
{
    pthread_mutex_lock(&core->lock);
    if (core->frozen)
        bps_keep_announced(core);
    bps_leave(core);
    return bps_was_told(core, index, source, round);
}

/* Drop what `source` has sent of a round of a part while this engine was frozen. */
static inline void bps_drop_early(struct bps_core *core, uint32_t index, uint32_t source, uint32_t round)
{
    uint32_t n = 0;
    pthread_mutex_lock(&core->lock);
    for (uint32_t i = 0; i < core->n_early; i++) {
        struct bps_early early = core->early[i];
        if (early.part != index || early.source != source || early.round != round)
            core->early[n++] = early;
    }
    core->n_early = n;
    bps_leave(core);
}

/* Take the lock and return a part that may be changed now; NULL, and why in `*status`, if it may not. */
static inline struct bps_part *bps_begin_change(struct bps_core *core, uint32_t index, int *status)
{
    pthread_mutex_lock(&core->lock);
    int is_there = index < core->n_parts && core->parts[index].inputs != NULL;
    *status = bps_change_status(core, is_there, 1);
    return *status == BPS_OWNER_CHANGED ? &core->parts[index] : NULL;
}

/* Divide the results of a part by `divisor` from the next sum on. */
static inline int bps_set_divisor(struct bps_core *core, uint32_t index, int64_t divisor)
{
    int status;
    struct bps_part *part = bps_begin_change(core, index, &status);
    if (part != NULL)
        part->divisor = divisor;
    bps_leave(core);
    return status;
}

/* Expect the kept result that a member's part waits for, if it does, from `keeper`: the one before is lost. */
static inline int bps_set_keeper(struct bps_core *core, uint32_t index, uint32_t keeper)
{
    int status;
    struct bps_part *part = bps_begin_change(core, index, &status);
    if (part != NULL && part->owned)
        status = BPS_NO_PART;
    else if (part != NULL)
        part->keeper = keeper;
    bps_leave(core);
    return status;
}

/* Take the input of `source` out of a part, for good, if it has one, and tell it of no result. A part without inputs is
 * forgotten. */
static inline int bps_lose_input(struct bps_core *core, uint32_t index, uint32_t source)
{
    int status;
    struct bps_part *part = bps_begin_change(core, index, &status);
    uint32_t at = 0;
    while (part != NULL && at < part->n_inputs && part->inputs[at].source != source)
        at++;
    for (uint32_t i = 0; part != NULL && i < part->n_shm_peers; i++)
        if (part->shm_peers[i] == source)
            part->shm_peers[i--] = part->shm_peers[--part->n_shm_peers];
    if (part != NULL && at < part->n_inputs) {
        part->n_missing -= !part->inputs[at].arrived;
        memmove(part->inputs + at, part->inputs + at + 1, (part->n_inputs - at - 1) * sizeof *part->inputs);
        *(at < part->n_before                   ? &part->n_before
          : at < part->n_before + part->n_local ? &part->n_local
                                                : &part->n_after) -= 1;
        if (--part->n_inputs == 0) {
            bps_part_free(part);
            bps_table_trim(core);
        }
    }
    bps_leave(core);
    return status;
}

/* Sum the round after `after` of a part again, at the commit: its word goes back. If this node has summed it or passed
 * it on, and is to do so again (`sums_again`), the inputs that are left count as arrived: a rank writes the next ones,
 * and a node sends them, only when all of the unit is complete, which it is nowhere. (Those that went to an owner before
 * this one come anew: `bps_await_again`.) */
static inline int bps_redo(struct bps_core *core, uint32_t index, uint32_t after, int sums_again)
{
    pthread_mutex_lock(&core->lock);
    struct bps_part *part = &core->parts[index];
    int is_there = index < core->n_parts && part->inputs != NULL && part->codec == NULL && part->store == NULL;
    int status = bps_change_status(core, is_there, is_there && bps_is_at(part, after));
    if (status == BPS_OWNER_CHANGED) {
        uint32_t *word = bps_board_word(core->board, index);
        if (bps_load(word) == after + 1) {
            bps_store(word, after); /* first: who reads the new count sees no word that is still to go back */
            bps_add(&((struct bps_board *)core->board)->n_redone, 1);
        }
        part->is_kept &= bps_reached(after, part->kept_round);
        if (sums_again && part->round != after) {
            part->round = after;
            part->n_missing = 0;
            for (uint32_t i = 0; i < part->n_inputs; i++)
                part->inputs[i].arrived = 1;
        }
    }
    bps_leave(core);
    return status;
}

/* Wait again for the input of `source` in the round after the last one: the one that came does not count. */
static inline int bps_await_again(struct bps_core *core, uint32_t index, uint32_t source)
{
    int status;
    struct bps_part *part = bps_begin_change(core, index, &status);
    for (uint32_t i = 0; part != NULL && i < part->n_inputs; i++)
        if (part->inputs[i].source == source && part->inputs[i].arrived) {
            part->inputs[i].arrived = 0;
            part->n_missing++;
        }
    bps_leave(core);
    return status;
}
