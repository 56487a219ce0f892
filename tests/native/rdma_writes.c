/* How a stream hands writes to its queue pair: in chains, in order, and what counts as sent when one is refused. */
#undef NDEBUG
#include <assert.h>
#include <stdlib.h>

#include "rdma_writes.h"

enum { N_WRITES = 40, NBYTES = 8, EPOCH = 5, SIGNAL_EVERY = 4 };

static uint32_t n_calls, n_in_call[N_WRITES], n_posted, n_signalled, refused_at, names_none;

/* A card that takes every write but the one with the number `refused_at`, and may not say which it was. */
static int post_send(struct bps_ibv_qp *qp, struct bps_ibv_send_wr *wr, struct bps_ibv_send_wr **bad)
{
    (void)qp;
    n_in_call[n_calls++] = 0;
    for (; wr != NULL; wr = wr->next) {
        if (n_posted == refused_at) {
            *bad = names_none ? NULL : wr;
            return ENOMEM;
        }
        assert(wr->wr_id == ((uint64_t)7 << 32 | n_posted) && wr->remote_addr == 4096 + n_posted && wr->rkey == 9);
        assert(wr->num_sge == 1 && wr->sg_list->length == NBYTES && wr->sg_list->lkey == 3);
        assert(be32toh(wr->imm_data) == bps_immediate(n_posted, 1, EPOCH));
        n_signalled += (wr->send_flags & BPS_SEND_SIGNALED) != 0;
        n_in_call[n_calls - 1]++;
        n_posted++;
    }
    return 0;
}

static struct bps_rdma_stream stream;

/* Post one write, which leaves at once, and others, which wait until the queue pair has room for all. */
static void post_all(uint32_t refused)
{
    static struct bps_ibv_context context = {.ops.post_send = post_send};
    static struct bps_ibv_qp qp = {.context = &context};
    static struct bps_regions regions = {.lock = PTHREAD_MUTEX_INITIALIZER};
    static char source[NBYTES];
    static struct bps_slot_out out[N_WRITES];
    n_calls = n_posted = n_signalled = 0;
    refused_at = refused;
    assert(regions.used || bps_region_add(&regions, (uint64_t)source, NBYTES, 3) == 0);
    free(stream.queue);
    stream = (struct bps_rdma_stream){.regions = &regions, .qp = &qp, .number = 7, .epoch = EPOCH, .n_slots = N_WRITES,
                                      .max_send = 1, .signal_every = SIGNAL_EVERY, .capacity = 2, .out = out,
                                      .lock = PTHREAD_MUTEX_INITIALIZER};
    stream.queue = calloc(stream.capacity, sizeof *stream.queue);
    for (uint32_t slot = 0; slot < N_WRITES; slot++) {
        out[slot] = (struct bps_slot_out){{4096 + slot, 4096 + slot}, NBYTES, 9, 0};
        assert(bps_rdma_post(&stream, slot, 1, 0, (uint64_t)source, NBYTES) == 0);
        assert(n_calls == 1 && n_in_call[0] == 1 && stream.sent == 1 && n_signalled == 1);
    }
    stream.max_send = N_WRITES;
    pthread_mutex_lock(&stream.lock);
    bps_rdma_pump(&stream);
    pthread_mutex_unlock(&stream.lock);
}

int main(void)
{
    post_all(N_WRITES);
    assert(n_calls == 4 && n_in_call[1] == 16 && n_in_call[2] == 16 && n_in_call[3] == 7);
    assert(stream.sent == N_WRITES && stream.bytes_sent == N_WRITES * NBYTES && !stream.lost);
    assert(n_signalled == 1 + (N_WRITES - 1) / SIGNAL_EVERY + 1); /* the last one of all, too */
    for (uint32_t refused = 1; refused < N_WRITES; refused++) {
        post_all(refused);
        assert(n_calls == 2 + (refused - 1) / 16 && n_posted == refused);
        assert(stream.sent == refused && stream.bytes_sent == refused * NBYTES && stream.lost);
        assert(stream.failure.kind == BPS_FAILED_POST && stream.failure.code == ENOMEM);
        assert(stream.failure.slot == refused && stream.failure.round == 1 && stream.failure.nbytes == NBYTES);
    }
    names_none = 1;
    post_all(20);
    assert(n_calls == 3 && stream.sent == 17 && stream.bytes_sent == 17 * NBYTES); /* no write of that chain counts */
    assert(stream.lost && stream.failure.kind == BPS_FAILED_POST && stream.failure.slot == 17);
    free(stream.queue);
    return 0;
}
