"""The seats of this machine: where the node's threads run, what ranks are told, where memory is (`bpsfast.seating`)."""
from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from ..nic import numa
from ..nic.host import Host
from ..orchestration.messages import Attach
from ..seating import cores, devices
from ..seating.homes import Homes
from ..seating.pins import Pins
from ..seating.plan import Rank, Seat, Wishes, at_home, node_seat, rank_seats
from ..settings import Settings

log = logging.getLogger("bpsfast.node")


class Seats:
    """Keeps this whole process to its seat, from here on: made before any thread that is to be there. One thread.

    Parameters
    ----------
    address
        Where peers connect to: bytes go through its card.
    host
        The machine; a recorded one in tests.

    Raises
    ------
    ConfigError
        If nothing is left for the node.
    """

    def __init__(self, settings: Settings, address: str, host: Host | None = None) -> None:
        self._host = host or Host()
        tree = self._host.tree
        self.allowed = numa.allowed_cpus(tree) or frozenset(os.sched_getaffinity(0))
        self.seat = Seat()
        self.homes = Homes({})
        self._wishes = Wishes.of(settings)
        self._cores = cores.Cores({})
        self._mems = numa.allowed_nodes(tree)
        n_nodes = sum(bool(node.cpus) for node in self._host.numa.values())
        self._is_on = settings.numa and (n_nodes > 1 or self._wishes.some)
        if not self._is_on:
            return
        self._cores = cores.read(tree, settings.whole_cores)
        self.homes = Homes({number: self._cores.cpus_of(number) & self.allowed for number in self._cores.nodes})
        self._cards = devices.cards(self._host, settings, address)
        beside, wishes = self._cards.nodes, self._wishes
        if settings.cores:  # it keeps to its quota already
            beside, wishes = frozenset(), Wishes()
        self.seat = at_home(node_seat(self._cores, self.allowed, beside, max(0, settings.local_size), wishes),
                            self._mems)
        if not Pins(self.seat.cpus).cpus:  # nothing to do, or refused
            self.seat = Seat(home=self.seat.home)
        log.info("seats: %s%s", _words("this node", self.seat),
                 f", beside {', '.join(self._cards.names)}" if self.seat.cpus and self._cards.nodes else "")

    def of(self, ranks: Sequence[Attach]) -> tuple[Seat, ...]:
        """Return the seats of all local *ranks*, in their order.

        Raises
        ------
        ConfigError
            If BPSFAST_RANK_CPUS does not fit them.
        """
        if not self._is_on:
            return (Seat(),) * len(ranks)
        has_gpus = len(self._cores.nodes) > 1 and any(rank.gpu >= 0 for rank in ranks)
        gpus = devices.gpus(self._host) if has_gpus else ()
        came = [Rank(numa.parse_cpus(rank.cpus), rank.stays, gpus[rank.gpu] if 0 <= rank.gpu < len(gpus) else None)
                for rank in ranks]
        taken = self.seat.cpus if self.seat.alone else frozenset[int]()
        seats = tuple(at_home(seat, self._mems) for seat in rank_seats(self._cores, came, self._wishes, taken))
        log.info("seats: %s", "; ".join(_words(f"local rank {number}", seat) for number, seat in enumerate(seats)))
        return seats


def _words(who: str, seat: Seat) -> str:
    where = f"on CPUs {numa.format_cpus(seat.cpus)}" if seat.cpus else "where it may run"
    return f"{who} {where}" + ("" if seat.home is None else f", its memory on NUMA node {seat.home}")
