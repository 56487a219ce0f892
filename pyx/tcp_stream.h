/* TCP stream: one-sided writes over a connected socket, straight into the slot that the receiver has bound.
 *
 * The bytes are moved by an I/O thread for each direction. A write that is posted is sent from the caller's memory, and
 * delivered when the peer's kernel has acknowledged every byte (SIOCOUTQ): then credit returns, and the source may be used
 * again. The posting thread itself sends a small write that is the only one, here and in the kernel, and it counts as
 * delivered at once: waking the I/O thread takes longer, and one write in the kernel delays no other. Not where it is a
 * large part of the credit, though: then more would be under way than the credit allows.
 *
 * What comes in is checked against its slot before a byte of payload is taken (`write_in.h`), and reported through the
 * engine's hooks (`hooks.h`). Nothing here waits for anything but the wire, so every posted write completes whatever
 * other nodes do.
 */
#pragma once

#include <fcntl.h>

#include "acks.h"
#include "hooks.h"
#include "io_thread.h"
#include "pace.h"
#include "record.h"
#include "sockets.h"
#include "write_in.h"

#define BPS_AT_ONCE_NBYTES 65536u /* sending a larger payload takes longer than waking the I/O thread */
#define BPS_GATHER_NBYTES ((size_t)128 << 10) /* of a large write: more than a record and BPS_IO_SCRATCH */

struct bps_write {
    struct bps_header header;
    uint64_t address, end, posted_ns, sent_ns;
};

struct bps_stream {
    struct bps_flow out, in;
    uint32_t peer, number;
    void *engine;
    bps_arrived_fn arrived;
    bps_notify_fn notify;
    struct bps_protection how_out, how_in;
    struct bps_pace *pace_out, *pace_in; /* NULL: as fast as it goes */
    struct bps_slots *slots; /* of the link */
    pthread_mutex_t lock;    /* of the queue; the thread's comes after it */
    struct bps_write *queue; /* a ring: unsent from `sent`, unacknowledged from `delivered`, up to `posted` */
    uint64_t capacity, posted, sent, delivered;
    uint64_t backlog; /* bytes of the writes that are not delivered; other threads read it */
    int is_sending; /* a posting thread sends, not the I/O thread */
    int is_started, is_closing, is_lost;
    uint32_t posters; /* changes when `is_sending` ends */
    /* of the flow out, or of the posting thread while `is_sending` */
    struct bps_write_out outgoing;
    int is_under_way; /* `outgoing` is the write at `sent` */
    struct bps_grant grant_out;
    uint64_t handed; /* bytes that the kernel was given so far */
    uint64_t look_ns; /* the next look at what the peer has acknowledged */
    struct bps_acks acks;
    /* of the flow in */
    struct bps_write_in incoming;
    struct bps_grant grant_in;
    int is_gathering;
    struct iovec parts_out[3], parts_in[2];
    struct bps_trace records;
    uint64_t bytes_sent, bytes_received, writes_sent, writes_received, writes_damaged;
};

#define BPS_STREAM_OF(flow_, member)                                                                                   \
    ((struct bps_stream *)(void *)((char *)(flow_)-offsetof(struct bps_stream, member)))

/* Report the end of the connection once, unless this side closes it. */
static inline void bps_stream_lost(struct bps_stream *stream, int code)
{
    pthread_mutex_lock(&stream->lock);
    int is_first = !stream->is_lost && !stream->is_closing;
    stream->is_lost = 1;
    pthread_mutex_unlock(&stream->lock);
    if (is_first)
        stream->notify(stream->engine, BPS_EVENT_LOST, stream->peer, 0, 0, code > 0 ? (uint32_t)code : 0, stream->number);
}

/* -- out --------------------------------------------------------------------------------------------------------------- */

/* A write was sent whole. Under the lock. */
static inline void bps_stream_sent(struct bps_stream *stream)
{
    struct bps_write *write = &stream->queue[stream->sent++ % stream->capacity];
    stream->is_under_way = 0;
    write->end = stream->handed;
    write->sent_ns = bps_now_ns();
    bps_count(&stream->bytes_sent, bps_wire_nbytes(&stream->how_out, write->header.nbytes));
    bps_count(&stream->writes_sent, 1);
}

