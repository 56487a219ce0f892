/* Feeds bytes to a stream's receiving side in portions of at most `most` bytes, as a socket might deliver them. */
#pragma once

#include "write_in.h"

struct portions {
    const uint8_t *next;
    size_t left, most;
};

/* Take in one write, as a stream does; 0, or how the connection ends: -1 between two writes, else an errno. */
static int portions_receive(struct portions *portions, struct bps_write_in *write, const struct bps_protection *how,
                            struct bps_slots *slots)
{
    int rc = BPS_WRITE_IN_GOES_ON;
    while (rc == BPS_WRITE_IN_GOES_ON) {
        void *at;
        size_t n = bps_write_in_want(write, how, &at);
        if (n == 0)
            abort(); /* it would wait for ever */
        n = n < portions->most ? n : portions->most;
        n = n < portions->left ? n : portions->left;
        if (n == 0)
            return bps_write_in_cut(write) != 0 ? ECONNRESET : -1;
        memcpy(at, portions->next, n);
        portions->next += n;
        portions->left -= n;
        rc = bps_write_in_got(write, how, slots, n);
    }
    return rc == BPS_WRITE_IN_WHOLE ? 0 : rc;
}
