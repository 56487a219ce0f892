/* Codec: the compression of one partition between nodes (`orchestration/codec.py`, `bpsfast/compression`).
 *
 *   member   x = partial -> feed (momentum, what was not sent before) -> encode -> frame, which is forwarded
 *            frame of the result -> decode -> result
 *   owner    frames of all nodes, its own partial's too, -> decode, added up in node order -> divide
 *            -> what was not sent back before -> encode -> frame, which is published -> decode -> result
 *
 * A frame is its length (8 bytes), then the codec's format. Computation is in T, float or double; the tensor's elements
 * D may be narrower. The thread that runs the part owns all fields; `rate` is guarded by the engine's lock.
 */
#pragma once

#include "part.h"

#define BPS_FRAME_LENGTH 8u

typedef int64_t (*bps_encode_fn)(void *wire, int64_t room_nbytes, const void *x, int64_t n, void *error,
                                 uint64_t *generator, int64_t k, int64_t flags, void *scratch);
typedef int64_t (*bps_decode_fn)(void *out, int64_t n, const void *wire, int64_t nbytes, int64_t k, int64_t flags,
                                 int64_t add, void *scratch);
typedef void (*bps_feed_fn)(void *v, const void *x, void *error, void *momentum, int64_t n, double mu, double ratio);
typedef void (*bps_divide_fn)(void *values, int64_t n, double divisor);
typedef void (*bps_narrow_fn)(void *out, const void *values, int64_t n);

struct bps_codec {
    bps_encode_fn encode;
    bps_decode_fn decode;
    bps_feed_fn feed, feed_back; /* of elements D; of elements T */
    bps_divide_fn divide;
    bps_narrow_fn narrow; /* NULL: D is T */
    uint64_t width, room_nbytes, scratch_nbytes; /* of T; of a frame; of what encode and decode need */
    int64_t k, flags;
    double mu, rate; /* the learning rate of the coming round; 0: not told */
    double last_rate, last_rate_back; /* those for which `error` and `error_back` were computed */
    void *error, *momentum, *error_back; /* n of T, or NULL */
    uint64_t generator[2], generator_back[2];
    char *frame;      /* member: where its partial is encoded */
    char *frames[2];  /* of results by parity: the owner's, or where it writes them */
    void *results[2]; /* member: where they are decoded */
    int has_result, queued; /* member: the frame of `result_round` is to be decoded; the part is in the heap */
    int parked;             /* it is among the parked ones: a result may come meanwhile, any number of times */
    uint32_t result_round;
};

/* One thread's memory for one part at a time; it grows, and is the thread's own. */
struct bps_workspace {
    char *memory;
    uint64_t nbytes;
};

struct bps_codec_buffers {
    void *total, *values, *sum, *scratch;
    char *frame;
};

enum { BPS_CODED = 0, BPS_CODE_MALFORMED = 1, BPS_CODE_MEMORY = 2, BPS_CODE_ROOM = 3 };

/* The bytes that follow the length, read once: the frame is another process's, which may change it. */
static inline uint64_t bps_frame_following(const char *frame)
{
    return __atomic_load_n((const uint64_t *)frame, __ATOMIC_RELAXED);
}

static inline uint64_t bps_frame_length(const char *frame) { return BPS_FRAME_LENGTH + bps_frame_following(frame); }

/* Place the buffers in the workspace; 0, or -1 without memory. */
static inline int bps_place_buffers(struct bps_codec_buffers *buffers, struct bps_workspace *space,
                                    const struct bps_codec *codec, uint64_t n_elements)
{
    uint64_t values = (n_elements * codec->width + 63) / 64 * 64, frame = (codec->room_nbytes + 63) / 64 * 64;
    uint64_t wanted = 3 * values + frame + codec->scratch_nbytes;
    if (wanted > space->nbytes) {
        void *memory = NULL;
        if (posix_memalign(&memory, 64, wanted) != 0)
            return -1;
        free(space->memory);
        space->memory = memory;
        space->nbytes = wanted;
    }
    buffers->total = space->memory;
    buffers->values = space->memory + values;
    buffers->sum = space->memory + 2 * values;
    buffers->frame = space->memory + 3 * values;
    buffers->scratch = space->memory + 3 * values + frame;
    return 0;
}

/* Decode a frame into `out`, or add it there; whether that could be. The frame may say anything. */
static inline int bps_unpack(const struct bps_codec *codec, void *out, uint64_t n_elements, const char *frame, int add,
                             const struct bps_codec_buffers *buffers)
{
    uint64_t nbytes = bps_frame_following(frame);
    if (nbytes > codec->room_nbytes - BPS_FRAME_LENGTH)
        return 0;
    return codec->decode(out, (int64_t)n_elements, frame + BPS_FRAME_LENGTH, (int64_t)nbytes, codec->k, codec->flags,
                         add, buffers->scratch) == 0;
}

/* Encode `values`, n of T, into a frame; `error` becomes what that lacks. Whether there was room, which there is. */
static inline int bps_pack(struct bps_codec *codec, char *frame, const void *values, uint64_t n_elements, void *error,
                           uint64_t *generator, const struct bps_codec_buffers *buffers)
{
    int64_t nbytes = codec->encode(frame + BPS_FRAME_LENGTH, (int64_t)(codec->room_nbytes - BPS_FRAME_LENGTH), values,
                                   (int64_t)n_elements, error, generator, codec->k, codec->flags, buffers->scratch);
    if (nbytes < 0)
        return 0;
    *(uint64_t *)frame = (uint64_t)nbytes;
    return 1;
}

