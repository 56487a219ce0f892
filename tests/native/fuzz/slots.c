/* What a peer sends over a TCP stream: headers and payloads, received as the stream's thread does, from a socket. Every
 * slot ends where its memory ends, so a byte beyond is a report; what is received must be what the header says. */
#include <stdlib.h>
#include <unistd.h>

#include "input.h"
#include "slots.h"

enum { EPOCH = 5, N_SLOTS = 6 };

/* Slots 0 and 4 are not bound; 3 and 5 take frames of up to so much. */
static const uint64_t sizes[N_SLOTS] = {0, 16, 64, 40, 0, 8};
/* The round that each takes first. */
static const uint32_t rounds[N_SLOTS] = {0, 1, 2, 1, 0, 3};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes)
{
    struct bps_slots slots;
    struct bps_header header;
    char *memory[N_SLOTS][2] = {{NULL}};
    int ends[2], rc = 0;
    uint32_t closing = 0, n_writes[N_SLOTS] = {0};
    uint64_t begin_ns, taken = 0;
    if (nbytes > 2048 || bps_slots_init(&slots, N_SLOTS, EPOCH) != 0 || socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0)
        return -1;
    for (uint32_t i = 0; i < N_SLOTS; i++)
        for (int parity = 0; parity < 2 && sizes[i] != 0; parity++)
            memory[i][parity] = malloc(sizes[i]);
    for (uint32_t i = 0; i < N_SLOTS; i++)
        bps_slots_bind(&slots, i, (uint64_t)memory[i][0], (uint64_t)memory[i][1], sizes[i], i == 3 || i == 5,
                       rounds[i]);
    struct bps_pace pace = {.ns_per_byte = 0, .piece_nbytes = 7};
    if (nbytes != 0 && send(ends[0], data, nbytes, 0) != (ssize_t)nbytes)
        abort();
    shutdown(ends[0], SHUT_WR);
    while (rc == 0) {
        rc = bps_slots_receive(&slots, ends[1], NULL, 0, nbytes % 2 ? &pace : NULL, &closing, &header,
                               &begin_ns);
        if (rc != 0)
            break;
        const uint8_t *payload = data + taken + sizeof header;
        taken += sizeof header + header.nbytes;
        if (taken > nbytes || sizes[header.slot] == 0 || header.nbytes > sizes[header.slot])
            abort();
        if (header.round != rounds[header.slot] + n_writes[header.slot]++)
            abort();
        if (header.nbytes != 0 && memcmp(memory[header.slot][header.round & 1], payload, header.nbytes) != 0)
            abort();
    }
    close(ends[0]);
    close(ends[1]);
    for (uint32_t i = 0; i < N_SLOTS; i++)
        for (int parity = 0; parity < 2; parity++)
            free(memory[i][parity]);
    bps_slots_free(&slots);
    return 0;
}
