/* Work: what was posted to a queue pair and has not completed, and the places it may take in a completion queue.
 *
 * libibverbs neither refuses a post that may overrun the completion queue (the queue then breaks for good) nor says
 * in a bad completion which operation failed: only wr_id, status and qp_num are valid there. So every post is
 * recorded here first. One recorded post holds one place in its completion queue until it is retired, unsignalled
 * ones too, because each of them completes if the queue pair breaks.
 *
 * A send completion retires all sends up to its own (RC completes in order), a receive completion one receive. Bad
 * completions do not tell which of the two queues they are from: the queue that has the wr_id nearer to its head is
 * taken, the receive queue in doubt only where the opcode says so.
 *
 * Locks: `bps_cq.lock` guards the list of pairs, spans a poll and its account, and is taken first. `bps_pair.lock`
 * guards one pair's two queues and its failure, and spans the call into the provider, so that records stand in the
 * order of the device's queue; once the pair is in no list, its owner alone has it. `bps_cq.pending` is atomic. Neither
 * lock is ever waited for with the GIL held, as a poll may be long.
 */
#pragma once

#include "verbs.h"

#include <pthread.h>
#include <stdlib.h>

#define BPS_WORK_RECV 128 /* an opcode beside the BPS_WR_ ones */

struct bps_work {
    uint64_t wr_id, address, remote_address;
    uint32_t nbytes, lkey, rkey;
    uint16_t opcode; /* BPS_WR_* or BPS_WORK_RECV */
    uint16_t flags;  /* BPS_SEND_* */
};

struct bps_work_queue {
    struct bps_work *items;
    uint32_t capacity;
    uint64_t posted, retired;
};

struct bps_pair;

struct bps_cq {
    pthread_mutex_t lock;
    struct bps_pair **pairs;
    uint32_t n_pairs, capacity;
    uint32_t depth, pending; /* pending: places taken, changed atomically */
};

struct bps_pair {
    pthread_mutex_t lock;
    struct bps_ibv_qp *qp;
    uint32_t number; /* of qp, and valid when that is gone */
    struct bps_cq *send_cq, *recv_cq;
    struct bps_work_queue send, recv;
    int failed; /* status of the first bad completion; 0: none. A flush gives way to the cause, if that follows */
    uint32_t vendor_error;
    struct bps_work failed_work;
};

/* 0, or ENOMEM. */
static inline int bps_cq_add_pair(struct bps_cq *cq, struct bps_pair *pair)
{
    int rc = 0;
    pthread_mutex_lock(&cq->lock);
    if (cq->n_pairs == cq->capacity) {
        uint32_t capacity = cq->capacity ? 2 * cq->capacity : 8;
        struct bps_pair **grown = (struct bps_pair **)realloc(cq->pairs, capacity * sizeof *grown);
        if (grown != NULL) {
            cq->pairs = grown;
            cq->capacity = capacity;
        } else
            rc = ENOMEM;
    }
    if (rc == 0)
        cq->pairs[cq->n_pairs++] = pair;
    pthread_mutex_unlock(&cq->lock);
    return rc;
}

static inline void bps_cq_remove_pair(struct bps_cq *cq, struct bps_pair *pair)
{
    pthread_mutex_lock(&cq->lock);
    for (uint32_t i = 0; i < cq->n_pairs; i++)
        if (cq->pairs[i] == pair) {
            cq->pairs[i] = cq->pairs[--cq->n_pairs];
            break;
        }
    pthread_mutex_unlock(&cq->lock);
}

static inline void bps_retire(struct bps_cq *cq, struct bps_work_queue *queue, uint64_t up_to)
{
    __atomic_fetch_sub(&cq->pending, (uint32_t)(up_to - queue->retired), __ATOMIC_RELAXED);
    queue->retired = up_to;
}

/* Record and post one operation. 0; EXFULL when the queue is full, EOVERFLOW when the completion queue might overrun;
 * or the errno of the provider. */
