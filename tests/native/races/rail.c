/* Two rails with their threads, two lanes between them, over a card made of memory: threads post from both ends, the
 * rails' threads take completions and report, slots are bound and unbound and memory is registered meanwhile. */
#include <unistd.h>

#include "../node.h"
#include "rail.h"

enum { N_LANES = 2, N_SLOTS = 4, SPARE = 5, N_WORDS = 16, NBYTES = 8 * N_WORDS, EPOCH = 3, ROOM = 4096 };

struct card_cq {
    struct bps_ibv_cq cq;
    struct bps_ibv_comp_channel channel;
    pthread_mutex_t lock;
    struct bps_ibv_wc ring[ROOM];
    uint32_t used, taken, armed;
};

struct card_qp {
    struct bps_ibv_qp qp;
    struct card_qp *peer;
    pthread_mutex_t lock;
    uint64_t receives[ROOM];
    uint32_t posted, taken;
};

struct side {
    struct bps_ibv_context context;
    struct card_cq cq;
    struct bps_rail rail;
    struct card_qp qps[N_LANES];
    struct bps_rdma_stream lanes[N_LANES];
    uint64_t source[N_LANES][N_SLOTS][N_WORDS], landing[N_LANES][N_SLOTS][2][N_WORDS];
    uint32_t received[N_LANES][N_SLOTS], delivered[N_LANES][N_SLOTS];
};

static struct side sides[2];
static uint64_t end_ns;
static uint32_t n_writes, n_done;

/* -- the card ----------------------------------------------------------------------------------------------- */

static void complete(struct card_cq *cq, struct bps_ibv_wc wc)
{
    uint64_t one = 1;
    pthread_mutex_lock(&cq->lock);
    CHECK(cq->used - cq->taken < ROOM);
    cq->ring[cq->used++ % ROOM] = wc;
    if (cq->armed)
        CHECK(write(cq->channel.fd, &one, 8) == 8);
    cq->armed = 0;
    pthread_mutex_unlock(&cq->lock);
}

static int poll_cq(struct bps_ibv_cq *ibv, int n, struct bps_ibv_wc *wc)
{
    struct card_cq *cq = (struct card_cq *)ibv;
    int i = 0;
    pthread_mutex_lock(&cq->lock);
    for (; i < n && cq->taken != cq->used; i++)
        wc[i] = cq->ring[cq->taken++ % ROOM];
    pthread_mutex_unlock(&cq->lock);
    return i;
}

static int req_notify_cq(struct bps_ibv_cq *ibv, int solicited_only)
{
    struct card_cq *cq = (struct card_cq *)ibv;
    (void)solicited_only;
    pthread_mutex_lock(&cq->lock);
    cq->armed = 1;
    pthread_mutex_unlock(&cq->lock);
    return 0;
}

static int post_recv(struct bps_ibv_qp *ibv, struct bps_ibv_recv_wr *wr, struct bps_ibv_recv_wr **bad)
{
    struct card_qp *qp = (struct card_qp *)ibv;
    (void)bad;
    pthread_mutex_lock(&qp->lock);
    CHECK(qp->posted - qp->taken < ROOM);
    qp->receives[qp->posted++ % ROOM] = wr->wr_id;
    pthread_mutex_unlock(&qp->lock);
    return 0;
}

static int post_send(struct bps_ibv_qp *ibv, struct bps_ibv_send_wr *wr, struct bps_ibv_send_wr **bad)
{
    struct card_qp *qp = (struct card_qp *)ibv, *peer = qp->peer;
    (void)bad;
    for (; wr != NULL; wr = wr->next) {
        uint32_t nbytes = wr->num_sge ? wr->sg_list->length : 0;
        if (nbytes != 0)
            memcpy((void *)wr->remote_addr, (void *)wr->sg_list->addr, nbytes);
        pthread_mutex_lock(&peer->lock);
        CHECK(peer->taken != peer->posted); /* receives never run out */
        uint64_t received = peer->receives[peer->taken++ % ROOM];
        pthread_mutex_unlock(&peer->lock);
        complete((struct card_cq *)peer->qp.recv_cq, (struct bps_ibv_wc){.wr_id = received, .imm_data = wr->imm_data,
                                                                        .byte_len = nbytes, .opcode = BPS_WC_RECV});
        if (wr->send_flags & BPS_SEND_SIGNALED)
            complete((struct card_cq *)qp->qp.send_cq, (struct bps_ibv_wc){.wr_id = wr->wr_id});
    }
    return 0;
}

