"""Find this machine's network addresses, also by route, and tell whether the scheduler's address can be reached."""
from __future__ import annotations

import errno
import ipaddress
import logging
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any

from ..orchestration.errors import ConfigError, StallError
from ..orchestration.host_lookup import HostLookup, format_address, is_address, resolve
from .settings import Settings
from .value_formats import parse_ports

_log = logging.getLogger("bpsfast.reach")
_TIMEOUT_S = 2.0
_AGAIN_S = 0.5
#: Addresses for documentation (RFC 5737, RFC 3849): their routes are the default routes. Nothing is sent there.
_ANYWHERE = ("192.0.2.1", "2001:db8::1")
#: Names that are looked up in parallel.
_N_LOOKUPS = 64
#: Names that mean the loopback on every machine (RFC 6761, Debian's and Red Hat's hosts files).
_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "localhost6")


def family_of(address: str) -> socket.AddressFamily:
    """Return the family of an IP *address*."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def any_host() -> str:
    """Return the address that means all addresses of this machine: of both versions of IP, if it has both."""
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def listening_socket(host: str, ports: str = "") -> socket.socket:
    """Return a socket that listens on *host*, a name or an address of this machine, at a free one of *ports*.

    *ports*: as the setting of that name. Blocks for at most two seconds. Raises `ConfigError` if nothing can listen
    there.
    """
    port, most = parse_ports(ports)
    while True:
        try:
            return _listening(resolve(host, _TIMEOUT_S) if host else host, port)
        except (OSError, UnicodeError) as exc:  # UnicodeError: a name with a label that is empty or too long
            is_taken = isinstance(exc, OSError) and exc.errno == errno.EADDRINUSE
            if is_taken and port < most:
                port += 1
                continue
            where = f"{host!r}, ports {ports}" if ports else repr(host)
            what = ("BPSFAST_PORTS to a range with more free ports" if ports and is_taken
                    else "BPSFAST_NODE_HOST to an address of this machine")
            raise ConfigError(f"cannot listen on {where}: {exc}; set {what}") from exc


def _listening(address: str, port: int) -> socket.socket:
    listener = socket.socket(family_of(address), socket.SOCK_STREAM)
    try:
        # the next job may use a port of the range while connections of the last one are in TIME_WAIT
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener


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


def no_scheduler_hint(schedulers: Sequence[tuple[str, int]]) -> str:
    """Return the `unreachable_hint` of the first of *schedulers*; "" if one of them can be reached."""
    hints = []
    for address in schedulers:
        hints.append(unreachable_hint(*address))
        if not hints[-1]:
            return ""
    return hints[0]


def local_host(settings: Settings, scheduler_hosts: Sequence[str]) -> str:
    """Return this machine's own address: `node_host`, else the interface's, else that of the route to the scheduler.

    Of several *scheduler_hosts* the first one counts to which there is a route. Raises `ConfigError` if the interface
    does not exist or has no address, or there is no route. `StallError` if no name was resolved within
    `start_timeout_s`.
    """
    found = configured_host(settings)
    if found:
        return found
    for host in scheduler_hosts[:-1]:
        try:
            return job_route_source(host, settings.start_timeout_s / len(scheduler_hosts))
        except (ConfigError, StallError) as exc:
            _log.info("the next address of the scheduler tells this machine's own one: %s", exc)
    return job_route_source(scheduler_hosts[-1], settings.start_timeout_s / len(scheduler_hosts))


def configured_host(settings: Settings) -> str:
    """Return this machine's own address from the settings: `node_host`, else the interface's; "" if neither is set.

    Of several interfaces that the setting means the first one (of "all but" some that of the default route), and of its
    addresses the first one of IPv4, else of IPv6. Raises `ConfigError` if there is none.
    """
    if settings.node_host or not settings.interface:
        return settings.node_host
    import psutil

    chosen, found = settings.interface, psutil.net_if_addrs()
    addresses = {name: own[0] for name, entries in found.items() if (own := _usable(entries))}
    meant = [addresses[name] for name in _meant(chosen, list(found)) if name in addresses]
    if chosen.startswith("^"):
        meant = [address for address in meant if not is_loopback(address)]
        usual = default_route_host()
        meant.sort(key=lambda address: address != usual)
    if meant:
        return meant[0]
    there = f"BPSFAST_INTERFACE takes {', '.join(sorted(addresses)) or 'none, as there is no address here'}"
    why = "" if _meant(chosen, list(found)) else ", as there is no such interface"
    raise ConfigError(f"interface={chosen!r} has no address here{why}. {there}; or a list as NCCL_SOCKET_IFNAME, such "
                      "as ib,eth or ^docker,lo (all but)")


def _meant(chosen: str, names: Sequence[str]) -> list[str]:
    """Return those of *names* that the setting *chosen* means, in its order: a list, as NCCL_SOCKET_IFNAME.

    For each entry first the interface of that name, then those whose names begin so; ``=`` excludes these, ``^`` means
    all others.
    """
    all_but, rest = chosen.startswith("^"), chosen.removeprefix("^")
    is_exact, wanted = rest.startswith("="), [each.strip() for each in rest.removeprefix("=").split(",")]
    meant = [name for each in wanted if each for name in (
        *(name for name in names if name == each),
        *(name for name in names if not is_exact and name.startswith(each)))]
    return [name for name in names if name not in meant] if all_but else list(dict.fromkeys(meant))


def own_addresses() -> list[str]:
    """Return this machine's addresses by which others may reach it: not the loopback, those of IPv4 first."""
    import psutil

    found = [address for entries in psutil.net_if_addrs().values() for address in _usable(entries)
             if not is_loopback(address)]
    return sorted(dict.fromkeys(found), key=lambda address: ":" in address)


def _usable(entries: Iterable[Any]) -> list[str]:
    """Return the addresses among psutil's *entries* of an interface, those of IPv4 first.

    Link-local ones of IPv6 mean nothing on other machines.
    """
    found = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
    return sorted((address for address in found if "%" not in address), key=lambda address: ":" in address)


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
    """Return the address of the default route, else of the first interface that is up; "" with loopback only.

    One of IPv4 if there is one.
    """
    import psutil

    states = psutil.net_if_stats()
    own = [address for name, entries in psutil.net_if_addrs().items() if states[name].isup
           for address in _usable(entries) if not is_loopback(address)]
    for anywhere in _ANYWHERE:
        source = route_source(anywhere)
        if source and not is_loopback(source):
            return source
        if first := next((address for address in own if family_of(address) == family_of(anywhere)), ""):
            return first
    return ""


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
    with socket.socket(family_of(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing, only asks the routing table
        return str(probe.getsockname()[0])
