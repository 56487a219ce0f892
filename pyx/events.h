/* Events: what native threads report to the node's Python loop, which takes them in batches; all but LOST only if the
 * engine has no dispatch.
 *
 *   FORWARD    a partial waits to be written to `source`, the owner (code: flags of the entry)
 *   RESULT     a result waits to be written to every wire peer with ranks
 *   DELIVERED  `nbytes` of `part` have reached `source`: credit returns
 *   LOST       the connection to `source` is gone or broke the protocol; code is an errno, 0 an orderly end;
 *              `source` BPS_NOBODY: the engine itself has failed, and the board says how
 */
#pragma once

#include <stdlib.h>

#include "futex.h"
#include "hooks.h"
#include "thread.h"

struct bps_event {
    uint32_t kind, source, part, round, code;
    uint64_t address, nbytes;
};

struct bps_events {
    pthread_mutex_t lock;
    struct bps_event *items, *taken; /* being filled; the reader's, until it takes again */
    uint32_t used, capacity, taken_capacity;
    uint32_t word, reader_waits; /* futex of the one reader */
    uint32_t seen; /* the word at the last take; the reader's own */
    uint64_t grown;
};

static inline int bps_events_init(struct bps_events *events, uint32_t capacity)
{
    pthread_mutex_init(&events->lock, NULL);
    events->items = calloc(capacity, sizeof *events->items);
    events->taken = calloc(capacity, sizeof *events->taken);
    events->capacity = events->taken_capacity = capacity;
    return events->items == NULL || events->taken == NULL ? -1 : 0;
}

/* 0, or -1 without memory: the event is lost, and the caller must end the job. */
static inline int bps_events_push(struct bps_events *events, struct bps_event event)
{
    pthread_mutex_lock(&events->lock);
    if (events->used == events->capacity) {
        struct bps_event *more = realloc(events->items, 2 * (size_t)events->capacity * sizeof *more);
        if (more == NULL) {
            pthread_mutex_unlock(&events->lock);
            return -1;
        }
        events->items = more;
        events->capacity *= 2;
        __atomic_store_n(&events->grown, events->grown + 1, __ATOMIC_RELAXED);
    }
    events->items[events->used] = event;
    bps_store(&events->used, events->used + 1); /* the reader looks without the lock */
    bps_add(&events->word, 1);
    pthread_mutex_unlock(&events->lock);
    if (__atomic_load_n(&events->reader_waits, __ATOMIC_SEQ_CST) != 0)
        bps_wake(&events->word, 1);
    return 0;
}

/* Sleep until there is an event, somebody has called bps_events_wake since the last take, or the time is over. A
 * wake-up that comes while the reader is at work is not lost: the next call returns at once. Reader only. */
static inline void bps_events_await(struct bps_events *events, uint64_t timeout_ns)
{
    if (bps_load(&events->used) != 0)
        return;
    bps_add(&events->reader_waits, 1);
    bps_wait(&events->word, events->seen, timeout_ns);
    bps_add(&events->reader_waits, (uint32_t)-1);
}

/* Take all events: how many of `taken` are the reader's now. A thread that pushes never waits for the reader. What was
 * done before a wake-up is visible to the reader once this call has read that wake-up. Reader only. */
static inline uint32_t bps_events_take(struct bps_events *events)
{
    pthread_mutex_lock(&events->lock);
    struct bps_event *items = events->items;
    uint32_t capacity = events->capacity, used = events->used;
    events->seen = bps_load(&events->word);
    events->items = events->taken;
    events->capacity = events->taken_capacity;
    bps_store(&events->used, 0);
    events->taken = items;
    events->taken_capacity = capacity;
    pthread_mutex_unlock(&events->lock);
    return used;
}

static inline void bps_events_wake(struct bps_events *events)
{
    bps_add(&events->word, 1);
    bps_wake(&events->word, 1);
}
