/* Dispatch: sends what the engine has summed over the network, in the order of `send_queue.h`.
 *
 *   engine threads  --bps_dispatch_event--> send queue --bps_dispatch_pump--> stream of the peer
 *   streams         --DELIVERED: credit-->  send queue
 *
 * `lock` guards all of it, and is the last to be taken. Events are put under the engine's lock, and pumped once that is
 * dropped. Nothing is posted to a peer that is held or was removed: after `bps_dispatch_settle` its streams may be
 * closed. Numbers of peers are the engine's sources.
 */
#pragma once

#include <errno.h>
#include <pthread.h>

#include "futex.h"
#include "hooks.h"
#include "send_queue.h"

#define BPS_DISPATCH_AT_ONCE 32 /* writes that one thread posts before it goes back to its own work */
#define BPS_DISPATCH_CREDIT_SHARE 16 /* larger parts of the credit do not count as delivered before they are */

struct bps_post_target { /* a stream, and how to post to it */
    void *stream;
    bps_post_fn post;
    const uint64_t *backlog; /* bytes that it has not delivered; NULL: parts keep to their stream */
};

/* Where writes to a peer go: to the stream that has the least to deliver, among equals in turns by part. */
struct bps_route {
    struct bps_post_target *targets;
    uint32_t n_targets, n_nodes;
    uint32_t n_turns; /* how many of them parts take turns on (0: all), if they have no number of their own */
    uint8_t *counts;  /* by part: that number, 0: none */
    uint32_t n_counts;
};

struct bps_readers { /* who gets a result */
    uint32_t n, sources[];
};

/* The last write of a part to a peer, by 1 << 63 | source << 32 | part; key 0: a free place. */
struct bps_posted {
    uint64_t key;
    struct bps_outgoing write;
};

struct bps_known_part {
    uint32_t first;                    /* the first part of its unit, or BPS_SEND_NOBODY */
    const struct bps_readers *readers; /* NULL: no commit has named them */
};

struct bps_sent { /* a record of the trace */
    uint64_t since_ns, posted_ns, nbytes, order;
    uint32_t source, part, round;
};

struct bps_dispatch {
    pthread_mutex_t lock;
    struct bps_send_queue queue;
    struct bps_write_order order_of_writes;
    struct bps_route *routes; /* by source */
    uint32_t n_routes;
    uint32_t *order, n_order; /* the ranks of first parts, as the last commit gave them */
    struct bps_known_part *parts;
    uint32_t n_parts;
    struct bps_posted *posted; /* a hash table with linear probing */
    uint32_t posted_capacity, n_posted;
    uint32_t is_due; /* something was put since the last pump */
    uint32_t is_abandoned; /* nothing is posted any more */
    uint32_t posting; /* the peer to which a thread posts, without the lock, or BPS_SEND_NOBODY */
    uint32_t n_settling; /* threads that wait until it has */
    pthread_cond_t settled;
    void *engine; /* that a failure is reported to, by `notify` */
    bps_notify_fn notify;
    int failure; /* an errno: nothing is posted any more */
    uint32_t failed_source;
    struct bps_outgoing failed; /* the write */
    uint64_t n_events, n_partitions, peak_queued, n_queued;
    struct bps_sent *sent;
    uint64_t sent_capacity, n_sent;
    uint32_t first_round, last_round;
};

/* -- the last writes ----------------------------------------------------------------------------------------------- */

static inline uint64_t bps_posted_key(uint32_t source, uint32_t part)
{
    return 1ull << 63 | (uint64_t)source << 32 | part;
}

static inline uint32_t bps_posted_home(const struct bps_dispatch *dispatch, uint64_t key)
{
    return (uint32_t)((key * 0x9e3779b97f4a7c15ull) >> 32) & (dispatch->posted_capacity - 1);
}

