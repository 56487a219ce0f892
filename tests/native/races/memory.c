/* The loops of `bpsfast perf` over shared memory: both sides announce and copy at once, a third thread sets the goal. */
#include "../node.h"
#include "perf_memory.h"

enum { DEPTH = 8, NBYTES = 8192 };

static struct bps_perf_memory sides[2];
static uint64_t duration_ns, n_turns;

static void *run(void *argument)
{
    struct bps_perf_memory *side = argument;
    CHECK(bps_perf_memory_bandwidth(side, side == sides ? UINT64_MAX : 1000, duration_ns) == 0);
    CHECK(side->received >= (side == sides ? 1000 : 1));
    return NULL;
}

static void *take_turns(void *argument)
{
    struct bps_perf_memory *side = argument;
    side->sent = side->received = 0;
    CHECK(bps_perf_memory_latency(side, n_turns, side == sides, NULL) == 0);
    return NULL;
}

static void *be_cancelled(void *argument)
{
    struct bps_perf_memory *side = argument;
    side->sent = side->received = 0;
    side->receive_goal = UINT64_MAX;
    CHECK(bps_perf_memory_bandwidth(side, 0, 0) == ECANCELED);
    return NULL;
}

int main(int argc, char **argv)
{
    struct bps_doorbell bells[2] = {{.magic = BPS_DOORBELL_MAGIC}, {.magic = BPS_DOORBELL_MAGIC}};
    struct bps_lane *lanes[2] = {lane_make(LANE_CAPACITY), lane_make(LANE_CAPACITY)};
    char *data[2] = {zeroed(DEPTH * NBYTES), zeroed(DEPTH * NBYTES)};
    pthread_t threads[2];
    duration_ns = deadline_of(argc, argv) - bps_now_ns();
    n_turns = 500;
    for (int i = 0; i < 2; i++)
        sides[i] = (struct bps_perf_memory){
            .incoming = lanes[!i], .outgoing = lanes[i], .incoming_capacity = LANE_CAPACITY,
            .outgoing_capacity = LANE_CAPACITY, .own_bell = &bells[i], .peer_bell = &bells[!i], .peer_data = data[!i],
            .sink = zeroed(NBYTES), .nbytes = NBYTES, .stream_nbytes = 4096, .awake_ns = 10000,
            .stall_ns = 30000000000u, .depth = DEPTH, .receive_goal = UINT64_MAX};
    sides[0].receive_goal = 1000;
    for (int i = 0; i < 2; i++)
        CHECK(bps_start_thread(&threads[i], run, &sides[i]) == 0);
    pthread_join(threads[0], NULL); /* it knows how much it sent, and says so */
    __atomic_store_n(&sides[1].receive_goal, sides[0].sent, __ATOMIC_RELEASE);
    bps_ring_doorbell(&bells[1], 1);
    pthread_join(threads[1], NULL);
    printf("%lu slots\n", (unsigned long)sides[1].received);
    for (int i = 0; i < 2; i++)
        CHECK(bps_start_thread(&threads[i], take_turns, &sides[i]) == 0);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < 2; i++)
        CHECK(bps_start_thread(&threads[i], be_cancelled, &sides[i]) == 0);
    for (int i = 0; i < 2; i++) {
        bps_store(&sides[i].cancel, 1);
        pthread_join(threads[i], NULL);
    }
    for (int i = 0; i < 2; i++) {
        free(sides[i].sink);
        free(lanes[i]);
        free(data[i]);
    }
    return 0;
}
