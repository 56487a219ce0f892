/* Rows: a few rows of a table, and their sum. A partition of the op "rows" is a frame, little endian:
 *
 *   offset  width     meaning
 *        0  8         bytes that follow
 *        8  8         n_rows
 *       16  8         flags: 1 = overflow: up to n_rows would have been needed, and nothing follows
 *       24  4*n_rows  which rows of the partition, ascending
 *        v  ...       n_rows rows of values; v is the next multiple of 64
 *
 * The sum of frames is their merge: a row that several inputs have is summed by the kernel of dense tensors, in the
 * order of the inputs and with its rounding; inputs without the row do not count. `bpsfast/base/reference_sum.py:
 * reduce_rows` is the same in NumPy. A sum of more rows than fit overflows, and its readers see by how much.
 *
 * Frames come from other processes. Their headers are read once, and the caller reports what is wrong with one; later
 * changes can only spoil values, because an index is compared, never used as an address.
 */
#pragma once

#include <stdint.h>
#include <string.h>

#define BPS_ROWS_HEADER 24u
#define BPS_ROWS_OVERFLOW 1u

/* dst = before + round(local...) + after, then the average: see kernels.py. */
typedef void (*bps_kernel)(void *dst, void **inputs, int64_t n_before, int64_t n_local, int64_t n_after,
                           int64_t n_elements, int64_t divisor, int64_t nontemporal);

/* What frames of a partition may be; row_nbytes 0: the partition is dense. */
struct bps_rows {
    uint64_t n_rows, max_rows; /* in the partition, and in a frame */
    uint64_t row_elements, row_nbytes;
};

struct bps_rows_frame {
    uint64_t following, n_rows, flags;
    uint32_t indices[];
};

/* How far the merge has come in one input. */
struct bps_rows_cursor {
    const uint32_t *indices;
    const char *values;
    uint64_t n, at;
};

_Static_assert(sizeof(struct bps_rows_frame) == BPS_ROWS_HEADER, "the head of a frame of rows is 24 bytes");

static inline uint64_t bps_rows_values(uint64_t n_rows) { return (BPS_ROWS_HEADER + 4 * n_rows + 63) & ~(uint64_t)63; }

/* The bytes of a frame of n_rows, of which there are at most shape->max_rows. */
static inline uint64_t bps_rows_nbytes(const struct bps_rows *shape, uint64_t n_rows)
{
    return bps_rows_values(n_rows) + n_rows * shape->row_nbytes;
}

/* Whether a frame may be at this address, which another process has announced. */
static inline int bps_rows_aligned(const void *frame) { return ((uintptr_t)frame & 7) == 0; }

/* The bytes of the frame as its head says, or 0 if it cannot have so many. */
static inline uint64_t bps_rows_length(const void *frame, uint64_t room)
{
    if (!bps_rows_aligned(frame))
        return 0;
    uint64_t following = __atomic_load_n((const uint64_t *)frame, __ATOMIC_RELAXED);
    return following < BPS_ROWS_HEADER - 8 || following > room - 8 ? 0 : following + 8;
}

/* Begin to read a frame. 0, or -1 if it is none of this shape. *needed: how many rows it has, or lacked room for. */
static inline int bps_rows_open(const struct bps_rows *shape, const struct bps_rows_frame *frame,
                                struct bps_rows_cursor *cursor, uint64_t *needed, int *overflow)
{
    if (!bps_rows_aligned(frame))
        return -1;
    uint64_t following = __atomic_load_n(&frame->following, __ATOMIC_RELAXED);
    uint64_t n_rows = __atomic_load_n(&frame->n_rows, __ATOMIC_RELAXED);
    uint64_t flags = __atomic_load_n(&frame->flags, __ATOMIC_RELAXED);
    *cursor = (struct bps_rows_cursor){frame->indices, NULL, 0, 0};
    *needed += n_rows;
    if (flags == BPS_ROWS_OVERFLOW) {
        *overflow = 1;
        return n_rows <= shape->n_rows && following == BPS_ROWS_HEADER - 8 ? 0 : -1;
    }
    if (flags != 0 || n_rows > shape->max_rows || following != bps_rows_nbytes(shape, n_rows) - 8)
        return -1;
    cursor->values = (const char *)frame + bps_rows_values(n_rows);
    cursor->n = n_rows;
    uint64_t least = 0;
    for (uint64_t i = 0; i < n_rows; i++) {
        uint64_t index = frame->indices[i];
        if (index < least || index >= shape->n_rows)
            return -1;
        least = index + 1;
    }
    return 0;
}

