"""A group of ranks and its collectives: all-reduce, broadcast, all-gather, all-to-all and others.

Most collectives are a list of loads: bytes from one, some or all members to one, some or all of them, combined by the
summation services like gradients. Collectives in which each byte has one sender and one receiver are made of messages.
Before either goes the fingerprint of the call: if the members' calls differ, all of them raise `MismatchError`.
"""
from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..orchestration.errors import (
    BpsError,
    BusyError,
    ClosedError,
    ConfigError,
    MismatchError,
    StallError,
    UnsupportedError,
)
from ..orchestration.placement.partition import OPS
from ..pyx.direct import DONE, MOST_RANKS, CallCount, CallOptions, DirectCalls
from ..pyx.port import copy
from ..trainer.chunk_descriptors import CHUNK_DTYPE
from ..trainer.guarded_port import LATER_S
from ..trainer.session import Session
from ..trainer.tensor_input import TensorInput, from_array
from ..trainer.unit import Unit
from .chunk_stream import FINGERPRINTS, PRIORITY, ChunkSize, ChunkStream, chunk_sizes, spec_of, split
from .machine_channel import Load, MachineChannel, number_of, open_machine_channel
from .p2p.endpoint import P2PEndpoint
from .p2p.message_collectives import MessageCall

#: Bytes of each member's call that the error of a mismatch shows.
_CALL_NBYTES = 128
_RAW = np.dtype((np.void, CHUNK_DTYPE.itemsize))
_FINGERPRINT = "int64", "band", FINGERPRINTS
_BYTES = "uint8", "sum"  # of one contribution: its copy
_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")


