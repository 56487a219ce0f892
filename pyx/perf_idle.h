/* Perf idle: what a loop of `perf.h` does while its queues are empty.
 *
 * A loop polls for completions; with idle_ns it sleeps on the queues' event channels after that time without any.
 * Sleeping costs a wake-up, but on a machine with few cores a receiver that polls takes the core from the thread that
 * works: the driver's, or the sender's. A receiver that only has to post requests again in time need not be woken for
 * each: with nap_ns it sleeps by the clock.
 */
#pragma once

#include "perf_queues.h"

static inline void bps_perf_moved(struct bps_perf *p, uint64_t now_ns)
{
    p->last_ns = now_ns;
    p->looks = 0;
    p->armed = 0;
}

/* Let both queues ring at their next completion. */
static inline int bps_perf_arm(struct bps_perf *p)
{
    int rc = p->send_cq->channel != NULL ? bps_req_notify_cq(p->send_cq, 0) : 0;
    if (rc == 0 && p->recv_cq->channel != NULL)
        rc = bps_req_notify_cq(p->recv_cq, 0);
    p->armed = 1;
    return rc;
}

/* Sleep until a queue rings, but for a nap at most: `cancel` has to be seen. */
static inline int bps_perf_nap(struct bps_perf *p)
{
    struct bps_ibv_comp_channel *channels[2] = {p->send_cq->channel, p->recv_cq->channel};
    struct pollfd waited[2];
    for (int i = 0; i < 2; i++) /* poll passes over negative descriptors */
        waited[i] = (struct pollfd){channels[i] != NULL ? channels[i]->fd : -1, POLLIN, 0};
    poll(waited, 2, BPS_PERF_NAP_MS);
    for (int i = 0; i < 2; i++)
        if (waited[i].revents & POLLIN) {
            int rc = bps_take_cq_event(channels[i]);
            if (rc < 0)
                return -rc;
        }
    p->armed = 0;
    return 0;
}

/* Let messages pile up for as long as a quarter of the posted receives lasts at the rate so far, nap_ns at most. */
static inline void bps_perf_rest(struct bps_perf *p, uint64_t now_ns)
{
    uint64_t each_ns = (now_ns - p->begun_ns) / p->received, n = (uint64_t)p->receive_depth * p->n_pairs / 4;
    uint64_t nap_ns = each_ns * n < p->nap_ns ? each_ns * n : p->nap_ns;
    struct timespec nap = {0, (long)nap_ns};
    nanosleep(&nap, NULL);
    p->looks = BPS_PERF_LOOKS - 1; /* one look, then the next nap */
}

/* Nothing was found in a look at the queues: look again, or sleep. *now_ns is set when the clock was read. */
static inline int bps_perf_idle(struct bps_perf *p, uint64_t *now_ns)
{
    if (bps_load(&p->cancel))
        return ECANCELED;
    if (p->armed) { /* and looked at since: nothing came before it was */
        int rc = bps_perf_nap(p);
        if (rc)
            return rc;
    } else if (p->idle_ns != 0 && ++p->looks % BPS_PERF_LOOKS != 0)
        return 0;
    else if (p->idle_ns != 0)
        sched_yield(); /* the driver's own thread may want this very core */
    *now_ns = bps_now_ns();
    if (*now_ns - p->last_ns >= p->stall_ns)
        return ETIMEDOUT;
    if (p->armed || *now_ns - p->last_ns < p->idle_ns)
        return 0;
    if (p->nap_ns == 0 || p->received == 0)
        return bps_perf_arm(p);
    bps_perf_rest(p, *now_ns);
    return 0;
}
