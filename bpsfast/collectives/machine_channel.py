"""Collectives among ranks of one machine, carried out by the ranks themselves in memory that they share (`pyx.direct`).

Their node places and frees that memory as it does a tensor's, and ends their waits when the job is over; it moves no
byte. Sums have the bits that the node's have: inputs are combined in the order of the ranks.
"""
from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..orchestration.errors import MismatchError
from ..orchestration.messages import TensorSpec
from ..pyx import direct
from ..trainer.guarded_port import DirectWaits
from ..trainer.session import Session
from ..trainer.tensor_input import TensorInput
from ..trainer.unit import Unit

Call = Callable[[float, Callable[[], None]], int]

_MASK = (1 << 64) - 1


class Load(NamedTuple):
    """Bytes from address `source` (0: this member gives none) to `destination` (0: it needs none).

    `root`: the only member that gives some; -1: all do, and they are combined.
    """

    source: int
    destination: int
    nbytes: int
    root: int = -1


def open_machine_channel(session: Session, name: str, ranks: Sequence[int], declared: tuple[int, ...], priority: int,
                         timeout_s: float) -> MachineChannel | None:
    """Return the channel of *ranks*, members of one group, of which all call this; None: their node gives them none.

    Waits until all of them have called it, at most *timeout_s*. *declared*: the ranks for which its memory is declared,
    as in `TensorSpec`. Raises as `TensorRegistry.unit`.
    """
    # a tensor without bytes: its channel takes calls of any size
    session.tensors.declare([TensorSpec(name=name, dtype="uint8", shape=(0,), average=False, ranks=declared,
                                        priority=priority, direct=True)])
    unit = session.tensors.unit(name, timeout_s)
    if unit.channel is None:
        session.retire([unit])
        return None
    return MachineChannel(session, unit, unit.channel, ranks)


class MachineChannel:
    """The *channel* of *ranks*, members of one group on one machine, in the memory of *unit*. One call at a time."""

    def __init__(self, session: Session, unit: Unit, channel: direct.Channel, ranks: Sequence[int]) -> None:
        self._session, self._unit, self._channel = session, unit, channel
        self._ranks = tuple(sorted(ranks))  # sums are formed in this order
        self._place = [self._ranks.index(rank) for rank in ranks]
        self._me = self._ranks.index(session.rank)
        self._by_place = sorted(range(len(ranks)), key=self._place.__getitem__)  # members, in the order of the ranks

    def direct_calls(self, *arguments: Any) -> direct.DirectCalls:
        """Return `run` and `exchange` in C; *arguments*: those of `pyx.direct.DirectCalls` from *kind* on."""
        return self._session.port.direct_calls(self._channel, self._place, *arguments)

    def require(self, place: int, offered_nbytes: int, wanted_nbytes: int) -> None:
        """Raise `MismatchError` if the rank at *place* has sent another number of bytes than is expected here."""
        if offered_nbytes != wanted_nbytes:
            raise MismatchError(f"rank {self._ranks[place]} has sent {offered_nbytes} bytes, {wanted_nbytes} were "
                                "expected")

    def waits(self, number: Callable[[], int], timeout_s: Callable[[], float], check: Callable[[], None]
              ) -> DirectWaits:
        """Return what looks at other things while a call waits, and raises its error; *number*, ...: see there."""
        return DirectWaits(self._session.port, self._channel, self._unit, self._ranks, number, timeout_s, check)

    def run(self, text: str, number: int, dtype: str, op: str, loads: Sequence[Load], timeout_s: float,
            check: Callable[[], None]) -> bool:
        """Carry out *loads* of call *number*; return whether all members make the same call, which *text* describes.

        *loads*: none, one, or one for each member, which is that from its own memory, or to it. *op*: "avg" or one of
        `partition.OPS`; of loads with a root it does not count. *check* is called while it waits, and may raise. Raises
        as `GuardedPort.wait`.
        """
        what = number_of(text) ^ (number * direct.CALL_FACTOR_OF_GROUPS & _MASK)
        given = sum(load.nbytes for load in loads if load.source)
        return self._session.port.call_directly(self._channel, self._of(loads, what, dtype, op), self._unit,
                                                self._ranks, number, timeout_s, check, given)

    def exchange(self, text: str, number: int, sends: Mapping[int, TensorInput], receives: Mapping[int, TensorInput],
                 timeout_s: float, check: Callable[[], None]) -> bool:
        """Give *sends*, and take *receives*, by the other member's place, as call *number*; see `run`.

        Raises `MismatchError` if a member has given another size than is expected here.
        """
        channel, what = self._channel, number_of(text) ^ (number * direct.CALL_FACTOR_OF_GROUPS & _MASK)
        nothing = 0, 0
        sources, destinations, offered = [nothing] * len(self._ranks), [nothing] * len(self._ranks), [0]
        for pieces, memories in ((sources, sends), (destinations, receives)):
            for place, memory in memories.items():
                pieces[self._place[place]] = memory.address, memory.nbytes
        if not self._session.port.call_directly(
                channel, lambda left_s, look: channel.all_to_all(sources, destinations, offered, what, left_s, look),
                self._unit, self._ranks, number, timeout_s, check, sum(nbytes for _, nbytes in sources)):
            return False
        for place, (nbytes, (_, wanted)) in enumerate(zip(offered, destinations)):
            self.require(place, nbytes, wanted)
        return True

    def _of(self, loads: Sequence[Load], what: int, dtype: str, op: str) -> Call:
        """Return the channel's call for *loads*."""
        channel, first = self._channel, loads[0] if loads else None
        divisor = len(self._ranks) if op == "avg" else 1
        if first is None or not any(load.nbytes for load in loads):
            return lambda left_s, look: channel.barrier(what, left_s, look)
        if first.root >= 0 and len(loads) == 1:
            root = self._place[first.root]
            address = first.source if root == self._me else first.destination
            return lambda left_s, look: channel.broadcast(root, address, first.nbytes, what, left_s, look)
        if first.root >= 0:
            by_place = [loads[member] for member in self._by_place]
            addresses, sizes = [load.destination for load in by_place], [load.nbytes for load in by_place]
            own = by_place[self._me].source
            return lambda left_s, look: channel.all_gather(addresses, sizes, own, what, left_s, look)
        kind = direct.DTYPES.index(dtype), direct.OPS.index("sum" if op == "avg" else op)
        if len(loads) == 1:
            places = first.destination, first.source, first.nbytes
            return lambda left_s, look: channel.all_reduce(*places, *kind, divisor, what, left_s, look)
        by_place = [loads[member] for member in self._by_place]
        sources = [(load.source, load.nbytes) for load in by_place]
        to = by_place[self._me].destination
        return lambda left_s, look: channel.reduce_scatter(sources, to, *kind, divisor, what, left_s, look)

    def close(self, retires: bool) -> None:
        """Close the channel; *retires*: and free its memory once all members do that. No call may be under way."""
        if retires:
            self._session.retire([self._unit])  # closes it
        else:
            self._session.port.close_channel(self._channel)


@functools.lru_cache(maxsize=1024)
def number_of(text: str) -> int:
    """Return the number by which members recognize that they make the call *text*."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
