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
from ..pyx.port import copy
from ..trainer.guarded_port import DirectWaits
from ..trainer.session import Session
from ..trainer.tensor_input import TensorInput
from ..trainer.unit import Unit

Call = Callable[[float, Callable[[], None]], int]

_MASK = (1 << 64) - 1
#: Numbers of the loads of one call lie so far apart.
_NEXT = 0x9E3779B97F4A7C15


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

    def direct_sums(self, *arguments: Any) -> direct.DirectSums:
        """Return `run` of all-reduces, in C; *arguments*: those of `pyx.direct.DirectSums` from *kind* on."""
        return self._session.port.direct_sums(self._channel, *arguments)

    def waits(self, number: Callable[[], int], timeout_s: Callable[[], float], check: Callable[[], None]
              ) -> DirectWaits:
        """Return what looks at other things while a call waits, and raises its error; *number*, ...: see there."""
        return DirectWaits(self._session.port, self._channel, self._unit, self._ranks, number, timeout_s, check)

    def run(self, text: str, number: int, dtype: str, op: str, loads: Sequence[Load], timeout_s: float,
            check: Callable[[], None]) -> bool:
        """Carry out *loads* of call *number*; return whether all members make the same call, which *text* describes.

        *op*: "avg" or one of `partition.OPS`; of loads with a root it does not count. *check* is called while it waits,
        and may raise. Raises as `GuardedPort.wait`.
        """
        loads = [load for load in loads if load.nbytes]
        channel, what = self._channel, number_of(text) ^ (number * direct.CALL_FACTOR_OF_GROUPS & _MASK)

        def do(call: Call, nbytes: int) -> bool:
            return self._session.port.call_directly(channel, call, self._unit, self._ranks, number, timeout_s, check,
                                                    nbytes)

        if not loads:
            return do(lambda left_s, look: channel.barrier(what, left_s, look), 0)
        roots = [self._place[load.root] if load.root >= 0 else -1 for load in loads]
        if roots == list(range(len(self._ranks))) and all(load.nbytes <= channel.cell_nbytes for load in loads):
            addresses, sizes = [load.destination for load in loads], [load.nbytes for load in loads]
            own = loads[self._me]
            return do(lambda left_s, look: channel.all_gather(addresses, sizes, own.source, what, left_s, look),
                      own.nbytes)
        for load in loads:
            if not do(self._of(load, what, dtype, op), load.nbytes if load.source else 0):
                return False
            what = what + _NEXT & _MASK
        return True

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
        for rank, nbytes, (_, wanted) in zip(self._ranks, offered, destinations):
            if nbytes != wanted:
                raise MismatchError(f"rank {rank} has sent {nbytes} bytes, {wanted} were expected")
        return True

    def _of(self, load: Load, what: int, dtype: str, op: str) -> Call:
        """Return the channel's call for one load."""
        channel = self._channel
        if load.root < 0:
            divisor = len(self._ranks) if op == "avg" else 1
            kind = direct.DTYPES.index(dtype), direct.OPS.index("sum" if op == "avg" else op)
            places = load.destination, load.source, load.nbytes
            return lambda left_s, look: channel.all_reduce(*places, *kind, divisor, what, left_s, look)
        root = self._place[load.root]
        if root == self._me and load.destination and load.destination != load.source:
            copy(load.destination, load.source, load.nbytes)
        address = load.source if root == self._me else load.destination
        return lambda left_s, look: channel.broadcast(root, address, load.nbytes, what, left_s, look)

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
