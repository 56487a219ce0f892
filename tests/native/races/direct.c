/* Direct calls: ranks sum, copy and meet through one channel, in cells and in boxes; some decline some sums. Then some
 * wait for one that stays away until their deadline. */
#include "../node.h"
#include "direct_calls.h"

enum { MOST_RANKS = 3, N_CALLS = 32 };
static const uint64_t MOST = 3 << 20;

static int n_ranks;
static void *memory;
static uint64_t end_ns, n_done;
static pthread_barrier_t all;

static void sum_i32(const struct bps_sum_call *call)
{
    bps_sum_lines(BPS_TYPE_I32, BPS_OP_SUM, call->n, call, 1, call->back);
}

static uint64_t drawn(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static uint64_t nbytes_of(uint64_t draw)
{
    static const uint64_t sizes[] = {4, 60, 2048, 2052, 4096, 5000, 200000, 700000, 3 << 20};
    return sizes[draw % (sizeof sizes / sizeof *sizes)] / 4 * 4;
}

static int32_t element(const char *at)
{
    int32_t found;
    memcpy(&found, at, 4);
    return found;
}

/* One call, which all ranks draw alike. */
static void call_once(struct bps_channel *channel, uint64_t *state, int32_t *x, uint64_t what)
{
    static const struct bps_direct_sum sum = {sum_i32, 1, 0};
    struct bps_direct_call call = {.deadline_ns = bps_now_ns() + 60000000000u, .slice_ns = 100000};
    struct bps_direct_sum this = sum;
    int me = channel->port.me, n = channel->port.n;
    static __thread char taken[MOST_RANKS][1 << 20];
    uint64_t form = drawn(state) % 10, nbytes = nbytes_of(drawn(state)), draw = drawn(state);
    uint64_t most = nbytes < 1 << 20 ? nbytes : 1 << 20;
    int32_t given = (int32_t)(draw % 1000), total = given * n + n * (n - 1) / 2;
    this.call = what;
    for (uint64_t i = 0; i < nbytes / 4; i++)
        x[i] = given + me;
    if (form == 0) {
        CHECK(bps_direct_barrier(channel, what, &call) == BPS_DIRECT_DONE);
    } else if (form == 1) {
        int root = (int)(draw % (uint64_t)n);
        CHECK(bps_direct_broadcast(channel, root, (char *)x, nbytes, what, &call) == BPS_DIRECT_DONE);
        for (uint64_t i = 0; i < nbytes / 4; i++)
            CHECK(x[i] == given + root);
    } else if (form == 2) {
        struct bps_direct_gather gather = {.own = (char *)x, .what = what};
        for (int r = 0; r < n; r++) {
            gather.places[r] = taken[r];
            gather.nbytes[r] = most >> r;
        }
        CHECK(bps_direct_all_gather(channel, &gather, &call) == BPS_DIRECT_DONE);
        for (int r = 0; r < n; r++)
            for (uint64_t i = 0; i + 4 <= most >> r; i += 4)
                CHECK(element(taken[r] + i) == given + r);
    } else if (form == 5) { /* in place, or not */
        struct bps_direct_scatter scatter = {.to = draw >> 40 & 1 ? taken[0] : (char *)x + nbytes / 16 * 4 * (uint64_t)me,
                                             .sum = &this};
        for (int r = 0; r < n; r++) {
            scatter.from[r] = (char *)x + nbytes / 16 * 4 * (uint64_t)r;
            scatter.nbytes[r] = nbytes / 16 * 4 >> r;
        }
        CHECK(bps_direct_reduce_scatter(channel, &scatter, &call) == BPS_DIRECT_DONE);
        for (uint64_t i = 0; i + 4 <= scatter.nbytes[me]; i += 4)
            CHECK(element(scatter.to + i) == total);
    } else if (form == 4) { /* rank r has nbytes >> r for each */
        struct bps_direct_pieces pieces;
        for (int r = 0; r < n; r++) {
            pieces.from[r] = (char *)x;
            pieces.to[r] = taken[r];
            pieces.given[r] = most >> me;
            pieces.wanted[r] = most >> r;
        }
        CHECK(bps_direct_all_to_all(channel, &pieces, what, &call) == BPS_DIRECT_DONE);
        for (int r = 0; r < n; r++)
            for (uint64_t i = 0; i + 4 <= most >> r; i += 4)
                CHECK(element(taken[r] + i) == given + r);
    } else if (form == 3) { /* some decline; the others find out before they write */
        if (draw >> 32 & 1ull << me) {
            bps_direct_decline(channel, nbytes);
        } else {
            int status = bps_direct_all_reduce(channel, (char *)x, (char *)x, nbytes, &this, &call);
            int is_declined = (draw >> 32 & ((1ull << n) - 1)) != 0;
            CHECK(status == (is_declined ? BPS_DIRECT_DECLINED : BPS_DIRECT_DONE));
            for (uint64_t i = 0; i < nbytes / 4; i++)
                CHECK(x[i] == (is_declined ? given + me : total));
        }
        pthread_barrier_wait(&all);
    } else {
        CHECK(bps_direct_all_reduce(channel, (char *)x, (char *)x, nbytes, &this, &call) == BPS_DIRECT_DONE);
        for (uint64_t i = 0; i < nbytes / 4; i++)
            CHECK(x[i] == total);
    }
}

static void *rank(void *argument)
{
    struct bps_channel channel = {.port = {.n = n_ranks, .me = (int)(intptr_t)argument, .node_pidfd = -1,
                                           .awake_ns = 20000}};
    struct bps_direct_call call = {.deadline_ns = UINT64_MAX, .slice_ns = 100000};
    uint64_t state = 88172645463325252u, what = 0;
    int32_t *x = zeroed(MOST), go_on = 1;
    bps_channel_open(&channel, memory, MOST);
    while (go_on) {
        for (int i = 0; i < N_CALLS; i++)
            call_once(&channel, &state, x, ++what);
        go_on = bps_now_ns() < end_ns;
        CHECK(bps_direct_broadcast(&channel, 0, (char *)&go_on, sizeof go_on, ++what, &call) == BPS_DIRECT_DONE);
    }
    if (channel.port.me == 0) {
        n_done = what;
    } else {
        call.deadline_ns = bps_now_ns() + 20000000;
        CHECK(bps_direct_barrier(&channel, ++what, &call) == BPS_DIRECT_TIMED_OUT);
    }
    free(x);
    return NULL;
}

int main(int argc, char **argv)
{
    end_ns = deadline_of(argc, argv);
    uint64_t begin_ns = bps_now_ns(), n_calls = 0, last_ns = end_ns;
    for (n_ranks = 2; n_ranks <= MOST_RANKS; n_ranks++) {
        pthread_t threads[MOST_RANKS];
        end_ns = n_ranks == MOST_RANKS ? last_ns : begin_ns + (last_ns - begin_ns) / 2;
        memory = aligned_alloc(4096, bps_direct_up(bps_direct_layout(n_ranks, MOST).nbytes, 4096));
        CHECK(memory != NULL);
        bps_channel_format(memory, n_ranks, 0xfffffff0u); /* numbers of chunks begin again after a while */
        CHECK(pthread_barrier_init(&all, NULL, (unsigned)n_ranks) == 0);
        for (int r = 0; r < n_ranks; r++)
            CHECK(bps_start_thread(&threads[r], rank, (void *)(intptr_t)r) == 0);
        for (int r = 0; r < n_ranks; r++)
            pthread_join(threads[r], NULL);
        pthread_barrier_destroy(&all);
        free(memory);
        n_calls += n_done;
    }
    printf("%llu calls\n", (unsigned long long)n_calls);
    return n_calls == 0;
}
