"""A group of ranks and its collectives: all-reduce, broadcast, all-gather, all-to-all and others.

Most collectives are a list of loads: bytes from one, some or all members to one, some or all of them, combined by the
summation services like gradients. Collectives in which each byte has one sender and one receiver are made of messages.
Before either goes the fingerprint of the call: if the members' calls differ, all of them raise `MismatchError`.
"""
from __future__ import annotations

import contextlib
import hashlib
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..orchestration.errors import BpsError, ClosedError, ConfigError, MismatchError, StallError, UnsupportedError
from ..orchestration.placement.partition import OPS
from ..pyx.direct import MOST_RANKS
from ..pyx.port import copy
from ..trainer.chunk_descriptors import CHUNK_DTYPE
from ..trainer.session import Session
from ..trainer.tensor_input import TensorInput, from_array
from ..trainer.unit import Unit
from .chunk_stream import FINGERPRINTS, PRIORITY, ChunkSize, ChunkStream, chunk_sizes, spec_of, split
from .machine_channel import Load, MachineChannel
from .p2p.endpoint import P2PEndpoint
from .p2p.message_collectives import MessageCall

#: Bytes of each member's call that the error of a mismatch shows.
_CALL_NBYTES = 128
_RAW = np.dtype((np.void, CHUNK_DTYPE.itemsize))
_FINGERPRINT = "int64", "band", FINGERPRINTS
_BYTES = "uint8", "sum"  # of one contribution: its copy


