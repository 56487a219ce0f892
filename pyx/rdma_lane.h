/* Lane: one queue pair to one peer, and the slots that are written over it in both directions.
 *
 *   post -> ring of writes -> WRITE_WITH_IMM -> send completion -> EVENT_DELIVERED (credit; source is reusable)
 *   receive completion -> immediate checked against the bound slot -> a new receive request -> arrived hook
 *
 * The receive request is posted again before the arrival is told: whatever the peer writes next follows from that,
 * so a lane with one request for each bound slot never runs out of them. Slots are bound after the proof has come,
 * which takes a request of its own.
 *
 * wr_id: lane number << 32 | kind | index of the write. It is valid in bad completions too, which say little else.
 * `lock` guards queue, slots, failure and every post; the arrived hook is called without it. Completions are the rail's
 * thread's.
 */
#ifndef BPS_RDMA_LANE_H
#define BPS_RDMA_LANE_H

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
};

struct bps_slot_in { /* what the peer writes here */
    uint64_t nbytes;
    uint32_t next_round, bound;
};

struct bps_slot_out { /* where we write: nbytes 0: not told yet */
    uint64_t addresses[2], nbytes;
    uint32_t rkey;
};

struct bps_write {
    uint64_t address, remote_address, posted_ns;
    uint32_t nbytes, lkey, rkey, slot, round;
};

struct bps_failure { /* the first one; a flush gives way to its cause */
    int kind, code; /* BPS_FAILED_*; status of a completion, errno of a post, epoch of an arrival, IBV_EVENT_* */
    uint32_t vendor_error, slot, round, nbytes, is_receive;
};

struct bps_rdma_lane {
    struct bps_regions *regions; /* its rail's */
    struct bps_ibv_qp *qp;
    uint32_t number, peer, epoch, n_slots, max_send, max_receive, inline_nbytes, signal_every;
    uint32_t unsignalled; /* writes since the last one that asked for a completion */
    void *engine; /* NULL before start */
    bps_arrived_fn arrived;
    bps_notify_fn notify;
    pthread_mutex_t lock;
    struct bps_slot_in *in;
    struct bps_slot_out *out;
    struct bps_write *queue; /* a ring: in flight from `delivered`, waiting from `sent`, up to `posted` */
    uint64_t capacity, posted, sent, delivered;
    uint32_t n_bound, n_receives; /* receive requests that are posted; more than n_bound after an unbind */
    uint32_t proof, closing, lost, told;
    struct bps_failure failure;
    uint64_t writes_received, bytes_sent, bytes_received, waited;
    struct bps_trace records;
};

/* -- the end of a lane --------------------------------------------------------------------------------------- */

/* Remember why, and say once that the peer is lost. Under the lane's lock. */
static inline void bps_lane_fail(struct bps_rdma_lane *lane, struct bps_failure failure)
{
    int is_flush = failure.kind == BPS_FAILED_COMPLETION && failure.code == BPS_WC_WR_FLUSH_ERR;
    int was_flush = lane->failure.kind == BPS_FAILED_COMPLETION && lane->failure.code == BPS_WC_WR_FLUSH_ERR;
    if (lane->closing)
        return;
    if (lane->failure.kind == 0 || (was_flush && !is_flush))
        lane->failure = failure;
    lane->lost = 1;
    __atomic_fetch_or(&lane->proof, BPS_PROOF_FAILED, __ATOMIC_SEQ_CST);
    bps_wake(&lane->proof, INT_MAX);
    if (lane->engine != NULL && !lane->told) {
        lane->told = 1;
        uint32_t code = failure.kind == BPS_FAILED_ARRIVAL ? EPROTO : EIO;
        lane->notify(lane->engine, BPS_EVENT_LOST, lane->peer, 0, 0, code, 0);
    }
}

/* -- sending ------------------------------------------------------------------------------------------------- */

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
                                                     0});
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
        rc = nbytes != out->nbytes ? EMSGSIZE : bps_region_lkey(lane->regions, address, nbytes, &write.lkey);
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

/* -- receiving ----------------------------------------------------------------------------------------------- */

/* Post receive requests until there are `wanted`. 0 or an errno. Under the lane's lock. */
static inline int bps_lane_receive(struct bps_rdma_lane *lane, uint32_t wanted)
{
    while (lane->n_receives < wanted) {
        int rc = bps_post_recv_one(lane->qp, (uint64_t)lane->number << 32 | BPS_WRITE_RECEIVE, 0, 0, 0);
        if (rc != 0)
            return rc;
        lane->n_receives++;
    }
    return 0;
}

/* Let the peer write `nbytes` of `slot`, from round 1 on. 0; ESHUTDOWN when the lane is closed, EAGAIN while a receive
 * request is still kept for the peer's proof, ENOSPC when the queue pair holds no more; an errno of the provider. */
static inline int bps_lane_bind(struct bps_rdma_lane *lane, uint32_t slot, uint64_t nbytes)
{
    pthread_mutex_lock(&lane->lock);
    struct bps_slot_in *in = &lane->in[slot];
    uint32_t wanted = lane->n_bound + !in->bound;
    int proven = bps_load(&lane->proof) & BPS_PROOF_RECEIVED;
    int rc = lane->closing ? ESHUTDOWN : !proven ? EAGAIN : wanted > lane->max_receive ? ENOSPC : 0;
    if (rc == 0 && !lane->lost) /* a lost lane takes no more requests, and its end is told already */
        rc = bps_lane_receive(lane, wanted);
    if (rc == 0) {
        *in = (struct bps_slot_in){nbytes, 1, 1};
        lane->n_bound = wanted;
    }
    pthread_mutex_unlock(&lane->lock);
    return rc;
}