/* Report the writes whose last byte the peer's kernel has acknowledged; some were sent, so no posting thread is sending. */
static inline void bps_stream_deliver(struct bps_stream *stream)
{
    uint64_t unacknowledged = bps_unacknowledged(stream->out.fd); /* more than was sent, where the kernel counts its own */
    uint64_t acknowledged = unacknowledged < stream->handed ? stream->handed - unacknowledged : 0;
    for (;;) {
        pthread_mutex_lock(&stream->lock); /* `post` may be moving the queue */
        struct bps_write write = stream->queue[stream->delivered % stream->capacity];
        int is_delivered = stream->delivered < stream->sent && write.end <= acknowledged;
        stream->delivered += is_delivered;
        bps_count(&stream->backlog, is_delivered ? 0 - write.header.nbytes : 0);
        pthread_mutex_unlock(&stream->lock);
        if (!is_delivered)
            return;
        uint64_t now_ns = bps_now_ns();
        bps_acks_learn(&stream->acks, now_ns - write.sent_ns);
        bps_record_add(&stream->records, BPS_WIRE, (int)stream->peer, write.header.slot, write.header.round,
                       write.header.nbytes, write.posted_ns, now_ns);
        stream->notify(stream->engine, BPS_EVENT_DELIVERED, stream->peer, write.header.slot, write.header.round, 0,
                       write.header.nbytes);
    }
}

/* When the oldest write that was not acknowledged was sent; 0: there is none. */
static inline uint64_t bps_stream_awaits(struct bps_stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    uint64_t sent_ns = stream->delivered < stream->sent ? stream->queue[stream->delivered % stream->capacity].sent_ns : 0;
    pthread_mutex_unlock(&stream->lock);
    return sent_ns;
}

/* Look at what was acknowledged, if it is time, and set when to look again. */
static void bps_stream_look(struct bps_flow *flow, uint64_t *due_ns)
{
    struct bps_stream *stream = BPS_STREAM_OF(flow, out);
    uint64_t sent_ns = bps_stream_awaits(stream), now_ns = sent_ns != 0 ? bps_now_ns() : 0;
    if (sent_ns != 0 && now_ns >= stream->look_ns) {
        bps_stream_deliver(stream);
        sent_ns = bps_stream_awaits(stream);
        stream->look_ns = sent_ns != 0 ? now_ns + bps_acks_pause(&stream->acks, sent_ns, now_ns) : 0;
    }
    if (sent_ns != 0 && stream->look_ns < *due_ns)
        *due_ns = stream->look_ns;
}

/* Begin the next write, unless one is under way; whether the I/O thread is to send one. */
static inline int bps_stream_begin(struct bps_stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    int is_ours = !stream->is_sending && !stream->is_closing;
    if (is_ours && !stream->is_under_way && stream->sent < stream->posted) {
        const struct bps_write *write = &stream->queue[stream->sent % stream->capacity];
        bps_write_out_begin(&stream->outgoing, &write->header, (const void *)(uintptr_t)write->address);
        stream->is_under_way = 1;
    }
    int is_under_way = is_ours && stream->is_under_way;
    pthread_mutex_unlock(&stream->lock);
    return is_under_way;
}

static int bps_stream_next_out(struct bps_flow *flow, struct msghdr *message, char *scratch, uint64_t *due_ns)
{
    struct bps_stream *stream = BPS_STREAM_OF(flow, out);
    (void)scratch;
    if (!bps_stream_begin(stream))
        return 0;
    if (stream->outgoing.left == 0 && bps_write_out_fill(&stream->outgoing, &stream->how_out) != 0) {
        bps_stream_lost(stream, EIO);
        return 0;
    }
    uint64_t turn_ns = BPS_IO_NEVER;
    size_t most = bps_grant_of(&stream->grant_out, stream->pace_out, stream->outgoing.left, &turn_ns);
    *due_ns = turn_ns < *due_ns ? turn_ns : *due_ns;
    message->msg_iov = stream->parts_out;
    message->msg_iovlen = bps_write_out_pieces(&stream->outgoing, most, stream->parts_out);
    message->msg_flags = most > BPS_AT_ONCE_NBYTES ? MSG_WAITALL : 0;
    return most != 0;
}

