/* Board words: one thread publishes results of two parities, others wait for each round and read it; at the end the job
 * is aborted while all of them wait. */
#include "../node.h"

enum { N_WAITERS = 4, N_WORDS = 32, PART = 3 };

static struct node node;
static uint64_t results[2][N_WORDS]; /* plain memory: the word alone orders it */
static uint32_t consumed[N_WAITERS];
static uint64_t end_ns;
static struct bps_port ports[N_WAITERS];

static void *await_rounds(void *argument)
{
    struct bps_port *port = argument;
    uint32_t *mine = &consumed[port - ports];
    for (uint32_t round = 1;; round++) {
        int status;
        do
            status = bps_port_wait(port, PART, round, UINT64_MAX);
        while (status == BPS_INTERRUPTED);
        if (status == BPS_ABORTED) {
            CHECK(strcmp((char *)node.board + BPS_REASON_OFFSET, "TestError: over") == 0);
            return NULL;
        }
        CHECK(status == BPS_DONE);
        for (int i = 0; i < N_WORDS; i++)
            CHECK(results[round & 1][i] == round);
        bps_steps_next(&port->steps, &port->lane->tally, bps_now_ns());
        bps_store(mine, round);
        bps_wake(mine, 1);
    }
}

/* A second thread of each rank, which looks and does not wait. */
static void *look(void *argument)
{
    struct bps_port *port = argument;
    uint32_t round = 0;
    while (bps_port_trouble(port, 1) == BPS_DONE) {
        if (bps_port_wait(port, PART, round + 1, 0) == BPS_DONE)
            round++;
        bps_wait(bps_board_word(port->board, PART), round, 100000);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t threads[2 * N_WAITERS];
    uint32_t round = 0;
    end_ns = deadline_of(argc, argv);
    node_make(&node, 1);
    for (int i = 0; i < N_WAITERS; i++) {
        struct bps_lane *lane = lane_make(4);
        node_add_source(&node, BPS_RANK, lane);
        port_make(&ports[i], &node, lane);
    }
    for (int i = 0; i < 2 * N_WAITERS; i++)
        CHECK(bps_start_thread(&threads[i], i % 2 ? look : await_rounds, &ports[i / 2]) == 0);
    while (bps_now_ns() < end_ns) {
        round++;
        for (int i = 0; i < N_WAITERS; i++) { /* whoever submits the next round but one is done with this parity */
            uint32_t seen;
            while ((seen = bps_load(&consumed[i])) + 2 < round)
                bps_wait(&consumed[i], seen, 1000000);
        }
        for (int i = 0; i < N_WORDS; i++)
            results[round & 1][i] = round;
        uint32_t *word = bps_publish(node.core, PART, round, sizeof results[0]);
        if (word != NULL)
            bps_wake(word, INT_MAX);
    }
    for (int i = 0; i < N_WAITERS; i++)
        while (bps_load(&consumed[i]) != round)
            sched_yield();
    bps_abort(node.core, "TestError: over", sizeof "TestError: over");
    bps_abort(node.core, "TestError: too late", sizeof "TestError: too late");
    bps_wake(bps_board_word(node.board, PART), INT_MAX);
    for (int i = 0; i < 2 * N_WAITERS; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < N_WAITERS; i++)
        free(ports[i].lane);
    node_free(&node);
    printf("%u rounds\n", round);
    return round == 0;
}
