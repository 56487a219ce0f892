"""A unit on one rank: a tensor, or a bucket of fused tensors, that is summed in rounds.

Its partitions have consecutive numbers and lie `stride` bytes apart, in the input and in the result. Results have two
copies (even and odd rounds) in the segment of the node that owns the partition, or of this machine's node if they came
over the network: `extents` tell where, run by run.
"""
from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..base.dtypes import TABLE
from ..base.settings import Settings
from ..base.trace_records import Part
from ..gpu.copies import CopyToDevice
from ..gpu.device import DeviceSegment
from ..orchestration.errors import (
    BpsError,
    BusyError,
    CapacityError,
    ClosedError,
    ProtocolError,
    StallError,
    UnsupportedError,
)
from ..orchestration.messages import MemberPlan, UnitReady
from ..orchestration.placement.partition import N_ROUNDS, round_after, rounds_ahead
from ..pyx.direct import ANY_NBYTES, Channel, DirectTensor, channel_nbytes, format_channel
from ..pyx.pages import Segment, Window
from .chunk_descriptors import SlidingWindow, is_worth, n_at_once
from .guarded_port import GuardedPort
from .input_memory import InputMemory, Region
from .membership import Membership
from .step_clock import StepClock

#: Inputs must begin at multiples of this: the kernels' vectors.
INPUT_ALIGNMENT = 64
NO_SEGMENTS: Mapping[int, DeviceSegment] = MappingProxyType({})
#: A segment on another rank's device.
_ELSEWHERE = DeviceSegment(-1, None)
#: A wait for a device checks this often whether the session was closed.
_SLICE_S = 0.1


class UnitOwner(Protocol):
    """What a unit needs of the session that it belongs to."""

    port: GuardedPort
    memory: InputMemory
    clock: StepClock
    settings: Settings
    rank: int
    size: int
    local_size: int
    n_nodes: int
    n_helpers: int
    sums_directly: bool
    membership: Membership

    def require_open(self) -> None: ...
    def close(self, clean: bool = True, reason: str = "") -> None: ...  # timeout
    def retire(self, units: Sequence[Unit], releases_staging: bool = False) -> None: ...


