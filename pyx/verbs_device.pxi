# The classes Device and ProtectionDomain of verbs.pyx.

#: What `Device.port` calls a port's state and link layer.
_PORT_STATES = ("NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER")
_LINK_LAYERS = ("unspecified", "InfiniBand", "Ethernet")
#: What an asynchronous event (enum ibv_event_type) is about; the others concern the device, or what we never make.
_ABOUT_COMPLETION_QUEUES = 0
_ABOUT_QUEUE_PAIRS = frozenset({1, 2, 3, 4, 5, 6, 7, 16})
_ABOUT_PORTS = frozenset({9, 10, 11, 12, 13, 17, 18})


def devices():
    """Return the names of the devices that libibverbs can open, in its order; none where the kernel has no RDMA."""
    cdef int n = 0
    cdef bps_ibv_device **found
    load()
    with nogil:
        found = bps_verbs.get_device_list(&n)
    if found == NULL:
        if errno == ENOSYS or errno == ENOENT:
            return []
        raise OSError(errno, f"ibv_get_device_list: {_words(errno)}")
    names = [found[i].name.decode() for i in range(n)]
    bps_verbs.free_device_list(found)
    return names


cdef str _why_no_device(str name, list known):
    """Say why libibverbs does not list *name*."""
    kernel = os.path.join(os.environ.get("SYSFS_PATH") or "/sys", "class/infiniband")
    try:
        seen = sorted(os.listdir(kernel))
    except OSError:
        return f"this kernel has no RDMA ({kernel} does not exist: modprobe ib_uverbs, or load the NIC's driver)"
    if name in seen:
        return (f"the kernel has it ({kernel}/{name}), but libibverbs has no provider for it or no /dev/infiniband: "
                "install ibverbs-providers, modprobe ib_uverbs; in a container pass --device=/dev/infiniband")
    if known:
        return "libibverbs has " + ", ".join(known)
    return f"libibverbs has none, the kernel has {', '.join(seen) or 'none'}"


