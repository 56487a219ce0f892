"""Collectives among ranks of one machine, carried out by the ranks themselves in memory that they share (`pyx.direct`).

Their node places and frees that memory as it does a tensor's, and ends their waits when the job is over; it moves no
byte. Sums have the bits that the node's have: inputs are combined in the order of the ranks.
"""
from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..orchestration.messages import TensorSpec
from ..orchestration.placement.partition import CHANNEL
from ..pyx import direct
from ..pyx.port import copy
from ..trainer.session import Session

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


class MachineChannel:
    """The channel of *ranks*, members of one group on one machine, of which all open it. One call at a time.

    The constructor waits until all of them have opened it, at most *timeout_s*. *declared*: the ranks for which its
    memory is declared, as in `TensorSpec`. Raises as `TensorRegistry.unit`.
    """

    def __init__(self, session: Session, name: str, ranks: Sequence[int], declared: tuple[int, ...], priority: int,
                 timeout_s: float) -> None:
        self._session = session
        self._ranks = tuple(sorted(ranks))  # sums are formed in this order
        self._place = [self._ranks.index(rank) for rank in ranks]
        self._me = self._ranks.index(session.rank)
        page = mmap.PAGESIZE
        nbytes = -(-direct.channel_nbytes(len(ranks), direct.ANY_NBYTES) // page) * page
        session.tensors.declare([TensorSpec(name=name, dtype="uint8", shape=(nbytes,), average=False, op=CHANNEL,
                                            ranks=declared, priority=priority, partition_nbytes=nbytes)])
        self._unit = session.tensors.unit(name, timeout_s)
        self._memory = self._unit.map_channel()
        self._channel = session.port.open_channel(self._memory, len(ranks), self._me, direct.ANY_NBYTES)

    def run(self, what: int, number: int, dtype: str, op: str, loads: Sequence[Load], timeout_s: float,
            check: Callable[[], None]) -> bool:
        """Carry out *loads* of call *number*; return whether all members make the same call, which *what* says.

        *op*: "avg" or one of `partition.OPS`; of loads with a root it does not count. *check* is called while it waits,
        and may raise. Raises as `GuardedPort.wait`.
        """
        loads = [load for load in loads if load.nbytes]
        channel = self._channel

        def do(call: Call) -> bool:
            return self._session.port.call_directly(channel, call, self._unit, self._ranks, number, timeout_s, check)

        if not loads:
            return do(lambda left_s, look: channel.barrier(what, left_s, look))
        roots = [self._place[load.root] if load.root >= 0 else -1 for load in loads]
        if roots == list(range(len(self._ranks))) and all(load.nbytes <= channel.cell_nbytes for load in loads):
            addresses, sizes = [load.destination for load in loads], [load.nbytes for load in loads]
            own = loads[self._me].source
            return do(lambda left_s, look: channel.all_gather(addresses, sizes, own, what, left_s, look))
        for load in loads:
            if not do(self._of(load, what, dtype, op)):
                return False
            what = what + _NEXT & _MASK
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
        self._session.port.close_channel(self._channel)
        self._memory.close()
        if retires:
            self._session.retire([self._unit])
