/* Exchange: partitions go to a service and come back, over one queue pair, in the ways that `bench.ladder` compares.
 *
 *   worker   push: source -> the service's memory        a step ends when all results are here and all pushes completed
 *   service  arrival of i -> result i: source -> the worker's memory
 *
 * Without switches a partition and hop is one WRITE_WITH_IMM of one SGE, the immediate being the partition. Every end
 * has receive requests for all that the peer can send in a step, and posts each again before it looks at its message.
 *
 * immediate: kind << 24 | partition.   wr_id: end << 32 | kind << 24 | partition, or, of a receive, its buffer.
 * One thread at a time; no locks.
 */
#ifndef BPS_EXCHANGE_H
#define BPS_EXCHANGE_H

#include <stdlib.h>

#include "futex.h"
#include "verbs.h"

enum {
    BPS_SWITCH_REGISTER = 1, /* what is written from is registered for each write, and deregistered after it */
    BPS_SWITCH_RENDEZVOUS = 2, /* the receiver is asked for address and key before each write */
    BPS_SWITCH_COPY = 4, /* through staging memory, at the sender and at the receiver */
    BPS_SWITCH_TWO_SGES = 8, /* the first bytes of each write are an SGE of their own */
    BPS_SWITCH_HALF_DUPLEX = 16, /* no result is sent before the whole push has arrived */
};

enum { BPS_MESSAGE_DATA, BPS_MESSAGE_REQUEST, BPS_MESSAGE_REPLY, BPS_MESSAGE_RECEIVE };

#define BPS_MESSAGE_NBYTES 16 /* of a reply, and of each receive buffer */
#define BPS_MESSAGES_PER_PART 3 /* that a peer can send in a step: data, request, reply */
#define BPS_EXCHANGE_BATCH 16
#define BPS_FIRST_SGE_NBYTES 16 /* as of a key and a length before the values */

struct bps_exchange_part {
    char *source, *staged; /* what this end sends; with COPY the place it is staged in, else NULL */
    uint64_t target; /* where the peer wants it; with RENDEZVOUS as it last said */
    char *arrival, *destination; /* where the peer writes; with COPY what it is then copied to, else NULL */
    uint32_t nbytes, source_lkey, target_rkey, arrival_rkey, in_flight;
    struct bps_ibv_mr *registered;
};

struct bps_reply { /* native byte order: both ends are one kind of machine */
    uint64_t address;
    uint32_t rkey, unused;
};

struct bps_exchange_end {
    struct bps_ibv_qp *qp;
    int is_service;
    uint32_t n_parts, max_send, outstanding;
    struct bps_exchange_part *parts;
    char *messages; /* n_parts replies to send, then 3 * n_parts receive buffers */
    uint32_t messages_lkey;
    uint32_t *queue; /* kind << 24 | partition, to be posted in this order */
    uint32_t queue_capacity;
    uint64_t queued, taken, arrived, completed, step;
};

struct bps_exchange {
    struct bps_ibv_cq *cq;
    uint32_t switches, n_ends;
    struct bps_exchange_end *ends;
    uint64_t awake_ns, moved_ns; /* how long to yield before sleeping; when something last moved */
    int failed; /* what went wrong: a status of a completion (positive), 0 */
    uint64_t failed_wr_id;
    uint32_t vendor_error;
    uint64_t registrations, requests, copies, writes, sges;
};

static inline void bps_exchange_queue(struct bps_exchange_end *end, uint32_t kind, uint32_t i)
{
    end->queue[end->queued++ % end->queue_capacity] = kind << 24 | i;
}

static inline void bps_exchange_ready(struct bps_exchange *exchange, struct bps_exchange_end *end, uint32_t i)
{
    bps_exchange_queue(end, exchange->switches & BPS_SWITCH_RENDEZVOUS ? BPS_MESSAGE_REQUEST : BPS_MESSAGE_DATA, i);
}

/* Post the receive requests of buffers first to last - 1. 0 or an errno. */
static inline int bps_exchange_receive(struct bps_exchange_end *end, uint32_t number, uint32_t first, uint32_t last)
{
    for (uint32_t i = first; i < last; i++) {
        char *buffer = end->messages + (uint64_t)(end->n_parts + i) * BPS_MESSAGE_NBYTES;
        int rc = bps_post_recv_one(end->qp, (uint64_t)number << 32 | BPS_MESSAGE_RECEIVE << 24 | i,
                                   (uint64_t)(uintptr_t)buffer, BPS_MESSAGE_NBYTES, end->messages_lkey);
        if (rc != 0)
            return rc;
    }
    return 0;
}

