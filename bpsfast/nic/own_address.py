"""The address by which others reach this machine."""
from __future__ import annotations

import socket

import psutil

from ..orchestration.errors import ConfigError
from ..settings import Settings


def local_host(settings: Settings, scheduler_host: str) -> str:
    """Return this node's own address: node_host, or the interface's, or that of the route to the scheduler.

    Raises
    ------
    ConfigError
        If the interface does not exist or has no IPv4 address, or there is no route.
    """
    if settings.node_host:
        return settings.node_host
    if settings.interface:
        found = psutil.net_if_addrs()
        for entry in found.get(settings.interface, ()):
            if entry.family == socket.AF_INET:
                return entry.address
        raise ConfigError(f"interface={settings.interface!r} has no IPv4 address here; there are "
                          f"{', '.join(sorted(found))}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((scheduler_host, 9))  # sends nothing: only asks the routing table
        except OSError as exc:
            raise ConfigError(
                f"no route to the scheduler's host {scheduler_host!r} ({exc}): fix BPSFAST_SCHEDULER, or name this "
                "machine's own address with BPSFAST_NODE_HOST"
            ) from exc
        return probe.getsockname()[0]
