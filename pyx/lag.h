/* Lag: how late the inputs of a unit come, counted per source when the first partition of the unit is complete.
 *
 * The lag of an input is the time from the earliest input of the same round to it. Ranks and peers of this host report
 * when they announced theirs (a host has one monotonic clock); an input from a wire counts when it has arrived whole.
 * Written and read under the engine's lock.
 */
#pragma once

#include <stdint.h>

/* Bounds are half octaves from 1 us on: below 1 us, 1.5 us, 2 us, 3 us, 4 us, ... 71 minutes. */
#define BPS_LAG_BUCKETS 64

struct bps_lag {
    uint64_t n, sum_ns, max_ns;
    uint64_t n_last, last_sum_ns; /* of the rounds in which this source came last: how many, and by how much in all */
    uint32_t buckets[BPS_LAG_BUCKETS];
};

static inline uint32_t bps_lag_bucket(uint64_t ns)
{
    uint64_t us = ns / 1000;
    if (us == 0)
        return 0;
    uint32_t octave = 63u - (uint32_t)__builtin_clzll(us);
    uint32_t upper = octave != 0 && (us >> (octave - 1) & 1);
    uint32_t bucket = 1 + 2 * octave + upper;
    return bucket < BPS_LAG_BUCKETS ? bucket : BPS_LAG_BUCKETS - 1;
}

/* The least time that is beyond a bucket, in ns. */
static inline uint64_t bps_lag_bound(uint32_t bucket)
{
    if (bucket == 0)
        return 1000;
    uint32_t octave = (bucket - 1) / 2;
    uint64_t begin = (uint64_t)1000 << octave;
    return (bucket & 1) != 0 ? begin + begin / 2 : 2 * begin;
}

static inline void bps_lag_add(struct bps_lag *lag, uint64_t ns, int is_last)
{
    lag->n++;
    lag->sum_ns += ns;
    if (ns > lag->max_ns)
        lag->max_ns = ns;
    if (is_last) {
        lag->n_last++;
        lag->last_sum_ns += ns;
    }
    lag->buckets[bps_lag_bucket(ns)]++;
}

/* A bound that 99 of 100 lags do not pass: that of its bucket, so up to half too much, but never beyond the maximum. */
static inline uint64_t bps_lag_p99(const struct bps_lag *lag)
{
    uint64_t beyond = lag->n / 100, seen = 0;
    for (uint32_t i = BPS_LAG_BUCKETS; i-- > 0;) {
        seen += lag->buckets[i];
        if (seen > beyond) {
            uint64_t bound = bps_lag_bound(i);
            return bound < lag->max_ns ? bound : lag->max_ns;
        }
    }
    return 0;
}
