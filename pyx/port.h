/* Port: a rank's connection to its node: puts entries onto the lane, waits for words of the board. Any thread, no lock
 * held.
 */
#pragma once

#include <errno.h>
#include <poll.h>
#include <sched.h>

#include "cpu_separation.h"
#include "board.h"
#include "lane.h"
#include "record.h"
#include "steps.h"
#include "thread.h"

/* A wait looks at the node's process and at its caller's signals at least this often. */
#define BPS_SLICE_NS 100000000ull

enum { BPS_DONE = 0, BPS_TIMED_OUT = 1, BPS_ABORTED = 2, BPS_NODE_DIED = 3, BPS_INTERRUPTED = 4 };

struct bps_port {
    struct bps_lane *lane;
    void *board;
    struct bps_doorbell *doorbell;
    uint32_t capacity, n_words;
    int node_pidfd;
    uint64_t awake_ns;
    struct bps_separation separation;
    uint32_t n_long; /* waits in a row that were longer than BPS_SOON times awake_ns; at most BPS_LONG */
    pthread_mutex_t mutex; /* one announces at a time */
    struct bps_trace records;
    struct bps_steps steps;
};

/* BPS_ABORTED or BPS_NODE_DIED if the job is over, else BPS_DONE. Looking at the node costs a system call. */
static inline int bps_port_trouble(struct bps_port *port, int look_at_node)
{
    struct pollfd node = {port->node_pidfd, POLLIN, 0};
    if (bps_load(&((struct bps_board *)port->board)->state) != 0)
        return BPS_ABORTED;
    return look_at_node && node.fd >= 0 && poll(&node, 1, 0) == 1 ? BPS_NODE_DIED : BPS_DONE;
}

/* Put an entry onto the lane, timed here, and ring for the node only if it was full; BPS_INTERRUPTED, and nothing done,
 * after a slice of time in which it was: the node empties it without waiting for us. */
static inline int bps_port_put(struct bps_port *port, struct bps_entry *entry)
{
    int status = BPS_DONE;
    entry->time_ns = bps_now_ns();
    pthread_mutex_lock(&port->mutex);
    while (bps_lane_push(port->lane, port->capacity, entry) != 0) {
        status = bps_port_trouble(port, 1);
        if (status == BPS_DONE && bps_now_ns() - entry->time_ns >= BPS_SLICE_NS)
            status = BPS_INTERRUPTED;
        if (status != BPS_DONE)
            break;
        bps_ring_doorbell(port->doorbell, 1);
        sched_yield();
    }
    pthread_mutex_unlock(&port->mutex);
    return status;
}

/* Ring for the node, unless it has taken all entries already: that would wake a thread for nothing, which then takes
 * the next round away from the core whose cache has the partition. A thread that takes several partitions off the lane
 * wakes the others. */
static inline void bps_port_ring(struct bps_port *port)
{
    if (bps_load(&port->lane->tail) != bps_load(&port->lane->head))
        bps_ring_doorbell(port->doorbell, 1);
}

/* As `bps_port_put`, and ring for the node. */
static inline int bps_port_announce(struct bps_port *port, struct bps_entry *entry)
{
    int status = bps_port_put(port, entry);
    bps_port_ring(port);
    return status;
}

/* A wait that falls asleep shortly before it ends costs a wake-up, which delays the rank, and so all ranks that wait
 * for its next input. So a wait stays awake for BPS_SOON times awake_ns, unless the last waits were longer than that:
 * then the threads that sum need the core more than a waiter, which the kernel takes for busy. */
#define BPS_SOON 4
#define BPS_LONG 2

static inline void bps_port_stay_awake(struct bps_port *port, uint64_t awake_ns)
{
    port->awake_ns = awake_ns;
    if (awake_ns != 0)
        bps_look_whether_few(&port->separation);
}

static inline uint64_t bps_port_patience(const struct bps_port *port)
{
    int all_long = __atomic_load_n(&port->n_long, __ATOMIC_RELAXED) >= BPS_LONG;
    return all_long ? port->awake_ns : BPS_SOON * port->awake_ns;
}

static inline void bps_port_learn(struct bps_port *port, uint64_t waited_ns)
{
    uint32_t n = __atomic_load_n(&port->n_long, __ATOMIC_RELAXED);
    n = waited_ns <= BPS_SOON * port->awake_ns ? 0 : n < BPS_LONG ? n + 1 : n;
    __atomic_store_n(&port->n_long, n, __ATOMIC_RELAXED);
}

/* Note that the round of a word, waited for since `begin_ns` (0: it was there), is complete. */
static inline int bps_port_complete(struct bps_port *port, uint32_t *word, uint32_t part, uint32_t round,
                                    uint64_t begin_ns)
{
    if (begin_ns != 0) {
        uint64_t end_ns = bps_now_ns();
        bps_port_learn(port, end_ns - begin_ns);
        bps_record_add(&port->records, BPS_WAIT, 0, part, round, 0, begin_ns, end_ns);
    }
    bps_steps_result(&port->steps, bps_counted(bps_board_time(word)));
    return BPS_DONE;
}

/* Sleep on a word that said `seen` for `timeout_ns` at most, counted as a sleeper, so that the engine wakes us. */
static inline int bps_port_sleep(struct bps_port *port, uint32_t *word, uint32_t round, uint64_t timeout_ns)
{
    int status = 0;
    bps_add(&port->lane->sleepers, 1);
    uint32_t seen = bps_load(word);
    if (!bps_reached(seen, round))
        status = bps_wait(word, seen, timeout_ns);
    bps_add(&port->lane->sleepers, (uint32_t)-1);
    return status;
}

/* Whether a round of a word is complete. */
static inline int bps_port_reached(const struct bps_port *port, uint32_t part, uint32_t round)
{
    return bps_reached(bps_load(bps_board_word(port->board, part)), round);
}

/* Wait for one word; BPS_INTERRUPTED after each slice, so that the caller looks at its signals. */
static inline int bps_port_wait(struct bps_port *port, uint32_t part, uint32_t round, uint64_t deadline_ns)
{
    uint32_t *word = bps_board_word(port->board, part);
    uint32_t seen = bps_load(word);
    if (bps_reached(seen, round))
        return bps_port_complete(port, word, part, round, 0);
    uint64_t begin_ns = bps_now_ns();
    int cpu = -1;
    if (!bps_is_contended(&bps_contention, begin_ns))
        cpu = bps_separation_enter(&port->separation, &port->doorbell->waiting, begin_ns);
    int rang = bps_wait_awake(word, seen, bps_port_patience(port));
    bps_separation_leave(&port->doorbell->waiting, cpu);
    if (rang && bps_reached(bps_load(word), round))
        return bps_port_complete(port, word, part, round, begin_ns);
    for (;;) {
        int status = bps_port_trouble(port, 0);
        if (status != BPS_DONE)
            return status;
        uint64_t now_ns = bps_now_ns();
        if (now_ns >= deadline_ns)
            return BPS_TIMED_OUT;
        int why = bps_port_sleep(port, word, round, bps_least(BPS_SLICE_NS, deadline_ns - now_ns));
        if (bps_reached(bps_load(word), round))
            return bps_port_complete(port, word, part, round, begin_ns);
        if (why == EINTR || bps_now_ns() - now_ns >= BPS_SLICE_NS / 2) {
            status = bps_port_trouble(port, 1);
            return status == BPS_DONE ? BPS_INTERRUPTED : status;
        }
    }
}
