/* Direct: the ranks of one machine sum their inputs themselves, through memory that all of them map; no node takes part.
 *
 * A channel is the memory of calls that follow each other. Small inputs go through cells: every rank copies its input into its
 * cell and then sums all cells. Others go through boxes, in chunks: each rank owns one part of every chunk. A rank
 * writes the parts of the others into its own box; the owner of a part sums it from all boxes, in rank order, and
 * writes the result back into every box; each rank copies results out of its own box. So a cache line is touched by two
 * ranks only. The chunks overlap: chunk i is copied in, i - 1 is summed, i - 2 is copied out. Calls in which each rank has
 * other bytes for the others (all-gather, reduce-scatter, all-to-all) write the own box and read the others'.
 *
 *   words of a rank    by which the others wake it
 *   line of a rank     `published`: the last chunk that it has put into its cell or box, `reduced`: the last chunk of
 *                      which it has summed its part, or copied it out; chunks are numbered modulo 2^32 for the life of
 *                      the channel, alike on all ranks, and only the rank writes its line
 *   cells, two a rank  call c uses cell c % 2: a rank begins call c + 2 when all have ended call c, because a call ends
 *                      when all have begun it
 *   boxes, `n_slots`   chunk k uses box k % n_slots: a rank writes chunk k + n_slots when it has copied chunk k out,
 *                      which all owners had read before they published the result; after an exchange, when all
 *                      ranks have copied it out, which is awaited before the call ends
 *
 * Nothing here is trusted with addresses: a broken rank can spoil the values of sums, which it could by its own input.
 */
#ifndef BPS_DIRECT_H
#define BPS_DIRECT_H

#include <errno.h>
#include <poll.h>

#include "board.h"
#include "cpu_separation.h"
#include "direct_sum.h"

#define BPS_DIRECT_PAGE 4096u
#define BPS_DIRECT_SPINS 400
#define BPS_DIRECT_LOOK 32 /* spins before the CPU of the awaited rank is looked at */
#define BPS_DIRECT_SLICE_NS 100000000ull
#define BPS_DIRECT_CHUNK (256u << 10) /* a channel for more than that takes any number of bytes */
#define BPS_DIRECT_SLOTS 4u
#define BPS_DIRECT_ONE_BOX (32u << 10)
#define BPS_DIRECT_FAR_NBYTES (1u << 20) /* larger sums fetch the lines of other ranks ahead */
#define BPS_DIRECT_AHEAD 8192u
#define BPS_DIRECT_OWN_NBYTES 2048u /* fetched for writing before a sum begins */

/* `bps_port`'s, and: the ranks do not make the same call; what `check` has raised; a rank does not take part, and no
 * byte was written. */
enum { BPS_DIRECT_DONE = 0, BPS_DIRECT_TIMED_OUT = 1, BPS_DIRECT_ABORTED = 2, BPS_DIRECT_NODE_DIED = 3,
       BPS_DIRECT_DIFFERENT = 5, BPS_DIRECT_RAISED = 6, BPS_DIRECT_DECLINED = 7 };

#define BPS_DIRECT_NOT_HERE UINT64_MAX /* in place of the number of bytes, of a rank that declines */

/* By which a rank is woken. */
struct bps_direct_rank {
    uint32_t asleep; /* its threads that sleep on `bell` */
    int32_t cpu;     /* on which it published last */
    uint32_t pad0[14];
    uint32_t bell; /* rung for a rank that is asleep */
    uint32_t pad1[15];
};

struct bps_direct_line {
    uint32_t published, pad0;
    struct {
        uint64_t nbytes, call; /* what it does in a call: by parity of the call, for a rank may be one call ahead */
    } header[2];
    uint32_t pad1[6];
    uint32_t reduced, pad2[15];
};

_Static_assert(sizeof(struct bps_direct_rank) == 128 && sizeof(struct bps_direct_line) == 128, "two cache lines each");

/* Who waits, and what it looks at meanwhile. */
struct bps_direct_port {
    struct bps_direct_rank *ranks;
    const void *board;
    int n, me, node_pidfd, is_crowded;
    uint64_t awake_ns, *waiting; /* CPUs on which ranks wait awake; see cpu_separation.h */
    const uint32_t *awaited; /* the word that the last wait which was not over at once is for: it is to be `want` */
    uint32_t want;
    int awaited_rank;
    struct bps_separation separation;
};

/* How a call is made: when it gives up, what lets other threads run while it waits (`release` and `take`), and what
 * looks at signals; `check` ends the call if it returns anything but 0. Functions may be NULL. */
struct bps_direct_call {
    uint64_t deadline_ns, slice_ns; /* slice: the interval between calls of `check`; 0: BPS_DIRECT_SLICE_NS */
    void *(*release)(void);
    void (*take)(void *);
    int (*check)(void *);
    void *context; /* of `check` */
    const struct bps_channel *summing; /* a wait for the first chunk, `first`, of a sum ends if any rank declines */
    uint32_t first;
    int n_waits; /* that were not over after a few spins */
};

struct bps_channel {
    struct bps_direct_port port;
    struct bps_direct_line *lines; /* of all ranks */
    char *cells, *boxes;
    uint64_t cell_nbytes, box_nbytes; /* box: of one chunk */
    uint32_t n_slots;
    uint32_t chunks, calls; /* so far; the same on all ranks */
    uint32_t followed;      /* the last number for which `bps_direct_follow` has set `reduced` */
};

struct bps_channel_layout {
    uint64_t lines, cells, boxes, nbytes; /* offsets; in all */
    uint64_t cell_nbytes, box_nbytes;
    uint32_t n_slots;
};

static inline uint64_t bps_direct_up(uint64_t nbytes, uint64_t to) { return (nbytes + to - 1) / to * to; }

/* Where sums in cells become slower than boxes: every rank reads all cells. */
static inline uint64_t bps_direct_small(int n) { return n == 1 ? BPS_SUM_LINE : n == 2 ? 2048 : 4096; }

