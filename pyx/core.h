/* Core: the engine's state, what arrives at it and what it passes on. One lock; its threads are in `workers.h`.
 *
 *   lanes, transports --bps_arrive--> part complete --bps_ready--> heap --bps_run_part--> kernel
 *       owned part   bps_hand_out: board word, lanes of peers on this host, RESULT to `dispatch.h`
 *       member part  bps_forward:  lane of an owner on this host, or FORWARD to `dispatch.h`
 *   result of a member part --bps_arrive--> board word
 */
#pragma once

#include <math.h>

#include "board.h"
#include "codec.h"
#include "dispatch.h"
#include "events.h"
#include "part.h"
#include "record.h"
#include "spread.h"

enum { BPS_RANK = 1, BPS_SHM_PEER = 2, BPS_WIRE_PEER = 3, BPS_CLOSED = 4 };

#define BPS_MAX_SOURCES 4096u
#define BPS_MAX_SEGMENTS 65536u
#define BPS_NOBODY UINT32_MAX /* the source of an EVENT_LOST that is this engine's own fault */
#define BPS_SLEEP_NS 1000000000u

struct bps_source {
    int kind;
    struct bps_lane *lane; /* what it announces to us (rank, shm peer) */
    uint32_t capacity;
    struct bps_lane *outgoing; /* what we announce to it (shm peer) */
    uint32_t outgoing_capacity;
    struct bps_doorbell *doorbell; /* its engine's (shm peer) */
    uint64_t *addresses;           /* where its segments are mapped here; 0: not yet */
    uint64_t *nbytes;
    uint32_t n_segments;
    int is_broken; /* it broke the protocol: the job ends with it, and nothing that it announces is looked at */
    uint64_t pushed_nbytes; /* of inputs */
};

struct bps_worker {
    struct bps_core *core;
    int index;
    pthread_t thread;
    struct bps_thread_cpu cpu_use;
    struct bps_workspace space;
    void *pointers[BPS_MAX_SOURCES];
    void *found[BPS_MAX_SOURCES]; /* of rows: where the inputs have the one that is summed */
    struct bps_rows_cursor cursors[BPS_MAX_SOURCES];
};

/* What has arrived while the engine was frozen; the commit decides which part it belongs to. */
struct bps_early {
    uint32_t source, part, round, flags;
    uint64_t time_ns;
    uint16_t segment; /* of a peer of this host: where it lies */
    uint64_t offset;
};

struct bps_core {
    pthread_mutex_t lock;
    pthread_cond_t idle; /* no kernel runs */
    struct bps_part *parts;
    struct bps_heap heap;
    uint32_t *parked; /* complete parts with an input in a segment that is not mapped yet */
    uint32_t n_parked, n_parts, generation;
    uint32_t pass; /* the newest of all parts */
    int fifo;      /* every part is a pass of its own: what is complete first is summed first */
    struct bps_source *sources;
    uint32_t n_sources;
    struct bps_early *early;
    uint32_t n_early, early_capacity;
    int frozen, stopping, running, n_workers;
    uint32_t aborted; /* the board's reason has its one writer */
    void *board;
    struct bps_doorbell *doorbell;
    uint64_t nontemporal_nbytes, awake_ns;
    struct bps_worker *workers; /* one more than threads: who receives a small input may sum as that one */
    int spare_is_busy;
    struct bps_cpus cpus;
    struct bps_trace trace;
    struct bps_events events;
    struct bps_dispatch *dispatch; /* sends what FORWARD and RESULT ask for; NULL: Python does, which reads them */
    struct bps_lag *local_lags; /* by source: ranks of this machine among each other */
    struct bps_lag *owner_lags; /* by source: all inputs of units whose first partition is owned here */
    uint64_t sums, bytes_summed, published, published_nbytes, forwarded, stale, left_out, allocations;
};

