/* Thread: starts native threads that block all signals, which the Python main thread handles. */
#pragma once

#include <pthread.h>
#include <signal.h>

static inline int bps_start_thread(pthread_t *thread, void *(*run)(void *), void *argument)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(thread, NULL, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc;
}
