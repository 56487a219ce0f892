/* Checked writes: sends and receives writes with checksums (CRC32C), on connections that are not encrypted.
 *
 *   header 32 | checksum of the header 4 | payload | checksum of header and payload 4, if there is a payload
 *
 * TCP's 16-bit checksum misses one in 65,536 damaged packets, and damage in a switch or in memory before it is
 * computed. Both sides compute the checksum of a piece while the cache has it. No field of a header is used before its
 * checksum fits. If a payload does not fit, its slot holds garbage, but the write is not reported as arrived, and comes
 * again over another connection, as with encryption (`seal.h`).
 */
#pragma once

#include "crc32c.h"
#include "sockets.h"
#include "wire.h"

#define BPS_CHECKSUM_NBYTES 4u
#define BPS_CHECKED_PIECE ((size_t)512 << 10)

/* How many bytes a write of a payload of nbytes is on the wire. */
static inline uint64_t bps_checked_wire_nbytes(uint64_t nbytes)
{
    return sizeof(struct bps_header) + BPS_CHECKSUM_NBYTES + nbytes + (nbytes ? BPS_CHECKSUM_NBYTES : 0);
}

static inline size_t bps_checked_piece(size_t left, const struct bps_pace *pace)
{
    return bps_piece(left < BPS_CHECKED_PIECE ? left : BPS_CHECKED_PIECE, pace);
}

/* Send header and payload whole, with their checksums. As `bps_send_paced`. */
static inline int bps_checked_send(int fd, const struct bps_header *header, const void *payload, size_t nbytes,
                                   struct bps_pace *pace, const uint32_t *closing)
{
    unsigned char head[sizeof *header + BPS_CHECKSUM_NBYTES];
    uint32_t crc = bps_crc32c(0, header, sizeof *header, 0);
    memcpy(head, header, sizeof *header);
    memcpy(head + sizeof *header, &crc, BPS_CHECKSUM_NBYTES);
    size_t done = 0;
    int rc = 0, is_first = 1;
    while (rc == 0 && (is_first || done < nbytes)) {
        size_t piece = bps_checked_piece(nbytes - done, pace);
        struct iovec pieces[3] = {{head, is_first ? sizeof head : 0}, {(char *)payload + done, piece}, {&crc, 0}};
        crc = bps_crc32c(crc, pieces[1].iov_base, piece, 0);
        done += piece;
        if (done == nbytes && nbytes != 0)
            pieces[2].iov_len = BPS_CHECKSUM_NBYTES;
        if (pace != NULL)
            rc = bps_await_turn(pace, pieces[0].iov_len + piece + pieces[2].iov_len, closing);
        if (rc == 0)
            rc = bps_send_pieces(fd, pieces, 3);
        is_first = 0;
    }
    return rc;
}

/* A whole write in pieces, with checksums if `checks`. */
struct bps_write_pieces {
    unsigned char head[sizeof(struct bps_header) + BPS_CHECKSUM_NBYTES];
    uint32_t tail;
    struct iovec pieces[3];
};

static inline void bps_write_pieces(struct bps_write_pieces *write, const struct bps_header *header,
                                    const void *payload, size_t nbytes, int checks)
{
    uint32_t crc = checks ? bps_crc32c(0, header, sizeof *header, 0) : 0;
    memcpy(write->head, header, sizeof *header);
    memcpy(write->head + sizeof *header, &crc, BPS_CHECKSUM_NBYTES);
    write->tail = checks ? bps_crc32c(crc, payload, nbytes, 0) : 0;
    write->pieces[0] = (struct iovec){write->head, sizeof *header + (checks ? BPS_CHECKSUM_NBYTES : 0)};
    write->pieces[1] = (struct iovec){(void *)payload, nbytes};
    write->pieces[2] = (struct iovec){&write->tail, checks && nbytes != 0 ? BPS_CHECKSUM_NBYTES : 0};
}

/* Send as much of a write as the socket takes at once; how many bytes, or -1 and errno. */
static inline ssize_t bps_send_at_once(int fd, const struct bps_header *header, const void *payload, size_t nbytes,
                                       int checks)
{
    struct bps_write_pieces write;
    bps_write_pieces(&write, header, payload, nbytes, checks);
    struct msghdr message = {.msg_iov = write.pieces, .msg_iovlen = 3};
    return sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* Send a write whole, of which `done` bytes have been sent. 0 or an errno. */
static inline int bps_send_rest(int fd, const struct bps_header *header, const void *payload, size_t nbytes, int checks,
                                size_t done)
{
    struct bps_write_pieces write;
    bps_write_pieces(&write, header, payload, nbytes, checks);
    for (int i = 0; i < 3; i++) {
        size_t skipped = done < write.pieces[i].iov_len ? done : write.pieces[i].iov_len;
        write.pieces[i].iov_base = (char *)write.pieces[i].iov_base + skipped;
        write.pieces[i].iov_len -= skipped;
        done -= skipped;
    }
    return bps_send_pieces(fd, write.pieces, 3);
}

/* Receive a header, and its checksum, which that of the payload goes on from. As `bps_receive_all`; EBADMSG if it does
 * not fit. */
static inline int bps_checked_receive_header(int fd, struct bps_header *header, uint32_t *checksum)
{
    unsigned char head[sizeof *header + BPS_CHECKSUM_NBYTES];
    int rc = bps_receive_all(fd, head, sizeof head);
    if (rc != 0)
        return rc;
    memcpy(header, head, sizeof *header);
    memcpy(checksum, head + sizeof *header, BPS_CHECKSUM_NBYTES);
    return *checksum == bps_crc32c(0, header, sizeof *header, 0) ? 0 : EBADMSG;
}

/* Receive a payload whole, which follows a header of this checksum. */
static inline int bps_checked_receive_payload(int fd, uint32_t crc, void *payload, size_t nbytes, struct bps_pace *pace,
                                              const uint32_t *closing)
{
    uint32_t said = 0;
    int rc = 0;
    for (size_t got = 0, piece; rc == 0 && got < nbytes; got += piece) {
        piece = bps_checked_piece(nbytes - got, pace);
        rc = bps_receive_paced(fd, (char *)payload + got, piece, pace, closing);
        if (rc == 0)
            crc = bps_crc32c(crc, (char *)payload + got, piece, 0);
    }
    if (rc == 0)
        rc = bps_receive_all(fd, &said, BPS_CHECKSUM_NBYTES);
    return rc != 0 ? rc : said == crc ? 0 : EBADMSG;
}
