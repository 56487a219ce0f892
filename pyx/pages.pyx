# cython: language_level=3, binding=True, freethreading_compatible=False
"""Pages: the memory of gradients, which other processes map.

A `Segment` is one memfd: page-aligned, pre-faulted, sealed against resizing, passed on by descriptor
(SCM_RIGHTS), and gone with its last mapping: nothing to collide with by name, nothing left after ``kill -9``.
A `Window` maps runs of several segments side by side, so that a tensor whose partitions lie in different
segments is one contiguous array. Both export buffers and refuse to unmap while an export lives: a NIC or a
NumPy array never points into freed memory. A `Shadow` is addresses that stand for memory of a device.
"""
cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from libc.errno cimport EINVAL, ENOMEM, ENOSYS, errno
from libc.stdint cimport uintptr_t
from libc.string cimport strerror

import os


cdef extern from *:
    """
    #define _GNU_SOURCE
    #include <errno.h>
    #include <fcntl.h>
    #include <sys/mman.h>
    #include <sys/stat.h>
    #include <sys/syscall.h>
    #include <unistd.h>
    #include "mapping.h"
    #ifndef MFD_HUGE_2MB
    #define MFD_HUGE_2MB (21u << 26)
    #endif
    #ifndef F_ADD_SEALS
    #define F_ADD_SEALS 1033
    #define F_SEAL_SEAL 1
    #define F_SEAL_SHRINK 2
    #define F_SEAL_GROW 4
    #endif
    static int bps_seal(int fd) { return fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW); }
    /* mbind without libnuma: pages of these bytes are taken from node, of another one where it is full. 0 or errno. */
    #define BPS_MOST_NODES 1024
    static int bps_prefer_node(void *address, size_t nbytes, unsigned int node) {
        enum { BITS = 8 * sizeof(unsigned long), PREFERRED = 1 };
        unsigned long mask[BPS_MOST_NODES / BITS] = {0};
        if (node >= BPS_MOST_NODES) return EINVAL;
        mask[node / BITS] = 1ul << node % BITS;
        return syscall(SYS_mbind, address, nbytes, PREFERRED, mask, BPS_MOST_NODES + 1, 0) == 0 ? 0 : errno;
    }
    /* Fault pages in by touching them, for kernels before 5.14 (no MADV_POPULATE_WRITE). */
    static void bps_touch(volatile char *p, size_t n, size_t page) { for (size_t i = 0; i < n; i += page) p[i] = p[i]; }
    """
    ctypedef long off_t
    int memfd_create(const char *name, unsigned int flags) nogil
    int ftruncate(int fd, off_t length) nogil
    int close(int fd) nogil
    int dup(int fd) nogil
    void *mmap(void *addr, size_t length, int prot, int flags, int fd, off_t offset) nogil
    int munmap(void *addr, size_t length) nogil
    int madvise(void *addr, size_t length, int advice) nogil
    int mprotect(void *addr, size_t length, int prot) nogil
    int bps_seal(int fd) nogil
    int bps_prefer_node(void *address, size_t nbytes, unsigned int node) nogil
    void bps_touch(char *p, size_t n, size_t page) nogil
    size_t bps_pool_page(int fd) nogil
    void *bps_reserve(size_t nbytes, size_t remainder) nogil
    void *bps_map(size_t nbytes, int prot, int fd) nogil
    void bps_fill_huge(char *address, size_t nbytes, size_t page) nogil
    void *MAP_FAILED
    int PROT_NONE, PROT_READ, PROT_WRITE, MAP_SHARED, MAP_PRIVATE, MAP_ANONYMOUS, MAP_FIXED
    int MADV_POPULATE_READ, MADV_POPULATE_WRITE, MADV_HUGEPAGE
    unsigned int MFD_CLOEXEC, MFD_ALLOW_SEALING, MFD_HUGETLB, MFD_HUGE_2MB


cdef size_t PAGE = os.sysconf("SC_PAGE_SIZE")
cdef size_t HUGE = 2 << 20


