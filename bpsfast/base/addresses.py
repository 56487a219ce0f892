"""Find this machine's network addresses, also by route, and tell whether the scheduler's address can be reached."""
from __future__ import annotations

import ipaddress
import logging
import re
import socket
import time
from collections.abc import Iterable

from ..orchestration.errors import ConfigError, StallError
from ..orchestration.host_lookup import HostLookup, is_address, resolve
from .settings import Settings

_log = logging.getLogger("bpsfast.reach")
_TIMEOUT_S = 2.0
_AGAIN_S = 0.5
#: An address for documentation (RFC 5737): its route is the default route. Nothing is sent there.
_ANYWHERE = "192.0.2.1"
#: Names that are looked up in parallel.
_N_LOOKUPS = 64
#: What gloo's and NCCL's variables accept beside a name: `^` (all but), `=` (exactly), a list, a port.
_OF_A_LIST = re.compile(r"[\^=,:\s]")
#: Names that mean the loopback on every machine (RFC 6761, Debian's and Red Hat's hosts files).
_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "localhost6")


def format_address(host: str, port: int) -> str:
    """Return ``host:port``, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Tell whether the name or address *host* can be reached from this machine only."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() in _LOOPBACK_NAMES
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def unreachable_hint(host: str, port: int) -> str:
    """Return a sentence, with a leading space, if no connection to *host*:*port* is possible; else "".

    Also "" for port 0, which means unknown. Blocks for at most four seconds.
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
    """Return this machine's own address: `node_host`, else the interface's, else that of the route to the scheduler.

    Raises `ConfigError` if the interface does not exist or has no IPv4 address, or there is no route. `StallError` if
    the scheduler's name was not resolved within `start_timeout_s`.
    """
    return configured_host(settings) or job_route_source(scheduler_host, settings.start_timeout_s)


def configured_host(settings: Settings) -> str:
    """Return this machine's own address from the settings: `node_host`, else the interface's; "" if neither is set.

    Raises `ConfigError` if the interface does not exist or has no IPv4 address.
    """
    if settings.node_host or not settings.interface:
        return settings.node_host
    import psutil

    chosen, found = settings.interface, psutil.net_if_addrs()
    addresses = {name: entry.address for name, entries in found.items() for entry in reversed(entries)
                 if entry.family == socket.AF_INET}
    if chosen in addresses:
        return addresses[chosen]
    there = f"BPSFAST_INTERFACE takes one of {', '.join(sorted(addresses)) or 'none, as there is no IPv4 address here'}"
    if chosen in found:
        raise ConfigError(f"interface={chosen!r} has no IPv4 address here. {there}")
    if _OF_A_LIST.search(chosen):
        raise ConfigError(f"interface={chosen!r} is a list as in NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, but nodes "
                          f"listen on the address of one interface. {there}; unset, it is the one of the route to the "
                          "scheduler")
    near = [name for name in sorted(addresses) if name.startswith(chosen)]
    hint = f" (a whole name, not the beginning of {', '.join(near)})" if near else ""
    raise ConfigError(f"interface={chosen!r} has no IPv4 address here, as there is no such interface. {there}{hint}")


def route_source(host: str) -> str | None:
    """Return this machine's address on the route to *host*; None without a route or for an unknown name.

    Blocks for at most two seconds.
    """
    try:
        return _source(resolve(host, _TIMEOUT_S)) if host else None
    except OSError:
        return None


def local_hosts_among(hosts: Iterable[str]) -> set[str]:
    """Return those of *hosts* (names or addresses) that are this machine. Blocks for at most two seconds.

    This machine's host name counts whatever it resolves to; any other name does if all its addresses are local.
    """
    import psutil

    own = {_bare(entry.address) for entries in psutil.net_if_addrs().values() for entry in entries
           if entry.family in (socket.AF_INET, socket.AF_INET6)}
    named = socket.gethostname().lower()
    names = {"localhost", named, named.partition(".")[0]}
    until_s = time.monotonic() + _TIMEOUT_S
    found: set[str] = set()
    unknown: list[str] = []
    for host in hosts:
        if is_address(host):
            found |= {host} if _is_own(host, own) else set()
        elif is_loopback(host) or host.lower().rstrip(".") in names:
            found.add(host)
        else:
            unknown.append(host)
    for begin in range(0, len(unknown), _N_LOOKUPS):
        lookups = {host: HostLookup(host) for host in unknown[begin:begin + _N_LOOKUPS]}
        for host, lookup in lookups.items():
            try:
                lookup.address(until_s - time.monotonic())
            except OSError:  # ssh may know the name
                continue
            if all(_is_own(address, own) for address in lookup.addresses):
                found.add(host)
    return found


def _is_own(address: str, own: set[str]) -> bool:
    found = ipaddress.ip_address(_bare(address))
    mapped = getattr(found, "ipv4_mapped", None) or found
    return mapped.is_loopback or mapped.is_unspecified or str(mapped) in own


def _bare(address: str) -> str:
    """Return *address* in the spelling of `ipaddress`, without the interface of a link-local one."""
    return str(ipaddress.ip_address(address.partition("%")[0]))


def default_route_host() -> str:
    """Return the address of the default route, else of the first interface that is up; "" with loopback only."""
    source = route_source(_ANYWHERE)
    if source and not is_loopback(source):
        return source
    import psutil

    states = psutil.net_if_stats()
    return next((entry.address for name, entries in psutil.net_if_addrs().items() if states[name].isup
                 for entry in entries if entry.family == socket.AF_INET and not is_loopback(entry.address)), "")


def job_route_source(host: str, timeout_s: float) -> str:
    """Return this machine's address on the route to the scheduler's *host*, once its name is known.

    On the scheduler's own machine the name may mean the loopback (Debian's /etc/hosts); then return
    `default_route_host`.

    Raises `StallError` if the name was not resolved within *timeout_s*. (The name of a headless service exists once its
    pod does.) `ConfigError` if there is no route.
    """
    address = _resolve(host, timeout_s)
    try:
        source = _source(address)
    except OSError as exc:
        raise ConfigError(
            f"no route to the scheduler's host {host!r} ({exc}): fix BPSFAST_SCHEDULER, or name this "
            "machine's own address with BPSFAST_NODE_HOST") from exc
    return default_route_host() or source if is_loopback(source) and not is_loopback(host) else source


def _resolve(host: str, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return resolve(host, deadline - time.monotonic())
        except OSError as exc:
            why = exc.strerror or exc
            _log.info("the scheduler's host %r cannot be resolved yet (%s)", host, why)
            time.sleep(min(_AGAIN_S, max(0.0, deadline - time.monotonic())))
            if time.monotonic() >= deadline:  # the resolver's last error is the reason
                raise StallError(
                    f"the name {host!r} in the scheduler's address was not resolved within {timeout_s:g} s "
                    f"({why}): check it with `getent hosts`, or give an address in BPSFAST_SCHEDULER") from exc


def _source(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing, only asks the routing table
        return probe.getsockname()[0]
