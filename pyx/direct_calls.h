/* Direct calls: the collectives of ranks of one machine besides the sum, in the cells and boxes of `direct.h`; and one entry
 * for a call of any kind.
 *
 * Broadcast, all-gather, reduce-scatter and all-to-all, in which each rank has other bytes for the others: it writes its
 * own cell or box, and reads those of the others.
 */
#ifndef BPS_DIRECT_CALLS_H
#define BPS_DIRECT_CALLS_H

#include "direct.h"

#define BPS_DIRECT_CALLS_PER_LOOK 256u /* of a job's only rank */

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
    char *cell = bps_direct_cell(channel, root);
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

/* A call in a channel of one rank. No wait checks whether the job is over, so this does. */
static inline int bps_direct_alone(struct bps_channel *channel, struct bps_direct_work *work)
{
    struct bps_direct_gather *gather = &work->gather;
    struct bps_direct_scatter *scatter = &work->scatter;
    struct bps_direct_pieces *pieces = &work->pieces;
    struct bps_sum_call loop = {.n = 1, .divisor = work->sum.divisor};
    /* whether the node lives is asked in a few calls only: the system call takes longer than the rest of one */
    BPS_DIRECT_TRY(bps_direct_trouble(&channel->port, channel->calls++ % BPS_DIRECT_CALLS_PER_LOOK == 0));
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
