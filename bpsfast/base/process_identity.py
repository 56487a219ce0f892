"""What tells machines apart: the boot of their kernel; and the network that a process of one sees."""
from __future__ import annotations

import os
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return what all processes of this machine have in common, in whatever container; changes when it boots.

    The machine's name, where the kernel does not tell.
    """
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return os.uname().nodename


def network_id() -> str:
    """Return what the processes have in common that see the same network devices and local sockets."""
    return f"{boot_id()} {os.stat('/proc/self/ns/net').st_ino}"