@cython.final
cdef class Device(_VerbsObject):
    """Open the RDMA device *name* (``ibv_open_device``).

    Raises `OSError`: ENODEV when there is no such device; the errno of the open (EACCES, EPERM: /dev/infiniband)
    otherwise.
    """

    cdef int users  # threads inside `events`
    cdef readonly str name
    cdef readonly int children

    def __init__(self, str name not None):
        cdef int n = 0, i, rc = 0
        cdef bps_ibv_device **found
        cdef bps_ibv_device *mine = NULL
        if self.raw != NULL:
            raise ValueError("a Device is initialised once")
        load()
        with nogil:
            found = bps_verbs.get_device_list(&n)
        known = [found[i].name.decode() for i in range(n)] if found != NULL else []
        if name not in known:
            if found != NULL:
                bps_verbs.free_device_list(found)
            raise OSError(ENODEV, f"no RDMA device {name!r}: {_why_no_device(name, known)}")
        mine = found[<int>known.index(name)]
        path = f"/dev/infiniband/{mine.dev_name.decode()}"
        with nogil:
            self.raw = bps_verbs.open_device(mine)
            rc = errno
            bps_verbs.free_device_list(found)
        if self.raw == NULL:
            raise OSError(rc, f"ibv_open_device({name}): {_words(rc)}; may this process open {path}? In a container: "
                              f"--device={path}")
        self.name, self.forks = name, bps_forks
        bps_unblock((<bps_ibv_context *>self.raw).async_fd)

    cdef str _name(self):
        return f"device {self.name}"

    @property
    def attributes(self):
        """The device's limits (``ibv_query_device``), under their C names."""
        return self._attributes()

    cdef dict _attributes(self):
        cdef bps_ibv_context *context = <bps_ibv_context *>self._open()
        cdef bps_ibv_device_attr a
        cdef int rc
        memset(&a, 0, sizeof(a))
        with nogil:
            rc = bps_verbs.query_device(context, &a)
        if rc:
            raise OSError(rc, f"ibv_query_device({self.name}): {_words(rc)}")
        return {
            "fw_ver": a.fw_ver.decode(), "node_guid": PyBytes_FromStringAndSize(<char *>&a.node_guid, 8).hex(),
            "vendor_id": a.vendor_id, "vendor_part_id": a.vendor_part_id, "hw_ver": a.hw_ver,
            "max_mr_size": a.max_mr_size, "page_size_cap": a.page_size_cap, "max_mr": a.max_mr, "max_pd": a.max_pd,
            "max_qp": a.max_qp, "max_qp_wr": a.max_qp_wr, "max_sge": a.max_sge, "max_sge_rd": a.max_sge_rd,
            "max_cq": a.max_cq, "max_cqe": a.max_cqe, "max_qp_rd_atom": a.max_qp_rd_atom,
            "max_qp_init_rd_atom": a.max_qp_init_rd_atom, "max_srq": a.max_srq,
            "device_cap_flags": a.device_cap_flags, "local_ca_ack_delay": a.local_ca_ack_delay,
            "phys_port_cnt": a.phys_port_cnt,
        }

    @property
    def completion_vectors(self):
        """How many completion vectors the device has: interrupts that its completion queues are spread over."""
        return (<bps_ibv_context *>self._open()).num_comp_vectors

    def port(self, uint8_t number=1):
        """Return a port's state (``ibv_query_port``); MTUs and the largest message in bytes."""
        cdef bps_ibv_context *context = <bps_ibv_context *>self._open()
        cdef bps_ibv_port_attr a
        cdef int rc
        memset(&a, 0, sizeof(a))
        with nogil:
            rc = bps_verbs.query_port(context, number, &a)
        if rc:
            raise OSError(rc, f"ibv_query_port({self.name}, port {number}): {_words(rc)}; the device has "
                              f"{self._attributes()['phys_port_cnt']} ports, numbered from 1")
        return {
            "state": _PORT_STATES[a.state] if 0 <= a.state < 6 else str(a.state),
            "link_layer": _LINK_LAYERS[a.link_layer] if a.link_layer < 3 else str(a.link_layer),
            "max_mtu": 128 << a.max_mtu, "active_mtu": 128 << a.active_mtu, "max_msg_sz": a.max_msg_sz,
            "lid": a.lid, "sm_lid": a.sm_lid, "gid_count": a.gid_tbl_len, "pkey_count": a.pkey_tbl_len,
            "active_width": a.active_width, "active_speed": a.active_speed, "phys_state": a.phys_state,
        }

    def gid(self, uint8_t port, int index):
        """Return the 16 bytes of one GID (``ibv_query_gid``), all zero for an empty place in the table."""
        cdef bps_ibv_context *context = <bps_ibv_context *>self._open()
        cdef bps_ibv_gid gid
        cdef int rc
        count = self.port(port)["gid_count"]
        if not 0 <= index < count:
            raise OSError(EINVAL, f"ibv_query_gid({self.name}, port {port}, index {index}): the port has {count} GIDs, "
                                  "numbered from 0")
        memset(&gid, 0, sizeof(gid))
        with nogil:
            rc = bps_verbs.query_gid(context, port, index, &gid)
            if rc:
                rc = errno
        # rxe and others give ENODATA, and some kernels EAGAIN, for a place that holds none
        if rc and rc != errnos.ENODATA and rc != EAGAIN:
            raise OSError(rc, f"ibv_query_gid({self.name}, port {port}, index {index}): {_words(rc)}")
        return PyBytes_FromStringAndSize(<char *>gid.raw, 16)

    def events(self, timeout_s=0.0):
        """Return what the device reported by itself (``ibv_get_async_event``), as (event in words, what it is about).

        Waits up to *timeout_s* seconds (None: for ever) for the first; an empty list when there is none.
        """
        cdef bps_ibv_context *context = <bps_ibv_context *>self._open()
        cdef bps_ibv_async_event event
        cdef int rc
        found = []
        self.users += 1
        try:
            if not _await(context.async_fd, timeout_s):
                return found
        finally:
            self.users -= 1
        while True:
            with nogil:
                rc = bps_verbs.get_async_event(context, &event)
            if rc:
                return found
            words = bps_verbs.event_type_str(event.event_type).decode()
            about = "device"
            if event.event_type in _ABOUT_QUEUE_PAIRS:
                about = f"queue pair {event.element.qp.qp_num}"
            elif event.event_type in _ABOUT_PORTS:
                about = f"port {event.element.port_num}"
            elif event.event_type == _ABOUT_COMPLETION_QUEUES:
                about = "completion queue"
            bps_verbs.ack_async_event(&event)
            found.append((words, about))

    def close(self):
        """Close the device. Idempotent.

        Raises `BufferError` while protection domains or completion queues of it are open.
        """
        if self.children and self._is_ours():
            raise BufferError(f"device {self.name} has {self.children} open protection domains and completion queues")
        if self.users and self._is_ours():
            raise BufferError(f"device {self.name}: another thread is in events")
        cdef int rc = self._release()
        if rc and not bps_device_is_gone(rc):
            raise OSError(rc, f"ibv_close_device({self.name}): {_words(rc)}")

    cdef int _release(self) noexcept:
        cdef bps_ibv_context *context = <bps_ibv_context *>self.raw
        cdef int rc = 0
        self.raw = NULL
        if context != NULL and self.forks == bps_forks:
            with nogil:
                rc = bps_verbs.close_device(context)
        return rc

    def __dealloc__(self):
        self._release()


