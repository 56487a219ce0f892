/* Verbs ABI: the structs of libibverbs that we touch, declared here so that bpsfast builds without its headers.
 *
 * The layouts are the binary interface of libibverbs.so.1 (symbol versions IBVERBS_1.1), which has been stable since
 * 2006: fields were only ever added at the end of structs that the library itself allocates. Of those we declare as
 * much as we read, and never their size. Structs that we allocate are declared whole, except `bps_ibv_port_attr`: the
 * plain symbol ibv_query_port fills what stands here and no more. All of it is pinned below for 64-bit Linux (x86-64
 * and aarch64 agree: no struct that we measure holds a mutex), and by tests/pyx/test_verbs_header.py against
 * <infiniband/verbs.h> where that is installed. Names begin with bps_ or BPS_, so both may be included in one file.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

_Static_assert(sizeof(void *) == 8 && sizeof(long) == 8 && sizeof(int) == 4, "verbs are declared for LP64 only");

enum { /* QP states and types, transition masks */
    BPS_QPS_RESET = 0, BPS_QPS_INIT = 1, BPS_QPS_RTR = 2, BPS_QPS_RTS = 3, BPS_QPS_SQD = 4, BPS_QPS_SQE = 5,
    BPS_QPS_ERR = 6, BPS_QPT_RC = 2,
    BPS_QP_STATE = 1 << 0, BPS_QP_ACCESS_FLAGS = 1 << 3, BPS_QP_PKEY_INDEX = 1 << 4, BPS_QP_PORT = 1 << 5,
    BPS_QP_AV = 1 << 7, BPS_QP_PATH_MTU = 1 << 8, BPS_QP_TIMEOUT = 1 << 9, BPS_QP_RETRY_CNT = 1 << 10,
    BPS_QP_RNR_RETRY = 1 << 11, BPS_QP_RQ_PSN = 1 << 12, BPS_QP_MAX_QP_RD_ATOMIC = 1 << 13,
    BPS_QP_MIN_RNR_TIMER = 1 << 15, BPS_QP_SQ_PSN = 1 << 16, BPS_QP_MAX_DEST_RD_ATOMIC = 1 << 17,
    BPS_QP_CAP = 1 << 19, BPS_QP_DEST_QPN = 1 << 20,
};

enum { /* access to memory; posting; completions */
    BPS_ACCESS_LOCAL_WRITE = 1, BPS_ACCESS_REMOTE_WRITE = 2, BPS_ACCESS_REMOTE_READ = 4,
    BPS_ACCESS_RELAXED_ORDERING = 1 << 20, /* from here on optional: for ibv_reg_mr_iova2 only */
    BPS_WR_RDMA_WRITE = 0, BPS_WR_RDMA_WRITE_WITH_IMM = 1, BPS_WR_SEND = 2, BPS_WR_SEND_WITH_IMM = 3,
    BPS_WR_RDMA_READ = 4,
    BPS_SEND_FENCE = 1, BPS_SEND_SIGNALED = 2, BPS_SEND_SOLICITED = 4, BPS_SEND_INLINE = 8,
    BPS_WC_SEND = 0, BPS_WC_RDMA_WRITE = 1, BPS_WC_RDMA_READ = 2, BPS_WC_RECV = 128, BPS_WC_RECV_RDMA_WITH_IMM = 129,
    BPS_WC_WITH_IMM = 1 << 1,
    BPS_WC_SUCCESS = 0, BPS_WC_LOC_LEN_ERR = 1, BPS_WC_LOC_PROT_ERR = 4, BPS_WC_WR_FLUSH_ERR = 5,
    BPS_WC_REM_INV_REQ_ERR = 9, BPS_WC_REM_ACCESS_ERR = 10, BPS_WC_REM_OP_ERR = 11, BPS_WC_RETRY_EXC_ERR = 12,
    BPS_WC_RNR_RETRY_EXC_ERR = 13,
};

