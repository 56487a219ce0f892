/* Perf: the loops behind `bpsfast perf` over queue pairs: post and poll, nothing else, without the GIL.
 *
 * One `bps_perf` is one side of one run: its queue pairs share a completion queue for sends and one for receives, and
 * nobody else touches them while a loop runs. One thread runs the loop. Any other thread may set `receive_goal` (the
 * sender of a run by time says afterwards how much it sent) and `cancel`, and read `all_sent`.
 *
 * A loop waits for completions polling; with idle_ns it goes to sleep on the queues' event channels after so long
 * without any. Sleeping costs a wake-up, but on a machine with few cores a receiver that polls takes its core from the
 * one who works: the driver's own thread, or the sender. Where it only has to post receives again in time, it does not
 * even have to be woken for each: with nap_ns it sleeps by the clock.
 *
 * Returns of the loops: 0, or an errno: ECANCELED, ETIMEDOUT (nothing moved for stall_ns), EIO (a bad completion:
 * `failed`, `failed_pair`, `failed_receive` and `vendor_error` say which), EPROTO (the peer's data is not what it
 * should be), or that of a verb.
 */
#ifndef BPS_PERF_H
#define BPS_PERF_H

#include "futex.h"
#include "verbs.h"

enum { BPS_PERF_BATCH = 32, BPS_PERF_LOOKS = 64, BPS_PERF_NAP_MS = 50 };

struct bps_perf_pair {
    struct bps_ibv_qp *qp;
    uint64_t source, landing; /* our own memory: what leaves (or a read fills), where the peer's data lands */
    uint64_t remote;          /* where in the peer's memory */
    uint32_t lkey, rkey;
    uint64_t posted, completed, unsignalled;
};

struct bps_perf {
    struct bps_ibv_cq *send_cq, *recv_cq;
    struct bps_perf_pair *pairs;
    uint32_t n_pairs, opcode, nbytes, depth, receive_depth, receive_nbytes, moderation, inlined;
    int receives;                    /* whether receives are posted, and posted again when they were used */
    uint64_t idle_ns, stall_ns;      /* idle_ns UINT64_MAX: never sleep */
    uint64_t nap_ns;                 /* not 0: see bps_perf_rest */
    uint64_t receive_goal;           /* changed by another thread while a loop runs */
    uint32_t cancel;
    uint64_t all_sent;               /* what was sent, once there will be no more; UINT64_MAX before */
    uint64_t sent, received, begun_ns, ended_ns;
    uint64_t *posted_ns, *completed_ns; /* of each send, in order of posting on one pair; NULL: not wanted */
    int failed, failed_pair, failed_receive;
    uint32_t vendor_error;
    /* of the wait that is under way: since when nothing moved, looks since then, whether the channels will ring */
    uint64_t last_ns;
    uint32_t looks;
    int armed;
};

/* Post n receives to a pair in one call. 0 or an errno. */
static inline int bps_perf_post_receives(struct bps_perf *p, uint32_t pair, uint32_t n)
{
    struct bps_ibv_recv_wr wrs[BPS_PERF_BATCH], *bad;
    struct bps_perf_pair *q = &p->pairs[pair];
    /* writes bring their data to an address of their own: the receive has no memory */
    struct bps_ibv_sge sge = {q->landing, p->receive_nbytes, q->lkey};
    int has_memory = p->opcode == BPS_WR_SEND;
    while (n > 0) {
        uint32_t chunk = n < BPS_PERF_BATCH ? n : BPS_PERF_BATCH;
        for (uint32_t i = 0; i < chunk; i++)
            wrs[i] = (struct bps_ibv_recv_wr){pair, i + 1 < chunk ? &wrs[i + 1] : NULL, has_memory ? &sge : NULL,
                                              has_memory, 0};
        int rc = bps_post_recv(q->qp, wrs, &bad);
        if (rc)
            return rc;
        n -= chunk;
    }
    return 0;
}

