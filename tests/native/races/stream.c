/* A link of two nodes, of several streams over TCP connections, a few I/O threads, by epoll and by io_uring: threads post
 * small and large writes from both ends, each round over another stream than the one before; slots are bound and unbound,
 * and another stream is opened, written to and closed meanwhile. */
#include <arpa/inet.h>

#include "../node.h"
#include "io_epoll.h"
#include "io_uring.h"
#include "tcp_stream.h"

enum { N_STREAMS = 3, N_SLOTS = 4, N_POSTERS = 2 * N_SLOTS, SPARE = 5, EPOCH = 3, MOST_THREADS = 9, MOST_WORDS = 20000 };

/* Of each slot; the larger ones are not sent by who posts them, or fill the socket. */
static const uint32_t n_words[N_SLOTS] = {4, 500, 8000, MOST_WORDS};

struct side {
    struct bps_stream *streams[N_STREAMS];
    struct bps_slots slots;
    uint64_t source[N_SLOTS][MOST_WORDS], landing[N_SLOTS][2][MOST_WORDS];
    uint32_t received[N_SLOTS], delivered[N_SLOTS];
};

static struct side sides[2];
static struct bps_io_thread threads[MOST_THREADS];
static uint32_t n_threads;
static uint64_t end_ns;
static uint32_t n_writes, n_done;

static void arrived(void *engine, uint32_t stream, uint32_t part, uint32_t round, uint32_t flags)
{
    struct side *side = engine;
    (void)stream, (void)flags;
    CHECK(bps_load(&side->received[part]) + 1 == round);
    for (uint32_t i = 0; i < n_words[part]; i++)
        CHECK(side->landing[part][round & 1][i] == round + part);
    bps_store(&side->received[part], round);
    bps_wake(&side->received[part], INT_MAX);
}

static void notify(void *engine, uint32_t kind, uint32_t stream, uint32_t part, uint32_t round, uint32_t code,
                   uint64_t nbytes)
{
    struct side *side = engine;
    (void)stream;
    if (kind == BPS_EVENT_LOST) { /* the other end was closed first */
        CHECK(code == 0 && bps_load(&n_done) == N_POSTERS);
        return;
    }
    CHECK(kind == BPS_EVENT_DELIVERED && code == 0 && nbytes == 8 * n_words[part]);
    bps_store(&side->delivered[part], round);
    bps_wake(&side->delivered[part], INT_MAX);
}

static void *post(void *argument)
{
    uint32_t number = (uint32_t)(uintptr_t)argument, slot = number / 2;
    struct side *mine = &sides[number % 2], *theirs = &sides[!(number % 2)];
    uint32_t round = 0;
    for (; bps_now_ns() < end_ns; round++) {
        uint64_t *source = mine->source[slot];
        uint32_t stream = (slot + round) % N_STREAMS;
        await(&mine->delivered[slot], round);
        await(&theirs->received[slot], round); /* as a node, which has the peer's answer before it writes again */
        /* The sanitizer does not see that a connection orders what was read there before what comes over it next. */
        CHECK(bps_slots_next(&theirs->slots, slot) == round + 1);
        for (uint32_t i = 0; i < n_words[slot]; i++)
            source[i] = round + 1 + slot;
        int is_delivered = 0;
        CHECK(bps_stream_post(mine->streams[stream], slot, round + 1, 0, (uint64_t)source, 8 * n_words[slot],
                              round % 5 != 0, &is_delivered) == 0);
        if (is_delivered)
            notify(mine, BPS_EVENT_DELIVERED, stream, slot, round + 1, 0, 8 * n_words[slot]);
    }
    await(&mine->delivered[slot], round);
    await(&theirs->received[slot], round);
    bps_add(&n_writes, round);
    bps_add(&n_done, 1);
    return NULL;
}

static struct bps_stream *make(void *engine, struct bps_slots *slots, int fd, uint32_t number)
{
    struct bps_stream *stream = zeroed(sizeof *stream);
    CHECK(bps_stream_init(stream, slots) == 0);
    stream->engine = engine;
    stream->peer = number;
    stream->arrived = arrived;
    stream->notify = notify;
    stream->out.fd = stream->in.fd = fd;
    return stream;
}

static void nothing_arrived(void *engine, uint32_t stream, uint32_t part, uint32_t round, uint32_t flags)
{
    (void)engine, (void)stream, (void)part, (void)round, (void)flags;
}

static void nothing(void *engine, uint32_t kind, uint32_t stream, uint32_t part, uint32_t round, uint32_t code,
                    uint64_t nbytes)
{
    (void)engine, (void)kind, (void)stream, (void)part, (void)round, (void)code, (void)nbytes;
}

