/* Copy: a memory copy by one thread, with non-temporal stores for pieces that would only flush the caches.
 *
 * A plain store first reads the line that it overwrites; a streaming store does not, which saves a memory stream.
 */
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>

/* How far ahead of the loads lines are asked for, into L2: the hardware's own prefetchers stop at page ends. */
#define BPS_PREFETCH_NBYTES 8192

__attribute__((target("avx512f"))) static void bps_copy_stream_avx512(char *dst, const char *src, uint64_t nbytes)
{
    uint64_t i = 0;
    for (; i + 1024 <= nbytes; i += 1024) {
        __m512i lines[16];
        for (int k = 0; k < 16; k++)
            _mm_prefetch(src + i + 64 * k + BPS_PREFETCH_NBYTES, _MM_HINT_T1);
        for (int k = 0; k < 16; k++)
            lines[k] = _mm512_loadu_si512((const void *)(src + i + 64 * k));
        for (int k = 0; k < 16; k++)
            _mm512_stream_si512((__m512i *)(dst + i + 64 * k), lines[k]);
    }
    _mm_sfence();
    memcpy(dst + i, src + i, nbytes - i);
}

__attribute__((target("avx"))) static void bps_copy_stream_avx(char *dst, const char *src, uint64_t nbytes)
{
    uint64_t i = 0;
    for (; i + 128 <= nbytes; i += 128) {
        _mm_prefetch(src + i + BPS_PREFETCH_NBYTES, _MM_HINT_T1);
        _mm_prefetch(src + i + BPS_PREFETCH_NBYTES + 64, _MM_HINT_T1);
        __m256i a = _mm256_loadu_si256((const __m256i *)(src + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(src + i + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(src + i + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(src + i + 96));
        _mm256_stream_si256((__m256i *)(dst + i), a);
        _mm256_stream_si256((__m256i *)(dst + i + 32), b);
        _mm256_stream_si256((__m256i *)(dst + i + 64), c);
        _mm256_stream_si256((__m256i *)(dst + i + 96), d);
    }
    _mm_sfence();
    memcpy(dst + i, src + i, nbytes - i);
}
#endif

/* dst and src do not overlap. Stores are globally visible in order with the stores that follow. */
static inline void bps_copy(void *dst, const void *src, uint64_t nbytes, uint64_t stream_nbytes)
{
#if defined(__x86_64__)
    if (nbytes >= stream_nbytes && nbytes >= 4096 && __builtin_cpu_supports("avx")) {
        uint64_t head = (64 - ((uintptr_t)dst & 63)) & 63;
        memcpy(dst, src, head);
        if (__builtin_cpu_supports("avx512f"))
            bps_copy_stream_avx512((char *)dst + head, (const char *)src + head, nbytes - head);
        else
            bps_copy_stream_avx((char *)dst + head, (const char *)src + head, nbytes - head);
        return;
    }
#endif
    memcpy(dst, src, nbytes);
}
