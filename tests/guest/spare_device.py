"""A device that no other test needs, and that may vanish: rxe9 on a link of its own."""
from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from typing import Any

NAME, NETDEV, PEER = "rxe9", "spare9", "spare8"
#: Takes the device away as somebody does who unloads its driver; rxe then waits for its users.
REMOVE_DRIVER = ("rdma", "link", "delete", NAME)
#: Takes the network interface below it away, as somebody does who pulls the card.
PULL_OUT = ("ip", "link", "delete", NETDEV)


#: Where ``ibv_context`` has cmd_fd, the descriptor by which it speaks to the kernel.
_CMD_FD = 264


def take_away(device: Any) -> None:
    """Let every call to the kernel for *device* (`Device` of either provider) end in EIO from now on.

    So it is when the driver of a card that is pulled out lets go of its users; rxe's waits for them. What answers here
    is a terminal that was hung up. What the process has mapped keeps the kernel's objects until it ends.
    """
    master, terminal = os.openpty()
    os.close(master)
    os.dup2(terminal, ctypes.c_int.from_address(device.handle + _CMD_FD).value, inheritable=False)
    os.close(terminal)


@contextlib.contextmanager
def spare_device(mtu: int = 1500, address: str | None = None) -> Iterator[str]:
    """Make the device, with *address* on the bridge of all others; yield its name. It may be gone afterwards."""
    commands = [f"ip link add {NETDEV} type veth peer name {PEER}", f"ip link set {PEER} mtu {mtu} up",
                f"ip link set {NETDEV} mtu {mtu} up"]
    if address is not None:
        commands += [f"ip link set {PEER} master br0", f"ip addr add {address} dev {NETDEV}"]
    commands.append(f"rdma link add {NAME} type rxe netdev {NETDEV}")
    try:
        for command in commands:
            subprocess.run(command.split(), check=True, timeout=60)
        yield NAME
    finally:
        for command in (REMOVE_DRIVER, PULL_OUT):
            subprocess.run(command, capture_output=True, timeout=60, check=False)
