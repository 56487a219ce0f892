/* Board: where a node publishes which round of each partition is complete. Ranks map it read-only.
 *
 *   offset  width  meaning
 *        0      4  magic
 *        4      4  state: 0 running, 1 aborted (reason below)
 *        8      4  number of words
 *       12      4  how often a word has gone back: a round is summed again because a rank is lost
 *       16      4  how many ranks the job has lost and gone on
 *       64   4032  reason, UTF-8, NUL-terminated; complete before state becomes 1
 *     4096   64*n  word of partition i at 4096 + 64*i: the last complete round (0: none yet); 8 bytes on, when it was
 *                  published, in ns of CLOCK_MONOTONIC, complete before the word
 *
 * Words are a cache line apart. Ranks sleep on the word itself (a read-only mapping suffices for FUTEX_WAIT)
 * and say so in their lane's `sleepers`, so an uncontended publication makes no system call.
 */
#pragma once

#include "futex.h"

#define BPS_BOARD_MAGIC 0x42504244u
#define BPS_BOARD_HEADER 4096
#define BPS_BOARD_STRIDE 64
#define BPS_REASON_OFFSET 64
#define BPS_REASON_NBYTES 4032
#define BPS_MAX_PARTS 65536u

struct bps_board {
    uint32_t magic;
    uint32_t state;
    uint32_t n_words;
    uint32_t n_redone, n_lost;
};

static inline uint32_t *bps_board_word(void *board, uint32_t part)
{
    return (uint32_t *)((char *)board + BPS_BOARD_HEADER + (uint64_t)part * BPS_BOARD_STRIDE);
}

/* How often words have gone back. A round of several partitions is complete if all their words have reached it while
 * this has not changed. */
static inline uint32_t bps_board_redone(const void *board) { return bps_load(&((struct bps_board *)board)->n_redone); }

/* When the round in a board word was published. */
static inline uint64_t *bps_board_time(uint32_t *word) { return (uint64_t *)(word + 2); }

/* Rounds are compared as a signed difference, so they may wrap. */
static inline int bps_reached(uint32_t have, uint32_t want) { return (int32_t)(have - want) >= 0; }
