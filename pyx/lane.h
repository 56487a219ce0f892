/* Lane: a single-producer single-consumer ring in shared memory that announces inputs to an engine.
 *
 *   offset  width  meaning
 *        0      4  magic
 *        4      4  capacity, a power of two
 *        8     56  tally (written by the producer; in a line that the consumer does not look at while it sums)
 *       64      4  head: entries ever pushed (written by the producer)
 *      128      4  tail: entries ever popped (written by the consumer)
 *      192      4  sleepers: threads of the producer that sleep on board words (written by the producer)
 *      256   32*n  entries
 *
 *   entry: part 4, count 4, round 4, flags 2, segment 2, offset 8, time_ns 8
 *
 * The consumer trusts nothing but its own copy of the capacity: a broken producer can only announce invalid entries,
 * and the engine checks each of them.
 */
#pragma once

#include <string.h>

#include "futex.h"

#define BPS_LANE_MAGIC 0x42504c4eu
#define BPS_LANE_HEADER 256
#define BPS_FLAG_EMPTY 1u
#define BPS_FLAG_RATE 2u /* no input: from the next round on the learning rate is `offset`, the bits of a double */
#define BPS_FLAG_NONTEMPORAL 4u /* the rank reads the sum so late that caches have lost it: stores may bypass them */

struct bps_entry {
    uint32_t part;
    uint32_t count; /* partitions part .. part+count-1 of one unit */
    uint32_t round;
    uint16_t flags;
    uint16_t segment;
    uint64_t offset; /* of `part` inside the segment */
    uint64_t time_ns;
};

/* What a rank counts, for itself and its node: relaxed atomics, single words. `exposed_ns` grows with every blocking
 * call; the others when a step is over, `steps` last. */
struct bps_tally {
    uint64_t exposed_ns, steps, step_ns, step_exposed_ns, communication_ns, hidden_ns, stalls;
};

struct bps_lane {
    uint32_t magic;
    uint32_t capacity;
    struct bps_tally tally;
    uint32_t head, pad0;
    uint64_t direct_calls, direct_nbytes; /* direct calls of the rank, and its input in them; as `tally` */
    uint32_t pad1[10];
    uint32_t tail;
    uint32_t pad2[15];
    uint32_t sleepers;
    uint32_t pad3[15];
    struct bps_entry entries[];
};

_Static_assert(sizeof(struct bps_entry) == 32, "lane entries are 32 bytes");
_Static_assert(sizeof(struct bps_lane) == BPS_LANE_HEADER, "lane header is 256 bytes");

/* 0, or -1 when the ring is full. Producer only. */
static inline int bps_lane_push(struct bps_lane *lane, uint32_t capacity, const struct bps_entry *entry)
{
    uint32_t head = lane->head;
    if (head - bps_load(&lane->tail) >= capacity)
        return -1;
    lane->entries[head & (capacity - 1)] = *entry;
    bps_store(&lane->head, head + 1);
    return 0;
}

/* 0; -1 when the ring is empty; 1 when it says that it has more than it holds: it is broken, and nothing is taken.
 * Consumer only. */
static inline int bps_lane_pop(struct bps_lane *lane, uint32_t capacity, struct bps_entry *entry)
{
    uint32_t tail = lane->tail, ready = bps_load(&lane->head) - tail;
    if (ready == 0)
        return -1;
    if (ready > capacity)
        return 1;
    *entry = lane->entries[tail & (capacity - 1)];
    bps_store(&lane->tail, tail + 1);
    return 0;
}

/* Entries that fit a buffer of nbytes, or 0 if it is no formatted lane. */
static inline uint32_t bps_lane_capacity(const struct bps_lane *lane, uint64_t nbytes)
{
    if (nbytes < BPS_LANE_HEADER + sizeof(struct bps_entry) || lane->magic != BPS_LANE_MAGIC)
        return 0;
    uint32_t capacity = lane->capacity;
    if (capacity == 0 || (capacity & (capacity - 1)) != 0)
        return 0;
    if (nbytes < BPS_LANE_HEADER + (uint64_t)capacity * sizeof(struct bps_entry))
        return 0;
    return capacity;
}

static inline void bps_count(uint64_t *counter, uint64_t amount)
{
    __atomic_fetch_add(counter, amount, __ATOMIC_RELAXED);
}

/* The same where one thread at a time adds to the counter, such as one that holds the GIL. */
static inline void bps_count_alone(uint64_t *counter, uint64_t amount)
{
    __atomic_store_n(counter, __atomic_load_n(counter, __ATOMIC_RELAXED) + amount, __ATOMIC_RELAXED);
}

static inline uint64_t bps_counted(const uint64_t *counter) { return __atomic_load_n(counter, __ATOMIC_RELAXED); }
