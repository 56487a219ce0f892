/* Words in shared memory: ordered access, futex wait and wake, the clock of all traces.
 *
 * Futexes are not PRIVATE: the words lie in memfd segments that several processes map.
 */
#pragma once

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "cpu_contention.h"

static inline uint32_t bps_load(const uint32_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static inline void bps_store(uint32_t *word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
static inline uint32_t bps_add(uint32_t *word, uint32_t n) { return __atomic_fetch_add(word, n, __ATOMIC_SEQ_CST); }
static inline void bps_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

static inline void bps_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static inline uint64_t bps_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Sleep while *word == expected, at most timeout_ns. 0, or the errno (EAGAIN, ETIMEDOUT, EINTR). */
static inline int bps_wait(uint32_t *word, uint32_t expected, uint64_t timeout_ns)
{
    struct timespec t = {(time_t)(timeout_ns / 1000000000u), (long)(timeout_ns % 1000000000u)};
    return syscall(SYS_futex, word, FUTEX_WAIT, expected, &t, NULL, 0) == 0 ? 0 : errno;
}

static inline void bps_wake(uint32_t *word, int n) { syscall(SYS_futex, word, FUTEX_WAKE, n, NULL, NULL, 0); }

/* Stay awake for awake_ns, or until *word differs from `seen`; whether it does.
 *
 * A core that went idle takes tens of microseconds to come back, more in a virtual machine. But a thread that merely
 * spins takes its core from whoever is to change the word (1 ms at p99 once cores are over-committed), so it yields,
 * unless other processes want its cores. */
static struct bps_contention bps_contention __attribute__((unused));

static inline int bps_wait_awake(const uint32_t *word, uint32_t seen, uint64_t awake_ns)
{
    for (int i = 0; i < 48; i++) {
        if (bps_load(word) != seen)
            return 1;
        bps_pause();
    }
    if (awake_ns == 0)
        return 0;
    uint64_t begin_ns = bps_now_ns(), now_ns = begin_ns;
    if (bps_is_contended(&bps_contention, begin_ns))
        return 0;
    do {
        uint64_t before_ns = now_ns;
        sched_yield();
        now_ns = bps_now_ns();
        if (now_ns - before_ns >= BPS_SLOW_YIELD_NS) {
            bps_contention_slow(&bps_contention, now_ns);
            return bps_load(word) != seen;
        }
        if (bps_load(word) != seen)
            return bps_contention_met(&bps_contention);
    } while (now_ns - begin_ns < awake_ns);
    return 0;
}

/* Doorbell: one word that many ring and the engine's threads of one node wait on. One of them stays awake for a while.
 * While it does, or while nobody sleeps, a ring costs a few instructions, otherwise one system call. */
#define BPS_DOORBELL_MAGIC 0x42504442u /* "BDPB" */

struct bps_doorbell {
    uint32_t magic;
    uint32_t pad0[15];
    uint32_t rings;   /* counts rings; what sleepers compare with */
    uint32_t pad1[15];
    uint32_t sleepers;
    uint32_t awake; /* waiters that will see the next ring without being woken: 0 or 1 */
    uint32_t pad2[14];
    uint64_t waiting; /* CPUs on which a rank waits awake (cpu_separation.h) */
    uint32_t pad3[14];
};

/* Wake up to n waiters. */
static inline void bps_ring_doorbell(struct bps_doorbell *bell, int n)
{
    bps_add(&bell->rings, 1);
    if (__atomic_load_n(&bell->awake, __ATOMIC_SEQ_CST) != 0)
        n--; /* whoever stops being awake after this compares the rings before it sleeps */
    if (n > 0 && __atomic_load_n(&bell->sleepers, __ATOMIC_SEQ_CST) != 0)
        bps_wake(&bell->rings, n);
}

/* As `bps_await_doorbell`, for one who is awake already if `is_awake`; whether it is awake afterwards, and stays so
 * while it finds out what to do. Then it calls `bps_leave_doorbell`, or waits on. */
static inline int bps_await_doorbell_awake(struct bps_doorbell *bell, int is_awake, uint32_t seen, uint64_t awake_ns,
                                           uint64_t timeout_ns)
{
    uint32_t nobody = 0;
    if (is_awake
        || __atomic_compare_exchange_n(&bell->awake, &nobody, 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        if (bps_wait_awake(&bell->rings, seen, awake_ns))
            return 1;
        __atomic_store_n(&bell->awake, 0, __ATOMIC_SEQ_CST);
    }
    bps_add(&bell->sleepers, 1);
    bps_wait(&bell->rings, seen, timeout_ns);
    bps_add(&bell->sleepers, (uint32_t)-1);
    return 0;
}

/* The waiter that was awake has work: wake another one if the bell was rung since `seen` was read. */
static inline void bps_leave_doorbell(struct bps_doorbell *bell, uint32_t seen)
{
    __atomic_store_n(&bell->awake, 0, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&bell->rings, __ATOMIC_SEQ_CST) != seen
        && __atomic_load_n(&bell->sleepers, __ATOMIC_SEQ_CST) != 0)
        bps_wake(&bell->rings, 1);
}

/* Wait until somebody rang after `seen` was read, at most timeout_ns; the first awake_ns of it awake, if no other
 * waiter is. */
static inline void bps_await_doorbell(struct bps_doorbell *bell, uint32_t seen, uint64_t awake_ns, uint64_t timeout_ns)
{
    if (bps_await_doorbell_awake(bell, 0, seen, awake_ns, timeout_ns))
        __atomic_store_n(&bell->awake, 0, __ATOMIC_SEQ_CST);
}
