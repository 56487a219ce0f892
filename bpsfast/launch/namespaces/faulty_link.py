"""Two machines on a link with faults on demand: losses, delays, cuts, resets, refused connections, changed bytes.

    with FaultyLink("a", "b") as link:
        link["a"].popen(...); link["b"].popen(...)
        link.lose(0.3)

Each machine is a network namespace whose ``eth0`` is a TUN device; a thread of the owner forwards every packet. So
netem, which few kernels of containers have, is not needed, and packets can be lost, unlike with a TCP proxy. Needs root
and /dev/net/tun; see `missing`. The thread forwards some 50,000 packets a second.
"""
from __future__ import annotations

import errno
import fcntl
import os
import random
import select
import struct
import threading
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

import msgspec

from ...base.resources import Closing
from ...orchestration.errors import ConfigError, LackingError, StallError
from ...orchestration.wake_up import WakeUp
from . import netns
from .cluster import Machine

_TUN = Path("/dev/net/tun")
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_PACKET_NBYTES = 65536
_ADDRESSES = ("10.78.0.1", "10.78.0.2")
_BATCH = 64
_JOIN_S = 10.0
#: The queue of a link with a rate holds at least the packets that the link carries in this time.
_QUEUE_S = 0.05


class ForwarderCounters(msgspec.Struct):
    """Counters of the forwarder: packets forwarded and dropped, resets forged, payloads changed, segments refused."""

    packets: int = 0
    dropped: int = 0
    resets: int = 0
    changed: int = 0
    refused: int = 0


def missing() -> str | None:
    """Return in one line why there can be no such link here, or None."""
    if not os.access(_TUN, os.R_OK | os.W_OK):
        return f"a link that fails needs {_TUN} (the kernel's module tun, or the container's permission)"
    return netns.missing()


class _Line(msgspec.Struct, frozen=True):
    """How long a link is, in seconds, and its rate each way; 0: any."""

    delay_s: float = 0.0
    rate_bytes: float = 0.0


class _Direction:
    """One direction, from the device *source* to the device *target* (descriptors). Forwarder thread only.

    `held`: packets that wait, each until a time, in order, since packets do not overtake each other on a link; none
    leaves before `held_until`. `free_at`: when the packets so far have been sent at the rate of the `line`.
    """

    def __init__(self, source: int, target: int) -> None:
        self.source = source
        self.target = target
        self.held: deque[tuple[float, bytes, Segment | None]] = deque()
        self.held_until = self.free_at = 0.0
        self.line = _Line()
        self.is_cut = False
        self.nbytes = 0  # of payload, since the last reset
        self.n_unchanged = 0  # bytes of payload, since the last change


