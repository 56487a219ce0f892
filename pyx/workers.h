/* Workers: the engine's threads, which sum, compress or decode a part that is complete. Kernels run outside the lock.
 */
#pragma once

#include <stdio.h>

#include "backups.h"

/* A compressed part could not be computed for a reason of our own: nobody will ever get it. Ranks here read why on the
 * board; the node is told too, for all others. */
static inline void bps_code_failed(struct bps_core *core, uint32_t index, uint32_t round, int status)
{
    char reason[256];
    const char *what = status == BPS_CODE_MEMORY ? "CapacityError: there is no memory to compress"
                       : status == BPS_CODE_ROOM ? "ProtocolError: what was compressed is longer than it can be, in"
                                                 : "ProtocolError: what was compressed here cannot be read, in";
    int length = snprintf(reason, sizeof reason, "%s partition %u, round %u", what, index, round);
    bps_abort(core, reason, (size_t)length + 1);
    bps_event_out(core, BPS_EVENT_LOST, BPS_NOBODY, index, round, status == BPS_CODE_MEMORY ? ENOMEM : EPROTO, 0, 0);
}

/* Decode the result of a compressed part, and publish it. As `bps_run_part`. */
static inline void bps_run_result(struct bps_core *core, struct bps_worker *worker, uint32_t index)
{
    struct bps_part *part = &core->parts[index];
    uint32_t round = part->codec->result_round, *word = NULL;
    part->codec->has_result = 0;
    if (part->n_missing == 0) /* a rank did not wait for the result */
        bps_queue(core, index);
    core->running++;
    bps_leave(core);
    uint64_t begin_ns = bps_now_ns();
    int status = bps_decode_result(part, round, &worker->space);
    bps_record_add(&core->trace, BPS_SUM, worker->index, index, round, part->nbytes, begin_ns, bps_now_ns());
    pthread_mutex_lock(&core->lock);
    if (status == BPS_CODE_MALFORMED)
        bps_broken(core, part->owner, index, round);
    else if (status != BPS_CODED)
        bps_code_failed(core, index, round, status);
    else
        word = bps_publish(core, index, round, part->nbytes);
    bps_ran(core, word);
}

/* The source of the `wanted`-th filled input. */
static inline uint32_t bps_source_of(const struct bps_part *part, int64_t wanted)
{
    uint32_t i = 0;
    while (part->inputs[i].empty || wanted-- > 0)
        i++;
    return part->inputs[i].source;
}
/* Sum one complete part and pass it on. Called with the lock held; drops it around the kernel. */
static inline void bps_run_part(struct bps_core *core, struct bps_worker *worker, uint32_t index)
{
    struct bps_part *part = &core->parts[index];
    if (part->store != NULL) {
        int is_first = part->n_applied == 0 || (part->n_applied == 1 && part->applied == part->round + 1);
        if (part->is_backed && !is_first)
            bps_run_backups(core, worker, index);
        else
            bps_run_store(core, worker, index);
        return;
    }
    if (part->codec != NULL)
        part->codec->queued = 0;
    if (part->codec != NULL && part->codec->has_result) {
        bps_run_result(core, worker, index);
        return;
    }
    uint64_t foreign_nbytes = part->codec != NULL ? part->codec->room_nbytes : part->nbytes;
    uint32_t round = part->round + 1;
    void *output = (void *)part->outputs[part->owned ? round & 1 : 0];
    void **in = worker->pointers;
    int before = bps_collect(core, part, in, 0, part->n_before, foreign_nbytes, 0);
    int local = bps_collect(core, part, in, part->n_before, part->n_local, part->nbytes, before);
    int total = bps_collect(core, part, in, part->n_before + part->n_local, part->n_after, foreign_nbytes, local);
    int nontemporal = part->nbytes >= core->nontemporal_nbytes, status = BPS_CODED;
    nontemporal |= part->is_nontemporal && part->owned && !part->to_wire; /* else it leaves this machine at once */
    if (total < 0) {
        bps_park(core, index);
        return;
    }
    core->running++;
    bps_leave(core);
    uint64_t begin_ns = bps_now_ns(), read_nbytes = (uint64_t)total * part->nbytes;
    int64_t malformed = -1;
    if (part->rows.row_nbytes != 0)
        malformed = bps_rows_merge(&part->rows, part->kernel, output, in, before, local - before, total - local,
                                   part->divisor, worker->cursors, worker->found, &read_nbytes);
    else if (part->codec != NULL)
        status = bps_code(part, round, output, in, before, local - before, total - local, &worker->space, nontemporal,
                          &malformed);
    else if (total == 0)
        memset(output, 0, part->nbytes);
    else
        part->kernel(output, in, before, local - before, total - local, (int64_t)part->n_elements, part->divisor,
                     nontemporal);
    uint64_t end_ns = bps_now_ns();
    bps_record_add(&core->trace, BPS_QUEUE, worker->index, index, round, part->nbytes, part->complete_ns, begin_ns);
    bps_record_add(&core->trace, BPS_SUM, worker->index, index, round, read_nbytes, begin_ns, end_ns);
    pthread_mutex_lock(&core->lock);
    core->sums++;
    core->bytes_summed += read_nbytes;
    uint32_t *word = NULL;
    if (malformed >= 0)
        bps_broken(core, bps_source_of(part, malformed), index, round);
    else if (status != BPS_CODED)
        bps_code_failed(core, index, round, status);
    else if (part->owned)
        word = bps_hand_out(core, index, round);
    else
        bps_forward(core, index, 0, part->partial_segment, part->partial_offset, part->outputs[0]);
    bps_ran(core, word);
}