/* The memory of a channel for sums of at most `most` bytes among n ranks. */
static inline struct bps_channel_layout bps_direct_layout(int n, uint64_t most)
{
    struct bps_channel_layout layout;
    uint64_t small = bps_direct_small(n);
    int has_boxes = most > small && n > 1;
    layout.cell_nbytes = bps_direct_up(most < small ? most : small, BPS_SUM_LINE);
    /* for each rank about as many bytes as the tensor has, up to four whole chunks; but 256 KiB if a call has between 32
     * and 256: measured, 64 KiB take 1.25 times as long in one box that every call uses as in four in turn */
    uint64_t box = most > BPS_DIRECT_CHUNK ? (most + BPS_DIRECT_SLOTS - 1) / BPS_DIRECT_SLOTS : most;
    layout.box_nbytes = has_boxes ? bps_direct_up(box < BPS_DIRECT_CHUNK ? box : BPS_DIRECT_CHUNK, 2 * BPS_SUM_LINE) : 0;
    layout.n_slots = !has_boxes ? 0 : most > BPS_DIRECT_CHUNK ? BPS_DIRECT_SLOTS : 1;
    if (has_boxes && most > BPS_DIRECT_ONE_BOX && most <= BPS_DIRECT_CHUNK / 2)
        layout.n_slots = most <= BPS_DIRECT_CHUNK / 4 ? 4 : 2;
    layout.lines = (uint64_t)n * sizeof(struct bps_direct_rank);
    layout.cells = layout.lines + (uint64_t)n * sizeof(struct bps_direct_line);
    /* cells and boxes have different writers: a page apart, so that no prefetcher joins them */
    layout.boxes = bps_direct_up(layout.cells + (uint64_t)n * 2 * layout.cell_nbytes, has_boxes ? BPS_DIRECT_PAGE : 64);
    layout.nbytes = layout.boxes + (uint64_t)n * layout.n_slots * layout.box_nbytes;
    return layout;
}

/* Bytes of the words and lines, which must be zero when a channel is formatted. */
static inline uint64_t bps_channel_head(int n) { return bps_direct_layout(n, 1).cells; }

/* Make memory a channel whose chunks are numbered from `first` + 1 on. Once, before any rank opens it. */
static inline void bps_channel_format(void *memory, int n, uint32_t first)
{
    memset(memory, 0, bps_channel_head(n));
    struct bps_direct_line *lines = (struct bps_direct_line *)((char *)memory + bps_direct_layout(n, 1).lines);
    for (int r = 0; r < n; r++)
        lines[r].published = lines[r].reduced = first;
}

/* Open formatted memory as the rank that `port` says. */
static inline void bps_channel_open(struct bps_channel *channel, void *memory, uint64_t most)
{
    struct bps_channel_layout layout = bps_direct_layout(channel->port.n, most);
    channel->port.ranks = (struct bps_direct_rank *)memory;
    channel->lines = (struct bps_direct_line *)((char *)memory + layout.lines);
    channel->cells = (char *)memory + layout.cells;
    channel->boxes = (char *)memory + layout.boxes;
    channel->cell_nbytes = layout.cell_nbytes;
    channel->box_nbytes = layout.box_nbytes;
    channel->n_slots = layout.n_slots;
    channel->chunks = channel->lines[channel->port.me].published;
    channel->calls = 0;
    channel->followed = channel->chunks;
}

/* -- waiting ------------------------------------------------------------------------------------------------------ */

static inline int bps_direct_cpu(void) { return sched_getcpu(); }

static inline int bps_direct_trouble(const struct bps_direct_port *port, int look_at_node)
{
    struct pollfd node = {port->node_pidfd, POLLIN, 0};
    if (port->board != NULL && bps_load(&((const struct bps_board *)port->board)->state) != 0)
        return BPS_DIRECT_ABORTED;
    return look_at_node && node.fd >= 0 && poll(&node, 1, 0) == 1 ? BPS_DIRECT_NODE_DIED : BPS_DIRECT_DONE;
}

/* Whether a rank has declined the present sum, whose first chunk is `first`. */
static inline int bps_direct_is_declined(const struct bps_channel *channel, uint32_t first)
{
    for (int r = 0; channel != NULL && r < channel->port.n; r++)
        if (bps_reached(bps_load(&channel->lines[r].published), first)
            && channel->lines[r].header[channel->calls & 1].nbytes == BPS_DIRECT_NOT_HERE)
            return 1;
    return 0;
}

/* Sleep until a word has reached `want`, a rank declines or the bell rings, for `timeout_ns` at most; whether all of that
 * time passed or a signal came. */
static inline int bps_direct_sleep(struct bps_direct_port *port, const uint32_t *word, uint32_t want,
                                   const struct bps_direct_call *call, uint64_t timeout_ns)
{
    struct bps_direct_rank *own = &port->ranks[port->me];
    uint32_t bell = bps_load(&own->bell);
    int status = 0;
    bps_add(&own->asleep, 1); /* a full fence: who publishes after we have looked at the words finds us asleep */
    if (!bps_reached(bps_load(word), want) && !bps_direct_is_declined(call->summing, call->first))
        status = bps_wait(&own->bell, bell, timeout_ns);
    bps_add(&own->asleep, (uint32_t)-1);
    return status == ETIMEDOUT || status == EINTR;
}

/* Yield until the word has reached `want`, for as long as a waiter stays awake; whether it has. */
static inline int bps_direct_yield(struct bps_direct_port *port, const uint32_t *word, uint32_t want, uint64_t now_ns)
{
    uint64_t begin_ns = now_ns;
    if (bps_is_contended(&bps_contention, now_ns))
        return 0;
    do {
        uint64_t before_ns = now_ns;
        sched_yield();
        int has = bps_reached(bps_load(word), want);
        now_ns = bps_now_ns();
        if (now_ns - before_ns >= BPS_SLOW_YIELD_NS && !port->is_crowded) {
            bps_contention_slow(&bps_contention, now_ns);
            return has;
        }
        if (has)
            return bps_contention_met(&bps_contention);
    } while (now_ns - begin_ns < port->awake_ns);
    return 0;
}

static __attribute__((noinline)) int bps_direct_wait_long(struct bps_direct_port *port, const uint32_t *word,
                                                          uint32_t want, int peer, struct bps_direct_call *call)
{
    uint64_t now_ns = bps_now_ns();
    int status = BPS_DIRECT_DONE, cpu = -1;
    port->want = want;
    port->awaited_rank = peer;
    port->awaited = word;
    void *held = call->release != NULL ? call->release() : NULL;
    call->n_waits++;
    if (port->waiting != NULL && __atomic_load_n(&port->ranks[peer].cpu, __ATOMIC_RELAXED) == bps_direct_cpu()
        && !bps_is_contended(&bps_contention, now_ns))
        cpu = bps_separation_enter(&port->separation, port->waiting, now_ns);
    int has = bps_direct_yield(port, word, want, now_ns);
    if (port->waiting != NULL)
        bps_separation_leave(port->waiting, cpu);
    while (!has && status == BPS_DIRECT_DONE) {
        status = bps_direct_trouble(port, 0);
        now_ns = bps_now_ns();
        if (status == BPS_DIRECT_DONE && bps_direct_is_declined(call->summing, call->first))
            status = BPS_DIRECT_DECLINED;
        if (status == BPS_DIRECT_DONE && now_ns >= call->deadline_ns)
            status = BPS_DIRECT_TIMED_OUT;
        if (status != BPS_DIRECT_DONE)
            break;
        uint64_t left_ns = call->deadline_ns - now_ns;
        uint64_t slice_ns = call->slice_ns != 0 ? call->slice_ns : BPS_DIRECT_SLICE_NS;
        int look = bps_direct_sleep(port, word, want, call, left_ns < slice_ns ? left_ns : slice_ns);
        has = bps_reached(bps_load(word), want);
        if (!has && look) {
            status = bps_direct_trouble(port, 1);
            if (status == BPS_DIRECT_DONE && call->check != NULL && call->check(call->context) != 0)
                status = BPS_DIRECT_RAISED;
        }
    }
    if (status == BPS_DIRECT_DONE || status == BPS_DIRECT_DECLINED)
        port->awaited = NULL;
    if (call->take != NULL)
        call->take(held);
    return status;
}

