/* I/O threads: a few threads that move the bytes of any number of connections.
 *
 * A flow is one direction of one connection. Its thread asks it what to move next, moves as much of that as the socket
 * takes or has, and tells it. Only this thread calls the flow's functions, so they need no lock among each other. Any
 * other thread may start, ring or stop a flow.
 *
 * A thread asks the flows that were rung, those whose moment has come, and those whose sockets can go on: that it learns
 * from its backend, epoll (`io_epoll.h`) or io_uring (`io_uring.h`). A flow that has moved BPS_IO_TURN bytes lets others go
 * first.
 */
#pragma once

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "futex.h"
#include "thread.h"

#define BPS_IO_TURN ((size_t)1 << 20)
#define BPS_IO_CALL ((size_t)4 << 10) /* bytes that each system call adds to a turn: many small calls end it, too */
#define BPS_IO_SCRATCH ((size_t)8 << 10) /* a small write comes with its header in one call */
#define BPS_IO_EVENTS 64
#define BPS_IO_NEVER UINT64_MAX

enum { BPS_FLOW_NEW = 0, BPS_FLOW_RUNS = 1, BPS_FLOW_STOPS = 2, BPS_FLOW_STOPPED = 3 };

struct bps_io_thread;

struct bps_flow {
    int fd, sends; /* else it receives */
    /* Look after what is not moved, until *due_ns, when this is called again. May be NULL. */
    void (*look)(struct bps_flow *flow, uint64_t *due_ns);
    /* What is to be moved next, in *message: 1; nothing now: 0. It is asked again when it is rung, and at *due_ns. With
     * MSG_WAITALL in `msg_flags` the kernel may move all of it before `moved` is called. `scratch`: memory of
     * BPS_IO_SCRATCH bytes that can be used until `moved`. */
    int (*next)(struct bps_flow *flow, struct msghdr *message, char *scratch, uint64_t *due_ns);
    /* n bytes of that were moved (0: the peer sends no more), or none because of errno -n; 0: the flow is over. */
    int (*moved)(struct bps_flow *flow, ssize_t n);
    struct bps_io_thread *thread;
    uint32_t state;
    /* under the thread's lock */
    struct bps_flow *after; /* it among those that were rung */
    int is_rung;
    uint64_t due_ns;
    size_t place; /* in `timed`, from 1 on; 0: not there */
    /* of the thread alone */
    int is_over;  /* nothing more is moved */
    int is_ready; /* epoll: the socket may go on */
    int is_ending; /* epoll: the peer sends no more */
    int is_under_way; /* io_uring: `message` is */
    struct msghdr message;
    char *scratch;
};

/* How a thread learns that sockets can go on. `run`, `wait` and `unwatch` are called by the thread itself. */
struct bps_io_backend {
    int (*open)(struct bps_io_thread *thread); /* 0 or an errno */
    int (*begin)(struct bps_io_thread *thread); /* likewise, called by the thread itself; may be NULL */
    void (*close)(struct bps_io_thread *thread);
    int (*watch)(struct bps_io_thread *thread, struct bps_flow *flow); /* 0 or an errno */
    void (*unwatch)(struct bps_io_thread *thread, struct bps_flow *flow);
    /* Move what a flow wants moved, as far as it goes now; whether it gives way to others although it could go on. */
    int (*run)(struct bps_io_thread *thread, struct bps_flow *flow, uint64_t *due_ns);
    /* Queue the flows that can go on; wait for one until a moment. */
    void (*wait)(struct bps_io_thread *thread, uint64_t until_ns);
};

struct bps_io_thread {
    const struct bps_io_backend *backend;
    void *own; /* of the backend */
    pthread_t id;
    uint32_t begun; /* 1: it runs; 1 + errno: its backend does not work */
    pthread_mutex_t lock;
    struct bps_flow *first, *last; /* that were rung, in this order */
    int is_asleep, is_closing;
    int bell; /* an eventfd that wakes the thread */
    struct bps_flow **timed; /* a heap: the earliest first; it has room for all flows */
    size_t n_timed, n_flows, capacity;
    char scratch[BPS_IO_SCRATCH];
};