/* Forget a slot that nothing was written into; its receive request serves the next one. */
static inline void bps_lane_unbind(struct bps_rdma_lane *lane, uint32_t slot)
{
    pthread_mutex_lock(&lane->lock);
    lane->n_bound -= lane->in[slot].bound;
    lane->in[slot].bound = 0;
    pthread_mutex_unlock(&lane->lock);
}

/* A write of the peer has arrived: whole, if it is what the slot waits for. */
static inline void bps_lane_arrived(struct bps_rdma_lane *lane, const struct bps_ibv_wc *wc)
{
    uint32_t immediate = bps_wc_immediate(wc), slot = immediate & 0xfffffu, round = 0, flags = 0;
    int fits = 0, rc = 0;
    pthread_mutex_lock(&lane->lock);
    lane->n_receives--;
    if (immediate == bps_immediate(BPS_PROOF_SLOT, 0, lane->epoch) && wc->byte_len == 0) {
        __atomic_fetch_or(&lane->proof, BPS_PROOF_RECEIVED, __ATOMIC_SEQ_CST);
        bps_wake(&lane->proof, INT_MAX);
    } else if (!lane->lost && !lane->closing) {
        struct bps_slot_in *in = &lane->in[slot < lane->n_slots ? slot : 0];
        round = in->next_round;
        fits = slot < lane->n_slots && in->bound && lane->engine != NULL
               && immediate == bps_immediate(slot, round, lane->epoch)
               && (wc->byte_len == in->nbytes || wc->byte_len == 0);
        if (fits) {
            in->next_round++;
            flags = wc->byte_len == 0 ? BPS_EMPTY : 0;
            lane->writes_received++;
            lane->bytes_received += wc->byte_len;
            rc = bps_lane_receive(lane, lane->n_bound);
        }
        if (!fits)
            bps_lane_fail(lane, (struct bps_failure){BPS_FAILED_ARRIVAL, (int)(immediate >> 24), 0, slot,
                                                     immediate >> 20 & 15, wc->byte_len, 1});
        else if (rc != 0)
            bps_lane_fail(lane, (struct bps_failure){BPS_FAILED_POST, rc, 0, slot, round, 0, 1});
    }
    pthread_mutex_unlock(&lane->lock);
    if (fits)
        lane->arrived(lane->engine, lane->peer, slot, round, flags);
}

/* -- completions --------------------------------------------------------------------------------------------- */

/* The write with this index is delivered, and with it those before it that asked for no completion. */
static inline void bps_lane_delivered(struct bps_rdma_lane *lane, uint32_t index)
{
    for (uint64_t n = 1, k = 0; k < n; k++) {
        pthread_mutex_lock(&lane->lock);
        if (k == 0) /* completions come in order */
            n = ((index - (uint32_t)lane->delivered) & BPS_WRITE_INDEX) + 1ul;
        int expected = k > 0 || n <= lane->sent - lane->delivered;
        struct bps_write write = lane->queue[lane->delivered % lane->capacity];
        if (expected)
            lane->delivered++;
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

static inline void bps_lane_bad_completion(struct bps_rdma_lane *lane, const struct bps_ibv_wc *wc)
{
    uint32_t low = (uint32_t)wc->wr_id;
    struct bps_failure failure = {BPS_FAILED_COMPLETION, wc->status, wc->vendor_err, BPS_PROOF_SLOT, 0, 0,
                                  (low & BPS_WRITE_RECEIVE) != 0};
    pthread_mutex_lock(&lane->lock);
    if (!(low & (BPS_WRITE_RECEIVE | BPS_WRITE_PROOF))) {
        uint64_t at = lane->delivered + ((low - lane->delivered) & BPS_WRITE_INDEX);
        if (at < lane->sent) {
            struct bps_write *write = &lane->queue[at % lane->capacity];
            failure.slot = write->slot;
            failure.round = write->round;
            failure.nbytes = write->nbytes;
        }
    }
    bps_lane_fail(lane, failure);
    pthread_mutex_unlock(&lane->lock);
}

static inline void bps_lane_complete(struct bps_rdma_lane *lane, const struct bps_ibv_wc *wc)
{
    uint32_t low = (uint32_t)wc->wr_id;
    if (wc->status != BPS_WC_SUCCESS) {
        bps_lane_bad_completion(lane, wc);
    } else if (low & BPS_WRITE_RECEIVE) {
        bps_lane_arrived(lane, wc);
    } else if (low & BPS_WRITE_PROOF) {
        __atomic_fetch_or(&lane->proof, BPS_PROOF_SENT, __ATOMIC_SEQ_CST);
        bps_wake(&lane->proof, INT_MAX);
    } else
        bps_lane_delivered(lane, low & BPS_WRITE_INDEX);
}

/* Stop: no call of ours touches the queue pair after this, and a `prove` that waits gives up. */
static inline void bps_lane_end(struct bps_rdma_lane *lane)
{
    pthread_mutex_lock(&lane->lock);
    lane->closing = 1;
    pthread_mutex_unlock(&lane->lock);
    __atomic_fetch_or(&lane->proof, BPS_PROOF_FAILED, __ATOMIC_SEQ_CST);
    bps_wake(&lane->proof, INT_MAX);
}

/* Report to an engine from now on. What failed before is reported at once. */
static inline void bps_lane_start(struct bps_rdma_lane *lane, uint32_t peer, void *engine, bps_arrived_fn arrived,
                                  bps_notify_fn notify)
{
    pthread_mutex_lock(&lane->lock);
    lane->peer = peer;
    lane->arrived = arrived;
    lane->notify = notify;
    lane->engine = engine;
    if (lane->lost)
        bps_lane_fail(lane, lane->failure);
    pthread_mutex_unlock(&lane->lock);
}

#endif
