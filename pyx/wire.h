/* Wire: the 32-byte header in front of every payload on a data connection (little endian).
 *
 *   offset  width  meaning
 *        0      4  magic "BPW1"
 *        4      4  immediate: slot mod 2^20 | (round mod 16) << 20 | (epoch mod 256) << 24, as RDMA carries it
 *        8      4  slot: the job-wide partition index
 *       12      4  round
 *       16      4  epoch
 *       20      4  flags: 1 = empty contribution, no payload
 *       24      8  nbytes of payload
 *
 * A receiver checks every field against the slot it bound before it writes one byte of payload: the round is the next
 * one of the slot, the epoch that in which the connection was made, as its dialler said. Of a slot of frames, which
 * have a length of their own, it checks also that afterwards. With checksums (setting checksum) four bytes more follow
 * header and payload (`write_out.h`), with seals sixteen (`seal.h`).
 */
#pragma once

#include <stdint.h>

#define BPS_WIRE_MAGIC 0x31575042u

struct bps_header {
    uint32_t magic, immediate, slot, round, epoch, flags;
    uint64_t nbytes;
};

_Static_assert(sizeof(struct bps_header) == 32, "the wire header is 32 bytes");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire format is little endian");

/* Of a slot of frames (`orchestration/codec.py`) what came begins with its own length; at most `room` bytes fit. */
#define BPS_FRAME_HEADER 8u

static inline int bps_frame_may_come(uint64_t nbytes, uint64_t room)
{
    return nbytes >= BPS_FRAME_HEADER && nbytes <= room;
}

static inline int bps_frame_is_whole(const void *frame, uint64_t nbytes)
{
    return __atomic_load_n((const uint64_t *)frame, __ATOMIC_RELAXED) == nbytes - BPS_FRAME_HEADER;
}

static inline uint32_t bps_immediate(uint32_t slot, uint32_t round, uint32_t epoch)
{
    return (slot & 0xfffffu) | (round & 0xfu) << 20 | (epoch & 0xffu) << 24;
}
