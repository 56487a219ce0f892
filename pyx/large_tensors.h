/* Large tensors: those that the ranks of a machine sum again and again get huge pages.
 *
 * Sums read and write them in place. With pages of 4 KiB, finding the addresses of 8 MiB takes a tenth of a sum and more.
 * The kernel copies a tensor to huge pages once (MADV_COLLAPSE, Linux 6.1), which takes as long as several sums; so only
 * tensors that were summed several times get them, and again now and then, since a freed tensor's addresses may come
 * back. The bytes do not change, and the memory can be used as before. The kernel does not move memory that devices have
 * pinned. If transparent huge pages are set to "never", the kernel is not asked.
 */
#pragma once

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define BPS_LARGE_NBYTES (4u << 20)
#define BPS_LARGE_FIRST 8u /* a tensor gets huge pages after its eighth sum */
#define BPS_LARGE_EVERY 512u /* and again after each 512 more */
#define BPS_LARGE_KNOWN 64
#define BPS_HUGE_PAGE (2ull << 20)
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

struct bps_large_tensor {
    uint64_t address, nbytes;
    uint32_t n_sums;
};

/* The tensors that were summed last, for one thread at a time. */
struct bps_large_tensors {
    struct bps_large_tensor known[BPS_LARGE_KNOWN];
    uint32_t next;
};

/* Count a sum of a tensor; whether it is to get huge pages now. */
static inline int bps_large_count(struct bps_large_tensors *tensors, uint64_t address, uint64_t nbytes)
{
    struct bps_large_tensor *found = NULL;
    if (nbytes < BPS_LARGE_NBYTES)
        return 0;
    for (int i = 0; found == NULL && i < BPS_LARGE_KNOWN; i++)
        if (tensors->known[i].address == address && tensors->known[i].nbytes == nbytes)
            found = &tensors->known[i];
    if (found == NULL) {
        found = &tensors->known[tensors->next++ % BPS_LARGE_KNOWN];
        *found = (struct bps_large_tensor){address, nbytes, 0};
    }
    return ++found->n_sums % BPS_LARGE_EVERY == BPS_LARGE_FIRST;
}

/* Whether the system gives huge pages to who asks for them. Read once, under the GIL. */
static inline int bps_huge_pages_exist(void)
{
    static int found = -1;
    char text[64] = "";
    FILE *file = found < 0 ? fopen("/sys/kernel/mm/transparent_hugepage/enabled", "re") : NULL;
    if (found < 0)
        found = file != NULL && fgets(text, sizeof text, file) != NULL && strstr(text, "[never]") == NULL;
    if (file != NULL)
        fclose(file);
    return found;
}

/* Copy the whole huge pages of a tensor to such pages. 0 or an errno, of which nothing follows. */
static inline int bps_large_collapse(uint64_t address, uint64_t nbytes)
{
    uint64_t begin = (address + BPS_HUGE_PAGE - 1) / BPS_HUGE_PAGE * BPS_HUGE_PAGE;
    uint64_t end = (address + nbytes) / BPS_HUGE_PAGE * BPS_HUGE_PAGE;
    return end <= begin || madvise((void *)(uintptr_t)begin, end - begin, MADV_COLLAPSE) == 0 ? 0 : errno;
}
