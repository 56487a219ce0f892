"""What suites know of the guest that they run in (`agent.sh` makes it so): its devices, its hosts, their addresses.

A suite finds two devices in one namespace: both can be used from one process, and from any host. A host has a network,
a host name and a /dev/shm of its own; commands run there by `on`.
"""
from __future__ import annotations

from typing import NamedTuple

#: Row of each device's GID table that holds its IPv4 address (row 0 is the link-local IPv6 one); RoCE v2 both.
GID_INDEX = 1
#: RoCE's path MTU in bytes: what fits the interfaces' 4200.
MTU = 4096


class Host(NamedTuple):
    """One host: its number, its RDMA device with network interface and address, its own address for tcp."""

    number: int
    device: str
    netdev: str
    device_address: str
    address: str

    def on(self, *command: str) -> list[str]:
        """Return the command that runs *command* on this host."""
        return ["on", str(self.number), *command]


HOSTS = tuple(Host(i, f"rxe{i}", f"roce{i}", f"10.9.0.{i + 1}", f"10.9.1.{i + 1}") for i in range(2))
DEVICES = tuple(host.device for host in HOSTS)