/* Wait until a word of rank `peer` has reached `want`. */
static inline int bps_direct_wait(struct bps_direct_port *port, const uint32_t *word, uint32_t want, int peer,
                                  struct bps_direct_call *call)
{
    if (__builtin_expect(bps_reached(bps_load(word), want), 1))
        return BPS_DIRECT_DONE;
    if (!port->is_crowded)
        for (int i = 0; i < BPS_DIRECT_SPINS; i++) {
            bps_pause();
            if (bps_reached(bps_load(word), want))
                return BPS_DIRECT_DONE;
            if (i == BPS_DIRECT_LOOK
                && __atomic_load_n(&port->ranks[peer].cpu, __ATOMIC_RELAXED) == bps_direct_cpu())
                break; /* it cannot run while we spin */
        }
    return bps_direct_wait_long(port, word, want, peer, call);
}

static __attribute__((noinline)) void bps_direct_ring(struct bps_direct_rank *rank)
{
    bps_add(&rank->bell, 1);
    bps_wake(&rank->bell, INT_MAX);
}

/* Set an own word, and wake who sleeps. */
static inline void bps_direct_publish(struct bps_direct_port *port, uint32_t *word, uint32_t value)
{
    __atomic_exchange_n(word, value, __ATOMIC_SEQ_CST); /* before the looks below: see bps_direct_sleep */
    int cpu = bps_direct_cpu();
    struct bps_direct_rank *own = &port->ranks[port->me];
    if (__atomic_load_n(&own->cpu, __ATOMIC_RELAXED) != cpu)
        __atomic_store_n(&own->cpu, cpu, __ATOMIC_RELAXED);
    for (int r = 0; r < port->n; r++)
        if (r != port->me && __builtin_expect(__atomic_load_n(&port->ranks[r].asleep, __ATOMIC_SEQ_CST) != 0, 0))
            bps_direct_ring(&port->ranks[r]);
}

/* -- sums ----------------------------------------------------------------------------------------------------------- */

#define BPS_DIRECT_TRY(expression)                                                                                     \
    do {                                                                                                               \
        int status_ = (expression);                                                                                    \
        if (__builtin_expect(status_ != BPS_DIRECT_DONE, 0))                                                           \
            return status_;                                                                                            \
    } while (0)

/* Which bytes of a chunk rank r owns. */
static inline void bps_direct_part(uint64_t nbytes, int n, int r, uint64_t *at, uint64_t *length)
{
    uint64_t each = bps_direct_up((nbytes + (uint64_t)n - 1) / (uint64_t)n, BPS_SUM_LINE);
    uint64_t begin = each * (uint64_t)r, end = begin + each;
    *at = begin < nbytes ? begin : nbytes;
    *length = (end < nbytes ? end : nbytes) - *at;
}

static inline void bps_direct_fetch_copy(char *to, const char *from, uint64_t nbytes)
{
    for (uint64_t i = 0; i < nbytes; i += BPS_SUM_LINE)
        __builtin_prefetch(from + BPS_DIRECT_AHEAD + i, 0, 2);
    memcpy(to, from, nbytes);
}

/* What is summed how; `call`: a number that says so, and is compared between the ranks. */
struct bps_direct_sum {
    bps_sum_kernel kernel;
    int64_t divisor;
    uint64_t call;
};

static inline void bps_direct_say(struct bps_channel *channel, uint64_t nbytes, uint64_t what)
{
    struct bps_direct_line *own = &channel->lines[channel->port.me];
    uint32_t parity = ++channel->calls & 1;
    own->header[parity].nbytes = nbytes;
    own->header[parity].call = what;
}

/* Calls without boxes read no `reduced`: it only must not look ahead after 2^31 of them. Its line is often fetched by other
 * ranks together with the one before, so a store costs more than the rest of such a call. */
static inline void bps_direct_follow(struct bps_channel *channel, uint32_t number)
{
    if (__builtin_expect(number - channel->followed >= 1u << 20, 0)) {
        channel->followed = number;
        bps_store(&channel->lines[channel->port.me].reduced, number);
    }
}

static inline int bps_direct_agree(const struct bps_channel *channel, int r, uint64_t nbytes, uint64_t what)
{
    const struct bps_direct_line *line = &channel->lines[r];
    uint32_t parity = channel->calls & 1;
    int is_same = line->header[parity].nbytes == nbytes && line->header[parity].call == what;
    if (__builtin_expect(is_same, 1))
        return BPS_DIRECT_DONE;
    return line->header[parity].nbytes == BPS_DIRECT_NOT_HERE ? BPS_DIRECT_DECLINED : BPS_DIRECT_DIFFERENT;
}

static inline int bps_direct_sum_cells(struct bps_channel *channel, char *to, const char *from, uint64_t nbytes,
                                       const struct bps_direct_sum *sum, struct bps_direct_call *call)
{
    struct bps_direct_port *port = &channel->port;
    int n = port->n, me = port->me;
    uint32_t round = ++channel->chunks;
    struct bps_sum_call loop;
    bps_direct_say(channel, nbytes, sum->call);
    uint64_t parity = channel->calls & 1;
    memcpy(channel->cells + ((uint64_t)me * 2 + parity) * channel->cell_nbytes, from, nbytes);
    bps_direct_follow(channel, round);
    bps_direct_publish(port, &channel->lines[me].published, round);
    call->summing = channel;
    call->first = round;
    for (int r = 0; r < n; r++) {
        loop.inputs[r] = channel->cells + ((uint64_t)r * 2 + parity) * channel->cell_nbytes;
        if (r == me)
            continue;
        BPS_DIRECT_TRY(bps_direct_wait(port, &channel->lines[r].published, round, r, call));
        BPS_DIRECT_TRY(bps_direct_agree(channel, r, nbytes, sum->call));
    }
    if (nbytes % BPS_SUM_LINE == 0)
        loop.inputs[me] = (char *)(uintptr_t)from; /* whose lines no other rank reads */
    loop.to = to;
    loop.ahead = NULL;
    loop.nbytes = nbytes;
    loop.divisor = sum->divisor;
    loop.n = n;
    loop.own = me;
    loop.back = 0;
    loop.far_nbytes = 0;
    if (to != NULL)
        bps_sum_run_padded(sum->kernel, &loop);
    return BPS_DIRECT_DONE;
}

