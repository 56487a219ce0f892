"""broadcast: sends a rank's bytes to all ranks through one fixed tensor, in chunks: memory is bounded, sizes may vary.

The channel is a uint8 unit of 16 partitions. The root fills partition after partition, the other ranks take part with
empty arrivals: the "sum" of one contribution is its copy. Chunk c of the channel's life is partition c mod 16, round
c div 16 + 1; a partition gets its next chunk when its previous round is complete, which is when every receiver has
taken part in it, so nothing is overwritten before it was read. A broadcast begins with a header:

    offset  width  meaning
         0      4  magic
         4      4  number of roots: every root writes 1, and what arrives is the sum
         8      8  number of this broadcast on the channel
        16      8  payload bytes, which follow the header directly
        24      4  root's rank
        28      4  bytes of the text that are kept
        32     32  SHA-256 of the whole description
        64    192  description (UTF-8, cut off): name, dtype, shape
"""
from __future__ import annotations

import contextlib
import hashlib
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..base.dtypes import TABLE
from ..orchestration.errors import BpsError, ClosedError, ConfigError, MismatchError
from ..orchestration.messages import TensorSpec
from ..orchestration.placement.partition import round_after
from ..pyx.port import copy
from . import process
from .gpu.staging_buffers import broadcast as broadcast_on_device
from .session import Session
from .tensor_input import tensor_input
from .unit import Unit

N_PARTS = 16
PART_NBYTES = 256 << 10
HEADER_NBYTES = 256
_HEADER = struct.Struct("<4sIQQII32s192s")
_MAGIC = b"BPBC"
_CHANNEL = TensorSpec(name="bpsfast.broadcast", dtype="uint8", shape=(N_PARTS * PART_NBYTES,), average=False,
                      partition_nbytes=PART_NBYTES, separate=True)

#: (address, nbytes) of memory that is read or written in order.
Pieces = Sequence[tuple[int, int]]


class _Header(NamedTuple):
    n_roots: int
    sequence: int
    nbytes: int
    root: int
    digest: bytes
    text: str


