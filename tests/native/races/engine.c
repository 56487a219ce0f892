/* Two engines of three threads each: one owns all parts, the other is a member of them. Results go by the owner's
 * dispatch, whose stream takes them at once or is acknowledged later; a courier in a transport's and an event loop's
 * place carries the member's partials. Four ranks push rounds through `bps_pipelined_transfer`, while a controller puts
 * parts in, freezes, commits, maps segments that parts wait for, asks what is missing, and retires. */
#include "../node.h"

enum { N_PARTS = 6, N_RANKS = 4, N_WORDS = 128, NBYTES = 8 * N_WORDS, VISITOR = 9, WIRE = 2 };

/* On the wire: frames, of which dense parts use no head. */
struct place {
    char bytes[BPS_FRAME_LENGTH + NBYTES] __attribute__((aligned(64)));
};

static struct node owner, member;
static struct bps_port ports[N_RANKS]; /* of the owner's two ranks, of the member's */
static uint64_t inputs[N_RANKS][N_PARTS][N_WORDS];
static uint64_t results[2][N_PARTS][2][N_WORDS]; /* by node, part, parity */
static uint64_t partials[N_PARTS][N_WORDS];
static struct place slots[N_PARTS], frames[2][N_PARTS][3]; /* by node: results of both parities, the partial */
static uint64_t visitor[2][2][N_WORDS], visitor_results[2][N_WORDS];
static uint64_t end_ns;
static uint32_t couriers_end, controller_end, n_rounds, n_visits;

static int is_coded(uint32_t part) { return part % 2; }

static void *work_as_rank(void *argument)
{
    uint32_t rank = (uint32_t)(uintptr_t)argument, goes_on = 1;
    uint64_t values[N_PARTS][N_WORDS], sums[N_PARTS][N_WORDS];
    struct bps_chunk chunks[N_PARTS];
    for (uint32_t round = 1; goes_on; round++) {
        for (uint32_t part = 0; part < N_PARTS; part++) {
            int gives = rank == 0 || (round + part + rank) % 5 != 0;
            for (uint32_t i = 0; i < N_WORDS; i++)
                values[part][i] = round * 1000 + part * 10 + rank + i;
            values[part][N_WORDS - 1] = rank == 0 && bps_now_ns() < end_ns; /* whether rank 0 wants another round */
            chunks[part] = (struct bps_chunk){
                gives ? (uint64_t)values[part] : 0, (uint64_t)sums[part], NBYTES, (uint64_t)inputs[rank][part],
                (uint64_t)results[rank / 2][part][round & 1], part * NBYTES, part, round, 0, 0, 0,
            };
        }
        uint32_t in = 0, out = 0;
        int status;
        do
            status = bps_pipelined_transfer(&ports[rank], chunks, N_PARTS, 4, &in, &out, UINT64_MAX);
        while (status == BPS_INTERRUPTED);
        CHECK(status == BPS_DONE && out == N_PARTS);
        for (uint32_t part = 0; part < N_PARTS; part++)
            for (uint32_t i = 0; i < N_WORDS - 1; i++) {
                uint64_t sum = 0;
                for (uint32_t other = 0; other < N_RANKS; other++)
                    if (other == 0 || (round + part + other) % 5 != 0)
                        sum += round * 1000 + part * 10 + other + i;
                CHECK(sums[part][i] == sum);
            }
        goes_on = sums[0][N_WORDS - 1] != 0;
        bps_steps_next(&ports[rank].steps, &ports[rank].lane->tally, bps_now_ns());
        if (rank == 0)
            n_rounds = round;
    }
    return NULL;
}

/* Carries the member's partials to the owner, as a transport and the node's loop do. */
static void *carry(void *argument)
{
    (void)argument;
    while (!bps_load(&couriers_end)) {
        bps_events_await(&member.core->events, 50000000);
        uint32_t n = bps_events_take(&member.core->events);
        for (uint32_t i = 0; i < n; i++) {
            const struct bps_event *event = &member.core->events.taken[i];
            CHECK(event->kind == BPS_EVENT_FORWARD);
            if (!(event->code & BPS_FLAG_EMPTY))
                memcpy(slots[event->part].bytes, (void *)event->address, event->nbytes);
            bps_on_arrived(owner.core, WIRE, event->part, event->round, event->code);
        }
    }
    return NULL;
}

/* A `bps_post_fn`: results of the owner go to the member. */
static int post(void *stream, uint32_t part, uint32_t round, uint32_t flags, uint64_t address, uint64_t nbytes,
                int may_be_at_once, int *is_delivered)
{
    struct bps_event delivered = {BPS_EVENT_DELIVERED, WIRE, part, round, 0, 0, nbytes};
    char *place = is_coded(part) ? frames[1][part][round & 1].bytes : (char *)results[1][part][round & 1];
    memcpy(place, (void *)address, nbytes);
    *is_delivered = may_be_at_once && round % 3 == 0;
    if (!*is_delivered)
        CHECK(bps_events_push(stream, delivered) == 0);
    bps_on_arrived(member.core, WIRE, part, round, flags);
    return 0;
}

