/* Sockets: the options and queries of a connected TCP socket that a stream needs. */
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/utsname.h>

/* Send at once what is written. 0: the kernel chooses the send buffer, or how much of it may be unsent. */
static inline void bps_tune(int fd, int send_buffer_nbytes, int unsent_nbytes)
{
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (send_buffer_nbytes > 0)
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &send_buffer_nbytes, sizeof send_buffer_nbytes);
    if (unsent_nbytes > 0)
        setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent_nbytes, sizeof unsent_nbytes);
}

/* Acknowledge what has arrived now: the sender's credit waits for it. */
static inline void bps_acknowledge(int fd)
{
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_QUICKACK, &one, sizeof one);
}

static inline uint64_t bps_unacknowledged(int fd)
{
    int nbytes = 0;
    return ioctl(fd, SIOCOUTQ, &nbytes) == 0 && nbytes > 0 ? (uint64_t)nbytes : 0;
}

/* Let the kernel wake the receiving thread only when the socket has at least nbytes, or the connection ends. On kernels
 * before Linux 5.12 this does nothing: under memory pressure, or with small packets, they may close the receive window
 * before nbytes have arrived, and the thread would never wake. */
static inline void bps_gather(int fd, int nbytes)
{
    static int is_sound; /* 1: yes; -1: no */
    struct utsname kernel;
    int major = 0, minor = 0, sound = __atomic_load_n(&is_sound, __ATOMIC_RELAXED);
    if (sound == 0) {
        int is_told = uname(&kernel) == 0 && sscanf(kernel.release, "%d.%d", &major, &minor) == 2;
        sound = is_told && (major > 5 || (major == 5 && minor >= 12)) ? 1 : -1;
        __atomic_store_n(&is_sound, sound, __ATOMIC_RELAXED);
    }
    if (sound == 1)
        setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &nbytes, sizeof nbytes);
}

/* Whether there is something to receive. */
static inline int bps_has_arrived(int fd)
{
    int nbytes = 0;
    return ioctl(fd, FIONREAD, &nbytes) == 0 && nbytes > 0;
}
