/* Stream over RDMA: one queue pair to one peer, and the slots that are written over it in both directions.
 *
 *   rdma_writes.h      what it sends
 *   rdma_arrivals.h    what it receives
 *
 * wr_id: stream number << 32 | kind | index of the write. It is valid in bad completions too, which say little else.
 * `lock` guards queue, slots, failure and every post; the arrived hook is called without it. Completions are handled by
 * the rail's thread.
 */
#pragma once

#include "futex.h"
#include "hooks.h"
#include "record.h"
#include "regions.h"
#include "thread.h"
#include "verbs.h"
#include "wire.h"

#define BPS_WRITE_RECEIVE (1u << 31) /* kinds of wr_id */
#define BPS_WRITE_PROOF (1u << 30)
#define BPS_WRITE_INDEX (BPS_WRITE_PROOF - 1)
#define BPS_PROOF_SLOT 0xfffffu /* beyond every partition */
#define BPS_EMPTY 1u            /* BPS_FLAG_EMPTY of lane.h */

enum { BPS_PROOF_SENT = 1, BPS_PROOF_RECEIVED = 2, BPS_PROOF_FAILED = 4 };
enum {
    BPS_FAILED_COMPLETION = 1, BPS_FAILED_POST = 2, BPS_FAILED_ARRIVAL = 3, BPS_FAILED_EVENT = 4, BPS_FAILED_POLL = 5,
    BPS_FAILED_SILENCE = 6,
};

struct bps_slot_in { /* what the peer writes here; framed: up to nbytes, with its length in front */
    uint64_t addresses[2], nbytes;
    uint32_t next_round, bound, framed;
};

struct bps_slot_out { /* where we write: nbytes 0: not told yet */
    uint64_t addresses[2], nbytes;
    uint32_t rkey, framed;
};

struct bps_write {
    uint64_t address, remote_address, posted_ns;
    uint32_t nbytes, lkey, rkey, slot, round;
};

struct bps_failure { /* the first one; a flush gives way to its cause */
    int kind, code; /* BPS_FAILED_*; status of a completion, errno of a post, epoch of an arrival, IBV_EVENT_*,
                     * seconds of silence */
    uint32_t vendor_error, slot, round, nbytes, is_receive;
    uint64_t at_ns; /* filled in by bps_rdma_fail */
};

struct bps_rdma_stream {
    struct bps_regions *regions; /* its rail's */
    struct bps_ibv_qp *qp;
    uint32_t link_number, number, peer, epoch, n_slots, max_send, max_receive, inline_nbytes, signal_every;
    uint32_t unsignalled; /* writes since the last one that asked for a completion */
    void *engine; /* NULL before start */
    bps_arrived_fn arrived;
    bps_notify_fn notify;
    pthread_mutex_t lock;
    struct bps_slot_in *in;
    struct bps_slot_out *out;
    struct bps_write *queue; /* a ring: in flight from `delivered`, waiting from `sent`, up to `posted` */
    uint64_t capacity, posted, sent, delivered;
    uint64_t patience_ns, silent_ns; /* how long nothing was delivered although something is in flight */
    uint32_t n_bound, n_receives; /* receive requests that are posted: at most max_receive, and more than n_bound only
                                   * after an unbind */
    uint32_t proof, closing, lost, told;
    uint64_t proven_ns; /* when the peer's proof came, 0: not yet */
    struct bps_failure failure;
    uint64_t writes_received, bytes_sent, bytes_received, waited;
    struct bps_trace records;
};

/* Remember why, and say once that the peer is lost. Under the stream's lock. */
static inline void bps_rdma_fail(struct bps_rdma_stream *stream, struct bps_failure failure)
{
    int is_flush = failure.kind == BPS_FAILED_COMPLETION && failure.code == BPS_WC_WR_FLUSH_ERR;
    int was_flush = stream->failure.kind == BPS_FAILED_COMPLETION && stream->failure.code == BPS_WC_WR_FLUSH_ERR;
    if (stream->closing)
        return;
    failure.at_ns = bps_now_ns();
    if (stream->failure.kind == 0 || (was_flush && !is_flush))
        stream->failure = failure;
    stream->lost = 1;
    __atomic_fetch_or(&stream->proof, BPS_PROOF_FAILED, __ATOMIC_SEQ_CST);
    bps_wake(&stream->proof, INT_MAX);
    if (stream->engine != NULL && !stream->told) {
        stream->told = 1;
        uint32_t code = failure.kind == BPS_FAILED_ARRIVAL ? EPROTO : EIO;
        stream->notify(stream->engine, BPS_EVENT_LOST, stream->peer, 0, 0, code, stream->link_number);
    }
}

/* Stop: no call of ours touches the queue pair after this, and a `prove` that waits gives up. */
static inline void bps_rdma_end(struct bps_rdma_stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    stream->closing = 1;
    pthread_mutex_unlock(&stream->lock);
    __atomic_fetch_or(&stream->proof, BPS_PROOF_FAILED, __ATOMIC_SEQ_CST);
    bps_wake(&stream->proof, INT_MAX);
}

/* Report to an engine from now on. What failed before is reported at once. */
static inline void bps_rdma_start(struct bps_rdma_stream *stream, uint32_t peer, uint32_t link_number, void *engine,
                                  bps_arrived_fn arrived, bps_notify_fn notify)
{
    pthread_mutex_lock(&stream->lock);
    stream->link_number = link_number;
    stream->peer = peer;
    stream->arrived = arrived;
    stream->notify = notify;
    stream->engine = engine;
    if (stream->lost)
        bps_rdma_fail(stream, stream->failure);
    pthread_mutex_unlock(&stream->lock);
}