/* End the job: ranks raise what the reason, "Class: text" with its NUL, says. The first one stays. Any thread. */
static inline void bps_abort(struct bps_core *core, const char *reason, size_t nbytes)
{
    if (__atomic_exchange_n(&core->aborted, 1, __ATOMIC_ACQ_REL) != 0)
        return;
    memcpy((char *)core->board + BPS_REASON_OFFSET, reason, nbytes);
    bps_store(&((struct bps_board *)core->board)->state, 1);
}

static inline void bps_event_out(struct bps_core *core, uint32_t kind, uint32_t source, uint32_t part, uint32_t round,
                                 uint32_t code, uint64_t address, uint64_t nbytes)
{
    if (core->dispatch != NULL && kind != BPS_EVENT_LOST) {
        bps_dispatch_event(core->dispatch, kind, source, part, round, code, address, nbytes);
        return;
    }
    struct bps_event event = {kind, source, part, round, code, address, nbytes};
    static const char reason[] = "CapacityError: the node of this machine ran out of memory for what its engine has to "
                                 "report, and ended the job: give it more memory, or push less";
    if (bps_events_push(&core->events, event) != 0) /* a lost event is a hang: end the job instead */
        bps_abort(core, reason, sizeof reason);
}

/* Drop the engine's lock, wake up to n of the engine's threads and all threads that sleep on `word` (NULL: none), then
 * send what was put into the send queue under the lock. */
static inline void bps_leave_and_wake(struct bps_core *core, uint32_t *word, int n)
{
    struct bps_dispatch *dispatch = core->dispatch;
    pthread_mutex_unlock(&core->lock);
    if (word != NULL)
        bps_wake(word, INT_MAX);
    if (n != 0)
        bps_ring_doorbell(core->doorbell, n);
    if (dispatch != NULL && bps_load(&dispatch->is_due))
        bps_dispatch_pump(dispatch);
}

static inline void bps_leave(struct bps_core *core) { bps_leave_and_wake(core, NULL, 0); }

static inline void bps_broken(struct bps_core *core, uint32_t source, uint32_t part, uint32_t round)
{
    core->sources[source].is_broken = 1;
    bps_event_out(core, BPS_EVENT_LOST, source, part, round, EPROTO, 0, 0);
}

/* Where an input lies in this process; NULL while its segment is not mapped here. */
static inline void *bps_resolve(struct bps_core *core, const struct bps_input *input, uint64_t nbytes)
{
    struct bps_source *source = &core->sources[input->source];
    if (input->slot != 0)
        return (void *)input->slot;
    if (input->segment >= source->n_segments || source->addresses[input->segment] == 0)
        return NULL;
    uint64_t room = source->nbytes[input->segment];
    if (nbytes > room || input->offset > room - nbytes) {
        bps_broken(core, input->source, 0, 0);
        return NULL;
    }
    return (void *)(source->addresses[input->segment] + input->offset);
}

/* How many bytes of the part lie at `address`; 0 if these are rows that cannot be, or nobody knows where they lie. */
static inline uint64_t bps_nbytes_at(const struct bps_part *part, const void *address)
{
    if (part->rows.row_nbytes == 0)
        return part->nbytes;
    return address == NULL ? 0 : bps_rows_length(address, part->nbytes);
}

/* Make a round of nbytes visible to the local ranks; the word to wake, or NULL if nobody sleeps. */
static inline uint32_t *bps_publish(struct bps_core *core, uint32_t index, uint32_t round, uint64_t nbytes)
{
    uint32_t *word = bps_board_word(core->board, index);
    __atomic_store_n(bps_board_time(word), bps_now_ns(), __ATOMIC_RELAXED);
    bps_store(word, round);
    core->published++;
    core->published_nbytes += nbytes;
    bps_fence();
    for (uint32_t i = 0; i < core->n_sources; i++)
        if (core->sources[i].kind == BPS_RANK && bps_load(&core->sources[i].lane->sleepers) != 0)
            return word;
    return NULL;
}