struct bps_direct_chunks {
    const char *from;
    char *to;
    uint64_t nbytes, chunk, n;
    uint32_t first; /* the number of the first chunk */
};

static inline uint64_t bps_direct_chunk(const struct bps_direct_chunks *chunks, uint64_t k)
{
    return k + 1 == chunks->n ? chunks->nbytes - k * chunks->chunk : chunks->chunk;
}

static inline char *bps_direct_box(const struct bps_channel *channel, int r, uint32_t chunk)
{
    return channel->boxes + ((uint64_t)r * channel->n_slots + chunk % channel->n_slots) * channel->box_nbytes;
}

/* Put the parts of chunk k that others own into the own box. */
static inline void bps_direct_put(struct bps_channel *channel, const struct bps_direct_chunks *chunks, uint64_t k)
{
    struct bps_direct_port *port = &channel->port;
    char *box = bps_direct_box(channel, port->me, chunks->first + (uint32_t)k);
    uint64_t at, length;
    for (int r = 0; r < port->n; r++) {
        bps_direct_part(bps_direct_chunk(chunks, k), port->n, r, &at, &length);
        if (r != port->me)
            bps_direct_fetch_copy(box + at, chunks->from + k * chunks->chunk + at, length);
    }
    bps_direct_publish(port, &channel->lines[port->me].published, chunks->first + (uint32_t)k);
}

/* Sum the own part of chunk k, to its place and back into every box. */
static inline int bps_direct_reduce(struct bps_channel *channel, const struct bps_direct_chunks *chunks, uint64_t k,
                                    const struct bps_direct_sum *sum, struct bps_direct_call *call)
{
    struct bps_direct_port *port = &channel->port;
    uint32_t number = chunks->first + (uint32_t)k;
    struct bps_sum_call loop;
    uint64_t at, length;
    bps_direct_part(bps_direct_chunk(chunks, k), port->n, port->me, &at, &length);
    const char *own = chunks->from + k * chunks->chunk + at;
    call->summing = k == 0 ? channel : NULL;
    call->first = number;
    for (int r = 0; r < port->n; r++) {
        loop.inputs[r] = r == port->me ? (char *)(uintptr_t)own : bps_direct_box(channel, r, number) + at;
        if (r == port->me)
            continue;
        BPS_DIRECT_TRY(bps_direct_wait(port, &channel->lines[r].published, number, r, call));
        if (k == 0)
            BPS_DIRECT_TRY(bps_direct_agree(channel, r, chunks->nbytes, sum->call));
    }
    call->summing = NULL;
    /* the place of the own part in the own box is free */
    loop.to = chunks->to != NULL ? chunks->to + k * chunks->chunk + at : bps_direct_box(channel, port->me, number) + at;
    loop.ahead = k + 1 < chunks->n ? own + chunks->chunk : NULL;
    loop.nbytes = length;
    loop.divisor = sum->divisor;
    loop.n = port->n;
    loop.own = port->me;
    loop.back = 1;
    loop.far_nbytes = chunks->nbytes > BPS_DIRECT_FAR_NBYTES ? 4096 : 0;
    bps_sum_run(sum->kernel, &loop);
    bps_direct_publish(port, &channel->lines[port->me].reduced, number);
    return BPS_DIRECT_DONE;
}

/* Copy the parts of chunk k that others own out of the own box. */
static inline int bps_direct_take(struct bps_channel *channel, const struct bps_direct_chunks *chunks, uint64_t k,
                                  struct bps_direct_call *call)
{
    struct bps_direct_port *port = &channel->port;
    uint32_t number = chunks->first + (uint32_t)k;
    char *box = bps_direct_box(channel, port->me, number);
    uint64_t at, length;
    for (int i = 1; i < port->n; i++) {
        int r = (port->me + i) % port->n;
        bps_direct_part(bps_direct_chunk(chunks, k), port->n, r, &at, &length);
        BPS_DIRECT_TRY(bps_direct_wait(port, &channel->lines[r].reduced, number, r, call));
        if (chunks->to != NULL)
            memcpy(chunks->to + k * chunks->chunk + at, box + at, length);
    }
    return BPS_DIRECT_DONE;
}

/* The size of the chunks of a sum of more than a cell. */
static inline uint64_t bps_direct_chunk_nbytes(const struct bps_channel *channel, uint64_t nbytes)
{
    if (channel->port.n == 1)
        return nbytes == 0 ? 1 : nbytes; /* it has no boxes */
    if (channel->port.n == 2 && nbytes > (4u << 20)) /* two of them, of both ranks, stay in L2 */
        return channel->box_nbytes / 2;
    return channel->box_nbytes;
}

#if defined(__x86_64__)
#define BPS_FETCH_OWN(at) __asm__ __volatile__("prefetchw (%0)" ::"r"(at)) /* the builtin makes it a read before AVX-512 */
#else
#define BPS_FETCH_OWN(at) __builtin_prefetch(at, 1, 3)
#endif

/* A sum of nbytes is about to begin: fetch the lines that it writes first, and that others have read, for writing. So that
 * goes on while the caller's arguments are looked at. */
static inline void bps_direct_prepare(const struct bps_channel *channel, uint64_t nbytes)
{
    int me = channel->port.me;
    const char *at = channel->cells + ((uint64_t)me * 2 + ((channel->calls + 1) & 1)) * channel->cell_nbytes;
    if (channel->port.n == 1)
        return;
    BPS_FETCH_OWN(&channel->lines[me]);
    if (nbytes > channel->cell_nbytes) {
        BPS_FETCH_OWN(&channel->lines[me].reduced);
        uint64_t chunk = bps_direct_chunk_nbytes(channel, nbytes), begin;
        bps_direct_part(nbytes < chunk ? nbytes : chunk, channel->port.n, me == 0, &begin, &nbytes);
        at = bps_direct_box(channel, me, channel->chunks + 1) + begin;
    }
    for (uint64_t i = 0; i < nbytes && i < BPS_DIRECT_OWN_NBYTES; i += BPS_SUM_LINE)
        BPS_FETCH_OWN(at + i);
}