union bps_ibv_gid {
    uint8_t raw[16];
    uint64_t words[2]; /* big endian */
};

/* -- allocated by the library: read, never measured ------------------------------------------------------- */

struct bps_ibv_device {
    void *ops[2];
    int node_type, transport_type;
    char name[64], dev_name[64], dev_path[256], ibdev_path[256];
};

struct bps_ibv_cq;
struct bps_ibv_qp;
struct bps_ibv_wc;
struct bps_ibv_send_wr;
struct bps_ibv_recv_wr;

struct bps_ibv_context {
    struct bps_ibv_device *device;
    struct {
        void *unused0[11];
        int (*poll_cq)(struct bps_ibv_cq *, int, struct bps_ibv_wc *);
        int (*req_notify_cq)(struct bps_ibv_cq *, int);
        void *unused1[12];
        int (*post_send)(struct bps_ibv_qp *, struct bps_ibv_send_wr *, struct bps_ibv_send_wr **);
        int (*post_recv)(struct bps_ibv_qp *, struct bps_ibv_recv_wr *, struct bps_ibv_recv_wr **);
        void *unused2[5];
    } ops;
    int cmd_fd, async_fd, num_comp_vectors;
};

struct bps_ibv_pd {
    struct bps_ibv_context *context;
    uint32_t handle;
};

struct bps_ibv_mr {
    struct bps_ibv_context *context;
    struct bps_ibv_pd *pd;
    void *addr;
    size_t length;
    uint32_t handle, lkey, rkey;
};

struct bps_ibv_comp_channel {
    struct bps_ibv_context *context;
    int fd, refcnt;
};

struct bps_ibv_cq {
    struct bps_ibv_context *context;
    struct bps_ibv_comp_channel *channel;
    void *cq_context;
    uint32_t handle;
    int cqe;
};

struct bps_ibv_qp {
    struct bps_ibv_context *context;
    void *qp_context;
    struct bps_ibv_pd *pd;
    struct bps_ibv_cq *send_cq, *recv_cq;
    void *srq;
    uint32_t handle, qp_num;
    int state, qp_type;
};

/* -- allocated by us ------------------------------------------------------------------------------------- */

struct bps_ibv_sge {
    uint64_t addr;
    uint32_t length, lkey;
};

struct bps_ibv_send_wr {
    uint64_t wr_id;
    struct bps_ibv_send_wr *next;
    struct bps_ibv_sge *sg_list;
    int num_sge, opcode;
    unsigned int send_flags;
    uint32_t imm_data; /* big endian */
    uint64_t remote_addr;
    uint32_t rkey, pad0;
    uint64_t other_operations[9]; /* atomics, datagrams, XRC, memory windows, TSO */
};

struct bps_ibv_recv_wr {
    uint64_t wr_id;
    struct bps_ibv_recv_wr *next;
    struct bps_ibv_sge *sg_list;
    int num_sge, pad0;
};

struct bps_ibv_wc {
    uint64_t wr_id;
    int status, opcode;
    uint32_t vendor_err, byte_len;
    uint32_t imm_data; /* big endian */
    uint32_t qp_num, src_qp;
    unsigned int wc_flags;
    uint16_t pkey_index, slid;
    uint8_t sl, dlid_path_bits, pad0[2];
};

struct bps_ibv_qp_cap {
    uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
};

struct bps_ibv_qp_init_attr {
    void *qp_context;
    struct bps_ibv_cq *send_cq, *recv_cq;
    void *srq;
    struct bps_ibv_qp_cap cap;
    int qp_type, sq_sig_all, pad0;
};

struct bps_ibv_global_route {
    union bps_ibv_gid dgid;
    uint32_t flow_label;
    uint8_t sgid_index, hop_limit, traffic_class, pad0;
};

struct bps_ibv_ah_attr {
    struct bps_ibv_global_route grh;
    uint16_t dlid;
    uint8_t sl, src_path_bits, static_rate, is_global, port_num, pad0;
};

