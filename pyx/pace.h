/* Pace: limits the bytes per second of all flows that share it, without a lock.
 *
 * Who wants to move bytes reserves the next stretch of time in which they fit, and moves them when it begins. Unused time
 * can be made up for, up to BPS_PACE_BURST_NS, because threads wake late and bytes come in bursts.
 */
#pragma once

#include <stddef.h>

#include "futex.h"

#define BPS_PACE_BURST_NS 4000000u

struct bps_pace {
    double ns_per_byte;
    uint64_t piece_nbytes; /* move no more at once: others wait behind it */
    uint64_t next_ns;      /* the first moment that is not taken */
    uint64_t bytes, waited_ns;
};

/* Reserve the turn of nbytes, and return when it begins. */
static inline uint64_t bps_pace_turn(struct bps_pace *pace, uint64_t nbytes, uint64_t now_ns)
{
    uint64_t cost_ns = (uint64_t)((double)nbytes * pace->ns_per_byte), turn_ns;
    uint64_t next_ns = __atomic_load_n(&pace->next_ns, __ATOMIC_RELAXED);
    do {
        turn_ns = next_ns + BPS_PACE_BURST_NS > now_ns ? next_ns : now_ns - BPS_PACE_BURST_NS;
    } while (!__atomic_compare_exchange_n(&pace->next_ns, &next_ns, turn_ns + cost_ns, 0, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
    __atomic_fetch_add(&pace->bytes, nbytes, __ATOMIC_RELAXED);
    if (turn_ns > now_ns)
        __atomic_fetch_add(&pace->waited_ns, turn_ns - now_ns, __ATOMIC_RELAXED);
    return turn_ns;
}

/* What a flow may move as its pace allows: `granted` bytes, from `turn_ns` on. */
struct bps_grant {
    uint64_t turn_ns;
    size_t granted;
};

/* How many of nbytes may be moved now, as *pace allows (NULL: all); 0: none before *due_ns. */
static inline size_t bps_grant_of(struct bps_grant *grant, struct bps_pace *pace, size_t nbytes, uint64_t *due_ns)
{
    if (pace == NULL)
        return nbytes;
    uint64_t now_ns = bps_now_ns();
    if (grant->granted == 0) {
        grant->granted = nbytes < pace->piece_nbytes ? nbytes : (size_t)pace->piece_nbytes;
        grant->turn_ns = bps_pace_turn(pace, grant->granted, now_ns);
    }
    if (grant->turn_ns > now_ns) {
        *due_ns = grant->turn_ns;
        return 0;
    }
    return grant->granted < nbytes ? grant->granted : nbytes;
}

static inline void bps_grant_used(struct bps_grant *grant, const struct bps_pace *pace, size_t nbytes)
{
    if (pace != NULL)
        grant->granted -= nbytes;
}