static int bps_stream_moved_out(struct bps_flow *flow, ssize_t n)
{
    struct bps_stream *stream = BPS_STREAM_OF(flow, out);
    if (n < 0) {
        bps_stream_lost(stream, (int)-n);
        return 0;
    }
    bps_write_out_sent(&stream->outgoing, (size_t)n);
    bps_grant_used(&stream->grant_out, stream->pace_out, (size_t)n);
    stream->handed += (uint64_t)n;
    if (bps_write_out_is_sent(&stream->outgoing)) {
        pthread_mutex_lock(&stream->lock);
        bps_stream_sent(stream);
        pthread_mutex_unlock(&stream->lock);
        stream->look_ns = 0;
    }
    return 1;
}

/* -- posting ------------------------------------------------------------------------------------------------------------ */

/* Queue a write. 0 or ENOMEM. Under the lock. */
static inline int bps_stream_queue(struct bps_stream *stream, const struct bps_write *write)
{
    if (stream->posted - stream->delivered == stream->capacity) {
        struct bps_write *grown = (struct bps_write *)calloc(2 * stream->capacity, sizeof *grown);
        if (grown == NULL)
            return ENOMEM;
        for (uint64_t i = stream->delivered; i < stream->posted; i++)
            grown[i % (2 * stream->capacity)] = stream->queue[i % stream->capacity];
        free(stream->queue);
        stream->queue = grown;
        stream->capacity *= 2;
    }
    stream->queue[stream->posted++ % stream->capacity] = *write;
    bps_count(&stream->backlog, write->header.nbytes);
    return 0;
}

/* Whether the posting thread may send a write of nbytes itself. Under the lock. */
static inline int bps_stream_may_send_at_once(const struct bps_stream *stream, uint64_t nbytes)
{
    return stream->is_started && !stream->is_sending && stream->delivered == stream->posted && nbytes <= BPS_AT_ONCE_NBYTES
           && stream->pace_out == NULL && bps_unacknowledged(stream->out.fd) == 0;
}

/* Send the write at `sent`, which was queued alone, as far as the socket takes it; whether it has taken all. Under the
 * lock, which is dropped meanwhile. */
static inline int bps_stream_send_at_once(struct bps_stream *stream, const struct bps_write *write)
{
    struct bps_write_out *outgoing = &stream->outgoing;
    ssize_t n = 0;
    stream->is_sending = stream->is_under_way = 1;
    bps_write_out_begin(outgoing, &write->header, (const void *)(uintptr_t)write->address);
    pthread_mutex_unlock(&stream->lock);
    while (n >= 0 && !bps_write_out_is_sent(outgoing)) {
        struct msghdr message = {.msg_iov = stream->parts_out};
        if (outgoing->left == 0 && bps_write_out_fill(outgoing, &stream->how_out) != 0)
            break; /* it fails again in the I/O thread, which reports it */
        message.msg_iovlen = bps_write_out_pieces(outgoing, outgoing->left, stream->parts_out);
        n = sendmsg(stream->out.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0) {
            bps_write_out_sent(outgoing, (size_t)n);
            stream->handed += (uint64_t)n;
        }
    }
    pthread_mutex_lock(&stream->lock);
    stream->is_sending = 0;
    bps_add(&stream->posters, 1);
    if (!bps_write_out_is_sent(outgoing))
        return 0;
    bps_stream_sent(stream);
    stream->delivered++;
    bps_count(&stream->backlog, 0 - write->header.nbytes);
    bps_record_add(&stream->records, BPS_WIRE, (int)stream->peer, write->header.slot, write->header.round,
                   write->header.nbytes, write->posted_ns, bps_now_ns());
    return 1;
}

/* `bps_post_fn`: ESHUTDOWN if the stream is closed, EINVAL for a slot that it does not have, ENOMEM. */
static int bps_stream_post(void *to, uint32_t slot, uint32_t round, uint32_t flags, uint64_t address, uint64_t nbytes,
                           int may_be_at_once, int *is_delivered)
{
    struct bps_stream *stream = (struct bps_stream *)to;
    if (slot >= stream->slots->n)
        return EINVAL;
    struct bps_write write = {.header = {.magic = BPS_WIRE_MAGIC, .slot = slot, .round = round, .flags = flags,
                                         .immediate = bps_immediate(slot, round, stream->slots->epoch),
                                         .epoch = stream->slots->epoch, .nbytes = flags & BPS_FLAG_EMPTY ? 0 : nbytes},
                              .address = address, .end = UINT64_MAX, .posted_ns = bps_now_ns()};
    pthread_mutex_lock(&stream->lock);
    int is_alone = may_be_at_once && !stream->is_closing && bps_stream_may_send_at_once(stream, write.header.nbytes);
    int is_first = stream->sent == stream->posted; /* otherwise the I/O thread, or another posting thread, goes on with it */
    int rc = stream->is_closing ? ESHUTDOWN : bps_stream_queue(stream, &write);
    /* The kernel then has its own copy, and nothing else to send: waiting for the acknowledgement only delays credit. */
    if (rc == 0 && is_alone)
        *is_delivered = bps_stream_send_at_once(stream, &write);
    if (is_first && stream->sent < stream->posted && stream->is_started && !stream->is_closing)
        bps_flow_ring(&stream->out);
    int is_closing = stream->is_closing;
    pthread_mutex_unlock(&stream->lock);
    if (is_alone && is_closing)
        bps_wake(&stream->posters, INT_MAX);
    return rc;
}

