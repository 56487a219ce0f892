/* I/O by io_uring: a thread hands the kernel one message of each flow, and takes back what became of them, all by one
 * system call.
 *
 * The kernel's interface is declared here: the headers of a build machine may be older than the kernel that a program
 * meets. Needs Linux 6.1 (IORING_SETUP_DEFER_TASKRUN); elsewhere, and where it is forbidden, `open` fails.
 */
#pragma once

#include <sys/mman.h>

#include "io_thread.h"

#define BPS_URING_ENTRIES 256u
#define BPS_URING_COMPLETIONS 4096u /* one for each flow of a thread, and the bell: with more the kernel allocates */
#define BPS_URING_BELL 1u /* user_data of the read of the bell; else it is a flow's address */

#define BPS_SYS_URING_SETUP 425 /* of every architecture; older headers do not name them */
#define BPS_SYS_URING_ENTER 426
#define BPS_SYS_URING_REGISTER 427
#define BPS_URING_SETUP_CQSIZE (1u << 3)
#define BPS_URING_SETUP_R_DISABLED (1u << 6)
#define BPS_URING_SETUP_SINGLE_ISSUER (1u << 12)
#define BPS_URING_SETUP_DEFER_TASKRUN (1u << 13)
#define BPS_URING_ENTER_GETEVENTS (1u << 0)
#define BPS_URING_ENTER_EXT_ARG (1u << 3)
#define BPS_URING_REGISTER_ENABLE 12
#define BPS_URING_AT_SQ 0ull
#define BPS_URING_AT_CQ 0x8000000ull
#define BPS_URING_AT_SQES 0x10000000ull
enum { BPS_URING_SENDMSG = 9, BPS_URING_RECVMSG = 10, BPS_URING_READ = 22 };

struct bps_uring_sqe {
    uint8_t opcode, flags;
    uint16_t ioprio;
    int32_t fd;
    uint64_t off, addr;
    uint32_t len, msg_flags;
    uint64_t user_data, rest[3];
};

struct bps_uring_cqe {
    uint64_t user_data;
    int32_t res;
    uint32_t flags;
};

struct bps_uring_offsets {
    uint32_t head, tail, mask, entries, a, b, c, d; /* of the submission queue `c` is its array, of the other `b` the entries */
    uint64_t user_addr;
};

struct bps_uring_params {
    uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, resv[3];
    struct bps_uring_offsets sq, cq;
};

struct bps_uring_wait {
    uint64_t sigmask;
    uint32_t sigmask_nbytes, pad;
    uint64_t timeout;
};

_Static_assert(sizeof(struct bps_uring_sqe) == 64 && sizeof(struct bps_uring_cqe) == 16, "the kernel's entries");
_Static_assert(sizeof(struct bps_uring_params) == 120 && sizeof(struct bps_uring_wait) == 24, "the kernel's arguments");

struct bps_uring {
    int fd;
    char *sq, *cq;
    size_t sq_nbytes, cq_nbytes, sqes_nbytes;
    uint32_t *sq_tail, *sq_head, *sq_array, *cq_head, *cq_tail;
    uint32_t sq_mask, cq_mask, n_entries, tail;
    struct bps_uring_sqe *sqes;
    struct bps_uring_cqe *cqes;
    uint64_t rings; /* read from the bell */
};

static inline struct bps_uring *bps_uring_of(const struct bps_io_thread *thread) { return (struct bps_uring *)thread->own; }

static void bps_uring_close(struct bps_io_thread *thread)
{
    struct bps_uring *uring = bps_uring_of(thread);
    if (uring->sqes != NULL)
        munmap(uring->sqes, uring->sqes_nbytes);
    if (uring->cq != NULL)
        munmap(uring->cq, uring->cq_nbytes);
    if (uring->sq != NULL)
        munmap(uring->sq, uring->sq_nbytes);
    close(uring->fd);
    free(uring);
}

