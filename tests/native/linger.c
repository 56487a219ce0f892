/* When waits stay awake, for how long and where, and who is woken: the rules of cpu_separation.h, cpu_contention.h, futex.h and port.h,
 * without a clock or a sleep. Ends with 0 if they hold. */
#undef NDEBUG
#include <assert.h>
#include <linux/futex.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static int n_waits, n_wakes;

static long count_call(long number, uint32_t *word, int operation, ...)
{
    (void)word;
    assert(number == SYS_futex);
    n_waits += operation == FUTEX_WAIT;
    n_wakes += operation == FUTEX_WAKE;
    return 0;
}

#define syscall count_call
#include "port.h"

enum { MS = 1000000 };

static void pauses(void)
{
    struct bps_contention contention = {0};
    assert(!bps_is_contended(&contention, 0));
    bps_contention_slow(&contention, 10 * MS);
    assert(bps_is_contended(&contention, 12 * MS - 1) && !bps_is_contended(&contention, 12 * MS));

    bps_contention_slow(&contention, 20 * MS); /* again, and nothing met: twice as long, up to the most */
    assert(bps_is_contended(&contention, 24 * MS - 1) && !bps_is_contended(&contention, 24 * MS));
    for (int i = 0; i < 100; i++)
        bps_contention_slow(&contention, 30 * MS);
    assert(bps_is_contended(&contention, 158 * MS - 1) && !bps_is_contended(&contention, 158 * MS));

    for (int i = 0; i < BPS_MANY_MET - 1; i++) /* too few to tell */
        assert(bps_contention_met(&contention));
    bps_contention_slow(&contention, 200 * MS);
    assert(bps_is_contended(&contention, 328 * MS - 1));
    for (int i = 0; i < BPS_MANY_MET; i++)
        bps_contention_met(&contention);
    bps_contention_slow(&contention, 400 * MS); /* one among many that were met */
    assert(!bps_is_contended(&contention, 402 * MS));
}

static void patience(void)
{
    struct bps_port port;
    memset(&port, 0, sizeof port);
    assert(bps_port_patience(&port) == 0); /* who is not to stay awake never does */
    port.awake_ns = 50;
    assert(bps_port_patience(&port) == 200);
    bps_port_learn(&port, 201);
    assert(bps_port_patience(&port) == 200); /* one long wait */
    for (int i = 0; i < 5; i++)
        bps_port_learn(&port, 201);
    assert(bps_port_patience(&port) == 50);
    bps_port_learn(&port, 200); /* it slept, but need not have */
    assert(bps_port_patience(&port) == 200);
}

static void doorbell(void)
{
    struct bps_doorbell bell = {.rings = 5, .sleepers = 1};
    assert(bps_await_doorbell_awake(&bell, 0, 4, 0, 1) && bell.awake == 1);
    bps_ring_doorbell(&bell, 1); /* it finds that, too */
    assert(n_wakes == 0);
    bps_leave_doorbell(&bell, bell.rings); /* and has found it */
    assert(bell.awake == 0 && n_wakes == 0);

    bell.awake = 1;
    bps_ring_doorbell(&bell, 1);
    bps_leave_doorbell(&bell, bell.rings - 1); /* rung for after it looked, and it is busy now */
    assert(bell.awake == 0 && n_wakes == 1);
    bps_ring_doorbell(&bell, 1); /* nobody is awake */
    assert(n_wakes == 2);

    bell.awake = 1; /* another is: one is enough */
    assert(!bps_await_doorbell_awake(&bell, 0, bell.rings, 0, 1) && bell.awake == 1 && n_waits == 1);
    assert(!bps_await_doorbell_awake(&bell, 1, bell.rings, 0, 1) && bell.awake == 0 && n_waits == 2);
    assert(bell.sleepers == 1);
    bps_await_doorbell(&bell, bell.rings - 1, 0, 1); /* who waits once is awake no longer than that */
    assert(bell.awake == 0 && n_waits == 2);
}

static void announcement(void)
{
    static _Alignas(64) char memory[BPS_LANE_HEADER + 2 * sizeof(struct bps_entry)];
    struct bps_lane *lane = (struct bps_lane *)memory;
    struct bps_doorbell bell = {0};
    struct bps_port port = {.lane = lane, .doorbell = &bell};
    struct bps_entry entry = {0};
    assert(bps_lane_push(lane, 2, &entry) == 0);
    bps_port_ring(&port);
    assert(bell.rings == 1);
    assert(bps_lane_pop(lane, 2, &entry) == 0);
    bps_port_ring(&port); /* the node has taken it */
    assert(bell.rings == 1);
}

static void places(void)
{
    struct bps_separation separation = {0};
    uint64_t waiting = 0;
    cpu_set_t all, chosen, after;
    assert(sched_getaffinity(0, sizeof all, &all) == 0);
    for (int cpu = BPS_SEPARATION_CPUS; cpu < CPU_SETSIZE; cpu++)
        CPU_CLR(cpu, &all);
    if (CPU_COUNT(&all) == 0)
        return;
    assert(sched_setaffinity(0, sizeof all, &all) == 0);
    assert(bps_separation_enter(&separation, &waiting, 0) == -1 && waiting == 0); /* of many CPUs */
    separation.few = 1;
    int cpu = bps_separation_enter(&separation, &waiting, 0);
    assert(cpu >= 0 && waiting == 1ull << cpu);
    bps_separation_leave(&waiting, cpu);
    assert(waiting == 0);

    CPU_ZERO(&chosen);
    CPU_SET(1, &chosen);
    CPU_SET(3, &chosen);
    assert(bps_separation_choose(1u << 1, &chosen) == 3 && bps_separation_choose(1u << 1 | 1u << 3, &chosen) == -1);

    waiting = 1u << 1; /* set since it looked: the next one */
    assert(bps_separation_claim(&waiting, 0, &chosen) == 3 && waiting == (1u << 1 | 1u << 3));
    assert(bps_separation_claim(&waiting, 0, &chosen) == -1);

    waiting = ~0ull; /* others are everywhere */
    assert(bps_separation_enter(&separation, &waiting, 4 * MS) == -1 && waiting == ~0ull);
    assert(separation.next_ns == 5 * MS);
    assert(bps_separation_enter(&separation, &waiting, 5 * MS - 1) == -1 && separation.next_ns == 5 * MS); /* not each time */
    for (int one = 0; one < BPS_SEPARATION_CPUS; one++)
        if (CPU_ISSET(one, &all)) { /* this is the only one left: it runs there, or goes there */
            waiting = ~(1ull << one);
            separation.next_ns = 0;
            assert(bps_separation_enter(&separation, &waiting, bps_now_ns()) == one && waiting == ~0ull);
            assert(sched_getaffinity(0, sizeof after, &after) == 0 && CPU_EQUAL(&after, &all)); /* and is not bound */
            bps_separation_leave(&waiting, one);
            assert(waiting == ~(1ull << one));
        }
}

int main(void)
{
    pauses();
    patience();
    doorbell();
    announcement();
    places();
    return 0;
}
