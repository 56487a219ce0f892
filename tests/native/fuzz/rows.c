/* Frames of rows that other processes wrote, and write again while they are merged: the kernel changes them meanwhile, as
 * an owner of that memory may at any moment. Every frame ends where its memory ends. */
#include <stdlib.h>

#include "input.h"
#include "rows.h"

enum { N_INPUTS = 4, ROW_WORDS = 2 };

static const struct bps_rows shape = {.n_rows = 9, .max_rows = 5, .row_elements = ROW_WORDS, .row_nbytes = 4 * ROW_WORDS};
static struct input changes;
static char *frames[N_INPUTS];
static uint64_t frame_nbytes;

static void change_something(void)
{
    if (changes.nbytes < 3)
        return;
    uint8_t which = input_byte(&changes), at = input_byte(&changes);
    frames[which % N_INPUTS][at % frame_nbytes] = (char)input_byte(&changes);
}

static void sum_rows(void *dst, void **inputs, int64_t n_before, int64_t n_local, int64_t n_after, int64_t n,
                     int64_t divisor, int64_t nontemporal)
{
    int64_t n_inputs = n_before + n_local + n_after;
    (void)divisor, (void)nontemporal;
    if (n_inputs == 0) /* kernels take their first term without asking whether there is one */
        abort();
    memcpy(dst, inputs[0], (size_t)n * 4);
    for (int64_t i = 1; i < n_inputs; i++)
        for (int64_t k = 0; k < n; k++)
            ((uint32_t *)dst)[k] += ((uint32_t *)inputs[i])[k];
    change_something();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes)
{
    struct input input = {data, nbytes};
    struct bps_rows_cursor cursors[N_INPUTS];
    void *inputs[N_INPUTS], *found[N_INPUTS] = {NULL};
    uint64_t read;
    frame_nbytes = bps_rows_nbytes(&shape, shape.max_rows);
    int64_t n_before = input_byte(&input) % 2, n_local = input_byte(&input) % 3, n_after = input_byte(&input) % 2;
    int64_t n = n_before + n_local + n_after;
    for (int i = 0; i < N_INPUTS; i++) {
        inputs[i] = frames[i] = aligned_alloc(8, frame_nbytes);
        input_take(&input, frames[i], frame_nbytes);
    }
    char *output = malloc(frame_nbytes);
    changes = input;
    int64_t malformed = n == 0 ? 0
                               : bps_rows_merge(&shape, sum_rows, output, inputs, n_before, n_local, n_after, 1, cursors,
                                                found, &read);
    if (malformed < -1 || (malformed >= n && n != 0))
        abort();
    if (malformed == -1 && bps_rows_length(output, frame_nbytes) == 0)
        abort();
    for (int i = 0; i < N_INPUTS; i++)
        free(frames[i]);
    free(output);
    return 0;
}
