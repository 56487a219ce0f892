/* Perf queues: one side of one run over queue pairs: what it posts, and the completions that it takes.
 *
 * The queue pairs of a side share a completion queue for sends and one for receives, and nobody else touches them while
 * a loop runs. One thread runs the loop. Any other thread may set `receive_goal` (the sender of a run by time says
 * afterwards how much it sent) and `cancel`, and read `all_sent`.
 */
#pragma once

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