static inline int bps_pair_post(struct bps_pair *pair, const struct bps_work *work, uint32_t immediate)
{
    int receive = work->opcode == BPS_WORK_RECV, rc;
    struct bps_work_queue *queue = receive ? &pair->recv : &pair->send;
    struct bps_cq *cq = receive ? pair->recv_cq : pair->send_cq;
    pthread_mutex_lock(&pair->lock);
    if (queue->posted - queue->retired == queue->capacity)
        rc = EXFULL;
    else if (__atomic_add_fetch(&cq->pending, 1, __ATOMIC_RELAXED) > cq->depth) {
        __atomic_fetch_sub(&cq->pending, 1, __ATOMIC_RELAXED);
        rc = EOVERFLOW;
    } else {
        queue->items[queue->posted++ % queue->capacity] = *work;
        if (receive)
            rc = bps_post_recv_one(pair->qp, work->wr_id, work->address, work->nbytes, work->lkey);
        else {
            struct bps_ibv_sge sge;
            struct bps_ibv_send_wr wr, *bad;
            bps_fill_send(&wr, &sge, work->opcode, work->flags, work->wr_id, work->address, work->nbytes, work->lkey,
                          work->remote_address, work->rkey, immediate);
            rc = bps_post_send(pair->qp, &wr, &bad);
        }
        if (rc) {
            queue->posted--;
            __atomic_fetch_sub(&cq->pending, 1, __ATOMIC_RELAXED);
        }
    }
    pthread_mutex_unlock(&pair->lock);
    return rc;
}

/* How many posts lie before the oldest one with this wr_id; -1: none has it. */
static inline int64_t bps_find_work(const struct bps_work_queue *queue, uint64_t wr_id)
{
    for (uint64_t i = queue->retired; i < queue->posted; i++)
        if (queue->items[i % queue->capacity].wr_id == wr_id)
            return (int64_t)(i - queue->retired);
    return -1;
}

/* What a posted operation is called in its completion. */
static inline int bps_wc_opcode(const struct bps_work *work)
{
    switch (work->opcode) {
    case BPS_WORK_RECV: return BPS_WC_RECV;
    case BPS_WR_RDMA_READ: return BPS_WC_RDMA_READ;
    case BPS_WR_SEND: case BPS_WR_SEND_WITH_IMM: return BPS_WC_SEND;
    default: return BPS_WC_RDMA_WRITE;
    }
}

/* Retire what completed, and fill in what the device leaves open: opcode of a bad completion, nbytes of a send. */
static inline void bps_pair_complete(struct bps_pair *pair, struct bps_ibv_wc *wc)
{
    pthread_mutex_lock(&pair->lock);
    struct bps_work_queue *queue = wc->opcode & BPS_WC_RECV ? &pair->recv : &pair->send;
    int64_t before;
    if (wc->status == BPS_WC_SUCCESS) {
        before = bps_find_work(queue, wc->wr_id);
    } else {
        int64_t sends = bps_find_work(&pair->send, wc->wr_id), receives = bps_find_work(&pair->recv, wc->wr_id);
        int receive = receives >= 0 && (sends < 0 || receives < sends || (receives == sends && queue == &pair->recv));
        queue = receive ? &pair->recv : &pair->send;
        before = receive ? receives : sends;
    }
    if (before >= 0) { /* else posted past these records, by native code */
        const struct bps_work *work = &queue->items[(queue->retired + (uint64_t)before) % queue->capacity];
        if (wc->status != BPS_WC_SUCCESS) {
            wc->opcode = bps_wc_opcode(work);
            wc->byte_len = 0;
            wc->wc_flags = 0;
            if (pair->failed == 0 || (pair->failed == BPS_WC_WR_FLUSH_ERR && wc->status != BPS_WC_WR_FLUSH_ERR)) {
                pair->failed = wc->status;
                pair->vendor_error = wc->vendor_err;
                pair->failed_work = *work;
            }
        } else if (queue == &pair->send) {
            wc->byte_len = work->nbytes;
            wc->wc_flags = 0; /* rxe says of a send with immediate that it brought one */
        }
        bps_retire(queue == &pair->send ? pair->send_cq : pair->recv_cq, queue,
                   queue->retired + (uint64_t)before + 1);
    }
    pthread_mutex_unlock(&pair->lock);
}

/* Take up to n completions and account for them: how many, or a negative number when the queue is broken. */
static inline int bps_cq_poll(struct bps_cq *cq, struct bps_ibv_cq *ibv_cq, int n, struct bps_ibv_wc *wc)
{
    pthread_mutex_lock(&cq->lock);
    int taken = bps_poll_cq(ibv_cq, n, wc);
    for (int i = 0; i < taken; i++)
        for (uint32_t j = 0; j < cq->n_pairs; j++)
            if (cq->pairs[j]->number == wc[i].qp_num) {
                bps_pair_complete(cq->pairs[j], &wc[i]);
                break;
            }
    pthread_mutex_unlock(&cq->lock);
    return taken;
}
