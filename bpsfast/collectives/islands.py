"""Sums gradients among the GPUs of a machine, before the machine's node process sums them on the CPU.

This is OSDI'20 §4.2: reduce-scatter below a PCIe switch, reduce to roots over NVLink. An island is a set of ranks whose
GPUs sum among themselves.

    ready here and on all members   the island's turn: the input is reduced to the root of each partition
    at the root                     the partition is copied to the host and announced; others announce it as empty
    complete, copied to the root    the island's turn again: the root gives the sum to the other members

Members must make their calls in one order, but gradients become ready in different orders. So turns are negotiated
(`turn_service`): a call begins once all members have submitted it. One thread does all this, and no hook waits for
another rank.
"""
from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from ..gpu.communicator import Communicator, IslandRange, NcclCommunicator
from ..gpu.copies import CopyToDevice, CopyToHost, DeviceCopy, PartitionCopy, ResultCopy, partition_copies
from ..gpu.cuda import CudaDevice
from ..gpu.device import Device, Event, Stream
from ..gpu.shared_device import SharedCommunicator
from ..orchestration.errors import BpsError, ConfigError, DeviceError
from ..orchestration.priority.turns import Entry
from ..trainer.gpu.devices import DeviceBytes, DeviceRound, Devices
from ..trainer.session import Session
from ..trainer.unit import Unit
from .group import Group
from .island_routes import IslandRoutes, agree, island_group
from .turn_service import Finish, TurnService

log = logging.getLogger("bpsfast.gpu")
_NO_CREDIT = 1 << 62  # turns only order calls: the island's stream holds all that is enqueued


def communicator(device: Device, group: Group, fail: Callable[[BpsError], None]) -> Communicator:
    """Return the communicator of *group*, this member of which has *device*; *fail* is called with what ends it between
    calls. Collective; raises as calls of the group, and `UnsupportedError` without NCCL.
    """
    if not isinstance(device, CudaDevice):
        return SharedCommunicator(device, group, fail)
    addresses = group.all_gather_bytes(device.address.encode())
    if len(set(addresses)) == 1:
        return SharedCommunicator(device, group, fail)
    if len(set(addresses)) < len(addresses):
        raise ConfigError(f"ranks {group.ranks} are one island, and only some of them share a GPU: {addresses}")
    return NcclCommunicator(device, group)


class _Route(NamedTuple):
    """One partition of a round: where its input and its sum lie, and the rank that copies it."""

    source: PartitionCopy
    target: PartitionCopy
    root: int


#: The partitions of a round by island; those that this rank sends alone are under ().
_ByIsland = dict[tuple[int, ...], list[_Route]]


class IslandRound:
    """One round of *unit*: this rank's input is *source*, and the sum goes to *target*. *readers*: see `CopyToHost`."""

    def __init__(self, unit: Unit, round: int, readers: Sequence[CopyToDevice], source: DeviceBytes,
                 target: DeviceBytes) -> None:
        self.unit, self.round, self.source, self.target = unit, round, source, target
        self.readers = readers
        name = f"round {round} of {unit.name!r}"
        self.input = DeviceCopy(f"{name} from {source.device.name} (or from another GPU of its island)", unit.priority,
                                None)
        self.result = ResultCopy(f"the sum of {name} for {target.device.name}", unit.priority, None)
        self.n_inputs = self.n_results = 0  # parts of them that have not ended

    def fail(self, error: BpsError) -> None:
        self.input.end(error)
        self.result.end(error)


class _Island:
    """One island of this rank: its members, their communicator, and its turns.

    It has a stream of its own. With one stream for two islands, members of both could have their calls in different
    orders, and each would wait for what stands behind the other.
    """

    def __init__(self, session: Session, members: Sequence[int], device: Device,
                 fail: Callable[[BpsError], None]) -> None:
        group = island_group(session, members, "turns")
        self.members = tuple(members)
        self.calls = communicator(device, island_group(session, members, "calls"), fail)
        self.turns = TurnService(group.rank, group.size, lambda address: group.broadcast_bytes(address or b"", 0),
                                 host=lambda: "127.0.0.1", credit_nbytes=_NO_CREDIT, timeout_s=math.inf, together=True)
        group.close()
        self.stream = device.stream()

    def close(self, why: BpsError) -> None:
        self.turns.abandon(why)
        with contextlib.suppress(BpsError):  # the job or the GPU may be gone
            self.calls.close()
        self.stream.close()


