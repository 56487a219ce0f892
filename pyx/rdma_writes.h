/* RDMA writes: what a stream sends. post -> ring -> WRITE_WITH_IMM -> send completion -> EVENT_DELIVERED (credit). */
#pragma once

#include "rdma_stream.h"

#define BPS_WRITE_CHAIN 16u /* most writes that are handed to a queue pair in one call */

/* How write number `at` is posted. It asks for a completion, which retires those before it too, unless another one that
 * does follows in the same call of `bps_rdma_pump`: the last of those that wait always does, so nothing stays
 * undelivered for want of more work, and of max_send in a row one does, so a full queue pair never stays full. */
static inline unsigned int bps_rdma_flags(struct bps_rdma_stream *stream, uint64_t at, uint32_t nbytes)
{
    uint32_t in_a_row = stream->signal_every < stream->max_send ? stream->signal_every : stream->max_send;
    int signalled = at + 1 == stream->posted || ++stream->unsignalled >= in_a_row;
    if (signalled)
        stream->unsignalled = 0;
    return (signalled ? BPS_SEND_SIGNALED : 0) | (nbytes && nbytes <= stream->inline_nbytes ? BPS_SEND_INLINE : 0);
}

/* Hand waiting writes to the queue pair as far as it has room, several in one call. Under the stream's lock. */
static inline void bps_rdma_pump(struct bps_rdma_stream *stream)
{
    struct bps_ibv_send_wr chain[BPS_WRITE_CHAIN];
    struct bps_ibv_sge places[BPS_WRITE_CHAIN];
    while (!stream->lost && !stream->closing) {
        uint64_t most = stream->max_send - (stream->sent - stream->delivered), n = 0;
        if (most > stream->posted - stream->sent)
            most = stream->posted - stream->sent;
        for (; n < most && n < BPS_WRITE_CHAIN; n++) {
            uint64_t at = stream->sent + n;
            const struct bps_write *write = &stream->queue[at % stream->capacity];
            bps_fill_send(&chain[n], &places[n], BPS_WR_RDMA_WRITE_WITH_IMM,
                          bps_rdma_flags(stream, at, write->nbytes),
                          (uint64_t)stream->number << 32 | (at & BPS_WRITE_INDEX), write->address, write->nbytes,
                          write->lkey, write->remote_address, write->rkey,
                          bps_immediate(write->slot, write->round, stream->epoch));
            if (n > 0)
                chain[n - 1].next = &chain[n];
        }
        if (n == 0)
            return;
        struct bps_ibv_send_wr *bad = chain;
        int rc = bps_post_send(stream->qp, chain, &bad);
        if (rc != 0 && bad == NULL) /* Soft-RoCE names none when the kernel has taken the device */
            bad = chain;
        for (uint64_t i = 0; i < n && (rc == 0 || bad != &chain[i]); i++) { /* those before a refused one are sent */
            stream->bytes_sent += places[i].length;
            stream->sent++;
        }
        if (rc != 0) {
            const struct bps_write *write = &stream->queue[stream->sent % stream->capacity];
            bps_rdma_fail(stream, (struct bps_failure){BPS_FAILED_POST, rc, 0, write->slot, write->round, write->nbytes,
                                                     0, 0});
        }
    }
}

/* Queue one write and send it if there is room. 0; ENOMEM; ESHUTDOWN when the stream is closed, EDESTADDRREQ when the
 * peer has not told where the slot is, EMSGSIZE when it has another size, EFAULT when the source is not registered. */
static inline int bps_rdma_post(struct bps_rdma_stream *stream, uint32_t slot, uint32_t round, uint32_t flags,
                                uint64_t address, uint64_t nbytes)
{
    struct bps_write write = {address, 0, bps_now_ns(), (uint32_t)nbytes, 0, 0, slot, round};
    pthread_mutex_lock(&stream->lock);
    struct bps_slot_out *out = &stream->out[slot];
    int rc = stream->closing ? ESHUTDOWN : out->nbytes == 0 ? EDESTADDRREQ : 0;
    if (rc == 0 && (flags & BPS_EMPTY))
        write.nbytes = 0;
    else if (rc == 0)
        rc = nbytes > out->nbytes || (nbytes < out->nbytes && !out->framed)
                 ? EMSGSIZE
                 : bps_region_lkey(stream->regions, address, nbytes, &write.lkey);
    if (rc == 0 && stream->posted - stream->delivered == stream->capacity) {
        struct bps_write *grown = (struct bps_write *)calloc(2 * stream->capacity, sizeof *grown);
        if (grown != NULL) {
            for (uint64_t i = stream->delivered; i < stream->posted; i++)
                grown[i % (2 * stream->capacity)] = stream->queue[i % stream->capacity];
            free(stream->queue);
            stream->queue = grown;
            stream->capacity *= 2;
        } else
            rc = ENOMEM;
    }
    if (rc == 0) {
        write.remote_address = out->addresses[round & 1];
        write.rkey = out->rkey;
        stream->queue[stream->posted++ % stream->capacity] = write;
        bps_rdma_pump(stream);
        stream->waited += stream->sent < stream->posted;
    }
    pthread_mutex_unlock(&stream->lock);
    return rc;
}

/* Write nothing, with an immediate that is no slot's. 0, ESHUTDOWN, or an errno of the provider. */
static inline int bps_rdma_prove(struct bps_rdma_stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    int rc = ESHUTDOWN;
    if (!stream->closing)
        rc = bps_post_write_imm(stream->qp, (uint64_t)stream->number << 32 | BPS_WRITE_PROOF, 0, 0, 0, 0, 0,
                                bps_immediate(BPS_PROOF_SLOT, 0, stream->epoch), BPS_SEND_SIGNALED);
    pthread_mutex_unlock(&stream->lock);
    return rc;
}

/* The write with this index is delivered, and with it those before it that asked for no completion. */
static inline void bps_rdma_delivered(struct bps_rdma_stream *stream, uint32_t index)
{
    for (uint64_t n = 1, k = 0; k < n; k++) {
        pthread_mutex_lock(&stream->lock);
        if (k == 0) /* completions come in order */
            n = ((index - (uint32_t)stream->delivered) & BPS_WRITE_INDEX) + 1ul;
        int expected = k > 0 || n <= stream->sent - stream->delivered;
        struct bps_write write = stream->queue[stream->delivered % stream->capacity];
        if (expected) {
            stream->delivered++;
            stream->silent_ns = 0;
        }
        if (expected && k + 1 == n)
            bps_rdma_pump(stream);
        pthread_mutex_unlock(&stream->lock);
        if (!expected)
            return;
        if (stream->engine == NULL)
            continue;
        bps_record_add(&stream->records, BPS_WIRE, (int)stream->peer, write.slot, write.round, write.nbytes,
                       write.posted_ns, bps_now_ns());
        stream->notify(stream->engine, BPS_EVENT_DELIVERED, stream->peer, write.slot, write.round, 0, write.nbytes);
    }
}
