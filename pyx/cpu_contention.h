/* CPU contention: whether other processes want this one's cores, so that each yield costs one of their time slices.
 *
 * One slow yield proves nothing, because a virtual machine may not have run for a moment. If BPS_MANY_MET waits ended
 * awake since the last slow yield, waits sleep at once for the least pause only; each further slow yield doubles it.
 * BPS_MANY_MET waits save more than a slow yield costs: 30 to 60 us each, against one or a few ms.
 */
#pragma once

#include <stdint.h>

#define BPS_SLOW_YIELD_NS 1000000u
#define BPS_LEAST_PAUSE_NS 2000000u
#define BPS_MOST_PAUSE_NS 128000000u
#define BPS_MANY_MET 64

struct bps_contention { /* relaxed: a lost update only makes the pause a little shorter or longer */
    uint64_t until_ns, pause_ns;
    uint32_t n_met; /* waits that ended awake since the last slow yield; at most BPS_MANY_MET */
};

static inline int bps_is_contended(const struct bps_contention *contention, uint64_t now_ns)
{
    return now_ns < __atomic_load_n(&contention->until_ns, __ATOMIC_RELAXED);
}

/* Note that a yield which ends now was slow. */
static inline void bps_contention_slow(struct bps_contention *contention, uint64_t now_ns)
{
    uint64_t pause_ns = 2 * __atomic_load_n(&contention->pause_ns, __ATOMIC_RELAXED);
    if (__atomic_exchange_n(&contention->n_met, 0, __ATOMIC_RELAXED) >= BPS_MANY_MET || pause_ns == 0)
        pause_ns = BPS_LEAST_PAUSE_NS;
    if (pause_ns > BPS_MOST_PAUSE_NS)
        pause_ns = BPS_MOST_PAUSE_NS;
    __atomic_store_n(&contention->pause_ns, pause_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&contention->until_ns, now_ns + pause_ns, __ATOMIC_RELAXED);
}

/* Note that a wait ended awake; returns 1. */
static inline int bps_contention_met(struct bps_contention *contention)
{
    uint32_t n = __atomic_load_n(&contention->n_met, __ATOMIC_RELAXED);
    if (n < BPS_MANY_MET)
        __atomic_store_n(&contention->n_met, n + 1, __ATOMIC_RELAXED);
    return 1;
}
