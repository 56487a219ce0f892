/* Convey: many partitions of units, each with its own place to come from and to go to, put in and taken out in order.
 *
 * Up to `ahead` of them are announced and not complete; whoever chooses that sees to it that a partition whose turn
 * comes again has been taken out before. A leg with BPS_TICKET carries two words, of which the ranks' bitwise and says
 * whether all gave the same: one is the other's complement on every rank.
 */
#ifndef BPS_CONVEY_H
#define BPS_CONVEY_H

#include "copy.h"
#include "port.h"

#define BPS_TICKET 2u
enum { BPS_DIFFERENT = 16 };

struct bps_leg {
    uint64_t source, destination; /* 0: contributes nothing; 0: the result is not wanted here */
    uint64_t nbytes;
    uint64_t staging, result; /* where this rank's input and this round's result are mapped here */
    uint64_t offset;          /* of the staging in `segment` */
    uint32_t part, round;
    uint16_t segment, flags;
    uint32_t pad;
};

_Static_assert(sizeof(struct bps_leg) == 64, "legs are 64 bytes");

static inline int bps_leg_put_in(struct bps_port *port, const struct bps_leg *leg)
{
    struct bps_entry entry = {leg->part, 1, leg->round, leg->source ? 0 : BPS_FLAG_EMPTY, leg->segment, leg->offset, 0};
    if (leg->source) {
        uint64_t begin_ns = bps_now_ns();
        bps_copy((void *)leg->staging, (const void *)leg->source, leg->nbytes, (uint64_t)-1);
        bps_record_add(&port->records, BPS_COPY_IN, 0, leg->part, leg->round, leg->nbytes, begin_ns, bps_now_ns());
    }
    return bps_port_put(port, &entry);
}

static inline int bps_leg_take_out(struct bps_port *port, const struct bps_leg *leg)
{
    uint64_t begin_ns = bps_now_ns();
    if (leg->flags & BPS_TICKET) {
        const uint64_t *words = (const uint64_t *)leg->result;
        return words[0] == ~words[1] ? BPS_DONE : BPS_DIFFERENT;
    }
    if (leg->destination) {
        bps_copy((void *)leg->destination, (const void *)leg->result, leg->nbytes, (uint64_t)-1);
        bps_record_add(&port->records, BPS_DELIVER, 0, leg->part, leg->round, leg->nbytes, begin_ns, bps_now_ns());
    }
    return BPS_DONE;
}

/* The leg to sleep for: with half of what is under way done at once a thread sleeps and is woken less often, and the
 * other half keeps the node busy meanwhile. A ticket is waited for alone: where it fails, others may never be complete. */
static inline uint32_t bps_convey_next(const struct bps_leg *legs, uint32_t in, uint32_t out)
{
    return legs[out].flags & BPS_TICKET || in - out < 2 ? out : out + (in - out) / 2 - 1;
}

/* Go on until all n legs are out, or something else than BPS_DONE comes up; `in` and `out` count what was done, and what
 * is complete before the first that is not is out then. */
static inline int bps_convey(struct bps_port *port, const struct bps_leg *legs, uint32_t n, uint32_t ahead,
                             uint32_t *in, uint32_t *out, uint64_t deadline_ns)
{
    int status = BPS_DONE;
    while (status == BPS_DONE && *out < n) {
        uint32_t before = *in, taken = *out;
        for (; status == BPS_DONE && *in < n && *in - *out < ahead; *in += status == BPS_DONE)
            status = bps_leg_put_in(port, &legs[*in]);
        if (*in != before)
            bps_port_ring(port);
        if (status != BPS_DONE)
            return status;
        uint32_t last = bps_convey_next(legs, *in, *out);
        int waited = bps_port_wait(port, legs[last].part, legs[last].round, deadline_ns);
        for (; status == BPS_DONE && *out <= last; *out += status == BPS_DONE) {
            const struct bps_leg *leg = &legs[*out];
            if (waited != BPS_DONE && !bps_port_reached(port, leg->part, leg->round))
                break;
            status = bps_port_wait(port, leg->part, leg->round, deadline_ns);
            if (status == BPS_DONE)
                status = bps_leg_take_out(port, leg);
        }
        if (status == BPS_DONE && (waited != BPS_TIMED_OUT || *out == taken))
            status = waited;
    }
    return status;
}

#endif
