"""Who reaches whom: this machine's own address, and whether anybody answers at the scheduler's."""
from __future__ import annotations

import socket

from ..orchestration.errors import ConfigError
from ..settings import Settings
from .roles import format_address

_TIMEOUT_S = 2.0


def nobody_at(host: str, port: int) -> str:
    """Return a sentence, with a space before it, if no connection to *host*:*port* can be made; else nothing.

    Port 0: this process does not know it; nothing is said. Blocks for at most two seconds.
    """
    if port == 0:
        return ""
    try:
        with socket.create_connection((host, port), _TIMEOUT_S):
            return ""
    except OSError as exc:
        return (f" Nobody answers at the scheduler's address {format_address(host, port)} ({exc.strerror or exc}): "
                "check BPSFAST_SCHEDULER, and that the scheduler runs there.")


def local_host(settings: Settings, scheduler_host: str) -> str:
    """Return this machine's own address: node_host, or the interface's, or that of the route to the scheduler.

    Raises
    ------
    ConfigError
        If the interface does not exist or has no IPv4 address, or there is no route.
    """
    return chosen_host(settings) or require_source(scheduler_host)


def chosen_host(settings: Settings) -> str:
    """Return this machine's own address as the settings choose it: node_host, or the interface's; "" if neither is set.

    Raises
    ------
    ConfigError
        If the interface does not exist or has no IPv4 address.
    """
    if settings.node_host or not settings.interface:
        return settings.node_host
    import psutil

    found = psutil.net_if_addrs()
    for entry in found.get(settings.interface, ()):
        if entry.family == socket.AF_INET:
            return entry.address
    raise ConfigError(f"interface={settings.interface!r} has no IPv4 address here; there are "
                      f"{', '.join(sorted(found))}")


def source_towards(host: str) -> str | None:
    """Return this machine's address on the route to *host*, None if there is no route or no such name."""
    try:
        return _source(host) if host else None
    except OSError:
        return None


def require_source(host: str) -> str:
    """Return this machine's address on the route to the scheduler's *host*.

    Raises
    ------
    ConfigError
        If there is no route.
    """
    try:
        return _source(host)
    except OSError as exc:
        raise ConfigError(
            f"no route to the scheduler's host {host!r} ({exc}): fix BPSFAST_SCHEDULER, or name this "
            "machine's own address with BPSFAST_NODE_HOST"
        ) from exc


def _source(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: only asks the routing table
        return probe.getsockname()[0]