/* A stream that lives for a few writes; its peer notices its end. */
static void live_and_die(uint32_t number)
{
    struct bps_stream *ends[2];
    struct bps_slots slots[2];
    int fds[2], is_delivered = 0;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
    for (int i = 0; i < 2; i++) {
        CHECK(bps_slots_init(&slots[i], 1, EPOCH) == 0);
        ends[i] = make(NULL, &slots[i], fds[i], number);
        ends[i]->arrived = nothing_arrived;
        ends[i]->notify = nothing;
        bps_slots_bind(&slots[i], 0, 8, 8, 64, 0, 1);
        CHECK(bps_stream_start(ends[i], &threads[number % n_threads], &threads[(number + (uint32_t)i) % n_threads]) == 0);
    }
    for (uint32_t round = 1; round < 4; round++)
        CHECK(bps_stream_post(ends[0], 0, round, BPS_FLAG_EMPTY, 0, 0, 1, &is_delivered) == 0);
    bps_stream_close(ends[number % 2]);
    bps_stream_close(ends[!(number % 2)]);
    for (int i = 0; i < 2; i++) {
        bps_stream_free(ends[i]);
        bps_slots_free(&slots[i]);
    }
}

/* Both ends of a connection: unlike that of a socket pair, its kernel acknowledges what the peer's thread has not read. */
static void connect_both(int fds[2])
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t nbytes = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(listener >= 0 && bind(listener, (struct sockaddr *)&address, nbytes) == 0 && listen(listener, 1) == 0);
    CHECK(getsockname(listener, (struct sockaddr *)&address, &nbytes) == 0);
    fds[0] = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(fds[0] >= 0 && connect(fds[0], (struct sockaddr *)&address, nbytes) == 0);
    fds[1] = accept(listener, NULL, NULL);
    CHECK(fds[1] >= 0);
    close(listener);
}

static void run(const struct bps_io_backend *backend, uint32_t n, uint64_t until_ns)
{
    pthread_t posters[N_POSTERS];
    memset(sides, 0, sizeof sides);
    end_ns = until_ns;
    n_done = 0;
    n_threads = n;
    for (uint32_t i = 0; i < n_threads; i++)
        CHECK(bps_io_open(&threads[i], backend) == 0);
    for (int i = 0; i < 2; i++) {
        CHECK(bps_slots_init(&sides[i].slots, SPARE + 1, EPOCH) == 0);
        for (uint32_t slot = 0; slot < N_SLOTS; slot++)
            bps_slots_bind(&sides[i].slots, slot, (uint64_t)sides[i].landing[slot][0],
                           (uint64_t)sides[i].landing[slot][1], 8 * n_words[slot], 0, 1);
    }
    for (uint32_t stream = 0; stream < N_STREAMS; stream++) {
        int fds[2];
        connect_both(fds);
        for (int i = 0; i < 2; i++)
            sides[i].streams[stream] = make(&sides[i], &sides[i].slots, fds[i], stream);
        for (int i = 0; i < 2; i++)
            CHECK(bps_stream_start(sides[i].streams[stream], &threads[(2 * stream + (uint32_t)i) % n_threads],
                                   &threads[n_threads - 1 - (2 * stream + (uint32_t)i) % n_threads]) == 0);
    }
    for (uintptr_t i = 0; i < N_POSTERS; i++)
        CHECK(bps_start_thread(&posters[i], post, (void *)i) == 0);
    for (uint32_t i = 0; bps_load(&n_done) < N_POSTERS; i++) {
        struct bps_slots *slots = &sides[i % 2].slots;
        bps_slots_bind(slots, SPARE, 8, 8, 8, 0, 1);
        CHECK(bps_slots_next(slots, SPARE) == 1);
        bps_slots_bind(slots, SPARE, 0, 0, 0, 0, 0);
        live_and_die(i);
    }
    for (int i = 0; i < N_POSTERS; i++)
        pthread_join(posters[i], NULL);
    for (int i = 0; i < 2 * N_STREAMS; i++)
        bps_stream_close(sides[i % 2].streams[i / 2]);
    for (int i = 0; i < 2 * N_STREAMS; i++)
        bps_stream_free(sides[i % 2].streams[i / 2]);
    bps_slots_free(&sides[0].slots);
    bps_slots_free(&sides[1].slots);
    for (uint32_t i = 0; i < n_threads; i++)
        bps_io_close(&threads[i]);
}

int main(int argc, char **argv)
{
    uint64_t begin_ns = bps_now_ns(), until_ns = deadline_of(argc, argv);
    run(&bps_io_by_epoll, 3, begin_ns + (until_ns - begin_ns) / 3);
    run(&bps_io_by_epoll, MOST_THREADS, begin_ns + (until_ns - begin_ns) / 3 * 2); /* nearly each flow alone on its thread */
    uint32_t by_epoll = n_writes;
    int rc = bps_io_open(&threads[0], &bps_io_by_uring);
    if (rc == 0) {
        bps_io_close(&threads[0]);
        run(&bps_io_by_uring, 3, until_ns);
    }
    printf("%u writes by epoll, %u by io_uring\n", by_epoll, n_writes - by_epoll);
    return by_epoll != 0 && (rc != 0 || n_writes > by_epoll) ? 0 : 1;
}