/* Put an entry onto the lane of a peer on this host, which never fills: it has room for a partial and a result of every
 * part. */
static inline void bps_announce(struct bps_core *core, uint32_t peer, uint32_t part, uint32_t round, uint16_t flags,
                                uint16_t segment, uint64_t offset)
{
    struct bps_source *source = &core->sources[peer];
    struct bps_entry entry = {part, 1, round, flags, segment, offset, bps_now_ns()};
    if (source->kind == BPS_CLOSED)
        return;
    if (bps_lane_push(source->outgoing, source->outgoing_capacity, &entry) != 0)
        bps_broken(core, peer, part, round);
    else
        bps_ring_doorbell(source->doorbell, 1);
}

/* Member: send the owner this node's partial of a round. */
static inline void bps_pass_on(struct bps_core *core, uint32_t index, uint32_t round, int empty, uint16_t segment,
                               uint64_t offset, uint64_t address)
{
    struct bps_part *part = &core->parts[index];
    uint64_t nbytes = empty                 ? 0
                      : part->codec != NULL ? bps_frame_length(part->codec->frame)
                                            : bps_nbytes_at(part, (const void *)address);
    uint16_t flags = empty ? BPS_FLAG_EMPTY : 0;
    core->forwarded++;
    if (core->sources[part->owner].kind == BPS_SHM_PEER)
        bps_announce(core, part->owner, index, round, flags, segment, offset);
    else
        bps_event_out(core, BPS_EVENT_FORWARD, part->owner, index, round, flags, address, nbytes);
}

/* Member: pass this node's partial of the current round to the owner. */
static inline void bps_forward(struct bps_core *core, uint32_t index, int empty, uint16_t segment, uint64_t offset,
                               uint64_t address)
{
    uint32_t round = core->parts[index].round + 1;
    bps_part_next_round(&core->parts[index]);
    bps_pass_on(core, index, round, empty, segment, offset, address);
}

/* Owner: publish the result here and pass it on to all nodes that wait for it; the word to wake, or NULL. */
static inline uint32_t *bps_hand_out(struct bps_core *core, uint32_t index, uint32_t round)
{
    struct bps_part *part = &core->parts[index];
    uint64_t nbytes = bps_nbytes_at(part, (const void *)part->outputs[round & 1]);
    bps_part_next_round(part);
    uint32_t *word = bps_publish(core, index, round, nbytes);
    for (uint32_t i = 0; i < part->n_shm_peers; i++)
        bps_announce(core, part->shm_peers[i], index, round, 0, 0, 0);
    if (part->to_wire && part->codec != NULL) {
        const char *frame = part->codec->frames[round & 1];
        bps_event_out(core, BPS_EVENT_RESULT, 0, index, round, 0, (uint64_t)frame, bps_frame_length(frame));
    } else if (part->to_wire)
        bps_event_out(core, BPS_EVENT_RESULT, 0, index, round, 0, part->outputs[round & 1], nbytes);
    return word;
}

/* Queue a part for a thread, once. */
static inline void bps_queue(struct bps_core *core, uint32_t index)
{
    struct bps_codec *codec = core->parts[index].codec;
    if (codec != NULL && codec->queued)
        return;
    if (codec != NULL)
        codec->queued = 1;
    bps_heap_push(&core->heap, core->parts, index);
}

/* Let a complete part wait, once, until the segment that it lacks is mapped. */
static inline void bps_park(struct bps_core *core, uint32_t index)
{
    struct bps_codec *codec = core->parts[index].codec;
    if (codec != NULL && codec->parked)
        return;
    if (codec != NULL)
        codec->parked = 1;
    core->parked[core->n_parked++] = index;
}