class Group:
    """Collectives of *ranks* of *session*, which is one of them; all members make the same calls in the same order.

    Any thread, one call at a time: a second one waits for its turn. Memory is the caller's, contiguous, and must not be
    written meanwhile. After a failed call (a member called something else, or did not call in time) the group is
    unusable: the members' calls are out of step. *name*: the same on all members, and of no other group of the job. All
    calls raise `MismatchError` if members call different collectives; the text says what each called. All calls raise
    `StallError`, `PeerLostError` or `ClosedError` if a member does not call in time, or is lost.
    """

    def __init__(self, session: Session, ranks: Sequence[int], name: str, timeout_s: float) -> None:
        self.session = session
        self.ranks = tuple(ranks)
        self.name = name
        self.timeout_s = timeout_s
        if sorted(set(self.ranks)) != sorted(self.ranks) or not set(self.ranks) <= set(range(session.size)):
            raise ConfigError(f"group {name!r}: ranks {self.ranks} are not different ranks of a job of {session.size}")
        if session.rank not in self.ranks:
            raise ConfigError(f"group {name!r} is of ranks {self.ranks}; rank {session.rank} is none of them")
        self.rank, self.size = self.ranks.index(session.rank), len(self.ranks)
        self._declared = () if self.size == session.size else tuple(sorted(self.ranks))
        self._sizes = chunk_sizes(session.n_nodes + session.n_helpers == 1)
        self._streams: dict[tuple[str, str, ChunkSize], ChunkStream] = {}
        self._is_direct = (session.n_nodes == 1 and self.size <= MOST_RANKS and session.settings.sums == "on"
                           and session.settings.direct_sums == "auto")
        self._machine_channel: MachineChannel | None = None
        self._lock = threading.Lock()
        self._channel = zlib.crc32(name.encode())
        self._calls = 0
        self._broken: BpsError | None = None
        self._closed = False
        self._within_s: float | None = None

    @property
    def p2p(self) -> P2PEndpoint:
        """Messages between ranks of the job."""
        return self.session.extension(P2PEndpoint)

    # -- collectives -----------------------------------------------------------------------------------------------

    def all_reduce(self, x: TensorInput, out: TensorInput, op: str = "sum") -> None:
        """Combine *x* of all members into *out* on all (it may be *x*); *op*: "avg" or one of `partition.OPS`."""
        self._check_op(op)
        _check_size(x, out)
        self._run(f"all_reduce {op} {x.dtype} {x.shape}", x.dtype, op, [Load(x.address, out.address, x.nbytes)])

    def reduce(self, x: TensorInput, out: TensorInput | None, root: int, op: str = "sum") -> None:
        """Combine *x* of all members into *out* on the *root*-th member; others' is None."""
        self._check_op(op)
        self._check_root(root)
        destination = out.address if out is not None and root == self.rank else 0
        self._run(f"reduce {op} {x.dtype} {x.shape} to {root}", x.dtype, op, [Load(x.address, destination, x.nbytes)])

    def reduce_scatter(self, xs: Sequence[TensorInput], out: TensorInput, op: str = "sum") -> None:
        """Combine the i-th of *xs* of all members into *out* on the i-th member. All of one dtype; sizes may differ."""
        self._check_op(op)
        self._check_number(xs)
        _check_size(xs[self.rank], out)
        self._run(f"reduce_scatter {op} {out.dtype} {[x.nbytes for x in xs]}", out.dtype, op,
                  [Load(x.address, out.address if i == self.rank else 0, x.nbytes) for i, x in enumerate(xs)])

    def broadcast(self, x: TensorInput, root: int) -> None:
        """Overwrite *x* by that of the *root*-th member."""
        self._check_root(root)
        is_root = root == self.rank
        self._run(f"broadcast {x.dtype} {x.shape} from {root}", *_BYTES,
                  [Load(x.address if is_root else 0, 0 if is_root else x.address, x.nbytes, root)])

    def all_gather(self, x: TensorInput, outs: Sequence[TensorInput]) -> None:
        """Put *x* of the i-th member into the i-th of *outs* of all, whose sizes all know; the own one may be *x*."""
        self._check_number(outs)
        _check_size(x, outs[self.rank])
        self._run(f"all_gather {x.dtype} {[out.nbytes for out in outs]}", *_BYTES,
                  [Load(x.address, 0 if out.address == x.address else out.address, out.nbytes, i) if i == self.rank
                   else Load(0, out.address, out.nbytes, i) for i, out in enumerate(outs)])

    def gather(self, x: TensorInput, outs: Sequence[TensorInput], root: int) -> None:
        """Put *x* of the i-th member into the i-th of *outs* of the *root*-th, which knows their sizes."""
        self._check_root(root)
        if root == self.rank:
            self._check_number(outs)
        self._exchange(f"gather to {root}", (x, outs), lambda call: call.gather(root, x, outs))

    def scatter(self, xs: Sequence[TensorInput], out: TensorInput, root: int) -> None:
        """Put the i-th of *xs* of the *root*-th member into *out* of the i-th. Sizes may differ."""
        self._check_root(root)
        if root == self.rank:
            self._check_number(xs)
        self._exchange(f"scatter from {root}", (xs, out), lambda call: call.scatter(root, xs, out))

    def all_to_all(self, xs: Sequence[TensorInput], outs: Sequence[TensorInput]) -> None:
        """Put the j-th of *xs* of the i-th member into the i-th of *outs* of the j-th. Sizes may differ."""
        self._check_number(xs)
        self._check_number(outs)
        self._exchange("all_to_all", (xs, outs), lambda call: call.all_to_all(xs, outs))

    def broadcast_bytes(self, data: bytes, root: int) -> bytes:
        """Return the *data* of the *root*-th member, of any length; that of others is ignored."""
        length = np.array([len(data)], np.int64)
        self.broadcast(from_array(length), root)
        whole = np.frombuffer(data, np.uint8).copy() if self.rank == root else np.empty(int(length[0]), np.uint8)
        if whole.nbytes:
            self.broadcast(from_array(whole), root)
        return whole.tobytes()

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the *data* of all members, of any length, in their order."""
        lengths = [np.empty(1, np.int64) for _ in range(self.size)]
        self.all_gather(from_array(np.array([len(data)], np.int64)), [from_array(length) for length in lengths])
        wholes = [np.empty(int(length[0]), np.uint8) for length in lengths]
        self.all_gather(from_array(np.frombuffer(data, np.uint8).copy()), [from_array(whole) for whole in wholes])
        return [whole.tobytes() for whole in wholes]

    def barrier(self, note: str = "") -> None:
        """Wait until all members call this with the same *note*."""
        self._run(f"barrier {note}".rstrip(), *_BYTES, [])

    @contextlib.contextmanager
    def within(self, timeout_s: float) -> Iterator[None]:
        """Limit the calls of this thread inside the context to *timeout_s*. One thread at a time."""
        self._within_s = timeout_s
        try:
            yield
        finally:
            self._within_s = None

    def close(self) -> None:
        """Release the group's memory, which is free once all members have done so. Idempotent; does not wait.

        A call under way in another thread fails within a second, unless it completes before.
        """
        self._closed = True
        if not self._lock.acquire(blocking=False):
            return  # the call under way closes the group at its end
        try:
            if self._broken is None and not self.session.closed:
                for stream in self._streams.values():
                    stream.close()
            if self._machine_channel is not None and not self.session.closed:
                self._machine_channel.close(retires=self._broken is None)
                self._machine_channel = None
            self._streams.clear()
        finally:
            self._lock.release()

    def _exchange(self, text: str, owner: object, exchange: Callable[[MessageCall], None]) -> None:
        """Call *exchange* with a call that has this number as its tag, once all members are known to make the same."""
        self._run(text, *_BYTES, [], lambda: exchange(MessageCall(
            self.p2p, self._channel, self.ranks, self.rank, owner, self._limit_s, self._calls)))

    def _run(self, text: str, dtype: str, op: str, loads: Sequence[Load],
             then: Callable[[], None] = lambda: None) -> None:
        self.session.require_open()  # before the lock, which a fork may have inherited locked
        with self._lock:
            self._require_usable()
            self._calls += 1
            try:
                if self.size > 1:
                    self._call(f"call {self._calls}: {text}", dtype, op, loads)
                else:
                    _alone(loads)
                then()
            except BaseException as exc:
                self._broken = exc if isinstance(exc, MismatchError) else ClosedError(
                    f"group {self.name!r} cannot be used any more: its call {self._calls} ({text}) failed "
                    f"on rank {self.session.rank} ({type(exc).__name__}: {exc})")
                if isinstance(exc, StallError):  # the error names a stream, not the call
                    raise StallError(f"call {self._calls} of group {self.name!r}, {text}: {exc}") from exc
                raise
        if self._closed:
            self.close()

    def _call(self, text: str, dtype: str, op: str, loads: Sequence[Load]) -> None:
        if self._is_direct:
            self._check(text, self._run_directly(text, dtype, op, loads))
            return
        words = _fingerprint(text)
        fingerprints = self._stream(*_FINGERPRINT)
        descriptors, units = [fingerprints.fingerprint(words)], [fingerprints.unit]
        pieces = [piece for load in loads for piece in _pieces(load, self._sizes[0])]
        if any((dtype, op, size) not in self._streams for size, _, _ in pieces):
            self._check(text, self._go(descriptors, units))  # else members might wait to declare different streams
            descriptors, units = [], []
        for size, n, load in pieces:
            stream = self._stream(dtype, op, size)
            descriptors.append(_filled(stream.chunks(n), load, size.chunk_nbytes))
            units.append(stream.unit)
        self._check(text, self._go(descriptors, units))

    def _run_directly(self, text: str, dtype: str, op: str, loads: Sequence[Load]) -> bool:
        if self._machine_channel is None:
            self._machine_channel = MachineChannel(self.session, f"{self.name}/channel", self.ranks, self._declared,
                                                   PRIORITY, self._limit_s)
        return self._machine_channel.run(int(_fingerprint(text)[0]), self._calls, dtype, op, loads, self._limit_s,
                                         self._require_open)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"group {self.name!r} was closed while a call was under way")

    def _check(self, text: str, do_agree: bool) -> None:
        if not do_agree:
            raise MismatchError(f"members of group {self.name!r} called different collectives: "
                                f"{self._describe_calls(text)}")

    def _go(self, chunks: list[np.ndarray[Any, Any]], units: list[Unit]) -> bool:
        def subject_of(i: int) -> tuple[Unit, int, int]:
            self._require_open()
            for some, unit in zip(chunks, units):
                if i < len(some):
                    return unit, int(some["part"][i]), int(some["round"][i])
                i -= len(some)
            raise AssertionError("no such chunk")

        # where pages are large a stream has fewer chunks than its size says
        ahead = min(*(size.n_chunks for size in self._sizes), *(unit.n_parts for unit in units))
        # As bytes: for records NumPy compares the fields in Python.
        together = np.concatenate([some.view(_RAW) for some in chunks]).view(CHUNK_DTYPE)
        return self.session.port.pipelined_transfer(together, ahead, subject_of, self._limit_s)

    @property
    def _limit_s(self) -> float:
        """How long the current call may take."""
        return self.timeout_s if self._within_s is None else self._within_s

    def _describe_calls(self, text: str) -> str:
        """Return what each member called, in words. All members call this after a mismatch."""
        calls = np.full(self.size * _CALL_NBYTES, 0xFF, np.uint8)  # ones do not change the bytes of others
        mine = np.zeros(_CALL_NBYTES, np.uint8)
        raw = text.encode()[:_CALL_NBYTES]
        mine[:len(raw)] = np.frombuffer(raw, np.uint8)
        calls[self.rank * _CALL_NBYTES:][:_CALL_NBYTES] = mine
        stream = self._stream(*_FINGERPRINT)
        chunks = stream.chunks(-(-calls.nbytes // FINGERPRINTS.chunk_nbytes))
        load = Load(calls.ctypes.data, calls.ctypes.data, calls.nbytes)
        self._go([_filled(chunks, load, FINGERPRINTS.chunk_nbytes)], [stream.unit])
        who: dict[str, list[int]] = {}
        for rank, row in zip(self.ranks, calls.reshape(self.size, _CALL_NBYTES)):
            who.setdefault(row.tobytes().rstrip(b"\0").decode(errors="replace"), []).append(rank)
        return "; ".join(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {what}"
                         for what, ranks in who.items())

    def _stream(self, dtype: str, op: str, size: ChunkSize) -> ChunkStream:
        key = dtype, op, size
        if key not in self._streams:
            spec = spec_of(self.name, self._declared, dtype, op, size)
            self._streams[key] = ChunkStream(self.session, spec, self._limit_s)
        return self._streams[key]

    def _require_usable(self) -> None:
        self.session.require_open()
        if self._broken is not None:
            self.session.port.check()  # if the job is over, that is the better reason
            raise self._broken
        if self._closed:
            raise ClosedError(f"group {self.name!r} is closed")

    def _check_op(self, op: str) -> None:
        if op != "avg" and op not in OPS:
            raise UnsupportedError(f"group {self.name!r} cannot combine by {op!r}; it can by avg, {', '.join(OPS)}")

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise ConfigError(f"root {root}, but group {self.name!r} has members 0 to {self.size - 1}")

    def _check_number(self, memories: Sequence[TensorInput]) -> None:
        if len(memories) != self.size:
            raise ConfigError(f"{len(memories)} tensors for the {self.size} members of group {self.name!r}")


def _pieces(load: Load, wide: ChunkSize) -> list[tuple[ChunkSize, int, Load]]:
    """Return (chunk size, number of chunks, their bytes) of *load*."""
    found = []
    at = 0
    for size, n in split(load.nbytes, wide):
        nbytes = min(n * size.chunk_nbytes, load.nbytes - at)
        found.append((size, n, Load(load.source and load.source + at, load.destination and load.destination + at,
                                     nbytes)))
        at += nbytes
    return found


def _filled(chunks: np.ndarray[Any, Any], load: Load, chunk_nbytes: int) -> np.ndarray[Any, Any]:
    """Fill in source, destination and size of *chunks* that carry *load*; return them."""
    at = np.arange(len(chunks), dtype=np.uint64) * np.uint64(chunk_nbytes)
    chunks["nbytes"] = np.minimum(np.uint64(load.nbytes) - at, np.uint64(chunk_nbytes))
    if load.source:
        chunks["source"] = at + np.uint64(load.source)
    if load.destination:
        chunks["destination"] = at + np.uint64(load.destination)
    return chunks


def _alone(loads: Sequence[Load]) -> None:
    for load in loads:
        if load.source and load.destination and load.source != load.destination:
            copy(load.destination, load.source, load.nbytes)


def _fingerprint(text: str) -> np.ndarray[Any, Any]:
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    return np.array([digest, ~digest & (1 << 64) - 1], np.uint64)


def _check_size(x: TensorInput, out: TensorInput) -> None:
    if x.nbytes != out.nbytes:
        raise ConfigError(f"{x.nbytes} bytes of input for {out.nbytes} bytes of output")


def _counts_of_groups(session: Session) -> Counter[tuple[int, ...]]:
    """Return how many groups of *session* were made of the same ranks in the same order (`Session.extension`)."""
    return Counter()


def make_group(session: Session, ranks: Sequence[int], timeout_s: float | None = None) -> Group:
    """Return a new group of *ranks* of *session*: its i-th member is the i-th of them.

    All of them call this equally often for the same *ranks*, in the same order; other ranks need not. Nothing is
    exchanged before the first collective. *timeout_s*: how long a collective may take; None: by the setting. Raises
    `ConfigError` if this rank is none of *ranks*, or they are not ranks of the job.
    """
    key = tuple(ranks)
    counts = session.extension(_counts_of_groups)
    number = counts[key]
    counts[key] += 1
    is_all = key == tuple(range(session.size))
    who = "all" if is_all else hashlib.blake2b(repr(key).encode(), digest_size=8).hexdigest()
    return Group(session, key, f"bpsfast.group/{who}/{number}",
                 session.settings.timeout_s if timeout_s is None else timeout_s)