static inline int bps_direct_sum_boxes(struct bps_channel *channel, char *to, const char *from, uint64_t nbytes,
                                       const struct bps_direct_sum *sum, struct bps_direct_call *call)
{
    uint64_t chunk = bps_direct_chunk_nbytes(channel, nbytes);
    struct bps_direct_chunks chunks = {from, to, nbytes, chunk, (nbytes + chunk - 1) / chunk, channel->chunks + 1};
    channel->chunks += (uint32_t)chunks.n;
    bps_direct_say(channel, nbytes, sum->call);
    for (uint64_t i = 0; i < chunks.n + 2; i++) {
        if (i < chunks.n)
            bps_direct_put(channel, &chunks, i);
        if (i >= 1 && i - 1 < chunks.n)
            BPS_DIRECT_TRY(bps_direct_reduce(channel, &chunks, i - 1, sum, call));
        if (i >= 2)
            BPS_DIRECT_TRY(bps_direct_take(channel, &chunks, i - 2, call));
    }
    return BPS_DIRECT_DONE;
}

/* Have published all chunks of the present call, which this rank does not go on with. */
static inline void bps_direct_skip(struct bps_channel *channel)
{
    struct bps_direct_line *own = &channel->lines[channel->port.me];
    bps_store(&own->reduced, channel->chunks);
    bps_direct_publish(&channel->port, &own->published, channel->chunks);
}

/* Take no part in a sum of nbytes. The other ranks find that out before they write a result (BPS_DIRECT_DECLINED). All
 * ranks must know by other means that all are in this sum, before one begins the next: so headers stay until read. */
static inline void bps_direct_decline(struct bps_channel *channel, uint64_t nbytes)
{
    uint64_t chunk = bps_direct_chunk_nbytes(channel, nbytes);
    channel->chunks += nbytes <= channel->cell_nbytes ? 1 : (uint32_t)((nbytes + chunk - 1) / chunk);
    bps_direct_say(channel, BPS_DIRECT_NOT_HERE, 0);
    bps_direct_skip(channel);
}

/* Sum nbytes of all ranks, at `from`, to `to`, which is the same memory or does not overlap it; NULL: nowhere. One
 * thread at a time uses a channel; after anything but BPS_DIRECT_DONE and BPS_DIRECT_DECLINED it is of no use any more,
 * and `to` is partly written. */
static inline int bps_direct_all_reduce(struct bps_channel *channel, char *to, const char *from, uint64_t nbytes,
                                        const struct bps_direct_sum *sum, struct bps_direct_call *call)
{
    int status = nbytes <= channel->cell_nbytes ? bps_direct_sum_cells(channel, to, from, nbytes, sum, call)
                                                : bps_direct_sum_boxes(channel, to, from, nbytes, sum, call);
    if (__builtin_expect(status == BPS_DIRECT_DECLINED, 0))
        bps_direct_skip(channel);
    return status;
}

/* -- copies ---------------------------------------------------------------------------------------------------------- */

/* Wait until all ranks are in this call: `what` and `nbytes` say which. */
static inline int bps_direct_meet(struct bps_channel *channel, uint64_t nbytes, uint64_t what,
                                  struct bps_direct_call *call)
{
    struct bps_direct_port *port = &channel->port;
    uint32_t number = ++channel->chunks;
    bps_direct_follow(channel, number);
    bps_direct_publish(port, &channel->lines[port->me].published, number);
    for (int r = 0; r < port->n; r++) {
        if (r == port->me)
            continue;
        BPS_DIRECT_TRY(bps_direct_wait(port, &channel->lines[r].published, number, r, call));
        BPS_DIRECT_TRY(bps_direct_agree(channel, r, nbytes, what));
    }
    return BPS_DIRECT_DONE;
}

/* Wait until all ranks have copied chunk `number` out. */
static inline int bps_direct_await_copies(struct bps_channel *channel, uint32_t number, struct bps_direct_call *call)
{
    struct bps_direct_port *port = &channel->port;
    for (int r = 0; r < port->n; r++)
        if (r != port->me)
            BPS_DIRECT_TRY(bps_direct_wait(port, &channel->lines[r].reduced, number, r, call));
    return BPS_DIRECT_DONE;
}

/* The chunks of a copy of more than a cell, which are numbered from the one after `channel->chunks` on. */
static inline int bps_direct_copy_boxes(struct bps_channel *channel, int root, char *memory, uint64_t nbytes,
                                        struct bps_direct_call *call)
{
    struct bps_direct_port *port = &channel->port;
    struct bps_direct_line *own = &channel->lines[port->me];
    uint32_t before = channel->chunks, number = before;
    for (uint64_t at = 0; at < nbytes; at += channel->box_nbytes) {
        uint64_t length = nbytes - at < channel->box_nbytes ? nbytes - at : channel->box_nbytes;
        char *box = bps_direct_box(channel, root, ++number);
        if (port->me == root) {
            if (number - before > channel->n_slots)
                BPS_DIRECT_TRY(bps_direct_await_copies(channel, number - channel->n_slots, call));
            memcpy(box, memory + at, length);
            bps_direct_publish(port, &own->published, number);
        } else {
            BPS_DIRECT_TRY(bps_direct_wait(port, &channel->lines[root].published, number, root, call));
            if (memory != NULL)
                memcpy(memory + at, box, length);
            bps_store(&own->published, number); /* or the root would count it as missing */
            bps_direct_publish(port, &own->reduced, number);
        }
    }
    channel->chunks = number;
    return port->me == root ? bps_direct_await_copies(channel, number, call) : BPS_DIRECT_DONE;
}

/* Copy nbytes at `memory` of rank `root` to `memory` of the others (NULL: a rank that needs none). As
 * `bps_direct_all_reduce`. */
static inline int bps_direct_broadcast(struct bps_channel *channel, int root, char *memory, uint64_t nbytes,
                                       uint64_t what, struct bps_direct_call *call)
{
    struct bps_direct_port *port = &channel->port;
    bps_direct_say(channel, nbytes, what);
    int is_small = nbytes <= channel->cell_nbytes;
    char *cell = channel->cells + ((uint64_t)root * 2 + (channel->calls & 1)) * channel->cell_nbytes;
    if (is_small && port->me == root)
        memcpy(cell, memory, nbytes);
    BPS_DIRECT_TRY(bps_direct_meet(channel, nbytes, what, call));
    if (!is_small)
        return bps_direct_copy_boxes(channel, root, memory, nbytes, call);
    if (port->me != root && memory != NULL)
        memcpy(memory, cell, nbytes);
    return BPS_DIRECT_DONE;
}

