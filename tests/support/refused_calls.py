"""Makes system calls of this process fail with EPERM, like docker's seccomp profile."""
from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

#: Machine -> AUDIT_ARCH_*, and numbers of the calls.
_MACHINES = {
    "x86_64": (0xC000003E, {"mbind": 237, "sched_setaffinity": 203}),
    "aarch64": (0xC00000B7, {"mbind": 235, "sched_setaffinity": 122}),
}
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def can_refuse() -> bool:
    """Return whether this machine's calls are known."""
    return platform.machine() in _MACHINES


def refuse(*calls: str) -> None:
    """Make *calls* fail with EPERM in this thread, and in all threads and processes that it starts later."""
    if not calls:
        return
    arch, numbers = _MACHINES[platform.machine()]
    steps = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, 0)]
    for call in calls:
        steps += [(_EQUAL, 0, 1, numbers[call]), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    program = _Program(len(steps), b"".join(struct.pack("HBBI", *step) for step in steps))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
                      (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program))):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), f"prctl({arguments[0]}): {os.strerror(ctypes.get_errno())}")
