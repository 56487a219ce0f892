"""Create, connect, shape, measure and remove network namespaces by ``ip`` and ``tc``.

Names are ``bpsfast.<mark>.<serial>.<machine>`` with the mark of the owner (`base.process_identity`), by which
`remove_stale` recognizes namespaces of dead owners.
"""
from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...base import process_identity
from ...orchestration.errors import CapacityError, ConfigError, StallError

_PREFIX = "bpsfast."
_IPV4 = Path("/proc/sys/net/ipv4")
_CONGESTION_CONTROL = "cubic"  # see `_connect`
_MIN_RTT_WLEN_S = 86400  # see `create`
_FOLDER = Path("/run/netns")
_COMMAND_TIMEOUT_S = 20.0
_serial = itertools.count()
_RATE = re.compile(r"^(\d+(?:\.\d+)?)\s*(k|m|g)?bit$", re.IGNORECASE)


class Traffic(msgspec.Struct, frozen=True):
    """The kernel's counters of one interface, in bytes with headers: `tx` sent, `rx` received."""

    tx: int
    rx: int

    def __sub__(self, before: Traffic) -> Traffic:
        return Traffic(self.tx - before.tx, self.rx - before.rx)


def missing() -> str | None:
    """Return in one line why namespaces cannot be used here, or None."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"network namespaces need the command {tool!r} (package iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"{_owner_prefix()}{next(_serial)}.probe"
    try:
        ip("netns", "add", name)
    except ConfigError as exc:
        return f"network namespaces cannot be made here: {exc}"
    try:
        ip("-n", name, "link", "set", "lo", "up")
        shape(name, "lo", 1e9)
    except ConfigError as exc:
        return f"links cannot be shaped here (no tbf): {exc}"
    finally:
        remove(name)
    return None


def parse_rate(text: str | float) -> float:
    """Return bits per second of ``10gbit``, ``500mbit``, ``64kbit`` or a number.

    Raises `ConfigError` if *text* is no rate, or not positive.
    """
    if isinstance(text, str):
        match = _RATE.match(text.strip())
        if match is None:
            raise ConfigError(f"{text!r} is no rate: expected a number with kbit, mbit or gbit, such as 10gbit")
        scale = {"k": 1e3, "m": 1e6, "g": 1e9}.get((match[2] or "").lower(), 1.0)
        text = float(match[1]) * scale
    if not text > 0:
        raise ConfigError(f"a rate of {text} bit/s moves nothing")
    return float(text)


def unused_names(machines: list[str]) -> dict[str, str]:
    """Return a namespace name for each machine of one new cluster of this process."""
    serial = next(_serial)
    return {machine: f"{_owner_prefix()}{serial}.{machine}" for machine in machines}


def create(name: str) -> None:
    """Create the namespace *name* with its loopback up, and TCP as on a network whose links are sometimes idle.

    TCP there keeps its shortest round-trip time. After 300 s on links that are never idle it would take the time in
    queues (150 ms) for the path's, and send smaller packets (10 % more of them).
    """
    ip("netns", "add", name)
    ip("-n", name, "link", "set", "lo", "up")
    setting = _IPV4 / "tcp_min_rtt_wlen"
    ip("netns", "exec", name, "sh", "-c", f"test ! -e {setting} || echo {_MIN_RTT_WLEN_S} > {setting}")


def create_bridge(name: str, address: str) -> None:
    """Create the bridge ``br0`` with *address* ("10.0.0.1/24") in namespace *name*."""
    ip("-n", name, "link", "add", "br0", "type", "bridge")
    _connect(name, "br0", address)


def plug(hub: str, port: str, name: str, address: str, mtu: int) -> None:
    """Connect namespace *name* (as ``eth0`` with *address*) to the bridge of *hub* (as *port*) by a veth pair."""
    ip("link", "add", "name", "eth0", "netns", name, "mtu", str(mtu), "type", "veth",
       "peer", "name", port, "netns", hub, "mtu", str(mtu))
    ip("-n", hub, "link", "set", port, "master", "br0", "up")
    _connect(name, "eth0", address)


def adopt(name: str, interface: str, address: str, mtu: int) -> None:
    """Move *interface* of this machine into namespace *name*, as its ``eth0`` with *address*."""
    ip("link", "set", interface, "mtu", str(mtu), "netns", name)
    ip("-n", name, "link", "set", interface, "name", "eth0")
    _connect(name, "eth0", address)


def _connect(name: str, interface: str, address: str) -> None:
    """Give *interface* its address, and TCP over it Linux's default congestion control.

    The machine may prefer bbr, which on slow links with traffic in both directions carries 5 to 15 % less than they
    can, and varies. It is set by the route, since the namespace's own setting accepts only what the machine allows
    unprivileged users.
    """
    own = ipaddress.ip_interface(address)
    has_it = _CONGESTION_CONTROL in (_IPV4 / "tcp_available_congestion_control").read_text().split()
    if own.version == 6:  # without the second in which the kernel looks whether another machine has the address
        ip("-n", name, "addr", "add", address, "dev", interface, "nodad", "noprefixroute")
        ip("-n", name, "link", "set", interface, "up")
        ip("-n", name, "-6", "route", "add", str(own.network), "dev", interface, "proto", "kernel", "metric", "256",
           *(("congctl", _CONGESTION_CONTROL) if has_it else ()))
        return
    ip("-n", name, "addr", "add", address, "dev", interface)
    ip("-n", name, "link", "set", interface, "up")
    if has_it:
        ip("-n", name, "route", "change", str(own.network), "dev", interface, "proto", "kernel", "scope", "link",
           "src", str(own.ip), "congctl", _CONGESTION_CONTROL)


def introduce(interfaces: Sequence[tuple[str, str, str]]) -> None:
    """Tell each namespace the link addresses of all others; *interfaces*: (namespace, interface, IP address).

    Else every pair of namespaces takes an entry of one table of the kernel, which has 1,024 of them for all namespaces
    together (net.ipv4.neigh.default.gc_thresh3) and drops packets when it is full.
    """
    links = [json.loads(ip("-n", name, "-j", "link", "show", "dev", interface))[0]["address"]
             for name, interface, _ in interfaces]
    for name, interface, _ in interfaces:
        _run("ip", "-n", name, "-batch", "-", said="".join(
            f"neigh replace {address} lladdr {link} dev {interface} nud permanent\n"
            for (other, _, address), link in zip(interfaces, links) if other != name))


def shape(name: str, interface: str, rate_bits: float) -> None:
    """Limit the sending rate of *interface* in namespace *name* to *rate_bits* per second (token bucket)."""
    burst = burst_nbytes(rate_bits)
    limit = max(int(rate_bits / 8 * 0.05), 4 * burst)
    _run("tc", "-n", name, "qdisc", "replace", "dev", interface, "root", "tbf", "rate", f"{int(rate_bits)}bit",
         "burst", str(burst), "limit", str(limit))


def burst_nbytes(rate_bits: float) -> int:
    """Return the bytes that an interface with *rate_bits* (`shape`) may send at once after being idle."""
    # two timer ticks, and at least two 64 KiB segments: with less the kernel splits segments
    return max(int(rate_bits / 8 * 0.002), 160 * 1024)


def traffic(name: str, interface: str = "eth0") -> Traffic:
    """Return the counters of *interface* in namespace *name*."""
    link = json.loads(ip("-n", name, "-s", "-j", "link", "show", "dev", interface))[0]
    return Traffic(tx=link["stats64"]["tx"]["bytes"], rx=link["stats64"]["rx"]["bytes"])


def remove(name: str, timeout_s: float = 5.0) -> None:
    """Kill all processes in namespace *name* and remove it, if it exists.

    Raises `StallError` if a process in it does not die within *timeout_s*.
    """
    if not (_FOLDER / name).exists():
        return
    deadline = time.monotonic() + timeout_s
    try:
        while pids := [int(pid) for pid in ip("netns", "pids", name).split()]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):  # it has died meanwhile
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() >= deadline:
                raise StallError(f"processes {pids} in network namespace {name} outlive SIGKILL by {timeout_s:g} s")
            time.sleep(0.01)
        ip("netns", "del", name)
    except ConfigError:
        if (_FOLDER / name).exists():
            raise
        # else another process has removed it


def remove_stale() -> list[str]:
    """Remove the namespaces whose owner is dead; return their names."""
    names = stale()
    for name in names:
        remove(name)
    return names


def stale() -> list[str]:
    """Return the namespaces whose owner, in this PID namespace, is dead."""
    return sorted(name for name in (os.listdir(_FOLDER) if _FOLDER.exists() else []) if name.startswith(_PREFIX)
                  and process_identity.is_dead(".".join(name.removeprefix(_PREFIX).split(".")[:3])))


def ip(*arguments: str) -> str:
    """Run ``ip`` and return its output; `ConfigError` has the command and its error output."""
    return _run("ip", *arguments)


def _run(*command: str, said: str = "") -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False,
                              input=said)
    except subprocess.TimeoutExpired as exc:
        raise StallError(f"`{' '.join(command)}` has not ended within {_COMMAND_TIMEOUT_S:g} s") from exc
    except BlockingIOError as exc:
        raise CapacityError(f"`{' '.join(command)}` cannot be started: too many processes") from exc
    if done.returncode != 0:
        raise ConfigError(f"`{' '.join(command)}` ended with {done.returncode}: "
                          f"{done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _owner_prefix() -> str:
    return f"{_PREFIX}{process_identity.mark()}."
