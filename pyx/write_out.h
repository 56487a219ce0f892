/* Write out: one write on its way out of a connection, as pieces of memory that are to be sent one after another.
 *
 *   in the clear     header 32 | payload
 *   with checksums   header 32 | checksum of the header 4 | payload | checksum of header and payload 4, if there is one
 *   sealed           header in a record | payload in records (`seal.h`)
 *
 * The checksums are CRC32C. TCP's 16-bit checksum misses one in 65,536 damaged packets, and damage in a switch or in memory
 * before it is computed. The checksum of a stretch is computed just before it is sent, while the cache has it.
 */
#pragma once

#include <sys/uio.h>

#include "crc32c.h"
#include "seal.h"
#include "wire.h"

#define BPS_CHECKSUM_NBYTES 4u
#define BPS_CHECKED_STRETCH ((size_t)512 << 10)

struct bps_write_out {
    struct bps_header header;
    const char *payload;
    uint64_t taken; /* bytes of the payload that are, or were, in pieces */
    int is_begun;   /* the header is, or was, too */
    uint32_t crc, tail;
    unsigned char head[sizeof(struct bps_header) + BPS_CHECKSUM_NBYTES];
    struct iovec pieces[3];
    size_t left; /* bytes of the pieces that have not been sent */
};

/* How a connection protects its writes: with a seal, or with checksums if it `checks`, or not. */
struct bps_protection {
    struct bps_seal *seal;
    int checks;
};

/* How many bytes a write of a payload of nbytes is on the wire. */
static inline uint64_t bps_wire_nbytes(const struct bps_protection *how, uint64_t nbytes)
{
    if (how->seal != NULL)
        return bps_seal_wire_nbytes(sizeof(struct bps_header), nbytes);
    return sizeof(struct bps_header) + nbytes + (how->checks ? BPS_CHECKSUM_NBYTES * (1 + (nbytes != 0)) : 0);
}

static inline void bps_write_out_begin(struct bps_write_out *write, const struct bps_header *header, const void *payload)
{
    write->header = *header;
    write->payload = (const char *)payload;
    write->taken = write->left = 0;
    write->is_begun = 0;
}

static inline int bps_write_out_is_sent(const struct bps_write_out *write)
{
    return write->is_begun && write->left == 0 && write->taken == write->header.nbytes;
}

/* The next records: that of the header together with the payload's first one. 0 or EIO. */
static inline int bps_write_out_seal(struct bps_write_out *write, struct bps_seal *seal)
{
    size_t used = 0;
    int rc = 0;
    if (!write->is_begun) {
        rc = bps_seal_close(seal, &write->header, sizeof write->header, seal->staging);
        used = sizeof write->header + BPS_SEAL_TAG;
    }
    uint64_t left = write->header.nbytes - write->taken;
    size_t nbytes = left < BPS_SEAL_RECORD ? (size_t)left : BPS_SEAL_RECORD;
    if (rc == 0 && nbytes != 0) {
        rc = bps_seal_close(seal, write->payload + write->taken, nbytes, seal->staging + used);
        used += nbytes + BPS_SEAL_TAG;
    }
    write->taken += nbytes;
    write->pieces[0] = (struct iovec){seal->staging, used};
    write->pieces[1] = write->pieces[2] = (struct iovec){NULL, 0};
    write->left = used;
    return rc;
}

/* Make the next pieces, once the last ones were sent. 0, or EIO if they cannot be sealed. */
static inline int bps_write_out_fill(struct bps_write_out *write, const struct bps_protection *how)
{
    int is_first = !write->is_begun;
    if (how->seal != NULL) {
        int rc = bps_write_out_seal(write, how->seal);
        write->left = rc == 0 ? write->left : 0; /* nothing in the clear; a seal that has failed fails again */
        write->is_begun = rc == 0;
        return rc;
    }
    if (is_first) {
        write->crc = how->checks ? bps_crc32c(0, &write->header, sizeof write->header, 0) : 0;
        memcpy(write->head, &write->header, sizeof write->header);
        memcpy(write->head + sizeof write->header, &write->crc, BPS_CHECKSUM_NBYTES);
    }
    uint64_t left = write->header.nbytes - write->taken;
    size_t nbytes = how->checks && left > BPS_CHECKED_STRETCH ? BPS_CHECKED_STRETCH : (size_t)left;
    const char *payload = write->payload + write->taken;
    if (how->checks)
        write->tail = write->crc = bps_crc32c(write->crc, payload, nbytes, 0);
    int is_last = nbytes == left;
    write->taken += nbytes;
    write->is_begun = 1;
    write->pieces[0] = (struct iovec){write->head, is_first ? sizeof write->header + BPS_CHECKSUM_NBYTES * how->checks : 0};
    write->pieces[1] = (struct iovec){(void *)payload, nbytes};
    write->pieces[2] = (struct iovec){&write->tail, how->checks && is_last && write->header.nbytes ? BPS_CHECKSUM_NBYTES : 0};
    write->left = write->pieces[0].iov_len + nbytes + write->pieces[2].iov_len;
    return 0;
}

/* Put the pieces that are left, up to `most` bytes of them, into `pieces`; how many. */
static inline size_t bps_write_out_pieces(const struct bps_write_out *write, size_t most, struct iovec pieces[3])
{
    size_t n = 0;
    for (int i = 0; i < 3 && most != 0; i++) {
        if (write->pieces[i].iov_len == 0)
            continue;
        pieces[n] = write->pieces[i];
        if (pieces[n].iov_len > most)
            pieces[n].iov_len = most;
        most -= pieces[n++].iov_len;
    }
    return n;
}

/* n bytes of the pieces were sent. */
static inline void bps_write_out_sent(struct bps_write_out *write, size_t n)
{
    write->left -= n;
    for (int i = 0; i < 3; i++) {
        size_t of_it = n < write->pieces[i].iov_len ? n : write->pieces[i].iov_len;
        if (of_it == 0) /* there may be no piece */
            continue;
        write->pieces[i].iov_base = (char *)write->pieces[i].iov_base + of_it;
        write->pieces[i].iov_len -= of_it;
        n -= of_it;
    }
}