/* Acknowledges what was posted, as a stream does. */
static void *acknowledge(void *argument)
{
    struct bps_events *posted = argument;
    while (!bps_load(&couriers_end)) {
        bps_events_await(posted, 50000000);
        uint32_t n = bps_events_take(posted);
        for (uint32_t i = 0; i < n; i++)
            bps_on_notify(owner.core, posted->taken[i].kind, WIRE, posted->taken[i].part, posted->taken[i].round, 0,
                          posted->taken[i].nbytes);
    }
    return NULL;
}

/* As a node's dispatcher makes it; the member reads all parts. */
static void dispatch_make(struct bps_dispatch *dispatch, struct bps_readers **readers, struct bps_events *posted)
{
    CHECK(bps_dispatch_open(dispatch, 0) == 0 && bps_events_init(posted, 16) == 0);
    CHECK(bps_send_add(&dispatch->queue, WIRE, 0) == 0);
    dispatch->queue.credit_nbytes = 2 * NBYTES;
    dispatch->routes = zeroed((WIRE + 1) * sizeof *dispatch->routes);
    dispatch->n_routes = WIRE + 1;
    dispatch->routes[WIRE] = (struct bps_route){zeroed(sizeof(struct bps_post_target)), 1, 1, 0, NULL, 0};
    dispatch->routes[WIRE].targets[0] = (struct bps_post_target){posted, post, NULL};
    dispatch->order = zeroed(N_PARTS * sizeof(uint32_t));
    dispatch->n_order = N_PARTS;
    CHECK(bps_dispatch_room(dispatch, N_PARTS - 1) == 0);
    *readers = zeroed(sizeof **readers + sizeof(uint32_t));
    (*readers)->n = 1;
    (*readers)->sources[0] = WIRE;
    for (uint32_t i = 0; i < N_PARTS; i++) {
        dispatch->order[i] = i;
        dispatch->parts[i] = (struct bps_known_part){i, *readers};
    }
    dispatch->engine = owner.core;
    dispatch->notify = bps_on_notify;
    bps_on_attach(owner.core, dispatch);
}

/* What a controller does to a peer whose link is about to be closed, and a reader of counters. */
static void hold_for_a_moment(struct bps_dispatch *dispatch)
{
    pthread_mutex_lock(&dispatch->lock);
    bps_send_hold(&dispatch->queue, WIRE);
    bps_dispatch_settle(dispatch, WIRE);
    CHECK(dispatch->posting == BPS_SEND_NOBODY);
    struct bps_send_peer *peer = &dispatch->queue.peers[WIRE];
    peer->is_held = 0; /* `bps_send_resume` would forget what is in flight */
    dispatch->queue.n_busy_held -= peer->n_in_flight != 0;
    bps_send_update(&dispatch->queue, WIRE);
    pthread_mutex_unlock(&dispatch->lock);
    bps_dispatch_pump(dispatch);
}

static void commit(struct node *node)
{
    uint32_t order[VISITOR + 1];
    struct bps_row rows[VISITOR + 1];
    for (uint32_t i = 0; i <= VISITOR; i++)
        order[i] = (i * 7 + node->core->generation) % (VISITOR + 1);
    CHECK(bps_freeze(node->core, UINT64_MAX / 2) == 0);
    bps_table_report(node->core, rows, VISITOR + 1);
    CHECK(bps_table_commit(node->core, node->core->generation + 1, order, VISITOR + 1) == 0);
}

/* A part of the owner's ranks alone comes and goes, its inputs in a segment that is mapped after they were announced. */
static void *control(void *argument)
{
    (void)argument;
    static struct bps_gap gap; /* 16 KiB */
    for (uint16_t visit = 1; !bps_load(&controller_end); visit = visit % 60 + 1) {
        struct bps_part part = {.kernel = sum_words, .nbytes = NBYTES, .n_elements = N_WORDS, .divisor = 1, .n_local = 2,
                                .owned = 1, .outputs = {(uint64_t)visitor_results[0], (uint64_t)visitor_results[1]}};
        part_inputs(&part, 2, (uint32_t[]){0, 1}, (void *[]){NULL, NULL});
        CHECK(bps_table_put(owner.core, VISITOR, &part) == 0);
        commit(&owner);
        commit(&member);
        hold_for_a_moment(owner.core->dispatch);
        for (int rank = 0; rank < 2; rank++) {
            for (int i = 0; i < N_WORDS; i++)
                visitor[rank][visit & 1][i] = visit + (uint64_t)rank;
            struct bps_entry entry = {VISITOR, 1, 1, 0, visit, (visit & 1) * NBYTES, 0};
            CHECK(bps_port_announce(&ports[rank], &entry) == BPS_DONE);
        }
        CHECK(bps_table_missing(owner.core, VISITOR, &gap) == 0);
        for (uint32_t rank = 0; rank < 2; rank++)
            CHECK(bps_map_segment(owner.core, rank, visit, (uint64_t)visitor[rank], sizeof visitor[rank]) == 0);
        int status;
        do
            status = bps_port_wait(&ports[visit & 1], VISITOR, 1, UINT64_MAX);
        while (status == BPS_INTERRUPTED);
        CHECK(status == BPS_DONE);
        for (int i = 0; i < N_WORDS; i++)
            CHECK(visitor_results[1][i] == 2u * visit + 1);
        uint32_t index = VISITOR, culprit;
        CHECK(bps_table_retire(owner.core, &index, 1, &culprit) == BPS_RETIRED);
        for (uint32_t rank = 0; rank < 2; rank++) /* the next visit of this number waits again */
            CHECK(bps_map_segment(owner.core, rank, visit, 0, 0) == 0);
        n_visits++;
    }
    return NULL;
}