/* Map nbytes of the kernel's queues; NULL and errno if that fails. */
static inline char *bps_uring_map(const struct bps_uring *uring, size_t nbytes, uint64_t at)
{
    void *memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, uring->fd, (off_t)at);
    return memory == MAP_FAILED ? NULL : (char *)memory;
}

static int bps_uring_open(struct bps_io_thread *thread)
{
    struct bps_uring_params made = {.flags = BPS_URING_SETUP_CQSIZE | BPS_URING_SETUP_R_DISABLED
                                             | BPS_URING_SETUP_SINGLE_ISSUER | BPS_URING_SETUP_DEFER_TASKRUN,
                                    .cq_entries = BPS_URING_COMPLETIONS};
    struct bps_uring *uring = (struct bps_uring *)calloc(1, sizeof *uring);
    if (uring == NULL)
        return ENOMEM;
    uring->fd = (int)syscall(BPS_SYS_URING_SETUP, BPS_URING_ENTRIES, &made);
    if (uring->fd < 0) {
        int rc = errno;
        free(uring);
        return rc;
    }
    thread->own = uring;
    uring->sq_nbytes = made.sq.c + made.sq_entries * sizeof(uint32_t);
    uring->cq_nbytes = made.cq.b + made.cq_entries * sizeof(struct bps_uring_cqe);
    uring->sqes_nbytes = made.sq_entries * sizeof(struct bps_uring_sqe);
    uring->sq = bps_uring_map(uring, uring->sq_nbytes, BPS_URING_AT_SQ);
    uring->cq = uring->sq == NULL ? NULL : bps_uring_map(uring, uring->cq_nbytes, BPS_URING_AT_CQ);
    char *sqes = uring->cq == NULL ? NULL : bps_uring_map(uring, uring->sqes_nbytes, BPS_URING_AT_SQES);
    if (sqes == NULL) {
        int rc = errno;
        bps_uring_close(thread);
        return rc;
    }
    uring->sqes = (struct bps_uring_sqe *)(void *)sqes;
    uring->sq_head = (uint32_t *)(void *)(uring->sq + made.sq.head);
    uring->sq_tail = (uint32_t *)(void *)(uring->sq + made.sq.tail);
    uring->sq_mask = *(uint32_t *)(void *)(uring->sq + made.sq.mask);
    uring->sq_array = (uint32_t *)(void *)(uring->sq + made.sq.c);
    uring->cq_head = (uint32_t *)(void *)(uring->cq + made.cq.head);
    uring->cq_tail = (uint32_t *)(void *)(uring->cq + made.cq.tail);
    uring->cq_mask = *(uint32_t *)(void *)(uring->cq + made.cq.mask);
    uring->cqes = (struct bps_uring_cqe *)(void *)(uring->cq + made.cq.b);
    uring->n_entries = made.sq_entries;
    return 0;
}

/* Hand over what was queued, and wait for a completion until a moment, if `n_wanted` is 1. */
static inline void bps_uring_enter(struct bps_uring *uring, uint32_t n_wanted, uint64_t until_ns)
{
    uint64_t now_ns = n_wanted != 0 && until_ns != BPS_IO_NEVER ? bps_now_ns() : 0;
    uint64_t left_ns = until_ns > now_ns ? until_ns - now_ns : 0;
    int64_t left[2] = {(int64_t)(left_ns / 1000000000u), (int64_t)(left_ns % 1000000000u)};
    struct bps_uring_wait wait = {.timeout = until_ns == BPS_IO_NEVER ? 0 : (uint64_t)(uintptr_t)left};
    syscall(BPS_SYS_URING_ENTER, uring->fd, uring->tail - bps_load(uring->sq_head), n_wanted,
            BPS_URING_ENTER_GETEVENTS | BPS_URING_ENTER_EXT_ARG, &wait, sizeof wait);
}