def huge_page_nbytes():
    """Return the bytes in the pool of 2 MiB huge pages that nobody has reserved (0: no pool)."""
    pool = "/sys/kernel/mm/hugepages/hugepages-2048kB/"
    try:
        with open(pool + "free_hugepages") as free, open(pool + "resv_hugepages") as reserved:
            return max(0, int(free.read()) - int(reserved.read())) * HUGE
    except OSError:
        return 0


def pool_nbytes(nbytes, taken_nbytes=0):
    """Return what a `Segment` of *nbytes* takes of that pool, of which others are about to take *taken_nbytes*.

    0: it comes from elsewhere; the pool has not enough, or the segment does not fill one huge page.
    """
    cdef size_t rounded = (<size_t>nbytes + HUGE - 1) // HUGE * HUGE
    return rounded if nbytes >= HUGE and huge_page_nbytes() >= nbytes + HUGE + taken_nbytes else 0


def bind_errno(unsigned int node):
    """Return why a `Segment` cannot prefer NUMA node *node*: the errno of mbind, tried on one page; 0: it can."""
    cdef void *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    if page == MAP_FAILED:
        return errno
    cdef int rc = bps_prefer_node(page, PAGE, node)
    munmap(page, PAGE)
    return rc


cdef int _populate(void *address, size_t nbytes, size_t page) noexcept nogil:
    """Fault every page in now; 0 or an errno. A pool that is too small answers here, never by SIGBUS later."""
    if madvise(address, nbytes, MADV_POPULATE_WRITE) == 0:
        return 0
    if errno != EINVAL and errno != ENOSYS:
        return errno
    bps_touch(<char *>address, nbytes, page)
    return 0


cdef class _Mapping:
    """Addresses of this process, and a descriptor unless `fd` is -1; a buffer that is not unmapped while it is used."""

    cdef readonly uintptr_t address
    cdef readonly size_t nbytes
    cdef readonly bint writable
    cdef readonly int exports
    cdef int fd

    def __cinit__(self):
        self.fd = -1

    @property
    def closed(self):
        """Whether the mapping is gone."""
        return self.address == 0

    cdef int _check_buffer(self) except -1:
        """Raise unless this process may read and write there."""
        if self.address == 0:
            raise ValueError(f"buffer of a closed {type(self).__name__.lower()}")
        return 0

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        self._check_buffer()
        PyBuffer_FillInfo(buffer, self, <void *>self.address, <Py_ssize_t>self.nbytes, not self.writable, flags)
        self.exports += 1

    def __releasebuffer__(self, Py_buffer *buffer):
        self.exports -= 1

    def close(self):
        """Unmap, and close the descriptor. Idempotent.

        Raises `BufferError` while exports live: something still points into the memory.
        """
        if self.exports:
            raise BufferError(f"{type(self).__name__.lower()} of {self.nbytes} bytes has {self.exports} live exports")
        self._release()

    cdef void _release(self) noexcept:
        if self.address != 0:
            munmap(<void *>self.address, self.nbytes)
            self.address = 0
        if self.fd >= 0:
            close(self.fd)
            self.fd = -1

    def __dealloc__(self):
        self._release()