/* Gives chunk `i`, whose number is `number`, to the others' boxes; or takes what the others have given. */
typedef int (*bps_direct_step)(struct bps_channel *channel, const void *what, uint64_t i, uint32_t number,
                               struct bps_direct_call *call);

/* Exchange chunks through boxes: each rank gives chunk i, then takes chunk i - 1 of the others. In a channel for any number
 * of bytes: the boxes of ranks that wait for each other's copies are more than one. */
static inline int bps_direct_exchange(struct bps_channel *channel, uint64_t n_chunks, bps_direct_step give,
                                      bps_direct_step take, const void *what, struct bps_direct_call *call)
{
    struct bps_direct_port *port = &channel->port;
    struct bps_direct_line *own = &channel->lines[port->me];
    uint32_t before = channel->chunks;
    channel->chunks += (uint32_t)n_chunks;
    for (uint64_t i = 0; i <= n_chunks; i++) {
        uint32_t number = before + 1 + (uint32_t)i;
        if (i < n_chunks) {
            if (i >= channel->n_slots)
                BPS_DIRECT_TRY(bps_direct_await_copies(channel, number - channel->n_slots, call));
            BPS_DIRECT_TRY(give(channel, what, i, number, call));
            bps_direct_publish(port, &own->published, number);
        }
        if (i > 0) {
            BPS_DIRECT_TRY(take(channel, what, i - 1, number - 1, call));
            bps_direct_publish(port, &own->reduced, number - 1);
        }
    }
    return bps_direct_await_copies(channel, channel->chunks, call);
}

/* How many of nbytes chunk i has, of chunks of `chunk` bytes. */
static inline uint64_t bps_direct_share(uint64_t nbytes, uint64_t chunk, uint64_t i)
{
    if (nbytes <= i * chunk)
        return 0;
    return nbytes - i * chunk < chunk ? nbytes - i * chunk : chunk;
}

/* Wait for chunk `number` of rank r, and find out whether it is in the same call, if that is the first one. */
static inline int bps_direct_await_chunk(struct bps_channel *channel, int r, uint32_t number, int is_first,
                                         uint64_t nbytes, uint64_t what, struct bps_direct_call *call)
{
    BPS_DIRECT_TRY(bps_direct_wait(&channel->port, &channel->lines[r].published, number, r, call));
    return is_first ? bps_direct_agree(channel, r, nbytes, what) : BPS_DIRECT_DONE;
}

/* The cell of rank r in the present call. */
static inline char *bps_direct_cell(const struct bps_channel *channel, int r)
{
    return channel->cells + ((uint64_t)r * 2 + (channel->calls & 1)) * channel->cell_nbytes;
}

/* What each rank has for all, and where this rank wants that of each; NULL: it does not. */
struct bps_direct_gather {
    const char *own;
    char *places[BPS_SUM_RANKS];
    uint64_t nbytes[BPS_SUM_RANKS], all, what;
};

static inline int bps_direct_gather_give(struct bps_channel *channel, const void *what, uint64_t i, uint32_t number,
                                         struct bps_direct_call *call)
{
    const struct bps_direct_gather *gather = (const struct bps_direct_gather *)what;
    int me = channel->port.me;
    uint64_t length = bps_direct_share(gather->nbytes[me], channel->box_nbytes, i);
    (void)call;
    if (length != 0)
        memcpy(bps_direct_box(channel, me, number), gather->own + i * channel->box_nbytes, length);
    return BPS_DIRECT_DONE;
}

static inline int bps_direct_gather_take(struct bps_channel *channel, const void *what, uint64_t i, uint32_t number,
                                         struct bps_direct_call *call)
{
    const struct bps_direct_gather *gather = (const struct bps_direct_gather *)what;
    int n = channel->port.n, me = channel->port.me;
    for (int k = 1; k < n; k++) {
        int r = (me + k) % n;
        uint64_t length = bps_direct_share(gather->nbytes[r], channel->box_nbytes, i);
        if (i == 0 || length != 0)
            BPS_DIRECT_TRY(bps_direct_await_chunk(channel, r, number, i == 0, gather->all, gather->what, call));
        if (length != 0 && gather->places[r] != NULL)
            memcpy(gather->places[r] + i * channel->box_nbytes, bps_direct_box(channel, r, number), length);
    }
    return BPS_DIRECT_DONE;
}

/* Copy nbytes[r] at `own` of each rank r to places[r] of every rank. As `bps_direct_all_reduce`. */
static inline int bps_direct_all_gather(struct bps_channel *channel, struct bps_direct_gather *gather,
                                        struct bps_direct_call *call)
{
    struct bps_direct_port *port = &channel->port;
    int me = port->me;
    uint64_t most = 0, box = channel->box_nbytes;
    gather->all = 0;
    for (int r = 0; r < port->n; r++) {
        gather->all += gather->nbytes[r];
        most = gather->nbytes[r] > most ? gather->nbytes[r] : most;
    }
    bps_direct_say(channel, gather->all, gather->what);
    if (gather->nbytes[me] != 0 && gather->places[me] != NULL && gather->places[me] != gather->own)
        memcpy(gather->places[me], gather->own, gather->nbytes[me]);
    if (most > channel->cell_nbytes)
        return bps_direct_exchange(channel, (most + box - 1) / box, bps_direct_gather_give, bps_direct_gather_take,
                                   gather, call);
    if (gather->nbytes[me] != 0)
        memcpy(bps_direct_cell(channel, me), gather->own, gather->nbytes[me]);
    BPS_DIRECT_TRY(bps_direct_meet(channel, gather->all, gather->what, call));
    for (int r = 0; r < port->n; r++)
        if (r != me && gather->places[r] != NULL)
            memcpy(gather->places[r], bps_direct_cell(channel, r), gather->nbytes[r]);
    return BPS_DIRECT_DONE;
}

/* The most bytes of a box that there are for each rank. */
static inline uint64_t bps_direct_box_part(const struct bps_channel *channel)
{
    return channel->box_nbytes / (uint64_t)channel->port.n / BPS_SUM_LINE * BPS_SUM_LINE;
}

/* What this rank has for each, and where it wants the sum of what all have for it. */
struct bps_direct_scatter {
    const char *from[BPS_SUM_RANKS];
    char *to;
    uint64_t nbytes[BPS_SUM_RANKS], all, part; /* part: of a box or cell, for each rank */
    const struct bps_direct_sum *sum;
};

