/* Send queue: which write a node sends next, and to which peer. The policy, with its reasons, is that of
 * `orchestration/priority/send_queue.py` (`WriteOrder`, `NicQueue`), to which this is tested to be equal; here each
 * operation takes O(log n) in writes and in peers, but those of a plan. One thread at a time.
 */
#ifndef BPS_SEND_QUEUE_H
#define BPS_SEND_QUEUE_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BPS_SEND_LEAST_BREADTH 2u
#define BPS_SEND_NOBODY UINT32_MAX

/* One write to one peer. `pass`, `urgency` (the unit's rank, then whether it is a result) and `key` are its place. */
struct bps_outgoing {
    uint64_t pass, urgency, key, arrival;
    uint32_t part, round, flags;
    uint64_t address, nbytes, since_ns;
};

enum { BPS_SEND_READY, BPS_SEND_WAITING, BPS_SEND_N_HEAPS };

struct bps_send_peer {
    struct bps_outgoing *writes; /* a heap */
    uint32_t n, capacity, n_in_flight;
    uint64_t in_flight_nbytes, queued_nbytes, peak_nbytes, share_nbytes;
    uint64_t epoch; /* in which `turn` was counted; 0 in all later ones */
    double turn;
    int64_t tie_breaker;
    int is_there, is_held;
    uint32_t at[BPS_SEND_N_HEAPS]; /* its place in each heap of peers, from 1 on; 0: it is not in it */
};

/* Peers by number. Ready ones have a write that may be sent now, waiting ones have any. */
struct bps_send_queue {
    struct bps_send_peer *peers;
    uint32_t *heaps[BPS_SEND_N_HEAPS], n_heap[BPS_SEND_N_HEAPS];
    uint32_t n, n_there; /* places, and peers */
    uint32_t n_busy, n_busy_held, breadth;
    uint64_t credit_nbytes, arrivals, epoch;
    double front;
};

static inline int bps_write_before(const struct bps_outgoing *one, const struct bps_outgoing *other)
{
    if (one->pass != other->pass)
        return one->pass < other->pass;
    if (one->urgency != other->urgency)
        return one->urgency < other->urgency;
    return one->key != other->key ? one->key < other->key : one->arrival < other->arrival;
}

static inline double bps_send_turn(const struct bps_send_queue *queue, const struct bps_send_peer *peer)
{
    return peer->epoch == queue->epoch ? peer->turn : 0.0;
}

/* Whether the peer whose number is `one` comes before another in a heap. */
static inline int bps_send_before(const struct bps_send_queue *queue, int heap, uint32_t one, uint32_t other)
{
    const struct bps_send_peer *a = &queue->peers[one], *b = &queue->peers[other];
    const struct bps_outgoing *x = &a->writes[0], *y = &b->writes[0];
    if (x->pass != y->pass)
        return x->pass < y->pass;
    if (heap == BPS_SEND_WAITING)
        return x->urgency < y->urgency;
    if (x->urgency >> 1 != y->urgency >> 1)
        return x->urgency >> 1 < y->urgency >> 1;
    double p = bps_send_turn(queue, a), q = bps_send_turn(queue, b);
    return p != q ? p < q : a->tie_breaker < b->tie_breaker;
}

static inline void bps_send_set(struct bps_send_queue *queue, int heap, uint32_t at, uint32_t peer)
{
    queue->heaps[heap][at] = peer;
    queue->peers[peer].at[heap] = at + 1;
}

/* Move the peer at a place of a heap down to where it belongs; below that place it is a heap. */
static inline void bps_send_down(struct bps_send_queue *queue, int heap, uint32_t at)
{
    uint32_t *peers = queue->heaps[heap], n = queue->n_heap[heap], peer = peers[at];
    for (uint32_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && bps_send_before(queue, heap, peers[child + 1], peers[child]))
            child++;
        if (!bps_send_before(queue, heap, peers[child], peer))
            break;
        bps_send_set(queue, heap, at, peers[child]);
    }
    bps_send_set(queue, heap, at, peer);
}