/* The factor by which an earlier error counts now, so that a changed learning rate does not change its effect. */
static inline double bps_codec_ratio(const struct bps_codec *codec, double last_rate)
{
    return codec->rate > 0 && last_rate > 0 ? last_rate / codec->rate : 1.0;
}

/* Encode this node's partial, the sum of `n_local` inputs, into a frame. */
static inline int bps_pack_partial(const struct bps_part *part, char *frame, void **local, int n_local,
                                   const struct bps_codec_buffers *buffers, int nontemporal)
{
    struct bps_codec *codec = part->codec;
    int64_t n = (int64_t)part->n_elements;
    const void *x = local[0];
    if (n_local > 1) {
        part->kernel(buffers->sum, local, 0, n_local, 0, n, 1, nontemporal);
        x = buffers->sum;
    }
    if (codec->narrow != NULL || codec->error != NULL || codec->momentum != NULL) {
        void *values = codec->error != NULL ? codec->error : buffers->values;
        codec->feed(values, x, codec->error, codec->momentum, n, codec->mu,
                    bps_codec_ratio(codec, codec->last_rate));
        x = values;
    }
    codec->last_rate = codec->rate; /* a round without input changes nothing */
    return bps_pack(codec, frame, x, part->n_elements, codec->error, codec->generator, buffers);
}

/* Owner: add up the frames of `before` and `after` and the own partial, encode the result, decode it to `output`.
 * *malformed: which input is none, if one is. */
static inline int bps_code_owned(const struct bps_part *part, uint32_t round, void *output, void **in, int before,
                                 int local, int after, const struct bps_codec_buffers *buffers, int nontemporal,
                                 int64_t *malformed)
{
    struct bps_codec *codec = part->codec;
    uint64_t n = part->n_elements;
    char *frame = codec->frames[round & 1];
    int n_added = 0;
    for (int i = 0; i < before + local + after; i++) {
        const char *added = in[i];
        if (i >= before && i < before + local) {
            if (i != before)
                continue;
            if (!bps_pack_partial(part, buffers->frame, in + before, local, buffers, nontemporal))
                return BPS_CODE_ROOM;
            added = buffers->frame;
        }
        if (!bps_unpack(codec, buffers->total, n, added, n_added != 0, buffers)) {
            *malformed = added == buffers->frame ? -1 : i;
            return BPS_CODE_MALFORMED;
        }
        n_added++;
    }
    if (n_added == 0)
        memset(buffers->total, 0, n * codec->width);
    if (part->divisor != 1)
        codec->divide(buffers->total, (int64_t)n, (double)part->divisor);
    const void *values = buffers->total;
    if (codec->error_back != NULL) {
        codec->feed_back(codec->error_back, buffers->total, codec->error_back, NULL, (int64_t)n, 0.0,
                         bps_codec_ratio(codec, codec->last_rate_back));
        values = codec->error_back;
    }
    codec->last_rate_back = codec->rate;
    if (!bps_pack(codec, frame, values, n, codec->error_back, codec->generator_back, buffers))
        return BPS_CODE_ROOM;
    void *result = codec->narrow != NULL ? buffers->total : output;
    if (!bps_unpack(codec, result, n, frame, 0, buffers))
        return BPS_CODE_MALFORMED;
    if (codec->narrow != NULL)
        codec->narrow(output, result, (int64_t)n);
    return BPS_CODED;
}

/* Sum one complete part whose inputs are `in`: frames of other nodes, and local inputs. BPS_CODED, or what failed.
 * *malformed: which input, if that is why; else it stays. */
static inline int bps_code(const struct bps_part *part, uint32_t round, void *output, void **in, int before, int local,
                           int after, struct bps_workspace *space, int nontemporal, int64_t *malformed)
{
    struct bps_codec *codec = part->codec;
    struct bps_codec_buffers buffers;
    if (bps_place_buffers(&buffers, space, codec, part->n_elements) != 0)
        return BPS_CODE_MEMORY;
    if (part->owned)
        return bps_code_owned(part, round, output, in, before, local, after, &buffers, nontemporal, malformed);
    return bps_pack_partial(part, codec->frame, in, local, &buffers, nontemporal) ? BPS_CODED : BPS_CODE_ROOM;
}

/* Member: decode the result of `round`, which the owner has written. */
static inline int bps_decode_result(const struct bps_part *part, uint32_t round, struct bps_workspace *space)
{
    const struct bps_codec *codec = part->codec;
    void *output = codec->results[round & 1];
    struct bps_codec_buffers buffers;
    if (bps_place_buffers(&buffers, space, codec, part->n_elements) != 0)
        return BPS_CODE_MEMORY;
    void *result = codec->narrow != NULL ? buffers.total : output;
    if (!bps_unpack(codec, result, part->n_elements, codec->frames[round & 1], 0, &buffers))
        return BPS_CODE_MALFORMED;
    if (codec->narrow != NULL)
        codec->narrow(output, result, (int64_t)part->n_elements);
    return BPS_CODED;
}
