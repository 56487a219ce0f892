"""Addresses of the C structs behind pyverbs's objects, and descriptors in them, which pyverbs keeps to itself.

Native code needs the addresses, and only with a descriptor can a wait have an end (pyverbs's own waits hold the GIL for
ever). An object of pyverbs holds its pointer among its other fields, so each of its words is tried: the one is it that
points to a struct with the values that pyverbs does tell. Layouts are libibverbs's stable ABI, see pyx/verbs_abi.h.
Memory is read through /proc/self/mem, where a wrong guess is an error instead of a crash.
"""
from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable
from typing import Any

_CONTEXT = struct.Struct("=Q256x3i")  # device, ops, cmd_fd, async_fd, num_comp_vectors
_CHANNEL = struct.Struct("=Qii")  # context, fd, refcnt
_CQ = struct.Struct("=3QIi")  # context, channel, cq_context, handle, cqe
_PD = struct.Struct("=QI")  # context, handle
_MR = struct.Struct("=4Q3I")  # context, pd, addr, length, handle, lkey, rkey
_QP = struct.Struct("=6QII")  # context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num


def context(raw: Any) -> tuple[int, int]:
    """Return the address of an ``ibv_context`` and its descriptor for asynchronous events."""
    address, found = _find(raw, _CONTEXT, lambda f: f[1] == raw.cmd_fd and f[3] == raw.num_comp_vectors)
    return address, found[2]


def domain(raw: Any, of_context: int) -> int:
    """Return the address of an ``ibv_pd``."""
    return _find(raw, _PD, lambda f: f == (of_context, raw.handle))[0]


def region(raw: Any, of_context: int) -> int:
    """Return the address of an ``ibv_mr``."""
    return _find(raw, _MR, lambda f: f[0] == of_context and f[3:] == (raw.length, raw.handle, raw.lkey, raw.rkey))[0]


def channel(raw: Any, of_context: int) -> tuple[int, int]:
    """Return the address of an ``ibv_comp_channel`` and its descriptor."""
    address, found = _find(raw, _CHANNEL, lambda f: f[0] == of_context and _is_channel(f[1]))
    return address, found[1]


def completion_queue(raw: Any, of_context: int) -> int:
    """Return the address of an ``ibv_cq``."""
    return _find(raw, _CQ, lambda f: f[0] == of_context and f[4] == raw.cqe)[0]


def queue_pair(raw: Any, of_context: int) -> int:
    """Return the address of an ``ibv_qp``."""
    return _find(raw, _QP, lambda f: f[0] == of_context and f[7] == raw.qp_num)[0]


def forget(raw: Any, address: int) -> None:
    """Let *raw* take its struct, at *address*, for destroyed: a pointer that is NULL."""
    for i, word in enumerate(_words(raw)):
        if i > 1 and word == address:
            ctypes.c_uint64.from_address(id(raw) + 8 * i).value = 0


def _words(raw: Any) -> tuple[int, ...]:
    """Return the words of an object; the first two are its count and type."""
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
