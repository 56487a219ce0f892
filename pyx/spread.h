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

struct bps_thread_cpu { /* of one engine thread; under the engine's lock */
    int cpu;            /* where it works, -1: it does not */
    int sleeps;         /* since it last worked */
    cpu_set_t allowed;  /* where it may run now */
};

static inline void bps_look_for_cpus(struct bps_cpus *cpus, int n_threads)
{
    cpus->few = n_threads > 1 && n_threads <= BPS_SPREAD_MOST
                && sched_getaffinity(0, sizeof cpus->all, &cpus->all) == 0 && CPU_COUNT(&cpus->all) <= n_threads;
}

static inline void bps_allow(struct bps_thread_cpu *cpu_use, pthread_t thread, const cpu_set_t *cpus)
{
    if (!CPU_EQUAL(&cpu_use->allowed, cpus) && pthread_setaffinity_np(thread, sizeof *cpus, cpus) == 0)
        cpu_use->allowed = *cpus;
}

/* Note that the calling thread works, and on which CPU; the kernel may move it to any other. */
static inline void bps_thread_works(struct bps_thread_cpu *cpu_use, const struct bps_cpus *cpus)
{
    if (!cpus->few)
        return;
    bps_allow(cpu_use, pthread_self(), &cpus->all);
    cpu_use->sleeps = 0;
    cpu_use->cpu = sched_getcpu();
}

static inline void bps_thread_rests(struct bps_thread_cpu *cpu_use)
{
    cpu_use->cpu = -1;
    cpu_use->sleeps = 1;
}
