/* Perf: the loops behind `bpsfast perf` over queue pairs: post and poll, nothing else, without the GIL.
 *
 * Returns of the loops: 0, or an errno: ECANCELED, ETIMEDOUT (nothing moved for stall_ns), EIO (a bad completion:
 * `failed`, `failed_pair`, `failed_receive` and `vendor_error` say which), EPROTO (the peer's data is not what it
 * should be), or that of a verb.
 */
#pragma once

#include "perf_idle.h"
#include "perf_queues.h"

/* Send send_goal operations on every pair (UINT64_MAX: until duration_ns have passed), and receive until receive_goal.
 * `begun_ns`: before the first post, or when the first receive completed; `ended_ns`: at the last completion. */
static inline int bps_perf_bandwidth(struct bps_perf *p, uint64_t send_goal, uint64_t duration_ns)
{
    uint64_t now_ns = bps_now_ns(), end_ns = send_goal == UINT64_MAX ? now_ns + duration_ns : UINT64_MAX;
    uint64_t posted = 0, goal = send_goal;
    int rc = 0, stopped = 0, sends = send_goal > 0;
    p->begun_ns = sends ? now_ns : 0;
    bps_perf_moved(p, now_ns);
    for (;;) {
        uint64_t n_sent = 0, n_received = 0, unfinished = 0;
        if (now_ns >= end_ns)
            stopped = 1;
        for (uint32_t i = 0; sends && i < p->n_pairs; i++) {
            struct bps_perf_pair *q = &p->pairs[i];
            /* what was not signalled has to be followed by something that is */
            uint64_t limit = stopped ? q->posted + (q->unsignalled > 0) : goal;
            while (q->posted < limit && q->posted - q->completed < p->depth) {
                uint64_t next = q->posted + 1;
                if (p->posted_ns != NULL)
                    p->posted_ns[posted] = now_ns;
                if ((rc = bps_perf_post(p, i, next % p->moderation == 0 || next == limit)) != 0)
                    return rc;
                posted++;
            }
            unfinished += q->completed < q->posted || q->posted < limit;
        }
        if (unfinished && (rc = bps_perf_poll_sends(p, &n_sent)) != 0)
            return rc;
        if (p->receives && (rc = bps_perf_poll_receives(p, &n_received)) != 0)
            return rc;
        if (n_sent || n_received) {
            now_ns = bps_now_ns();
            bps_perf_moved(p, now_ns);
            if (p->begun_ns == 0)
                p->begun_ns = now_ns;
            p->ended_ns = now_ns;
            if (p->completed_ns != NULL)
                for (uint64_t k = 0; k < n_sent; k++)
                    p->completed_ns[p->sent + k] = now_ns;
            p->sent += n_sent;
            continue;
        }
        if (!unfinished) {
            __atomic_store_n(&p->all_sent, p->sent, __ATOMIC_RELEASE);
            if (!p->receives || p->received >= __atomic_load_n(&p->receive_goal, __ATOMIC_ACQUIRE))
                return 0;
        }
        if ((rc = bps_perf_idle(p, &now_ns)) != 0)
            return rc;
    }
}

/* Wait until the peer's data of turn i is there. */
static inline int bps_perf_await(struct bps_perf *p, uint64_t i)
{
    struct bps_perf_pair *q = &p->pairs[0];
    const uint8_t *last = (const uint8_t *)(uintptr_t)(q->landing + p->nbytes - 1);
    uint64_t now_ns = 0, n = 0;
    struct bps_ibv_wc wc;
    for (;;) {
        int rc, taken;
        if (p->opcode == BPS_WR_RDMA_READ) {
            rc = bps_perf_poll_sends(p, &n);
            if (rc || q->completed > i)
                return rc;
        } else if (p->opcode == BPS_WR_RDMA_WRITE) {
            if (__atomic_load_n(last, __ATOMIC_ACQUIRE) == (uint8_t)(i + 1))
                return 0;
        } else {
            taken = bps_poll_cq(p->recv_cq, 1, &wc);
            if (taken > 0) {
                p->received++;
                return wc.status != BPS_WC_SUCCESS ? bps_perf_bad(p, &wc, 1) : wc.byte_len != p->nbytes ? EPROTO : 0;
            }
            if (taken < 0)
                return EOVERFLOW;
        }
        /* a send that fails completes at once, signalled or not, and then nothing arrives any more */
        int is_due = p->armed || p->looks % BPS_PERF_LOOKS == BPS_PERF_LOOKS - 1;
        if ((is_due && (rc = bps_perf_poll_sends(p, &n)) != 0) || (rc = bps_perf_idle(p, &now_ns)) != 0)
            return rc;
    }
}

/* Take n turns on the first pair: the side that is `first` posts and waits for the answer, the other one answers. A
 * read is answered by the device. samples_ns[i], of the first side: from post i until its answer was there. */
static inline int bps_perf_latency(struct bps_perf *p, uint64_t n, int first, uint64_t *samples_ns)
{
    struct bps_perf_pair *q = &p->pairs[0];
    uint8_t *last = (uint8_t *)(uintptr_t)(q->source + p->nbytes - 1);
    uint32_t owed = 0;
    uint64_t now_ns = bps_now_ns(), n_sent;
    int rc = 0;
    p->begun_ns = now_ns;
    for (uint64_t i = 0; i < n; i++) {
        bps_perf_moved(p, now_ns);
        if (!first && (rc = bps_perf_await(p, i)) != 0)
            return rc;
        if (p->opcode != BPS_WR_RDMA_READ)
            *last = (uint8_t)(i + 1);
        int signalled = p->opcode == BPS_WR_RDMA_READ || (i + 1) % p->moderation == 0 || i + 1 == n;
        if ((rc = bps_perf_post(p, 0, signalled)) != 0)
            return rc;
        if (p->receives && ++owed >= p->receive_depth / 2) {
            rc = bps_perf_post_receives(p, 0, owed - (uint32_t)first);
            owed = (uint32_t)first;
            if (rc)
                return rc;
        }
        if (first && (rc = bps_perf_await(p, i)) != 0)
            return rc;
        uint64_t before_ns = now_ns;
        now_ns = bps_now_ns();
        if (samples_ns != NULL)
            samples_ns[i] = now_ns - before_ns;
        while (q->posted - q->completed >= p->depth || (i + 1 == n && q->completed < q->posted)) {
            rc = bps_perf_poll_sends(p, &n_sent);
            if (rc || (n_sent == 0 && (rc = bps_perf_idle(p, &now_ns)) != 0))
                return rc;
        }
    }
    p->sent = q->completed;
    p->ended_ns = now_ns;
    return p->receives && owed ? bps_perf_post_receives(p, 0, owed) : 0;
}
