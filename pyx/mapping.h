/* Mapping: shared memory in pages of 2 MiB, without a reserved pool and whatever the kernel's default is.
 *
 * A huge page of a file can be mapped only where address and offset have the same remainder, and mmap takes any
 * address: so 2 MiB more are reserved, and the surplus is given back. For shared memory the kernel by default never
 * uses huge pages (transparent_hugepage/shmem_enabled); MADV_COLLAPSE (Linux 6.1) requests them nevertheless. It needs
 * extents with at least one page each, and then costs less than filling them page by page.
 */
#pragma once

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/vfs.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#define BPS_HUGE_NBYTES ((size_t)2 << 20)

/* The page size of the pool of huge pages that the file behind fd lies in; 0: it does not. (What fstat tells is 2 MiB
 * for ordinary shared memory too, where the kernel may use huge pages by itself.) */
static inline size_t bps_pool_page(int fd)
{
    struct statfs status;
    int is_pool = fstatfs(fd, &status) == 0 && (unsigned long)status.f_type == 0x958458f6ul; /* HUGETLBFS_MAGIC */
    return is_pool ? (size_t)status.f_bsize : 0;
}

/* Reserve nbytes of addresses that begin at `remainder` beyond a multiple of 2 MiB; MAP_FAILED with errno set. */
static inline void *bps_reserve(size_t nbytes, size_t remainder)
{
    size_t reserved = nbytes + BPS_HUGE_NBYTES;
    char *base = mmap(NULL, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
        return MAP_FAILED;
    size_t before = (remainder - (uintptr_t)base) & (BPS_HUGE_NBYTES - 1);
    if (before != 0)
        munmap(base, before);
    munmap(base + before + nbytes, BPS_HUGE_NBYTES - before);
    return base + before;
}

/* As mmap of the whole of fd, shared; MAP_FAILED with errno set and nothing mapped otherwise. */
static inline void *bps_map(size_t nbytes, int prot, int fd)
{
    void *place = bps_reserve(nbytes, 0);
    if (place == MAP_FAILED)
        return MAP_FAILED;
    void *mapped = mmap(place, nbytes, prot, MAP_SHARED | MAP_FIXED, fd, 0);
    if (mapped == MAP_FAILED) {
        int why = errno;
        munmap(place, nbytes);
        errno = why;
    }
    return mapped;
}

/* Fill what bps_map returned with huge pages as far as they are to be had; ordinary pages come by populating. */
static inline void bps_fill_huge(char *address, size_t nbytes, size_t page)
{
    size_t whole = nbytes & ~(BPS_HUGE_NBYTES - 1);
    for (size_t at = 0; at < whole; at += BPS_HUGE_NBYTES)
        if (madvise(address + at, page, MADV_POPULATE_WRITE) != 0)
            return;
    if (whole != 0)
        madvise(address, whole, MADV_COLLAPSE);
}
