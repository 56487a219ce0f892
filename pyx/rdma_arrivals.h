/* RDMA arrivals: what a queue pair receives. Receive completion -> immediate checked against the bound slot -> a new
 * request -> arrived hook.
 *
 * There is one receive request for each bound slot, up to max_receive, the length of the receive queue, so no number of
 * slots exceeds it. The request is posted again before the arrival is reported: the peer's next write into the slot
 * follows from that report, so with one request for each slot a write always finds one. With more slots than requests
 * it still does, unless this thread is late: the peer has at most max_send writes without a completion, so to exhaust
 * twice as many requests it must have had max_send completions and have sent as many writes again, while this thread
 * has handled none. A write that finds no request is not lost: the card asks the peer's card to send it again later
 * (RNR NAK), as often as it takes. Slots are bound after the proof has come, which takes a request of its own.
 */
#pragma once

#include "rdma_stream.h"

/* Post receive requests until there is one for each of n_slots, or max_receive of them. 0 or an errno. Under the
 * stream's lock. */
static inline int bps_rdma_receive(struct bps_rdma_stream *stream, uint32_t n_slots)
{
    uint32_t wanted = n_slots < stream->max_receive ? n_slots : stream->max_receive;
    while (stream->n_receives < wanted) {
        int rc = bps_post_recv_one(stream->qp, (uint64_t)stream->number << 32 | BPS_WRITE_RECEIVE, 0, 0, 0);
        if (rc != 0)
            return rc;
        stream->n_receives++;
    }
    return 0;
}

/* Let the peer write `nbytes` of `slot` at these addresses by parity. 0; ESHUTDOWN when the stream is closed, EAGAIN
 * while a receive request is still kept for the peer's proof; an errno of the provider. */
static inline int bps_rdma_bind(struct bps_rdma_stream *stream, uint32_t slot, uint64_t even, uint64_t odd,
                                uint64_t nbytes, uint32_t framed, uint32_t first_round)
{
    pthread_mutex_lock(&stream->lock);
    struct bps_slot_in *in = &stream->in[slot];
    uint32_t n_bound = stream->n_bound + !in->bound;
    int proven = bps_load(&stream->proof) & BPS_PROOF_RECEIVED;
    int rc = stream->closing ? ESHUTDOWN : !proven ? EAGAIN : 0;
    if (rc == 0 && !stream->lost) /* a lost stream takes no more requests, and its end is told already */
        rc = bps_rdma_receive(stream, n_bound);
    if (rc == 0) {
        *in = (struct bps_slot_in){{even, odd}, nbytes, first_round, 1, framed};
        stream->n_bound = n_bound;
    }
    pthread_mutex_unlock(&stream->lock);
    return rc;
}

/* Forget a slot that nothing was written into; its receive request serves the next one. */
static inline void bps_rdma_unbind(struct bps_rdma_stream *stream, uint32_t slot)
{
    pthread_mutex_lock(&stream->lock);
    stream->n_bound -= stream->in[slot].bound;
    stream->in[slot].bound = 0;
    pthread_mutex_unlock(&stream->lock);
}

/* Whether a write of nbytes in `round` is what the slot waits for. */
static inline int bps_slot_takes(const struct bps_slot_in *in, uint32_t round, uint64_t nbytes)
{
    if (nbytes == 0 || !in->framed)
        return nbytes == 0 || nbytes == in->nbytes;
    return bps_frame_may_come(nbytes, in->nbytes) && bps_frame_is_whole((const void *)in->addresses[round & 1], nbytes);
}

/* A write of the peer has arrived: whole, if it is what the slot waits for. */
static inline void bps_rdma_arrived(struct bps_rdma_stream *stream, const struct bps_ibv_wc *wc)
{
    uint32_t immediate = bps_wc_immediate(wc), slot = immediate & 0xfffffu, round = 0, flags = 0;
    int fits = 0, rc = 0;
    pthread_mutex_lock(&stream->lock);
    stream->n_receives--;
    if (immediate == bps_immediate(BPS_PROOF_SLOT, 0, stream->epoch) && wc->byte_len == 0) {
        stream->proven_ns = bps_now_ns();
        __atomic_fetch_or(&stream->proof, BPS_PROOF_RECEIVED, __ATOMIC_SEQ_CST);
        bps_wake(&stream->proof, INT_MAX);
    } else if (!stream->lost && !stream->closing) {
        struct bps_slot_in *in = &stream->in[slot < stream->n_slots ? slot : 0];
        round = in->next_round;
        fits = slot < stream->n_slots && in->bound && stream->engine != NULL
               && immediate == bps_immediate(slot, round, stream->epoch)
               && bps_slot_takes(in, round, wc->byte_len);
        if (fits) {
            in->next_round++;
            flags = wc->byte_len == 0 ? BPS_EMPTY : 0;
            stream->writes_received++;
            stream->bytes_received += wc->byte_len;
            rc = bps_rdma_receive(stream, stream->n_bound);
        }
        if (!fits)
            bps_rdma_fail(stream, (struct bps_failure){BPS_FAILED_ARRIVAL, (int)(immediate >> 24), 0, slot,
                                                     immediate >> 20 & 15, wc->byte_len, 1, 0});
        else if (rc != 0)
            bps_rdma_fail(stream, (struct bps_failure){BPS_FAILED_POST, rc, 0, slot, round, 0, 1, 0});
    }
    pthread_mutex_unlock(&stream->lock);
    if (!fits)
        return;
    uint64_t now_ns = stream->records.records != NULL ? bps_now_ns() : 0;
    bps_record_add(&stream->records, BPS_RECEIVE, (int)stream->peer, slot, round, wc->byte_len, now_ns, now_ns);
    stream->arrived(stream->engine, stream->peer, slot, round, flags | BPS_MORE_ARRIVED); /* the rail has others */
}
