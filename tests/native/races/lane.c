/* Lanes and a doorbell: producers write data and announce it, one consumer takes both and gives the room back. */
#include "../node.h"

enum { N_PRODUCERS = 3, CAPACITY = 8, N_SLOTS = 16 };

struct producer {
    struct bps_port port; /* two threads announce through it */
    uint64_t data[2][N_SLOTS]; /* plain memory: the lane alone orders what is written and read here */
    uint32_t taken[2];         /* by the consumer: entries of each thread */
};

static struct node node;
static struct producer producers[N_PRODUCERS];
static uint64_t end_ns, n_taken;
static uint32_t n_done;

struct hand {
    struct producer *producer;
    uint32_t half;
};

static void *produce(void *argument)
{
    struct hand *hand = argument;
    for (uint32_t i = 1; bps_now_ns() < end_ns; i++) {
        uint32_t seen;
        while (i - (seen = bps_load(&hand->producer->taken[hand->half])) > N_SLOTS)
            bps_wait(&hand->producer->taken[hand->half], seen, 1000000);
        hand->producer->data[hand->half][i % N_SLOTS] = i;
        struct bps_entry entry = {hand->half, 1, i, 0, 0, 0, 0};
        int status;
        do
            status = bps_port_announce(&hand->producer->port, &entry);
        while (status == BPS_INTERRUPTED); /* the lane was full for a slice of time */
        CHECK(status == BPS_DONE);
    }
    bps_add(&n_done, 1);
    bps_ring_doorbell(&node.bell, 1);
    return NULL;
}

static int consume(void)
{
    struct bps_entry entry;
    int found = 0;
    for (int p = 0; p < N_PRODUCERS; p++)
        while (bps_lane_pop(producers[p].port.lane, CAPACITY, &entry) == 0) {
            uint32_t *taken = &producers[p].taken[entry.part];
            CHECK(entry.round == *taken + 1 && producers[p].data[entry.part][entry.round % N_SLOTS] == entry.round);
            bps_store(taken, entry.round);
            bps_wake(taken, 1);
            n_taken++;
            found = 1;
        }
    return found;
}

int main(int argc, char **argv)
{
    pthread_t threads[2 * N_PRODUCERS];
    struct hand hands[2 * N_PRODUCERS];
    end_ns = deadline_of(argc, argv);
    node_make(&node, 1);
    for (int p = 0; p < N_PRODUCERS; p++)
        port_make(&producers[p].port, &node, lane_make(CAPACITY));
    for (uint32_t i = 0; i < 2 * N_PRODUCERS; i++) {
        hands[i] = (struct hand){&producers[i / 2], i % 2};
        CHECK(bps_start_thread(&threads[i], produce, &hands[i]) == 0);
    }
    for (;;) {
        uint32_t seen = bps_load(&node.bell.rings);
        int over = bps_load(&n_done) == 2 * N_PRODUCERS; /* read before the lanes are: nothing comes after it */
        if (!consume() && over)
            break;
        bps_await_doorbell(&node.bell, seen, 10000, 100000000);
    }
    for (int i = 0; i < 2 * N_PRODUCERS; i++)
        pthread_join(threads[i], NULL);
    for (int p = 0; p < N_PRODUCERS; p++)
        free(producers[p].port.lane);
    node_free(&node);
    printf("%lu entries\n", (unsigned long)n_taken);
    return n_taken == 0;
}
