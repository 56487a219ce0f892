"""A cluster inside one machine: each "machine" is a network namespace with a shaped link and the kernel's counters.

    with Cluster(["a", "b", "helper"], rates="2gbit") as cluster:
        cluster["a"].popen([sys.executable, "train.py"], env=...)

Veth pairs connect the machines to a bridge, as hosts to a switch. A token bucket limits each direction of every link.
The bridge is in a namespace of its own, the `hub` (unshaped; a good place for the scheduler), so the host's interfaces,
routes and firewall are neither used nor changed. Needs root; see `netns.missing`.

There is no delay or loss (netem), as few kernels of containers have it; see `faulty_link`.
"""
from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...base.resources import Closing
from ...orchestration.errors import ConfigError, LackingError, PeerLostError, StallError
from ..daemons import tie_to_parent
from . import netns

#: One rate for both directions of a link ("10gbit" or bits per second), or (from the machine, to the machine).
Rate = str | float | tuple[str | float, str | float]

_HUB = "hub"
#: By version of IP: the network, with the place of a machine's number, and the number of the hub.
_NETWORKS = {4: ("10.77.{}", "/16", "255.254"), 6: ("fd77::{}", "/64", "fffe")}
#: The least number of machines that know each other's link addresses in advance, see `netns.introduce`.
_LEAST_INTRODUCED = 12
_CALIBRATION_PORT = 7701
_CALIBRATION_EXTRA_S = 30.0


class Calibration(msgspec.Struct, frozen=True):
    """Payload bytes per second between two machines, both directions at once, and the CPU use meanwhile.

    `cpu_busy` is the busy share of all cores: near 1 the CPU was the limit, and the rates do not describe the network.
    """

    forth: float
    back: float
    cpu_busy: float

    @property
    def rate_bytes(self) -> float:
        """The slower direction."""
        return min(self.forth, self.back)


class CpuMeter:
    """Measure the busy share of all cores over a ``with`` block: `busy`, from 0 to 1."""

    busy = 0.0

    def __enter__(self) -> CpuMeter:
        self._before = _cpu_ticks()
        return self

    def __exit__(self, *exc_info: object) -> None:
        idle, total = (after - before for after, before in zip(_cpu_ticks(), self._before))
        self.busy = 1.0 - idle / total if total else 0.0


