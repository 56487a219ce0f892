/* Pipelined transfer: many chunks of units, each with its own source and destination, put in and taken out in order.
 *
 * Up to `ahead` chunks are announced and not complete; the caller chooses `ahead` so that a partition is taken out
 * before it is put in again. A chunk with BPS_FINGERPRINT carries two words, one the complement of the other on every
 * rank; the bitwise and of all ranks shows whether all ranks gave the same.
 */
#pragma once

#include "copy.h"
#include "port.h"

#define BPS_FINGERPRINT 2u
enum { BPS_DIFFERENT = 16 };

struct bps_chunk {
    uint64_t source, destination; /* 0: contributes nothing; 0: the result is not wanted here */
    uint64_t nbytes;
    uint64_t staging, result; /* where this rank's input and this round's result are mapped here */
    uint64_t offset;          /* of the staging in `segment` */
    uint32_t part, round;
    uint16_t segment, flags;
    uint32_t pad;
};

_Static_assert(sizeof(struct bps_chunk) == 64, "chunks are 64 bytes");

static inline int bps_chunk_put_in(struct bps_port *port, const struct bps_chunk *chunk)
{
    struct bps_entry entry = {
        chunk->part, 1, chunk->round, chunk->source ? 0 : BPS_FLAG_EMPTY, chunk->segment, chunk->offset, 0};
    if (chunk->source) {
        uint64_t begin_ns = bps_now_ns();
        bps_copy((void *)chunk->staging, (const void *)chunk->source, chunk->nbytes, (uint64_t)-1);
        bps_record_add(&port->records, BPS_COPY_IN, 0, chunk->part, chunk->round, chunk->nbytes, begin_ns,
                       bps_now_ns());
    }
    return bps_port_put(port, &entry);
}

static inline int bps_chunk_take_out(struct bps_port *port, const struct bps_chunk *chunk)
{
    uint64_t begin_ns = bps_now_ns();
    if (chunk->flags & BPS_FINGERPRINT) {
        const uint64_t *words = (const uint64_t *)chunk->result;
        return words[0] == ~words[1] ? BPS_DONE : BPS_DIFFERENT;
    }
    if (chunk->destination) {
        bps_copy((void *)chunk->destination, (const void *)chunk->result, chunk->nbytes, (uint64_t)-1);
        bps_record_add(&port->records, BPS_DELIVER, 0, chunk->part, chunk->round, chunk->nbytes, begin_ns,
                       bps_now_ns());
    }
    return BPS_DONE;
}

/* The chunk to sleep for: half of those in flight, so that the thread is woken less often while the other half keeps
 * the node busy. A fingerprint is waited for alone: where it fails, later chunks may never be complete. */
static inline uint32_t bps_pipelined_transfer_next(const struct bps_chunk *chunks, uint32_t in, uint32_t out)
{
    return chunks[out].flags & BPS_FINGERPRINT || in - out < 2 ? out : out + (in - out) / 2 - 1;
}

/* Continue until all n chunks are out, or a status other than BPS_DONE. `in` and `out` count the chunks so far; all
 * complete chunks before the first incomplete one are out then. */
static inline int bps_pipelined_transfer(struct bps_port *port, const struct bps_chunk *chunks, uint32_t n,
                                         uint32_t ahead, uint32_t *in, uint32_t *out, uint64_t deadline_ns)
{
    int status = BPS_DONE;
    while (status == BPS_DONE && *out < n) {
        uint32_t before = *in, taken = *out;
        for (; status == BPS_DONE && *in < n && *in - *out < ahead; *in += status == BPS_DONE)
            status = bps_chunk_put_in(port, &chunks[*in]);
        if (*in != before)
            bps_port_ring(port);
        if (status != BPS_DONE)
            return status;
        uint32_t last = bps_pipelined_transfer_next(chunks, *in, *out);
        int waited = bps_port_wait(port, chunks[last].part, chunks[last].round, deadline_ns);
        for (; status == BPS_DONE && *out <= last; *out += status == BPS_DONE) {
            const struct bps_chunk *chunk = &chunks[*out];
            if (waited != BPS_DONE && !bps_port_reached(port, chunk->part, chunk->round))
                break;
            status = bps_port_wait(port, chunk->part, chunk->round, deadline_ns);
            if (status == BPS_DONE)
                status = bps_chunk_take_out(port, chunk);
        }
        if (status == BPS_DONE && (waited != BPS_TIMED_OUT || *out == taken))
            status = waited;
    }
    return status;
}
