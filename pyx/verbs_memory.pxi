# The class MemoryRegion of verbs.pyx.


cdef str _why_not_registered(int rc, uintptr_t address, size_t nbytes, attributes):
    """Say what a refused registration usually means."""
    if rc == ENOMEM or rc == EAGAIN:
        soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        if soft != resource.RLIM_INFINITY:
            return (f"this process may lock {soft} bytes, all its regions together: `ulimit -l unlimited`; for a "
                    "service LimitMEMLOCK=infinity; in a container --ulimit memlock=-1 or --cap-add=IPC_LOCK")
        return f"the device takes max_mr={attributes['max_mr']} regions, or the machine has no memory left to pin"
    if rc == errnos.EFAULT:
        return f"{nbytes} bytes at {address:#x} are not all mapped writable in this process"
    if rc == EINVAL and nbytes > attributes["max_mr_size"]:
        return f"the device takes max_mr_size={attributes['max_mr_size']} bytes at most"
    if rc == EPERM or rc == errnos.EOPNOTSUPP:
        return "the device cannot register this kind of memory (a file system with DAX, device memory)"
    return "the arguments do not suit the device"


cdef str _why_no_dmabuf(int rc, int fd, device):
    """Say what a refused registration of a dma-buf usually means."""
    if rc == errnos.ENOSYS:
        return "this libibverbs has no ibv_reg_dmabuf_mr: it came with rdma-core 34"
    if rc == errnos.EOPNOTSUPP or rc == errnos.EPROTONOSUPPORT:
        return (f"the driver of {device.name} cannot use another device's memory (mlx5 can from Linux 5.12 on, irdma, "
                "bnxt_re and efa from later ones; rxe and siw cannot)")
    if rc == errnos.EBADF or rc == EINVAL:
        return f"descriptor {fd} is no dma-buf, it is shorter, or offset and iova differ within a page"
    return "whoever exported the memory does not let this card reach it (see dmesg)"


cdef unsigned int _access(size_t nbytes, bint remote_write, bint remote_read, bint relaxed_ordering) except 0:
    if nbytes == 0:
        raise ValueError("a memory region needs nbytes > 0")
    return (BPS_ACCESS_LOCAL_WRITE | (BPS_ACCESS_REMOTE_WRITE if remote_write else 0)
            | (BPS_ACCESS_REMOTE_READ if remote_read else 0)
            | (BPS_ACCESS_RELAXED_ORDERING if relaxed_ordering else 0))