class _CallsAtOnce:
    """What the calls of `Group.calls_at_once` leave to Python (`pyx.direct.DirectCalls`)."""

    def __init__(self, group: Group, channel: MachineChannel, timeout_s: Callable[[Any], float],
                 failed: Callable[[BaseException], BaseException]) -> None:
        self._group = group
        self._timeout_of, self._failed = timeout_s, failed
        self._timeout_s = group.timeout_s
        self._waits = channel.waits(lambda: group._count.n, lambda: self._timeout_s, group._require_open)
        self.look, self.require = self._waits.look, channel.require
        self.start_deferred = group.session.port.start_deferred

    def close(self) -> None:
        if self._group._closed:
            self._group.close()

    def known(self, operation: str, dtype: str, sizes: tuple[int, ...], root: int) -> tuple[int, str]:
        text = call_text(operation, dtype, sizes, root=root)
        return number_of(text), text

    def timeout_s(self, options: Any) -> float:
        self._timeout_s = self._timeout_of(options)
        return self._timeout_s + LATER_S

    def end(self, status: int, began_ns: int, text: str) -> None:
        self._waits.end(status, began_ns)
        self._group._check(text, status == DONE)

    def failed(self, error: BaseException, text: str) -> BaseException:
        self._waits.failed(error)
        failure = self._group._break(error, text)
        if failure is not error:
            failure.__cause__ = error
        return self._failed(failure)


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
        self._is_direct = (session.n_nodes == 1 and 1 < self.size <= MOST_RANKS and session.settings.sums == "on"
                           and not session.membership.goes_on
                           and session.settings.direct_sums == "auto")
        self._machine_channel: MachineChannel | None = None
        self._at_once: DirectCalls | None = None
        self._n_calls_before = 0  # by objects that are closed
        self._unreadable: set[type] = set()  # tensors that only Python can read
        self._lock = threading.RLock()  # reentrant: a call by a signal handler raises, and does not wait for itself
        self._channel = zlib.crc32(name.encode())
        self._count = CallCount()
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
        self._run(call_text("all_reduce", x.dtype, x.shape, op), x.dtype, op, [Load(x.address, out.address, x.nbytes)])

    def reduce(self, x: TensorInput, out: TensorInput | None, root: int, op: str = "sum") -> None:
        """Combine *x* of all members into *out* on the *root*-th member; others' is None."""
        self._check_op(op)
        self._check_root(root)
        destination = out.address if out is not None and root == self.rank else 0
        self._run(call_text("reduce", x.dtype, x.shape, op, root), x.dtype, op,
                  [Load(x.address, destination, x.nbytes)])

    def reduce_scatter(self, xs: Sequence[TensorInput], out: TensorInput, op: str = "sum") -> None:
        """Combine the i-th of *xs* of all members into *out* on the i-th member. All of one dtype; sizes may differ."""
        self._check_op(op)
        self._check_number(xs)
        _check_size(xs[self.rank], out)
        self._run(call_text("reduce_scatter", out.dtype, [x.nbytes for x in xs], op), out.dtype, op,
                  [Load(x.address, out.address if i == self.rank else 0, x.nbytes) for i, x in enumerate(xs)])

    def broadcast(self, x: TensorInput, root: int) -> None:
        """Overwrite *x* by that of the *root*-th member."""
        self._check_root(root)
        is_root = root == self.rank
        self._run(call_text("broadcast", x.dtype, x.shape, root=root), *_BYTES,
                  [Load(x.address if is_root else 0, 0 if is_root else x.address, x.nbytes, root)])

    def all_gather(self, x: TensorInput, outs: Sequence[TensorInput]) -> None:
        """Put *x* of the i-th member into the i-th of *outs* of all, whose sizes all know; the own one may be *x*."""
        self._check_number(outs)
        _check_size(x, outs[self.rank])
        self._run(call_text("all_gather", x.dtype, [out.nbytes for out in outs]), *_BYTES,
                  [Load(x.address, 0 if out.address == x.address else out.address, out.nbytes, i) if i == self.rank
                   else Load(0, out.address, out.nbytes, i) for i, out in enumerate(outs)])

    def gather(self, x: TensorInput, outs: Sequence[TensorInput], root: int) -> None:
        """Put *x* of the i-th member into the i-th of *outs* of the *root*-th, which knows their sizes."""
        self._check_root(root)
        if root == self.rank:
            self._check_number(outs)
        self._exchange(f"gather to {root}", {root: x}, dict(enumerate(outs)) if root == self.rank else {})

    def scatter(self, xs: Sequence[TensorInput], out: TensorInput, root: int) -> None:
        """Put the i-th of *xs* of the *root*-th member into *out* of the i-th. Sizes may differ."""
        self._check_root(root)
        if root == self.rank:
            self._check_number(xs)
        self._exchange(f"scatter from {root}", dict(enumerate(xs)) if root == self.rank else {}, {root: out})

    def all_to_all(self, xs: Sequence[TensorInput], outs: Sequence[TensorInput]) -> None:
        """Put the j-th of *xs* of the i-th member into the i-th of *outs* of the j-th. Sizes may differ.

        The i-th of *outs* may be the i-th of *xs*, and overlaps no other of them.
        """
        self._check_number(xs)
        self._check_number(outs)
        self._exchange("all_to_all", dict(enumerate(xs)), dict(enumerate(outs)))

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
        """Release the group's memory, which is free once all members have done so. Idempotent; does not wait. Does
        nothing in a fork.

        A call under way in another thread fails within a second, unless it completes before.
        """
        self._closed = True
        if self._at_once is not None:
            self._at_once.refuses = True
        if self.session.pid != os.getpid() or not self._lock.acquire(blocking=False):
            return  # the call under way closes the group at its end
        try:
            if self._count.is_inside:  # called by a signal handler
                return
            if self._broken is None and not self.session.closed:
                for stream in self._streams.values():
                    stream.close()
            if self._machine_channel is not None and not self.session.closed:
                self._machine_channel.close(retires=self._broken is None)
                self._machine_channel = None
            self._n_calls_before, self._at_once = self.n_calls_at_once, None
            self._streams.clear()
        finally:
            self._lock.release()

    def _exchange(self, text: str, sends: Mapping[int, TensorInput], receives: Mapping[int, TensorInput]) -> None:
        """Send and receive these, by the other member's place, as call *text*."""
        def exchange() -> None:
            channel = self._direct_channel()
            if channel is not None:
                self._check(text, channel.exchange(text, self._count.n, sends, receives, self._limit_s,
                                                   self._require_open))
                return
            if self.size > 1:  # the first message is sent once all members are known to make the same call
                self._move(text, *_BYTES, [])
            MessageCall(self.p2p, self._channel, self.ranks, self.rank, (sends, receives), self._limit_s, self._count.n
                        ).exchange(sends, receives)

        self._do(text, exchange)

    def _run(self, text: str, dtype: str, op: str, loads: Sequence[Load]) -> None:
        """Carry out *loads* as call *text*."""
        self._do(text, lambda: self._move(text, dtype, op, loads) if self.size > 1 else _alone(loads))

    def _do(self, text: str, call: Callable[[], None]) -> None:
        self.session.require_open()  # before the lock, which a fork may have inherited locked
        try:
            with self._turn():
                self._require_usable()
                self._count.n += 1
                try:
                    call()
                except BaseException as exc:
                    failure = self._break(exc, text)
                    if failure is exc:
                        raise
                    raise failure from exc
        finally:
            if self._closed:
                self.close()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the lock for a call. Raises as `require_outside`."""
        with self._lock:
            self.require_outside()
            self._count.is_inside = True
            try:
                yield
            finally:
                self._count.is_inside = False

    def require_outside(self) -> None:
        """Raise `BusyError` inside a call, in its thread: the call cannot end before what is called here."""
        if not self._count.is_inside or not self._lock.acquire(blocking=False):
            return
        try:
            if self._count.is_inside:
                raise BusyError(f"group {self.name!r} is called inside another call of it, as by a signal handler; "
                                "let the handler set a flag, and make the call after that one")
        finally:
            self._release()

    def _release(self) -> None:
        """Release the lock outside a call; then close the group if another thread wanted to do that meanwhile."""
        self._lock.release()
        if self._closed:
            self.close()

    def _break(self, error: BaseException, text: str) -> BaseException:
        """Note that the call *text* has failed with *error*; return what to raise."""
        if self._at_once is not None:
            self._at_once.refuses = True
        self._broken = error if isinstance(error, MismatchError) else ClosedError(
            f"group {self.name!r} cannot be used any more: its call {self._count.n} ({text}) failed "
            f"on rank {self.session.rank} ({type(error).__name__}: {error})")
        if isinstance(error, StallError):  # the error names a stream, not the call
            return StallError(f"call {self._count.n} of group {self.name!r}, {text}: {error}")
        return error

    def _move(self, text: str, dtype: str, op: str, loads: Sequence[Load]) -> None:
        channel = self._direct_channel()
        if channel is not None:
            self._check(text, channel.run(text, self._count.n, dtype, op, loads, self._limit_s, self._require_open))
            return
        words = _fingerprint(self._numbered(text))
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

    def calls_at_once(self, kind: type, options: dict[str, CallOptions], turn: object,
                      timeout_s: Callable[[Any], float], failed: Callable[[BaseException], BaseException]
                      ) -> DirectCalls | None:
        """Return what makes calls of tensors of type *kind* in the least time (`pyx.direct.DirectCalls`).

        Members may make a call either way. None: the members do not sum directly, have made no call yet, are in one, or
        such tensors have to be read by Python. *timeout_s* returns the timeout in a call's options, *failed* what to
        raise for an error.
        """
        if self._machine_channel is None or kind in self._unreadable or not self._lock.acquire(blocking=False):
            return None
        try:
            if self._at_once is None and self._broken is None and not self._closed and not self._count.is_inside:
                what = _CallsAtOnce(self, self._machine_channel, timeout_s, failed)
                self._at_once = self._machine_channel.direct_calls(kind, options, turn, self._lock, self._count, what)
        except TypeError:
            self._unreadable.add(kind)
            return None
        finally:
            self._release()
        return self._at_once

    @property
    def n_calls_at_once(self) -> int:
        """How many calls were made by what `calls_at_once` returns."""
        return self._n_calls_before + (self._at_once.n_calls if self._at_once is not None else 0)

    def _direct_channel(self) -> MachineChannel | None:
        """Return the channel of the members' direct calls; None: they make none."""
        if self._is_direct and self._machine_channel is None:
            self._machine_channel = open_machine_channel(self.session, f"{self.name}/channel", self.ranks,
                                                         self._declared, PRIORITY, self._limit_s)
            self._is_direct = self._machine_channel is not None
        return self._machine_channel

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"group {self.name!r} was closed while a call was under way")

    def _check(self, text: str, do_agree: bool) -> None:
        if not do_agree:
            raise MismatchError(f"members of group {self.name!r} called different collectives: "
                                f"{self._describe_calls(self._numbered(text))}")

    def _numbered(self, text: str) -> str:
        return f"call {self._count.n}: {text}"

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
        return self.session.port.pipelined_transfer(together, ahead, subject_of, self._limit_s, self.ranks)

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
        self.session.membership.require(self.ranks, f"group {self.name!r}")

    def _check_op(self, op: str) -> None:
        if op != "avg" and op not in OPS:
            raise UnsupportedError(f"group {self.name!r} cannot combine by {op!r}; it can by avg, {', '.join(OPS)}")

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise ConfigError(f"root {root}, but group {self.name!r} has members 0 to {self.size - 1}")

    def _check_number(self, memories: Sequence[TensorInput]) -> None:
        if len(memories) != self.size:
            raise ConfigError(f"{len(memories)} tensors for the {self.size} members of group {self.name!r}")


def call_text(operation: str, dtype: str = "", sizes: Sequence[int] = (), op: str = "sum", root: int = -1) -> str:
    """Return what a call is called in errors, and by what members recognize it.

    *sizes*: the shape of the one tensor, or the bytes of each member's.
    """
    words = [operation]
    if operation in _REDUCTIONS:
        words.append(op)
    if dtype:
        words += [dtype, str(tuple(sizes))]
    if root >= 0:
        words.append(f"{'from' if operation == 'broadcast' else 'to'} {root}")
    return " ".join(words)


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