class Unit:
    """One committed unit. Rounds are pushed one after another; a round must be waited for before the next.

    Any thread; two threads that push the same unit at once get a `BusyError`, not a race.
    """

    def __init__(self, session: UnitOwner, ready: UnitReady, segments: Mapping[tuple[str, int], Segment],
                 on_device: Mapping[int, DeviceSegment] = NO_SEGMENTS) -> None:
        plan = ready.plan
        self.session = session
        self.number = plan.unit
        self.name = plan.name
        self.nbytes = plan.nbytes
        self.priority = plan.priority
        self.stride = plan.stride
        self.n_parts = len(plan.parts)
        self.has_siblings = plan.n_workers > 1  # other workers' units, which may wait for this one's rounds
        self.first_part = plan.parts[0].part if plan.parts else 0
        self._parts = plan.parts
        self.dtype, self.dtype_name = TABLE[plan.dtype].numpy, plan.dtype
        self.members: dict[str, MemberPlan] = {member.name: member for member in plan.members}
        self.frame_rows = plan.frame_rows
        self.codec = plan.codec
        self.islands = plan.islands
        #: Learning rate for which inputs are computed from the next push on, for error feedback; 0: not set.
        self.learning_rate = 0.0
        self._told_rate = 0.0
        self.rounds = session.clock.rounds(plan.first_round)
        self.first_round = plan.first_round
        #: The ranks without which its sums mean nothing: the round that is waited for fails if one is lost.
        self.needed: Collection[int] = ()
        self._all_ranks = plan.ranks or tuple(range(session.size))
        #: (first round, ranks that are lost) of all its rounds.
        self._lost_from: list[tuple[int, frozenset[int]]] = [(plan.first_round, session.membership.known_lost)]
        self._given_up = ""  # why the last round failed, if no handle can wait for it
        self._complete = self.round  # the last round that is known to be complete
        self._lock = threading.Lock()
        self._staging: Region | None = None
        self._sliding: SlidingWindow | None = None
        self._views: dict[int, np.ndarray[Any, Any]] = {}
        self._runs = runs(ready, segments, on_device)
        #: Numbers of the partitions whose results lie on a device of this machine.
        self.on_device = frozenset(number for number, extent in enumerate(ready.extents) if extent.on_device)
        self._readers: list[tuple[int, CopyToDevice]] = []  # (round, copy to a device that may go on)
        is_alone = plan.direct and session.sums_directly and session.size == 1 and self.nbytes > 0
        self.ranks = plan.ranks or tuple(range(session.size)) if ready.channel or is_alone else ()
        #: In which its ranks call each other directly; None: they do not.
        self.channel: Channel | None = None
        if ready.channel:
            self.channel = self._open_channel(ready, segments)
        elif is_alone:
            self.channel = self._channel_of_one()
        #: Its direct sums; None: the node forms all sums.
        self.direct: DirectTensor | None = None
        if self.channel is not None and self.nbytes:
            self.direct = session.port.direct_tensor(self.channel, self, self.ranks, plan.dtype,
                                                     len(self.ranks) if plan.average else 1,
                                                     lambda: session.settings.timeout_s)

    def _channel_of_one(self) -> Channel:
        """Return a channel in this process's memory, for the job's only rank."""
        memory = np.zeros(channel_nbytes(1, self.nbytes), np.uint8)
        format_channel(memory.ctypes.data, 1)
        return self.session.port.open_channel(memory.data, 1, 0, self.nbytes)

    def _open_channel(self, ready: UnitReady, segments: Mapping[tuple[str, int], Segment]) -> Channel:
        number, offset = ready.channel
        segment = segments.get(("channel", number))
        if segment is None:
            raise ProtocolError(f"the ranks of this machine sum {self.name!r} in segment {number}, which the node has "
                                "not shared with this rank")
        session = self.session
        return session.port.open_channel(memoryview(segment)[offset:], len(self.ranks), self.ranks.index(session.rank),
                                         self.nbytes or ANY_NBYTES)

    @property
    def round(self) -> int:
        """The last round that was pushed."""
        return self.rounds.round

    @property
    def in_flight(self) -> bool:
        """Whether that round was not waited for."""
        return self.rounds.in_flight

    @property
    def has_begun(self) -> bool:
        """Whether it was pushed."""
        return self.rounds.has_begun

    @property
    def is_retired(self) -> bool:
        """Whether it cannot be pushed any more."""
        return self.rounds.is_retired

    @property
    def pushed_nbytes(self) -> int:
        """Bytes of this rank's input in all rounds."""
        return self.rounds.pushed_nbytes

    def titles(self) -> dict[int, Part]:
        """Return the names of the partitions in traces."""
        return {part.part: Part(self.name, i, len(self._parts), part.owner) for i, part in enumerate(self._parts)}

    # -- pushing ---------------------------------------------------------------------------------------------------

    @property
    def has_staging(self) -> bool:
        """Whether the unit has input memory already."""
        return self._staging is not None

    @property
    def staging(self) -> Region:
        """This rank's input memory for the unit, allocated at the first use."""
        with self._lock:
            if self._staging is None:
                self._staging = self.session.memory.allocate(max(self.nbytes, 1))
            return self._staging

    def parts_on_own_device(self) -> list[int]:
        """Return the numbers of the partitions whose results lie on this rank's device."""
        segments = {number: self._run_at(number * self.stride).segment for number in sorted(self.on_device)}
        return [number for number, segment in segments.items()
                if isinstance(segment, DeviceSegment) and segment.memory is not None]

    def _require_host(self, what: str) -> None:
        if self.on_device:
            raise UnsupportedError(f"{what} {self.name!r}, whose tensors lay on a device when they were declared: with "
                                   "BPSFAST_GPU_DIRECT=1 its sums are only there; use one name for one kind of tensor")

    def use_staging(self, region: Region) -> None:
        """Use *region* as the input memory, unless there is some already."""
        with self._lock:
            if self._staging is None:
                self._staging = region

    def push(self, address: int | None = None, nbytes: int | None = None) -> int:
        """Announce the unit's bytes at *address* (None: in `staging`) as this rank's input and return the round.

        Bytes inside one of this rank's segments are announced where they are; others are copied into `staging`,
        partition by partition, each announced as soon as it is whole. In either case they must not change before the
        round is complete (after the copy, only the copy counts). *nbytes*: how many there are at *address*, which must
        be all; in `staging`, how many are input (None: all). Raises `BusyError` if the previous round was not waited
        for.
        """
        place, session = None, self.session
        if address is not None:
            if nbytes is not None and nbytes != self.nbytes:
                raise ProtocolError(f"unit {self.name!r} has {self.nbytes} bytes, {nbytes} were pushed")
            if address % INPUT_ALIGNMENT == 0:
                place = session.memory.locate(address, self.nbytes)
        if self.on_device:
            self._require_host("memory of the host is pushed as")
        if place is None and self.n_parts:
            staging = self._staging or self.staging  # before the round begins, since there may be no memory
            if address is None:
                place = staging.segment, staging.offset
        round = self._begin(self.nbytes if nbytes is None else nbytes)
        if not self.n_parts:
            return round
        if place is not None:
            session.port.submit(self.first_part, self.n_parts, round, *place, False, self.nbytes)
        else:
            assert address is not None, "what lies in staging is not copied there"
            self._copy_in(round, address)
        return round

    def _copy_in(self, round: int, address: int) -> None:
        staging = self.staging
        self.session.port.copy_in(staging.address, address, self.nbytes, self.first_part, self.stride, round,
                                  staging.segment, staging.offset)

    def push_nothing(self) -> int:
        """Take part in a round without contributing and return the round."""
        round = self._begin(0)
        if self.n_parts:
            self.session.port.submit(self.first_part, self.n_parts, round, 0, 0, True)  # empty
        return round

    def exchange(self, address: int, nbytes: int, timeout_s: float) -> int | None:
        """Push bytes of this rank's segments, wait, and return the round; return None, and do nothing, for other
        memory.

        Raises as `push` and `wait`.
        """
        place = self.session.memory.locate(address, nbytes) if address % INPUT_ALIGNMENT == 0 and self.n_parts else None
        if place is None or nbytes != self.nbytes:
            return None
        self._require_host("memory of the host is pushed as")
        round = self._begin(nbytes)
        try:
            self.session.port.exchange(self, round, place, timeout_s)
        except BaseException as exc:  # also a signal handler's: there is no handle of this round
            self.give_up(exc)
            raise
        self.finish(round)
        return round

    def stream(self, source: int, destination: int, nbytes: int, timeout_s: float) -> bool:
        """Sum private bytes at *source*, wait, and copy the result to *destination* (it may be *source*).

        They go in and out a few partitions at a time (`SlidingWindow`), which takes half of the memory traffic and less
        shared memory. Returns False, and does nothing, where that does not pay: for units of few partitions, bytes
        inside a segment, jobs of several nodes, and where *destination* begins or ends inside the source. Raises as
        `push` and `wait`. After an error the round, and with it the name, is lost to all ranks, and *destination* is
        partly overwritten.
        """
        if nbytes != self.nbytes or self.on_device or not self._slides(source, destination):
            return False
        self._sliding_window()  # before the round begins, since there may be no memory
        round = self._begin(nbytes)
        try:
            self._slide(round, source, destination, timeout_s)
        except BaseException as exc:  # also a signal handler's: there is no handle of this round
            self.give_up(exc)
            raise
        return True

    def _slides(self, source: int, destination: int) -> bool:
        """Whether private bytes go in and out a few partitions at a time."""
        session, nbytes = self.session, self.nbytes
        return (is_worth(self.n_parts, session.local_size) and session.n_nodes + session.n_helpers == 1
                and not session.membership.goes_on  # the input must stay until the sum is complete on all ranks
                and not 0 < abs(source - destination) < nbytes and session.memory.locate(source, nbytes) is None
                and session.memory.locate(destination, nbytes) is None)

    def _sliding_window(self) -> SlidingWindow | None:
        """Return the window, which is made at its first use; None once the unit is retired."""
        with self._lock:
            if self._sliding is None and not self.is_retired:
                at_once = n_at_once(self.session.local_size)
                region = self._staging or self.session.memory.allocate(at_once * self.stride)
                self._sliding = SlidingWindow(self, region, at_once)
            return self._sliding

    def _slide(self, round: int, source: int, destination: int, timeout_s: float) -> None:
        """Sum *round*, which has begun, through the window, and finish it."""
        sliding = self._sliding_window()
        assert sliding is not None, "a round of what was retired does not begin"
        self.session.port.pipelined_transfer(sliding.chunks(source, destination, round), sliding.at_once,
                                             lambda number: (self, self.first_part + number, round), timeout_s)
        self.finish(round)  # not earlier: the next but one round overwrites this result

    def sum_directly(self, source: int, destination: int, nbytes: int) -> bool:
        """Sum bytes at *source*, with the other ranks, into *destination* (it may be *source*), without the node.

        Returns False, and does nothing, where that is not possible. Raises as `push` and `wait`. After an error the
        round, and with it the name, is lost to all ranks, and *destination* is partly overwritten.
        """
        if (self.direct is None or nbytes != self.nbytes or 0 < abs(source - destination) < nbytes):
            return False
        self.direct.all_reduce(source, destination)
        return True

    def sum_by_node(self, round: int, source: int, destination: int, timeout_s: float) -> None:
        """Have the node sum *round*, which has begun, from *source* into *destination*. Raises as `wait`.

        If there is no memory for the input, the job ends: the other ranks are in the round, and would wait for it.
        """
        try:
            deadline = time.monotonic() + timeout_s
            if self._slides(source, destination):
                self._slide(round, source, destination, timeout_s)
                return
            place = self.session.memory.locate(source, self.nbytes) if source % INPUT_ALIGNMENT == 0 else None
            if place is None:
                self._copy_in(round, source)
            else:
                self.session.port.submit(self.first_part, self.n_parts, round, *place, False, self.nbytes)
            self.deliver(round, destination, 0, self.nbytes, timeout_s)
            self.wait(round, max(0.0, deadline - time.monotonic()))
        except BaseException as exc:  # also a signal handler's: there is no handle of this round
            self.give_up(exc)
            if isinstance(exc, CapacityError):
                self.session.close(clean=False, reason=f"CapacityError: rank {self.session.rank}: {exc}")
            raise

    def begin(self, nbytes: int) -> tuple[int, list[CopyToDevice]]:
        """Begin the next round with *nbytes* of input. Return it, and the copies that still read its result memory.

        The caller announces all partitions itself, after those copies. Raises as `push`.
        """
        round = self._begin(nbytes, reads=False)
        return round, self._reading(round)

    def give_up(self, error: BaseException) -> None:
        """Note that this rank cannot complete the current round, because of *error*."""
        self._given_up = str(error) or repr(error)  # not the error itself, whose traceback keeps objects alive

    def _begin(self, nbytes: int, reads: bool = True) -> int:
        if reads and self._readers:
            self._await_readers(self._reading(round_after(self.round)))
        round = self.rounds.begin(nbytes) if self.direct is None else self.direct.begin(nbytes)
        if round is None:
            self.session.require_open()
            raise self.refusal()
        rate = self.learning_rate
        if self.codec is not None and rate != self._told_rate and self.n_parts:
            self.session.port.set_rate(self.first_part, self.n_parts, round, rate)
            self._told_rate = rate
        return round

    def refusal(self) -> BpsError:
        """Return why the next round cannot begin; raises the reason if it is the job's end."""
        if self.is_retired:
            return ClosedError(f"{self.name!r} was retired: its partitions may belong to another tensor now")
        if self._given_up:
            self.session.port.check()  # if the job is over, that is the better reason
            return BusyError(f"{self.name!r} cannot be pushed again: its last round ended with an error in the "
                             f"call that pushed it, which nobody can wait for any more; use another name "
                             f"({self._given_up})")
        return BusyError(f"{self.name!r} is pushed again, but its last round was not waited for: synchronize the "
                         " handle (or wait for the gradient) first, or use another name")

    # -- results ---------------------------------------------------------------------------------------------------

    def done(self, round: int) -> bool:
        """Return whether *round* is complete, without waiting."""
        return self.n_parts == 0 or self.session.port.done(self.first_part, self.n_parts, round)

    def wait(self, round: int, timeout_s: float) -> None:
        """Wait until *round* is complete.

        Raises `StallError` after *timeout_s* seconds, naming who is missing. Raises `PeerLostError` if the job was
        aborted or the node died.
        """
        if self.n_parts and round != self._complete:
            self.session.port.wait(self, self.first_part, self.n_parts, round, timeout_s)
        self.finish(round)

    def finish(self, round: int) -> None:
        """Note that *round* was waited for: the next one may be pushed."""
        if round == self.rounds.round:
            self._complete = round  # first: with the next round it would be wrong
            self.rounds.finish(round)

    def deliver(self, round: int, address: int, offset: int, nbytes: int, timeout_s: float) -> None:
        """Copy result bytes *offset* to *offset* + *nbytes* of *round* to *address*, each partition once complete.

        Does not end the round: `wait` does, at once when everything has been delivered. Raises as `wait` does; the
        destination is then partly written.
        """
        self._require_host("memory of the host is to have the sum of")
        deadline = time.monotonic() + timeout_s
        if self.session.membership.goes_on or self.session.memory.locate(address, nbytes) is not None:
            # Partitions may be summed again without a lost rank; or the destination is an input, which must stay until
            # the unit is complete (recovery may need it).
            self.session.port.wait(self, self.first_part, self.n_parts, round, timeout_s)
        runs = self._runs
        if not runs and self.n_parts:
            self.session.require_open()  # if another thread has closed it
        for run in runs:
            at, end = max(offset, run.begin), min(offset + nbytes, run.end)
            while at < end:
                # A piece that begins inside a partition ends there: the port counts partitions from the source.
                part, inside = divmod(at, self.stride)
                piece = min(end - at, self.stride - inside) if inside else end - at
                assert isinstance(run.segment, Segment), "none lies on a device"
                source = run.segment.address + run.offsets[round & 1] + at - run.begin
                self.session.port.deliver(self, address + at - offset, source, piece, self.first_part + part, round,
                                          max(0.0, deadline - time.monotonic()))
                at += piece
        if nbytes == self.nbytes:
            self._complete = round

    def look(self, number: int, round: int, timeout_s: float) -> bool:
        """Wait up to *timeout_s*, beside the trainer, until partition *number* of *round* may be read; return whether
        it may.

        Raises as `GuardedPort.look`.
        """
        port = self.session.port
        if not self.session.membership.goes_on:
            return port.look(self.first_part + number, round, timeout_s)
        deadline = time.monotonic() + timeout_s  # partitions may be summed again until all are complete
        return (all(port.look(part, round, max(0.0, deadline - time.monotonic()))
                    for part in range(self.first_part, self.first_part + self.n_parts)) and self.done(round))

    def lose(self, round: int, lost: frozenset[int]) -> dict[str, int]:
        """Note that *round* is the first without *lost*; return the names of its tensors with its number from 1 on."""
        self._lost_from.append((round, lost))
        return dict.fromkeys(self.members, rounds_ahead(round, self.first_round) % N_ROUNDS + 1)

    def lost_in(self, round: int) -> frozenset[int]:
        """Return the ranks that are lost, and have no input in *round*, which is complete."""
        return next((lost for first, lost in reversed(self._lost_from) if rounds_ahead(first, round) <= 0),
                    frozenset())

    def contributors(self) -> tuple[int, ...]:
        """Return the ranks whose inputs are in the last round that was waited for."""
        lost = self.lost_in(self._complete)
        return tuple(rank for rank in self._all_ranks if rank not in lost)

    def result_address(self, round: int, offset: int) -> int:
        """Return where byte *offset* of the result of *round* lies in this process."""
        run = self._run_at(offset)
        return run.segment.address + run.offsets[round & 1] + offset - run.begin

    def _run_at(self, offset: int) -> ResultRun:
        at = bisect_right(self._runs, offset, key=lambda run: run.begin) - 1
        if at >= 0 and offset < self._runs[at].end:
            return self._runs[at]
        raise ProtocolError(f"unit {self.name!r} has {self.nbytes} result bytes, byte {offset} was asked for")

    def result_segments(self) -> list[Segment]:
        return list(dict.fromkeys(run.segment for run in self._runs if isinstance(run.segment, Segment)))

    def add_reader(self, round: int, reader: CopyToDevice) -> None:
        """Note that *reader* copies the result of *round*: its memory is not written again before that has ended."""
        with self._lock:
            self._readers = [each for each in self._readers if not each[1].is_finished] + [(round, reader)]

    def await_readers(self) -> None:
        """Wait until no copy reads a result any more. Raises `StallError` if a device does not finish in time."""
        self._await_readers([reader for _, reader in self._readers])

    def _reading(self, round: int) -> list[CopyToDevice]:
        """Return the copies that may still read the memory of the result of *round*."""
        with self._lock:
            return [reader for other, reader in self._readers
                    if other != round and (other - round) % 2 == 0 and not reader.is_finished]

    def _await_readers(self, readers: list[CopyToDevice]) -> None:
        deadline = time.monotonic() + self.session.settings.timeout_s
        for reader in readers:
            while not reader.wait_finished(_SLICE_S):
                self.session.require_open()
                if time.monotonic() > deadline:
                    raise StallError(f"{reader.title} has not arrived there within {self.session.settings.timeout_s:g} "
                                     "s, and its memory is needed again: check this rank's GPU")

    def view(self, round: int) -> np.ndarray[Any, Any]:
        """Return the result of *round* as read-only uint8, valid until this rank pushes round + 2.

        The array keeps its mapping alive, but not its contents: the same memory gets the result of round + 2.
        """
        self._require_host("there is no view of the sum of")
        parity = round & 1
        with self._lock:
            if parity not in self._views:
                self._views[parity] = self._map(parity)
            return self._views[parity]

    def _map(self, parity: int) -> np.ndarray[Any, Any]:
        if not self._runs:
            empty = np.empty(0, np.uint8)
            empty.flags.writeable = False
            return empty
        if len(self._runs) == 1:
            run = self._runs[0]
            segment: Any = run.segment  # a buffer, which Python 3.10's types cannot say
            return np.frombuffer(segment, np.uint8, self.nbytes, run.offsets[parity])
        window = Window([(run.segment.fileno(), run.offsets[parity], run.end - run.begin) for run in self._runs
                         if isinstance(run.segment, Segment)])
        return np.frombuffer(window, np.uint8, self.nbytes)  # type: ignore[call-overload]

    def member_view(self, member: MemberPlan, round: int) -> np.ndarray[Any, Any]:
        """Return the result of one member as a read-only array of its dtype and shape (lifetime as `view`)."""
        raw = self.view(round)[member.offset : member.offset + member.nbytes]
        return raw.view(self.dtype).reshape(member.shape)

    def follow(self, other: Unit) -> None:
        """Count as pushed in the step in which *other* was pushed: it takes its place."""
        self.rounds.follow(other.rounds)

    def forget(self) -> None:
        """Release all mappings and memory, except of arrays that were handed out. It cannot be pushed any more."""
        with self._lock:
            self.rounds.is_retired = True
            if self.channel is not None and not self.channel.busy:
                self.session.port.close_channel(self.channel)
            self._views.clear()
            self._runs = []
            self._readers = []
            self._staging = self._sliding = None


