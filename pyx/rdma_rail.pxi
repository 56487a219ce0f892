# The class Rail of rdma.pyx.


@cython.final
@cython.no_gc  # of a dropped job the collector finalises each object that it sees: not what the thread still uses
cdef class Rail:
    """Serve the completion queue at *completion_queue* (its `handle`; with events) by one native thread.

    *keep* is held until `close`. *port*: the one whose events count. *awake_us*: how long the thread keeps its core,
    yielding, before it sleeps.
    Nobody else may poll the queue. Any thread; `close` by the owner, once all streams are closed.

    Raises `OSError` when the library, the wake-up descriptor or the thread cannot be had.
    """

    cdef bps_rail *rail
    cdef object keep
    cdef int n_streams
    cdef uint32_t forks

    def __cinit__(self, uintptr_t completion_queue, *, uint32_t port=1, uint64_t awake_us=50, keep=None):
        cdef char why[512]
        cdef int rc = bps_verbs_open(BPS_VERBS_LIBRARY, why, sizeof(why))
        if rc:
            raise OSError(rc, f"libibverbs: {(<bytes>why).decode()}")
        self.rail = <bps_rail *>calloc(1, sizeof(bps_rail))
        if self.rail == NULL:
            raise MemoryError("rail")
        self.keep = keep
        global _watches_forks
        if not _watches_forks:
            pthread_atfork(NULL, NULL, bps_forked)
            _watches_forks = True
        self.forks = bps_forks
        self.rail.cq = <bps_ibv_cq *>completion_queue
        self.rail.awake_ns, self.rail.port = 1000 * awake_us, port
        bps_unblock(self.rail.cq.context.async_fd)
        pthread_mutex_init(&self.rail.streams_lock, NULL)
        pthread_mutex_init(&self.rail.regions.lock, NULL)
        self.rail.wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
        if self.rail.wake_fd < 0:
            raise OSError(errno, "eventfd of a rail")
        rc = bps_start_thread(&self.rail.thread, bps_rail_run, self.rail)
        if rc:
            close(self.rail.wake_fd)
            self.rail.wake_fd = -1
            raise OSError(rc, "pthread_create(rail)")

    cdef bps_rail *_open(self) except NULL:
        if self.rail.wake_fd < 0:
            raise ValueError("the rail is closed")
        if self.forks != bps_forks:
            raise ValueError(f"the rail belongs to the process that this one (pid {os.getpid()}) was forked from")
        return self.rail

    def know(self, uint64_t address, uint64_t nbytes, uint32_t lkey):
        """Let streams send from *nbytes* at *address*, memory that is registered under *lkey* until `close`."""
        if bps_region_add(&self._open().regions, address, nbytes, lkey):
            raise MemoryError("table of registered memory")

    @property
    def port_error_ns(self):
        """When it was last noticed that the port went down (PORT_ERR), in monotonic ns, 0: never."""
        return self.rail.port_error_ns

    def look(self):
        """Take notice of all that the device has reported by itself, before the thread comes to it.

        Streams may fail by it, and a flush gives way to its cause.
        """
        cdef bps_rail *rail = self._open()
        with nogil:
            pthread_mutex_lock(&rail.streams_lock)
            bps_rail_look(rail)
            pthread_mutex_unlock(&rail.streams_lock)

    def drain(self, double timeout_s):
        """Wait until the thread has taken the completions that are in the queue now; whether it has in *timeout_s*."""
        cdef bps_rail *rail = self._open()
        cdef int is_drained
        with nogil:
            is_drained = bps_rail_drain(rail, <uint64_t>(1e9 * timeout_s))
        return bool(is_drained)

    def counters(self):
        """Return completions, the batches they came in, how often the thread slept, and regions known."""
        self._open()
        return {"completions": self.rail.completions, "batches": self.rail.batches, "sleeps": self.rail.sleeps,
                "regions": self.rail.regions.used}

    def close(self):
        """End the thread. Idempotent; after a fork the child's copy is only forgotten.

        Raises `BufferError` while streams are open.
        """
        cdef bps_rail *rail = self.rail
        if rail == NULL or rail.wake_fd < 0:
            return
        if self.forks != bps_forks:
            rail.wake_fd = -1
            return
        if self.n_streams:
            raise BufferError(f"the rail has {self.n_streams} open streams")
        bps_store(&rail.stopping, 1)
        eventfd_write(rail.wake_fd, 1)
        with nogil:
            pthread_join(rail.thread, NULL)
            close(rail.wake_fd)
        rail.wake_fd = -1
        self.keep = None

    def __dealloc__(self):
        if self.rail == NULL:
            return
        if self.rail.wake_fd > 0:
            self.n_streams = 0
            self.close()
        if self.forks == bps_forks:
            free(self.rail.streams)
            free(self.rail.regions.items)
            pthread_mutex_destroy(&self.rail.streams_lock)
            pthread_mutex_destroy(&self.rail.regions.lock)
            free(self.rail)
