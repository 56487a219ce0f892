"""Extern declarations of libibverbs as verbs.h and verbs_abi.h declare it, and nothing else."""
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "verbs_abi.h" nogil:
    enum:
        BPS_QPS_INIT, BPS_QPS_RTR, BPS_QPS_RTS, BPS_QPS_ERR, BPS_QPT_RC
        BPS_QP_STATE, BPS_QP_ACCESS_FLAGS, BPS_QP_PKEY_INDEX, BPS_QP_PORT, BPS_QP_AV, BPS_QP_PATH_MTU, BPS_QP_TIMEOUT
        BPS_QP_RETRY_CNT, BPS_QP_RNR_RETRY, BPS_QP_RQ_PSN, BPS_QP_MAX_QP_RD_ATOMIC, BPS_QP_MIN_RNR_TIMER
        BPS_QP_SQ_PSN, BPS_QP_MAX_DEST_RD_ATOMIC, BPS_QP_DEST_QPN
        BPS_ACCESS_LOCAL_WRITE, BPS_ACCESS_REMOTE_WRITE, BPS_ACCESS_REMOTE_READ, BPS_ACCESS_RELAXED_ORDERING
        BPS_WR_RDMA_WRITE, BPS_WR_RDMA_WRITE_WITH_IMM, BPS_WR_SEND, BPS_WR_SEND_WITH_IMM, BPS_WR_RDMA_READ
        BPS_SEND_SIGNALED, BPS_SEND_INLINE, BPS_WC_WITH_IMM
    union bps_ibv_gid:
        uint8_t *raw
    struct bps_ibv_device:
        char *name
        char *dev_name
    struct bps_ibv_context:
        bps_ibv_device *device
        int async_fd, num_comp_vectors
    struct bps_ibv_pd:
        bps_ibv_context *context
    struct bps_ibv_mr:
        uint32_t lkey, rkey
    struct bps_ibv_comp_channel:
        int fd
    struct bps_ibv_cq:
        bps_ibv_context *context
        int cqe
    struct bps_ibv_qp:
        bps_ibv_context *context
        bps_ibv_cq *send_cq
        bps_ibv_cq *recv_cq
        uint32_t qp_num
    struct bps_ibv_wc:
        uint64_t wr_id
        int status, opcode
        uint32_t vendor_err, byte_len, qp_num
        unsigned int wc_flags
    struct bps_ibv_qp_cap:
        uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data
    struct bps_ibv_qp_init_attr:
        bps_ibv_cq *send_cq
        bps_ibv_cq *recv_cq
        bps_ibv_qp_cap cap
        int qp_type, sq_sig_all
    struct bps_ibv_global_route:
        bps_ibv_gid dgid
        uint32_t flow_label
        uint8_t sgid_index, hop_limit, traffic_class
    struct bps_ibv_ah_attr:
        bps_ibv_global_route grh
        uint16_t dlid
        uint8_t sl, src_path_bits, static_rate, is_global, port_num
    struct bps_ibv_qp_attr:
        int qp_state, path_mtu
        uint32_t rq_psn, sq_psn, dest_qp_num
        unsigned int qp_access_flags
        bps_ibv_ah_attr ah_attr
        uint16_t pkey_index
        uint8_t max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry
    struct bps_ibv_device_attr:
        char *fw_ver
        uint64_t node_guid, max_mr_size, page_size_cap
        uint32_t vendor_id, vendor_part_id, hw_ver
        int max_qp, max_qp_wr, max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom
        int max_qp_init_rd_atom, max_srq
        unsigned int device_cap_flags
        uint8_t local_ca_ack_delay, phys_port_cnt
    struct bps_ibv_port_attr:
        int state, max_mtu, active_mtu, gid_tbl_len
        uint32_t max_msg_sz, port_cap_flags
        uint16_t pkey_tbl_len, lid, sm_lid
        uint8_t lmc, active_width, active_speed, phys_state, link_layer
    union bps_ibv_async_element:
        bps_ibv_cq *cq
        bps_ibv_qp *qp
        int port_num
    struct bps_ibv_async_event:
        bps_ibv_async_element element
        int event_type

cdef extern from "verbs.h" nogil:
    struct bps_verbs_table:  # the type of `bps_verbs`
        void *library
        int fork_errno
        bps_ibv_device **(*get_device_list)(int *) noexcept nogil
        void (*free_device_list)(bps_ibv_device **) noexcept nogil
        bps_ibv_context *(*open_device)(bps_ibv_device *) noexcept nogil
        int (*close_device)(bps_ibv_context *) noexcept nogil
        int (*query_device)(bps_ibv_context *, bps_ibv_device_attr *) noexcept nogil
        int (*query_port)(bps_ibv_context *, uint8_t, bps_ibv_port_attr *) noexcept nogil
        int (*query_gid)(bps_ibv_context *, uint8_t, int, bps_ibv_gid *) noexcept nogil
        int (*get_async_event)(bps_ibv_context *, bps_ibv_async_event *) noexcept nogil
        void (*ack_async_event)(bps_ibv_async_event *) noexcept nogil
        const char *(*event_type_str)(int) noexcept nogil
        bps_ibv_pd *(*alloc_pd)(bps_ibv_context *) noexcept nogil
        int (*dealloc_pd)(bps_ibv_pd *) noexcept nogil
        int (*dereg_mr)(bps_ibv_mr *) noexcept nogil
        bps_ibv_comp_channel *(*create_comp_channel)(bps_ibv_context *) noexcept nogil
        int (*destroy_comp_channel)(bps_ibv_comp_channel *) noexcept nogil
        bps_ibv_cq *(*create_cq)(bps_ibv_context *, int, void *, bps_ibv_comp_channel *, int) noexcept nogil
        int (*resize_cq)(bps_ibv_cq *, int) noexcept nogil
        int (*destroy_cq)(bps_ibv_cq *) noexcept nogil
        bps_ibv_qp *(*create_qp)(bps_ibv_pd *, bps_ibv_qp_init_attr *) noexcept nogil
        int (*modify_qp)(bps_ibv_qp *, bps_ibv_qp_attr *, int) noexcept nogil
        int (*query_qp)(bps_ibv_qp *, bps_ibv_qp_attr *, int, bps_ibv_qp_init_attr *) noexcept nogil
        int (*destroy_qp)(bps_ibv_qp *) noexcept nogil
        int (*is_fork_initialized)() noexcept nogil
    bps_verbs_table bps_verbs
    const char *BPS_VERBS_LIBRARY
    int bps_verbs_open(const char *, char *, size_t)
    bps_ibv_mr *bps_reg_mr(bps_ibv_pd *, void *, size_t, unsigned int)
    bps_ibv_mr *bps_reg_dmabuf_mr(bps_ibv_pd *, uint64_t, size_t, uint64_t, int, unsigned int)
    int bps_req_notify_cq(bps_ibv_cq *, int)
    uint32_t bps_wc_immediate(const bps_ibv_wc *)
    int bps_device_is_gone(int)
    int bps_unblock(int)
    int bps_await_fd(int, int64_t)
    int bps_take_cq_event(bps_ibv_comp_channel *)
