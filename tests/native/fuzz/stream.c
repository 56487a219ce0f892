/* What comes over the sockets of `bpsfast bench ladder`: headers and partitions, in pieces of any size. */
#include <stdlib.h>
#include <unistd.h>

#include "input.h"
#include "../../../bench/paper/ladder/stream_exchange.h"

enum { N_PARTS = 3 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes)
{
    static const uint32_t sizes[N_PARTS] = {24, 8, 1};
    struct bps_stream_part parts[N_PARTS];
    int ends[2];
    int64_t n = 0;
    if (nbytes < 2 || nbytes > 2048 || socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0)
        return -1;
    for (int i = 0; i < N_PARTS; i++)
        parts[i] = (struct bps_stream_part){malloc(sizes[i]), malloc(sizes[i]), sizes[i]};
    for (int i = 0; i < N_PARTS; i++)
        memset(parts[i].source, i, sizes[i]);
    struct bps_stream_end end = {.fd = ends[1], .is_service = data[0] & 1, .n_parts = N_PARTS, .parts = parts, .step = 1};
    end.queue = malloc(N_PARTS * sizeof *end.queue);
    size_t piece = data[1] % 64 + 1;
    for (size_t at = 2; at < nbytes && n >= 0; at += piece) {
        size_t left = nbytes - at < piece ? nbytes - at : piece;
        if (send(ends[0], data + at, left, 0) != (ssize_t)left)
            abort();
        n = bps_stream_receive(&end);
        if (n >= 0)
            n = bps_stream_send(&end);
    }
    close(ends[0]);
    close(ends[1]);
    for (int i = 0; i < N_PARTS; i++) {
        free(parts[i].source);
        free(parts[i].destination);
    }
    free(end.queue);
    return 0;
}
