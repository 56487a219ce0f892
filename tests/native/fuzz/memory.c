/* What the other side of `bpsfast perf --transport shm` puts into its lane, head and all, and into the slots it names. */
#include <stdlib.h>

#include "input.h"
#include "perf_memory.h"

enum { DEPTH = 3, NBYTES = 40, CAPACITY = 4 };

static struct bps_lane *lane_make(void)
{
    struct bps_lane *lane = calloc(1, sizeof *lane + CAPACITY * sizeof(struct bps_entry));
    lane->magic = BPS_LANE_MAGIC;
    lane->capacity = CAPACITY;
    return lane;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes)
{
    struct input input = {data, nbytes};
    struct bps_doorbell bell = {.magic = BPS_DOORBELL_MAGIC};
    char *slots = malloc(DEPTH * NBYTES);
    input_take(&input, slots, DEPTH * NBYTES);
    struct bps_perf_memory side = {
        .incoming = lane_make(), .outgoing = lane_make(), .incoming_capacity = CAPACITY, .outgoing_capacity = CAPACITY,
        .own_bell = &bell, .peer_bell = &bell, .peer_data = slots, .sink = malloc(NBYTES), .nbytes = NBYTES,
        .stream_nbytes = UINT64_MAX, .depth = DEPTH};
    for (int i = 0; i < 64 && input.nbytes != 0; i++) {
        uint64_t back = 0;
        uint8_t what = input_byte(&input);
        if (what % 4 == 3)
            bps_store(&side.incoming->head, (uint32_t)input_word(&input));
        else {
            input_take(&input, &side.incoming->entries[side.incoming->head % CAPACITY], sizeof(struct bps_entry));
            bps_store(&side.incoming->head, side.incoming->head + 1);
        }
        bps_perf_take(&side, what & 128 ? &back : NULL);
    }
    free(side.incoming);
    free(side.outgoing);
    free(side.sink);
    free(slots);
    return 0;
}