/* Queue a complete part for a thread, or forward at once what needs no sum; whether it was queued. */
static inline int bps_ready(struct bps_core *core, uint32_t index)
{
    struct bps_part *part = &core->parts[index];
    if (part->codec != NULL)
        part->codec->parked = 0;
    if (!part->owned) {
        struct bps_input *only;
        uint32_t n_filled = bps_part_filled(part, &only);
        int as_it_is = n_filled == 1 && part->codec == NULL;
        void *address = as_it_is ? bps_resolve(core, only, part->nbytes) : NULL;
        if (as_it_is && address == NULL) { /* it may have no partial to be summed into */
            bps_park(core, index);
            return 0;
        }
        if (as_it_is && bps_nbytes_at(part, address) == 0) {
            bps_broken(core, only->source, index, part->round + 1);
            return 0;
        }
        if (n_filled == 0 || as_it_is) {
            bps_forward(core, index, n_filled == 0, only ? only->segment : 0, only ? only->offset : 0,
                        (uint64_t)address);
            return 0;
        }
    }
    bps_queue(core, index);
    return 1;
}

/* How many bytes `source` has delivered of the part; of rows in a segment that is not mapped yet: 0. */
static inline uint64_t bps_delivered_nbytes(struct bps_core *core, const struct bps_part *part, uint32_t source)
{
    for (uint32_t i = 0; i < part->n_inputs; i++)
        if (part->inputs[i].source == source && !part->inputs[i].empty)
            return part->rows.row_nbytes == 0 ? part->nbytes
                                              : bps_nbytes_at(part, bps_resolve(core, &part->inputs[i], part->nbytes));
    return 0;
}

/* One input or result has arrived whole; whether a part became ready for a thread. */
static inline int bps_arrive(struct bps_core *core, uint32_t source, uint32_t index, uint32_t round, uint32_t flags,
                             uint16_t segment, uint64_t offset, uint64_t time_ns)
{
    int is_wire = core->sources[source].kind == BPS_WIRE_PEER;
    if (index < BPS_MAX_PARTS && is_wire && bps_part_is_for_new_owner(&core->parts[index], source, round)) {
        core->stale++;
        return 0;
    }
    if (index >= BPS_MAX_PARTS || core->parts[index].inputs == NULL) {
        bps_broken(core, source, index, round);
        return 0;
    }
    struct bps_part *part = &core->parts[index];
    int is_kept = part->is_kept && source == part->keeper && round == part->kept_round;
    if (!part->owned && (source == part->owner || is_kept)) { /* the result of what we forwarded */
        int is_frame = part->codec != NULL && part->codec->results[0] != NULL;
        /* decoded once: whoever retires a part has seen its result, and nothing else of it may be in the heap */
        if ((!is_kept && round != part->round) || (is_frame && part->codec->result_round == round)) {
            core->stale++;
            return 0;
        }
        part->is_kept &= !is_kept;
        if (is_frame) {
            part->codec->has_result = 1;
            part->codec->result_round = round;
            bps_queue(core, index);
            return 1;
        }
        uint32_t *word = bps_publish(core, index, round, bps_nbytes_at(part, NULL));
        if (word != NULL)
            bps_wake(word, INT_MAX);
        return 0;
    }
    if (core->trace.records != NULL && part->n_missing == part->n_inputs)
        part->first_ns = bps_now_ns();
    int what = bps_part_arrive(part, source, round, flags, segment, offset, time_ns);
    if (what >= 0)
        core->sources[source].pushed_nbytes += bps_delivered_nbytes(core, part, source);
    if (what == BPS_STALE) {
        core->stale++;
    } else if (what < 0) {
        bps_broken(core, source, index, round);
    } else if (what == BPS_COMPLETE) {
        if (part->unit_offset == 0) {
            bps_count_lags(part->inputs + part->n_before, part->n_local, core->local_lags);
            if (part->owned && !part->is_backed) /* such workers are late compared with each other: backups.h */
                bps_count_lags(part->inputs, part->n_inputs, core->owner_lags);
        }
        if (core->fifo)
            part->pass = core->pass + 1;
        else
            bps_part_join(part, core->heap.used ? core->parts[core->heap.index[0]].pass : core->pass);
        if ((int32_t)(part->pass - core->pass) > 0)
            core->pass = part->pass;
        if (core->trace.records != NULL) {
            part->complete_ns = bps_now_ns();
            bps_record_add(&core->trace, BPS_GATHER, 0, index, round, part->nbytes, part->first_ns, part->complete_ns);
        }
        if (part->generation <= core->generation) /* else it waits for our commit */
            return bps_ready(core, index);
    }
    return 0;
}

