/* Completions of writes that an RDMA peer made: any immediate, any length, whatever was written into the slot before. */
#include <stdlib.h>

#include "input.h"
#include "rdma_arrivals.h"

enum { EPOCH = 5, N_SLOTS = 4, NBYTES = 24, MOST_RECEIVES = 2 };

static int n_posted, n_arrived, n_lost;

static int post_recv(struct bps_ibv_qp *qp, struct bps_ibv_recv_wr *wr, struct bps_ibv_recv_wr **bad)
{
    (void)qp;
    *bad = wr;
    return ++n_posted > 64 ? ENOMEM : 0;
}

static void arrived(void *engine, uint32_t source, uint32_t part, uint32_t round, uint32_t flags)
{
    (void)source, (void)round, (void)flags;
    if (part >= N_SLOTS || !((struct bps_slot_in *)engine)[part].bound)
        abort();
    n_arrived++;
}

static void notify(void *engine, uint32_t kind, uint32_t source, uint32_t part, uint32_t round, uint32_t code,
                   uint64_t nbytes)
{
    (void)engine, (void)kind, (void)source, (void)part, (void)round, (void)code, (void)nbytes;
    if (++n_lost > 1)
        abort(); /* it is told once */
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes)
{
    struct input input = {data, nbytes};
    struct bps_ibv_context context = {0};
    struct bps_ibv_qp qp = {.context = &context};
    char *memory[N_SLOTS];
    context.ops.post_recv = post_recv;
    struct bps_rdma_stream lane = {.qp = &qp, .epoch = EPOCH, .n_slots = N_SLOTS, .max_receive = MOST_RECEIVES,
                                 .n_receives = 1, .proof = BPS_PROOF_RECEIVED};
    lane.in = calloc(N_SLOTS, sizeof *lane.in);
    pthread_mutex_init(&lane.lock, NULL);
    n_posted = n_arrived = n_lost = 0;
    for (uint32_t i = 0; i < N_SLOTS; i++) {
        memory[i] = calloc(1, NBYTES);
        if (i != 2)
            bps_rdma_bind(&lane, i, (uint64_t)memory[i], (uint64_t)memory[i], NBYTES, i == 1, 1);
    }
    bps_rdma_start(&lane, 1, 0, lane.in, arrived, notify);
    for (int i = 0; i < 64 && input.nbytes != 0; i++) {
        struct bps_ibv_wc wc = {.status = BPS_WC_SUCCESS};
        uint8_t what = input_byte(&input), slot = input_byte(&input) % N_SLOTS;
        if (what & 1) {
            input_take(&input, memory[slot], NBYTES);
            continue;
        }
        wc.byte_len = what & 2 ? (uint32_t)input_word(&input) : what & 4 ? 0 : NBYTES;
        uint32_t immediate = what & 8 ? (uint32_t)input_word(&input) : bps_immediate(slot, lane.in[slot].next_round, EPOCH);
        wc.imm_data = htobe32(immediate);
        if (what & 16)
            bps_rdma_unbind(&lane, slot);
        bps_rdma_arrived(&lane, &wc);
    }
    for (uint32_t i = 0; i < N_SLOTS; i++)
        free(memory[i]);
    free(lane.in);
    return 0;
}