/* Put share i of what this rank has for the others at `to`, a part for each. */
static inline void bps_direct_scatter_put(const struct bps_channel *channel, const struct bps_direct_scatter *scatter,
                                          uint64_t i, char *to)
{
    for (int r = 0; r < channel->port.n; r++) {
        uint64_t length = bps_direct_share(scatter->nbytes[r], scatter->part, i);
        if (r != channel->port.me && length != 0)
            memcpy(to + (uint64_t)r * scatter->part, scatter->from[r] + i * scatter->part, length);
    }
}

static inline int bps_direct_scatter_give(struct bps_channel *channel, const void *what, uint64_t i, uint32_t number,
                                          struct bps_direct_call *call)
{
    (void)call;
    bps_direct_scatter_put(channel, (const struct bps_direct_scatter *)what, i,
                           bps_direct_box(channel, channel->port.me, number));
    return BPS_DIRECT_DONE;
}

/* Sum this rank's share i of all cells, or boxes, of chunk `number`. */
static inline int bps_direct_scatter_sum(struct bps_channel *channel, const struct bps_direct_scatter *scatter, uint64_t i,
                                         uint32_t number, int in_cells, struct bps_direct_call *call)
{
    int n = channel->port.n, me = channel->port.me;
    uint64_t length = bps_direct_share(scatter->nbytes[me], scatter->part, i);
    for (int r = 0; r < n; r++)
        if (r != me && (i == 0 || length != 0))
            BPS_DIRECT_TRY(bps_direct_await_chunk(channel, r, number, i == 0, scatter->all, scatter->sum->call, call));
    if (length == 0)
        return BPS_DIRECT_DONE;
    struct bps_sum_call loop = {.to = scatter->to + i * scatter->part, .nbytes = length,
                                .divisor = scatter->sum->divisor, .n = n, .own = me};
    for (int r = 0; r < n; r++)
        loop.inputs[r] = r == me ? (char *)(uintptr_t)scatter->from[me] + i * scatter->part
                                 : (in_cells ? bps_direct_cell(channel, r) : bps_direct_box(channel, r, number))
                                       + (uint64_t)me * scatter->part;
    bps_sum_run(scatter->sum->kernel, &loop);
    return BPS_DIRECT_DONE;
}

static inline int bps_direct_scatter_take(struct bps_channel *channel, const void *what, uint64_t i, uint32_t number,
                                          struct bps_direct_call *call)
{
    return bps_direct_scatter_sum(channel, (const struct bps_direct_scatter *)what, i, number, 0, call);
}

/* Sum nbytes[r] at from[r] of all ranks to `to` of each rank r; `to` is from[r] or overlaps no input. As
 * `bps_direct_all_reduce`. */
static inline int bps_direct_reduce_scatter(struct bps_channel *channel, struct bps_direct_scatter *scatter,
                                            struct bps_direct_call *call)
{
    struct bps_direct_port *port = &channel->port;
    uint64_t most = 0;
    scatter->all = 0;
    for (int r = 0; r < port->n; r++) {
        scatter->all += scatter->nbytes[r];
        most = scatter->nbytes[r] > most ? scatter->nbytes[r] : most;
    }
    bps_direct_say(channel, scatter->all, scatter->sum->call);
    scatter->part = channel->cell_nbytes / (uint64_t)port->n / BPS_SUM_LINE * BPS_SUM_LINE;
    if (most > scatter->part) {
        scatter->part = bps_direct_box_part(channel);
        return bps_direct_exchange(channel, (most + scatter->part - 1) / scatter->part, bps_direct_scatter_give,
                                   bps_direct_scatter_take, scatter, call);
    }
    uint32_t number = ++channel->chunks;
    bps_direct_scatter_put(channel, scatter, 0, bps_direct_cell(channel, port->me));
    bps_direct_follow(channel, number);
    bps_direct_publish(port, &channel->lines[port->me].published, number);
    return bps_direct_scatter_sum(channel, scatter, 0, number, 1, call);
}

/* What a rank gives to, and takes from, each rank: 0 bytes need no place. */
struct bps_direct_pieces {
    const char *from[BPS_SUM_RANKS];
    char *to[BPS_SUM_RANKS];
    uint64_t given[BPS_SUM_RANKS], wanted[BPS_SUM_RANKS];
    uint64_t offered[BPS_SUM_RANKS]; /* to this rank, by each; only as many bytes as are wanted are taken */
    uint64_t in_cell[BPS_SUM_RANKS]; /* where the offered bytes lie in the cell of each; 0: they come through boxes */
    uint64_t part;                   /* of a box, for each rank */
    int fits;                        /* whether what this rank gives fits into its cell */
};

/* Where in a cell that begins with a table of how many bytes its rank has for each, which follow, the bytes for rank q
 * begin; 0: they do not fit. */
static inline uint64_t bps_direct_place(const struct bps_channel *channel, const uint64_t *table, int q)
{
    uint64_t n = (uint64_t)channel->port.n, at = n * sizeof *table, end = at;
    for (uint64_t i = 0; i < n; i++) {
        if (table[i] > channel->cell_nbytes)
            return 0;
        at += i < (uint64_t)q ? table[i] : 0;
        end += table[i];
    }
    return end <= channel->cell_nbytes ? at : 0;
}

static inline int bps_direct_pieces_give(struct bps_channel *channel, const void *what, uint64_t i, uint32_t number,
                                         struct bps_direct_call *call)
{
    const struct bps_direct_pieces *pieces = (const struct bps_direct_pieces *)what;
    char *box = bps_direct_box(channel, channel->port.me, number);
    (void)call;
    for (int r = 0; r < channel->port.n && !pieces->fits; r++) {
        uint64_t length = bps_direct_share(pieces->given[r], pieces->part, i);
        if (r != channel->port.me && length != 0)
            memcpy(box + (uint64_t)r * pieces->part, pieces->from[r] + i * pieces->part, length);
    }
    return BPS_DIRECT_DONE;
}

/* Copy what lies in cells, and is as much as is wanted. */
static inline void bps_direct_pieces_from_cells(struct bps_channel *channel, const struct bps_direct_pieces *pieces)
{
    for (int r = 0; r < channel->port.n; r++)
        if (r != channel->port.me && pieces->in_cell[r] != 0 && pieces->offered[r] != 0
            && pieces->offered[r] == pieces->wanted[r])
            memcpy(pieces->to[r], bps_direct_cell(channel, r) + pieces->in_cell[r], pieces->offered[r]);
}