/* Queue a request. */
static inline void bps_uring_ask(struct bps_uring *uring, const struct bps_uring_sqe *sqe)
{
    while (uring->tail - bps_load(uring->sq_head) == uring->n_entries)
        bps_uring_enter(uring, 0, 0);
    uint32_t at = uring->tail & uring->sq_mask;
    uring->sqes[at] = *sqe;
    uring->sq_array[at] = at;
    bps_store(uring->sq_tail, ++uring->tail);
}

static inline void bps_uring_hear(struct bps_io_thread *thread)
{
    struct bps_uring *uring = bps_uring_of(thread);
    struct bps_uring_sqe sqe = {.opcode = BPS_URING_READ, .fd = thread->bell, .addr = (uint64_t)(uintptr_t)&uring->rings,
                                .len = sizeof uring->rings, .user_data = BPS_URING_BELL};
    bps_uring_ask(uring, &sqe);
}

/* Only the thread that submits may enable the queues. */
static int bps_uring_begin(struct bps_io_thread *thread)
{
    if (syscall(BPS_SYS_URING_REGISTER, bps_uring_of(thread)->fd, BPS_URING_REGISTER_ENABLE, NULL, 0) != 0)
        return errno;
    bps_uring_hear(thread);
    return 0;
}

static int bps_uring_watch(struct bps_io_thread *thread, struct bps_flow *flow)
{
    (void)thread;
    flow->scratch = flow->sends ? NULL : (char *)malloc(BPS_IO_SCRATCH);
    return flow->sends || flow->scratch != NULL ? 0 : ENOMEM;
}

static void bps_uring_unwatch(struct bps_io_thread *thread, struct bps_flow *flow)
{
    (void)thread;
    free(flow->scratch);
    flow->scratch = NULL;
}

static int bps_uring_run(struct bps_io_thread *thread, struct bps_flow *flow, uint64_t *due_ns)
{
    if (flow->is_over)
        return 0;
    if (flow->look != NULL)
        flow->look(flow, due_ns);
    memset(&flow->message, 0, flow->is_under_way ? 0 : sizeof flow->message);
    if (flow->is_under_way || !flow->next(flow, &flow->message, flow->scratch, due_ns))
        return 0;
    struct bps_uring_sqe sqe = {.opcode = flow->sends ? BPS_URING_SENDMSG : BPS_URING_RECVMSG, .fd = flow->fd,
                                .addr = (uint64_t)(uintptr_t)&flow->message, .len = 1,
                                .msg_flags = (uint32_t)(flow->message.msg_flags | (flow->sends ? MSG_NOSIGNAL : 0)),
                                .user_data = (uint64_t)(uintptr_t)flow};
    flow->is_under_way = 1;
    bps_uring_ask(bps_uring_of(thread), &sqe);
    return 0;
}

static void bps_uring_wait(struct bps_io_thread *thread, uint64_t until_ns)
{
    struct bps_uring *uring = bps_uring_of(thread);
    uint32_t head = *uring->cq_head;
    bps_uring_enter(uring, until_ns != 0 && head == bps_load(uring->cq_tail), until_ns);
    pthread_mutex_lock(&thread->lock);
    thread->is_asleep = 0; /* before flows are rung below */
    pthread_mutex_unlock(&thread->lock);
    for (uint32_t end = bps_load(uring->cq_tail); head != end; head++) {
        struct bps_uring_cqe cqe = uring->cqes[head & uring->cq_mask];
        bps_store(uring->cq_head, head + 1);
        if (cqe.user_data == BPS_URING_BELL) {
            bps_uring_hear(thread);
            continue;
        }
        struct bps_flow *flow = (struct bps_flow *)(uintptr_t)cqe.user_data;
        flow->is_under_way = 0;
        if (cqe.res != -EINTR && cqe.res != -EAGAIN && !flow->moved(flow, cqe.res))
            flow->is_over = 1;
        bps_flow_ring(flow);
    }
}

static const struct bps_io_backend bps_io_by_uring __attribute__((unused)) = {
    bps_uring_open, bps_uring_begin, bps_uring_close, bps_uring_watch, bps_uring_unwatch, bps_uring_run, bps_uring_wait};
