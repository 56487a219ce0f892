"""Loads pyverbs and finds the C pointers that its objects hide; has the base class of our RDMA objects over pyverbs.

Native code needs the addresses of the C structs behind pyverbs's objects, and waits with a deadline need descriptors in
them. An object of pyverbs holds its pointer among its other fields, so each word of the object is tried: it is the one
that points to a struct with the values that pyverbs reports. Layouts are libibverbs's stable ABI (pyx/verbs_abi.h).
Memory is read through /proc/self/mem, where a wrong guess is an error instead of a crash.
"""
from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import importlib.machinery
import importlib.util
import os
import struct
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ....pyx import verbs as native
from ....pyx.verbs import VerbsMissing

#: Where Debian and Ubuntu install python3-pyverbs, for the system's Python; virtual environments do not look there.
SYSTEM_FOLDER = Path("/usr/lib/python3/dist-packages")


def load() -> None:
    """Import pyverbs of this interpreter, else Debian's if it was built for this version of Python. Idempotent.

    Only the package pyverbs of Debian's folder is used. Raises `VerbsMissing`, whose text says what to install.
    """
    native.load()  # prepares for forks, so it must precede any registration
    if "pyverbs" in sys.modules:
        return
    if importlib.util.find_spec("pyverbs") is None:
        _use_system_package()
    try:
        module("device")
    except ImportError as exc:
        sys.modules.pop("pyverbs", None)
        raise VerbsMissing(errno.ENOENT, f"pyverbs cannot be imported: {exc}") from exc


def _use_system_package() -> None:
    package = SYSTEM_FOLDER / "pyverbs"
    python = f"Python {sys.version_info.major}.{sys.version_info.minor} at {sys.executable}"
    built = [path.name for path in package.glob("device.*")]
    if not built:
        raise VerbsMissing(errno.ENOENT, f"verbs=pyverbs: no pyverbs for {python}: `pip install bpsfast[pyverbs]` "
                                         "(needs rdma-core's headers), or Debian's python3-pyverbs with the system's "
                                         "own Python; verbs=native needs neither")
    if not any(f"device{suffix}" in built for suffix in importlib.machinery.EXTENSION_SUFFIXES):
        raise VerbsMissing(errno.ENOEXEC, f"verbs=pyverbs: python3-pyverbs is for another version ({built[0]}) than "
                                          f"{python}: run with /usr/bin/python3, or `pip install bpsfast[pyverbs]` "
                                          "(needs rdma-core's headers); verbs=native needs neither")
    spec = importlib.util.spec_from_file_location("pyverbs", package / "__init__.py",
                                                  submodule_search_locations=[str(package)])
    assert spec is not None and spec.loader is not None
    sys.modules["pyverbs"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["pyverbs"])


def module(name: str) -> ModuleType:
    """Return pyverbs's module *name*."""
    return importlib.import_module(f"pyverbs.{name}")


def version() -> str:
    """Return what is loaded, as "pyverbs at PATH over libibverbs 44.0 at PATH"."""
    load()
    return f"pyverbs at {Path(sys.modules['pyverbs'].__file__ or '').parent} over {native.version()}"


def fork_safety() -> str:
    """As `bpsfast.pyx.verbs.fork_safety`; both providers use the same libibverbs."""
    load()
    return native.fork_safety()


def devices() -> list[str]:
    """Return the names of the devices that libibverbs can open, in its order; none if the kernel has no RDMA."""
    load()
    try:
        return [device.name.decode() for device in module("device").get_device_list()]
    except module("pyverbs_error").PyverbsError:
        return native.devices()  # pyverbs gives no reason; a kernel without RDMA is not an error


def reason(rc: int) -> str:
    """Return an errno's name and meaning."""
    return f"{errno.errorcode.get(rc, rc)}: {os.strerror(rc)}"


@contextlib.contextmanager
def errors_as(text: Callable[[int], str]) -> Iterator[None]:
    """Raise pyverbs's errors as OSError with their errno (EIO if it has none) and *text* of the errno."""
    pyverbs_error = module("pyverbs_error")
    try:
        yield
    except pyverbs_error.PyverbsError as exc:
        rc = getattr(exc, "error_code", -1)
        rc = abs(rc) if rc not in (-1, 0) else errno.EIO
        raise OSError(rc, text(rc)) from exc


_CONTEXT = struct.Struct("=Q256x3i")  # device, ops, cmd_fd, async_fd, num_comp_vectors
_CHANNEL = struct.Struct("=Qii")  # context, fd, refcnt
#: pyverbs's class -> the fields of its struct, the context first, and pyverbs's names of the last of them
_OBJECTS = {
    "CQ": ("=3QIi", ("cqe",)),  # context, channel, cq_context, handle, cqe
    "PD": ("=QI", ("handle",)),  # context, handle
    "MR": ("=4Q3I", ("length", "handle", "lkey", "rkey")),  # context, pd, addr, length, handle, lkey, rkey
    "QP": ("=6QII", ("qp_num",)),  # context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num
}


def context_pointer(raw: Any) -> tuple[int, int]:
    """Return the address of an ``ibv_context`` and its descriptor of asynchronous events."""
    address, found = _find(raw, _CONTEXT, lambda f: f[1] == raw.cmd_fd and f[3] == raw.num_comp_vectors)
    return address, found[2]


