/* Verbs: loads libibverbs by dlopen, and has its inline calls, for every module that posts to a queue pair.
 *
 * `bps_verbs_open` finds the library and fills this translation unit's table; calls go through it as
 * bps_verbs.create_qp(...). Call it once, under the GIL, before anything else here. It calls ibv_fork_init first, so
 * that a fork while memory is registered leaves the parent's pages where the device expects them (kernels from 5.12 on
 * do not need it, and it does nothing).
 *
 * Posting, polling and arming are slots in the context's operations; the helpers below call them directly, take no lock
 * of ours, allocate nothing and return 0 or a positive errno. Immediates are in host order here, big endian on the
 * wire. Any thread: providers lock each queue themselves.
 */
#pragma once

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* ppoll */
#endif
#include <dlfcn.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "verbs_abi.h"

#define BPS_VERBS_LIBRARY "libibverbs.so.1"

/* X(result, name without ibv_, parameters) */
#define BPS_VERBS_NEEDED(X) \
    X(int, fork_init, (void)) \
    X(struct bps_ibv_device **, get_device_list, (int *)) \
    X(void, free_device_list, (struct bps_ibv_device **)) \
    X(struct bps_ibv_context *, open_device, (struct bps_ibv_device *)) \
    X(int, close_device, (struct bps_ibv_context *)) \
    X(int, query_device, (struct bps_ibv_context *, struct bps_ibv_device_attr *)) \
    X(int, query_port, (struct bps_ibv_context *, uint8_t, struct bps_ibv_port_attr *)) \
    X(int, query_gid, (struct bps_ibv_context *, uint8_t, int, union bps_ibv_gid *)) \
    X(int, get_async_event, (struct bps_ibv_context *, struct bps_ibv_async_event *)) \
    X(void, ack_async_event, (struct bps_ibv_async_event *)) \
    X(const char *, event_type_str, (int)) \
    X(struct bps_ibv_pd *, alloc_pd, (struct bps_ibv_context *)) \
    X(int, dealloc_pd, (struct bps_ibv_pd *)) \
    X(struct bps_ibv_mr *, reg_mr, (struct bps_ibv_pd *, void *, size_t, int)) \
    X(int, dereg_mr, (struct bps_ibv_mr *)) \
    X(struct bps_ibv_comp_channel *, create_comp_channel, (struct bps_ibv_context *)) \
    X(int, destroy_comp_channel, (struct bps_ibv_comp_channel *)) \
    X(struct bps_ibv_cq *, create_cq, (struct bps_ibv_context *, int, void *, struct bps_ibv_comp_channel *, int)) \
    X(int, resize_cq, (struct bps_ibv_cq *, int)) \
    X(int, destroy_cq, (struct bps_ibv_cq *)) \
    X(int, get_cq_event, (struct bps_ibv_comp_channel *, struct bps_ibv_cq **, void **)) \
    X(void, ack_cq_events, (struct bps_ibv_cq *, unsigned int)) \
    X(struct bps_ibv_qp *, create_qp, (struct bps_ibv_pd *, struct bps_ibv_qp_init_attr *)) \
    X(int, modify_qp, (struct bps_ibv_qp *, struct bps_ibv_qp_attr *, int)) \
    X(int, query_qp, (struct bps_ibv_qp *, struct bps_ibv_qp_attr *, int, struct bps_ibv_qp_init_attr *)) \
    X(int, destroy_qp, (struct bps_ibv_qp *))

/* NULL where the library is older (rdma-core 28, 34 and 36 brought them) */
#define BPS_VERBS_OPTIONAL(X) \
    X(struct bps_ibv_mr *, reg_mr_iova2, (struct bps_ibv_pd *, void *, size_t, uint64_t, unsigned int)) \
    X(struct bps_ibv_mr *, reg_dmabuf_mr, (struct bps_ibv_pd *, uint64_t, size_t, uint64_t, int, int)) \
    X(int, is_fork_initialized, (void))

#define BPS_VERBS_FIELD(result, name, parameters) result(*name) parameters;
static struct bps_verbs_table {
    void *library; /* NULL until bps_verbs_open succeeded */
    int fork_errno; /* of ibv_fork_init: EINVAL if somebody else had registered memory before */
    BPS_VERBS_NEEDED(BPS_VERBS_FIELD)
    BPS_VERBS_OPTIONAL(BPS_VERBS_FIELD)
} bps_verbs __attribute__((unused));

