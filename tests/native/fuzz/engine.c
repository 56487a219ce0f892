/* What ranks and peers of this host write into their lanes, and what they and wire peers write into memory that the engine
 * reads, at any time: entries, lanes' heads, frames of rows and of codecs. In between the node maps, commits, retires.
 *
 * The engine has no threads here: an operation says when parts are summed. All memory ends where it should. */
#include "../node.h"
#include "input.h"

enum { RANK, OTHER_RANK, SHM, WIRE, N_SOURCES, N_LANES = 3, CAPACITY = 4, N_WORDS = 4, NBYTES = 8 * N_WORDS,
       ROOM = BPS_FRAME_LENGTH + NBYTES, MOST_OPERATIONS = 200 };
enum { OWNED, MEMBER, OWNED_ROWS, MEMBER_ROWS, OWNED_CODED, MEMBER_CODED, LATER, N_PARTS, LAST = 30 };

static const struct bps_rows shape = {.n_rows = 6, .max_rows = 3, .row_elements = 1, .row_nbytes = 8};
static struct node node;
static struct bps_worker *worker;
static struct bps_lane *lanes[N_LANES];
static char *segments[2], *slots[N_PARTS], *outputs[N_PARTS][2], *frames[N_PARTS][3], *last_output;
static uint64_t rows_nbytes;

static void put(uint32_t index, int owned, uint32_t n_local, uint32_t peer, char *slot, char *const *out)
{
    struct bps_part part = {.kernel = sum_words, .nbytes = NBYTES, .n_elements = N_WORDS, .divisor = 1,
                            .n_local = n_local, .owned = (uint8_t)owned, .to_wire = (uint8_t)owned, .owner = peer};
    uint32_t sources[3] = {RANK, OTHER_RANK, peer};
    void *places[3] = {NULL, NULL, slot};
    sources[n_local] = peer;
    places[n_local] = slot;
    part.n_after = owned ? 1 : 0;
    part_inputs(&part, n_local + part.n_after, sources, places);
    if (index == OWNED_ROWS || index == MEMBER_ROWS) {
        part.rows = shape;
        part.nbytes = rows_nbytes;
        part.n_elements = 0;
    }
    part.outputs[0] = (uint64_t)out[0];
    part.outputs[1] = (uint64_t)out[1];
    part.unit_offset = index == MEMBER ? NBYTES : 0; /* of the same unit as the part before it */
    if (index == OWNED_CODED || index == MEMBER_CODED) {
        part.codec = codec_make(N_WORDS);
        part.codec->frame = frames[index][2];
        if (!owned)
            part.outputs[0] = (uint64_t)frames[index][2];
        for (int parity = 0; parity < 2; parity++) {
            part.codec->frames[parity] = frames[index][parity];
            part.codec->results[parity] = owned ? NULL : out[parity];
        }
    }
    CHECK(bps_table_put(node.core, index, &part) == 0);
}

static void commit(void)
{
    static uint32_t order[LAST + 1];
    CHECK(bps_freeze(node.core, 0) == 0);
    CHECK(bps_table_commit(node.core, node.core->generation + 1, order, LAST + 1) == 0);
}

static void begin(void)
{
    static int is_made;
    if (!is_made) {
        node_make(&node, 1);
        worker = node.core->workers;
        worker->core = node.core;
        is_made = 1;
    }
    rows_nbytes = bps_rows_nbytes(&shape, shape.max_rows);
    for (int i = 0; i < N_LANES; i++) {
        lanes[i] = lane_make(CAPACITY);
        node_add_source(&node, i == SHM ? BPS_SHM_PEER : BPS_RANK, lanes[i]);
    }
    node.core->sources[SHM].outgoing = lane_make(CAPACITY);
    node.core->sources[SHM].outgoing_capacity = CAPACITY;
    node.core->sources[SHM].doorbell = &node.bell;
    node_add_source(&node, BPS_WIRE_PEER, NULL);
    for (int i = 0; i < 2; i++)
        segments[i] = zeroed(2 * NBYTES + rows_nbytes);
    last_output = zeroed(NBYTES);
    for (int i = 0; i < N_PARTS; i++) {
        slots[i] = zeroed(rows_nbytes);
        for (int parity = 0; parity < 2; parity++)
            outputs[i][parity] = zeroed(i == OWNED_ROWS || i == MEMBER_ROWS ? rows_nbytes : NBYTES);
        for (int k = 0; k < 3; k++)
            frames[i][k] = zeroed(ROOM);
    }
    slots[OWNED_CODED] = realloc(slots[OWNED_CODED], ROOM);
    put(OWNED, 1, 2, WIRE, slots[OWNED], outputs[OWNED]);
    put(MEMBER, 0, 2, SHM, NULL, outputs[MEMBER]);
    put(OWNED_ROWS, 1, 2, WIRE, slots[OWNED_ROWS], outputs[OWNED_ROWS]);
    put(MEMBER_ROWS, 0, 1, WIRE, NULL, outputs[MEMBER_ROWS]);
    put(OWNED_CODED, 1, 1, WIRE, slots[OWNED_CODED], outputs[OWNED_CODED]);
    put(MEMBER_CODED, 0, 2, SHM, NULL, outputs[MEMBER_CODED]);
    put(LAST, 0, 1, WIRE, NULL, (char *[]){last_output, NULL});
    commit();
    put(LATER, 1, 1, SHM, NULL, outputs[LATER]); /* of the next generation */
}