/* The place of a key, or the free one where it belongs. There is one: the table is never full. */
static inline struct bps_posted *bps_posted_at(const struct bps_dispatch *dispatch, uint64_t key)
{
    uint32_t at = bps_posted_home(dispatch, key);
    while (dispatch->posted[at].key != 0 && dispatch->posted[at].key != key)
        at = (at + 1) & (dispatch->posted_capacity - 1);
    return &dispatch->posted[at];
}

/* 0, or -1 without memory. */
static inline int bps_posted_set(struct bps_dispatch *dispatch, uint32_t source, const struct bps_outgoing *write)
{
    if (2 * (dispatch->n_posted + 1) > dispatch->posted_capacity) {
        struct bps_dispatch grown = {.posted_capacity = 2 * dispatch->posted_capacity};
        if (grown.posted_capacity == 0)
            grown.posted_capacity = 256;
        grown.posted = calloc(grown.posted_capacity, sizeof *grown.posted);
        if (grown.posted == NULL)
            return -1;
        for (uint32_t i = 0; i < dispatch->posted_capacity; i++)
            if (dispatch->posted[i].key != 0)
                *bps_posted_at(&grown, dispatch->posted[i].key) = dispatch->posted[i];
        free(dispatch->posted);
        dispatch->posted = grown.posted;
        dispatch->posted_capacity = grown.posted_capacity;
    }
    uint64_t key = bps_posted_key(source, write->part);
    struct bps_posted *place = bps_posted_at(dispatch, key);
    dispatch->n_posted += place->key == 0;
    *place = (struct bps_posted){key, *write};
    return 0;
}

/* Forget a key, if it is there; those behind it move up to where they are looked for. */
static inline void bps_posted_forget(struct bps_dispatch *dispatch, uint64_t key)
{
    struct bps_posted *place = dispatch->posted_capacity == 0 ? NULL : bps_posted_at(dispatch, key);
    if (place == NULL || place->key == 0)
        return;
    uint32_t mask = dispatch->posted_capacity - 1, hole = (uint32_t)(place - dispatch->posted);
    for (uint32_t at = (hole + 1) & mask; dispatch->posted[at].key != 0; at = (at + 1) & mask)
        if (((at - bps_posted_home(dispatch, dispatch->posted[at].key)) & mask) >= ((at - hole) & mask)) {
            dispatch->posted[hole] = dispatch->posted[at];
            hole = at;
        }
    dispatch->posted[hole].key = 0;
    dispatch->n_posted--;
}

/* -- events -------------------------------------------------------------------------------------------------------- */

static inline int bps_dispatch_has(const struct bps_dispatch *dispatch, uint32_t source)
{
    return source < dispatch->queue.n && dispatch->queue.peers[source].is_there;
}

/* Nothing is posted any more, because of this errno; the first one is reported. Always -1. Under the lock. */
static inline int bps_dispatch_fail(struct bps_dispatch *dispatch, int code, uint32_t source,
                                    const struct bps_outgoing *write)
{
    if (dispatch->failure == 0) {
        dispatch->failure = code;
        dispatch->failed_source = source;
        dispatch->failed = *write;
        if (dispatch->notify != NULL)
            dispatch->notify(dispatch->engine, BPS_EVENT_LOST, BPS_SEND_NOBODY, write->part, 0, (uint32_t)code, 0);
    }
    return -1;
}

/* The rank of a part's unit, or BPS_SEND_NOBODY if no commit has given it one. */
static inline uint32_t bps_dispatch_rank(const struct bps_dispatch *dispatch, uint32_t part)
{
    uint32_t first = part < dispatch->n_parts ? dispatch->parts[part].first : BPS_SEND_NOBODY;
    return first < dispatch->n_order ? dispatch->order[first] : BPS_SEND_NOBODY;
}

/* Queue a write, which has its place, for a peer. Under the lock. 0, or -1 after a failure. */
static inline int bps_dispatch_put(struct bps_dispatch *dispatch, uint32_t source, const struct bps_outgoing *write)
{
    if (bps_send_put(&dispatch->queue, source, *write) != 0)
        return bps_dispatch_fail(dispatch, ENOMEM, source, write);
    dispatch->n_queued++;
    return 0;
}

