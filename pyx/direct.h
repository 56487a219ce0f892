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

/* The cell of rank r in the present call. */
static inline char *bps_direct_cell(const struct bps_channel *channel, int r)
{
    return channel->cells + ((uint64_t)r * 2 + (channel->calls & 1)) * channel->cell_nbytes;
}

/* Copy an input into a cell. The last line is written whole: measured, the others then read it in half the time. */
static inline void bps_direct_fill_cell(char *cell, const char *from, uint64_t nbytes)
{
    uint64_t whole = nbytes / BPS_SUM_LINE * BPS_SUM_LINE;
    memcpy(cell, from, whole);
    if (whole != nbytes) {
        bps_line last = {0};
        memcpy(&last, from + whole, nbytes - whole);
        bps_store_line(cell + whole, last);
    }
}

static inline int bps_direct_sum_cells(struct bps_channel *channel, char *to, const char *from, uint64_t nbytes,
                                       const struct bps_direct_sum *sum, struct bps_direct_call *call)
{
    struct bps_direct_port *port = &channel->port;
    int n = port->n, me = port->me;
    uint32_t round = ++channel->chunks;
    struct bps_sum_call loop;
    bps_direct_say(channel, nbytes, sum->call);
    bps_direct_fill_cell(bps_direct_cell(channel, me), from, nbytes);
    bps_direct_follow(channel, round);
    bps_direct_publish(port, &channel->lines[me].published, round);
    call->summing = channel;
    call->first = round;
    for (int r = 0; r < n; r++) {
        loop.inputs[r] = bps_direct_cell(channel, r);
        if (r == me)
            continue;
        BPS_DIRECT_TRY(bps_direct_wait(port, &channel->lines[r].published, round, r, call));
        BPS_DIRECT_TRY(bps_direct_agree(channel, r, nbytes, sum->call));
    }
    loop.inputs[me] = (char *)(uintptr_t)from; /* not the cell, whose lines other ranks read meanwhile */
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

#endif
