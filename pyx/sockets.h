/* Sockets: the options and queries of a connected TCP socket that a stream needs. */
#pragma once

#include <errno.h>
#include <stdint.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "pace.h"

static inline void bps_tune(int fd, int send_buffer_nbytes)
{
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (send_buffer_nbytes > 0)
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &send_buffer_nbytes, sizeof send_buffer_nbytes);
}

/* Acknowledge what has arrived now: the sender's credit waits for it. */
static inline void bps_acknowledge(int fd)
{
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_QUICKACK, &one, sizeof one);
}

static inline uint64_t bps_unacknowledged(int fd)
{
    int nbytes = 0;
    return ioctl(fd, SIOCOUTQ, &nbytes) == 0 && nbytes > 0 ? (uint64_t)nbytes : 0;
}

/* Whether there is something to receive. */
static inline int bps_has_arrived(int fd)
{
    int nbytes = 0;
    return ioctl(fd, FIONREAD, &nbytes) == 0 && nbytes > 0;
}

/* Send n pieces whole, one after another; they are used up. 0 or an errno. */
static inline int bps_send_pieces(int fd, struct iovec *pieces, size_t n)
{
    struct msghdr message = {0};
    size_t left = 0;
    for (size_t i = 0; i < n; i++)
        left += pieces[i].iov_len;
    message.msg_iov = pieces;
    message.msg_iovlen = n;
    while (left > 0) {
        ssize_t n = sendmsg(fd, &message, MSG_NOSIGNAL);
        if (n < 0) {
            if (errno == EINTR)
                continue;
            return errno;
        }
        left -= (size_t)n;
        while (message.msg_iovlen > 0 && (size_t)n >= message.msg_iov->iov_len) {
            n -= (ssize_t)message.msg_iov->iov_len;
            message.msg_iov++;
            message.msg_iovlen--;
        }
        if (n > 0) {
            message.msg_iov->iov_base = (char *)message.msg_iov->iov_base + n;
            message.msg_iov->iov_len -= (size_t)n;
        }
    }
    return 0;
}

/* Receive nbytes whole. 0, an errno, or -1 when the peer ended the connection before the first byte. */
static inline int bps_receive_all(int fd, void *buffer, size_t nbytes)
{
    size_t got = 0;
    while (got < nbytes) {
        ssize_t n = recv(fd, (char *)buffer + got, nbytes - got, MSG_WAITALL);
        if (n == 0)
            return got == 0 ? -1 : ECONNRESET;
        if (n < 0) {
            if (errno == EINTR)
                continue;
            return errno;
        }
        got += (size_t)n;
    }
    return 0;
}

/* How many of the bytes that are left go at once, as *pace allows (NULL: all). */
static inline size_t bps_piece(size_t left, const struct bps_pace *pace)
{
    return pace != NULL && pace->piece_nbytes < left ? pace->piece_nbytes : left;
}

/* Send header and payload whole, piece by piece. 0 or an errno; ECANCELED once *closing is set. */
static inline int bps_send_paced(int fd, void *header, size_t header_nbytes, void *payload, size_t nbytes,
                                 struct bps_pace *pace, const uint32_t *closing)
{
    int rc = 0;
    for (size_t done = 0; rc == 0 && (header_nbytes != 0 || done < nbytes); header_nbytes = 0) {
        size_t piece = bps_piece(nbytes - done, pace);
        struct iovec pieces[2] = {{header, header_nbytes}, {(char *)payload + done, piece}};
        if (pace != NULL)
            rc = bps_await_turn(pace, header_nbytes + piece, closing);
        if (rc == 0)
            rc = bps_send_pieces(fd, pieces, 2);
        done += piece;
    }
    return rc;
}

static inline int bps_receive_paced(int fd, void *buffer, size_t nbytes, struct bps_pace *pace,
                                    const uint32_t *closing)
{
    int rc = 0;
    for (size_t got = 0, piece; rc == 0 && got < nbytes; got += piece) {
        piece = bps_piece(nbytes - got, pace);
        if (pace != NULL)
            rc = bps_await_turn(pace, piece, closing);
        if (rc == 0)
            rc = bps_receive_all(fd, (char *)buffer + got, piece);
    }
    return rc;
}
