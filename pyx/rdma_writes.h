/* RDMA writes: what a lane sends. post -> ring -> WRITE_WITH_IMM -> send completion -> EVENT_DELIVERED (credit). */
#pragma once

#include "rdma_lane.h"

/* How the next write is posted. It asks for a completion, which retires those before it too, unless another one that
 * does follows in this very pump: the last of those that wait always does, so nothing stays undelivered for want of more
 * work, and of max_send in a row one does, so a full queue pair never stays full. */
static inline unsigned int bps_lane_flags(struct bps_rdma_lane *lane, uint32_t nbytes)
{
    uint32_t in_a_row = lane->signal_every < lane->max_send ? lane->signal_every : lane->max_send;
    int signalled = lane->sent + 1 == lane->posted || ++lane->unsignalled >= in_a_row;
    if (signalled)
        lane->unsignalled = 0;
    return (signalled ? BPS_SEND_SIGNALED : 0) | (nbytes && nbytes <= lane->inline_nbytes ? BPS_SEND_INLINE : 0);
}

/* Hand waiting writes to the queue pair as far as it has room. Under the lane's lock. */
static inline void bps_lane_pump(struct bps_rdma_lane *lane)
{
    while (!lane->lost && !lane->closing && lane->sent < lane->posted && lane->sent - lane->delivered < lane->max_send) {
        struct bps_write *write = &lane->queue[lane->sent % lane->capacity];
        uint64_t wr_id = (uint64_t)lane->number << 32 | (lane->sent & BPS_WRITE_INDEX);
        int rc = bps_post_write_imm(lane->qp, wr_id, write->address, write->nbytes, write->lkey,
                                    write->remote_address, write->rkey,
                                    bps_immediate(write->slot, write->round, lane->epoch),
                                    bps_lane_flags(lane, write->nbytes));
        if (rc != 0) {
            bps_lane_fail(lane, (struct bps_failure){BPS_FAILED_POST, rc, 0, write->slot, write->round, write->nbytes,
                                                     0, 0});
            return;
        }
        lane->sent++;
        lane->bytes_sent += write->nbytes;
    }
}

/* Queue one write and send it if there is room. 0; ENOMEM; ESHUTDOWN when the lane is closed, EDESTADDRREQ when the
 * peer has not said where the slot lies, EMSGSIZE when it has another size, EFAULT when the source is not registered. */
static inline int bps_lane_post(struct bps_rdma_lane *lane, uint32_t slot, uint32_t round, uint32_t flags,
                                uint64_t address, uint64_t nbytes)
{
    struct bps_write write = {address, 0, bps_now_ns(), (uint32_t)nbytes, 0, 0, slot, round};
    pthread_mutex_lock(&lane->lock);
    struct bps_slot_out *out = &lane->out[slot];
    int rc = lane->closing ? ESHUTDOWN : out->nbytes == 0 ? EDESTADDRREQ : 0;
    if (rc == 0 && (flags & BPS_EMPTY))
        write.nbytes = 0;
    else if (rc == 0)
        rc = nbytes > out->nbytes || (nbytes < out->nbytes && !out->framed)
                 ? EMSGSIZE
                 : bps_region_lkey(lane->regions, address, nbytes, &write.lkey);
    if (rc == 0 && lane->posted - lane->delivered == lane->capacity) {
        struct bps_write *grown = (struct bps_write *)calloc(2 * lane->capacity, sizeof *grown);
        if (grown != NULL) {
            for (uint64_t i = lane->delivered; i < lane->posted; i++)
                grown[i % (2 * lane->capacity)] = lane->queue[i % lane->capacity];
            free(lane->queue);
            lane->queue = grown;
            lane->capacity *= 2;
        } else
            rc = ENOMEM;
    }
    if (rc == 0) {
        write.remote_address = out->addresses[round & 1];
        write.rkey = out->rkey;
        lane->queue[lane->posted++ % lane->capacity] = write;
        bps_lane_pump(lane);
        lane->waited += lane->sent < lane->posted;
    }
    pthread_mutex_unlock(&lane->lock);
    return rc;
}

/* Write nothing, with an immediate that is no slot's. 0, ESHUTDOWN, or an errno of the provider. */
static inline int bps_lane_prove(struct bps_rdma_lane *lane)
{
    pthread_mutex_lock(&lane->lock);
    int rc = ESHUTDOWN;
    if (!lane->closing)
        rc = bps_post_write_imm(lane->qp, (uint64_t)lane->number << 32 | BPS_WRITE_PROOF, 0, 0, 0, 0, 0,
                                bps_immediate(BPS_PROOF_SLOT, 0, lane->epoch), BPS_SEND_SIGNALED);
    pthread_mutex_unlock(&lane->lock);
    return rc;
}

/* The write with this index is delivered, and with it those before it that asked for no completion. */
static inline void bps_lane_delivered(struct bps_rdma_lane *lane, uint32_t index)
{
    for (uint64_t n = 1, k = 0; k < n; k++) {
        pthread_mutex_lock(&lane->lock);
        if (k == 0) /* completions come in order */
            n = ((index - (uint32_t)lane->delivered) & BPS_WRITE_INDEX) + 1ul;
        int expected = k > 0 || n <= lane->sent - lane->delivered;
        struct bps_write write = lane->queue[lane->delivered % lane->capacity];
        if (expected) {
            lane->delivered++;
            lane->silent_ns = 0;
        }
        if (expected && k + 1 == n)
            bps_lane_pump(lane);
        pthread_mutex_unlock(&lane->lock);
        if (!expected)
            return;
        if (lane->engine == NULL)
            continue;
        bps_record_add(&lane->records, BPS_WIRE, (int)lane->peer, write.slot, write.round, write.nbytes,
                       write.posted_ns, bps_now_ns());
        lane->notify(lane->engine, BPS_EVENT_DELIVERED, lane->peer, write.slot, write.round, 0, write.nbytes);
    }
}