/* Take the learning rate for which a rank computes its next input. */
static inline void bps_take_rate(struct bps_core *core, uint32_t source, const struct bps_entry *entry, uint32_t index)
{
    struct bps_part *part = &core->parts[index];
    double rate;
    memcpy(&rate, &entry->offset, sizeof rate);
    if (part->inputs == NULL || !isfinite(rate) || rate < 0)
        bps_broken(core, source, index, entry->round);
    else if (part->codec != NULL)
        part->codec->rate = rate;
}

/* Where partition `k` of an entry lies. */
static inline uint64_t bps_offset_of(const struct bps_core *core, const struct bps_entry *entry, uint32_t k)
{
    return entry->offset + core->parts[k].unit_offset - core->parts[entry->part].unit_offset;
}

/* Take the next entry off a source's lane: 0, or -1 if there is none, or it makes no sense: then the source is broken. */
static inline int bps_next_entry(struct bps_core *core, uint32_t i, struct bps_entry *entry)
{
    struct bps_source *source = &core->sources[i];
    int rc = source->is_broken ? -1 : bps_lane_pop(source->lane, source->capacity, entry);
    if (rc > 0)
        bps_broken(core, i, 0, 0);
    else if (rc == 0 && (entry->count > BPS_MAX_PARTS || entry->part > BPS_MAX_PARTS - entry->count)) {
        bps_broken(core, i, entry->part, entry->round);
        rc = -1;
    }
    return rc == 0 ? 0 : -1;
}

/* Take in what ranks and peers of this host have announced; a frozen engine leaves it to the commit. */
static inline void bps_drain(struct bps_core *core)
{
    struct bps_entry entry;
    if (core->frozen)
        return;
    for (uint32_t i = 0; i < core->n_sources; i++) {
        struct bps_source *source = &core->sources[i];
        if (source->kind != BPS_RANK && source->kind != BPS_SHM_PEER)
            continue;
        while (bps_next_entry(core, i, &entry) == 0)
            for (uint32_t k = entry.part; k < entry.part + entry.count && !source->is_broken; k++)
                if (entry.flags & BPS_FLAG_RATE)
                    bps_take_rate(core, i, &entry, k);
                else
                    bps_arrive(core, i, k, entry.round, entry.flags, entry.segment, bps_offset_of(core, &entry, k),
                               entry.time_ns);
    }
}

/* Append the addresses of the filled inputs first..first+n, of nbytes; the new count, or -1 if one is not mapped. */
static inline int bps_collect(struct bps_core *core, const struct bps_part *part, void **pointers, uint32_t first,
                              uint32_t n, uint64_t nbytes, int used)
{
    for (uint32_t i = first; used >= 0 && i < first + n; i++) {
        if (part->inputs[i].empty)
            continue;
        pointers[used] = bps_resolve(core, &part->inputs[i], nbytes);
        used = pointers[used] == NULL ? -1 : used + 1;
    }
    return used;
}

/* A kernel has run: wake threads that wait for an idle engine, and those that sleep on `word` (NULL: none), for which
 * the lock is dropped. */
static inline void bps_ran(struct bps_core *core, uint32_t *word)
{
    core->running--;
    if (core->frozen && core->running == 0)
        pthread_cond_broadcast(&core->idle);
    if (word != NULL) {
        bps_leave_and_wake(core, word, 0);
        pthread_mutex_lock(&core->lock);
    }
}