@cython.final
cdef class Segment(_Mapping):
    """Create a memfd of *nbytes* (rounded up to pages) and map it writable.

    Huge pages of 2 MiB are used when *huge* is set and the segment fills at least one: those of the pool if *pool* is
    set and it holds enough, which `page_nbytes` tells; else, if it *falls_back*, those that the kernel can make (Linux
    6.1; where shmem_enabled in /sys/kernel/mm/transparent_hugepage is ``deny``, none). *populate* faults every page in
    now. Pages are those of NUMA node *node* (-1: the one that touches them first) as long as that has some and mbind is
    not refused, see `bind_errno`. The memory is zero. Any thread; the object owns descriptor and mapping.

    Raises
    ------
    ValueError
        If nbytes is not positive.
    OSError
        With the errno of the call that failed and its arguments.
    """

    cdef readonly size_t page_nbytes

    def __init__(self, nbytes, *, name="bpsfast", huge=True, pool=True, falls_back=True, populate=True,
                 int node=-1):
        cdef int rc = ENOMEM
        if self.fd >= 0:
            raise ValueError("a Segment is initialised once")
        if nbytes <= 0:
            raise ValueError(f"a segment needs nbytes > 0, got {nbytes}")
        self.writable = True
        if huge and pool and pool_nbytes(nbytes):
            rc = self._create(nbytes, name, HUGE, MFD_HUGETLB | MFD_HUGE_2MB, huge, populate, node)
        if rc and falls_back:
            rc = self._create(nbytes, name, PAGE, 0, huge, populate, node)
        if rc:
            raise OSError(rc, f"memfd segment(nbytes={nbytes}, name={name!r}): {strerror(rc).decode()}")

    cdef int _create(self, size_t nbytes, str name, size_t page, unsigned int flags, bint huge, bint populate,
                     int node):
        """0, or an errno with nothing left behind."""
        cdef size_t rounded = (nbytes + page - 1) // page * page
        cdef void *address
        cdef int rc = 0
        cdef bytes label = name.encode()
        cdef int fd = memfd_create(label, MFD_CLOEXEC | MFD_ALLOW_SEALING | flags)
        if fd < 0:
            return errno
        if ftruncate(fd, <off_t>rounded) != 0 or bps_seal(fd) != 0:
            rc = errno
            close(fd)
            return rc
        with nogil:
            address = bps_map(rounded, PROT_READ | PROT_WRITE, fd)
            if address == MAP_FAILED:
                rc = errno
            else:
                if node >= 0:
                    bps_prefer_node(address, rounded, <unsigned int>node)
                if huge and flags == 0:
                    madvise(address, rounded, MADV_HUGEPAGE)
                    if populate:
                        bps_fill_huge(<char *>address, rounded, page)
                if populate:
                    rc = _populate(address, rounded, page)
                    if rc:
                        munmap(address, rounded)
            if rc:
                close(fd)
        if rc:
            return rc
        self.fd, self.address, self.nbytes, self.page_nbytes = fd, <uintptr_t>address, rounded, page
        return 0

    @classmethod
    def attach(cls, int fd, *, writable=False, populate=True):
        """Map the segment behind *fd*, a descriptor that another process passed; the descriptor becomes ours.

        *populate* enters all its pages into this process's page table now, so that the first step does not.

        Raises `OSError` if the descriptor cannot be mapped; it is then still the caller's.
        """
        cdef Segment self = cls.__new__(cls)
        status = os.fstat(fd)
        cdef size_t nbytes = status.st_size
        cdef int prot = PROT_READ | PROT_WRITE if writable else PROT_READ
        cdef void *address = bps_map(nbytes, prot, fd)
        if address == MAP_FAILED:
            raise OSError(errno, f"mmap(fd={fd}, nbytes={nbytes}, writable={writable}): {strerror(errno).decode()}")
        cdef int advice = MADV_POPULATE_WRITE if writable else MADV_POPULATE_READ
        if populate:  # an old kernel that cannot: the first access of each page does it
            with nogil:
                madvise(address, nbytes, advice)
        self.fd, self.address, self.nbytes, self.writable = fd, <uintptr_t>address, nbytes, writable
        self.page_nbytes = status.st_blksize
        return self

    def fileno(self):
        """Return the descriptor (the segment keeps it)."""
        return self.fd

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