/* The same up or down, in what is a heap but for this one. */
static inline void bps_send_sift(struct bps_send_queue *queue, int heap, uint32_t at)
{
    uint32_t *peers = queue->heaps[heap], peer = peers[at];
    for (; at > 0 && bps_send_before(queue, heap, peer, peers[(at - 1) / 2]); at = (at - 1) / 2)
        bps_send_set(queue, heap, at, peers[(at - 1) / 2]);
    bps_send_set(queue, heap, at, peer);
    bps_send_down(queue, heap, at);
}

static inline int bps_send_admits(const struct bps_send_queue *queue, const struct bps_send_peer *peer)
{
    return peer->n != 0 && (peer->n_in_flight == 0
                            || peer->in_flight_nbytes + peer->writes[0].nbytes <= queue->credit_nbytes);
}

static inline void bps_send_place(struct bps_send_queue *queue, int heap, uint32_t number, int belongs)
{
    struct bps_send_peer *peer = &queue->peers[number];
    if (peer->at[heap] == 0 && !belongs)
        return;
    uint32_t at = peer->at[heap] - 1;
    if (peer->at[heap] == 0) {
        at = queue->n_heap[heap]++;
        bps_send_set(queue, heap, at, number);
    } else if (!belongs) {
        uint32_t last = queue->heaps[heap][--queue->n_heap[heap]];
        peer->at[heap] = 0;
        if (last == number)
            return;
        bps_send_set(queue, heap, at, last);
    }
    bps_send_sift(queue, heap, at);
}

/* Put a peer, of which something has changed, to its places. */
static inline void bps_send_update(struct bps_send_queue *queue, uint32_t number)
{
    struct bps_send_peer *peer = &queue->peers[number];
    bps_send_place(queue, BPS_SEND_WAITING, number, peer->n != 0);
    bps_send_place(queue, BPS_SEND_READY, number, !peer->is_held && bps_send_admits(queue, peer));
}

static inline void bps_send_forget_turns(struct bps_send_queue *queue)
{
    queue->front = 0.0;
    queue->epoch++;
}

static inline void bps_send_weigh(struct bps_send_queue *queue)
{
    uint64_t all = 0, most = 0;
    for (uint32_t i = 0; i < queue->n; i++)
        if (queue->peers[i].is_there) {
            all += queue->peers[i].share_nbytes;
            most = queue->peers[i].share_nbytes > most ? queue->peers[i].share_nbytes : most;
        }
    double breadth = most == 0 ? (double)queue->n_there : rint((double)all / (double)most); /* to even, as Python */
    queue->breadth = most != 0 && breadth < BPS_SEND_LEAST_BREADTH ? BPS_SEND_LEAST_BREADTH : (uint32_t)breadth;
}

/* Add a peer; `place` breaks ties. 0, or -1 without memory. */
static inline int bps_send_add(struct bps_send_queue *queue, uint32_t number, int64_t place)
{
    if (number >= queue->n) {
        uint32_t n = 2 * number + 8;
        struct bps_send_peer *peers = realloc(queue->peers, n * sizeof *peers);
        if (peers == NULL)
            return -1;
        queue->peers = peers;
        memset(peers + queue->n, 0, (n - queue->n) * sizeof *peers);
        for (int heap = 0; heap < BPS_SEND_N_HEAPS; heap++) {
            uint32_t *more = realloc(queue->heaps[heap], n * sizeof *more);
            if (more == NULL)
                return -1;
            queue->heaps[heap] = more;
        }
        queue->n = n;
    }
    struct bps_send_peer *peer = &queue->peers[number];
    struct bps_outgoing *writes = peer->writes;
    uint32_t capacity = peer->capacity;
    *peer = (struct bps_send_peer){.writes = writes, .capacity = capacity, .tie_breaker = place, .is_there = 1};
    queue->n_there++;
    for (uint32_t i = 0; i < queue->n; i++)
        queue->peers[i].share_nbytes = 0;
    bps_send_weigh(queue);
    return 0;
}

