/* What a peer sends over a TCP stream that is encrypted, or has checksums: bytes that nobody has sealed, and writes that
 * were sealed by a peer who says what it likes. The first byte tells which. Every slot ends where its memory ends, so a
 * byte beyond is a report; what was not sealed must not arrive, and what arrives must be what was sealed. */
#include <stdio.h>
#include <stdlib.h>

#include "input.h"
#include "portions.h"

enum { EPOCH = 5, N_SLOTS = 6, MOST_WRITES = 16, MOST_PAYLOAD = 256 };

/* Slots 0 and 4 are not bound; 3 and 5 take frames of up to so much. */
static const uint64_t sizes[N_SLOTS] = {0, 16, 64, 40, 0, 8};
/* The round that each takes first. */
static const uint32_t rounds[N_SLOTS] = {0, 1, 2, 1, 0, 3};
static const unsigned char key[BPS_SEAL_KEY] = "the key of this connection";
static struct bps_crypto crypto;

struct receiver {
    struct bps_slots slots;
    struct bps_write_in write;
    struct bps_protection how; /* a seal, or checksums */
    char *memory[N_SLOTS][2];
};

static void begin(struct receiver *receiver, int is_checked)
{
    static int is_loaded;
    if (!is_loaded && bps_crypto_load(&crypto, "libcrypto.so.3") != NULL
        && bps_crypto_load(&crypto, "libcrypto.so.1.1") != NULL) {
        fprintf(stderr, "libcrypto is missing (package libssl3)\n");
        abort();
    }
    is_loaded = 1;
    memset(receiver, 0, sizeof *receiver);
    receiver->how.seal = is_checked ? NULL : bps_seal_make(&crypto, key, 0);
    receiver->how.checks = is_checked;
    if ((receiver->how.seal == NULL && !is_checked) || bps_slots_init(&receiver->slots, N_SLOTS, EPOCH) != 0)
        abort();
    for (uint32_t i = 0; i < N_SLOTS; i++) {
        for (int parity = 0; parity < 2 && sizes[i] != 0; parity++)
            receiver->memory[i][parity] = malloc(sizes[i]);
        bps_slots_bind(&receiver->slots, i, (uint64_t)receiver->memory[i][0], (uint64_t)receiver->memory[i][1], sizes[i],
                       i == 3 || i == 5, rounds[i]);
    }
}

static int receive(struct receiver *receiver, struct portions *portions)
{
    return portions_receive(portions, &receiver->write, &receiver->how, &receiver->slots);
}

static void end(struct receiver *receiver)
{
    for (uint32_t i = 0; i < N_SLOTS; i++)
        for (int parity = 0; parity < 2; parity++)
            free(receiver->memory[i][parity]);
    bps_slots_free(&receiver->slots);
    bps_seal_free(receiver->how.seal);
}

/* Bytes that nobody has sealed. */
static void nobody(const uint8_t *data, size_t nbytes, size_t most, int is_checked)
{
    struct receiver receiver;
    struct portions portions = {data, nbytes, most};
    begin(&receiver, is_checked);
    int rc = receive(&receiver, &portions);
    if (rc == 0 || (nbytes >= sizeof(struct bps_header) + BPS_SEAL_TAG && rc != EBADMSG))
        abort();
    for (uint32_t i = 0; i < N_SLOTS; i++)
        if (bps_slots_next(&receiver.slots, i) != rounds[i])
            abort();
    end(&receiver);
}

/* Write nbytes to `wire` as the sender does: sealed, or followed by a checksum that goes on from `crc`; how many those
 * are. */
static size_t seal(struct bps_seal *seals, uint32_t *crc, const void *plain, size_t nbytes, uint8_t *wire)
{
    if (seals == NULL) {
        *crc = bps_crc32c(*crc, plain, nbytes, 1);
        memcpy(wire, plain, nbytes);
        memcpy(wire + nbytes, crc, BPS_CHECKSUM_NBYTES);
        return nbytes + BPS_CHECKSUM_NBYTES;
    }
    if (bps_seal_close(seals, plain, nbytes, wire) != 0)
        abort();
    return nbytes + BPS_SEAL_TAG;
}

/* Writes whose headers are the input's, each sealed; one of the sealed bytes may be changed on the way, and the first
 * write may come again at the end. */
static void a_peer(struct input *input, size_t most, int is_checked)
{
    struct receiver receiver;
    struct bps_header sent[MOST_WRITES];
    static uint8_t payloads[MOST_WRITES][MOST_PAYLOAD], wire[MOST_WRITES * (MOST_PAYLOAD + 128)];
    size_t ends[MOST_WRITES], used = 0;
    int n = 0, n_arrived = 0, rc = 0;
    begin(&receiver, is_checked);
    struct bps_seal *seals = is_checked ? NULL : bps_seal_make(&crypto, key, 1);
    size_t changed = (size_t)(input_word(input) % (2 * sizeof wire));
    int is_repeated = input_byte(input) & 1;
    while (input->nbytes != 0 && n < MOST_WRITES) {
        struct bps_header *write = &sent[n];
        *write = (struct bps_header){.magic = BPS_WIRE_MAGIC, .slot = input_byte(input) % 8, .round = input_byte(input) % 4,
                                     .flags = input_byte(input) % 3, .epoch = EPOCH, .nbytes = input_byte(input)};
        write->immediate = bps_immediate(write->slot, write->round, write->epoch);
        uint8_t odd = input_byte(input);
        if (odd >= 250) /* any header at all */
            input_take(input, write, sizeof *write);
        size_t nbytes = write->nbytes < MOST_PAYLOAD ? (size_t)write->nbytes : MOST_PAYLOAD;
        input_take(input, payloads[n], nbytes);
        uint32_t crc = 0;
        used += seal(seals, &crc, write, sizeof *write, wire + used);
        if (nbytes != 0)
            used += seal(seals, &crc, payloads[n], nbytes, wire + used);
        ends[n++] = used;
    }
    if (is_repeated && n != 0) {
        memcpy(wire + used, wire, ends[0]);
        used += ends[0];
    }
    if (changed < used)
        wire[changed] ^= 1;
    struct portions portions = {wire, used, most};
    while ((rc = receive(&receiver, &portions)) == 0) {
        struct bps_header header = receiver.write.header;
        if (n_arrived >= n || ends[n_arrived] > (changed < used ? changed : used) ||
            memcmp(&header, &sent[n_arrived], sizeof header) != 0 || header.slot >= N_SLOTS ||
            header.nbytes > sizes[header.slot])
            abort();
        if (header.nbytes != 0 &&
            memcmp(receiver.memory[header.slot][header.round & 1], payloads[n_arrived], header.nbytes) != 0)
            abort();
        n_arrived++;
    }
    size_t at = n_arrived ? ends[n_arrived - 1] : 0, tag = is_checked ? BPS_CHECKSUM_NBYTES : BPS_SEAL_TAG;
    int is_damaged = n_arrived < n && changed >= at && changed < at + sizeof(struct bps_header) + tag;
    if ((is_damaged || (is_repeated && n_arrived == n && n != 0 && !is_checked)) && rc != EBADMSG)
        abort();
    bps_seal_free(seals);
    end(&receiver);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes)
{
    struct input input = {data, nbytes};
    if (nbytes > 2048)
        return -1;
    uint8_t kind = input_byte(&input);
    if (kind & 1)
        nobody(nbytes ? data + 1 : data, nbytes ? nbytes - 1 : 0, kind & 2 ? 7 : 5000, kind & 4);
    else
        a_peer(&input, kind & 2 ? 7 : 5000, kind & 4);
    return 0;
}
