/* Perf: the loops behind `bpsfast perf --transport shm`: announcements through lanes, doorbells, one copy.
 *
 * Two processes share memory as two nodes of a job do: data stays where its owner has it, an entry in a lane says which
 * slot is ready, and the reader's copy is the only one. The reader gives the slot back through its own lane. Each side
 * is one thread.
 *
 * Returns of the loops: 0, or an errno: ECANCELED, or ETIMEDOUT (nothing moved for stall_ns).
 */
#pragma once

#include "copy.h"
#include "lane.h"

enum { BPS_PERF_DOZE_NS = 50000000 };

struct bps_perf_memory {
    struct bps_lane *incoming, *outgoing;
    uint32_t incoming_capacity, outgoing_capacity;
    struct bps_doorbell *own_bell, *peer_bell;
    const char *peer_data; /* `depth` slots of nbytes each */
    char *sink;            /* nbytes of our own */
    uint64_t nbytes, stream_nbytes, awake_ns, stall_ns;
    uint32_t depth, cancel;
    uint64_t receive_goal; /* changed by another thread while a loop runs */
    uint64_t sent, received, begun_ns, ended_ns, last_ns;
};

enum { BPS_PERF_DATA = 1, BPS_PERF_BACK = 2 };

static inline void bps_perf_tell(struct bps_perf_memory *m, uint32_t what, uint32_t slot)
{
    struct bps_entry entry = {slot, 1, 0, (uint16_t)what, 0, (uint64_t)slot * m->nbytes, 0};
    bps_lane_push(m->outgoing, m->outgoing_capacity, &entry); /* never full: at most `depth` of each kind */
    bps_ring_doorbell(m->peer_bell, 1);
}

/* Take all that was announced, copy it, and give it back if `back` is wanted; *back: slots that came back to us.
 * Whether there was anything. */
static inline int bps_perf_take(struct bps_perf_memory *m, uint64_t *back)
{
    struct bps_entry entry;
    int found = 0;
    while (bps_lane_pop(m->incoming, m->incoming_capacity, &entry) == 0) {
        found = 1;
        if (entry.flags == BPS_PERF_BACK) {
            if (back != NULL)
                ++*back;
            continue;
        }
        bps_copy(m->sink, m->peer_data + (uint64_t)(entry.part % m->depth) * m->nbytes, m->nbytes, m->stream_nbytes);
        m->received++;
        if (back != NULL)
            bps_perf_tell(m, BPS_PERF_BACK, entry.part);
    }
    return found;
}

static inline int bps_perf_doze(struct bps_perf_memory *m, uint32_t seen)
{
    if (bps_load(&m->cancel))
        return ECANCELED;
    if (bps_now_ns() - m->last_ns >= m->stall_ns)
        return ETIMEDOUT;
    bps_await_doorbell(m->own_bell, seen, m->awake_ns, BPS_PERF_DOZE_NS);
    return 0;
}

/* Announce send_goal slots (UINT64_MAX: until duration_ns have passed) and copy receive_goal of the peer's. */
static inline int bps_perf_memory_bandwidth(struct bps_perf_memory *m, uint64_t send_goal, uint64_t duration_ns)
{
    uint64_t posted = 0, now_ns = bps_now_ns();
    uint64_t end_ns = send_goal == UINT64_MAX ? now_ns + duration_ns : UINT64_MAX;
    m->begun_ns = send_goal ? now_ns : 0;
    m->last_ns = now_ns;
    for (;;) {
        uint32_t seen = bps_load(&m->own_bell->rings);
        if (now_ns >= end_ns && send_goal == UINT64_MAX)
            send_goal = posted;
        for (; posted < send_goal && posted - m->sent < m->depth; posted++)
            bps_perf_tell(m, BPS_PERF_DATA, (uint32_t)(posted % m->depth));
        uint64_t back = 0;
        int found = bps_perf_take(m, &back);
        m->sent += back;
        if (found) {
            m->last_ns = m->ended_ns = now_ns = bps_now_ns();
            if (m->begun_ns == 0)
                m->begun_ns = now_ns;
        } else if (m->sent >= send_goal && m->received >= __atomic_load_n(&m->receive_goal, __ATOMIC_ACQUIRE))
            return 0;
        else {
            int rc = bps_perf_doze(m, seen);
            if (rc)
                return rc;
            now_ns = bps_now_ns();
        }
    }
}

/* Take n turns of one slot each, and give none back: the answer says as much. samples_ns[i] of the side that is
 * `first`: from announcing until the answer is copied. */
static inline int bps_perf_memory_latency(struct bps_perf_memory *m, uint64_t n, int first, uint64_t *samples_ns)
{
    uint64_t now_ns = bps_now_ns();
    m->begun_ns = now_ns;
    for (uint64_t i = 0; i < n; i++) {
        m->last_ns = now_ns;
        if (first)
            bps_perf_tell(m, BPS_PERF_DATA, (uint32_t)(i % m->depth));
        while (m->received <= i) {
            uint32_t seen = bps_load(&m->own_bell->rings);
            int rc = bps_perf_take(m, NULL) ? 0 : bps_perf_doze(m, seen);
            if (rc)
                return rc;
        }
        if (!first)
            bps_perf_tell(m, BPS_PERF_DATA, (uint32_t)(i % m->depth));
        uint64_t before_ns = now_ns;
        now_ns = bps_now_ns();
        if (samples_ns != NULL)
            samples_ns[i] = now_ns - before_ns;
        m->sent++;
    }
    m->ended_ns = now_ns;
    return 0;
}
