"""Seeds of fuzzing: for each target a few inputs that reach deep code, generated instead of kept as files."""
from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bpsfast.collectives.p2p import protocol
from bpsfast.kernels.codecs import codec_reference
from bpsfast.node.transport import shm
from bpsfast.node.transport.rdma import rdma_messages
from bpsfast.orchestration import messages, security
from bpsfast.tools.perf.control import Message as PerfMessage
from tests.support.codec_kernel_calls import CODECS
from tests.support.fuzzed_parsers import TABLE


def sample(kind: Any) -> Any:
    """Return a value of a type described by `msgspec.inspect`; for a union, one of the first type."""
    name = type(kind).__name__
    if name == "StructType":
        return kind.cls(**{field.name: sample(field.type) for field in kind.fields})
    if name == "UnionType":
        return sample(next((each for each in kind.types if type(each).__name__ != "NoneType"), kind.types[0]))
    if name in ("ListType", "VarTupleType", "SetType"):
        return kind_of(name)([sample(kind.item_type)])
    if name == "TupleType":
        return tuple(sample(each) for each in kind.item_types)
    if name == "DictType":
        return {sample(kind.key_type): sample(kind.value_type)}
    if name == "LiteralType":
        return kind.values[0]
    return {"IntType": 1, "FloatType": 0.5, "BoolType": True, "StrType": "a", "BytesType": b"abcd"}.get(name)


def kind_of(name: str) -> Any:
    """Return the Python type of an array's description."""
    return {"ListType": list, "VarTupleType": tuple, "SetType": set}[name]


def _samples(union: Any) -> list[Any]:
    return [sample(msgspec.inspect.type_info(each)) for each in getattr(union, "__args__", [union])]


def control_messages() -> list[bytes]:
    """Return every message of each sender."""
    senders = (messages.NodeMessage, messages.SchedulerMessage, messages.LocalMessage)
    whole = [bytes([i]) + messages.encode(each) for i, union in enumerate(senders) for each in _samples(union)]
    return [*whole, b"\0\x81\xa4type\xa2\xff\xff", b"\0" + b"\x91" * 2000]


def local_channel() -> list[bytes]:
    """Return every message of a local channel, and two at once."""
    bodies = [messages.encode(each) for each in _samples(messages.LocalMessage)]
    bodies += [messages.encode(each) for each in _samples(shm.PeerHello) + _samples(shm.PeerWelcome)]
    framed = [struct.pack("<I", len(body)) + body for body in bodies]
    return [*framed, framed[0] + framed[1], struct.pack("<I", 1 << 28 | 4) + b"\x80\x80\x80\x80"]


def rdma_offers() -> list[bytes]:
    """Return every offer."""
    kinds = [each for each in vars(rdma_messages).values()
             if isinstance(each, type) and issubclass(each, messages.Message)]
    return [messages.encode(sample(msgspec.inspect.type_info(each))) for each in kinds if each is not messages.Message]


def stream_hello() -> list[bytes]:
    """Return a hello that is right except for the part that depends on the nonce."""
    hello = msgspec.msgpack.encode(security.StreamHello(peer=0, stream=1, epoch=1))
    return [bytes(32) + struct.pack("<H", len(hello)) + hello + bytes(32)]


def perf_control() -> list[bytes]:
    """Every message."""
    bodies = [msgspec.msgpack.encode(each) for each in _samples(PerfMessage)]
    return [struct.pack("<I", len(body)) + body for body in bodies]


def post_frames() -> list[bytes]:
    """Return every kind of frame, and a conversation."""
    kinds = [protocol.Frame(kind, number=1, nbytes=4 * (kind == protocol.EAGER)) for kind in range(1, 9)]
    packed = [each.pack() + bytes(each.n_payload) for each in kinds]
    return [*packed, b"".join(packed[:2] + packed[3:])]


def frame_headers() -> list[bytes]:
    """Return the same frames."""
    return post_frames()


def row_frames() -> list[bytes]:
    """Return a sum of two frames, and one without space."""
    whole = np.zeros(TABLE.stride * 2, np.uint8)
    TABLE.write(whole, np.array([1, 4, 6, 9]), np.ones((4, 2), np.float32))
    full = np.zeros(TABLE.stride * 2, np.uint8)
    TABLE.write(full, np.arange(20), np.ones((20, 2), np.float32))
    return [whole.tobytes(), full.tobytes()]


