/* An I/O thread with a backend that has no sockets: one flow always gives way and could go on, another is to be asked every
 * millisecond, and a third is rung by threads. The first must not keep the thread from the others. */
#include "../node.h"
#include "io_thread.h"

enum { N_RINGERS = 2 };

static struct bps_io_thread thread;
static struct bps_flow busy, timed, rung;
static uint32_t n_busy, n_timed, n_rung, n_rings;
static uint64_t end_ns;

static int open_nothing(struct bps_io_thread *of) { return of->backend == NULL; }
static void close_nothing(struct bps_io_thread *of) { (void)of; }
static int watch(struct bps_io_thread *of, struct bps_flow *flow) { return of != flow->thread; }
static void unwatch(struct bps_io_thread *of, struct bps_flow *flow) { CHECK(of == flow->thread); }

static int run(struct bps_io_thread *of, struct bps_flow *flow, uint64_t *due_ns)
{
    CHECK(of == &thread);
    bps_add(flow == &busy ? &n_busy : flow == &timed ? &n_timed : &n_rung, 1);
    if (flow == &timed)
        *due_ns = bps_now_ns() + 1000000u;
    return flow == &busy;
}

static void wait_for_the_bell(struct bps_io_thread *of, uint64_t until_ns)
{
    if (until_ns != 0) /* else others are ready */
        usleep(100);
    pthread_mutex_lock(&of->lock);
    of->is_asleep = 0;
    pthread_mutex_unlock(&of->lock);
}

static const struct bps_io_backend backend = {open_nothing, NULL, close_nothing, watch, unwatch, run, wait_for_the_bell};

static void *ring(void *argument)
{
    (void)argument;
    while (bps_now_ns() < end_ns) {
        bps_flow_ring(&rung);
        bps_add(&n_rings, 1);
        usleep(50);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t ringers[N_RINGERS];
    uint64_t begin_ns = bps_now_ns();
    end_ns = deadline_of(argc, argv);
    CHECK(bps_io_open(&thread, &backend) == 0);
    CHECK(bps_flow_start(&busy, &thread) == 0 && bps_flow_start(&timed, &thread) == 0);
    CHECK(bps_flow_start(&rung, &thread) == 0);
    for (int i = 0; i < N_RINGERS; i++)
        CHECK(bps_start_thread(&ringers[i], ring, NULL) == 0);
    for (int i = 0; i < N_RINGERS; i++)
        pthread_join(ringers[i], NULL);
    bps_flow_stop(&busy);
    bps_flow_stop(&timed);
    bps_flow_stop(&rung);
    bps_flow_stop(&rung); /* nothing: it was not started again */
    uint64_t ms = (bps_now_ns() - begin_ns) / 1000000u;
    printf("in %lu ms: busy asked %u times, timed %u, rung %u by %u rings\n", (unsigned long)ms, n_busy, n_timed, n_rung,
           n_rings);
    CHECK(n_busy > 100 && n_rung > 0 && n_rung <= n_rings + 2);
    CHECK(n_timed > 20 && n_timed <= ms + 2); /* without the look at what is due it is asked once */
    bps_io_close(&thread);
    return 0;
}
