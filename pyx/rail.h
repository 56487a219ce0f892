/* Rail: one completion queue with its device's registered memory, the queue pairs over it, and the thread that serves
 * them.
 *
 * The thread takes completions in batches; when there are none it yields for a while, then arms the queue and sleeps
 * until a completion, an event of the device, or a wake-up. While it is too busy to sleep it checks for events of the
 * device now and then, and always before it reports flushed requests, because the event gives the reason. It checks as
 * often for queue pairs that are not answered. Locks: `streams_lock` is held around each batch, then a stream's own
 * lock, then that of the regions.
 */
#pragma once

#include <sys/eventfd.h>

#include "rdma_arrivals.h"
#include "rdma_writes.h"

#define BPS_RAIL_BATCH 32
#define BPS_RAIL_SLEEP_NS 1000000000ul
#define BPS_SLOWEST_NS_PER_BYTE 100u /* 10 MB/s: a card's share beside many others */
#define BPS_RAIL_LOOK_NS 500000000ul /* between looks for events of the device: how exact the time of one is */

static uint32_t bps_forks; /* how often this process's ancestors forked since the first rail was made */
static void bps_forked(void) { bps_forks++; }

struct bps_rail {
    struct bps_ibv_cq *cq;
    int wake_fd;
    uint64_t awake_ns;
    pthread_mutex_t streams_lock;
    struct bps_rdma_stream **streams; /* by number; NULL: closed, and its number is never used again */
    uint32_t n_streams, streams_capacity;
    struct bps_regions regions;
    uint32_t stopping, started;
    pthread_t thread;
    uint32_t port; /* whose events count */
    uint64_t port_error_ns, looked_ns; /* when the port's error was last noticed, 0: never; both under `streams_lock` */
    uint64_t completions, batches, sleeps, emptied; /* emptied: how often a poll found the end of the queue */
};

static inline void bps_rdma_bad_completion(struct bps_rdma_stream *stream, const struct bps_ibv_wc *wc)
{
    uint32_t low = (uint32_t)wc->wr_id;
    struct bps_failure failure = {BPS_FAILED_COMPLETION, wc->status, wc->vendor_err, BPS_PROOF_SLOT, 0, 0,
                                  (low & BPS_WRITE_RECEIVE) != 0, 0};
    pthread_mutex_lock(&stream->lock);
    if (!(low & (BPS_WRITE_RECEIVE | BPS_WRITE_PROOF))) {
        uint64_t at = stream->delivered + ((low - stream->delivered) & BPS_WRITE_INDEX);
        if (at < stream->sent) {
            struct bps_write *write = &stream->queue[at % stream->capacity];
            failure.slot = write->slot;
            failure.round = write->round;
            failure.nbytes = write->nbytes;
        }
    }
    bps_rdma_fail(stream, failure);
    pthread_mutex_unlock(&stream->lock);
}

static inline void bps_rdma_complete(struct bps_rdma_stream *stream, const struct bps_ibv_wc *wc)
{
    uint32_t low = (uint32_t)wc->wr_id;
    if (wc->status != BPS_WC_SUCCESS) {
        bps_rdma_bad_completion(stream, wc);
    } else if (low & BPS_WRITE_RECEIVE) {
        bps_rdma_arrived(stream, wc);
    } else if (low & BPS_WRITE_PROOF) {
        __atomic_fetch_or(&stream->proof, BPS_PROOF_SENT, __ATOMIC_SEQ_CST);
        bps_wake(&stream->proof, INT_MAX);
    } else
        bps_rdma_delivered(stream, low & BPS_WRITE_INDEX);
}

/* All streams, or the one with this queue pair, have failed. Under `streams_lock`. */
static inline void bps_rail_fail(struct bps_rail *rail, const struct bps_ibv_qp *qp, struct bps_failure failure)
{
    for (uint32_t i = 0; i < rail->n_streams; i++) {
        struct bps_rdma_stream *stream = rail->streams[i];
        if (stream != NULL && (qp == NULL || stream->qp == qp)) {
            pthread_mutex_lock(&stream->lock);
            bps_rdma_fail(stream, failure);
            pthread_mutex_unlock(&stream->lock);
        }
    }
}

/* Fail the streams whose peer has not answered for longer than their `patience_ns`. A queue pair gives up long before,
 * unless its driver lost it or was told to try for ever. Time in which this process was stopped does not count, and big
 * writes may take longer. Under `streams_lock`. */
