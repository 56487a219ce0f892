/* Slots: where a peer may write over the streams of a link, any slot over any stream.
 *
 * The lock spans a look at a slot, not the payload: a thread that unbinds a slot knows that nothing is being received
 * into it. Rounds come one after another, also over a connection that replaces another: there a write is repeated if
 * and only if it did not arrive. So a round that is not the next one is refused, because it would be summed as another
 * one. It is the next one over every stream: a peer has a round to write once the engine here has the one before it
 * (its result follows from our input, and its input from our result), and then this one has arrived.
 */
#pragma once

#include <stdlib.h>

#include "lane.h"
#include "thread.h"
#include "wire.h"

struct bps_slot {
    uint64_t addresses[2]; /* for even and odd rounds; 0: not bound */
    uint64_t nbytes;
    uint32_t framed; /* up to nbytes, with their length in front */
    uint32_t next_round; /* what has not arrived whole */
    int is_receiving;    /* a stream receives it */
};

struct bps_slots {
    pthread_mutex_t lock;
    struct bps_slot *items;
    uint32_t n, epoch;
};

/* 0, or -1 without memory. */
static inline int bps_slots_init(struct bps_slots *slots, uint32_t n, uint32_t epoch)
{
    pthread_mutex_init(&slots->lock, NULL);
    slots->n = n;
    slots->epoch = epoch;
    slots->items = (struct bps_slot *)calloc(n, sizeof *slots->items);
    return slots->items == NULL ? -1 : 0;
}

static inline void bps_slots_free(struct bps_slots *slots)
{
    free(slots->items);
    pthread_mutex_destroy(&slots->lock);
}

/* Let the peer write into a slot below n; with the addresses 0 no more. */
static inline void bps_slots_bind(struct bps_slots *slots, uint32_t slot, uint64_t even, uint64_t odd, uint64_t nbytes,
                                  uint32_t framed, uint32_t next_round)
{
    pthread_mutex_lock(&slots->lock);
    slots->items[slot] = (struct bps_slot){{even, odd}, nbytes, framed, next_round, 0};
    pthread_mutex_unlock(&slots->lock);
}

/* Whether a slot accepts the write that the header announces. The caller holds the lock. */
static inline int bps_slot_fits(const struct bps_slot *slot, const struct bps_header *header)
{
    if (slot->addresses[0] == 0 || slot->is_receiving || header->round != slot->next_round)
        return 0;
    if (header->flags & BPS_FLAG_EMPTY)
        return header->nbytes == 0;
    return slot->framed ? bps_frame_may_come(header->nbytes, slot->nbytes) : header->nbytes == slot->nbytes;
}

/* Return 1 if the slot accepts the write that the header announces, else 0, and copy its present binding to *slot.
 * An accepted write reserves the slot until `bps_slots_arrived` is called for it. */
static inline int bps_slots_accept(struct bps_slots *slots, const struct bps_header *header, struct bps_slot *slot)
{
    if (header->magic != BPS_WIRE_MAGIC || header->slot >= slots->n || header->epoch != slots->epoch)
        return 0;
    if (header->immediate != bps_immediate(header->slot, header->round, header->epoch))
        return 0;
    pthread_mutex_lock(&slots->lock);
    *slot = slots->items[header->slot];
    int fits = bps_slot_fits(slot, header);
    slots->items[header->slot].is_receiving |= fits;
    pthread_mutex_unlock(&slots->lock);
    return fits;
}

/* The round of a slot below n that has not arrived whole. */
static inline uint32_t bps_slots_next(struct bps_slots *slots, uint32_t slot)
{
    pthread_mutex_lock(&slots->lock);
    uint32_t round = slots->items[slot].next_round;
    pthread_mutex_unlock(&slots->lock);
    return round;
}

/* A write has arrived whole. */
static inline void bps_slots_arrived(struct bps_slots *slots, const struct bps_header *header)
{
    pthread_mutex_lock(&slots->lock);
    slots->items[header->slot].next_round = header->round + 1;
    slots->items[header->slot].is_receiving = 0;
    pthread_mutex_unlock(&slots->lock);
}