class Machine:
    """One machine of a cluster, with its `address` and the name of its network `namespace`."""

    def __init__(self, name: str, namespace: str, address: str, interface: str) -> None:
        self.name = name
        self.namespace = namespace
        self.address = address
        self._interface = interface
        self._processes: list[subprocess.Popen] = []

    def via(self) -> list[str]:
        """Return the command that runs another command on this machine."""
        return ["ip", "netns", "exec", self.namespace]

    def popen(self, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen:
        """Start *argv* here; *options* are those of `subprocess.Popen`. Call it in a thread that stays.

        The process is killed when this process dies (`die_with_parent`), or by `Cluster.close`.
        """
        process = subprocess.Popen([*self.via(), *tie_to_parent(argv)], env=None if env is None else dict(env),
                                   **options)
        self._processes.append(process)
        return process

    def run(self, argv: Sequence[str], timeout_s: float,
            env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess:
        """Run *argv* here to its end; return exit code and output (text).

        Raises `StallError` at the deadline; the process is killed.
        """
        with self.popen(argv, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired as exc:
                process.kill()
                command = " ".join(argv)
                raise StallError(f"{command} on machine {self.name} has not ended within {timeout_s:g} s") from exc
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def traffic(self) -> netns.Traffic:
        """Return the kernel's counters of this machine's link."""
        return netns.traffic(self.namespace, self._interface)

    def _remove(self) -> None:
        """Kill all processes on the machine, and remove it."""
        netns.remove(self.namespace)
        for process in self._processes:
            process.wait(timeout=10.0)


class Cluster(Closing):
    """Machines on a switch, from construction until `close` or the end of the ``with`` block.

    Raises `ConfigError` if root, ``ip`` or tbf is missing, or an argument is not possible.

    *machines* are their names, or their number ("m0", "m1", ...). *rates* is one `Rate` for all links, or one for each
    name; None: not shaped. *mtu* is that of all links, in bytes. *ip_version*: 4 or 6, the only one on the links.
    """

    def __init__(self, machines: Sequence[str] | int, rates: Rate | Mapping[str, Rate] | None = None, *,
                 mtu: int = 1500, ip_version: int = 4) -> None:
        names = [f"m{i}" for i in range(machines)] if isinstance(machines, int) else list(machines)
        if not 0 < len(names) < 250 or len({*names, _HUB}) != len(names) + 1 or any("/" in name for name in names):
            raise ConfigError(f"machines must be 1 to 249 different names, none of them {_HUB!r}, got {names}")
        lacking = netns.missing()
        if lacking is not None:
            raise LackingError(lacking)
        netns.remove_stale()
        limits = _limits(names, rates)
        namespaces = netns.unused_names([_HUB, *names])
        network, width, of_hub = _NETWORKS[ip_version]
        self.hub = Machine(_HUB, namespaces[_HUB], network.format(of_hub), "br0")
        numbers = [f"0.{i}" if ip_version == 4 else f"{i:x}" for i in range(1, len(names) + 1)]
        self.machines = {name: Machine(name, namespaces[name], network.format(number), "eth0")
                         for name, number in zip(names, numbers)}
        try:
            netns.create(self.hub.namespace)
            netns.create_bridge(self.hub.namespace, self.hub.address + width)
            for i, (name, machine) in enumerate(self.machines.items()):
                netns.create(machine.namespace)
                netns.plug(self.hub.namespace, f"port{i}", machine.namespace, machine.address + width, mtu)
                limit = limits[name]
                if limit is not None:
                    netns.shape(machine.namespace, "eth0", limit[0])
                    netns.shape(self.hub.namespace, f"port{i}", limit[1])
            if len(names) >= _LEAST_INTRODUCED:
                netns.introduce([(each.namespace, each._interface, each.address)
                                 for each in (self.hub, *self.machines.values())])
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Machine:
        return self.machines[name]

    def __iter__(self) -> Iterator[Machine]:
        return iter(self.machines.values())

    def close(self) -> None:
        """Kill all processes on the machines, and remove the machines. Idempotent."""
        for machine in [*self.machines.values(), self.hub]:
            machine._remove()

    def calibrate(self, a: str, b: str, duration_s: float = 8.0) -> Calibration:
        """Measure the rates between machines *a* (forth: from *a*) and *b*, both directions at once.

        It needs seconds: acknowledgements wait in the queue of the other direction, TCP takes that for the path's delay
        and leaves slow start early (hystart). After 2 s the result was up to 12 % low with equal links, 50 % with
        others.

        Raises `PeerLostError` if one end of the measurement fails; the text has its output.
        """
        program = [sys.executable, "-S", "-E", str(Path(__file__).with_name("calibration.py"))]
        listen = [*program, "listen", str(_CALIBRATION_PORT), str(duration_s)]
        connect = [*program, "connect", self[b].address, str(_CALIBRATION_PORT), str(duration_s)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with contextlib.ExitStack() as stack, CpuMeter() as meter:
            programs = {b: listen, a: connect}
            ends = {name: stack.enter_context(self[name].popen(argv, **pipes)) for name, argv in programs.items()}
            received = {name: _received(name, end, duration_s + _CALIBRATION_EXTRA_S) for name, end in ends.items()}
        return Calibration(forth=received[b], back=received[a], cpu_busy=meter.busy)


def _received(name: str, end: subprocess.Popen, timeout_s: float) -> float:
    """Return the bytes per second that one end of a calibration has received."""
    try:
        out, err = end.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as exc:
        end.kill()
        raise StallError(f"the calibration on machine {name} has not ended within {timeout_s:g} s") from exc
    if end.returncode != 0:
        raise PeerLostError(f"the calibration on machine {name} ended with exit code {end.returncode}: {err.strip()}")
    result = json.loads(out)
    return result["received"] / result["seconds"] if result["seconds"] > 0 else 0.0


def _limits(names: list[str], rates: Rate | Mapping[str, Rate] | None) -> dict[str, tuple[float, float] | None]:
    """Return (up, down) in bits per second for each machine, None if not shaped."""
    if isinstance(rates, Mapping):
        unknown = sorted(set(rates) - set(names))
        if unknown:
            raise ConfigError(f"rates are given for {unknown}, which are no machines; there are {names}")
        return {name: _pair(rates.get(name)) for name in names}
    return dict.fromkeys(names, _pair(rates))


def _pair(rate: Rate | None) -> tuple[float, float] | None:
    if rate is None:
        return None
    up, down = rate if isinstance(rate, tuple) else (rate, rate)
    return netns.parse_rate(up), netns.parse_rate(down)


def _cpu_ticks() -> tuple[int, int]:
    """Return (idle, all) ticks of all cores since boot."""
    with open("/proc/stat", encoding="ascii") as file:
        ticks = [int(text) for text in file.readline().split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)