static inline void bps_rail_look_for_silence(struct bps_rail *rail, uint64_t since_ns)
{
    for (uint32_t i = 0; i < rail->n_streams; i++) {
        struct bps_rdma_stream *stream = rail->streams[i];
        if (stream == NULL)
            continue;
        pthread_mutex_lock(&stream->lock);
        uint64_t patience_ns = stream->patience_ns;
        for (uint64_t at = stream->delivered; at < stream->sent; at++)
            patience_ns += BPS_SLOWEST_NS_PER_BYTE * stream->queue[at % stream->capacity].nbytes;
        if (stream->sent != stream->delivered)
            stream->silent_ns += since_ns < 2 * BPS_RAIL_SLEEP_NS ? since_ns : 2 * BPS_RAIL_SLEEP_NS;
        if (stream->sent != stream->delivered && !stream->lost && stream->silent_ns > patience_ns) {
            struct bps_write *write = &stream->queue[stream->delivered % stream->capacity];
            bps_rdma_fail(stream, (struct bps_failure){BPS_FAILED_SILENCE, (int)(stream->silent_ns / 1000000000u), 0,
                                                     write->slot, write->round, write->nbytes, 0, 0});
        }
        pthread_mutex_unlock(&stream->lock);
    }
}

/* Take notice of all that the device has reported by itself. 0 is a broken completion queue, 1 to 3 broken queue pairs,
 * 8 the device's end, 10 the end of a port's work: the time of that is remembered, if it is the rail's own port. Under
 * `streams_lock`. */
static inline void bps_rail_look(struct bps_rail *rail)
{
    struct bps_ibv_async_event event;
    uint64_t before_ns = rail->looked_ns;
    rail->looked_ns = bps_now_ns();
    while (bps_verbs.get_async_event(rail->cq->context, &event) == 0) {
        int type = event.event_type;
        if (type == 0 || type == 8 || (type >= 1 && type <= 3))
            bps_rail_fail(rail, type >= 1 && type <= 3 ? event.element.qp : NULL,
                          (struct bps_failure){BPS_FAILED_EVENT, type, 0, BPS_PROOF_SLOT, 0, 0, 0, 0});
        else if (type == 10 && (uint32_t)event.element.port_num == rail->port)
            rail->port_error_ns = rail->looked_ns;
        bps_verbs.ack_async_event(&event);
    }
    bps_rail_look_for_silence(rail, rail->looked_ns - before_ns);
}

/* Take one batch of completions: how many, or a negative number when the queue is broken. */
static inline int bps_rail_poll(struct bps_rail *rail)
{
    struct bps_ibv_wc wc[BPS_RAIL_BATCH];
    pthread_mutex_lock(&rail->streams_lock);
    int n = bps_poll_cq(rail->cq, BPS_RAIL_BATCH, wc), flushed = 0;
    for (int i = 0; i < n; i++)
        flushed |= wc[i].status == BPS_WC_WR_FLUSH_ERR;
    if (flushed || bps_now_ns() - rail->looked_ns > BPS_RAIL_LOOK_NS)
        bps_rail_look(rail);
    for (int i = 0; i < n; i++) {
        uint32_t number = (uint32_t)(wc[i].wr_id >> 32);
        struct bps_rdma_stream *stream = number < rail->n_streams ? rail->streams[number] : NULL;
        if (stream != NULL)
            bps_rdma_complete(stream, &wc[i]);
    }
    rail->emptied += n >= 0 && n < BPS_RAIL_BATCH;
    if (n > 0) {
        rail->completions += (uint64_t)n;
        rail->batches++;
    } else if (n < 0)
        bps_rail_fail(rail, NULL, (struct bps_failure){BPS_FAILED_POLL, -n, 0, BPS_PROOF_SLOT, 0, 0, 0, 0});
    pthread_mutex_unlock(&rail->streams_lock);
    return n;
}