/* -- in ----------------------------------------------------------------------------------------------------------------- */

/* How many of nbytes of the present write are received at once. While much is to come, the kernel gathers packets before
 * it wakes the thread: each wake-up costs as much as copying several of them. As much as is gathered always remains to
 * come, for otherwise nothing would wake the thread. */
static inline size_t bps_stream_gather(struct bps_stream *stream, size_t nbytes)
{
    uint64_t left = bps_write_in_left(&stream->incoming);
    int gathers = stream->pace_in == NULL && left >= 2 * BPS_GATHER_NBYTES;
    if (gathers != stream->is_gathering)
        bps_gather(stream->in.fd, gathers ? (int)BPS_GATHER_NBYTES : 1);
    stream->is_gathering = gathers;
    return gathers && nbytes > left - BPS_GATHER_NBYTES ? (size_t)(left - BPS_GATHER_NBYTES) : nbytes;
}

static int bps_stream_next_in(struct bps_flow *flow, struct msghdr *message, char *scratch, uint64_t *due_ns)
{
    struct bps_stream *stream = BPS_STREAM_OF(flow, in);
    struct iovec *parts = stream->parts_in;
    size_t wanted = bps_write_in_want(&stream->incoming, &stream->how_in, &parts[0].iov_base);
    parts[0].iov_len = bps_stream_gather(stream, wanted);
    message->msg_iov = parts;
    message->msg_iovlen = 1;
    if (stream->incoming.stage == BPS_WRITE_IN_PAYLOAD && stream->pace_in != NULL) { /* headers are not paced */
        parts[0].iov_len = bps_grant_of(&stream->grant_in, stream->pace_in, parts[0].iov_len, due_ns);
    } else if (parts[0].iov_len > BPS_AT_ONCE_NBYTES) {
        message->msg_flags = MSG_WAITALL;
    } else if (stream->pace_in == NULL) {
        parts[1] = (struct iovec){scratch, BPS_IO_SCRATCH};
        message->msg_iovlen = 2;
    }
    return parts[0].iov_len != 0;
}

/* A write has arrived whole; is_more: something has come behind it. */
static inline void bps_stream_report(struct bps_stream *stream, int is_more)
{
    struct bps_header header = stream->incoming.header;
    bps_acknowledge(stream->in.fd);
    bps_count(&stream->bytes_received, bps_wire_nbytes(&stream->how_in, header.nbytes));
    bps_count(&stream->writes_received, 1);
    bps_record_add(&stream->records, BPS_RECEIVE, (int)stream->peer, header.slot, header.round, header.nbytes,
                   stream->incoming.begin_ns, bps_now_ns());
    if (header.nbytes <= BPS_AT_ONCE_NBYTES && (is_more || bps_has_arrived(stream->in.fd)))
        header.flags |= BPS_MORE_ARRIVED;
    stream->arrived(stream->engine, stream->peer, header.slot, header.round, header.flags);
}

/* n more of the bytes that are wanted have come; is_more: others behind them. 0, or the errno that ends the connection. */
static inline int bps_stream_take(struct bps_stream *stream, size_t n, int is_more)
{
    int rc = bps_write_in_got(&stream->incoming, &stream->how_in, stream->slots, n);
    if (rc == BPS_WRITE_IN_WHOLE)
        bps_stream_report(stream, is_more);
    return rc > 0 ? rc : 0;
}