/* Give a write of a partial or a result its place. Under the lock. 0, or -1 after a failure. */
static inline int bps_dispatch_enter(struct bps_dispatch *dispatch, struct bps_outgoing *write, int is_result)
{
    uint32_t rank = bps_dispatch_rank(dispatch, write->part);
    if (rank == BPS_SEND_NOBODY)
        return bps_dispatch_fail(dispatch, ENOENT, BPS_SEND_NOBODY, write);
    if (bps_order_enter(&dispatch->order_of_writes, &dispatch->queue, rank, is_result, write) != 0)
        return bps_dispatch_fail(dispatch, ENOMEM, BPS_SEND_NOBODY, write);
    return 0;
}

/* Queue a result for all who get it. Under the lock. */
static inline void bps_dispatch_put_result(struct bps_dispatch *dispatch, struct bps_outgoing *write)
{
    const struct bps_readers *readers = write->part < dispatch->n_parts ? dispatch->parts[write->part].readers : NULL;
    int rc = readers == NULL ? bps_dispatch_fail(dispatch, ENOENT, BPS_SEND_NOBODY, write)
                             : bps_dispatch_enter(dispatch, write, 1);
    for (uint32_t i = 0; rc == 0 && i < readers->n; i++)
        if (bps_dispatch_has(dispatch, readers->sources[i]))
            rc = bps_dispatch_put(dispatch, readers->sources[i], write);
}

/* Take an event of the engine or of a stream: of a write. Under the lock. */
static inline void bps_dispatch_take(struct bps_dispatch *dispatch, uint32_t kind, uint32_t source,
                                     struct bps_outgoing *write)
{
    dispatch->n_events++;
    dispatch->n_partitions += kind != BPS_EVENT_DELIVERED;
    write->since_ns = dispatch->sent_capacity != 0 ? bps_now_ns() : 0;
    if (kind == BPS_EVENT_RESULT) {
        bps_dispatch_put_result(dispatch, write);
    } else if (bps_dispatch_has(dispatch, source)) { /* else it is lost; a new owner gets the write */
        if (kind == BPS_EVENT_DELIVERED) {
            if (bps_send_release(&dispatch->queue, source, write->nbytes) != 0)
                bps_dispatch_fail(dispatch, EPROTO, source, write);
        } else if (bps_dispatch_enter(dispatch, write, 0) == 0)
            bps_dispatch_put(dispatch, source, write);
    }
    bps_store(&dispatch->is_due, 1);
}

/* The same; `bps_dispatch_pump` posts what it allows. */
static inline void bps_dispatch_event(struct bps_dispatch *dispatch, uint32_t kind, uint32_t source, uint32_t part,
                                      uint32_t round, uint32_t flags, uint64_t address, uint64_t nbytes)
{
    struct bps_outgoing write = {.part = part, .round = round, .flags = flags, .address = address, .nbytes = nbytes};
    pthread_mutex_lock(&dispatch->lock);
    bps_dispatch_take(dispatch, kind, source, &write);
    pthread_mutex_unlock(&dispatch->lock);
}

/* -- sending ------------------------------------------------------------------------------------------------------- */

static inline struct bps_post_target *bps_dispatch_target(struct bps_dispatch *dispatch, uint32_t source, uint32_t part)
{
    if (source >= dispatch->n_routes || dispatch->routes[source].n_targets == 0)
        return NULL;
    struct bps_route *route = &dispatch->routes[source];
    uint32_t n = part < route->n_counts && route->counts[part] != 0 ? route->counts[part] : route->n_turns;
    n = n != 0 && n < route->n_targets ? n : route->n_targets;
    struct bps_post_target *best = &route->targets[part / route->n_nodes % n];
    uint64_t least = best->backlog != NULL ? bps_counted(best->backlog) : 0;
    for (uint32_t i = 0; least != 0 && i < n; i++) { /* connections recover from lost packets at different times */
        uint64_t backlog = bps_counted(route->targets[i].backlog);
        best = backlog < least ? &route->targets[i] : best;
        least = backlog < least ? backlog : least;
    }
    return best;
}

