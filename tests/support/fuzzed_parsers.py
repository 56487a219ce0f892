"""The Python parsers of peers' bytes, with a function for each that accepts any bytes or refuses them with its errors.

``python -m tests.support.fuzzed_parsers NAME LIBFUZZER-OPTIONS`` fuzzes one, guided by coverage (atheris).
"""
from __future__ import annotations

import contextlib
import functools
import socket
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np

from bpsfast.base import message_socket
from bpsfast.collectives.p2p import frame_socket, peer, protocol, transfer
from bpsfast.kernels.codecs import codec_kernels, codec_reference
from bpsfast.node.transport import shm
from bpsfast.node.transport.rdma import rdma_messages
from bpsfast.orchestration import messages, security
from bpsfast.orchestration.codec import count, flags_of
from bpsfast.orchestration.errors import BpsError, PeerLostError, ProtocolError
from bpsfast.orchestration.placement.partition import row_frame_nbytes
from bpsfast.tools.perf.control import Control, Message
from bpsfast.trainer.sparse_table import RowFrames
from tests.support.codec_kernel_calls import CODECS, DECODE
from tests.support.guarded_memory import GuardedMemory

TABLE = RowFrames(n_rows=20, row_shape=(2,), dtype=np.dtype(np.float32), n_parts=2, frame_rows=4,
                stride=-(-row_frame_nbytes(4, 8) // 64) * 64)
_MOST_ELEMENTS = 255
_MOST_FRAME_NBYTES = 4096


@contextlib.contextmanager
def _said(data: bytes, family: socket.AddressFamily = socket.AF_UNIX) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield our end and the other one, which has sent *data* and sends nothing more."""
    if family == socket.AF_UNIX:
        ours, theirs = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            theirs = socket.create_connection(server.getsockname())
            ours, _ = server.accept()
    with ours, theirs:
        theirs.sendall(data[:_MOST_FRAME_NBYTES])
        theirs.shutdown(socket.SHUT_WR)
        yield ours, theirs


def control_messages(data: bytes) -> None:
    """Decode a message of the control plane; encode an accepted one and decode it again."""
    sender = ("node", "scheduler", "local")[data[0] % 3 if data else 0]
    with contextlib.suppress(ProtocolError):
        transfer = messages.decode(data[1:], sender)
        again = messages.encode(transfer)
        assert messages.encode(messages.decode(again, sender)) == again


def local_channel(data: bytes) -> None:
    """Read frames from a local channel."""
    with _said(data) as (ours, _), message_socket.MessageSocket(ours, shm.decode) as line:
        with contextlib.suppress(ProtocolError, PeerLostError):
            while True:
                line.recv(0.0)


def rdma_offers(data: bytes) -> None:
    """Decode the messages of ranks before they connect over RDMA."""
    with contextlib.suppress(ProtocolError):
        rdma_messages.decode(data)


def stream_hello(data: bytes) -> None:
    """Accept a data connection of a peer that has proved the key."""
    with _said(security.MAGIC + data) as (ours, _), mock.patch.object(security, "verify", lambda *arguments: True):
        with contextlib.suppress(BpsError):
            security.plain_handshake_acceptor(ours, b"key", "context", peer=1, epoch=1, timeout_s=1.0)


def perf_control(data: bytes) -> None:
    """Read messages from the connection of ``bpsfast perf``."""
    with _said(data, socket.AF_INET) as (ours, _):
        control = Control(ours, 1.0)
        with contextlib.suppress(BpsError):
            while True:
                control.receive((Message.__args__), "anything")  # type: ignore[attr-defined]


def post_frames(data: bytes) -> None:
    """Read what another rank's endpoint sends, and want every payload that it announces: before the guarded page."""
    endpoint = mock.MagicMock(rank=0, job_error=lambda: None)
    talker = peer.Peer(endpoint, 1)

    def arrived(_: int, arrival: transfer.Arrival) -> None:
        assert arrival.data is None or len(arrival.data) == arrival.nbytes
        if arrival.number and arrival.nbytes <= _MOST_FRAME_NBYTES:
            place = _guarded()[0].take(arrival.nbytes)
            talker.want(transfer.Incoming(mock.MagicMock(address=place.ctypes.data), arrival))

    endpoint.receiver.arrived = arrived
    with _said(data) as (ours, _):
        talker.link = frame_socket.FrameSocket(ours, talker)
        with contextlib.suppress(ProtocolError, PeerLostError):
            while talker.link is not None:
                talker.link.read()


def frame_headers(data: bytes) -> None:
    """Read frame headers at every offset."""
    for offset in range(0, len(data) - protocol.HEADER.size + 1, 8):
        with contextlib.suppress(ProtocolError):
            frame = protocol.unpack(data, offset)
            assert protocol.unpack(frame.pack(), 0) == frame


def row_frames(data: bytes) -> None:
    """Read the sum of a table from memory with any contents."""
    memory = np.zeros(TABLE.stride * TABLE.n_parts, np.uint8)
    memory[: min(len(data), memory.size)] = np.frombuffer(data[: memory.size], np.uint8)
    with contextlib.suppress(ProtocolError):
        TABLE.needed(memory)
        indices, values = TABLE.read(memory)
        assert ((indices >= 0) & (indices < TABLE.n_rows)).all() and len(indices) == len(values)


@functools.cache
def _guarded() -> tuple[GuardedMemory, ...]:
    return tuple(GuardedMemory(32 * _MOST_ELEMENTS + (1 << 17)) for _ in range(3))


def codec_frames(data: bytes) -> None:
    """Decode a frame with the compiled kernel, before guarded pages, and compare it with the reference.

    The reference guides the fuzzer, which cannot see compiled code.
    """
    if len(data) < 3:
        return
    codec, n, add = CODECS[data[0] % len(CODECS)], max(1, data[1] % _MOST_ELEMENTS), bool(data[2] & 1)
    wide = "float64" if data[2] & 2 else "float32"
    frame = data[3 : 3 + _MOST_FRAME_NBYTES]
    dtype = codec_reference.wide_dtype(wide)
    wires, outs, scratches = _guarded()
    wire = wires.take(len(frame))
    wire[:] = np.frombuffer(frame, np.uint8)
    out = outs.take(n * dtype.itemsize).view(dtype)
    out[:] = np.arange(n)
    before = out.copy()
    scratch = scratches.take(codec_kernels.scratch_nbytes(codec, n, wide))
    scratch[:] = 0xFF
    result = DECODE(_decoder(CODECS.index(codec), wide))(
        out.ctypes.data, n, wire.ctypes.data, len(frame), count(codec, n), flags_of(codec), add, scratch.ctypes.data)
    try:
        want = codec_reference.add(codec, frame, before) if add else codec_reference.decode(codec, frame, n, wide)
    except Exception:  # the reference trusts its frame; if it raises, the kernel must refuse
        want = None
    assert result in (0, -1)
    if want is not None and result == 0:
        assert out.tobytes() == want.tobytes(), (codec, wide, n, add)


@functools.cache
def _decoder(index: int, wide: str) -> int:
    return codec_kernels.addresses(CODECS[index], wide).decode


PARSERS: dict[str, Callable[[bytes], None]] = {each.__name__: each for each in (
    control_messages, local_channel, rdma_offers, stream_hello, perf_control, post_frames, frame_headers, row_frames,
    codec_frames)}


def main(name: str, options: list[str]) -> None:
    """Fuzz one parser; ends the process."""
    import atheris

    parse = PARSERS[name]
    if parse is codec_frames:  # compile first, otherwise the first inputs count as slow
        for index in range(2 * len(CODECS)):
            _decoder(index // 2, ("float32", "float64")[index % 2])
    for module in (message_socket, messages, security, protocol, frame_socket, peer, rdma_messages, shm,
                   codec_reference, sys.modules[RowFrames.__module__], sys.modules[Control.__module__]):
        _instrument(atheris, module)
    atheris.Setup([name, *options], parse)
    atheris.Fuzz()


def _instrument(atheris: object, module: object) -> None:
    """Count the branches of all functions of *module* and of its classes."""
    for owner in (module, *(each for each in vars(module).values() if isinstance(each, type))):
        for key, value in list(vars(owner).items()):
            if callable(value) and getattr(value, "__module__", None) == getattr(module, "__name__", "") and hasattr(
                    value, "__code__"):
                with contextlib.suppress(Exception):
                    setattr(owner, key, atheris.instrument_func(value))  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