class Broadcaster:
    """The broadcast channel of *session*. Any thread, one broadcast at a time, in the same order on all ranks."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._sequence = 0
        self._chunk = 0
        self._broken: BpsError | None = None

    def send(self, text: str, pieces: Pieces) -> None:
        """Send the bytes of *pieces* to all other ranks, described by *text*; return when all have taken part.

        Raises `MismatchError` if another rank sends too. Raises `StallError` or `PeerLostError` if a rank does not take
        part.
        """
        nbytes = sum(n for _, n in pieces)
        with self._lock, self._turn() as unit:
            unit.needed = ()
            header = _pack(self._sequence, nbytes, self._session.rank, text)
            memory = np.frombuffer(header, np.uint8)
            first = self._chunk
            stream = _Cursor([(memory.ctypes.data, HEADER_NBYTES), *pieces])
            for _ in range(-(-(HEADER_NBYTES + nbytes) // unit.stride)):
                self._fill(unit, stream)
            for chunk in range(max(first, self._chunk - unit.n_parts), self._chunk):
                self._wait(unit, chunk)
                if chunk == first:
                    self._header(unit, first, text)

    def receive(self, root: int, text: str, accept: Callable[[int], Pieces]) -> None:
        """Receive what rank *root* sends into the pieces that ``accept(nbytes)`` returns (drop it if there are none).

        Raises `MismatchError` if what is sent is not *text* from *root*; the channel stays usable if exactly one rank
        sent.
        """
        with self._lock, self._turn() as unit:
            unit.needed = (root,)
            first = self._chunk
            self._take_part(unit, first)
            self._wait(unit, first)
            header = self._header(unit, first, text)
            wrong = self._compare(header, root, text)
            stream = _Cursor([] if wrong else accept(header.nbytes))
            end = first + -(-(HEADER_NBYTES + header.nbytes) // unit.stride)
            for chunk in range(first + 1, min(end, first + unit.n_parts)):
                self._take_part(unit, chunk)
            for chunk in range(first, end):
                self._wait(unit, chunk)
                skip = HEADER_NBYTES if chunk == first else 0
                for address, n, offset in stream.take(unit.stride - skip):
                    self._copy(unit, chunk, skip + offset, address, n)
                if chunk + unit.n_parts < end:
                    self._take_part(unit, chunk + unit.n_parts)
            self._chunk = end
        if wrong is not None:
            raise wrong

    @contextlib.contextmanager
    def _turn(self) -> Iterator[Unit]:
        """Begin the next broadcast. One that fails leaves the channel out of step for good."""
        if self._broken is not None:
            self._session.port.check()
            raise self._broken
        self._session.tensors.declare([_CHANNEL])
        unit = self._session.tensors.unit(_CHANNEL.name)
        self._sequence += 1
        try:
            yield unit
        except BaseException as exc:
            self._broken = self._broken or ClosedError(
                f"rank {self._session.rank} cannot broadcast any more: its broadcast {self._sequence} failed "
                f"({type(exc).__name__}: {exc}), so the ranks are out of step")
            raise

    def _copy(self, unit: Unit, chunk: int, offset: int, address: int, nbytes: int) -> None:
        """Copy bytes of the complete *chunk* to *address*; inside the port: a shutdown in another thread waits."""
        part, round = _at(unit, chunk)
        source = unit.result_address(round, (part - unit.first_part) * unit.stride) + offset
        self._session.port.deliver(unit, address, source, nbytes, part, round, self._session.settings.timeout_s)

    def _fill(self, unit: Unit, stream: _Cursor) -> None:
        """Write and announce the next chunk of *stream*, once the last round of its partition is complete."""
        part, round = _at(unit, self._chunk)
        if self._chunk >= unit.n_parts:
            self._wait(unit, self._chunk - unit.n_parts)
        staging = unit.staging.part((part - unit.first_part) * unit.stride, unit.stride)
        for address, n, at in stream.take(unit.stride):
            copy(staging.address + at, address, n)
        self._session.port.submit(part, 1, round, staging.segment, staging.offset)
        self._chunk += 1

    def _take_part(self, unit: Unit, chunk: int) -> None:
        part, round = _at(unit, chunk)
        self._session.port.submit(part, 1, round, 0, 0, True)  # empty

    def _wait(self, unit: Unit, chunk: int) -> None:
        part, round = _at(unit, chunk)
        self._session.port.wait(unit, part, 1, round, self._session.settings.timeout_s)

    def _header(self, unit: Unit, chunk: int, text: str) -> _Header:
        """Return the header of the complete *chunk*; raise if not exactly one rank sent it as this broadcast."""
        raw = np.empty(HEADER_NBYTES, np.uint8)
        self._copy(unit, chunk, 0, raw.ctypes.data, HEADER_NBYTES)
        header = _unpack(raw.tobytes())
        if header is not None and header.n_roots == 1 and header.sequence == self._sequence:
            return header
        who = "no rank"
        if header is not None:
            who = f"{header.n_roots} ranks" if header.n_roots > 1 else f"a rank that is at broadcast {header.sequence}"
        self._broken = MismatchError(
            f"broadcast {self._sequence} ({text}) on rank {self._session.rank}: {who} took part as root; all ranks "
            "must call the same broadcasts in the same order with the same root_rank"
        )
        raise self._broken

    def _compare(self, header: _Header, root: int, text: str) -> MismatchError | None:
        if header.root == root and header.digest == _digest(text):
            return None
        return MismatchError(
            f"broadcast {self._sequence} differs: rank {self._session.rank} expects {text} from rank {root}, but rank "
            f"{header.root} sends {header.text}"
        )


class _Cursor:
    """A position in pieces of memory."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = iter(pieces)
        self._address = self._left = 0

    def take(self, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield (address, nbytes, offset within these) of the next *nbytes*, or of as many as there are."""
        offset = 0
        while offset < nbytes:
            if self._left == 0:
                piece = next(self._pieces, None)
                if piece is None:
                    return
                self._address, self._left = piece
                continue
            n = min(self._left, nbytes - offset)
            yield self._address, n, offset
            self._address += n
            self._left -= n
            offset += n


def _at(unit: Unit, chunk: int) -> tuple[int, int]:
    """Return the partition of the job, and its round, in which *chunk* is sent."""
    n_rounds, number = divmod(chunk, unit.n_parts)
    return unit.first_part + number, round_after(unit.first_round, n_rounds)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _pack(sequence: int, nbytes: int, root: int, text: str) -> bytes:
    kept = text.encode()[:192]
    return _HEADER.pack(_MAGIC, 1, sequence, nbytes, root, len(kept), _digest(text), kept)


def _unpack(raw: bytes) -> _Header | None:
    """Return the header in the bytes *raw* of a result; None if there is none."""
    magic, n_roots, sequence, nbytes, root, n_text, digest, text = _HEADER.unpack(raw)
    if n_roots > 1:  # the bytes of all roots were added: only this count means anything
        return _Header(n_roots, 0, 0, 0, b"", "")
    if magic != _MAGIC:
        return None
    return _Header(n_roots, sequence, nbytes, root, digest, text[:n_text].decode(errors="replace"))


def check_root(session: Session, root_rank: int) -> None:
    """Raise `ConfigError` if *root_rank* is no rank of the job."""
    if not isinstance(root_rank, int | np.integer):
        raise ConfigError(f"root_rank={root_rank!r} is a {type(root_rank).__name__}, expected the number of a rank")
    if not 0 <= root_rank < session.size:
        raise ConfigError(f"root_rank={root_rank}, but the job has ranks 0 to {session.size - 1}")


def broadcast(x: Any, root_rank: int, name: str | None = None) -> Any:
    """Copy *x* of rank *root_rank* to all ranks.

    All ranks must call their broadcasts in the same order, with the same shape and dtype; *name* must agree, too.

    Parameters
    ----------
    x
        Contiguous memory, on the CPU or a device, as for `push_pull`.

    Returns
    -------
    *x*, overwritten, if it is writable; else a new array. Work that is enqueued on a device after the return sees it.

    Raises
    ------
    MismatchError
        If the ranks disagree on root, name, shape or dtype.
    ConfigError
        If there is no rank *root_rank*.
    """
    session = process.current()
    check_root(session, root_rank)
    memory = session.devices.located(tensor_input(x))
    text = f"{name or 'broadcast'} {memory.dtype} {memory.shape}"
    if memory.location is not None:
        return broadcast_on_device(session, session.extension(Broadcaster), x, memory, root_rank, text)
    if session.rank == root_rank:
        if session.size > 1:
            session.extension(Broadcaster).send(text, [(memory.address, memory.nbytes)])
        return x if memory.writable else memory.array().copy()
    target = memory
    if not memory.writable:
        x = np.empty(memory.shape, TABLE[memory.dtype].numpy)
        target = tensor_input(x)
    session.extension(Broadcaster).receive(root_rank, text, lambda nbytes: [(target.address, nbytes)])
    return x


def broadcast_bytes(data: bytes | None, root_rank: int, text: str) -> bytes:
    """Return rank *root_rank*'s *data* (None elsewhere) on every rank; any length. *text* must agree."""
    session = process.current()
    check_root(session, root_rank)
    if session.rank == root_rank:
        assert data is not None, "the root has data"
        if session.size > 1:
            memory = np.frombuffer(data, np.uint8)
            session.extension(Broadcaster).send(text, [(memory.ctypes.data, memory.nbytes)])
        return data
    received = np.empty(0, np.uint8)

    def accept(nbytes: int) -> Pieces:
        nonlocal received
        received = np.empty(nbytes, np.uint8)
        return [(received.ctypes.data, nbytes)]

    session.extension(Broadcaster).receive(root_rank, text, accept)
    return received.tobytes()
