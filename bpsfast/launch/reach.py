"""Who reaches whom: this machine's own address, and whether anybody answers at the scheduler's."""
from __future__ import annotations

import logging
import socket
import time

from ..orchestration.errors import ConfigError, StallError
from ..orchestration.names import resolve
from ..settings import Settings
from .place import format_address, is_loopback

_log = logging.getLogger("bpsfast.reach")
_TIMEOUT_S = 2.0
_AGAIN_S = 0.5
#: An address of documentation (RFC 5737): the route to it is the default route, and nothing is sent there.
_ANYWHERE = "192.0.2.1"


def nobody_at(host: str, port: int) -> str:
    """Return a sentence, with a space before it, if no connection to *host*:*port* can be made; else nothing.

    Port 0: this process does not know it; nothing is said. Blocks for at most four seconds.
    """
    if port == 0:
        return ""
    try:
        with socket.create_connection((resolve(host, _TIMEOUT_S), port), _TIMEOUT_S):
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
    StallError
        If the scheduler's name was not resolved within `start_timeout_s`.
    """
    return chosen_host(settings) or source_of_job(scheduler_host, settings.start_timeout_s)


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
    """Return this machine's address on the route to *host*, None if there is no route or no such name.

    Blocks for at most two seconds.
    """
    try:
        return _source(resolve(host, _TIMEOUT_S)) if host else None
    except OSError:
        return None


def outward_host() -> str:
    """Return the address of the default route, else of the first interface that is up; "" if there is only loopback."""
    source = source_towards(_ANYWHERE)
    if source and not is_loopback(source):
        return source
    import psutil

    states = psutil.net_if_stats()
    return next((entry.address for name, entries in psutil.net_if_addrs().items() if states[name].isup
                 for entry in entries if entry.family == socket.AF_INET and not is_loopback(entry.address)), "")


def source_of_job(host: str, timeout_s: float) -> str:
    """Return this machine's address on the route to the scheduler's *host*, whose name may not be known at once.

    On the scheduler's own machine its name may mean the loopback (Debian's /etc/hosts): then it is `outward_host`.

    Raises
    ------
    StallError
        If the name was not resolved within *timeout_s*: that of a headless service is there when its pod is.
    ConfigError
        If there is no route.
    """
    address = _resolve(host, timeout_s)
    try:
        source = _source(address)
    except OSError as exc:
        raise ConfigError(
            f"no route to the scheduler's host {host!r} ({exc}): fix BPSFAST_SCHEDULER, or name this "
            "machine's own address with BPSFAST_NODE_HOST"
        ) from exc
    return outward_host() or source if is_loopback(source) and not is_loopback(host) else source


def _resolve(host: str, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return resolve(host, deadline - time.monotonic())
        except OSError as exc:
            why = exc.strerror or exc
            if time.monotonic() >= deadline:
                raise StallError(
                    f"the name {host!r} in the scheduler's address was not resolved within {timeout_s:g} s "
                    f"({why}): check it with `getent hosts`, or give an address in BPSFAST_SCHEDULER") from exc
            _log.info("the scheduler's host %r cannot be resolved yet (%s)", host, why)
        time.sleep(min(_AGAIN_S, max(0.0, deadline - time.monotonic())))


def _source(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: only asks the routing table
        return probe.getsockname()[0]