/* 0, or -1 if the device is gone: its descriptors are ready for ever then, and nothing comes from them. */
static inline int bps_rail_sleep(struct bps_rail *rail)
{
    struct pollfd waited[3] = {{rail->cq->channel->fd, POLLIN, 0}, {rail->wake_fd, POLLIN, 0},
                               {rail->cq->context->async_fd, POLLIN, 0}};
    struct timespec limit = {BPS_RAIL_SLEEP_NS / 1000000000ul, 0};
    rail->sleeps++;
    if (ppoll(waited, 3, &limit, NULL) <= 0)
        return 0;
    for (int i = 0; i < 3; i += 2)
        if ((waited[i].revents & (POLLERR | POLLHUP | POLLNVAL)) && !(waited[i].revents & POLLIN)) {
            pthread_mutex_lock(&rail->streams_lock);
            bps_rail_fail(rail, NULL, (struct bps_failure){BPS_FAILED_EVENT, 8, 0, BPS_PROOF_SLOT, 0, 0, 0, 0});
            pthread_mutex_unlock(&rail->streams_lock);
            return -1;
        }
    eventfd_t n_wakes;
    if (waited[1].revents)
        eventfd_read(rail->wake_fd, &n_wakes);
    if (waited[0].revents)
        while (bps_take_cq_event(rail->cq->channel) > 0)
            continue;
    if (waited[2].revents) {
        pthread_mutex_lock(&rail->streams_lock);
        bps_rail_look(rail);
        pthread_mutex_unlock(&rail->streams_lock);
    }
    return 0;
}

static void *bps_rail_run(void *argument)
{
    struct bps_rail *rail = (struct bps_rail *)argument;
    int n = 0;
    while (!bps_load(&rail->stopping) && n >= 0) {
        n = bps_rail_poll(rail);
        if (n != 0)
            continue;
        uint64_t begin_ns = bps_now_ns();
        while (n == 0 && bps_now_ns() - begin_ns < rail->awake_ns && !bps_load(&rail->stopping)) {
            sched_yield();
            n = bps_rail_poll(rail);
        }
        if (n != 0)
            continue;
        if (bps_req_notify_cq(rail->cq, 0) != 0) {
            pthread_mutex_lock(&rail->streams_lock);
            bps_rail_fail(rail, NULL, (struct bps_failure){BPS_FAILED_POLL, EIO, 0, BPS_PROOF_SLOT, 0, 0, 0, 0});
            pthread_mutex_unlock(&rail->streams_lock);
            return NULL;
        }
        n = bps_rail_poll(rail); /* what came before the queue was armed gives no event */
        if (n == 0)
            n = bps_rail_sleep(rail);
    }
    return NULL;
}

/* Wait until the rail's thread has taken all completions that are in the queue now, and handled them. 1, or 0 if it has
 * not within limit_ns: it has ended, or is held back. */
static inline int bps_rail_drain(struct bps_rail *rail, uint64_t limit_ns)
{
    struct timespec nap = {0, 100000};
    uint64_t end_ns = bps_now_ns() + limit_ns, emptied, completions;
    int is_drained = 0;
    pthread_mutex_lock(&rail->streams_lock);
    emptied = rail->emptied;
    completions = rail->completions;
    pthread_mutex_unlock(&rail->streams_lock);
    eventfd_write(rail->wake_fd, 1);
    while (!is_drained && bps_now_ns() < end_ns) {
        nanosleep(&nap, NULL);
        pthread_mutex_lock(&rail->streams_lock);
        is_drained = rail->emptied != emptied || rail->completions - completions >= (uint64_t)rail->cq->cqe;
        pthread_mutex_unlock(&rail->streams_lock);
    }
    return is_drained;
}

/* Give a stream its number: completions reach it from now on. 0 or ENOMEM. */
static inline int bps_rail_add_stream(struct bps_rail *rail, struct bps_rdma_stream *stream)
{
    int rc = 0;
    pthread_mutex_lock(&rail->streams_lock);
    if (rail->n_streams == rail->streams_capacity) {
        uint32_t capacity = rail->streams_capacity ? 2 * rail->streams_capacity : 16;
        struct bps_rdma_stream **grown = (struct bps_rdma_stream **)realloc(rail->streams, capacity * sizeof *grown);
        if (grown != NULL) {
            rail->streams = grown;
            rail->streams_capacity = capacity;
        } else
            rc = ENOMEM;
    }
    if (rc == 0) {
        stream->number = rail->n_streams;
        rail->streams[rail->n_streams++] = stream;
    }
    pthread_mutex_unlock(&rail->streams_lock);
    return rc;
}

/* From the return on the rail's thread does not touch the stream, nor its queue pair. */
static inline void bps_rail_remove_stream(struct bps_rail *rail, struct bps_rdma_stream *stream)
{
    pthread_mutex_lock(&rail->streams_lock);
    rail->streams[stream->number] = NULL;
    pthread_mutex_unlock(&rail->streams_lock);
}
