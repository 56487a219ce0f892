/* Acknowledgements: when a sending thread checks whether a peer's kernel has acknowledged a write.
 *
 * The kernel does not notify of an acknowledgement, so the thread polls it (SIOCOUTQ). With many peers on slow links,
 * polls at a fixed interval cost more than the bytes: every 2 ms, 16 machines kept two cores 90 % busy, at half and at
 * 3/8 of a rate alike. So the first poll comes when most of the usual time has passed, the next ones after a sixteenth
 * of the time so far.
 */
#pragma once

#include <stdint.h>

#define BPS_FIRST_LOOK_NS 30000ull
#define BPS_LAST_LOOK_NS 2000000ull
#define BPS_LONGEST_LOOK_NS 20000000ull

struct bps_acks {
    uint64_t usual_ns; /* from a write's being handed to the kernel to its acknowledgement, as it has been of late */
    uint32_t n_looks;  /* for the oldest write, so far */
};

static inline uint64_t bps_between(uint64_t least, uint64_t value, uint64_t most)
{
    return value < least ? least : value > most ? most : value;
}

/* How long to wait before the next look at the oldest write, which was handed over at `sent_ns`. */
static inline uint64_t bps_acks_pause(struct bps_acks *acks, uint64_t sent_ns, uint64_t now_ns)
{
    uint64_t due_ns = sent_ns + acks->usual_ns / 4 * 3;
    acks->n_looks++;
    if (now_ns < due_ns)
        return bps_between(BPS_FIRST_LOOK_NS, due_ns - now_ns, BPS_LONGEST_LOOK_NS);
    return bps_between(BPS_FIRST_LOOK_NS, (now_ns - sent_ns) / 16, BPS_LAST_LOOK_NS);
}

/* Learn from the oldest write, acknowledged `took_ns` after it was handed over: one that was found so at the first look
 * may have been so for long. */
static inline void bps_acks_learn(struct bps_acks *acks, uint64_t took_ns)
{
    if (acks->n_looks == 1)
        acks->usual_ns = (took_ns < acks->usual_ns ? took_ns : acks->usual_ns) / 8 * 7;
    else if (acks->n_looks > 1)
        acks->usual_ns = acks->usual_ns / 4 * 3 + took_ns / 4;
    acks->n_looks = 0;
}
