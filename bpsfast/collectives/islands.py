"""Islands: GPUs of one machine that add up among themselves, before memory does (OSDI'20 §4.2: reduce-scatter below a
PCIe switch, reduce to roots over NVLink).

    ready here and on all members   the island's turn: input is reduced to each partition's root
    at the root                     the partition is copied to the host and announced; others take part with nothing
    complete, copied to the root    the island's turn again: the root gives the sum to the others

Members must make their calls in one order, and gradients become ready in different ones: turns come to what all
members have been given. One thread of this object prepares all of that, so no hook waits for another rank.
"""
from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..gpu.communicator import IslandRange, communicator
from ..gpu.copies import DeviceCopy, ResultCopy
from ..gpu.copy_to_device import CopyToDevice
from ..gpu.copy_to_host import CopyToHost
from ..gpu.device import Device, Event, Stream
from ..gpu.partition_copy import PartitionCopy, cut
from ..orchestration.errors import BpsError, DeviceError
from ..orchestration.priority.turns import Entry
from ..trainer.gpu.device_round import DeviceRound
from .group import broadcast_bytes
from .island_routes import IslandRoutes
from .machine_routes import agree, island_group
from .turn_service import Finish, TurnService

if TYPE_CHECKING:
    from ..trainer.gpu.devices import DeviceBytes, Devices
    from ..trainer.session import Session
    from ..trainer.unit import Unit

log = logging.getLogger("bpsfast.gpu")
_NO_CREDIT = 1 << 62  # turns are only an order: the island's stream keeps what is enqueued


class IslandRound:
    """One round of one unit, whose bytes of this rank are *source*, and whose sum goes to *target*. *readers*: see
    `CopyToHost`.
    """

    def __init__(self, unit: Unit, round: int, readers: Sequence[CopyToDevice], source: DeviceBytes, target: DeviceBytes) -> None:
        self.unit, self.round, self.source, self.target = unit, round, source, target
        self.readers = readers
        name = f"round {round} of {unit.name!r}"
        self.out = DeviceCopy(f"{name} from {source.device.name} (or from another GPU of its island)", unit.urgency, None)
        self.back = ResultCopy(f"the sum of {name} for {target.device.name}", unit.urgency, None)
        self.n_out = self.n_back = 0  # of what it is made of: what has not come to its end

    def fail(self, error: BpsError) -> None:
        """End both ways with *error*."""
        self.out.end(error)
        self.back.end(error)


