/* Events: several threads push, one takes them in batches and leaves them alone while the next ones are pushed. */
#include "../node.h"

enum { N_PUSHERS = 4 };

static struct bps_events events;
static uint64_t end_ns;
static uint32_t n_done;

static void *push(void *argument)
{
    uint32_t source = (uint32_t)(uintptr_t)argument;
    for (uint32_t i = 1; bps_now_ns() < end_ns; i++) {
        CHECK(bps_events_push(&events, (struct bps_event){BPS_EVENT_DELIVERED, source, 0, i, 0, 0, i}) == 0);
        if (i % 64 == 0) /* one core may have all of them: let the reader fall asleep, too */
            bps_wait(&events.word, bps_load(&events.word), 200000);
    }
    bps_add(&n_done, 1);
    bps_events_wake(&events);
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t threads[N_PUSHERS];
    uint32_t last[N_PUSHERS] = {0}, n;
    uint64_t n_taken = 0;
    end_ns = deadline_of(argc, argv);
    CHECK(bps_events_init(&events, 4) == 0); /* so few that it grows */
    for (uintptr_t i = 0; i < N_PUSHERS; i++)
        CHECK(bps_start_thread(&threads[i], push, (void *)i) == 0);
    for (;;) {
        int over = bps_load(&n_done) == N_PUSHERS;
        bps_events_await(&events, over ? 0 : 100000000);
        n = bps_events_take(&events);
        for (uint32_t i = 0; i < n; i++)
            CHECK(events.taken[i].round == ++last[events.taken[i].source]);
        n_taken += n;
        if (over && n == 0)
            break;
    }
    for (int i = 0; i < N_PUSHERS; i++)
        pthread_join(threads[i], NULL);
    free(events.items);
    free(events.taken);
    printf("%lu events, grown %lu times\n", (unsigned long)n_taken, (unsigned long)events.grown);
    return n_taken == 0;
}