class ResultRun(NamedTuple):
    """Consecutive result bytes of the unit inside one segment; offsets by round parity."""

    begin: int
    end: int
    segment: Segment | DeviceSegment
    offsets: tuple[int, int]


def runs(ready: UnitReady, segments: Mapping[tuple[str, int], Segment], on_device: Mapping[int, DeviceSegment]
         ) -> list[ResultRun]:
    """Turn the extents into runs, joined where one continues the other in both parities.

    *on_device*: segments of this rank's device by number; those of other ranks' devices have no memory here.
    """
    found: list[ResultRun] = []
    begin = 0
    for extent in ready.extents:
        segment: Segment | DeviceSegment | None = segments.get((f"result:{extent.node}", extent.segment))
        if extent.on_device:
            segment = on_device.get(extent.segment, _ELSEWHERE)
        if segment is None:
            raise ProtocolError(f"results of {ready.plan.name!r} lie in segment {extent.segment} of node "
                                f"{extent.node}, which the node has not shared with this rank")
        end = min(begin + extent.nbytes, ready.plan.nbytes)
        offsets = (extent.offset_even, extent.offset_odd)
        last = found[-1] if found else None
        follows = last is not None and last.segment is segment and offsets == tuple(
            offset + last.end - last.begin for offset in last.offsets)
        if last is not None and follows:
            found[-1] = last._replace(end=end)
        else:
            found.append(ResultRun(begin, end, segment, offsets))
        begin = end
    if begin != ready.plan.nbytes:
        raise ProtocolError(f"results of {ready.plan.name!r} cover {begin} of {ready.plan.nbytes} bytes")
    return found
