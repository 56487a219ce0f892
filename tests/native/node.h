/* Node: an engine with its board and doorbell, and ranks with their ports, all in one process: threads instead of
 * processes, so that a race detector sees both ends of what is otherwise shared between processes. */
#ifndef TESTS_NODE_H
#define TESTS_NODE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdio.h>
#include <stdlib.h>

#include "pipelined_transfer.h"
#include "lifecycle.h"
#include "table.h"

#define CHECK(truth)                                                                                                  \
    do {                                                                                                              \
        if (!(truth)) {                                                                                               \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #truth);                                       \
            abort();                                                                                                  \
        }                                                                                                             \
    } while (0)

enum { LANE_CAPACITY = 64 };

struct node {
    struct bps_core *core;
    struct bps_doorbell bell;
    void *board;
};

static inline void *zeroed(size_t nbytes)
{
    void *memory = calloc(1, nbytes);
    CHECK(memory != NULL);
    return memory;
}

static inline struct bps_lane *lane_make(uint32_t capacity)
{
    struct bps_lane *lane = zeroed(sizeof *lane + capacity * sizeof(struct bps_entry));
    lane->magic = BPS_LANE_MAGIC;
    lane->capacity = capacity;
    return lane;
}

/* An engine whose threads are not started yet. */
static inline void node_make(struct node *node, int n_workers)
{
    node->core = bps_core_make(n_workers, 256, 1, 0);
    CHECK(node->core != NULL);
    node->bell = (struct bps_doorbell){.magic = BPS_DOORBELL_MAGIC};
    node->board = zeroed(BPS_BOARD_HEADER + BPS_MAX_PARTS * (size_t)BPS_BOARD_STRIDE);
    ((struct bps_board *)node->board)->magic = BPS_BOARD_MAGIC;
    node->core->board = node->board;
    node->core->doorbell = &node->bell;
    node->core->nontemporal_nbytes = UINT64_MAX;
}

static inline void node_free(struct node *node)
{
    free(node->board);
    bps_core_free(node->core);
}

/* As `Engine._add_source` does it. Returns the source's id. */
static inline uint32_t node_add_source(struct node *node, int kind, struct bps_lane *lane)
{
    struct bps_source source = {.kind = kind, .lane = lane, .capacity = lane ? lane->capacity : 0};
    pthread_mutex_lock(&node->core->lock);
    uint32_t index = node->core->n_sources++;
    node->core->sources[index] = source;
    pthread_mutex_unlock(&node->core->lock);
    return index;
}

/* A part with these inputs, (source, slot), in the order of the association. Its other fields are the caller's. */
static inline void part_inputs(struct bps_part *part, uint32_t n, const uint32_t *sources, void *const *slots)
{
    part->inputs = zeroed(n * sizeof *part->inputs);
    part->shm_peers = zeroed(sizeof *part->shm_peers);
    part->n_inputs = part->n_missing = n;
    for (uint32_t i = 0; i < n; i++) {
        part->inputs[i].source = sources[i];
        part->inputs[i].slot = (uint64_t)slots[i];
    }
}

static inline void port_make(struct bps_port *port, struct node *node, struct bps_lane *lane)
{
    *port = (struct bps_port){.lane = lane, .capacity = lane->capacity, .board = node->board, .doorbell = &node->bell,
                              .n_words = BPS_MAX_PARTS, .node_pidfd = -1, .awake_ns = 20000};
    pthread_mutex_init(&port->mutex, NULL);
}

/* Sums words: a `bps_kernel`. */
static inline void sum_words(void *dst, void **inputs, int64_t n_before, int64_t n_local, int64_t n_after, int64_t n,
                             int64_t divisor, int64_t nontemporal)
{
    (void)divisor, (void)nontemporal;
    for (int64_t k = 0; k < n; k++) {
        uint64_t sum = 0, term;
        for (int64_t i = 0; i < n_before + n_local + n_after; i++) { /* they lie where their ranks say */
            memcpy(&term, (const char *)inputs[i] + 8 * k, 8);
            sum += term;
        }
        ((uint64_t *)dst)[k] = sum;
    }
}

/* A codec that leaves words as they are: of what the engine does around one nothing is missing. */
static inline int64_t encode_words(void *wire, int64_t room, const void *x, int64_t n, void *error, uint64_t *generator,
                                   int64_t k, int64_t flags, void *scratch)
{
    (void)error, (void)generator, (void)k, (void)flags, (void)scratch;
    if (room < 8 * n)
        return -1;
    memcpy(wire, x, 8 * (size_t)n);
    return 8 * n;
}

static inline int64_t decode_words(void *out, int64_t n, const void *wire, int64_t nbytes, int64_t k, int64_t flags,
                                   int64_t add, void *scratch)
{
    (void)k, (void)flags, (void)scratch;
    if (nbytes != 8 * n)
        return -1;
    for (int64_t i = 0; i < n; i++)
        ((uint64_t *)out)[i] = ((const uint64_t *)wire)[i] + (add ? ((uint64_t *)out)[i] : 0);
    return 0;
}

/* Of a part of n words; `frame` and `frames` are the caller's to fill in. */
static inline struct bps_codec *codec_make(uint64_t n)
{
    struct bps_codec *codec = zeroed(sizeof *codec);
    codec->encode = encode_words;
    codec->decode = decode_words;
    codec->width = 8;
    codec->room_nbytes = BPS_FRAME_LENGTH + 8 * n;
    return codec;
}

/* Wait until a word has a value. */
static inline void await(uint32_t *word, uint32_t value)
{
    uint32_t seen;
    while ((seen = bps_load(word)) != value)
        bps_wait(word, seen, 10000000);
}

/* How long to go on, as the command line says: half a second by default. */
static inline uint64_t deadline_of(int argc, char **argv)
{
    return bps_now_ns() + (uint64_t)((argc > 1 ? atof(argv[1]) : 0.5) * 1e9);
}

#endif
