"""Device and ProtectionDomain."""
from __future__ import annotations

import ctypes
import errno
import os
import select
import threading
from typing import Any

from ....pyx import verbs as native
from . import pointers
from .library import load, module, told, words
from .resource import VerbsResource

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

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise TypeError(f"a device's name is a str, got {type(name).__name__}")
        load()
        if name not in native.devices():
            native.Device(name).close()  # raises, and says why the device is not there; if it came meanwhile, go on
        with words(lambda rc: f"ibv_open_device({name}): {told(rc)}; may this process open /dev/infiniband?"):
            context = module("device").Context(name=name)
        self.name, self._name = name, f"device {name}"
        self.lock = threading.RLock()  # spans a post, or a poll, and its account
        self._own(context)
        self._address, self._async_fd = pointers.context(context)
        os.set_blocking(self._async_fd, False)

    @property
    def handle(self) -> int:
        """Address of the ``ibv_context``."""
        self._open()
        return self._address

    @property
    def attributes(self) -> dict[str, Any]:
        """The device's limits (``ibv_query_device``), under their C names."""
        context = self._open()
        with words(lambda rc: f"ibv_query_device({self.name}): {told(rc)}"):
            found = context.query_device()
        named = {name: getattr(found, name) for name in _ATTRIBUTES}
        return {"fw_ver": found.fw_version, "node_guid": found.node_guid.to_bytes(8, "little").hex()} | named

    def port(self, number: int = 1) -> dict[str, Any]:
        """Return a port's state (``ibv_query_port``); MTUs and the largest message in bytes."""
        context = self._open()
        with words(lambda rc: f"ibv_query_port({self.name}, port {number}): {told(rc)}; the device has "
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
        """Return the 16 bytes of one GID (``ibv_query_gid``), all zero for an empty place in the table."""
        context = self._open()
        count = self.port(port)["gid_count"]
        what = f"ibv_query_gid({self.name}, port {port}, index {index})"
        if not 0 <= index < count:
            raise OSError(errno.EINVAL, f"{what}: the port has {count} GIDs, numbered from 0")
        try:
            return bytes.fromhex(context.query_gid(port, index).gid.replace(":", ""))
        except module("pyverbs_error").PyverbsRDMAError as exc:
            # It does not tell the errno, nor that a place is empty; some kernels say so by an error.
            table = f"/sys/class/infiniband/{self.name}/ports/{port}/gids/{index}"
            try:
                with open(table) as file:
                    return bytes.fromhex(file.read().strip().replace(":", ""))
            except OSError:
                raise OSError(errno.EIO, f"{what}: {exc}, and {table} cannot be read") from exc

    def events(self, timeout_s: float | None = 0.0) -> list[tuple[str, str]]:
        """Return what the device reported by itself, as (event in words, what kind of object it is about)."""
        context = self._open()
        found: list[tuple[str, str]] = []
        while readable(self._async_fd, 0.0 if found else timeout_s):
            with words(lambda rc: f"ibv_get_async_event({self.name}): {told(rc)}"):
                event = context.get_async_event()
            kind = event.event_type
            event.ack()
            about = "queue pair" if kind in _ABOUT_QUEUE_PAIRS else "port" if kind in _ABOUT_PORTS else \
                "completion queue" if kind == 0 else "device"
            found.append((_event_words(kind), about))
        return found

    def _busy(self) -> str:
        return f"has {self.children} open protection domains and completion queues" if self.children else ""


class ProtectionDomain(VerbsResource):
    """What memory and queue pairs of a device belong to: only what shares it works together."""

    _verb = "ibv_dealloc_pd"

    def __init__(self, device: Device) -> None:
        context = device._open()
        with words(lambda rc: f"ibv_alloc_pd({device.name}): {told(rc)}"):
            raw = module("pd").PD(context)
        self.device, self._name = device, f"protection domain of {device.name}"
        self._own(raw, device)

    @property
    def handle(self) -> int:
        """Address of the ``ibv_pd``."""
        return pointers.domain(self._open(), self.device.handle)

    def _busy(self) -> str:
        return f"has {self.children} open memory regions and queue pairs" if self.children else ""


def readable(fd: int, timeout_s: float | None) -> bool:
    """Whether *fd* became readable within *timeout_s* seconds (None: for ever)."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))


def _event_words(kind: int) -> str:
    library = ctypes.CDLL("libibverbs.so.1")
    library.ibv_event_type_str.restype = ctypes.c_char_p
    return library.ibv_event_type_str(kind).decode()