static inline void bps_dispatch_record(struct bps_dispatch *dispatch, uint32_t source, const struct bps_outgoing *write)
{
    if (dispatch->n_sent == dispatch->sent_capacity || write->round < dispatch->first_round
        || (dispatch->last_round != 0 && write->round > dispatch->last_round))
        return;
    uint64_t rank = bps_dispatch_rank(dispatch, write->part);
    /* without urgency: what ignoring it costs */
    uint64_t order = dispatch->order_of_writes.fifo ? (uint64_t)write->round << 32 | rank << 1
                                          : write->pass << 32 | write->urgency;
    dispatch->sent[dispatch->n_sent++] = (struct bps_sent){write->since_ns, bps_now_ns(), write->nbytes, order, source,
                                                           write->part, write->round};
}

/* Post a write to a peer, for which the lock is dropped. */
static inline void bps_dispatch_post(struct bps_dispatch *dispatch, uint32_t source, const struct bps_outgoing *write)
{
    struct bps_post_target *found = bps_dispatch_target(dispatch, source, write->part), target;
    int may_be_at_once = write->nbytes <= dispatch->queue.credit_nbytes / BPS_DISPATCH_CREDIT_SHARE, is_delivered = 0;
    int rc = found == NULL ? ENOTCONN : bps_posted_set(dispatch, source, write) != 0 ? ENOMEM : 0;
    dispatch->n_queued--;
    bps_dispatch_record(dispatch, source, write);
    if (rc == 0) {
        target = *found;
        dispatch->posting = source;
        pthread_mutex_unlock(&dispatch->lock);
        rc = target.post(target.stream, write->part, write->round, write->flags, write->address, write->nbytes,
                         may_be_at_once, &is_delivered);
        pthread_mutex_lock(&dispatch->lock);
        dispatch->posting = BPS_SEND_NOBODY;
        if (dispatch->n_settling != 0)
            pthread_cond_broadcast(&dispatch->settled);
    }
    if (rc != 0)
        bps_dispatch_fail(dispatch, rc, source, write);
    else if (is_delivered && bps_dispatch_has(dispatch, source))
        bps_send_release(&dispatch->queue, source, write->nbytes);
}

/* Post what credit allows. Without the engine's lock. One thread at a time does, for all, so that the writes of a part
 * keep their order; it goes back to its own work after some, and lets the engine go on. */
static inline void bps_dispatch_pump(struct bps_dispatch *dispatch)
{
    struct bps_outgoing write;
    uint32_t source;
    int n = 0;
    pthread_mutex_lock(&dispatch->lock);
    bps_store(&dispatch->is_due, 0);
    while (dispatch->posting == BPS_SEND_NOBODY && !dispatch->is_abandoned && dispatch->failure == 0
           && (n < BPS_DISPATCH_AT_ONCE || dispatch->notify == NULL)
           && (source = bps_send_pop(&dispatch->queue, &write)) != BPS_SEND_NOBODY) {
        bps_dispatch_post(dispatch, source, &write);
        n++;
    }
    if (dispatch->n_queued > dispatch->peak_queued)
        dispatch->peak_queued = dispatch->n_queued;
    int goes_on = n == BPS_DISPATCH_AT_ONCE && dispatch->n_queued != 0 && dispatch->notify != NULL;
    if (goes_on)
        bps_store(&dispatch->is_due, 1);
    pthread_mutex_unlock(&dispatch->lock);
    if (goes_on)
        dispatch->notify(dispatch->engine, BPS_EVENT_DUE, BPS_SEND_NOBODY, 0, 0, 0, 0);
}