class Islands:
    """The islands of *session*'s rank, which has one *device*. Any thread may `send`."""

    def __init__(self, session: Session, devices: Devices, device: Device) -> None:
        self._session = session
        self._devices = devices
        self._device = device
        self._routes = IslandRoutes(())
        self._islands: dict[tuple[int, ...], _Island] = {}
        self._lock = threading.Lock()
        self._rounds: set[IslandRound] = set()
        self._held: list[tuple[Event, IslandRound]] = []  # rounds to whose targets the island may still write
        self._error: BpsError | None = None
        self._steps: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="bpsfast-islands", daemon=True)
        self._thread.start()

    def send(self, unit: Unit, source: DeviceBytes, target: DeviceBytes) -> DeviceRound:
        """Begin the next round of *unit*, as `Devices.send`; all ranks of the machine do."""
        begun = IslandRound(unit, *unit.begin(unit.nbytes), source, target)
        with self._lock:
            error = self._error
            self._rounds.add(begun)
        if error is not None:
            begun.fail(error)
        else:
            self._steps.put(partial(self._begin, begun))
        return DeviceRound(self._session, unit, begun.round, begun.input, begun.result)

    def close(self, timeout_s: float, why: BpsError) -> bool:
        """Leave the islands; rounds under way fail with *why*. False if the thread does not end in time."""
        self._fail(why)
        self._steps.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- its thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._device.enter()
            self._routes = agree(self._session, self._device)
            for members in self._routes.islands():
                if self._session.rank in members:
                    self._islands[members] = _Island(self._session, members, self._device, self._fail)
            while (step := self._steps.get()) is not None:
                step()
                del step
        except BpsError as exc:
            self._fail(exc)
        except BaseException as exc:  # of a driver, for example: waiting ranks must be told
            log.exception("islands of rank %d cannot go on", self._session.rank)
            self._fail(DeviceError(f"islands of rank {self._session.rank} cannot go on: {exc!r}"))
        finally:
            why = self._error or DeviceError("the islands are closed")
            for island in self._islands.values():
                island.close(why)

    def _fail(self, error: BpsError) -> None:
        with self._lock:
            self._error = self._error or error
            rounds, self._rounds = self._rounds, set()
        for each in rounds:
            each.fail(error)

    def _begin(self, begun: IslandRound) -> None:
        """Send each partition of *begun*: alone, or through an island."""
        unit, rank = begun.unit, self._session.rank
        by_island: _ByIsland = {}
        for source, target in zip(partition_copies(unit.nbytes, unit.stride, begun.source.ranges),
                                  partition_copies(unit.nbytes, unit.stride, begun.target.ranges)):
            route = self._routes.partition_route(unit.first_part + source.number, rank)
            members = route.island if len(route.island) > 1 else ()
            by_island.setdefault(members, []).append(_Route(source, target, route.root))
        begun.n_inputs, begun.n_results = len(by_island), sum(1 for members in by_island if members)
        if not by_island:
            begun.input.end()
        for members, routes in by_island.items():
            if not members:
                self._copy_to_host(begun, [route.source for route in routes], [], begun.source.after)
                continue
            island, ranges = self._islands[members], _island_ranges(routes, members)
            self._submit(island, begun, "reduced", ranges, partial(
                self._reduce, begun, island, ranges, [route.target for route in routes if route.root == rank],
                [route.source for route in routes if route.root != rank]))
        self._devices.copy_to_device(begun.target.device, self._result_copy(begun, by_island))

    def _submit(self, island: _Island, begun: IslandRound, what: str, ranges: Sequence[IslandRange],
                call: Callable[[], None]) -> None:
        """Make *call* at the island's turn. A failure ends all islands, as their members are out of step."""
        entry = Entry(name=f"{begun.unit.name} {what}", part=0, nbytes=sum(each.nbytes for each in ranges),
                      kind=f"round {begun.round} of {begun.unit.dtype_name}")

        def turn(finish: Finish) -> None:
            call()
            finish(None)

        def over(error: BaseException | None) -> None:
            if error is not None:
                self._fail(error if isinstance(error, BpsError) else DeviceError(str(error)))

        island.turns.submit(entry, turn, over, begun.unit.priority)

    def _reduce(self, begun: IslandRound, island: _Island, ranges: Sequence[IslandRange], own: Sequence[PartitionCopy],
                others: Sequence[PartitionCopy]) -> None:
        """Reduce *ranges*; then copy the partitions *own* from the target to the host. Called at the island's turn."""
        after = [*begun.source.after, *begun.target.after]
        island.calls.reduce(island.stream, after, ranges, begun.unit.dtype_name,
                            lambda event: self._copy_to_host(begun, own, others, [event]))

    def _copy_to_host(self, begun: IslandRound, own: Sequence[PartitionCopy], others: Sequence[PartitionCopy],
                      after: Sequence[Event]) -> None:
        """Copy and announce the partitions *own* after the events *after*; announce *others* as empty."""
        unit, round, port = begun.unit, begun.round, self._session.port
        device_input = self._devices.direct.input_of(unit, begun.source.device)
        empty = {partition.number for partition in others}

        def copied(partition: PartitionCopy, begin_ns: int) -> None:
            part = unit.first_part + partition.number
            if partition.number in empty:
                port.submit(part, 1, round, 0, 0, True)  # empty
            else:
                port.land(part, round, *device_input.entry(partition.number), partition.nbytes, begin_ns)

        partitions = [*own, *(PartitionCopy(partition.number, 0, ()) for partition in others)]
        copy = CopyToHost(begun.input.title, unit.priority, device_input.address, partitions, after, copied, begun,
                          begun.readers, device_input.on_device)

        def then(error: BpsError | None) -> None:
            with self._lock:
                begun.n_inputs -= 1
                is_last = begun.n_inputs == 0
            if is_last or error is not None:
                begun.input.end(error)

        copy.then = then
        self._devices.copy_to_host(begun.source.device, copy)

    def _result_copy(self, begun: IslandRound, by_island: _ByIsland) -> CopyToDevice:
        """Return the copy of this rank's own partitions to the device, which waits until all are complete."""
        rank = self._session.rank
        partitions = [target if root == rank else PartitionCopy(target.number, target.nbytes, ())
                      for routes in by_island.values() for _, target, root in routes]
        copy = self._devices.result_copy(begun.unit, begun.round, begun.target, partitions)

        def then(error: BpsError | None) -> None:
            if error is not None:
                begun.result.end(error)
                return
            begun.result.event = copy.event
            if begun.n_results == 0:
                self._end(begun)
            else:
                self._steps.put(partial(self._submit_broadcasts, begun, by_island))

        copy.then = then
        return copy

    def _submit_broadcasts(self, begun: IslandRound, by_island: _ByIsland) -> None:
        for members, routes in by_island.items():
            if members:
                island, ranges = self._islands[members], _island_ranges(routes, members)
                self._submit(island, begun, "handed back", ranges, partial(self._broadcast, begun, island, ranges))

    def _broadcast(self, begun: IslandRound, island: _Island, ranges: Sequence[IslandRange]) -> None:
        """Give the roots' sums to all members. Called at the island's turn."""
        assert begun.result.event is not None, "the sums have been copied"
        island.calls.broadcast(island.stream, [begun.result.event], ranges, begun.unit.dtype_name,
                               lambda event: self._broadcast_enqueued(begun, island.stream))

    def _broadcast_enqueued(self, begun: IslandRound, stream: Stream) -> None:
        with self._lock:  # islands have threads of their own; the last event comes after all others
            assert begun.result.event is not None, "the sums have been copied"
            stream.wait(begun.result.event)
            begun.result.event = stream.record()
            begun.n_results -= 1
            is_last = begun.n_results == 0
        if is_last:
            self._end(begun)

    def _end(self, begun: IslandRound) -> None:
        assert begun.result.event is not None, "all copies are enqueued"
        with self._lock:
            self._rounds.discard(begun)
            self._held = [each for each in self._held if not each[0].done()]
            self._held.append((begun.result.event, begun))
        begun.result.end()


def _island_ranges(routes: Sequence[_Route], members: Sequence[int]) -> list[IslandRange]:
    """Return the ranges of *routes* for a communicator of *members*; sources and targets are split alike."""
    return [IslandRange(source.address, target.address, source.nbytes, members.index(root))
            for copied, summed, root in routes for source, target in zip(copied.copies, summed.copies)]
