/* Handover: measures how long a cache line takes from one CPU to another: less than 100 ns within a shared cache.
 *
 * It is measured because a virtual machine's kernel does not know where the host runs its CPUs.
 */
#pragma once

#include <errno.h>
#include <sched.h>

#include "futex.h"
#include "thread.h"

#define BPS_HANDOVER_TURNS 500u
#define BPS_HANDOVER_SERIES 20u
#define BPS_HANDOVER_LOOKS 4096u /* between two looks at the clock */

struct bps_handover {
    uint32_t word __attribute__((aligned(64))); /* even: the first side's turn */
    int cpus[2] __attribute__((aligned(64)));
    uint64_t deadline_ns, least_ns;
    int errors[2];
};

struct bps_handover_side {
    struct bps_handover *shared;
    uint32_t side;
};

/* Wait for this side's turn, which is when the word says `turn`. */
static inline int bps_handover_wait(struct bps_handover *h, uint32_t turn)
{
    for (uint32_t looks = 0; bps_load(&h->word) != turn;)
        if (++looks % BPS_HANDOVER_LOOKS == 0) {
            if (bps_now_ns() >= __atomic_load_n(&h->deadline_ns, __ATOMIC_RELAXED))
                return ETIMEDOUT;
            sched_yield(); /* the other side may have this CPU */
        }
    return 0;
}

/* Make the other side stop waiting: this one will not take its turn. */
static inline void bps_handover_end(struct bps_handover *h)
{
    __atomic_store_n(&h->deadline_ns, 0, __ATOMIC_RELAXED);
}

static inline void *bps_handover_run(void *argument)
{
    struct bps_handover_side *own = (struct bps_handover_side *)argument;
    struct bps_handover *h = own->shared;
    cpu_set_t cpu;
    CPU_ZERO(&cpu);
    CPU_SET(h->cpus[own->side], &cpu);
    int rc = pthread_setaffinity_np(pthread_self(), sizeof cpu, &cpu);
    if (rc != 0)
        bps_handover_end(h);
    uint32_t turn = own->side;
    for (uint32_t series = 0; rc == 0 && series < BPS_HANDOVER_SERIES; series++) {
        uint64_t begin_ns = bps_now_ns();
        if (begin_ns >= __atomic_load_n(&h->deadline_ns, __ATOMIC_RELAXED))
            rc = ETIMEDOUT;
        for (uint32_t i = 0; rc == 0 && i < BPS_HANDOVER_TURNS; i++, turn += 2) {
            rc = bps_handover_wait(h, turn);
            if (rc == 0)
                bps_store(&h->word, turn + 1);
        }
        uint64_t took_ns = bps_now_ns() - begin_ns;
        if (own->side == 0 && took_ns < h->least_ns)
            h->least_ns = took_ns;
    }
    h->errors[own->side] = rc;
    return NULL;
}

/* 0 with the least ns of one way in `*ns`, of several series; or an errno: EINVAL if a CPU may not be used,
 * ETIMEDOUT. */
static inline int bps_handover(int first, int second, uint64_t timeout_ns, double *ns)
{
    struct bps_handover h = {0, {first, second}, bps_now_ns() + timeout_ns, UINT64_MAX, {0, 0}};
    struct bps_handover_side sides[2] = {{&h, 0}, {&h, 1}};
    pthread_t threads[2];
    int rc = bps_start_thread(&threads[0], bps_handover_run, &sides[0]);
    if (rc != 0)
        return rc;
    rc = bps_start_thread(&threads[1], bps_handover_run, &sides[1]);
    if (rc != 0)
        bps_handover_end(&h);
    else
        pthread_join(threads[1], NULL);
    pthread_join(threads[0], NULL);
    /* why one side has failed says more than that the other has waited for it */
    for (int side = 0; side < 2; side++)
        if (rc == 0 || rc == ETIMEDOUT)
            rc = h.errors[side] != 0 ? h.errors[side] : rc;
    *ns = (double)h.least_ns / (2.0 * BPS_HANDOVER_TURNS);
    return rc;
}