class _Island:
    """One island of this rank: who is in it, by what they are joined, and whose turn it is.

    It has a stream of its own. On one for several islands a member of two could have their calls in one order, another
    one in the other: each would stand before what the other one waits for.
    """

    def __init__(self, session: Session, members: Sequence[int], device: Device,
                 fail: Callable[[BpsError], None]) -> None:
        group = island_group(session, members, "turns")
        self.members = tuple(members)
        self.calls = communicator(device, island_group(session, members, "calls"), fail)

        def tell(said: bytes | None) -> bytes:
            return broadcast_bytes(group, said or b"", 0)

        self.turns = TurnService(group.rank, group.size, tell, host=lambda: "127.0.0.1", credit_nbytes=_NO_CREDIT,
                                 timeout_s=math.inf, together=True)
        group.close()
        self.stream = device.stream()

    def close(self, why: BpsError) -> None:
        self.turns.abandon(why)
        with contextlib.suppress(BpsError):  # of a job, or a GPU, that is gone there is nothing to give back
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
        self._trips: set[IslandRound] = set()
        self._held: list[tuple[Event, IslandRound]] = []  # the island may still write to their targets
        self._error: BpsError | None = None
        self._begun: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="bpsfast-islands", daemon=True)
        self._thread.start()

    def send(self, unit: Unit, source: DeviceBytes, target: DeviceBytes) -> DeviceRound:
        """Begin the next round of *unit*, as `Devices.send`; all ranks of the machine do."""
        trip = IslandRound(unit, *unit.begin(unit.nbytes), source, target)
        with self._lock:
            error = self._error
            self._trips.add(trip)
        if error is not None:
            trip.fail(error)
        else:
            self._begun.put(partial(self._begin, trip))
        return DeviceRound(self._session, unit, trip.round, trip.out, trip.back)

    def close(self, timeout_s: float, why: BpsError) -> bool:
        """Leave the islands; what is under way fails with *why*. False: the thread does not come back."""
        self._fail(why)
        self._begun.put(None)
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
            while (step := self._begun.get()) is not None:
                step()
                del step
        except BpsError as exc:
            self._fail(exc)
        except BaseException as exc:  # of a driver, say: whoever waits must be told
            log.exception("islands of rank %d cannot go on", self._session.rank)
            self._fail(DeviceError(f"islands of rank {self._session.rank} cannot go on: {exc!r}"))
        finally:
            why = self._error or DeviceError("the islands are closed")
            for island in self._islands.values():
                island.close(why)

    def _fail(self, error: BpsError) -> None:
        with self._lock:
            self._error = self._error or error
            trips, self._trips = self._trips, set()
        for trip in trips:
            trip.fail(error)

    def _begin(self, trip: IslandRound) -> None:
        """Let each part of *trip* go its way: alone, or with an island."""
        unit, rank = trip.unit, self._session.rank
        outward: dict[tuple[int, ...], list[tuple[PartitionCopy, PartitionCopy, int]]] = {}
        for piece, goal in zip(cut(unit.nbytes, unit.stride, trip.source.loads),
                               cut(unit.nbytes, unit.stride, trip.target.loads)):
            partition_route = self._routes.partition_route(unit.first_part + piece.number, rank) if self._routes.roads else None
            members = partition_route.island if partition_route is not None and len(partition_route.island) > 1 else ()
            outward.setdefault(members, []).append((piece, goal, partition_route.root if partition_route is not None else rank))
        trip.n_out, trip.n_back = len(outward), sum(1 for members in outward if members)
        if not outward:
            trip.out.end()
        for members, pieces in outward.items():
            if not members:
                self._depart(trip, [piece for piece, _, _ in pieces], [], trip.source.after)
                continue
            island, runs = self._islands[members], _runs(pieces, members)
            self._submit(island, trip, "reduced", runs, partial(
                self._reduced, trip, island, runs,
                [goal for _, goal, root in pieces if root == rank],
                [piece for piece, _, root in pieces if root != rank]))
        self._devices.add_back(trip.target.device, self._arrival(trip, outward))

    def _submit(self, island: _Island, trip: IslandRound, what: str, runs: Sequence[IslandRange], begin: Callable[[], None]) -> None:
        """Let *begin* be called at the island's turn. Failures end the whole: members are out of step."""
        entry = Entry(name=f"{trip.unit.name} {what}", part=0, nbytes=sum(run.nbytes for run in runs),
                      kind=f"round {trip.round} of {trip.unit.dtype_name}")

        def turn(finish: Finish) -> None:
            begin()
            finish(None)

        def over(error: BaseException | None) -> None:
            if error is not None:
                self._fail(error if isinstance(error, BpsError) else DeviceError(str(error)))

        island.turns.submit(entry, turn, over, -trip.unit.urgency)

    def _reduced(self, trip: IslandRound, island: _Island, runs: Sequence[IslandRange], own: Sequence[PartitionCopy],
                 others: Sequence[PartitionCopy]) -> None:
        """Reduce: *own* partitions lie in the target then, from where they depart. The island's turn."""
        after = [*trip.source.after, *trip.target.after]
        island.calls.reduce(island.stream, after, runs, trip.unit.dtype_name,
                            lambda event: self._depart(trip, own, others, [event]))

    def _depart(self, trip: IslandRound, own: Sequence[PartitionCopy], others: Sequence[PartitionCopy], after: Sequence[Event]) -> None:
        """Let the partitions *own* be copied and announced after *after*; *others* are announced with nothing in them.
        """
        unit, round, port = trip.unit, trip.round, self._session.port
        device_input = unit.device_input(trip.source.device)
        empty = {piece.number for piece in others}

        def announce(piece: PartitionCopy, begin_ns: int) -> None:
            part = unit.first_part + piece.number
            if piece.number in empty:
                port.submit_empty(part, 1, round)
            else:
                port.land(part, round, *device_input.entry(piece.number), piece.nbytes, begin_ns)

        pieces = [*own, *(PartitionCopy(piece.number, 0, ()) for piece in others)]
        departure = CopyToHost(trip.out.title, unit.urgency, device_input.address, pieces,
                              after, announce, trip, trip.readers, device_input.on_device)

        def then(error: BpsError | None) -> None:
            with self._lock:
                trip.n_out -= 1
                is_last = trip.n_out == 0
            if is_last or error is not None:
                trip.out.end(error)

        departure.then = then
        self._devices.add_out(trip.source.device, departure)

    def _arrival(self, trip: IslandRound, outward: dict[tuple[int, ...], list[tuple[PartitionCopy, PartitionCopy, int]]]) -> CopyToDevice:
        """Return what brings this rank's own partitions back, and sees when all are complete."""
        rank = self._session.rank
        pieces = [goal if root == rank else PartitionCopy(goal.number, goal.nbytes, ())
                  for ways in outward.values() for _, goal, root in ways]
        arrival = self._devices.arrival(trip.unit, trip.round, trip.target, pieces)

        def then(error: BpsError | None) -> None:
            if error is not None:
                trip.back.end(error)
                return
            trip.back.event = arrival.event
            if trip.n_back == 0:
                self._over(trip)
            else:
                self._begun.put(partial(self._hand_back, trip, outward))

        arrival.then = then
        return arrival

    def _hand_back(self, trip: IslandRound, outward: dict[tuple[int, ...], list[tuple[PartitionCopy, PartitionCopy, int]]]) -> None:
        for members, pieces in outward.items():
            if members:
                island, runs = self._islands[members], _runs(pieces, members)
                self._submit(island, trip, "handed back", runs, partial(self._handed_back, trip, island, runs))

    def _handed_back(self, trip: IslandRound, island: _Island, runs: Sequence[IslandRange]) -> None:
        """Give the sums of the roots to all. The island's turn."""
        assert trip.back.event is not None, "the sums have been copied"
        island.calls.broadcast(island.stream, [trip.back.event], runs, trip.unit.dtype_name,
                               lambda event: self._has_handed_back(trip, island.stream))

    def _has_handed_back(self, trip: IslandRound, stream: Stream) -> None:
        with self._lock:  # islands of one trip have threads of their own: the last event is after all others
            assert trip.back.event is not None, "the sums have been copied"
            stream.wait(trip.back.event)
            trip.back.event = stream.record()
            trip.n_back -= 1
            is_last = trip.n_back == 0
        if is_last:
            self._over(trip)

    def _over(self, trip: IslandRound) -> None:
        assert trip.back.event is not None, "it has come back"
        with self._lock:
            self._trips.discard(trip)
            self._held = [each for each in self._held if not each[0].done()]
            self._held.append((trip.back.event, trip))
        trip.back.end()


def _runs(pieces: Sequence[tuple[PartitionCopy, PartitionCopy, int]], members: Sequence[int]) -> list[IslandRange]:
    """Return what the island is to do with *pieces* and their roots: sources and targets are cut alike."""
    return [IslandRange(source.address, target.address, source.nbytes, members.index(root))
            for piece, goal, root in pieces for source, target in zip(piece.copies, goal.copies)]
