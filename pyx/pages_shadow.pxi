# Shadow; included by pages.pyx.


@cython.final
cdef class Shadow:
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

    cdef readonly uintptr_t address
    cdef readonly size_t nbytes
    cdef readonly bint maps
    cdef readonly int exports
    cdef bint is_shut
    cdef int fd

    def __cinit__(self):
        self.fd = -1

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

    @property
    def closed(self):
        """Whether the addresses were given back."""
        return self.address == 0

    @property
    def writable(self):
        """True: a card writes there."""
        return True

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

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        if self.address == 0 or self.is_shut or not self.maps:
            raise BufferError("a device's memory is no buffer of this process")
        PyBuffer_FillInfo(buffer, self, <void *>self.address, <Py_ssize_t>self.nbytes, False, flags)
        self.exports += 1

    def __releasebuffer__(self, Py_buffer *buffer):
        self.exports -= 1

    def close(self):
        """Give the addresses back, and close the descriptor. Idempotent.

        Raises
        ------
        BufferError
            While exports live.
        """
        if self.exports:
            raise BufferError(f"shadow of {self.nbytes} bytes has {self.exports} live exports")
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