def object_pointer(raw: Any, of_context: int) -> int:
    """Return the address of an ``ibv_cq``, ``ibv_pd``, ``ibv_mr`` or ``ibv_qp``."""
    fields, names = _OBJECTS[type(raw).__name__]
    last = tuple(getattr(raw, name) for name in names)
    return _find(raw, struct.Struct(fields), lambda f: f[0] == of_context and f[-len(last):] == last)[0]


def channel_pointer(raw: Any, of_context: int) -> tuple[int, int]:
    """Return the address of an ``ibv_comp_channel`` and its descriptor."""
    address, found = _find(raw, _CHANNEL, lambda f: f[0] == of_context and _is_channel(f[1]))
    return address, found[1]


def clear_pointer(raw: Any, address: int) -> None:
    """Set the pointer *address* in *raw* to NULL, which means destroyed to pyverbs."""
    for i, word in enumerate(_words(raw)):
        if i > 1 and word == address:
            ctypes.c_uint64.from_address(id(raw) + 8 * i).value = 0


def _words(raw: Any) -> tuple[int, ...]:
    """Return the 8-byte words of an object; the first two are its reference count and type."""
    n_words = type(raw).__basicsize__ // 8
    return struct.unpack(f"{n_words}Q", ctypes.string_at(id(raw), 8 * n_words))


def _find(raw: Any, layout: struct.Struct, is_it: Callable[[tuple[int, ...]], bool]) -> tuple[int, tuple[int, ...]]:
    memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for word in _words(raw)[2:]:
            if word % 8 == 0 and 4096 <= word < 1 << 62:
                try:
                    content = os.pread(memory, layout.size, word)
                except OSError:
                    continue
                if len(content) == layout.size and is_it(fields := layout.unpack(content)):
                    return word, fields
    finally:
        os.close(memory)
    raise OSError(errno.ENOTSUP, f"this pyverbs holds its {type(raw).__name__} in a way bpsfast does not know: use "
                                 "verbs=native, and please report pyverbs's version")


def _is_channel(fd: int) -> bool:
    try:
        return "infinibandevent" in os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False


#: The kernel's answers to all calls once the device and all its objects are gone.
_DEVICE_GONE = frozenset({errno.EIO, errno.ENODEV})

_forks = 0
_live: weakref.WeakSet[VerbsResource] = weakref.WeakSet()


def _forked() -> None:
    """In a forked child: keep pyverbs from destroying the parent's resources with its own objects."""
    global _forks
    _forks += 1
    for each in list(_live):
        each._leak_in_child()


os.register_at_fork(after_in_child=_forked)


class VerbsResource:
    """Owns one object of pyverbs, which a subclass sets by `_own`; `_name` is its name in errors.

    Parents stay open while they have children; `close` is idempotent.

    Raises ValueError when used after `close`, or in a process forked from the one that made it.
    """

    _raw: Any = None
    _name = "object"
    _verb = "close"
    _kinds_of_children = "children"
    children = 0
    handle: Any
    _dropped = False  # only its children refer to it

    def _own(self, raw: Any, *parents: VerbsResource) -> None:
        self._raw, self._parents, self._made_in = raw, parents, _forks
        for parent in parents:
            parent.children += 1
        _live.add(self)

    def _open(self) -> Any:
        """Return pyverbs's object."""
        if self._raw is None:
            raise ValueError(f"{self._name} is closed")
        if not self._is_ours:
            raise ValueError(f"{self._name} belongs to the process that this one (pid {os.getpid()}) was forked from: "
                             "open the device again here")
        return self._raw

    @property
    def _is_ours(self) -> bool:
        return self._made_in == _forks

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._raw is None

    def close(self) -> None:
        """Release it. Idempotent.

        Raises `BufferError` while what belongs to it is open, or another thread is in a call of it.
        """
        if self._raw is None:
            return
        if self._is_ours:
            if busy := self._busy():
                raise BufferError(f"{self._name} {busy}")
            try:
                with errors_as(lambda rc: f"{self._verb}({self._name}): {reason(rc)}"):
                    self._raw.close()
            except OSError as exc:
                if exc.errno not in _DEVICE_GONE:
                    raise
                self._abandon()
        self._raw = None
        for parent in self._parents:
            parent.children -= 1
        self._released()
        for parent in self._parents:
            if parent._dropped:
                with contextlib.suppress(Exception):
                    parent.close()

    def _busy(self) -> str:
        return f"has {self.children} open {self._kinds_of_children}" if self.children else ""

    def _abandon(self) -> None:
        """Abandon the object without freeing it, which is no longer possible, and keep pyverbs from trying."""
        clear_pointer(self._raw, self.handle)

    def _released(self) -> None:
        """Release what the subclass held for the device."""

    def _leak_in_child(self) -> None:
        self._add_reference(self._raw)

    @staticmethod
    def _add_reference(raw: Any) -> None:
        if raw is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(raw))

    def __del__(self) -> None:
        self._dropped = True  # objects are collected in any order: the last child closes its parent
        with contextlib.suppress(Exception):
            self.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