/* -- the heap of due flows, under the lock ---------------------------------------------------------------------------- */

static inline void bps_io_put(struct bps_io_thread *thread, size_t place, struct bps_flow *flow)
{
    thread->timed[place - 1] = flow;
    flow->place = place;
}

/* Put a flow where it belongs, beginning at a place that is free. */
static inline void bps_io_sift(struct bps_io_thread *thread, size_t place, struct bps_flow *flow)
{
    for (; place > 1 && thread->timed[place / 2 - 1]->due_ns > flow->due_ns; place /= 2)
        bps_io_put(thread, place, thread->timed[place / 2 - 1]);
    for (size_t child; (child = 2 * place) <= thread->n_timed; place = child) {
        if (child < thread->n_timed && thread->timed[child]->due_ns < thread->timed[child - 1]->due_ns)
            child++;
        if (thread->timed[child - 1]->due_ns >= flow->due_ns)
            break;
        bps_io_put(thread, place, thread->timed[child - 1]);
    }
    bps_io_put(thread, place, flow);
}

/* Have a flow asked at due_ns (BPS_IO_NEVER: not by time). */
static inline void bps_io_time(struct bps_io_thread *thread, struct bps_flow *flow, uint64_t due_ns)
{
    flow->due_ns = due_ns;
    if (due_ns != BPS_IO_NEVER) {
        bps_io_sift(thread, flow->place != 0 ? flow->place : ++thread->n_timed, flow);
    } else if (flow->place != 0) {
        struct bps_flow *last = thread->timed[--thread->n_timed];
        size_t place = flow->place;
        flow->place = 0;
        if (last != flow)
            bps_io_sift(thread, place, last);
    }
}

/* -- any thread -------------------------------------------------------------------------------------------------------- */