/* Set the bytes that each peer is sent in a step, `shares` by number; all 0: all share alike. */
static inline void bps_send_plan(struct bps_send_queue *queue, const uint64_t *shares, uint32_t n)
{
    bps_send_forget_turns(queue);
    for (uint32_t i = 0; i < queue->n; i++)
        queue->peers[i].share_nbytes = i < n ? shares[i] : 0;
    bps_send_weigh(queue);
    for (uint32_t i = queue->n_heap[BPS_SEND_READY]; i-- > 0;) /* all turns have changed */
        bps_send_down(queue, BPS_SEND_READY, i);
}

static inline void bps_send_set_credit(struct bps_send_queue *queue, uint64_t nbytes)
{
    queue->credit_nbytes = nbytes;
    for (uint32_t i = 0; i < queue->n; i++)
        if (queue->peers[i].is_there)
            bps_send_update(queue, i);
}

/* Queue a write for a peer. 0, or -1 without memory. */
static inline int bps_send_put(struct bps_send_queue *queue, uint32_t number, struct bps_outgoing write)
{
    struct bps_send_peer *peer = &queue->peers[number];
    if (peer->n == peer->capacity) {
        uint32_t capacity = peer->capacity == 0 ? 16 : 2 * peer->capacity;
        struct bps_outgoing *writes = realloc(peer->writes, capacity * sizeof *writes);
        if (writes == NULL)
            return -1;
        peer->writes = writes;
        peer->capacity = capacity;
    }
    if (queue->n_heap[BPS_SEND_WAITING] == 0 && queue->n_busy == 0)
        bps_send_forget_turns(queue);
    if (peer->n == 0 && peer->n_in_flight == 0) {
        double turn = bps_send_turn(queue, peer);
        peer->turn = turn > queue->front - 1.0 ? turn : queue->front - 1.0;
        peer->epoch = queue->epoch;
    }
    write.arrival = queue->arrivals++;
    uint32_t at = peer->n++;
    for (; at > 0 && bps_write_before(&write, &peer->writes[(at - 1) / 2]); at = (at - 1) / 2)
        peer->writes[at] = peer->writes[(at - 1) / 2];
    peer->writes[at] = write;
    peer->queued_nbytes += write.nbytes;
    bps_send_update(queue, number);
    return 0;
}

/* Take the next write: the peer's number, or BPS_SEND_NOBODY if nothing waits, or credit or another peer's turn is
 * awaited. */
static inline uint32_t bps_send_pop(struct bps_send_queue *queue, struct bps_outgoing *write)
{
    if (queue->n_heap[BPS_SEND_READY] == 0)
        return BPS_SEND_NOBODY;
    uint32_t number = queue->heaps[BPS_SEND_READY][0];
    struct bps_send_peer *peer = &queue->peers[number];
    if (peer->n_in_flight == 0 && queue->n_busy - queue->n_busy_held >= queue->breadth)
        return BPS_SEND_NOBODY;
    *write = peer->writes[0];
    struct bps_outgoing last = peer->writes[--peer->n];
    uint32_t at = 0;
    for (uint32_t child; (child = 2 * at + 1) < peer->n; at = child) {
        if (child + 1 < peer->n && bps_write_before(&peer->writes[child + 1], &peer->writes[child]))
            child++;
        if (!bps_write_before(&peer->writes[child], &last))
            break;
        peer->writes[at] = peer->writes[child];
    }
    peer->writes[at] = last;
    queue->n_busy += peer->n_in_flight++ == 0;
    peer->in_flight_nbytes += write->nbytes;
    peer->queued_nbytes -= write->nbytes;
    if (peer->in_flight_nbytes > peer->peak_nbytes)
        peer->peak_nbytes = peer->in_flight_nbytes;
    uint64_t share = peer->share_nbytes != 0 ? peer->share_nbytes : write->nbytes;
    double turn = bps_send_turn(queue, peer);
    queue->front = turn > queue->front ? turn : queue->front;
    peer->turn = turn + (double)write->nbytes / (double)(share != 0 ? share : 1);
    peer->epoch = queue->epoch;
    bps_send_update(queue, number);
    return number;
}

