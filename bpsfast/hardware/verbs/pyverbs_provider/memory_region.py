"""MemoryRegion."""
from __future__ import annotations

import ctypes
import errno
import resource
from typing import Any

from . import pointers
from .device import ProtectionDomain
from .library import module, told, words
from .resource import VerbsResource

_LOCAL_WRITE, _REMOTE_WRITE, _REMOTE_READ, _RELAXED_ORDERING = 1, 2, 4, 1 << 20


class MemoryRegion(VerbsResource):
    """Memory that the device may read and write; a buffer's export is held until `close`."""

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
        """Register *nbytes* at *address*, memory that *keep* keeps mapped; it is held until `close`."""
        self = cls.__new__(cls)
        if nbytes == 0:
            raise ValueError("a memory region needs nbytes > 0")
        self._register(domain, address, nbytes, keep, remote_write, remote_read, relaxed_ordering)
        return self

    @classmethod
    def of_dmabuf(cls, domain: ProtectionDomain, fd: int, nbytes: int, iova: int, *, offset: int = 0,
                  remote_write: bool = True, remote_read: bool = False, relaxed_ordering: bool = False) -> MemoryRegion:
        """Refuse: pyverbs registers only what it has exported from a DRM device itself, and chooses *iova*."""
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
        with words(lambda rc: f"ibv_reg_mr({device.name}, address={address:#x}, nbytes={nbytes}, access={access:#x}): "
                              f"{told(rc)}; {_why(rc, address, nbytes, device.attributes)}"):
            region = module("mr").MR(raw, nbytes, access, address)
        self.domain, self.address, self.nbytes, self._keep = domain, address, nbytes, keep
        self.lkey, self.rkey = region.lkey, region.rkey
        self._own(region, domain)

    @property
    def handle(self) -> int:
        """Address of the ``ibv_mr``."""
        return pointers.region(self._open(), self.domain.device.handle)

    def _released(self) -> None:
        self._keep = None


def _why(rc: int, address: int, nbytes: int, attributes: dict[str, Any]) -> str:
    """Say what a refused registration usually means."""
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