static inline void bps_io_wake(struct bps_io_thread *thread)
{
    uint64_t one = 1;
    while (write(thread->bell, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

/* Queue a flow to be asked; whether the thread has to be woken. Under the lock. */
static inline int bps_io_queue(struct bps_io_thread *thread, struct bps_flow *flow)
{
    int wakes = thread->is_asleep;
    if (flow->is_rung)
        return 0;
    flow->is_rung = 1;
    flow->after = NULL;
    if (thread->first == NULL)
        thread->first = flow;
    else
        thread->last->after = flow;
    thread->last = flow;
    thread->is_asleep = 0;
    return wakes;
}

/* Have a flow asked soon. Not after `bps_flow_stop` was called. */
static inline void bps_flow_ring(struct bps_flow *flow)
{
    struct bps_io_thread *thread = flow->thread;
    pthread_mutex_lock(&thread->lock);
    int wakes = bps_io_queue(thread, flow);
    pthread_mutex_unlock(&thread->lock);
    if (wakes)
        bps_io_wake(thread);
}

/* Make a flow one of a thread's, and room for it among those that are due. 0 or ENOMEM. */
static inline int bps_io_add(struct bps_io_thread *thread, struct bps_flow *flow)
{
    int rc = 0;
    pthread_mutex_lock(&thread->lock);
    if (thread->n_flows == thread->capacity) {
        size_t capacity = 2 * thread->capacity + 8;
        struct bps_flow **grown = (struct bps_flow **)realloc(thread->timed, capacity * sizeof *grown);
        rc = grown == NULL ? ENOMEM : 0;
        if (grown != NULL) {
            thread->timed = grown;
            thread->capacity = capacity;
        }
    }
    thread->n_flows += rc == 0;
    flow->thread = thread; /* under the lock: the thread may learn of the flow by an event before it is rung */
    flow->due_ns = BPS_IO_NEVER;
    flow->place = 0;
    flow->is_rung = flow->is_ending = flow->is_over = flow->is_under_way = 0;
    flow->is_ready = 1;
    pthread_mutex_unlock(&thread->lock);
    return rc;
}

/* Let a thread move the bytes of a flow from now on. 0 or an errno; then it was not started. */
static inline int bps_flow_start(struct bps_flow *flow, struct bps_io_thread *thread)
{
    int rc = bps_io_add(thread, flow);
    if (rc != 0)
        return rc;
    bps_store(&flow->state, BPS_FLOW_RUNS);
    rc = thread->backend->watch(thread, flow);
    if (rc != 0) {
        bps_store(&flow->state, BPS_FLOW_NEW);
        pthread_mutex_lock(&thread->lock);
        thread->n_flows--;
        pthread_mutex_unlock(&thread->lock);
        return rc;
    }
    bps_flow_ring(flow);
    return 0;
}

/* Move no more bytes of a flow, whose socket was shut down. When this returns its thread has no part in it. Nothing if it
 * was not started. */
static inline void bps_flow_stop(struct bps_flow *flow)
{
    struct bps_io_thread *thread = flow->thread;
    if (bps_load(&flow->state) == BPS_FLOW_NEW)
        return;
    pthread_mutex_lock(&thread->lock);
    bps_store(&flow->state, BPS_FLOW_STOPS); /* under the lock: once the thread reads this, the flow is not rung again */
    int wakes = bps_io_queue(thread, flow);
    pthread_mutex_unlock(&thread->lock);
    if (wakes)
        bps_io_wake(thread);
    for (uint32_t state; (state = bps_load(&flow->state)) != BPS_FLOW_STOPPED;)
        bps_wait(&flow->state, state, 1000000000u);
    bps_store(&flow->state, BPS_FLOW_NEW);
}

/* -- the thread ---------------------------------------------------------------------------------------------------------- */

/* Whether a thread has one flow only. */
static inline int bps_io_is_alone(struct bps_io_thread *thread)
{
    pthread_mutex_lock(&thread->lock);
    int is_alone = thread->n_flows == 1;
    pthread_mutex_unlock(&thread->lock);
    return is_alone;
}

/* Move what a flow wants moved; whether it gives way to others although it could go on. */
static inline int bps_flow_run(struct bps_io_thread *thread, struct bps_flow *flow)
{
    uint64_t due_ns = BPS_IO_NEVER;
    int gives_way = thread->backend->run(thread, flow, &due_ns);
    pthread_mutex_lock(&thread->lock);
    bps_io_time(thread, flow, flow->is_over ? BPS_IO_NEVER : due_ns);
    pthread_mutex_unlock(&thread->lock);
    return gives_way;
}

static inline void bps_flow_end(struct bps_io_thread *thread, struct bps_flow *flow)
{
    struct bps_flow *before = NULL;
    thread->backend->unwatch(thread, flow);
    pthread_mutex_lock(&thread->lock);
    bps_io_time(thread, flow, BPS_IO_NEVER);
    for (struct bps_flow *each = flow->is_rung ? thread->first : NULL; each != NULL && each != flow; each = each->after)
        before = each;
    if (flow->is_rung) {
        *(before == NULL ? &thread->first : &before->after) = flow->after;
        thread->last = thread->last == flow ? before : thread->last;
    }
    thread->n_flows--;
    pthread_mutex_unlock(&thread->lock);
    bps_store(&flow->state, BPS_FLOW_STOPPED); /* from here on its memory may be gone */
    bps_wake(&flow->state, INT_MAX);
}

/* The next flow that was rung or is due; NULL: none is, and the thread is to sleep until *until_ns. */
static inline struct bps_flow *bps_io_pick(struct bps_io_thread *thread, uint64_t *until_ns, int *is_closing)
{
    pthread_mutex_lock(&thread->lock);
    struct bps_flow *flow = thread->first;
    *is_closing = thread->is_closing;
    *until_ns = thread->n_timed != 0 ? thread->timed[0]->due_ns : BPS_IO_NEVER;
    if (flow != NULL) {
        thread->first = flow->after;
        flow->is_rung = 0;
    } else if (*until_ns != BPS_IO_NEVER && *until_ns <= bps_now_ns()) {
        flow = thread->timed[0];
        bps_io_time(thread, flow, BPS_IO_NEVER);
    } else {
        thread->is_asleep = 1;
    }
    pthread_mutex_unlock(&thread->lock);
    return flow;
}

/* The bell was rung: take that note away. */
static inline void bps_io_answer(struct bps_io_thread *thread)
{
    uint64_t rings;
    while (read(thread->bell, &rings, sizeof rings) < 0 && errno == EINTR)
        ;
}

/* Queue the flows that are due: others may be rung again and again. */
static inline void bps_io_queue_due(struct bps_io_thread *thread)
{
    pthread_mutex_lock(&thread->lock);
    uint64_t now_ns = thread->n_timed != 0 ? bps_now_ns() : 0;
    while (thread->n_timed != 0 && thread->timed[0]->due_ns <= now_ns) {
        struct bps_flow *flow = thread->timed[0];
        bps_io_time(thread, flow, BPS_IO_NEVER);
        bps_io_queue(thread, flow);
    }
    pthread_mutex_unlock(&thread->lock);
}

static void *bps_io_run(void *argument)
{
    struct bps_io_thread *thread = (struct bps_io_thread *)argument;
    int is_closing = 0, n_since = 0;
    bps_store(&thread->begun, 1u + (uint32_t)(thread->backend->begin != NULL ? thread->backend->begin(thread) : 0));
    bps_wake(&thread->begun, 1);
    if (thread->begun != 1)
        return NULL;
    for (;;) {
        uint64_t until_ns;
        struct bps_flow *flow = bps_io_pick(thread, &until_ns, &is_closing);
        if (flow == NULL && is_closing)
            return NULL;
        n_since++;
        if (flow != NULL && !flow->is_under_way && bps_load(&flow->state) == BPS_FLOW_STOPS) {
            bps_flow_end(thread, flow);
        } else if (flow != NULL && bps_flow_run(thread, flow)) {
            bps_flow_ring(flow);
            n_since = BPS_IO_EVENTS;
        }
        /* Not after each flow: a look at all sockets costs as much as a small write. */
        if (flow == NULL || n_since >= BPS_IO_EVENTS) {
            thread->backend->wait(thread, flow == NULL ? until_ns : 0);
            bps_io_queue_due(thread);
            n_since = 0;
        }
    }
}

/* Make a thread without flows. 0 or an errno. */
static inline int bps_io_open(struct bps_io_thread *thread, const struct bps_io_backend *backend)
{
    memset(thread, 0, sizeof *thread);
    thread->backend = backend;
    thread->bell = eventfd(0, EFD_CLOEXEC);
    if (thread->bell < 0)
        return errno;
    int rc = backend->open(thread);
    if (rc == 0) {
        pthread_mutex_init(&thread->lock, NULL);
        rc = bps_start_thread(&thread->id, bps_io_run, thread);
        while (rc == 0 && bps_load(&thread->begun) == 0)
            bps_wait(&thread->begun, 0, 1000000000u);
        if (rc == 0 && thread->begun == 1)
            return 0;
        if (rc == 0) {
            pthread_join(thread->id, NULL);
            rc = (int)thread->begun - 1;
        }
        pthread_mutex_destroy(&thread->lock);
        backend->close(thread);
    }
    close(thread->bell);
    return rc;
}

/* End a thread, all of whose flows were stopped. */
static inline void bps_io_close(struct bps_io_thread *thread)
{
    pthread_mutex_lock(&thread->lock);
    thread->is_closing = 1;
    pthread_mutex_unlock(&thread->lock);
    bps_io_wake(thread);
    pthread_join(thread->id, NULL);
    thread->backend->close(thread);
    close(thread->bell);
    free(thread->timed);
    pthread_mutex_destroy(&thread->lock);
}
