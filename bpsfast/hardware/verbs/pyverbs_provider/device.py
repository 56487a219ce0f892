"""RDMA devices, protection domains and registered memory over pyverbs; methods are those of `bpsfast.pyx.verbs`."""
from __future__ import annotations

import ctypes
import errno
import os
import resource
import select
import threading
from typing import Any

from ....pyx import verbs as native
from . import verbs_object
from .verbs_object import VerbsResource, errors_as, load, module, reason

_PORT_STATES = ("NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER")
_LINK_LAYERS = ("unspecified", "InfiniBand", "Ethernet")
_ABOUT_QUEUE_PAIRS = frozenset({1, 2, 3, 4, 5, 6, 7, 16})
_ABOUT_PORTS = frozenset({9, 10, 11, 12, 13, 17, 18})
_ATTRIBUTES = ("vendor_id", "vendor_part_id", "hw_ver", "max_mr_size", "page_size_cap", "max_mr", "max_pd", "max_qp",
               "max_qp_wr", "max_sge", "max_sge_rd", "max_cq", "max_cqe", "max_qp_rd_atom", "max_qp_init_rd_atom",
               "max_srq", "device_cap_flags", "local_ca_ack_delay", "phys_port_cnt")


class Device(VerbsResource):
    """An opened RDMA device."""

    _verb = "ibv_close_device"
    _kinds_of_children = "protection domains and completion queues"

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise TypeError(f"a device's name is a str, got {type(name).__name__}")
        load()
        if name not in native.devices():
            native.Device(name).close()  # raises with the reason, unless the device has appeared meanwhile
        with errors_as(lambda rc: f"ibv_open_device({name}): {reason(rc)}; may this process open /dev/infiniband?"):
            context = module("device").Context(name=name)
        self.name, self._name = name, f"device {name}"
        self.lock = threading.RLock()  # held for a post or a poll together with its account
        self._own(context)
        self._address, self._async_fd = verbs_object.context_pointer(context)
        os.set_blocking(self._async_fd, False)

    @property
    def handle(self) -> int:
        self._open()
        return self._address

    @property
    def attributes(self) -> dict[str, Any]:
        context = self._open()
        with errors_as(lambda rc: f"ibv_query_device({self.name}): {reason(rc)}"):
            found = context.query_device()
        named = {name: getattr(found, name) for name in _ATTRIBUTES}
        return {"fw_ver": found.fw_version, "node_guid": found.node_guid.to_bytes(8, "little").hex()} | named

    @property
    def completion_vectors(self) -> int:
        return self._open().num_comp_vectors

    def port(self, number: int = 1) -> dict[str, Any]:
        context = self._open()
        with errors_as(lambda rc: f"ibv_query_port({self.name}, port {number}): {reason(rc)}; the device has "
                              f"{self.attributes['phys_port_cnt']} ports, numbered from 1"):
            a = context.query_port(number)
        return {
            "state": _PORT_STATES[a.state] if a.state < len(_PORT_STATES) else str(a.state),
            "link_layer": _LINK_LAYERS[a.link_layer] if a.link_layer < len(_LINK_LAYERS) else str(a.link_layer),
            "max_mtu": 128 << a.max_mtu, "active_mtu": 128 << a.active_mtu, "max_msg_sz": a.max_msg_sz,
            "lid": a.lid, "sm_lid": a.sm_lid, "gid_count": a.gid_tbl_len, "pkey_count": a.pkey_tbl_len,
            "active_width": a.active_width, "active_speed": a.active_speed, "phys_state": a.phys_state,
        }

    def gid(self, port: int, index: int) -> bytes:
        context = self._open()
        count = self.port(port)["gid_count"]
        what = f"ibv_query_gid({self.name}, port {port}, index {index})"
        if not 0 <= index < count:
            raise OSError(errno.EINVAL, f"{what}: the port has {count} GIDs, numbered from 0")
        try:
            return bytes.fromhex(context.query_gid(port, index).gid.replace(":", ""))
        except module("pyverbs_error").PyverbsRDMAError as exc:
            # pyverbs reports neither the errno nor that a row is empty, for which some kernels return an error
            table = f"/sys/class/infiniband/{self.name}/ports/{port}/gids/{index}"
            try:
                with open(table) as file:
                    return bytes.fromhex(file.read().strip().replace(":", ""))
            except OSError:
                raise OSError(errno.EIO, f"{what}: {exc}, and {table} cannot be read") from exc

    def events(self, timeout_s: float | None = 0.0) -> list[tuple[str, str]]:
        context = self._open()
        found: list[tuple[str, str]] = []
        while readable(self._async_fd, 0.0 if found else timeout_s):
            with errors_as(lambda rc: f"ibv_get_async_event({self.name}): {reason(rc)}"):
                event = context.get_async_event()
            kind = event.event_type
            event.ack()
            about = "queue pair" if kind in _ABOUT_QUEUE_PAIRS else "port" if kind in _ABOUT_PORTS else \
                "completion queue" if kind == 0 else "device"
            found.append((_event_words(kind), about))
        return found


