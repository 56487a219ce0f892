/* Write in: the writes of a peer, as their bytes come in over a connection, in whatever portions.
 *
 * No field of a header is used before its checksum or seal fits, and no byte of a payload is taken before the header fits
 * its slot. A payload goes straight into its slot, sealed ones record by record; if its checksum or a seal does not fit,
 * the slot holds garbage, but the write has not arrived, and comes again over another connection.
 */
#pragma once

#include "futex.h"
#include "slots.h"
#include "write_out.h"

enum { BPS_WRITE_IN_HEADER, BPS_WRITE_IN_PAYLOAD, BPS_WRITE_IN_TAIL };
enum { BPS_WRITE_IN_GOES_ON = 0, BPS_WRITE_IN_WHOLE = -1 };

struct bps_write_in {
    struct bps_header header; /* of the present write, once it has come */
    struct bps_slot slot;
    uint64_t begin_ns; /* when the header had come */
    uint64_t got;      /* bytes of the payload that are in the slot */
    int stage;
    uint32_t crc, tail;
    size_t filled; /* bytes of the present header, record or checksum */
    unsigned char head[sizeof(struct bps_header) + BPS_CHECKSUM_NBYTES];
};

static inline size_t bps_write_in_record(const struct bps_write_in *write)
{
    uint64_t left = write->header.nbytes - write->got;
    return left < BPS_SEAL_RECORD ? (size_t)left : BPS_SEAL_RECORD;
}

/* Where the next bytes go, and how many: at least one. */
static inline size_t bps_write_in_want(struct bps_write_in *write, const struct bps_protection *how, void **at)
{
    char *to = write->stage == BPS_WRITE_IN_TAIL ? (char *)&write->tail
               : how->seal != NULL               ? (char *)how->seal->staging
                                                 : (char *)write->head;
    *at = to + write->filled;
    if (write->stage == BPS_WRITE_IN_HEADER)
        return sizeof write->header + (how->seal != NULL ? BPS_SEAL_TAG : how->checks ? BPS_CHECKSUM_NBYTES : 0)
               - write->filled;
    if (write->stage == BPS_WRITE_IN_TAIL)
        return BPS_CHECKSUM_NBYTES - write->filled;
    if (how->seal != NULL)
        return bps_write_in_record(write) + BPS_SEAL_TAG - write->filled;
    uint64_t left = write->header.nbytes - write->got;
    *at = (char *)(uintptr_t)write->slot.addresses[write->header.round & 1] + write->got;
    return how->checks && left > BPS_CHECKED_STRETCH ? BPS_CHECKED_STRETCH : (size_t)left;
}

/* Return a lower bound of the bytes of the present write that have not been received; 0 outside its payload. */
static inline uint64_t bps_write_in_left(const struct bps_write_in *write)
{
    uint64_t left = write->stage == BPS_WRITE_IN_PAYLOAD ? write->header.nbytes - write->got : 0;
    return left > write->filled ? left - write->filled : 0; /* `filled` may include bytes of a record's tag */
}

/* The payload is whole. */
static inline int bps_write_in_end(struct bps_write_in *write, struct bps_slots *slots)
{
    const void *payload = (const void *)(uintptr_t)write->slot.addresses[write->header.round & 1];
    if (write->header.nbytes != 0 && write->slot.framed && !bps_frame_is_whole(payload, write->header.nbytes))
        return EPROTO;
    bps_slots_arrived(slots, &write->header);
    write->stage = BPS_WRITE_IN_HEADER;
    return BPS_WRITE_IN_WHOLE;
}

/* The header is whole: find its slot. */
static inline int bps_write_in_open(struct bps_write_in *write, const struct bps_protection *how, struct bps_slots *slots)
{
    write->filled = 0;
    if (how->seal != NULL) {
        int rc = bps_seal_open(how->seal, how->seal->staging, sizeof write->header, &write->header);
        if (rc != 0)
            return rc;
    } else {
        memcpy(&write->header, write->head, sizeof write->header);
        memcpy(&write->crc, write->head + sizeof write->header, BPS_CHECKSUM_NBYTES);
        if (how->checks && write->crc != bps_crc32c(0, &write->header, sizeof write->header, 0))
            return EBADMSG;
    }
    write->begin_ns = bps_now_ns();
    if (!bps_slots_accept(slots, &write->header, &write->slot))
        return EPROTO;
    write->got = 0;
    write->stage = BPS_WRITE_IN_PAYLOAD;
    return write->header.nbytes != 0 ? BPS_WRITE_IN_GOES_ON : bps_write_in_end(write, slots);
}

/* n of the wanted bytes have come. BPS_WRITE_IN_WHOLE: with them a write has arrived, that of the `header`; else an errno:
 * EPROTO for what the peer may not write, EBADMSG for what it has not sent like that. */
static inline int bps_write_in_got(struct bps_write_in *write, const struct bps_protection *how, struct bps_slots *slots,
                                   size_t n)
{
    void *at;
    size_t wanted = bps_write_in_want(write, how, &at);
    write->filled += n;
    if (write->stage == BPS_WRITE_IN_HEADER)
        return n < wanted ? BPS_WRITE_IN_GOES_ON : bps_write_in_open(write, how, slots);
    if (write->stage == BPS_WRITE_IN_PAYLOAD && how->seal == NULL) {
        write->filled = 0;
        write->got += n;
        if (how->checks)
            write->crc = bps_crc32c(write->crc, at, n, 0);
        if (write->got < write->header.nbytes)
            return BPS_WRITE_IN_GOES_ON;
        if (!how->checks)
            return bps_write_in_end(write, slots);
        write->stage = BPS_WRITE_IN_TAIL;
        return BPS_WRITE_IN_GOES_ON;
    }
    if (n < wanted)
        return BPS_WRITE_IN_GOES_ON;
    write->filled = 0;
    if (write->stage == BPS_WRITE_IN_TAIL)
        return write->tail != write->crc ? EBADMSG : bps_write_in_end(write, slots);
    size_t nbytes = bps_write_in_record(write);
    char *to = (char *)(uintptr_t)write->slot.addresses[write->header.round & 1] + write->got;
    int rc = bps_seal_open(how->seal, how->seal->staging, nbytes, to);
    if (rc != 0)
        return rc;
    write->got += nbytes;
    return write->got < write->header.nbytes ? BPS_WRITE_IN_GOES_ON : bps_write_in_end(write, slots);
}

/* The connection ends here: the errno, or 0 between two writes. */
static inline int bps_write_in_cut(const struct bps_write_in *write)
{
    return write->stage == BPS_WRITE_IN_HEADER && write->filled == 0 ? 0 : ECONNRESET;
}