/* Post one operation of the run; wr_id: the pair, and above bit 32 how many sends its completion retires. */
static inline int bps_perf_post(struct bps_perf *p, uint32_t pair, int signalled)
{
    struct bps_perf_pair *q = &p->pairs[pair];
    struct bps_ibv_sge sge;
    struct bps_ibv_send_wr wr, *bad;
    unsigned int flags = (signalled ? BPS_SEND_SIGNALED : 0) | (p->inlined ? BPS_SEND_INLINE : 0);
    q->unsignalled++;
    bps_fill_send(&wr, &sge, (int)p->opcode, flags, q->unsignalled << 32 | pair, q->source, p->nbytes, q->lkey,
                  q->remote, q->rkey, (uint32_t)q->posted);
    int rc = bps_post_send(q->qp, &wr, &bad);
    if (rc == 0) {
        q->posted++;
        if (signalled)
            q->unsignalled = 0;
    }
    return rc;
}

static inline int bps_perf_bad(struct bps_perf *p, const struct bps_ibv_wc *wc, int receive)
{
    p->failed = wc->status;
    p->vendor_error = wc->vendor_err;
    p->failed_pair = (int)(uint32_t)wc->wr_id;
    p->failed_receive = receive;
    return EIO;
}

/* Take completions of sends; *n: how many sends they retired. */
static inline int bps_perf_poll_sends(struct bps_perf *p, uint64_t *n)
{
    struct bps_ibv_wc wc[BPS_PERF_BATCH];
    int taken = bps_poll_cq(p->send_cq, BPS_PERF_BATCH, wc);
    *n = 0;
    for (int i = 0; i < taken; i++) {
        if (wc[i].status != BPS_WC_SUCCESS)
            return bps_perf_bad(p, &wc[i], 0);
        p->pairs[(uint32_t)wc[i].wr_id].completed += wc[i].wr_id >> 32;
        *n += wc[i].wr_id >> 32;
    }
    return taken < 0 ? EOVERFLOW : 0;
}

/* Take completions of receives and post as many again; *n: how many. */
static inline int bps_perf_poll_receives(struct bps_perf *p, uint64_t *n)
{
    struct bps_ibv_wc wc[BPS_PERF_BATCH];
    int taken = bps_poll_cq(p->recv_cq, BPS_PERF_BATCH, wc), rc = 0;
    *n = taken > 0 ? (uint64_t)taken : 0;
    for (int i = 0, same = 0; i < taken && rc == 0; i++) {
        if (wc[i].status != BPS_WC_SUCCESS)
            return bps_perf_bad(p, &wc[i], 1);
        if (wc[i].byte_len != p->nbytes)
            return EPROTO;
        same++;
        if (i + 1 == taken || wc[i + 1].wr_id != wc[i].wr_id) {
            rc = bps_perf_post_receives(p, (uint32_t)wc[i].wr_id, (uint32_t)same);
            same = 0;
        }
    }
    p->received += *n;
    return taken < 0 ? EOVERFLOW : rc;
}

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
                rc = bps_perf_post(p, i, next % p->moderation == 0 || next == limit);
                if (rc)
                    return rc;
                posted++;
            }
            unfinished += q->completed < q->posted || q->posted < limit;
        }
        if (unfinished) {
            rc = bps_perf_poll_sends(p, &n_sent);
            if (rc)
                return rc;
        }
        if (p->receives) {
            rc = bps_perf_poll_receives(p, &n_received);
            if (rc)
                return rc;
        }
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
        if (p->armed || p->looks % BPS_PERF_LOOKS == BPS_PERF_LOOKS - 1) {
            rc = bps_perf_poll_sends(p, &n);
            if (rc)
                return rc;
        }
        rc = bps_perf_idle(p, &now_ns);
        if (rc)
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
        rc = bps_perf_post(p, 0, p->opcode == BPS_WR_RDMA_READ || (i + 1) % p->moderation == 0 || i + 1 == n);
        if (rc)
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

#endif
