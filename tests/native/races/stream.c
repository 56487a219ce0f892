/* Streams of two nodes over socket pairs, a few I/O threads, by epoll and by io_uring: threads post small and large writes
 * from both ends, slots are bound and unbound, and another stream is opened, written to and closed meanwhile. */
#include "../node.h"
#include "io_epoll.h"
#include "io_uring.h"
#include "tcp_stream.h"

enum { N_STREAMS = 2, N_SLOTS = 4, SPARE = 5, EPOCH = 3, MOST_THREADS = 9, MOST_WORDS = 20000 };

/* Of each slot; the larger ones are not sent by who posts them, or fill the socket. */
static const uint32_t n_words[N_SLOTS] = {4, 500, 8000, MOST_WORDS};

struct side {
    struct bps_stream *streams[N_STREAMS];
    uint64_t source[N_STREAMS][N_SLOTS][MOST_WORDS], landing[N_STREAMS][N_SLOTS][2][MOST_WORDS];
    uint32_t received[N_STREAMS][N_SLOTS], delivered[N_STREAMS][N_SLOTS];
};

static struct side sides[2];
static struct bps_io_thread threads[MOST_THREADS];
static uint32_t n_threads;
static uint64_t end_ns;
static uint32_t n_writes, n_done;

static void arrived(void *engine, uint32_t stream, uint32_t part, uint32_t round, uint32_t flags)
{
    struct side *side = engine;
    (void)flags;
    for (uint32_t i = 0; i < n_words[part]; i++)
        CHECK(side->landing[stream][part][round & 1][i] == round + part);
    bps_store(&side->received[stream][part], round);
    bps_wake(&side->received[stream][part], INT_MAX);
}

static void notify(void *engine, uint32_t kind, uint32_t stream, uint32_t part, uint32_t round, uint32_t code,
                   uint64_t nbytes)
{
    struct side *side = engine;
    if (kind == BPS_EVENT_LOST) { /* the other end was closed first */
        CHECK(code == 0 && bps_load(&n_done) == 4 * N_STREAMS);
        return;
    }
    CHECK(kind == BPS_EVENT_DELIVERED && code == 0 && nbytes == 8 * n_words[part]);
    bps_store(&side->delivered[stream][part], round);
    bps_wake(&side->delivered[stream][part], INT_MAX);
}

static void *post(void *argument)
{
    uint32_t number = (uint32_t)(uintptr_t)argument, stream = number / 2 % N_STREAMS, first = number / 2 / N_STREAMS;
    struct side *mine = &sides[number % 2], *theirs = &sides[!(number % 2)];
    uint32_t round = 0;
    int is_delivered;
    for (; bps_now_ns() < end_ns; round++) {
        for (uint32_t slot = first; slot < N_SLOTS; slot += 2) { /* two threads share a stream */
            uint64_t *source = mine->source[stream][slot];
            await(&mine->delivered[stream][slot], round);
            await(&theirs->received[stream][slot], round);
            for (uint32_t i = 0; i < n_words[slot]; i++)
                source[i] = round + 1 + slot;
            CHECK(bps_stream_post(mine->streams[stream], slot, round + 1, 0, (uint64_t)source, 8 * n_words[slot],
                                  &is_delivered) == 0);
            if (is_delivered)
                notify(mine, BPS_EVENT_DELIVERED, stream, slot, round + 1, 0, 8 * n_words[slot]);
        }
    }
    for (uint32_t slot = first; slot < N_SLOTS; slot += 2) {
        await(&mine->delivered[stream][slot], round);
        await(&theirs->received[stream][slot], round);
    }
    bps_add(&n_writes, round * N_SLOTS / 2);
    bps_add(&n_done, 1);
    return NULL;
}

static struct bps_stream *make(void *engine, int fd, uint32_t number)
{
    struct bps_stream *stream = zeroed(sizeof *stream);
    CHECK(bps_stream_init(stream, SPARE + 1, EPOCH) == 0);
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
    int fds[2], is_delivered;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
    for (int i = 0; i < 2; i++) {
        ends[i] = make(NULL, fds[i], number);
        ends[i]->arrived = nothing_arrived;
        ends[i]->notify = nothing;
        bps_slots_bind(&ends[i]->slots, 0, 8, 8, 64, 0, 1);
        CHECK(bps_stream_start(ends[i], &threads[number % n_threads], &threads[(number + (uint32_t)i) % n_threads]) == 0);
    }
    for (uint32_t round = 1; round < 4; round++)
        CHECK(bps_stream_post(ends[0], 0, round, BPS_FLAG_EMPTY, 0, 0, &is_delivered) == 0);
    bps_stream_close(ends[number % 2]);
    bps_stream_close(ends[!(number % 2)]);
    bps_stream_free(ends[0]);
    bps_stream_free(ends[1]);
}

static void run(const struct bps_io_backend *backend, uint32_t n, uint64_t until_ns)
{
    pthread_t posters[4 * N_STREAMS];
    memset(sides, 0, sizeof sides);
    end_ns = until_ns;
    n_done = 0;
    n_threads = n;
    for (uint32_t i = 0; i < n_threads; i++)
        CHECK(bps_io_open(&threads[i], backend) == 0);
    for (uint32_t stream = 0; stream < N_STREAMS; stream++) {
        int fds[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
        for (int i = 0; i < 2; i++) {
            struct bps_stream *made = sides[i].streams[stream] = make(&sides[i], fds[i], stream);
            for (uint32_t slot = 0; slot < N_SLOTS; slot++)
                bps_slots_bind(&made->slots, slot, (uint64_t)sides[i].landing[stream][slot][0],
                               (uint64_t)sides[i].landing[stream][slot][1], 8 * n_words[slot], 0, 1);
        }
        for (int i = 0; i < 2; i++)
            CHECK(bps_stream_start(sides[i].streams[stream], &threads[(2 * stream + (uint32_t)i) % n_threads],
                                   &threads[n_threads - 1 - (2 * stream + (uint32_t)i) % n_threads]) == 0);
    }
    for (uintptr_t i = 0; i < 4 * N_STREAMS; i++)
        CHECK(bps_start_thread(&posters[i], post, (void *)i) == 0);
    for (uint32_t i = 0; bps_load(&n_done) < 4 * N_STREAMS; i++) {
        struct bps_stream *stream = sides[i % 2].streams[i / 2 % N_STREAMS];
        bps_slots_bind(&stream->slots, SPARE, 8, 8, 8, 0, 1);
        CHECK(bps_slots_next(&stream->slots, SPARE) == 1);
        bps_slots_bind(&stream->slots, SPARE, 0, 0, 0, 0, 0);
        live_and_die(i);
    }
    for (int i = 0; i < 4 * N_STREAMS; i++)
        pthread_join(posters[i], NULL);
    for (int i = 0; i < 2 * N_STREAMS; i++)
        bps_stream_close(sides[i % 2].streams[i / 2]);
    for (int i = 0; i < 2 * N_STREAMS; i++)
        bps_stream_free(sides[i % 2].streams[i / 2]);
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
