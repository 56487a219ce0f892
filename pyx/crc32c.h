/* CRC32C: the checksum of RFC 3720 (Castagnoli's polynomial, reflected), as in iSCSI, ext4 and SCTP.
 *
 * Processors with an instruction for it (SSE4.2's crc32, ARMv8's crc32cx) start one of eight bytes each cycle, and take
 * three cycles for it: so three blocks of BPS_CRC_LANE bytes are computed at once, and combined by a table of the
 * effect of that many zero bytes. Other processors take eight bytes a step by tables (`tests/pyx/test_checksum.py`).
 */
#pragma once

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

#define BPS_CRC_POLYNOMIAL 0x82f63b78u
#define BPS_CRC_LANE 1024u

static struct {
    uint32_t eight[8][256]; /* [k][n]: what byte n makes of the remainder k bytes later */
    uint32_t lane[4][256];  /* [k][n]: what byte k of a remainder, n, is BPS_CRC_LANE zeros later */
    int has_instruction;
    pthread_once_t once;
} bps_crc = {.once = PTHREAD_ONCE_INIT};

static void bps_crc_prepare(void)
{
    uint32_t bits[32];
    for (uint32_t n = 0; n < 256; n++) {
        uint32_t crc = n;
        for (int i = 0; i < 8; i++)
            crc = crc & 1 ? crc >> 1 ^ BPS_CRC_POLYNOMIAL : crc >> 1;
        bps_crc.eight[0][n] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (uint32_t n = 0; n < 256; n++) {
            uint32_t crc = bps_crc.eight[k - 1][n];
            bps_crc.eight[k][n] = crc >> 8 ^ bps_crc.eight[0][crc & 255];
        }
    for (int i = 0; i < 32; i++) { /* zeros act on each bit by itself: a remainder is the sum of its bits */
        bits[i] = 1u << i;
        for (uint32_t k = 0; k < BPS_CRC_LANE; k++)
            bits[i] = bits[i] >> 8 ^ bps_crc.eight[0][bits[i] & 255];
    }
    for (int k = 0; k < 4; k++)
        for (uint32_t n = 0; n < 256; n++)
            for (int i = 0; i < 8; i++)
                bps_crc.lane[k][n] ^= n >> i & 1 ? bits[8 * k + i] : 0;
#if defined(__x86_64__)
    bps_crc.has_instruction = __builtin_cpu_supports("sse4.2") != 0;
#elif defined(__aarch64__)
    bps_crc.has_instruction = (getauxval(AT_HWCAP) >> 7 & 1) != 0; /* HWCAP_CRC32 */
#endif
}

static inline uint64_t bps_crc_word(const unsigned char *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

static inline uint32_t bps_crc_by_tables(uint32_t crc, const unsigned char *bytes, size_t nbytes)
{
    for (; nbytes >= 8; bytes += 8, nbytes -= 8) {
        uint64_t word = bps_crc_word(bytes) ^ crc;
        crc = 0;
        for (int k = 0; k < 8; k++)
            crc ^= bps_crc.eight[7 - k][word >> 8 * k & 255];
    }
    for (; nbytes != 0; bytes++, nbytes--)
        crc = crc >> 8 ^ bps_crc.eight[0][(crc ^ *bytes) & 255];
    return crc;
}

#if defined(__x86_64__) || defined(__aarch64__)
/* The instruction, which the compiler may not know of: it compiles for processors without. */
static inline uint64_t bps_crc_step(uint64_t crc, uint64_t word)
{
#if defined(__x86_64__)
    __asm__("crc32q %1, %0" : "+r"(crc) : "r"(word));
#else
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word));
#endif
    return crc;
}

static inline uint64_t bps_crc_beyond_lane(uint64_t crc)
{
    return bps_crc.lane[0][crc & 255] ^ bps_crc.lane[1][crc >> 8 & 255] ^ bps_crc.lane[2][crc >> 16 & 255]
           ^ bps_crc.lane[3][crc >> 24 & 255];
}

static inline uint32_t bps_crc_by_instruction(uint32_t begun, const unsigned char *bytes, size_t nbytes)
{
    uint64_t crc = begun;
    for (; nbytes >= 3 * BPS_CRC_LANE; bytes += 3 * BPS_CRC_LANE, nbytes -= 3 * BPS_CRC_LANE) {
        uint64_t second = 0, third = 0;
        for (const unsigned char *at = bytes; at < bytes + BPS_CRC_LANE; at += 8) {
            crc = bps_crc_step(crc, bps_crc_word(at));
            second = bps_crc_step(second, bps_crc_word(at + BPS_CRC_LANE));
            third = bps_crc_step(third, bps_crc_word(at + 2 * BPS_CRC_LANE));
        }
        crc = bps_crc_beyond_lane(bps_crc_beyond_lane(crc) ^ second) ^ third;
    }
    for (; nbytes >= 8; bytes += 8, nbytes -= 8)
        crc = bps_crc_step(crc, bps_crc_word(bytes));
    return bps_crc_by_tables((uint32_t)crc, bytes, nbytes);
}
#endif

/* The checksum of what `crc` is that of (0: nothing), followed by these bytes. Any thread. */
static inline uint32_t bps_crc32c(uint32_t crc, const void *bytes, size_t nbytes, int by_tables)
{
    pthread_once(&bps_crc.once, bps_crc_prepare);
#if defined(__x86_64__) || defined(__aarch64__)
    if (bps_crc.has_instruction && !by_tables)
        return ~bps_crc_by_instruction(~crc, (const unsigned char *)bytes, nbytes);
#endif
    return ~bps_crc_by_tables(~crc, (const unsigned char *)bytes, nbytes);
}