@cython.final
cdef class Window(_Mapping):
    """Map *extents*, tuples of (descriptor, byte offset, nbytes), read-only side by side.

    Offsets are page multiples, and so is every nbytes but the last. The descriptors stay the caller's; the
    mapping outlives them.

    Raises
    ------
    ValueError
        If there is no extent, or one is not page-aligned, or lies in huge pages of the pool: mmap would round it up to
        one of them, over its neighbour.
    OSError
        If a mapping fails; nothing is left behind.
    """

    def __init__(self, extents):
        cdef size_t total = 0, at = 0, rounded
        cdef void *piece
        cdef void *base
        if self.address != 0:
            raise ValueError("a Window is initialised once")
        for i, (fd, offset, nbytes) in enumerate(extents):
            if offset % PAGE or nbytes <= 0 or (nbytes % PAGE and i + 1 < len(extents)):
                raise ValueError(f"extent {i} (offset={offset}, nbytes={nbytes}) is not made of {PAGE}-byte pages")
            if bps_pool_page(fd):
                raise ValueError(f"extent {i} (descriptor {fd}) lies in the pool of huge pages, of {bps_pool_page(fd)} "
                                 f"bytes each: a window is made of {PAGE}-byte pages, so make the segment with "
                                 "pool=False")
            total += (<size_t>nbytes + PAGE - 1) // PAGE * PAGE
        if total == 0:
            raise ValueError("a window needs at least one extent")
        base = bps_reserve(total, <size_t>extents[0][1])
        if base == MAP_FAILED:
            raise OSError(errno, f"mmap(reserve nbytes={total}): {strerror(errno).decode()}")
        for fd, offset, nbytes in extents:
            rounded = (<size_t>nbytes + PAGE - 1) // PAGE * PAGE
            piece = mmap(<char *>base + at, rounded, PROT_READ, MAP_SHARED | MAP_FIXED, fd, offset)
            if piece == MAP_FAILED:
                error = OSError(errno, f"mmap(fd={fd}, offset={offset}, nbytes={rounded}): {strerror(errno).decode()}")
                munmap(base, total)
                raise error
            at += rounded
        with nogil:
            madvise(base, total, MADV_POPULATE_READ)
        self.address, self.nbytes = <uintptr_t>base, total


@cython.final
cdef class Shadow(_Mapping):
    """Addresses of this process that stand for *nbytes* of another device's memory, whose descriptor is *fd*.

    Nobody here can read or write there: whoever tries gets SIGSEGV, and with that address a kernel call EFAULT. They
    are what a card is told (the iova of a registration), and what tells such memory from all other.

    *maps*: the descriptor is a memfd, which stands in for a device's. It is mapped, and a buffer, until `shut`: for
    those who register it as ordinary memory. The descriptor becomes ours, as for `Segment.attach`. Any thread.

    Raises
    ------
    ValueError
        If nbytes is not made of pages.
    OSError
        With the errno of mmap; the descriptor is then still the caller's.
    """

    cdef readonly bint maps
    cdef bint is_shut

    def __init__(self, int fd, size_t nbytes, *, bint maps=False):
        cdef void *address
        if self.address != 0:
            raise ValueError("a Shadow is initialised once")
        if nbytes == 0 or nbytes % PAGE:
            raise ValueError(f"{nbytes} bytes of a device are not made of {PAGE}-byte pages")
        with nogil:
            address = bps_map(nbytes, PROT_READ | PROT_WRITE, fd) if maps else bps_reserve(nbytes, 0)
        if address == MAP_FAILED:
            raise OSError(errno, f"mmap(fd={fd}, nbytes={nbytes}, maps={maps}): {strerror(errno).decode()}")
        self.fd, self.address, self.nbytes, self.maps = fd, <uintptr_t>address, nbytes, maps
        self.writable = True  # by cards

    def fileno(self):
        """Return the descriptor (the shadow keeps it)."""
        return self.fd

    def shut(self):
        """Let nobody in this process read or write there any more; what is registered stays so. Idempotent."""
        if self.address == 0:
            raise ValueError("the shadow is closed")
        if mprotect(<void *>self.address, self.nbytes, PROT_NONE) != 0:
            raise OSError(errno, f"mprotect(address={self.address:#x}, nbytes={self.nbytes}): "
                                 f"{strerror(errno).decode()}")
        self.is_shut = True

    cdef int _check_buffer(self) except -1:
        if self.address == 0 or self.is_shut or not self.maps:
            raise BufferError("a device's memory is no buffer of this process")
        return 0
