/* Regions: the memory that is registered with one device, sorted, and the key that a write from it needs. */
#pragma once

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

struct bps_region {
    uint64_t begin, end;
    uint32_t lkey;
};

struct bps_regions {
    pthread_mutex_t lock;
    struct bps_region *items; /* sorted, disjoint */
    uint32_t used, capacity;
};

/* Know a region. 0 or ENOMEM. */
static inline int bps_region_add(struct bps_regions *regions, uint64_t address, uint64_t nbytes, uint32_t lkey)
{
    int rc = 0;
    pthread_mutex_lock(&regions->lock);
    if (regions->used == regions->capacity) {
        uint32_t capacity = regions->capacity ? 2 * regions->capacity : 64;
        struct bps_region *grown = (struct bps_region *)realloc(regions->items, capacity * sizeof *grown);
        if (grown != NULL) {
            regions->items = grown;
            regions->capacity = capacity;
        } else
            rc = ENOMEM;
    }
    if (rc == 0) {
        uint32_t i = regions->used++;
        for (; i > 0 && regions->items[i - 1].begin > address; i--)
            regions->items[i] = regions->items[i - 1];
        regions->items[i] = (struct bps_region){address, address + nbytes, lkey};
    }
    pthread_mutex_unlock(&regions->lock);
    return rc;
}

/* 0, or EFAULT when these bytes lie in no registered region. */
static inline int bps_region_lkey(struct bps_regions *regions, uint64_t address, uint64_t nbytes, uint32_t *lkey)
{
    pthread_mutex_lock(&regions->lock);
    uint32_t low = 0, high = regions->used; /* regions below `low` begin at or before the address */
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (regions->items[middle].begin <= address)
            low = middle + 1;
        else
            high = middle;
    }
    int rc = low == 0 || address + nbytes > regions->items[low - 1].end ? EFAULT : 0;
    if (rc == 0)
        *lkey = regions->items[low - 1].lkey;
    pthread_mutex_unlock(&regions->lock);
    return rc;
}