@cython.final
@cython.no_gc_clear
cdef class MemoryRegion(_VerbsObject):
    """Register the writable *buffer* with *domain* (``ibv_reg_mr``): pin it, and let the device read and write it.

    The buffer's export is held until `close`: the memory can neither be freed nor resized while the device may write
    into it. *remote_write*, *remote_read*: what a peer that knows the rkey may do. *relaxed_ordering*: let PCIe
    reorder the device's writes, where device and kernel can; only completions order them then.

    Raises
    ------
    OSError
        With the errno of ``ibv_reg_mr``; ENOMEM mostly means the limit of locked memory.
    BufferError
        If the buffer is read-only or not contiguous.
    ValueError
        If it is empty.
    """

    cdef Py_buffer view
    cdef object keep
    cdef bint exported
    cdef readonly ProtectionDomain domain
    cdef readonly uintptr_t address
    cdef readonly size_t nbytes
    cdef readonly uint32_t lkey, rkey

    def __init__(self, ProtectionDomain domain not None, buffer not None, *, bint remote_write=True,
                 bint remote_read=False, bint relaxed_ordering=False):
        if self.raw != NULL:
            raise ValueError("a MemoryRegion is initialised once")
        PyObject_GetBuffer(buffer, &self.view, PyBUF_SIMPLE | PyBUF_WRITABLE)
        self.exported = True
        try:
            self._register(domain, <uintptr_t>self.view.buf, self.view.len, remote_write, remote_read,
                           relaxed_ordering)
        except BaseException:
            PyBuffer_Release(&self.view)
            self.exported = False
            raise

    @classmethod
    def at(cls, ProtectionDomain domain not None, uintptr_t address, size_t nbytes, keep, *, bint remote_write=True,
           bint remote_read=False, bint relaxed_ordering=False):
        """Register *nbytes* at *address*, memory that *keep* keeps mapped; it is held until `close`."""
        cdef MemoryRegion self = cls.__new__(cls)
        self._register(domain, address, nbytes, remote_write, remote_read, relaxed_ordering)
        self.keep = keep
        return self

    @classmethod
    def of_dmabuf(cls, ProtectionDomain domain not None, int fd, size_t nbytes, uintptr_t iova, *, uint64_t offset=0,
                  bint remote_write=True, bint remote_read=False, bint relaxed_ordering=False):
        """Register *nbytes* from *offset* on of the dma-buf *fd*, memory of another device (``ibv_reg_dmabuf_mr``).

        *iova* is the address of its first byte for posts, and for peers that have the rkey; it has the same offset in a
        page as *offset*. The descriptor may be closed afterwards: the region keeps the memory.

        Raises `OSError` with the errno: EOPNOTSUPP where the driver cannot, ENOSYS where the library cannot.
        """
        cdef MemoryRegion self = cls.__new__(cls)
        self._register(domain, iova, nbytes, remote_write, remote_read, relaxed_ordering, True, fd, offset)
        return self

    cdef int _register(self, ProtectionDomain domain, uintptr_t address, size_t nbytes, bint remote_write,
                       bint remote_read, bint relaxed_ordering, bint is_dmabuf=False, int fd=-1,
                       uint64_t offset=0) except -1:
        """Register memory at *address*; *is_dmabuf*: that of *fd* from *offset* on, for which *address* stands."""
        cdef bps_ibv_pd *pd = <bps_ibv_pd *>domain._open()
        cdef bps_ibv_mr *mr
        cdef unsigned int access = _access(nbytes, remote_write, remote_read, relaxed_ordering)
        domain.children += 1  # nobody closes the domain during the call
        with nogil:
            if is_dmabuf:
                mr = bps_reg_dmabuf_mr(pd, offset, nbytes, address, fd, access)
            else:
                mr = bps_reg_mr(pd, <void *>address, nbytes, access)
        if mr == NULL:
            rc = errno
            domain.children -= 1
            if is_dmabuf:
                raise OSError(rc, f"ibv_reg_dmabuf_mr({domain.device.name}, offset={offset}, nbytes={nbytes}, "
                                  f"iova={address:#x}, fd={fd}, access={access:#x}): {_words(rc)}; "
                                  f"{_why_no_dmabuf(rc, fd, domain.device)}")
            why = _why_not_registered(rc, address, nbytes, domain.device._attributes())
            raise OSError(rc, f"ibv_reg_mr({domain.device.name}, address={address:#x}, nbytes={nbytes}, "
                              f"access={access:#x}): {_words(rc)}; {why}")
        self.raw, self.domain, self.forks = mr, domain, bps_forks
        self.address, self.nbytes, self.lkey, self.rkey = address, nbytes, mr.lkey, mr.rkey
        return 0

    cdef str _name(self):
        return f"memory region of {self.nbytes} bytes"

    def close(self):
        """Deregister, then let the memory go. Idempotent. A peer that writes on gets an access error."""
        cdef int rc = self._release()
        if rc:
            raise OSError(rc, f"ibv_dereg_mr({self.domain.device.name}, address={self.address:#x}, "
                              f"nbytes={self.nbytes}): {_words(rc)}; the memory stays held")

    cdef int _release(self) noexcept:
        cdef bps_ibv_mr *mr = <bps_ibv_mr *>self.raw
        cdef int rc = 0
        if mr == NULL:
            return 0
        if self.forks == bps_forks:
            self.raw = NULL  # before the GIL goes: nobody deregisters twice
            with nogil:
                rc = bps_verbs.dereg_mr(mr)
            if rc and not bps_device_is_gone(rc):
                self.raw = mr
                return rc
        self.raw = NULL
        self.domain.children -= 1
        self.keep = None
        if self.exported:
            self.exported = False
            PyBuffer_Release(&self.view)
        return 0

    def __dealloc__(self):
        self._release()
