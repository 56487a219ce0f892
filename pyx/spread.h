/* Spread: on a machine with few CPUs, a thread that is woken to sum gets a CPU on which no other engine thread sums.
 *
 * The kernel looks for an idle CPU. If ranks wait awake there is none, and it takes the least loaded one: that of the
 * thread that wakes, because those of waiting ranks count as busy. There the second sum would begin only after the
 * first. A CPU of a rank that waits awake may be used (futex.h).
 */
#pragma once

#include <pthread.h>
#include <sched.h>

#define BPS_SPREAD_MOST 8 /* more threads find an idle CPU by themselves */

struct bps_cpus {
    cpu_set_t all; /* where the process may run */
    int few;
};

struct bps_seat {      /* of one thread; under the lock of their core */
    int cpu;           /* where it works, -1: it does not */
    int sleeps;        /* since it last worked */
    cpu_set_t allowed; /* where it may run now */
};

static inline void bps_look_for_cpus(struct bps_cpus *cpus, int n_threads)
{
    cpus->few = n_threads > 1 && n_threads <= BPS_SPREAD_MOST
                && sched_getaffinity(0, sizeof cpus->all, &cpus->all) == 0 && CPU_COUNT(&cpus->all) <= n_threads;
}

static inline void bps_allow(struct bps_seat *seat, pthread_t thread, const cpu_set_t *cpus)
{
    if (!CPU_EQUAL(&seat->allowed, cpus) && pthread_setaffinity_np(thread, sizeof *cpus, cpus) == 0)
        seat->allowed = *cpus;
}

/* The calling thread works here, and stays where it is until the kernel thinks better of it. */
static inline void bps_take_seat(struct bps_seat *seat, const struct bps_cpus *cpus)
{
    if (!cpus->few)
        return;
    bps_allow(seat, pthread_self(), &cpus->all);
    seat->sleeps = 0;
    seat->cpu = sched_getcpu();
}

static inline void bps_leave_seat(struct bps_seat *seat)
{
    seat->cpu = -1;
    seat->sleeps = 1;
}
