/* Crowd: whether others want the cores of this process. A yield costs one of their time slices then.
 *
 * One slow yield is no proof, since a virtual machine may just not have run for a while: where many waits were met awake
 * between it and the one before, nobody lingers for a moment only. Each further one of a series doubles the pause.
 * Many are so many as save more together than a slow yield costs: one or a few ms, against 30 to 60 us each.
 */
#ifndef BPS_CROWD_H
#define BPS_CROWD_H

#include <stdint.h>

#define BPS_SLOW_YIELD_NS 1000000u
#define BPS_LEAST_PAUSE_NS 2000000u
#define BPS_MOST_PAUSE_NS 128000000u
#define BPS_MANY_MET 64

struct bps_crowd { /* relaxed: threads that overwrite each other's only pause for a little less, or more */
    uint64_t until_ns, pause_ns;
    uint32_t n_met; /* waits that were met awake since the last slow yield; at most BPS_MANY_MET */
};

static inline int bps_is_crowded(const struct bps_crowd *crowd, uint64_t now_ns)
{
    return now_ns < __atomic_load_n(&crowd->until_ns, __ATOMIC_RELAXED);
}

/* A yield that ended now was slow. */
static inline void bps_crowd_slow(struct bps_crowd *crowd, uint64_t now_ns)
{
    uint64_t pause_ns = 2 * __atomic_load_n(&crowd->pause_ns, __ATOMIC_RELAXED);
    if (__atomic_exchange_n(&crowd->n_met, 0, __ATOMIC_RELAXED) >= BPS_MANY_MET || pause_ns == 0)
        pause_ns = BPS_LEAST_PAUSE_NS;
    if (pause_ns > BPS_MOST_PAUSE_NS)
        pause_ns = BPS_MOST_PAUSE_NS;
    __atomic_store_n(&crowd->pause_ns, pause_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&crowd->until_ns, now_ns + pause_ns, __ATOMIC_RELAXED);
}

/* A wait was met awake; 1. */
static inline int bps_crowd_met(struct bps_crowd *crowd)
{
    uint32_t n = __atomic_load_n(&crowd->n_met, __ATOMIC_RELAXED);
    if (n < BPS_MANY_MET)
        __atomic_store_n(&crowd->n_met, n + 1, __ATOMIC_RELAXED);
    return 1;
}

#endif
