/* Apart: on a machine of few CPUs, ranks that wait awake do so on different ones.
 *
 * Two on one CPU take turns at all they do, their Python too. The kernel lets that be for longer than an exchange takes:
 * to it, who yields is busy, on one CPU as on the other.
 */
#ifndef BPS_APART_H
#define BPS_APART_H

#include <sched.h>
#include <stdint.h>
#include <string.h>

#include "futex.h"
#include "spread.h"

#define BPS_APART_NS 1000000u /* who moved, or could not, looks again no earlier */
#define BPS_APART_RARELY 16   /* times as long as a move took until the next */
#define BPS_APART_CPUS 64     /* of which the word of a doorbell tells */

struct bps_apart {
    int few;
    uint64_t next_ns; /* relaxed, of any thread */
};

static inline void bps_look_whether_few(struct bps_apart *apart)
{
    cpu_set_t all;
    int n = sched_getaffinity(0, sizeof all, &all) == 0 ? CPU_COUNT(&all) : 0;
    apart->few = n > 1 && n <= BPS_SPREAD_MOST;
}

/* The CPU of `all` that `waiting` has no bit for, -1: none. */
static inline int bps_apart_choose(uint64_t waiting, const cpu_set_t *all)
{
    for (int cpu = 0; cpu < BPS_APART_CPUS; cpu++)
        if (CPU_ISSET(cpu, all) && (waiting >> cpu & 1) == 0)
            return cpu;
    return -1;
}

static inline void bps_apart_leave(uint64_t *waiting, int cpu)
{
    if (cpu >= 0)
        __atomic_fetch_and(waiting, ~(1ull << cpu), __ATOMIC_RELAXED);
}

/* Choose, and set the bit, which another may have done meanwhile: then choose again. */
static inline int bps_apart_claim(uint64_t *waiting, uint64_t others, const cpu_set_t *all)
{
    int cpu;
    while ((cpu = bps_apart_choose(others, all)) >= 0) {
        others |= __atomic_fetch_or(waiting, 1ull << cpu, __ATOMIC_RELAXED);
        if ((others >> cpu & 1) == 0)
            return cpu;
    }
    return -1;
}

/* Run on `cpu` from now on, until the kernel thinks better of it; 0, or -1. */
static inline int bps_apart_move(struct bps_apart *apart, int cpu, cpu_set_t *all)
{
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    if (sched_setaffinity(0, sizeof one, &one) != 0)
        return -1;
    if (sched_setaffinity(0, sizeof *all, all) != 0) { /* the cpuset has none of them any more: all that it has */
        apart->few = 0;
        memset(all, 0xff, sizeof *all);
        sched_setaffinity(0, sizeof *all, all);
    }
    return 0;
}

/* The caller waits awake from now on, on a CPU where no other does if there is one; that CPU for `bps_apart_leave`.
 * Who computes on the new one goes on for a time slice: a move that took long is not soon followed by another. */
static inline int bps_apart_enter(struct bps_apart *apart, uint64_t *waiting, uint64_t now_ns)
{
    int cpu = apart->few ? sched_getcpu() : -1;
    if (cpu < 0 || cpu >= BPS_APART_CPUS)
        return -1;
    uint64_t others = __atomic_fetch_or(waiting, 1ull << cpu, __ATOMIC_RELAXED);
    if ((others >> cpu & 1) == 0)
        return cpu;
    if (now_ns < __atomic_load_n(&apart->next_ns, __ATOMIC_RELAXED))
        return -1;
    __atomic_store_n(&apart->next_ns, now_ns + BPS_APART_NS, __ATOMIC_RELAXED);
    cpu_set_t all;
    if (sched_getaffinity(0, sizeof all, &all) != 0 || (cpu = bps_apart_claim(waiting, others, &all)) < 0)
        return -1;
    uint64_t begin_ns = bps_now_ns();
    int moved = bps_apart_move(apart, cpu, &all) == 0;
    uint64_t end_ns = bps_now_ns(), took_ns = end_ns - begin_ns;
    if (took_ns >= BPS_SLOW_YIELD_NS)
        bps_crowd_slow(&bps_crowd, end_ns);
    if (took_ns * BPS_APART_RARELY > BPS_APART_NS)
        __atomic_store_n(&apart->next_ns, end_ns + took_ns * BPS_APART_RARELY, __ATOMIC_RELAXED);
    if (moved)
        return cpu;
    bps_apart_leave(waiting, cpu);
    return -1;
}

#endif