def codec_frames() -> list[bytes]:
    """Return whole frames of each codec."""
    values = np.linspace(-2, 3, 40)
    return [bytes([i, 40, flags]) + codec_reference.encode(codec, values.astype((np.float32, np.float64)[flags // 2]),
                                                   codec_reference.Generator(codec.seed))
            for i, codec in enumerate(CODECS) for flags in (0, 1, 2)]


def _header(slot: int, round: int, nbytes: int, flags: int = 0) -> bytes:
    return struct.pack("<6IQ", 0x31575042, slot | (round & 15) << 20 | 5 << 24, slot, round, 5, flags, nbytes)


def slots() -> list[bytes]:
    """Return writes of both parities, frames, an empty contribution, a repeated round, and one that is not due."""
    writes = _header(1, 1, 16) + bytes(range(16)) + _header(2, 2, 64) + bytes(64)
    framed = _header(3, 1, 24) + struct.pack("<Q", 16) + bytes(16) + _header(5, 3, 8) + bytes(8)
    longer = _header(5, 3, 24) + struct.pack("<Q", 16) + bytes(16)
    twice = 2 * (_header(1, 1, 16) + bytes(16))
    return [writes, framed, _header(1, 1, 0, 1), writes + framed, longer, twice, _header(2, 4, 64) + bytes(64)]


def sealed() -> list[bytes]:
    """Return unsealed writes; sealed ones, one of them changed or repeated; and a header that the peer made up.

    Flag 4 in the first byte: not sealed, but with checksums.
    """
    def write(slot: int, round: int, payload: bytes, flags: int = 0) -> bytes:
        return bytes([slot, round, flags, len(payload), 0]) + payload

    two = write(1, 1, bytes(range(16))) + write(2, 2, bytes(64))
    framed = write(3, 1, struct.pack("<Q", 16) + bytes(16)) + write(5, 3, bytes(8)) + write(1, 3, b"", 1)
    odd = bytes([1, 1, 0, 16, 255]) + _header(1, 1, 16) + bytes(16)
    whole, changed, repeated = (struct.pack("<QB", *each) for each in ((4097, 0), (60, 0), (4097, 1)))
    damaged = struct.pack("<QB", 40, 0)  # in the payload
    made = [whole + two + framed, changed + two, damaged + two, repeated + two, whole + odd,
            whole + write(6, 1, bytes(8))]
    return [b"\1" + bytes(48), b"\3" + bytes(200), b"\5" + bytes(200), b"\2" + whole + framed + two,
            *(bytes([kind]) + each for kind in (0, 4) for each in made)]


def rows() -> list[bytes]:
    """Return four frames of the target's shape, summed by two ranks and two nodes, with changes during the sum."""
    def frame(*indices: int) -> bytes:
        values = (24 + 4 * len(indices) + 63) // 64 * 64
        head = struct.pack(f"<3Q{len(indices)}I", values + 8 * len(indices) - 8, len(indices), 0, *indices)
        return head.ljust(values, b"\0").ljust(64 + 8 * 5, b"\1")

    overflow = struct.pack("<3Q", 16, 9, 1).ljust(64 + 8 * 5, b"\0")
    four = bytes([1, 2, 1]) + frame(0, 3) + frame(3, 4, 8) + frame() + frame(1, 2, 3)
    return [four, four + bytes([0, 24, 8, 1, 28, 5]), bytes([0, 2, 1]) + frame(0) + frame(1) + overflow,
            bytes([0, 1, 0]) + frame(0, 5) + bytes(3 * 104) + bytes([0, 28, 7]),
            bytes([0, 1, 0]) + frame(0, 1, 2, 3, 4, 5)[:104]]


def _entry(lane: int, part: int, round: int, flags: int = 0, segment: int = 0, offset: int = 0,
           count: int = 1) -> bytes:
    return bytes([0, lane]) + struct.pack("<3I2H2Q", part, count, round, flags, segment, offset, 0)


def engine() -> list[bytes]:
    """Return rounds of each kind of part, parked rounds, repeated results, and values out of bounds."""
    mapped, run = bytes([7, 0, 7, 1]), bytes([9, 0])
    word = b"".join(struct.pack("<Q", i) for i in range(4))
    both = [_entry(0, part, 1) + _entry(1, part, 1) for part in range(6)]
    row = struct.pack("<3QI", 64 + 16 - 8, 2, 0, 1) + struct.pack("<I", 4) + bytes(100)
    owned = mapped + both[0] + bytes([4, 0]) + word.ljust(88, b"\0") + bytes([6, 0, 1, 0]) + run
    rows_round = mapped + bytes([3, 0]) + row.ljust(152, b"\0") + both[2] + bytes([4, 2]) + row[:88]
    rows_round += bytes([6, 2, 1, 0])
    coded = mapped + _entry(0, 4, 1) + bytes([4, 4]) + struct.pack("<Q", 32) + word + bytes([6, 4, 1, 0]) + run
    again = _entry(0, 5, 1, segment=3) + _entry(1, 5, 1, flags=1) + run + 4 * (_entry(2, 5, 0) + run)
    retired = _entry(2, 5, 0) + bytes([8, 133]) + run
    far = bytes([2, 0]) + struct.pack("<Q", 1 << 31) + run
    return [owned, rows_round + run, coded, again, retired, far, _entry(0, 0, 1, count=65536) + run,
            mapped + _entry(0, 0, 1, offset=(1 << 64) - 8) + both[0] + run,
            mapped + both[1] + run + _entry(2, 1, 1) + run, both[0] + run + mapped + run + bytes([8, 0]) + run,
            bytes([8, 130]), _entry(0, 4, 1, flags=2) + run, mapped + _entry(0, 2, 1, offset=7) + run]


def memory() -> list[bytes]:
    """Return slots that are announced and returned, and a head that is too far."""
    entry = struct.pack("<3I2H2Q", 1, 1, 0, 1, 0, 40, 0)
    return [bytes(120) + b"\0" + entry + b"\x80" + entry, bytes(120) + b"\3" + struct.pack("<Q", 9)]


def stream() -> list[bytes]:
    """Return all partitions of the target."""
    whole = b"".join(struct.pack("<2I", i, n) + bytes(n) for i, n in enumerate((24, 8, 1)))
    return [bytes([0, 6]) + whole, bytes([1, 63]) + whole + whole]


def arrivals() -> list[bytes]:
    """Return writes, empty ones, frames, and one with a different immediate."""
    frame = bytes([1, 1]) + struct.pack("<Q", 16) + bytes(16)
    return [bytes([0, 0, 4, 3, 0, 0]), frame + bytes([0, 1]), bytes([8, 0]) + struct.pack("<Q", 0x05100000)]


def write(name: str, folder: Path) -> Sequence[bytes]:
    """Write the seeds of a target into *folder*, and return them."""
    found: list[bytes] = globals()[name]()
    for i, seed in enumerate(found):
        (folder / f"{i}").write_bytes(seed)
    return found
