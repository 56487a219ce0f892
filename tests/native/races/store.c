/* A store that three ranks push to and are answered from, each through a part of its own, with a bounded staleness;
 * the controller asks meanwhile whose pushes answers wait for. */
#include "../node.h"

enum { N_RANKS = 3, N_WORDS = 64, NBYTES = 8 * N_WORDS, STALENESS = 2 };

static struct node node;
static struct bps_port ports[N_RANKS];
static uint64_t weights[N_WORDS], inputs[N_RANKS][N_WORDS], outputs[N_RANKS][2][N_WORDS];
static uint64_t end_ns;
static uint32_t n_rounds, n_left;

static void step_words(void *values, void *held, void *momentum, int64_t n, int64_t what, double rate, double mu)
{
    uint64_t *mine = values, *kept = held;
    (void)momentum, (void)rate, (void)mu;
    for (int64_t i = 0; i < n; i++)
        switch (what) {
        case BPS_STORE_READ: mine[i] = kept[i]; break;
        case BPS_STORE_SET: kept[i] = mine[i]; break;
        default: kept[i] += mine[i];
        }
}

static void *work_as_rank(void *argument)
{
    uint32_t rank = (uint32_t)(uintptr_t)argument;
    struct bps_port *port = &ports[rank];
    for (uint32_t round = 1;; round++) {
        int gives = round > 1 || rank == 0;
        for (int i = 0; gives && i < N_WORDS; i++)
            inputs[rank][i] = round > 1;
        struct bps_entry entry = {rank, 1, round, gives ? 0 : BPS_FLAG_EMPTY, 0, 0, 0};
        CHECK(bps_port_announce(port, &entry) == BPS_DONE);
        int status;
        do
            status = bps_port_wait(port, rank, round, UINT64_MAX);
        while (status == BPS_INTERRUPTED && bps_load(&n_rounds) == 0);
        if (status != BPS_DONE)
            break; /* who waited for others' pushes, of which no more come */
        const uint64_t *answer = outputs[rank][round & 1];
        uint32_t behind = round > STALENESS + 1 ? round - 1 - STALENESS : 0;
        CHECK(answer[0] >= round - 1 + (N_RANKS - 1) * (uint64_t)behind);
        for (int i = 1; i < N_WORDS; i++)
            CHECK(answer[i] == answer[0]);
        if (rank == 0 && bps_now_ns() >= end_ns)
            bps_store(&n_rounds, round);
        if (bps_load(&n_rounds) != 0)
            break;
    }
    bps_add(&n_left, 1);
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t ranks[N_RANKS];
    uint32_t order[N_RANKS] = {0, 1, 2};
    static uint32_t behind[BPS_MAX_SOURCES];
    end_ns = deadline_of(argc, argv);
    node_make(&node, 2);
    CHECK(bps_start(node.core, 2) == 0);
    struct bps_weight_store *store = bps_store_make(N_RANKS, NULL, 0);
    store->kernel = step_words;
    store->weights = weights;
    store->staleness = STALENESS;
    for (uint32_t i = 0; i < N_RANKS; i++) {
        struct bps_lane *lane = lane_make(LANE_CAPACITY);
        struct bps_part part = {.kernel = sum_words, .nbytes = NBYTES, .n_elements = N_WORDS, .divisor = 1, .n_local = 1,
                                .owned = 1, .store = store, .outputs = {(uint64_t)outputs[i][0], (uint64_t)outputs[i][1]}};
        uint32_t source = node_add_source(&node, BPS_RANK, lane);
        port_make(&ports[i], &node, lane);
        CHECK(bps_map_segment(node.core, source, 0, (uint64_t)inputs[i], NBYTES) == 0);
        part_inputs(&part, 1, &source, (void *[]){NULL});
        CHECK(bps_table_put(node.core, i, &part) == 0);
    }
    CHECK(bps_freeze(node.core, UINT64_MAX / 2) == 0 && bps_table_commit(node.core, 1, order, N_RANKS) == 0);
    for (uintptr_t i = 0; i < N_RANKS; i++)
        CHECK(bps_start_thread(&ranks[i], work_as_rank, (void *)i) == 0);
    while (bps_load(&n_left) < N_RANKS) {
        pthread_mutex_lock(&node.core->lock);
        for (uint32_t i = 0; i < N_RANKS; i++)
            CHECK(bps_store_behind(node.core, i, behind, BPS_MAX_SOURCES) < N_RANKS);
        pthread_mutex_unlock(&node.core->lock);
        bps_wait(&n_left, bps_load(&n_left), 1000000);
    }
    for (int i = 0; i < N_RANKS; i++)
        pthread_join(ranks[i], NULL);
    bps_stop(node.core);
    node_free(&node);
    for (int i = 0; i < N_RANKS; i++)
        free(ports[i].lane);
    printf("%u rounds\n", n_rounds);
    return n_rounds == 0;
}
