"""IPv4 packets with TCP inside, as far as a forwarder has to read them; resets and a byte that it forges."""
from __future__ import annotations

import struct
from typing import NamedTuple

#: Addresses and ports of both ends of a connection, the lower one first: the same for both directions.
Connection = tuple[bytes, bytes]

_TCP = 6
_SYN, _RST, _ACK = 0x02, 0x04, 0x10
_TTL = 64


class Segment(NamedTuple):
    """One TCP segment: its ends (address and port, as on the wire), sequence numbers, payload bytes, and flags."""

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


def read(packet: bytes) -> Segment | None:
    """Return the TCP segment in *packet*; None if it is something else."""
    if len(packet) < 40 or packet[0] >> 4 != 4 or packet[9] != _TCP:
        return None
    begin = (packet[0] & 15) * 4
    sequence, acknowledged, offset, flags = struct.unpack_from("!IIBB", packet, begin + 4)
    nbytes = len(packet) - begin - (offset >> 4) * 4
    return Segment(packet[12:16] + packet[begin:begin + 2], packet[16:20] + packet[begin + 2:begin + 4], sequence,
                   acknowledged, nbytes, flags)


def reset_after(segment: Segment) -> bytes:
    """Return a packet that ends the connection at the end that has just got *segment*, and all before it.

    It has the very number that is expected next: a kernel answers any other by a challenge (RFC 5961).
    """
    return _reset(segment, segment.sequence + segment.nbytes, segment.acknowledged)


def refusal_of(segment: Segment) -> bytes | None:
    """Return the reset by which a firewall answers who has sent *segment*; None if that is a reset itself."""
    if segment.flags & _RST:
        return None
    back = segment._replace(source=segment.target, target=segment.source)
    return _reset(back, segment.acknowledged if segment.flags & _ACK else 0,
                  segment.sequence + segment.nbytes + bool(segment.flags & _SYN))


def _reset(ends: Segment, sequence: int, acknowledged: int) -> bytes:
    """Return a reset that travels between the *ends* of a segment, as that does."""
    tcp = ends.source[4:] + ends.target[4:] + struct.pack(
        "!IIBBHHH", sequence & 0xFFFFFFFF, acknowledged & 0xFFFFFFFF, 5 << 4, _RST | _ACK, 0, 0, 0)
    tcp = _summed(ends, tcp)
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(tcp), 0, 0, _TTL, _TCP, 0) + ends.source[:4] + ends.target[:4]
    return ip[:10] + _checksum(ip) + ip[12:] + tcp


def changed(packet: bytes, segment: Segment) -> bytes:
    """Return *packet*, which is *segment*, with a bit in the middle of its payload changed, and the right checksum."""
    begin = (packet[0] & 15) * 4
    tcp = bytearray(packet[begin:])
    tcp[len(tcp) - 1 - segment.nbytes // 2] ^= 1
    return packet[:begin] + _summed(segment, bytes(tcp))


def _summed(segment: Segment, tcp: bytes) -> bytes:
    """Return *tcp*, headers and payload between the ends of *segment*, with its checksum."""
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
