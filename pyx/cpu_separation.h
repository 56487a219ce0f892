/* CPU separation: on a machine with few CPUs, ranks that wait awake run on different ones.
 *
 * Two ranks on one CPU take turns at everything, their Python included. The kernel does not move one of them for longer
 * than a step takes, because a thread that yields looks busy on any CPU.
 */
#pragma once

#include <sched.h>
#include <stdint.h>
#include <string.h>

#include "futex.h"
#include "spread.h"

#define BPS_SEPARATION_NS 1000000u /* least time between two tries to move */
#define BPS_SEPARATION_RARELY 16   /* after a slow move, this many times its duration */
#define BPS_SEPARATION_CPUS 64     /* bits in the word of a doorbell */

struct bps_separation {
    int few;
    uint64_t next_ns; /* relaxed, written by any thread */
};

static inline void bps_look_whether_few(struct bps_separation *separation)
{
    cpu_set_t all;
    int n = sched_getaffinity(0, sizeof all, &all) == 0 ? CPU_COUNT(&all) : 0;
    separation->few = n > 1 && n <= BPS_SPREAD_MOST;
}

/* Returns a CPU of `all` without a bit in `waiting`, -1 if there is none. */
static inline int bps_separation_choose(uint64_t waiting, const cpu_set_t *all)
{
    for (int cpu = 0; cpu < BPS_SEPARATION_CPUS; cpu++)
        if (CPU_ISSET(cpu, all) && (waiting >> cpu & 1) == 0)
            return cpu;
    return -1;
}

static inline void bps_separation_leave(uint64_t *waiting, int cpu)
{
    if (cpu >= 0)
        __atomic_fetch_and(waiting, ~(1ull << cpu), __ATOMIC_RELAXED);
}

/* Choose a CPU and set its bit; again if another thread has set it meanwhile. */
static inline int bps_separation_claim(uint64_t *waiting, uint64_t others, const cpu_set_t *all)
{
    int cpu;
    while ((cpu = bps_separation_choose(others, all)) >= 0) {
        others |= __atomic_fetch_or(waiting, 1ull << cpu, __ATOMIC_RELAXED);
        if ((others >> cpu & 1) == 0)
            return cpu;
    }
    return -1;
}

/* Move this thread to `cpu`, where the kernel may move it away again. Returns 0, or -1. */
static inline int bps_separation_move(struct bps_separation *separation, int cpu, cpu_set_t *all)
{
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    if (sched_setaffinity(0, sizeof one, &one) != 0)
        return -1;
    if (sched_setaffinity(0, sizeof *all, all) != 0) { /* the cpuset has changed: allow all of it */
        separation->few = 0;
        memset(all, 0xff, sizeof *all);
        sched_setaffinity(0, sizeof *all, all);
    }
    return 0;
}

/* The caller begins to wait awake: on a CPU where no other rank does, if there is one. Returns that CPU, for
 * `bps_separation_leave`. A thread that computes there keeps it for a time slice, so a slow move delays the next. */
static inline int bps_separation_enter(struct bps_separation *separation, uint64_t *waiting, uint64_t now_ns)
{
    int cpu = separation->few ? sched_getcpu() : -1;
    if (cpu < 0 || cpu >= BPS_SEPARATION_CPUS)
        return -1;
    uint64_t others = __atomic_fetch_or(waiting, 1ull << cpu, __ATOMIC_RELAXED);
    if ((others >> cpu & 1) == 0)
        return cpu;
    if (now_ns < __atomic_load_n(&separation->next_ns, __ATOMIC_RELAXED))
        return -1;
    __atomic_store_n(&separation->next_ns, now_ns + BPS_SEPARATION_NS, __ATOMIC_RELAXED);
    cpu_set_t all;
    if (sched_getaffinity(0, sizeof all, &all) != 0 || (cpu = bps_separation_claim(waiting, others, &all)) < 0)
        return -1;
    uint64_t begin_ns = bps_now_ns();
    int moved = bps_separation_move(separation, cpu, &all) == 0;
    uint64_t end_ns = bps_now_ns(), took_ns = end_ns - begin_ns;
    if (took_ns >= BPS_SLOW_YIELD_NS)
        bps_contention_slow(&bps_contention, end_ns);
    if (took_ns * BPS_SEPARATION_RARELY > BPS_SEPARATION_NS)
        __atomic_store_n(&separation->next_ns, end_ns + took_ns * BPS_SEPARATION_RARELY, __ATOMIC_RELAXED);
    if (moved)
        return cpu;
    bps_separation_leave(waiting, cpu);
    return -1;
}