/* Write the indices that any of n inputs has; how many, or -1 if they are more than max_rows. */
static inline int64_t bps_rows_unite(struct bps_rows_cursor *cursors, int64_t n, uint64_t max_rows, uint32_t *indices)
{
    for (uint64_t n_rows = 0;; n_rows++) {
        uint64_t least = UINT64_MAX;
        for (int64_t i = 0; i < n; i++)
            if (cursors[i].at < cursors[i].n && cursors[i].indices[cursors[i].at] < least)
                least = cursors[i].indices[cursors[i].at];
        if (least == UINT64_MAX)
            return (int64_t)n_rows;
        if (n_rows == max_rows)
            return -1;
        indices[n_rows] = (uint32_t)least;
        for (int64_t i = 0; i < n; i++)
            cursors[i].at += cursors[i].at < cursors[i].n && cursors[i].indices[cursors[i].at] == least;
    }
}

/* Gather where n inputs have row `index`, and step over it; how many have it. */
static inline int64_t bps_rows_gather(struct bps_rows_cursor *cursors, int64_t n, uint32_t index, uint64_t row_nbytes,
                                      void **found)
{
    int64_t used = 0;
    for (int64_t i = 0; i < n; i++)
        if (cursors[i].at < cursors[i].n && cursors[i].indices[cursors[i].at] == index)
            found[used++] = (void *)(cursors[i].values + cursors[i].at++ * row_nbytes);
    return used;
}

/* Merge frames into `output`, which has room for shape->max_rows: -1, or which input is malformed. `kernel`, the counts
 * and the divisor are those of a dense sum; `cursors` and `found` have room for all inputs. *read: bytes of the inputs.
 */
static inline int64_t bps_rows_merge(const struct bps_rows *shape, bps_kernel kernel, void *output, void **inputs,
                                     int64_t n_before, int64_t n_local, int64_t n_after, int64_t divisor,
                                     struct bps_rows_cursor *cursors, void **found, uint64_t *read)
{
    struct bps_rows_frame *sum = output;
    int64_t n = n_before + n_local + n_after;
    uint64_t needed = 0;
    int overflow = 0;
    *read = 0;
    for (int64_t i = 0; i < n; i++) {
        if (bps_rows_open(shape, inputs[i], &cursors[i], &needed, &overflow) != 0)
            return i;
        *read += bps_rows_nbytes(shape, cursors[i].n);
    }
    int64_t n_rows = overflow ? -1 : bps_rows_unite(cursors, n, shape->max_rows, sum->indices);
    if (n_rows < 0) {
        sum->following = BPS_ROWS_HEADER - 8;
        sum->n_rows = needed < shape->n_rows ? needed : shape->n_rows;
        sum->flags = BPS_ROWS_OVERFLOW;
        return -1;
    }
    sum->following = bps_rows_nbytes(shape, (uint64_t)n_rows) - 8;
    sum->n_rows = (uint64_t)n_rows;
    sum->flags = 0;
    char *values = (char *)output + bps_rows_values((uint64_t)n_rows);
    for (int64_t i = 0; i < n; i++)
        cursors[i].at = 0;
    for (int64_t i = 0; i < n_rows; i++) {
        uint32_t index = sum->indices[i];
        int64_t before = bps_rows_gather(cursors, n_before, index, shape->row_nbytes, found);
        int64_t local = bps_rows_gather(cursors + n_before, n_local, index, shape->row_nbytes, found + before);
        int64_t after = bps_rows_gather(cursors + n_before + n_local, n_after, index, shape->row_nbytes,
                                        found + before + local);
        char *row = values + (uint64_t)i * shape->row_nbytes;
        if (before + local + after == 0) /* a frame was changed meanwhile; a kernel needs at least one input */
            memset(row, 0, shape->row_nbytes);
        else
            kernel(row, found, before, local, after, (int64_t)shape->row_elements, divisor, 0);
    }
    return -1;
}