/* Load *name* and fill the table. 0; ENOENT when there is no such library, ENOSYS when it lacks a symbol, with the
 * loader's words or the missing symbol's name in *why*, and nothing left loaded. Loaded once: later calls return 0. */
static inline int bps_verbs_open(const char *name, char *why, size_t why_nbytes)
{
    if (bps_verbs.library != NULL)
        return 0;
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *words = dlerror();
        snprintf(why, why_nbytes, "%s", words ? words : name);
        return ENOENT;
    }
#define BPS_VERBS_RESOLVE(result, name, parameters) \
    *(void **)&bps_verbs.name = dlsym(library, "ibv_" #name);
#define BPS_VERBS_REQUIRE(result, name, parameters) \
    BPS_VERBS_RESOLVE(result, name, parameters) \
    if (bps_verbs.name == NULL) { \
        snprintf(why, why_nbytes, "ibv_%s", #name); \
        dlclose(library); \
        return ENOSYS; \
    }
    BPS_VERBS_NEEDED(BPS_VERBS_REQUIRE)
    BPS_VERBS_OPTIONAL(BPS_VERBS_RESOLVE)
    /* Where the kernel copies pinned pages for a child, ibv_fork_init of rdma-core 44 and older still takes registered
     * pages from it, and with them whatever else lies there: the child dies. */
    int unneeded = bps_verbs.is_fork_initialized != NULL && bps_verbs.is_fork_initialized() == 2;
    bps_verbs.fork_errno = unneeded ? 0 : bps_verbs.fork_init();
    bps_verbs.library = library;
    return 0;
}

/* Register with any access, optional flags (BPS_ACCESS_RELAXED_ORDERING) included: an old library, and an old kernel,
 * leave those out. NULL with errno set. */
static inline struct bps_ibv_mr *bps_reg_mr(struct bps_ibv_pd *pd, void *address, size_t nbytes, unsigned int access)
{
    if (access >= BPS_ACCESS_RELAXED_ORDERING && bps_verbs.reg_mr_iova2 != NULL)
        return bps_verbs.reg_mr_iova2(pd, address, nbytes, (uint64_t)(uintptr_t)address, access);
    return bps_verbs.reg_mr(pd, address, nbytes, (int)(access & (BPS_ACCESS_RELAXED_ORDERING - 1)));
}

/* Register nbytes of a dma-buf from `offset` on, which lanes and peers call by `iova`. NULL with errno set; ENOSYS: the
 * library is too old. */
static inline struct bps_ibv_mr *bps_reg_dmabuf_mr(struct bps_ibv_pd *pd, uint64_t offset, size_t nbytes, uint64_t iova,
                                                   int fd, unsigned int access)
{
    if (bps_verbs.reg_dmabuf_mr != NULL)
        return bps_verbs.reg_dmabuf_mr(pd, offset, nbytes, iova, fd, (int)access);
    errno = ENOSYS;
    return NULL;
}

static inline int bps_positive(int rc) { return rc < 0 ? -rc : rc; }

/* Whether the verb that was to destroy an object failed with rc because the kernel has taken the device from this
 * process (unplugged, reset, its driver unbound): it has destroyed all objects itself then, and every call ends so.
 * What the provider has of the object in this process is lost: no call can free it any more. libibverbs would, if
 * RDMAV_ALLOW_DISASSOC_DESTROY were set, but only in programs that read no events meanwhile. */
static inline int bps_device_is_gone(int rc) { return bps_positive(rc) == EIO || bps_positive(rc) == ENODEV; }

/* Post a chain of send work requests; on an error *bad is the first that was not posted. */
static inline int bps_post_send(struct bps_ibv_qp *qp, struct bps_ibv_send_wr *wr, struct bps_ibv_send_wr **bad)
{
    return bps_positive(qp->context->ops.post_send(qp, wr, bad));
}

/* Post a chain of receive work requests; on an error *bad is the first that was not posted. */
static inline int bps_post_recv(struct bps_ibv_qp *qp, struct bps_ibv_recv_wr *wr, struct bps_ibv_recv_wr **bad)
{
    return bps_positive(qp->context->ops.post_recv(qp, wr, bad));
}

/* Take up to n completions: how many, or a negative number when the queue is broken. */
static inline int bps_poll_cq(struct bps_ibv_cq *cq, int n, struct bps_ibv_wc *wc)
{
    return cq->context->ops.poll_cq(cq, n, wc);
}

/* Ask for one event at the next completion (solicited_only: at the next solicited or bad one). */
static inline int bps_req_notify_cq(struct bps_ibv_cq *cq, int solicited_only)
{
    return bps_positive(cq->context->ops.req_notify_cq(cq, solicited_only));
}

static inline uint32_t bps_wc_immediate(const struct bps_ibv_wc *wc) { return be32toh(wc->imm_data); }

/* Describe one operation with one SGE (none if nbytes is 0) in *wr and *sge, which stay the caller's; immediate is in
 * host order and sent by the WITH_IMM opcodes. Chain several by wr->next and post them at once. */
static inline void bps_fill_send(struct bps_ibv_send_wr *wr, struct bps_ibv_sge *sge, int opcode, unsigned int flags,
                                 uint64_t wr_id, uint64_t address, uint32_t nbytes, uint32_t lkey,
                                 uint64_t remote_address, uint32_t rkey, uint32_t immediate)
{
    sge->addr = address;
    sge->length = nbytes;
    sge->lkey = lkey;
    memset(wr, 0, sizeof *wr);
    wr->wr_id = wr_id;
    wr->sg_list = sge;
    wr->num_sge = nbytes ? 1 : 0;
    wr->opcode = opcode;
    wr->send_flags = flags;
    wr->imm_data = htobe32(immediate);
    wr->remote_addr = remote_address;
    wr->rkey = rkey;
}

/* Post one WRITE_WITH_IMM, the transport's only operation. 0 or an errno (ENOMEM: the send queue is full). */
static inline int bps_post_write_imm(struct bps_ibv_qp *qp, uint64_t wr_id, uint64_t address, uint32_t nbytes,
                                     uint32_t lkey, uint64_t remote_address, uint32_t rkey, uint32_t immediate,
                                     unsigned int flags)
{
    struct bps_ibv_sge sge;
    struct bps_ibv_send_wr wr, *bad;
    bps_fill_send(&wr, &sge, BPS_WR_RDMA_WRITE_WITH_IMM, flags, wr_id, address, nbytes, lkey, remote_address, rkey,
                  immediate);
    return bps_post_send(qp, &wr, &bad);
}

/* Post one receive request of nbytes at address (0 bytes: for an immediate alone). 0 or an errno. */
static inline int bps_post_recv_one(struct bps_ibv_qp *qp, uint64_t wr_id, uint64_t address, uint32_t nbytes,
                                    uint32_t lkey)
{
    struct bps_ibv_sge sge = {address, nbytes, lkey};
    struct bps_ibv_recv_wr wr = {wr_id, NULL, &sge, nbytes ? 1 : 0, 0}, *bad;
    return bps_post_recv(qp, &wr, &bad);
}

/* Make the channel's descriptor non-blocking, as `bps_take_cq_event` wants it. 0 or an errno. */
static inline int bps_unblock(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    return flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ? errno : 0;
}

/* Wait until fd is readable, at most timeout_ns (negative: for ever). 1, 0 at the time-out, or a negative errno.
 * EINTR ends the wait: the caller knows whether a signal matters. */
static inline int bps_await_fd(int fd, int64_t timeout_ns)
{
    struct pollfd waited = {fd, POLLIN, 0};
    struct timespec limit = {(time_t)(timeout_ns / 1000000000), (long)(timeout_ns % 1000000000)};
    int n = ppoll(&waited, 1, timeout_ns < 0 ? NULL : &limit, NULL);
    return n < 0 ? -errno : n;
}

/* Take one event off a non-blocking channel and acknowledge it. 1, 0 when there is none, or a negative errno. */
static inline int bps_take_cq_event(struct bps_ibv_comp_channel *channel)
{
    struct bps_ibv_cq *cq;
    void *context;
    if (bps_verbs.get_cq_event(channel, &cq, &context) != 0)
        return errno == EAGAIN || errno == EINTR ? 0 : -errno;
    bps_verbs.ack_cq_events(cq, 1);
    return 1;
}