class ProtectionDomain(VerbsResource):
    """A protection domain: only memory and queue pairs of the same domain work together."""

    _verb = "ibv_dealloc_pd"
    _kinds_of_children = "memory regions and queue pairs"

    def __init__(self, device: Device) -> None:
        context = device._open()
        with errors_as(lambda rc: f"ibv_alloc_pd({device.name}): {reason(rc)}"):
            raw = module("pd").PD(context)
        self.device, self._name = device, f"protection domain of {device.name}"
        self._own(raw, device)

    @property
    def handle(self) -> int:
        return verbs_object.object_pointer(self._open(), self.device.handle)


def readable(fd: int, timeout_s: float | None) -> bool:
    """Whether *fd* became readable within *timeout_s* (None: no limit)."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))


def _event_words(kind: int) -> str:
    library = ctypes.CDLL("libibverbs.so.1")
    library.ibv_event_type_str.restype = ctypes.c_char_p
    return library.ibv_event_type_str(kind).decode()


_LOCAL_WRITE, _REMOTE_WRITE, _REMOTE_READ, _RELAXED_ORDERING = 1, 2, 4, 1 << 20


class MemoryRegion(VerbsResource):
    """Registered memory; a buffer's export is held until `close`."""

    _verb = "ibv_dereg_mr"

    def __init__(self, domain: ProtectionDomain, buffer: Any, *, remote_write: bool = True, remote_read: bool = False,
                 relaxed_ordering: bool = False) -> None:
        if buffer is None:
            raise TypeError("a memory region needs a buffer, got None")
        with memoryview(buffer) as view:
            if view.readonly or not view.c_contiguous:
                raise BufferError("a memory region needs a writable buffer in one piece, this one is "
                                  f"{'read-only' if view.readonly else 'not contiguous'}")
            nbytes = view.nbytes
        if nbytes == 0:
            raise ValueError("a memory region needs nbytes > 0")
        export = (ctypes.c_char * nbytes).from_buffer(buffer)
        self._register(domain, ctypes.addressof(export), nbytes, export, remote_write, remote_read, relaxed_ordering)

    @classmethod
    def at(cls, domain: ProtectionDomain, address: int, nbytes: int, keep: object, *, remote_write: bool = True,
           remote_read: bool = False, relaxed_ordering: bool = False) -> MemoryRegion:
        self = cls.__new__(cls)
        if nbytes == 0:
            raise ValueError("a memory region needs nbytes > 0")
        self._register(domain, address, nbytes, keep, remote_write, remote_read, relaxed_ordering)
        return self

    @classmethod
    def of_dmabuf(cls, domain: ProtectionDomain, fd: int, nbytes: int, iova: int, *, offset: int = 0,
                  remote_write: bool = True, remote_read: bool = False, relaxed_ordering: bool = False) -> MemoryRegion:
        """Raise: pyverbs registers only memory that it has exported from a DRM device itself, and chooses *iova*."""
        domain._open()
        raise OSError(errno.EOPNOTSUPP, f"verbs=pyverbs cannot register the dma-buf {fd} of {nbytes} bytes from "
                                        f"{offset} on at {iova:#x} with {domain.device.name}: its DmaBufMR takes no "
                                        "descriptor; set BPSFAST_VERBS=native")

    def _register(self, domain: ProtectionDomain, address: int, nbytes: int, keep: object, remote_write: bool,
                  remote_read: bool, relaxed_ordering: bool) -> None:
        raw = domain._open()
        access = _LOCAL_WRITE | (_REMOTE_WRITE if remote_write else 0) | (_REMOTE_READ if remote_read else 0) \
            | (_RELAXED_ORDERING if relaxed_ordering else 0)
        device = domain.device
        self._name = f"memory region of {nbytes} bytes"
        with errors_as(lambda rc: f"ibv_reg_mr({device.name}, address={address:#x}, nbytes={nbytes}, "
                                  f"access={access:#x}): {reason(rc)}; {_why(rc, address, nbytes, device.attributes)}"):
            region = module("mr").MR(raw, nbytes, access, address)
        self.domain, self.address, self.nbytes, self._keep = domain, address, nbytes, keep
        self.lkey, self.rkey = region.lkey, region.rkey
        self._own(region, domain)

    @property
    def handle(self) -> int:
        return verbs_object.object_pointer(self._open(), self.domain.device.handle)

    def _released(self) -> None:
        self._keep = None


def _why(rc: int, address: int, nbytes: int, attributes: dict[str, Any]) -> str:
    """Return the usual cause of a refused registration."""
    if rc in (errno.ENOMEM, errno.EAGAIN):
        soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        if soft != resource.RLIM_INFINITY:
            return (f"this process may lock {soft} bytes, all its regions together: `ulimit -l unlimited`; for a "
                    "service LimitMEMLOCK=infinity; in a container --ulimit memlock=-1 or --cap-add=IPC_LOCK")
        return f"the device takes max_mr={attributes['max_mr']} regions, or the machine has no memory left to pin"
    if rc == errno.EFAULT:
        return f"{nbytes} bytes at {address:#x} are not all mapped writable in this process"
    if rc == errno.EINVAL and nbytes > attributes["max_mr_size"]:
        return f"the device takes max_mr_size={attributes['max_mr_size']} bytes at most"
    if rc in (errno.EPERM, errno.EOPNOTSUPP):
        return "the device cannot register this kind of memory (a file system with DAX, device memory)"
    return "the arguments do not suit the device"
