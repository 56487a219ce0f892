/* I/O by epoll, edge by edge: a flow moves bytes until its socket has no more, or takes no more.
 *
 * The only flow of a thread moves large messages by calls that block, for BPS_EPOLL_BLOCKS_US at most: the kernel then goes
 * on with it as soon as there are bytes or room, which between two nodes of one machine takes a tenth less time.
 */
#pragma once

#include <sys/epoll.h>

#include "io_thread.h"

#define BPS_SYS_EPOLL_PWAIT2 441 /* of every architecture; older headers do not name it */
#define BPS_EPOLL_BLOCKS_US 5000 /* a flow that is started on the thread meanwhile waits so long */

static inline int bps_epoll_of(const struct bps_io_thread *thread) { return (int)(intptr_t)thread->own - 1; }

static int bps_epoll_open(struct bps_io_thread *thread)
{
    struct epoll_event event = {.events = EPOLLIN, .data = {.ptr = NULL}};
    int fd = epoll_create1(EPOLL_CLOEXEC);
    if (fd < 0)
        return errno;
    if (epoll_ctl(fd, EPOLL_CTL_ADD, thread->bell, &event) != 0) {
        int rc = errno;
        close(fd);
        return rc;
    }
    thread->own = (void *)(intptr_t)(fd + 1);
    return 0;
}

static void bps_epoll_close(struct bps_io_thread *thread) { close(bps_epoll_of(thread)); }

static int bps_epoll_watch(struct bps_io_thread *thread, struct bps_flow *flow)
{
    struct epoll_event event = {.events = EPOLLET | (flow->sends ? EPOLLOUT : EPOLLIN | EPOLLRDHUP), .data = {.ptr = flow}};
    struct timeval blocks = {.tv_usec = BPS_EPOLL_BLOCKS_US};
    if (setsockopt(flow->fd, SOL_SOCKET, flow->sends ? SO_SNDTIMEO : SO_RCVTIMEO, &blocks, sizeof blocks) != 0)
        return errno;
    return epoll_ctl(bps_epoll_of(thread), EPOLL_CTL_ADD, flow->fd, &event) != 0 ? errno : 0;
}

static void bps_epoll_unwatch(struct bps_io_thread *thread, struct bps_flow *flow)
{
    if (!flow->is_over)
        epoll_ctl(bps_epoll_of(thread), EPOLL_CTL_DEL, flow->fd, NULL);
}

static inline size_t bps_epoll_nbytes(const struct msghdr *message)
{
    size_t nbytes = 0;
    for (size_t i = 0; i < message->msg_iovlen; i++)
        nbytes += message->msg_iov[i].iov_len;
    return nbytes;
}

static int bps_epoll_run(struct bps_io_thread *thread, struct bps_flow *flow, uint64_t *due_ns)
{
    for (size_t moved = 0; !flow->is_over;) {
        struct msghdr message = {0};
        if (moved >= BPS_IO_TURN)
            return 1;
        *due_ns = BPS_IO_NEVER;
        if (flow->look != NULL)
            flow->look(flow, due_ns);
        if (!flow->next(flow, &message, thread->scratch, due_ns) || !flow->is_ready)
            return 0;
        int flags = message.msg_flags & MSG_WAITALL && bps_io_is_alone(thread) ? MSG_WAITALL : MSG_DONTWAIT;
        ssize_t n = flow->sends ? sendmsg(flow->fd, &message, flags | MSG_NOSIGNAL) : recvmsg(flow->fd, &message, flags);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            flow->is_ready = 0;
            return 0;
        }
        /* Fewer bytes than were asked for: there were no more. But no further edge tells of an end that has come already. */
        if (!flow->sends && n > 0 && (size_t)n < bps_epoll_nbytes(&message) && !flow->is_ending)
            flow->is_ready = 0;
        moved += BPS_IO_CALL + (n > 0 ? (size_t)n : 0);
        if (!flow->moved(flow, n < 0 ? -errno : n)) {
            bps_epoll_unwatch(thread, flow);
            flow->is_over = 1;
        }
    }
    return 0;
}

/* Wait for events. Kernels before 5.11, and containers that forbid what they do not know, round up to milliseconds. */
static inline int bps_epoll_events(int fd, struct epoll_event *events, uint64_t until_ns)
{
    static int is_missing;
    uint64_t now_ns = bps_now_ns(), left_ns = until_ns > now_ns ? until_ns - now_ns : 0;
    struct timespec left = {(time_t)(left_ns / 1000000000u), (long)(left_ns % 1000000000u)};
    if (!__atomic_load_n(&is_missing, __ATOMIC_RELAXED)) {
        long n = syscall(BPS_SYS_EPOLL_PWAIT2, fd, events, BPS_IO_EVENTS, until_ns == BPS_IO_NEVER ? NULL : &left, NULL,
                         (size_t)0);
        if (n >= 0 || errno == EINTR)
            return (int)n;
        __atomic_store_n(&is_missing, 1, __ATOMIC_RELAXED);
    }
    uint64_t left_ms = (left_ns + 999999u) / 1000000u;
    return epoll_wait(fd, events, BPS_IO_EVENTS, until_ns == BPS_IO_NEVER ? -1 : left_ms < 60000 ? (int)left_ms : 60000);
}

static void bps_epoll_wait(struct bps_io_thread *thread, uint64_t until_ns)
{
    struct epoll_event events[BPS_IO_EVENTS];
    int n = bps_epoll_events(bps_epoll_of(thread), events, until_ns);
    pthread_mutex_lock(&thread->lock);
    thread->is_asleep = 0;
    for (int i = 0; i < n; i++) {
        struct bps_flow *flow = (struct bps_flow *)events[i].data.ptr;
        if (flow == NULL) {
            bps_io_answer(thread);
            continue;
        }
        flow->is_ready = 1;
        flow->is_ending |= (events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
        bps_io_queue(thread, flow);
    }
    pthread_mutex_unlock(&thread->lock);
}

static const struct bps_io_backend bps_io_by_epoll __attribute__((unused)) = {
    bps_epoll_open, NULL, bps_epoll_close, bps_epoll_watch, bps_epoll_unwatch, bps_epoll_run, bps_epoll_wait};