/* Wait until no write is being posted to a peer (BPS_SEND_NOBODY: to any), which does not take long. Under the lock. */
static inline void bps_dispatch_settle(struct bps_dispatch *dispatch, uint32_t source)
{
    dispatch->n_settling++;
    while (dispatch->posting != BPS_SEND_NOBODY && (source == BPS_SEND_NOBODY || source == dispatch->posting))
        pthread_cond_wait(&dispatch->settled, &dispatch->lock);
    dispatch->n_settling--;
}

/* -- peers --------------------------------------------------------------------------------------------------------- */

/* Forget what is known of a part, whose number may be used again. Under the lock. */
static inline void bps_dispatch_forget(struct bps_dispatch *dispatch, uint32_t part)
{
    bps_order_forget(&dispatch->order_of_writes, part);
    for (uint32_t source = 0; source < dispatch->queue.n; source++)
        if (dispatch->queue.peers[source].is_there)
            bps_posted_forget(dispatch, bps_posted_key(source, part));
}

/* Room for parts up to `part`. 0, or -1 without memory. Under the lock. */
static inline int bps_dispatch_room(struct bps_dispatch *dispatch, uint32_t part)
{
    if (part < dispatch->n_parts)
        return 0;
    uint32_t n = 2 * part + 64;
    struct bps_known_part *parts = realloc(dispatch->parts, n * sizeof *parts);
    if (parts == NULL)
        return -1;
    for (uint32_t i = dispatch->n_parts; i < n; i++)
        parts[i] = (struct bps_known_part){BPS_SEND_NOBODY, NULL};
    dispatch->parts = parts;
    dispatch->n_parts = n;
    return 0;
}

/* Forget a peer with all that waits for it. Under the lock. */
static inline void bps_dispatch_remove(struct bps_dispatch *dispatch, uint32_t source)
{
    dispatch->n_queued -= dispatch->queue.peers[source].n;
    bps_send_remove(&dispatch->queue, source);
    for (uint32_t i = 0; i < dispatch->posted_capacity;)
        if (dispatch->posted[i].key >> 32 == (1u << 31 | source))
            bps_posted_forget(dispatch, dispatch->posted[i].key); /* another may have moved here */
        else
            i++;
    if (source < dispatch->n_routes)
        dispatch->routes[source].n_targets = 0;
}

/* Queue again what a peer that is resumed awaits, if it was posted before: `round` of a part. 0, or -1 after a failure.
 * Under the lock. */
static inline int bps_dispatch_repeat(struct bps_dispatch *dispatch, uint32_t source, uint32_t part, uint32_t round)
{
    uint64_t key = bps_posted_key(source, part);
    struct bps_posted *place = dispatch->posted_capacity == 0 ? NULL : bps_posted_at(dispatch, key);
    if (place == NULL || place->key == 0 || place->write.round != round)
        return 0;
    struct bps_outgoing write = place->write;
    bps_posted_forget(dispatch, key); /* a link that ends before it is posted must not queue it once more */
    return bps_dispatch_put(dispatch, source, &write);
}

static inline int bps_dispatch_open(struct bps_dispatch *dispatch, uint64_t sent_capacity)
{
    pthread_mutex_init(&dispatch->lock, NULL);
    pthread_cond_init(&dispatch->settled, NULL);
    dispatch->posting = BPS_SEND_NOBODY;
    dispatch->sent = calloc(sent_capacity + 1, sizeof *dispatch->sent);
    dispatch->sent_capacity = sent_capacity;
    return dispatch->sent == NULL ? -1 : 0;
}

static inline void bps_dispatch_free(struct bps_dispatch *dispatch)
{
    for (uint32_t i = 0; i < dispatch->n_routes; i++) {
        free(dispatch->routes[i].targets);
        free(dispatch->routes[i].counts);
    }
    free(dispatch->routes);
    free(dispatch->order);
    free(dispatch->parts);
    free(dispatch->posted);
    free(dispatch->sent);
    free(dispatch->order_of_writes.last);
    bps_send_free(&dispatch->queue);
    pthread_cond_destroy(&dispatch->settled);
    pthread_mutex_destroy(&dispatch->lock);
}
