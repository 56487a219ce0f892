/* Input: what a fuzzer says, taken apart; zeros once it is used up. Targets define LLVMFuzzerTestOneInput. */
#ifndef TESTS_INPUT_H
#define TESTS_INPUT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct input {
    const uint8_t *data;
    size_t nbytes;
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes);

static inline void input_take(struct input *input, void *to, size_t nbytes)
{
    size_t n = nbytes < input->nbytes ? nbytes : input->nbytes;
    memset(to, 0, nbytes);
    if (n != 0)
        memcpy(to, input->data, n);
    input->data += n;
    input->nbytes -= n;
}

static inline uint8_t input_byte(struct input *input)
{
    uint8_t byte;
    input_take(input, &byte, 1);
    return byte;
}

static inline uint64_t input_word(struct input *input)
{
    uint64_t word;
    input_take(input, &word, 8);
    return word;
}

#endif