/* Describe the write of partition i. 0 or an errno (of the registration). */
static inline int bps_exchange_fill(struct bps_exchange *exchange, struct bps_exchange_end *end, uint64_t wr_id,
                                    uint32_t i, struct bps_ibv_send_wr *wr, struct bps_ibv_sge *sges)
{
    struct bps_exchange_part *part = &end->parts[i];
    char *from = part->source;
    uint32_t lkey = part->source_lkey;
    if (exchange->switches & BPS_SWITCH_COPY) {
        memcpy(part->staged, part->source, part->nbytes);
        from = part->staged;
        exchange->copies++;
    }
    if (exchange->switches & BPS_SWITCH_REGISTER) {
        part->registered = bps_reg_mr(end->qp->pd, from, part->nbytes, BPS_ACCESS_LOCAL_WRITE);
        if (part->registered == NULL)
            return errno;
        lkey = part->registered->lkey;
        exchange->registrations++;
    }
    bps_fill_send(wr, sges, BPS_WR_RDMA_WRITE_WITH_IMM, BPS_SEND_SIGNALED, wr_id, (uint64_t)(uintptr_t)from,
                  part->nbytes, lkey, part->target, part->target_rkey, BPS_MESSAGE_DATA << 24 | i);
    if (exchange->switches & BPS_SWITCH_TWO_SGES && part->nbytes > 1) {
        uint32_t first = part->nbytes > BPS_FIRST_SGE_NBYTES ? BPS_FIRST_SGE_NBYTES : part->nbytes / 2;
        sges[0].length = first;
        sges[1] = (struct bps_ibv_sge){sges[0].addr + first, part->nbytes - first, lkey};
        wr->num_sge = 2;
    }
    exchange->writes++;
    exchange->sges += (uint64_t)wr->num_sge;
    part->in_flight = 1;
    return 0;
}

/* Post what is queued while the send queue has room, in chains. 0 or an errno. */
static inline int bps_exchange_post(struct bps_exchange *exchange, uint32_t number)
{
    struct bps_exchange_end *end = &exchange->ends[number];
    /* what takes time before a write goes out alone, so that it overlaps with the write before it */
    uint32_t batch = exchange->switches & (BPS_SWITCH_COPY | BPS_SWITCH_REGISTER) ? 1 : BPS_EXCHANGE_BATCH;
    while (end->taken < end->queued && end->outstanding < end->max_send) {
        struct bps_ibv_send_wr wrs[BPS_EXCHANGE_BATCH], *bad;
        struct bps_ibv_sge sges[2 * BPS_EXCHANGE_BATCH];
        uint32_t n = 0;
        for (; n < batch && end->taken < end->queued && end->outstanding < end->max_send; n++) {
            uint32_t word = end->queue[end->taken % end->queue_capacity], kind = word >> 24, i = word & 0xffffff;
            uint64_t wr_id = (uint64_t)number << 32 | word;
            if (kind == BPS_MESSAGE_DATA) {
                if (end->parts[i].in_flight) /* its write of the step before has arrived, its completion has not */
                    break;
                int rc = bps_exchange_fill(exchange, end, wr_id, i, &wrs[n], &sges[2 * n]);
                if (rc != 0)
                    return rc;
            } else {
                struct bps_reply *reply = (struct bps_reply *)(end->messages + (uint64_t)i * BPS_MESSAGE_NBYTES);
                uint32_t nbytes = 0;
                if (kind == BPS_MESSAGE_REPLY) {
                    *reply = (struct bps_reply){(uint64_t)(uintptr_t)end->parts[i].arrival, end->parts[i].arrival_rkey, 0};
                    nbytes = BPS_MESSAGE_NBYTES;
                } else
                    exchange->requests++;
                bps_fill_send(&wrs[n], &sges[2 * n], BPS_WR_SEND_WITH_IMM, BPS_SEND_SIGNALED, wr_id,
                              (uint64_t)(uintptr_t)reply, nbytes, end->messages_lkey, 0, 0, word);
            }
            if (n > 0)
                wrs[n - 1].next = &wrs[n];
            end->taken++;
            end->outstanding++;
        }
        if (n == 0)
            return 0;
        int rc = bps_post_send(end->qp, wrs, &bad);
        if (rc != 0)
            return rc;
    }
    return 0;
}

static inline void bps_exchange_arrived(struct bps_exchange *exchange, struct bps_exchange_end *end, uint32_t i)
{
    struct bps_exchange_part *part = &end->parts[i];
    if (exchange->switches & BPS_SWITCH_COPY) {
        memcpy(part->destination, part->arrival, part->nbytes);
        exchange->copies++;
    }
    end->arrived++;
    if (!end->is_service)
        return;
    if (!(exchange->switches & BPS_SWITCH_HALF_DUPLEX))
        bps_exchange_ready(exchange, end, i);
    else if (end->arrived % end->n_parts == 0)
        for (uint32_t each = 0; each < end->n_parts; each++)
            bps_exchange_ready(exchange, end, each);
}

/* Deregister what a broken step left registered. */
static inline void bps_exchange_end_free(struct bps_exchange_end *end)
{
    for (uint32_t i = 0; end->parts != NULL && i < end->n_parts; i++)
        if (end->parts[i].registered != NULL)
            bps_verbs.dereg_mr(end->parts[i].registered);
    free(end->parts);
    free(end->queue);
}

#endif
