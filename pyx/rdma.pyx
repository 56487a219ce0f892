# cython: language_level=3, binding=True, freethreading_compatible=False
"""RDMA: one-sided writes with immediate, straight into the slot that the peer has bound and announced.

    Rail      a completion queue, its device's registered memory and one native thread   rdma_rail.pxi, rail.h
      Stream  one queue pair to one peer, and the slots written over it                  rdma_stream.pxi, rdma_stream.h

A `Stream` has the methods of `bpsfast.pyx.tcp.Stream`: `post` queues a write from registered memory, EVENT_DELIVERED
comes with its send completion, after which credit may return and the source may be reused. The peer is told nothing in
advance: its completion brings slot, round and epoch in the immediate, is checked against what the slot waits for, and
is reported through the engine's hooks (`hooks.h`). Queue pairs, completion queues and registered memory are made by
`bpsfast.pyx.verbs` and passed in by `handle`; their objects are kept until `close`, out of the garbage collector's
sight: they must not refer to the stream or rail that keeps them. After a fork the child's copies are unusable
(ValueError) and release nothing.
"""
cimport cython
from libc.errno cimport EAGAIN, EDESTADDRREQ, EFAULT, EINVAL, EMSGSIZE, ENOMEM, ESHUTDOWN, errno
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

import os

from pyx.ibverbs cimport BPS_VERBS_LIBRARY, bps_ibv_cq, bps_ibv_qp, bps_unblock, bps_verbs_open
from pyx.words cimport *


cdef extern from "rail.h" nogil:
    struct bps_regions:
        pthread_mutex_t lock
        void *items
        uint32_t used
    struct bps_slot_in:
        uint64_t nbytes
        uint32_t next_round
    struct bps_slot_out:
        uint64_t addresses[2]
        uint64_t nbytes
        uint32_t rkey, framed
    struct bps_write:
        uint64_t address
    struct bps_failure:
        int kind, code
        uint32_t vendor_error, slot, round, nbytes, is_receive
        uint64_t at_ns
    struct bps_rdma_stream:
        bps_regions *regions
        bps_ibv_qp *qp
        uint32_t number, peer, epoch, n_slots, max_send, max_receive, inline_nbytes, signal_every
        uint32_t n_bound, n_receives, proof, closing, lost, told
        void *engine
        bps_arrived_fn arrived
        bps_notify_fn notify
        pthread_mutex_t lock
        bps_slot_in *in_ "in"
        bps_slot_out *out
        bps_write *queue
        uint64_t capacity, posted, sent, delivered, patience_ns, silent_ns
        uint64_t writes_received, bytes_sent, bytes_received, waited, proven_ns
        bps_failure failure
        bps_trace records
    enum: BPS_PROOF_SENT, BPS_PROOF_RECEIVED, BPS_PROOF_FAILED, BPS_PROOF_SLOT
    enum: BPS_FAILED_COMPLETION, BPS_FAILED_POST, BPS_FAILED_ARRIVAL, BPS_FAILED_EVENT, BPS_FAILED_POLL
    enum: BPS_FAILED_SILENCE
    int bps_region_add(bps_regions *, uint64_t, uint64_t, uint32_t)
    int bps_rdma_receive(bps_rdma_stream *, uint32_t)
    int bps_rdma_bind(bps_rdma_stream *, uint32_t, uint64_t, uint64_t, uint64_t, uint32_t, uint32_t)
    void bps_rdma_unbind(bps_rdma_stream *, uint32_t)
    int bps_rdma_post(bps_rdma_stream *, uint32_t, uint32_t, uint32_t, uint64_t, uint64_t)
    int bps_rdma_prove(bps_rdma_stream *)
    void bps_rdma_start(bps_rdma_stream *, uint32_t, uint32_t, void *, bps_arrived_fn, bps_notify_fn)
    void bps_rdma_end(bps_rdma_stream *)

cdef extern from "rail.h" nogil:
    struct bps_rail:
        bps_ibv_cq *cq
        int wake_fd
        uint64_t awake_ns, port_error_ns, completions, batches, sleeps
        pthread_mutex_t streams_lock
        bps_rdma_stream **streams
        bps_regions regions
        uint32_t port, stopping
        pthread_t thread
    void *bps_rail_run(void *)
    void bps_rail_look(bps_rail *)
    int bps_rail_drain(bps_rail *, uint64_t)
    uint32_t bps_forks
    void bps_forked() noexcept
    int bps_rail_add_stream(bps_rail *, bps_rdma_stream *)
    void bps_rail_remove_stream(bps_rail *, bps_rdma_stream *)
    int eventfd(unsigned int, int)
    int eventfd_write(int, uint64_t)
    int close(int)
    int EFD_CLOEXEC, EFD_NONBLOCK
    int pthread_atfork(void (*)() noexcept nogil, void (*)() noexcept nogil, void (*)() noexcept nogil)

_KINDS = {BPS_FAILED_COMPLETION: "completion", BPS_FAILED_POST: "post", BPS_FAILED_ARRIVAL: "arrival",
          BPS_FAILED_EVENT: "event", BPS_FAILED_POLL: "poll", BPS_FAILED_SILENCE: "silence"}


cdef bint _watches_forks = False


include "rdma_rail.pxi"
include "rdma_stream.pxi"
