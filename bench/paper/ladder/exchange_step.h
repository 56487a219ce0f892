/* Exchange step: take in completions and post what follows from them, until a step of `exchange.h` is done. */
#ifndef BPS_EXCHANGE_STEP_H
#define BPS_EXCHANGE_STEP_H

#include <sched.h>

#include "exchange.h"

/* Take in one completion. 0 or an errno. */
static inline int bps_exchange_complete(struct bps_exchange *exchange, const struct bps_ibv_wc *wc)
{
    uint32_t number = (uint32_t)(wc->wr_id >> 32), kind = (uint32_t)(wc->wr_id >> 24) & 255;
    uint32_t i = (uint32_t)wc->wr_id & 0xffffff;
    struct bps_exchange_end *end = &exchange->ends[number];
    if (wc->status != BPS_WC_SUCCESS) {
        exchange->failed = wc->status;
        exchange->failed_wr_id = wc->wr_id;
        exchange->vendor_error = wc->vendor_err;
        return EIO;
    }
    if (kind != BPS_MESSAGE_RECEIVE) {
        end->outstanding--;
        if (kind != BPS_MESSAGE_DATA)
            return 0;
        struct bps_exchange_part *part = &end->parts[i];
        part->in_flight = 0;
        end->completed++;
        struct bps_ibv_mr *registered = part->registered;
        part->registered = NULL;
        return registered != NULL ? bps_positive(bps_verbs.dereg_mr(registered)) : 0;
    }
    struct bps_reply reply;
    memcpy(&reply, end->messages + (uint64_t)(end->n_parts + i) * BPS_MESSAGE_NBYTES, sizeof reply);
    int rc = bps_exchange_receive(end, number, i, i + 1);
    uint32_t word = bps_wc_immediate(wc), what = word >> 24, which = word & 0xffffff;
    if (which >= end->n_parts || what > BPS_MESSAGE_REPLY)
        return EPROTO;
    if (what == BPS_MESSAGE_DATA)
        bps_exchange_arrived(exchange, end, which);
    else if (what == BPS_MESSAGE_REQUEST)
        bps_exchange_queue(end, BPS_MESSAGE_REPLY, which);
    else {
        end->parts[which].target = reply.address;
        end->parts[which].target_rkey = reply.rkey;
        bps_exchange_queue(end, BPS_MESSAGE_DATA, which);
    }
    return rc;
}

static inline int bps_exchange_done(const struct bps_exchange *exchange)
{
    for (uint32_t e = 0; e < exchange->n_ends; e++) {
        const struct bps_exchange_end *end = &exchange->ends[e];
        if (end->arrived < end->step * end->n_parts || end->completed < end->step * end->n_parts)
            return 0;
    }
    return 1;
}

/* Begin a step: workers push everything, services wait for it. 0 or an errno. */
static inline int bps_exchange_begin(struct bps_exchange *exchange)
{
    exchange->moved_ns = bps_now_ns();
    for (uint32_t e = 0; e < exchange->n_ends; e++) {
        struct bps_exchange_end *end = &exchange->ends[e];
        end->step++;
        for (uint32_t i = 0; !end->is_service && i < end->n_parts; i++)
            bps_exchange_ready(exchange, end, i);
        int rc = bps_exchange_post(exchange, e);
        if (rc != 0)
            return rc;
    }
    return 0;
}

/* Take in one batch of completions and post what follows: how many, or a negative errno. */
static inline int bps_exchange_poll(struct bps_exchange *exchange)
{
    struct bps_ibv_wc wcs[BPS_EXCHANGE_BATCH];
    int n = bps_poll_cq(exchange->cq, BPS_EXCHANGE_BATCH, wcs);
    for (int i = 0; i < n; i++) {
        int rc = bps_exchange_complete(exchange, &wcs[i]);
        if (rc != 0)
            return -rc;
    }
    for (uint32_t e = 0; n > 0 && e < exchange->n_ends; e++) {
        int rc = bps_exchange_post(exchange, e);
        if (rc != 0)
            return -rc;
    }
    return n;
}

/* Go on with a step until it is done (0), for slice_ns (EAGAIN), or until something fails (an errno). */
static inline int bps_exchange_go_on(struct bps_exchange *exchange, uint64_t slice_ns)
{
    uint64_t begin_ns = bps_now_ns();
    while (!bps_exchange_done(exchange)) {
        int n = bps_exchange_poll(exchange);
        uint64_t now_ns = bps_now_ns();
        if (n < 0)
            return -n;
        if (n > 0)
            exchange->moved_ns = now_ns;
        if (now_ns - begin_ns > slice_ns)
            return EAGAIN;
        if (n > 0)
            continue;
        if (now_ns - exchange->moved_ns < exchange->awake_ns) {
            sched_yield();
            continue;
        }
        int rc = bps_req_notify_cq(exchange->cq, 0);
        if (rc != 0)
            return rc;
        n = bps_exchange_poll(exchange); /* what came before the queue was armed gives no event */
        if (n < 0)
            return -n;
        if (n > 0) {
            exchange->moved_ns = bps_now_ns();
            continue;
        }
        n = bps_await_fd(exchange->cq->channel->fd, (int64_t)slice_ns);
        while (n > 0)
            n = bps_take_cq_event(exchange->cq->channel);
        if (n < 0 && n != -EINTR)
            return -n;
    }
    return 0;
}

#endif
