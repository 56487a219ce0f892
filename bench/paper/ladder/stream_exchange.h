/* Stream exchange: what `exchange.h` does, over connected sockets: what tcp makes of the same partitions.
 *
 * A partition travels as a header and its bytes, straight from the source and into the destination. An end sends and
 * receives at once; all ends share one thread, which sleeps in poll when no socket takes or gives anything.
 */
#ifndef BPS_STREAM_EXCHANGE_H
#define BPS_STREAM_EXCHANGE_H

#include <sys/socket.h>
#include <sys/uio.h>

#include "futex.h"
#include <poll.h>

struct bps_stream_header {
    uint32_t part, nbytes;
};

struct bps_stream_part {
    char *source, *destination;
    uint32_t nbytes;
};

struct bps_stream_end {
    int fd, is_service;
    uint32_t n_parts;
    struct bps_stream_part *parts;
    uint32_t *queue; /* partitions to send, n_parts of them at most */
    uint64_t queued, taken, arrived, step;
    uint64_t sent, got; /* of the partition under way, header included */
    struct bps_stream_header outgoing, incoming;
};

/* Send what the socket takes. How many bytes, or a negative errno. */
static inline int64_t bps_stream_send(struct bps_stream_end *end)
{
    int64_t total = 0;
    while (end->taken < end->queued) {
        struct bps_stream_part *part = &end->parts[end->queue[end->taken % end->n_parts]];
        end->outgoing = (struct bps_stream_header){end->queue[end->taken % end->n_parts], part->nbytes};
        uint64_t head = sizeof end->outgoing, in_body = end->sent > head ? end->sent - head : 0;
        struct iovec pieces[2] = {{(char *)&end->outgoing + end->sent, head - end->sent},
                                  {part->source + in_body, part->nbytes - in_body}};
        int first = end->sent >= head;
        struct msghdr message = {0};
        message.msg_iov = &pieces[first];
        message.msg_iovlen = 2 - (size_t)first;
        ssize_t n = sendmsg(end->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0)
            return errno == EAGAIN || errno == EINTR ? total : -(int64_t)errno;
        total += n;
        end->sent += (uint64_t)n;
        if (end->sent < head + part->nbytes)
            return total;
        end->sent = 0;
        end->taken++;
    }
    return total;
}

/* Receive what the socket has. How many bytes, or a negative errno. */
static inline int64_t bps_stream_receive(struct bps_stream_end *end)
{
    int64_t total = 0;
    const uint64_t head = sizeof end->incoming;
    for (;;) {
        char *to = (char *)&end->incoming + end->got;
        uint64_t wanted = head - end->got;
        if (end->got >= head) {
            to = end->parts[end->incoming.part].destination + (end->got - head);
            wanted = end->incoming.nbytes - (end->got - head);
        }
        ssize_t n = recv(end->fd, to, wanted, MSG_DONTWAIT);
        if (n == 0)
            return -ECONNRESET;
        if (n < 0)
            return errno == EAGAIN || errno == EINTR ? total : -(int64_t)errno;
        total += n;
        end->got += (uint64_t)n;
        if (end->got == head && (end->incoming.part >= end->n_parts
                                 || end->incoming.nbytes != end->parts[end->incoming.part].nbytes))
            return -EPROTO;
        if (end->got < head || end->got < head + end->incoming.nbytes)
            continue;
        end->got = 0;
        end->arrived++;
        if (end->is_service)
            end->queue[end->queued++ % end->n_parts] = end->incoming.part;
        else if (end->arrived == end->step * end->n_parts)
            return total;
    }
}

static inline int bps_stream_done(const struct bps_stream_end *ends, uint32_t n_ends)
{
    for (uint32_t e = 0; e < n_ends; e++)
        if (ends[e].arrived < ends[e].step * ends[e].n_parts || ends[e].taken < ends[e].step * ends[e].n_parts)
            return 0;
    return 1;
}

static inline void bps_stream_begin(struct bps_stream_end *ends, uint32_t n_ends)
{
    for (uint32_t e = 0; e < n_ends; e++) {
        ends[e].step++;
        for (uint32_t i = 0; !ends[e].is_service && i < ends[e].n_parts; i++)
            ends[e].queue[ends[e].queued++ % ends[e].n_parts] = i;
    }
}

/* Go on with a step until it is done (0), for slice_ns (EAGAIN), or until something fails (an errno). *moved_ns: when
 * a byte last moved. waited: room for n_ends. */
static inline int bps_stream_go_on(struct bps_stream_end *ends, uint32_t n_ends, struct pollfd *waited,
                                   uint64_t slice_ns, uint64_t *moved_ns)
{
    uint64_t begin_ns = bps_now_ns();
    while (!bps_stream_done(ends, n_ends)) {
        int64_t total = 0;
        for (uint32_t e = 0; e < n_ends; e++) {
            int64_t received = bps_stream_receive(&ends[e]), sent = received < 0 ? 0 : bps_stream_send(&ends[e]);
            if (received < 0 || sent < 0)
                return (int)-(received < 0 ? received : sent);
            total += received + sent;
        }
        uint64_t now_ns = bps_now_ns();
        if (total > 0)
            *moved_ns = now_ns;
        if (now_ns - begin_ns > slice_ns)
            return EAGAIN;
        if (total > 0)
            continue;
        for (uint32_t e = 0; e < n_ends; e++)
            waited[e] = (struct pollfd){ends[e].fd, (short)(POLLIN | (ends[e].taken < ends[e].queued ? POLLOUT : 0)), 0};
        if (poll(waited, n_ends, (int)(slice_ns / 1000000)) < 0 && errno != EINTR)
            return errno;
    }
    return 0;
}

#endif