cdef bint _await(int fd, timeout_s) except -1:
    """Whether *fd* became readable within *timeout_s* seconds (None: for ever); signals get their turn."""
    cdef int64_t left_ns = -1 if timeout_s is None else <int64_t>(max(0.0, timeout_s) * 1e9)
    cdef int64_t end_ns = 0 if timeout_s is None else <int64_t>bps_now_ns() + left_ns
    cdef int rc
    while True:
        with nogil:
            rc = bps_await_fd(fd, left_ns)
        if rc >= 0:
            return rc > 0
        if rc != -EINTR:
            raise OSError(-rc, f"ppoll(fd={fd}): {_words(-rc)}")
        PyErr_CheckSignals()
        if timeout_s is not None:
            left_ns = max(0, end_ns - <int64_t>bps_now_ns())


@cython.final
@cython.no_gc_clear
cdef class ProtectionDomain(_VerbsObject):
    """Allocate a protection domain of *device* (``ibv_alloc_pd``): only what shares it works together."""

    cdef readonly Device device
    cdef readonly int children

    def __init__(self, Device device not None):
        if self.raw != NULL:
            raise ValueError("a ProtectionDomain is initialised once")
        cdef bps_ibv_context *context = <bps_ibv_context *>device._open()
        cdef bps_ibv_pd *pd
        device.children += 1  # nobody closes the device during the call
        with nogil:
            pd = bps_verbs.alloc_pd(context)
        if pd == NULL:
            device.children -= 1
            raise OSError(errno, f"ibv_alloc_pd({device.name}): {_words(errno)}")
        self.raw, self.device, self.forks = pd, device, bps_forks

    cdef str _name(self):
        return f"protection domain of {self.device.name if self.device else 'no device'}"

    def close(self):
        """Free the domain. Idempotent.

        Raises `BufferError` while memory regions or queue pairs of it are open.
        """
        if self.children and self._is_ours():
            raise BufferError(f"protection domain of {self.device.name} has {self.children} open memory regions and "
                              "queue pairs")
        cdef int rc = self._release()
        if rc:
            raise OSError(rc, f"ibv_dealloc_pd({self.device.name}): {_words(rc)}")

    cdef int _release(self) noexcept:
        cdef bps_ibv_pd *pd = <bps_ibv_pd *>self.raw
        cdef int rc = 0
        if pd == NULL:
            return 0
        self.raw = NULL
        if self.forks == bps_forks:
            with nogil:
                rc = bps_verbs.dealloc_pd(pd)
            if rc and not bps_device_is_gone(rc):
                self.raw = pd
                return rc
        self.device.children -= 1
        return 0

    def __dealloc__(self):
        self._release()