static int get_cq_event(struct bps_ibv_comp_channel *channel, struct bps_ibv_cq **cq, void **context)
{
    uint64_t n;
    (void)cq, (void)context;
    return read(channel->fd, &n, 8) == 8 ? 0 : -1;
}

static void ack_cq_events(struct bps_ibv_cq *cq, unsigned int n) { (void)cq, (void)n; }

static int get_async_event(struct bps_ibv_context *context, struct bps_ibv_async_event *event)
{
    (void)context, (void)event;
    return -1;
}

/* -- who uses it ---------------------------------------------------------------------------------------------- */

static void arrived(void *engine, uint32_t lane, uint32_t part, uint32_t round, uint32_t flags)
{
    struct side *side = engine;
    (void)flags;
    for (int i = 0; i < N_WORDS; i++)
        CHECK(side->landing[lane][part][round & 1][i] == round + part);
    bps_store(&side->received[lane][part], round);
    bps_wake(&side->received[lane][part], INT_MAX);
}

static void notify(void *engine, uint32_t kind, uint32_t lane, uint32_t part, uint32_t round, uint32_t code,
                   uint64_t nbytes)
{
    struct side *side = engine;
    CHECK(kind == BPS_EVENT_DELIVERED && code == 0 && nbytes == NBYTES);
    bps_store(&side->delivered[lane][part], round);
    bps_wake(&side->delivered[lane][part], INT_MAX);
}

static void *post(void *argument)
{
    uint32_t number = (uint32_t)(uintptr_t)argument, lane = number / 2;
    struct side *mine = &sides[number % 2], *theirs = &sides[!(number % 2)];
    uint32_t round = 0;
    for (; bps_now_ns() < end_ns; round++) {
        for (uint32_t slot = 0; slot < N_SLOTS; slot++) {
            uint64_t *source = mine->source[lane][slot];
            await(&mine->delivered[lane][slot], round);
            await(&theirs->received[lane][slot], round);
            for (int i = 0; i < N_WORDS; i++)
                source[i] = round + 1 + slot;
            CHECK(bps_rdma_post(&mine->lanes[lane], slot, round + 1, 0, (uint64_t)source, NBYTES) == 0);
        }
    }
    for (uint32_t slot = 0; slot < N_SLOTS; slot++) {
        await(&mine->delivered[lane][slot], round);
        await(&theirs->received[lane][slot], round);
    }
    bps_add(&n_writes, round * N_SLOTS);
    bps_add(&n_done, 1);
    return NULL;
}

static void make(struct side *side)
{
    side->context.ops.poll_cq = poll_cq;
    side->context.ops.req_notify_cq = req_notify_cq;
    side->context.ops.post_send = post_send;
    side->context.ops.post_recv = post_recv;
    side->context.async_fd = eventfd(0, EFD_NONBLOCK);
    side->cq.channel.fd = eventfd(0, EFD_NONBLOCK);
    side->cq.cq.context = &side->context;
    side->cq.cq.channel = &side->cq.channel;
    pthread_mutex_init(&side->cq.lock, NULL);
    side->rail.cq = &side->cq.cq;
    side->rail.wake_fd = eventfd(0, EFD_NONBLOCK);
    side->rail.awake_ns = 20000;
    side->rail.looked_ns = bps_now_ns();
    pthread_mutex_init(&side->rail.streams_lock, NULL);
    pthread_mutex_init(&side->rail.regions.lock, NULL);
    CHECK(bps_region_add(&side->rail.regions, (uint64_t)side->source, sizeof side->source, 7) == 0);
    for (int i = 0; i < N_LANES; i++) {
        struct bps_rdma_stream *lane = &side->lanes[i];
        struct side *other = side == sides ? sides + 1 : sides;
        side->qps[i].qp = (struct bps_ibv_qp){.context = &side->context, .send_cq = &side->cq.cq, .recv_cq = &side->cq.cq};
        side->qps[i].peer = &other->qps[i];
        pthread_mutex_init(&side->qps[i].lock, NULL);
        *lane = (struct bps_rdma_stream){.regions = &side->rail.regions, .qp = &side->qps[i].qp, .epoch = EPOCH,
                                       .n_slots = SPARE + 1, .max_send = 3, .max_receive = 64, .signal_every = 2,
                                       .capacity = 2, .patience_ns = 60000000000u};
        pthread_mutex_init(&lane->lock, NULL);
        lane->in = zeroed((SPARE + 1) * sizeof *lane->in);
        lane->out = zeroed((SPARE + 1) * sizeof *lane->out);
        lane->queue = zeroed(lane->capacity * sizeof *lane->queue);
        CHECK(bps_rail_add_stream(&side->rail, lane) == 0 && bps_rdma_receive(lane, 1) == 0);
    }
    CHECK(bps_start_thread(&side->rail.thread, bps_rail_run, &side->rail) == 0);
}

