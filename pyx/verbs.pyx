# cython: language_level=3, binding=True, freethreading_compatible=False
"""Verbs: RDMA objects over libibverbs, one owner for each ``ibv_*`` handle, without its headers and without the GIL.

    Device              an opened RDMA device                         verbs_device.pxi
      ProtectionDomain  what its memory and queue pairs belong to
        MemoryRegion    memory that the device may read and write     verbs_memory.pxi
        QueuePair       one end of a reliable connection              verbs_queue_pair.pxi
      CompletionQueue   what of the posted work is done               verbs_completion.pxi

A child keeps its parent; a parent refuses to close while a child lives (BufferError). `close` is idempotent. When the
kernel has taken the device away, `close` succeeds all the same: nothing is left to destroy (`bps_device_is_gone`).
After a fork the child's copies are unusable (ValueError) and release nothing: the device is the parent's.
`handle` is the address of the C struct (`verbs_abi.h`), for native code that posts and polls by itself.
Every call that may wait runs without the GIL. Any thread may call anything; one object is closed by its owner only.

The library is loaded on first use (`verbs.h`). Errors: `VerbsMissing` when there is none; OSError with the errno of
the verb and, in words, what was tried with which values; ValueError for a closed object or an impossible argument.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport EAGAIN, EINTR, EINVAL, ENODEV, ENOENT, ENOMEM, ENOSYS, EOVERFLOW, EPERM, errno
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset
from posix.unistd cimport close as close_fd

import collections
import errno as errnos
import os
import resource

from pyx.ibverbs cimport *
from pyx.words cimport bps_now_ns


cdef extern from "work.h" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *, void *)
    int pthread_mutex_destroy(pthread_mutex_t *)
    int pthread_mutex_lock(pthread_mutex_t *)
    int pthread_mutex_unlock(pthread_mutex_t *)
    int pthread_atfork(void (*)() noexcept nogil, void (*)() noexcept nogil, void (*)() noexcept nogil)
    enum: BPS_WORK_RECV, EXFULL
    struct bps_work:
        uint64_t wr_id, address, remote_address
        uint32_t nbytes, lkey, rkey
        uint16_t opcode, flags
    struct bps_work_queue:
        bps_work *items
        uint32_t capacity
        uint64_t posted, retired
    struct bps_pair
    struct bps_cq:
        pthread_mutex_t lock
        bps_pair **pairs
        uint32_t depth, pending
    struct bps_pair:
        pthread_mutex_t lock
        bps_ibv_qp *qp
        uint32_t number
        bps_cq *send_cq
        bps_cq *recv_cq
        bps_work_queue send, recv
        int failed
        uint32_t vendor_error
        bps_work failed_work
    int bps_cq_add_pair(bps_cq *, bps_pair *)
    void bps_cq_remove_pair(bps_cq *, bps_pair *)
    void bps_retire(bps_cq *, bps_work_queue *, uint64_t)
    int bps_pair_post(bps_pair *, const bps_work *, uint32_t)
    int bps_cq_poll(bps_cq *, bps_ibv_cq *, int, bps_ibv_wc *)

cdef extern from *:
    """
    #include <dlfcn.h>
    #include <link.h>
    /* The path that the dynamic loader found a library at. */
    static const char *bps_library_path(void *library)
    {
        struct link_map *map = NULL;
        return dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map != NULL ? map->l_name : "";
    }
    static uint32_t bps_forks; /* how often this process's ancestors forked since the library was loaded */
    static void bps_forked(void) { bps_forks++; }
    """
    const char *bps_library_path(void *) nogil
    uint32_t bps_forks
    void bps_forked() noexcept nogil


class VerbsMissing(OSError):
    """This machine cannot do verbs: no libibverbs, or one too old. The text says what to install."""


def load(library=None):
    """Load libibverbs (*library*: instead of libibverbs.so.1); whatever needs it does so by itself. Idempotent.

    Raises `VerbsMissing` with what the loader said and what to install.
    """
    cdef char why[512]
    if bps_verbs.library != NULL:
        return
    name = os.fsencode(library or BPS_VERBS_LIBRARY)
    cdef int rc = bps_verbs_open(name, why, sizeof(why))
    if rc == ENOENT:
        raise VerbsMissing(rc, f"{name.decode()} cannot be loaded ({(<bytes>why).decode()}): install libibverbs and "
                               "its providers (Debian: libibverbs1 ibverbs-providers; Fedora: libibverbs)")
    if rc:
        raise VerbsMissing(rc, f"{name.decode()} has no {(<bytes>why).decode()}: it is no libibverbs, or a very old "
                               "one; install that of rdma-core")
    pthread_atfork(NULL, NULL, bps_forked)


def version():
    """Return what is loaded, as "libibverbs 44.0 at PATH"."""
    load()
    path = os.path.realpath(os.fsdecode(bps_library_path(bps_verbs.library)))
    # the soname's ABI numbers stand before rdma-core's: libibverbs.so.1.14.44.0
    number = ".".join(os.path.basename(path).partition(".so.")[2].split(".")[2:])
    return f"libibverbs {number or '(version unknown)'} at {path}"


def fork_safety():
    """Return why a fork may happen while memory is registered, or why not: "unneeded", "enabled" or "disabled: ...".

    "unneeded": the kernel copies pinned pages for the child. "enabled": the child does not get registered memory.
    """
    load()
    if bps_verbs.is_fork_initialized != NULL:
        status = bps_verbs.is_fork_initialized()
        if status:
            return "enabled" if status == 1 else "unneeded"
    elif bps_verbs.fork_errno == 0:
        return "enabled"
    return (f"disabled: ibv_fork_init: {os.strerror(bps_verbs.fork_errno)}; something in this process registered "
            "memory before bpsfast did: set RDMAV_FORK_SAFE=1 and start again")


cdef str _words(int rc):
    """Return an errno's name and meaning."""
    return f"{errnos.errorcode.get(rc, rc)}: {os.strerror(rc)}"


cdef class _VerbsObject:
    """An object of libibverbs at `raw` (NULL: closed), which the process that made it owns. A context manager."""

    cdef void *raw
    cdef uint32_t forks

    cdef str _name(self):
        """Return what errors call it."""

    cdef void *_open(self) except NULL:
        """Return `raw`; ValueError if it is closed, or another process's."""
        if self.raw == NULL:
            raise ValueError(f"{self._name()} is closed")
        if self.forks != bps_forks:
            raise ValueError(f"{self._name()} belongs to the process that this one (pid {os.getpid()}) was forked "
                             "from: open the device again here")
        return self.raw

    cdef bint _is_ours(self) noexcept:
        return self.raw != NULL and self.forks == bps_forks

    @property
    def handle(self):
        """Address of the C struct. Native code that posts or polls there does so alone, and accounts for it itself."""
        return <uintptr_t>self._open()

    @property
    def closed(self):
        """Whether `close` was called."""
        return self.raw == NULL

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


include "verbs_device.pxi"
include "verbs_memory.pxi"
include "verbs_completion.pxi"
include "verbs_queue_pair.pxi"