class FaultyLink(Closing):
    """Two machines, from construction until `close`. Faults may be changed at any time, by one thread.

    Raises `ConfigError` if something is missing; the text names it.

    *names* are those of the two machines, *mtu* is the link's in bytes, *seed* that of the random choices.
    """

    def __init__(self, *names: str, mtu: int = 1500, seed: int = 0) -> None:
        lacking = missing()
        if lacking is not None:
            raise LackingError(lacking)
        if len(names) != 2 or names[0] == names[1]:
            raise ConfigError(f"a link has two machines of different names, got {names}")
        netns.remove_stale()
        namespaces = netns.unused_names(list(names))
        self.machines = {name: Machine(name, namespaces[name], address, "eth0")
                         for name, address in zip(names, _ADDRESSES)}
        self.carried = ForwarderCounters()
        self._spared: frozenset[int] = frozenset()
        self._random = random.Random(seed)
        self._loss = 0.0
        self._spike_s = self._spike_share = 0.0
        self._line = _Line()
        self._resets = self._reset_nbytes = 0
        self._changes = self._change_nbytes = 0
        self._refuses = False
        self._refused_ports: frozenset[int] = frozenset()
        self._known: set[Connection] = set()
        self._forgotten: frozenset[Connection] = frozenset()
        self._devices: list[int] = []
        self._wake = WakeUp()
        self._closed = False
        self._directions: dict[str, _Direction] = {}
        self._thread = threading.Thread(target=self._run, name="bpsfast-faulty-link", daemon=True)
        try:
            for machine in self.machines.values():
                netns.create(machine.namespace)
                self._devices.append(_device(machine, mtu))
        except BaseException:
            self.close()
            raise
        forth, back = self._devices
        self._directions = {names[0]: _Direction(forth, back), names[1]: _Direction(back, forth)}
        self._thread.start()

    def __getitem__(self, name: str) -> Machine:
        return self.machines[name]

    @property
    def hub(self) -> Machine:
        """The machine where the scheduler of a job runs: the first of the two."""
        return next(iter(self.machines.values()))

    def close(self) -> None:
        """Kill all processes on the machines, remove the machines, stop the forwarder. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._wake.ring()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        for fd in self._devices:
            os.close(fd)
        self._wake.close()
        for machine in self.machines.values():
            machine._remove()

    def spare(self, *ports: int) -> None:
        """Apply no fault to packets from and to these TCP ports, and faults to all other ports."""
        self._spared = frozenset(ports)

    def lose(self, share: float) -> None:
        """Drop each packet with the probability *share* from now on."""
        self._loss = share

    def spike(self, delay_s: float, share: float) -> None:
        """After each packet, with the probability *share*, delay its direction by *delay_s* seconds."""
        self._spike_s, self._spike_share = delay_s, share

    def lengthen(self, delay_s: float, rate_bytes: float = 0.0) -> None:
        """Delay each packet by *delay_s* seconds, and carry *rate_bytes* per second each way, from now on; 0: any rate.

        Packets wait in a queue of twice what is on the way, or of 50 ms if that is more; others are dropped.
        """
        self._line = _Line(delay_s, rate_bytes)  # at once: the forwarder reads it
        self._wake.ring()

    def cut(self, *names: str) -> None:
        """Drop all packets from the machines *names* (none: from both) until `mend`."""
        for name in names or self._directions:
            self._directions[name].is_cut = True

    def mend(self) -> None:
        """Forward all packets again, at once, except those of forgotten connections."""
        for direction in self._directions.values():
            direction.is_cut = False
        self._loss = self._spike_share = 0.0
        self._resets = self._changes = 0
        self._refuses = False
        self._line = _Line()
        self._wake.ring()

    def reset(self, count: int, every_nbytes: int) -> None:
        """Reset *count* connections after a segment with payload, one per *every_nbytes* of a direction.

        Only the receiver gets the reset; the sender notices with its next segment.
        """
        self._resets, self._reset_nbytes = count, every_nbytes

    def refuse(self, *ports: int) -> None:
        """Answer each TCP segment from and to *ports* (none: all) by a reset, as a firewall does, until `mend`.

        That ends existing connections, and refuses new ones with ECONNREFUSED.
        """
        self._refused_ports, self._refuses = frozenset(ports), True

    def change(self, count: int, every_nbytes: int) -> None:
        """Change a bit in *count* payloads, one per *every_nbytes* of a direction, and correct the checksum.

        The kernel does not notice that, as with one of 65,536 random errors or with an attacker.
        """
        self._changes, self._change_nbytes = count, every_nbytes

    def forget(self) -> None:
        """Drop all packets of the connections seen so far, so that each end believes the other is still there."""
        self._forgotten = frozenset(self._known)

    def _run(self) -> None:
        poller = select.poll()
        for fd in (*self._devices, self._wake.fileno()):
            poller.register(fd, select.POLLIN)
        while not self._closed:
            poller.poll(self._patience_ms())
            self._wake.clear()
            for direction in self._directions.values():
                line = self._line
                if line is not direction.line:
                    direction.line, direction.free_at = line, 0.0
                    if line == _Line():  # mended: what is held leaves now
                        direction.held_until = 0.0
                        direction.held = deque((0.0, packet, segment) for _, packet, segment in direction.held)
                for packet in _packets(direction.source):
                    self._take(direction, packet)
                while direction.held and direction.held[0][0] <= time.monotonic():
                    self._deliver(direction, *direction.held.popleft()[1:])

    def _patience_ms(self) -> int | None:
        first = min((direction.held[0][0] for direction in self._directions.values() if direction.held), default=None)
        return None if first is None else max(0, int(1e3 * (first - time.monotonic())) + 1)

    def _take(self, direction: _Direction, packet: bytes) -> None:
        segment = segment_of(packet)
        if segment is not None and not self._spared.isdisjoint(segment.ports):
            self._write(direction.target, packet)
            return
        if segment is not None:
            self._known.add(segment.connection)
        if segment is not None and self._refuses and not (
                self._refused_ports and self._refused_ports.isdisjoint(segment.ports)):
            self.carried.refused += 1
            refusal = refusal_of(segment)
            if refusal is not None:
                self._write(direction.source, refusal)
            return
        if (direction.is_cut or self._random.random() < self._loss
                or (segment is not None and segment.connection in self._forgotten)):
            self.carried.dropped += 1
            return
        if segment is not None and self._changes and segment.nbytes:
            direction.n_unchanged += segment.nbytes
            if direction.n_unchanged >= self._change_nbytes:
                direction.n_unchanged = 0
                self._changes -= 1
                self.carried.changed += 1
                packet = with_changed_bit(packet, segment)
        now = time.monotonic()
        if self._spike_share and self._random.random() < self._spike_share:
            direction.held_until = max(direction.held_until, now + self._spike_s)
        line = direction.line
        due = max(now + line.delay_s, direction.held_until, direction.held[-1][0] if direction.held else 0.0)
        if line.rate_bytes:
            begin = max(now, direction.free_at)
            if begin - now > max(2 * line.delay_s, _QUEUE_S):
                self.carried.dropped += 1
                return
            direction.free_at = begin + len(packet) / line.rate_bytes
            due = max(due, direction.free_at + line.delay_s)
        if direction.held or due > now:
            direction.held.append((due, packet, segment))
        else:
            self._deliver(direction, packet, segment)

    def _deliver(self, direction: _Direction, packet: bytes, segment: Segment | None) -> None:
        """Write a packet, and maybe a reset behind it."""
        self._write(direction.target, packet)
        if segment is not None and self._resets and segment.nbytes:
            direction.nbytes += segment.nbytes
            if direction.nbytes >= self._reset_nbytes:
                direction.nbytes = 0
                self._resets -= 1
                self.carried.resets += 1
                self._write(direction.target, reset_after(segment))

    def _write(self, device: int, packet: bytes) -> None:
        try:
            os.write(device, packet)
            self.carried.packets += 1
        except OSError as exc:
            if exc.errno not in (errno.EIO, errno.ENOBUFS, errno.EAGAIN, errno.EBADFD):  # its machine is being removed
                raise
            self.carried.dropped += 1


def _packets(device: int) -> list[bytes]:
    """Return the packets that wait at *device*, at most `_BATCH`."""
    found: list[bytes] = []
    try:
        while len(found) < _BATCH:
            found.append(os.read(device, _PACKET_NBYTES))
    except BlockingIOError:
        pass
    except OSError as exc:
        if exc.errno not in (errno.EIO, errno.EBADFD):  # not there any more: its machine is being removed
            raise
    return found


def _device(machine: Machine, mtu: int) -> int:
    """Create a TUN device as ``eth0`` of *machine*; it exists as long as the descriptor."""
    fd = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        request = fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", b"bpsfast%d", _IFF_TUN | _IFF_NO_PI))
        netns.adopt(machine.namespace, request[:16].rstrip(b"\0").decode(), f"{machine.address}/24", mtu)
    except OSError as exc:
        os.close(fd)
        raise LackingError(f"no TUN device can be made here: {exc.strerror}") from exc
    except (ConfigError, StallError):
        os.close(fd)
        raise
    return fd


#: Addresses and ports of both ends of a connection, the lower one first: the same for both directions.
Connection = tuple[bytes, bytes]

_TCP = 6
_SYN, _RST, _ACK = 0x02, 0x04, 0x10
_TTL = 64


class Segment(NamedTuple):
    """One TCP segment: its ends (address and port, as on the wire), sequence numbers, payload size and flags."""

    source: bytes
    target: bytes
    sequence: int
    acknowledged: int
    nbytes: int
    flags: int = _ACK

    @property
    def connection(self) -> Connection:
        """The connection it belongs to."""
        return min(self.source, self.target), max(self.source, self.target)

    @property
    def ports(self) -> tuple[int, int]:
        """Ports of the source and of the target."""
        return int.from_bytes(self.source[4:], "big"), int.from_bytes(self.target[4:], "big")


def segment_of(packet: bytes) -> Segment | None:
    """Return the TCP segment in *packet*; None if it is something else."""
    if len(packet) < 40 or packet[0] >> 4 != 4 or packet[9] != _TCP:
        return None
    begin = (packet[0] & 15) * 4
    sequence, acknowledged, offset, flags = struct.unpack_from("!IIBB", packet, begin + 4)
    nbytes = len(packet) - begin - (offset >> 4) * 4
    return Segment(packet[12:16] + packet[begin:begin + 2], packet[16:20] + packet[begin + 2:begin + 4], sequence,
                   acknowledged, nbytes, flags)


def reset_after(segment: Segment) -> bytes:
    """Return a packet that resets the connection at the receiver of *segment*.

    It has the sequence number that is expected next; a kernel answers others by a challenge (RFC 5961).
    """
    return _reset(segment, segment.sequence + segment.nbytes, segment.acknowledged)


def refusal_of(segment: Segment) -> bytes | None:
    """Return the reset by which a firewall answers *segment*; None if that is a reset itself."""
    if segment.flags & _RST:
        return None
    back = segment._replace(source=segment.target, target=segment.source)
    return _reset(back, segment.acknowledged if segment.flags & _ACK else 0,
                  segment.sequence + segment.nbytes + bool(segment.flags & _SYN))


def _reset(ends: Segment, sequence: int, acknowledged: int) -> bytes:
    """Return a reset with the source and target of *ends*."""
    tcp = ends.source[4:] + ends.target[4:] + struct.pack(
        "!IIBBHHH", sequence & 0xFFFFFFFF, acknowledged & 0xFFFFFFFF, 5 << 4, _RST | _ACK, 0, 0, 0)
    tcp = _summed(ends, tcp)
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(tcp), 0, 0, _TTL, _TCP, 0) + ends.source[:4] + ends.target[:4]
    return ip[:10] + _checksum(ip) + ip[12:] + tcp


def with_changed_bit(packet: bytes, segment: Segment) -> bytes:
    """Return *packet*, which has *segment*, with a bit in the middle of its payload changed and a valid checksum."""
    begin = (packet[0] & 15) * 4
    tcp = bytearray(packet[begin:])
    tcp[len(tcp) - 1 - segment.nbytes // 2] ^= 1
    return packet[:begin] + _summed(segment, bytes(tcp))


def _summed(segment: Segment, tcp: bytes) -> bytes:
    """Return *tcp*, header and payload between the ends of *segment*, with its checksum."""
    blank = tcp[:16] + b"\0\0" + tcp[18:]
    pseudo = segment.source[:4] + segment.target[:4] + struct.pack("!BBH", 0, _TCP, len(tcp))
    return tcp[:16] + _checksum(pseudo + blank) + tcp[18:]


def _checksum(data: bytes) -> bytes:
    """Return the Internet checksum (RFC 1071) of *data*."""
    data += bytes(len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack("!H", ~total & 0xFFFF)