static void open_lane(struct side *side, uint32_t i)
{
    struct bps_rdma_stream *lane = &side->lanes[i];
    await(&lane->proof, BPS_PROOF_SENT | BPS_PROOF_RECEIVED);
    bps_rdma_start(lane, i, 0, side, arrived, notify);
    for (uint32_t slot = 0; slot < N_SLOTS; slot++)
        CHECK(bps_rdma_bind(lane, slot, (uint64_t)side->landing[i][slot][0], (uint64_t)side->landing[i][slot][1], NBYTES,
                            0, 1) == 0);
}

int main(int argc, char **argv)
{
    pthread_t posters[2 * N_LANES];
    static char registered[1000];
    uint64_t one = 1;
    bps_verbs.get_cq_event = get_cq_event;
    bps_verbs.ack_cq_events = ack_cq_events;
    bps_verbs.get_async_event = get_async_event;
    end_ns = deadline_of(argc, argv);
    make(&sides[0]);
    make(&sides[1]);
    for (int i = 0; i < 2 * N_LANES; i++)
        CHECK(bps_rdma_prove(&sides[i % 2].lanes[i / 2]) == 0);
    for (uint32_t i = 0; i < 2 * N_LANES; i++)
        open_lane(&sides[i % 2], i / 2);
    for (int i = 0; i < 2 * N_LANES; i++)
        for (uint32_t slot = 0; slot < N_SLOTS; slot++) { /* as the peer said at the rendezvous */
            uint64_t(*landing)[N_WORDS] = sides[!(i % 2)].landing[i / 2][slot];
            pthread_mutex_lock(&sides[i % 2].lanes[i / 2].lock);
            sides[i % 2].lanes[i / 2].out[slot] = (struct bps_slot_out){{(uint64_t)landing[0], (uint64_t)landing[1]},
                                                                       NBYTES, 9, 0};
            pthread_mutex_unlock(&sides[i % 2].lanes[i / 2].lock);
        }
    for (uintptr_t i = 0; i < 2 * N_LANES; i++)
        CHECK(bps_start_thread(&posters[i], post, (void *)i) == 0);
    for (size_t i = 0; bps_load(&n_done) < 2 * N_LANES; i++) {
        struct bps_rdma_stream *lane = &sides[i % 2].lanes[i / 2 % 2];
        CHECK(bps_rdma_bind(lane, SPARE, 8, 8, 8, 0, 1) == 0);
        bps_rdma_unbind(lane, SPARE);
        if (i < sizeof registered)
            CHECK(bps_region_add(&sides[i % 2].rail.regions, (uint64_t)&registered[i], 1, 1) == 0);
        bps_wait(&n_done, bps_load(&n_done), 1000000);
    }
    for (int i = 0; i < 2 * N_LANES; i++)
        pthread_join(posters[i], NULL);
    for (int i = 0; i < 2 * N_LANES; i++) {
        bps_rdma_end(&sides[i % 2].lanes[i / 2]);
        bps_rail_remove_stream(&sides[i % 2].rail, &sides[i % 2].lanes[i / 2]);
    }
    for (int i = 0; i < 2; i++) {
        bps_store(&sides[i].rail.stopping, 1);
        CHECK(write(sides[i].rail.wake_fd, &one, 8) == 8);
        pthread_join(sides[i].rail.thread, NULL);
    }
    printf("%u writes\n", n_writes);
    return n_writes == 0;
}