static int bps_stream_moved_in(struct bps_flow *flow, ssize_t n)
{
    struct bps_stream *stream = BPS_STREAM_OF(flow, in);
    int rc = 0;
    if (n <= 0) {
        bps_stream_lost(stream, n < 0 ? (int)-n : bps_write_in_cut(&stream->incoming));
        return 0;
    }
    size_t came = (size_t)n, direct = came < stream->parts_in[0].iov_len ? came : stream->parts_in[0].iov_len;
    if (stream->incoming.stage == BPS_WRITE_IN_PAYLOAD)
        bps_grant_used(&stream->grant_in, stream->pace_in, direct);
    rc = bps_stream_take(stream, direct, came > direct);
    const char *from = (const char *)stream->parts_in[1].iov_base;
    for (size_t left = came - direct; rc == 0 && left != 0;) {
        void *at;
        size_t portion = bps_write_in_want(&stream->incoming, &stream->how_in, &at);
        portion = portion < left ? portion : left;
        memcpy(at, from, portion);
        from += portion;
        left -= portion;
        rc = bps_stream_take(stream, portion, left != 0);
    }
    if (rc == EBADMSG)
        bps_count(&stream->writes_damaged, 1);
    if (rc != 0)
        bps_stream_lost(stream, rc);
    return rc == 0;
}

/* -- the stream --------------------------------------------------------------------------------------------------------- */

/* Make a stream over which the peer writes into these slots, which outlive it; the rest is zero, and set before
 * `bps_stream_start`. 0 or ENOMEM. */
static inline int bps_stream_init(struct bps_stream *stream, struct bps_slots *slots)
{
    stream->slots = slots;
    stream->out = (struct bps_flow){.fd = -1, .sends = 1, .look = bps_stream_look, .next = bps_stream_next_out,
                                    .moved = bps_stream_moved_out};
    stream->in = (struct bps_flow){.fd = -1, .next = bps_stream_next_in, .moved = bps_stream_moved_in};
    pthread_mutex_init(&stream->lock, NULL);
    stream->capacity = 64;
    stream->queue = (struct bps_write *)calloc(stream->capacity, sizeof *stream->queue);
    return stream->queue == NULL ? ENOMEM : 0;
}

/* Move bytes from now on, those of each direction by a thread. Once. 0 or an errno; then the connection is cut. */
static inline int bps_stream_start(struct bps_stream *stream, struct bps_io_thread *out, struct bps_io_thread *in)
{
    int copied = out == in ? fcntl(stream->out.fd, F_DUPFD_CLOEXEC, 0) : -1; /* epoll watches a descriptor once */
    if (out == in && copied < 0)
        return errno;
    stream->in.fd = copied >= 0 ? copied : stream->out.fd;
    int rc = bps_flow_start(&stream->out, out);
    if (rc == 0)
        rc = bps_flow_start(&stream->in, in);
    if (rc != 0) { /* it can only be closed now */
        shutdown(stream->out.fd, SHUT_RDWR);
        bps_flow_stop(&stream->out);
        return rc;
    }
    pthread_mutex_lock(&stream->lock);
    stream->is_started = 1;
    if (stream->sent < stream->posted)
        bps_flow_ring(&stream->out);
    pthread_mutex_unlock(&stream->lock);
    return 0;
}

/* Cut the connection, drop the writes that were not delivered, and close the socket. After this returns, no thread calls
 * the engine's hooks for the stream. */
static inline void bps_stream_close(struct bps_stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    stream->is_closing = 1;
    pthread_mutex_unlock(&stream->lock);
    shutdown(stream->out.fd, SHUT_RDWR);
    bps_flow_stop(&stream->out);
    bps_flow_stop(&stream->in);
    pthread_mutex_lock(&stream->lock);
    while (stream->is_sending) { /* the posting thread does not block */
        uint32_t seen = bps_load(&stream->posters);
        pthread_mutex_unlock(&stream->lock);
        bps_wait(&stream->posters, seen, 1000000);
        pthread_mutex_lock(&stream->lock);
    }
    pthread_mutex_unlock(&stream->lock);
    if (stream->in.fd != stream->out.fd)
        close(stream->in.fd);
    close(stream->out.fd);
    stream->out.fd = stream->in.fd = -1;
}

static inline void bps_stream_free(struct bps_stream *stream)
{
    free(stream->queue);
    free(stream->records.records);
    pthread_mutex_destroy(&stream->lock);
    free(stream);
}