static void add_part(uint32_t index)
{
    struct bps_part part = {.kernel = sum_words, .nbytes = NBYTES, .n_elements = N_WORDS, .divisor = 1, .n_local = 2};
    struct bps_part mine = part, theirs = part;
    mine.owned = mine.to_wire = mine.n_after = 1;
    for (int parity = 0; parity < 2; parity++)
        mine.outputs[parity] = (uint64_t)results[0][index][parity];
    part_inputs(&mine, 3, (uint32_t[]){0, 1, WIRE}, (void *[]){NULL, NULL, slots[index].bytes});
    theirs.owner = WIRE;
    theirs.outputs[0] = is_coded(index) ? (uint64_t)frames[1][index][2].bytes : (uint64_t)partials[index];
    part_inputs(&theirs, 2, (uint32_t[]){0, 1}, (void *[]){NULL, NULL});
    for (int node = 0; node < 2 && is_coded(index); node++) {
        struct bps_codec *codec = codec_make(N_WORDS);
        codec->frame = frames[node][index][2].bytes;
        for (int parity = 0; parity < 2; parity++) {
            codec->frames[parity] = frames[node][index][parity].bytes;
            codec->results[parity] = node == 1 ? results[1][index][parity] : NULL;
        }
        (node == 0 ? &mine : &theirs)->codec = codec;
    }
    CHECK(bps_table_put(owner.core, index, &mine) == 0 && bps_table_put(member.core, index, &theirs) == 0);
}

int main(int argc, char **argv)
{
    pthread_t ranks[N_RANKS], couriers[2], controller;
    struct node *nodes[2] = {&owner, &member};
    static struct bps_dispatch dispatch;
    static struct bps_events posted;
    struct bps_readers *readers;
    end_ns = deadline_of(argc, argv);
    for (int i = 0; i < 2; i++) {
        node_make(nodes[i], 3);
        nodes[i]->core->awake_ns = 20000;
        CHECK(bps_start(nodes[i]->core, 3) == 0);
        for (int k = 2 * i; k < 2 * i + 2; k++) {
            struct bps_lane *lane = lane_make(LANE_CAPACITY);
            uint32_t source = node_add_source(nodes[i], BPS_RANK, lane);
            port_make(&ports[k], nodes[i], lane);
            CHECK(bps_map_segment(nodes[i]->core, source, 0, (uint64_t)inputs[k], sizeof inputs[k]) == 0);
        }
        CHECK(node_add_source(nodes[i], BPS_WIRE_PEER, NULL) == WIRE);
    }
    dispatch_make(&dispatch, &readers, &posted);
    for (uint32_t i = 0; i < N_PARTS; i++)
        add_part(i);
    commit(&owner);
    commit(&member);
    CHECK(bps_start_thread(&couriers[0], carry, NULL) == 0);
    CHECK(bps_start_thread(&couriers[1], acknowledge, &posted) == 0);
    CHECK(bps_start_thread(&controller, control, NULL) == 0);
    for (uintptr_t i = 0; i < N_RANKS; i++)
        CHECK(bps_start_thread(&ranks[i], work_as_rank, (void *)i) == 0);
    for (int i = 0; i < N_RANKS; i++)
        pthread_join(ranks[i], NULL);
    bps_store(&controller_end, 1);
    pthread_join(controller, NULL);
    bps_store(&couriers_end, 1);
    bps_events_wake(&member.core->events);
    bps_events_wake(&posted);
    for (int i = 0; i < 2; i++)
        pthread_join(couriers[i], NULL);
    for (int i = 0; i < 2; i++) {
        bps_stop(nodes[i]->core);
        node_free(nodes[i]);
    }
    CHECK(dispatch.failure == 0 && dispatch.n_queued == 0);
    bps_dispatch_free(&dispatch);
    free(readers);
    free(posted.items);
    free(posted.taken);
    for (int i = 0; i < N_RANKS; i++)
        free(ports[i].lane);
    printf("%u rounds, %u visits\n", n_rounds, n_visits);
    return n_rounds == 0 || n_visits == 0;
}