/* Wake up to n workers, each to a CPU of its own. Called with the lock held. */
static inline void bps_wake_workers(struct bps_core *core, int n)
{
    cpu_set_t empty = core->cpus.all;
    for (int i = 0; core->cpus.few && i < core->n_workers; i++)
        if (core->workers[i].cpu_use.cpu >= 0)
            CPU_CLR(core->workers[i].cpu_use.cpu, &empty);
    for (int i = 0; core->cpus.few && CPU_COUNT(&empty) != 0 && i < core->n_workers; i++) {
        struct bps_worker *worker = &core->workers[i];
        if (worker->cpu_use.sleeps)
            bps_allow(&worker->cpu_use, worker->thread, &empty);
    }
    bps_ring_doorbell(core->doorbell, n);
}

static void *bps_work(void *argument)
{
    struct bps_worker *worker = argument;
    struct bps_core *core = worker->core;
    int is_awake = 0;
    for (;;) {
        uint32_t seen = bps_load(&core->doorbell->rings);
        pthread_mutex_lock(&core->lock);
        bps_thread_works(&worker->cpu_use, &core->cpus);
        bps_drain(core);
        while (core->heap.used != 0 && !core->frozen && !core->stopping) {
            if (is_awake) { /* until now whoever pushed meanwhile called nobody: one partition needs one thread */
                seen = bps_load(&core->doorbell->rings);
                bps_drain(core);
                bps_leave_doorbell(core->doorbell, seen);
                is_awake = 0;
            }
            int spare = core->n_workers - 1 - (core->running - core->spare_is_busy);
            if (core->heap.used > 1 && spare > 0)
                bps_wake_workers(core, (int)core->heap.used - 1 < spare ? (int)core->heap.used - 1 : spare);
            bps_run_part(core, worker, bps_heap_pop(&core->heap, core->parts));
            bps_drain(core);
        }
        int stopping = core->stopping;
        bps_thread_rests(&worker->cpu_use);
        bps_leave(core);
        if (stopping) {
            if (is_awake)
                bps_leave_doorbell(core->doorbell, seen);
            free(worker->space.memory);
            return NULL;
        }
        is_awake = bps_await_doorbell_awake(core->doorbell, is_awake, seen, core->awake_ns, BPS_SLEEP_NS);
    }
}
