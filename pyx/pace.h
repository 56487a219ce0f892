/* Pace: limits the bytes per second of all threads that share it, without a lock.
 *
 * A thread that wants to move bytes reserves the next stretch of time in which they fit, and sleeps until it begins.
 * Unused time can be made up for, up to burst_ns, because sleeps end late and bytes come in bursts.
 */
#pragma once

#include "futex.h"

#define BPS_PACE_BURST_NS 4000000u
#define BPS_PACE_LOOK_NS 50000000u /* so often a sleeper looks whether its connection is being closed */

struct bps_pace {
    double ns_per_byte;
    uint64_t piece_nbytes; /* move no more at once: others wait behind it */
    uint64_t next_ns;      /* the first moment that is not taken */
    uint64_t bytes, waited_ns;
};

/* Wait for the turn of nbytes. 0, or ECANCELED once *closing is set. */
static inline int bps_await_turn(struct bps_pace *pace, uint64_t nbytes, const uint32_t *closing)
{
    uint64_t cost_ns = (uint64_t)((double)nbytes * pace->ns_per_byte), turn_ns;
    uint64_t now_ns = bps_now_ns(), begin_ns = now_ns;
    uint64_t next_ns = __atomic_load_n(&pace->next_ns, __ATOMIC_RELAXED);
    do {
        turn_ns = next_ns + BPS_PACE_BURST_NS > now_ns ? next_ns : now_ns - BPS_PACE_BURST_NS;
    } while (!__atomic_compare_exchange_n(&pace->next_ns, &next_ns, turn_ns + cost_ns, 0, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
    __atomic_fetch_add(&pace->bytes, nbytes, __ATOMIC_RELAXED);
    while (turn_ns > now_ns) {
        if (bps_load(closing))
            return ECANCELED;
        uint64_t until_ns = turn_ns - now_ns < BPS_PACE_LOOK_NS ? turn_ns : now_ns + BPS_PACE_LOOK_NS;
        struct timespec until = {(time_t)(until_ns / 1000000000u), (long)(until_ns % 1000000000u)};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
        now_ns = bps_now_ns();
    }
    __atomic_fetch_add(&pace->waited_ns, now_ns - begin_ns, __ATOMIC_RELAXED);
    return 0;
}