struct bps_ibv_qp_attr {
    int qp_state, cur_qp_state, path_mtu, path_mig_state;
    uint32_t qkey, rq_psn, sq_psn, dest_qp_num;
    unsigned int qp_access_flags;
    struct bps_ibv_qp_cap cap;
    struct bps_ibv_ah_attr ah_attr, alt_ah_attr;
    uint16_t pkey_index, alt_pkey_index;
    uint8_t en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num;
    uint8_t timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout, pad0;
    uint32_t rate_limit;
};

struct bps_ibv_device_attr {
    char fw_ver[64];
    uint64_t node_guid, sys_image_guid; /* big endian */
    uint64_t max_mr_size, page_size_cap;
    uint32_t vendor_id, vendor_part_id, hw_ver;
    int max_qp, max_qp_wr;
    unsigned int device_cap_flags;
    int max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom;
    int max_qp_init_rd_atom, max_ee_init_rd_atom, atomic_cap, max_ee, max_rdd, max_mw, max_raw_ipv6_qp;
    int max_raw_ethy_qp, max_mcast_grp, max_mcast_qp_attach, max_total_mcast_qp_attach, max_ah, max_fmr;
    int max_map_per_fmr, max_srq, max_srq_wr, max_srq_sge;
    uint16_t max_pkeys;
    uint8_t local_ca_ack_delay, phys_port_cnt;
};

struct bps_ibv_port_attr {
    int state, max_mtu, active_mtu; /* mtu: 1 = 256 bytes ... 5 = 4096 bytes */
    int gid_tbl_len;
    uint32_t port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr;
    uint16_t pkey_tbl_len, lid, sm_lid;
    uint8_t lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width, active_speed, phys_state;
    uint8_t link_layer; /* 1 = InfiniBand, 2 = Ethernet */
    uint8_t flags;
    uint16_t port_cap_flags2;
};

union bps_ibv_async_element {
    struct bps_ibv_cq *cq;
    struct bps_ibv_qp *qp;
    int port_num;
};

struct bps_ibv_async_event {
    union bps_ibv_async_element element;
    int event_type;
};

#define BPS_AT(type, field, offset) \
    _Static_assert(offsetof(struct bps_ibv_##type, field) == (offset), "ibv_" #type "." #field " at " #offset)
#define BPS_SIZE(type, nbytes) \
    _Static_assert(sizeof(struct bps_ibv_##type) == (nbytes), "ibv_" #type " has " #nbytes " bytes")

BPS_AT(device, name, 24);
BPS_AT(context, ops.poll_cq, 96);
BPS_AT(context, ops.req_notify_cq, 104);
BPS_AT(context, ops.post_send, 208);
BPS_AT(context, ops.post_recv, 216);
BPS_AT(context, cmd_fd, 264);
BPS_AT(context, async_fd, 268);
BPS_AT(mr, lkey, 36);
BPS_AT(mr, rkey, 40);
BPS_AT(comp_channel, fd, 8);
BPS_AT(cq, cqe, 28);
BPS_AT(qp, qp_num, 52);
BPS_AT(qp, state, 56);
BPS_AT(send_wr, imm_data, 36);
BPS_AT(send_wr, remote_addr, 40);
BPS_AT(wc, imm_data, 24);
BPS_AT(wc, wc_flags, 36);
BPS_AT(qp_attr, ah_attr, 56);
BPS_AT(qp_attr, timeout, 130);
BPS_AT(device_attr, max_qp, 108);
BPS_AT(port_attr, link_layer, 46);
BPS_SIZE(sge, 16);
BPS_SIZE(send_wr, 128);
BPS_SIZE(recv_wr, 32);
BPS_SIZE(wc, 48);
BPS_SIZE(qp_init_attr, 64);
BPS_SIZE(ah_attr, 32);
BPS_SIZE(qp_attr, 144);
BPS_SIZE(device_attr, 232);
BPS_SIZE(port_attr, 52);
BPS_SIZE(async_event, 16);