static void end(void)
{
    struct bps_core *core = node.core;
    for (uint32_t i = 0; i < N_PARTS; i++) {
        bps_part_free(&core->parts[i]);
        bps_store(bps_board_word(node.board, i), 0);
        free(slots[i]);
        free(outputs[i][0]);
        free(outputs[i][1]);
        for (int k = 0; k < 3; k++)
            free(frames[i][k]);
    }
    bps_part_free(&core->parts[LAST]);
    bps_store(bps_board_word(node.board, LAST), 0);
    free(last_output);
    free(core->sources[SHM].outgoing);
    for (uint32_t i = 0; i < N_SOURCES; i++) {
        free(core->sources[i].addresses);
        free(core->sources[i].nbytes);
        memset(&core->sources[i], 0, sizeof core->sources[i]);
    }
    for (int i = 0; i < N_LANES; i++)
        free(lanes[i]);
    free(segments[0]);
    free(segments[1]);
    core->n_parts = core->n_sources = core->generation = core->heap.used = core->n_parked = core->pass = 0;
    bps_events_take(&core->events);
}

static void run_all(void)
{
    pthread_mutex_lock(&node.core->lock);
    bps_drain(node.core);
    for (int i = 0; i < 64 && node.core->heap.used != 0; i++)
        bps_run_part(node.core, worker, bps_heap_pop(&node.core->heap, node.core->parts));
    pthread_mutex_unlock(&node.core->lock);
}

static void operate(struct input *input)
{
    static struct bps_gap gap;
    struct bps_row rows[4];
    uint8_t what = input_byte(input), which = input_byte(input);
    struct bps_lane *lane = lanes[which % N_LANES];
    uint32_t part = which % (N_PARTS + 1), culprit;
    part = part == N_PARTS ? LAST : part;
    switch (what % 10) {
    case 0:
    case 1: /* an entry, whole as it was meant to be or not */
        input_take(input, &lane->entries[lane->head % CAPACITY], sizeof lane->entries[0]);
        bps_store(&lane->head, lane->head + 1);
        break;
    case 2:
        bps_store(&lane->head, (uint32_t)input_word(input));
        break;
    case 3:
        input_take(input, segments[which % 2], 2 * NBYTES + rows_nbytes);
        break;
    case 4:
        input_take(input, slots[which % N_PARTS], which % N_PARTS == OWNED_CODED ? (uint64_t)ROOM : rows_nbytes);
        break;
    case 5:
        input_take(input, frames[which % N_PARTS][which / N_PARTS % 2], ROOM);
        break;
    case 6: {
        uint8_t round = input_byte(input), flags = input_byte(input);
        bps_on_arrived(node.core, WIRE, part == LAST ? (uint32_t)input_word(input) : part, round, flags);
        break;
    }
    case 7:
        bps_map_segment(node.core, which % N_LANES, which / N_LANES % 2, (uint64_t)segments[which % 2],
                        which & 64 ? NBYTES : 2 * NBYTES + rows_nbytes);
        break;
    case 8:
        bps_table_missing(node.core, part, &gap);
        bps_table_report(node.core, rows, 4);
        if (which & 128)
            bps_table_retire(node.core, &part, 1, &culprit);
        else
            commit();
        break;
    default:
        run_all();
    }
    for (uint32_t i = 0; i < node.core->n_parked; i++)
        for (uint32_t k = 0; k < i; k++)
            CHECK(node.core->parked[i] != node.core->parked[k]);
    for (uint32_t i = 0; i < node.core->heap.used; i++)
        CHECK(node.core->parts[node.core->heap.index[i]].inputs != NULL);
    for (uint32_t i = 0; i < node.core->heap.used; i++)
        for (uint32_t k = 0; k < i; k++)
            CHECK(node.core->heap.index[i] != node.core->heap.index[k]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes)
{
    struct input input = {data, nbytes};
    begin();
    for (int i = 0; i < MOST_OPERATIONS && input.nbytes != 0; i++)
        operate(&input);
    run_all();
    end();
    return 0;
}
