/* What a peer sends over a TCP stream: headers and payloads, in portions of any size. Every slot ends where its memory
 * ends, so a byte beyond is a report; what is received must be what the header says. */
#include <stdlib.h>

#include "input.h"
#include "portions.h"

enum { EPOCH = 5, N_SLOTS = 6 };

/* Slots 0 and 4 are not bound; 3 and 5 take frames of up to so much. */
static const uint64_t sizes[N_SLOTS] = {0, 16, 64, 40, 0, 8};
/* The round that each takes first. */
static const uint32_t rounds[N_SLOTS] = {0, 1, 2, 1, 0, 3};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes)
{
    struct bps_slots slots;
    struct bps_write_in write = {.stage = BPS_WRITE_IN_HEADER};
    struct bps_protection none = {NULL, 0};
    struct portions portions = {data, nbytes, nbytes % 2 ? 7 : 4096};
    char *memory[N_SLOTS][2] = {{NULL}};
    uint32_t n_writes[N_SLOTS] = {0};
    uint64_t taken = 0;
    if (nbytes > 2048 || bps_slots_init(&slots, N_SLOTS, EPOCH) != 0)
        return -1;
    for (uint32_t i = 0; i < N_SLOTS; i++)
        for (int parity = 0; parity < 2 && sizes[i] != 0; parity++)
            memory[i][parity] = malloc(sizes[i]);
    for (uint32_t i = 0; i < N_SLOTS; i++)
        bps_slots_bind(&slots, i, (uint64_t)memory[i][0], (uint64_t)memory[i][1], sizes[i], i == 3 || i == 5,
                       rounds[i]);
    while (portions_receive(&portions, &write, &none, &slots) == 0) {
        struct bps_header header = write.header;
        const uint8_t *payload = data + taken + sizeof header;
        taken += sizeof header + header.nbytes;
        if (taken > nbytes || sizes[header.slot] == 0 || header.nbytes > sizes[header.slot])
            abort();
        if (header.round != rounds[header.slot] + n_writes[header.slot]++)
            abort();
        if (header.nbytes != 0 && memcmp(memory[header.slot][header.round & 1], payload, header.nbytes) != 0)
            abort();
    }
    for (uint32_t i = 0; i < N_SLOTS; i++)
        for (int parity = 0; parity < 2; parity++)
            free(memory[i][parity]);
    bps_slots_free(&slots);
    return 0;
}