/* Give back the credit of a write of nbytes, which has reached its peer. 0, or -1 if so much is not in flight. */
static inline int bps_send_release(struct bps_send_queue *queue, uint32_t number, uint64_t nbytes)
{
    struct bps_send_peer *peer = &queue->peers[number];
    if (peer->n_in_flight == 0 || nbytes > peer->in_flight_nbytes)
        return -1;
    peer->in_flight_nbytes -= nbytes;
    if (--peer->n_in_flight == 0) {
        queue->n_busy--;
        queue->n_busy_held -= peer->is_held;
    }
    bps_send_update(queue, number);
    return 0;
}

/* Send nothing more to a peer until `bps_send_resume`. */
static inline void bps_send_hold(struct bps_send_queue *queue, uint32_t number)
{
    struct bps_send_peer *peer = &queue->peers[number];
    queue->n_busy_held += !peer->is_held && peer->n_in_flight != 0;
    peer->is_held = 1;
    bps_send_update(queue, number);
}

static inline void bps_send_forget_in_flight(struct bps_send_queue *queue, struct bps_send_peer *peer)
{
    queue->n_busy -= peer->n_in_flight != 0;
    queue->n_busy_held -= peer->is_held && peer->n_in_flight != 0;
    peer->n_in_flight = 0;
    peer->in_flight_nbytes = 0;
}

/* Send to a peer again; what was in flight will not be acknowledged any more. */
static inline void bps_send_resume(struct bps_send_queue *queue, uint32_t number)
{
    struct bps_send_peer *peer = &queue->peers[number];
    bps_send_forget_in_flight(queue, peer);
    peer->is_held = 0;
    bps_send_update(queue, number);
}

/* Forget a peer, with all that waits for it or is in flight to it. */
static inline void bps_send_remove(struct bps_send_queue *queue, uint32_t number)
{
    struct bps_send_peer *peer = &queue->peers[number];
    bps_send_forget_in_flight(queue, peer);
    peer->n = 0;
    peer->is_there = peer->is_held = 0;
    peer->share_nbytes = peer->queued_nbytes = peer->peak_nbytes = 0;
    queue->n_there--;
    bps_send_update(queue, number);
    bps_send_weigh(queue);
}

static inline void bps_send_free(struct bps_send_queue *queue)
{
    for (uint32_t i = 0; i < queue->n; i++)
        free(queue->peers[i].writes);
    for (int heap = 0; heap < BPS_SEND_N_HEAPS; heap++)
        free(queue->heaps[heap]);
    free(queue->peers);
}

/* -- the place of a write ------------------------------------------------------------------------------------------ */

/* `WriteOrder`, or, if `fifo`, `ArrivalOrder`. */
struct bps_write_order {
    uint64_t newest, n_entered;
    uint64_t *last; /* pass, by part */
    uint32_t n;
    int fifo;
};

/* Give the write of a part its place: one for all peers that it is sent to. 0, or -1 without memory. */
static inline int bps_order_enter(struct bps_write_order *order, const struct bps_send_queue *queue, uint32_t rank,
                                  int is_result, struct bps_outgoing *write)
{
    write->pass = write->urgency = 0;
    write->key = ++order->n_entered;
    if (order->fifo)
        return 0;
    if (write->part >= order->n) {
        uint32_t n = 2 * write->part + 64;
        uint64_t *last = realloc(order->last, n * sizeof *last);
        if (last == NULL)
            return -1;
        memset(last + order->n, 0, (n - order->n) * sizeof *last);
        order->last = last;
        order->n = n;
    }
    uint64_t pass = order->newest, next = order->last[write->part] + 1;
    if (queue->n_heap[BPS_SEND_WAITING] != 0)
        pass = queue->peers[queue->heaps[BPS_SEND_WAITING][0]].writes[0].pass;
    pass = pass > next ? pass : next;
    order->last[write->part] = pass;
    order->newest = order->newest > pass ? order->newest : pass;
    write->pass = pass;
    write->urgency = (uint64_t)rank << 1 | (is_result != 0);
    write->key = write->part;
    return 0;
}

/* Forget a part, whose number will be used again. */
static inline void bps_order_forget(struct bps_write_order *order, uint32_t part)
{
    if (part < order->n)
        order->last[part] = 0;
}

#endif