static inline int bps_direct_pieces_take(struct bps_channel *channel, const void *what, uint64_t i, uint32_t number,
                                         struct bps_direct_call *call)
{
    const struct bps_direct_pieces *pieces = (const struct bps_direct_pieces *)what;
    int n = channel->port.n, me = channel->port.me;
    if (i == 0) /* not before something is given: to[r] may be from[r] */
        bps_direct_pieces_from_cells(channel, pieces);
    for (int k = 1; k < n; k++) {
        int r = (me + k) % n;
        uint64_t length = bps_direct_share(pieces->offered[r], pieces->part, i);
        if (length == 0 || pieces->in_cell[r] != 0)
            continue;
        BPS_DIRECT_TRY(bps_direct_await_chunk(channel, r, number, 0, 0, 0, call));
        if (pieces->offered[r] == pieces->wanted[r])
            memcpy(pieces->to[r] + i * pieces->part, bps_direct_box(channel, r, number) + (uint64_t)me * pieces->part,
                   length);
    }
    return BPS_DIRECT_DONE;
}

/* Give and take `pieces` of any sizes. Who has more than fits into its cell gives as many bytes to every rank in each
 * chunk, and all ranks make as many chunks as the largest of such pieces has. to[r] is from[r] or overlaps no input. As
 * `bps_direct_all_reduce`. */
static inline int bps_direct_all_to_all(struct bps_channel *channel, struct bps_direct_pieces *pieces, uint64_t what,
                                        struct bps_direct_call *call)
{
    int n = channel->port.n, me = channel->port.me;
    uint64_t table[BPS_SUM_RANKS], most = 0; /* a copy of what others might change */
    uint64_t table_nbytes = (uint64_t)n * sizeof *table;
    bps_direct_say(channel, 0, what);
    for (int r = 0; r < n; r++)
        table[r] = r == me ? 0 : pieces->given[r];
    pieces->fits = bps_direct_place(channel, table, 0) != 0;
    memcpy(bps_direct_cell(channel, me), table, table_nbytes);
    for (int r = 0; pieces->fits && r < n; r++)
        if (table[r] != 0)
            memcpy(bps_direct_cell(channel, me) + bps_direct_place(channel, table, r), pieces->from[r], table[r]);
    if (pieces->given[me] == pieces->wanted[me] && pieces->given[me] != 0 && pieces->to[me] != pieces->from[me])
        memcpy(pieces->to[me], pieces->from[me], pieces->given[me]);
    BPS_DIRECT_TRY(bps_direct_meet(channel, 0, what, call));
    for (int r = 0; r < n; r++) {
        memcpy(table, bps_direct_cell(channel, r), table_nbytes);
        pieces->offered[r] = r == me ? pieces->given[me] : table[me];
        pieces->in_cell[r] = bps_direct_place(channel, table, me);
        for (int q = 0; pieces->in_cell[r] == 0 && q < n; q++)
            most = table[q] > most ? table[q] : most;
    }
    pieces->part = bps_direct_box_part(channel);
    if (most != 0)
        return bps_direct_exchange(channel, (most + pieces->part - 1) / pieces->part, bps_direct_pieces_give,
                                   bps_direct_pieces_take, pieces, call);
    bps_direct_pieces_from_cells(channel, pieces);
    return BPS_DIRECT_DONE;
}

static inline int bps_direct_barrier(struct bps_channel *channel, uint64_t what, struct bps_direct_call *call)
{
    bps_direct_say(channel, 0, what);
    return bps_direct_meet(channel, 0, what, call);
}

/* -- any call --------------------------------------------------------------------------------------------------------- */

enum { BPS_DIRECT_SUM, BPS_DIRECT_COPY, BPS_DIRECT_GATHER, BPS_DIRECT_SCATTER, BPS_DIRECT_PIECES, BPS_DIRECT_BARRIER };

/* A call of any kind; `sum.call` says which one it is. Of a sum, `from`, `to` and `nbytes` count, of a copy from `root`
 * `to` and `nbytes`. */
struct bps_direct_work {
    int kind, root;
    const char *from;
    char *to;
    uint64_t nbytes;
    struct bps_direct_sum sum;
    union {
        struct bps_direct_gather gather;
        struct bps_direct_scatter scatter;
        struct bps_direct_pieces pieces;
    };
};

static inline void bps_direct_copy(char *to, const char *from, uint64_t nbytes)
{
    if (to != NULL && to != from && nbytes != 0)
        memcpy(to, from, nbytes);
}

/* A call of the only rank: nobody is waited for, so the end of the job is looked at here. */
static inline int bps_direct_alone(const struct bps_channel *channel, struct bps_direct_work *work)
{
    struct bps_direct_gather *gather = &work->gather;
    struct bps_direct_scatter *scatter = &work->scatter;
    struct bps_direct_pieces *pieces = &work->pieces;
    struct bps_sum_call loop = {.n = 1, .divisor = work->sum.divisor};
    BPS_DIRECT_TRY(bps_direct_trouble(&channel->port, 1));
    if (work->kind == BPS_DIRECT_SUM || work->kind == BPS_DIRECT_SCATTER) {
        int is_sum = work->kind == BPS_DIRECT_SUM;
        loop.to = is_sum ? work->to : scatter->to;
        loop.inputs[0] = (char *)(uintptr_t)(is_sum ? work->from : scatter->from[0]);
        loop.nbytes = is_sum ? work->nbytes : scatter->nbytes[0];
        if (loop.to != NULL && loop.nbytes != 0)
            bps_sum_run(work->sum.kernel, &loop);
    } else if (work->kind == BPS_DIRECT_GATHER) {
        bps_direct_copy(gather->places[0], gather->own, gather->nbytes[0]);
    } else if (work->kind == BPS_DIRECT_PIECES) {
        pieces->offered[0] = pieces->given[0];
        if (pieces->given[0] == pieces->wanted[0])
            bps_direct_copy(pieces->to[0], pieces->from[0], pieces->given[0]);
    }
    return BPS_DIRECT_DONE;
}

static inline int bps_direct_do(struct bps_channel *channel, struct bps_direct_work *work, struct bps_direct_call *call)
{
    if (channel->port.n == 1)
        return bps_direct_alone(channel, work);
    switch (work->kind) {
    case BPS_DIRECT_SUM:
        return bps_direct_all_reduce(channel, work->to, work->from, work->nbytes, &work->sum, call);
    case BPS_DIRECT_COPY:
        return bps_direct_broadcast(channel, work->root, work->to, work->nbytes, work->sum.call, call);
    case BPS_DIRECT_GATHER:
        work->gather.what = work->sum.call;
        return bps_direct_all_gather(channel, &work->gather, call);
    case BPS_DIRECT_SCATTER:
        work->scatter.sum = &work->sum;
        return bps_direct_reduce_scatter(channel, &work->scatter, call);
    case BPS_DIRECT_PIECES:
        return bps_direct_all_to_all(channel, &work->pieces, work->sum.call, call);
    default:
        return bps_direct_barrier(channel, work->sum.call, call);
    }
}

#endif
