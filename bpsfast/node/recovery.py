"""A change of epoch as one node goes through it: a helper is lost, and the job goes on without it.

    freeze      sum and pass on nothing; part with who is lost; say how far everything has come here (`Frozen`)
    prepare     memory and lanes for the new owners (`succession`), then Ready
    commit      go on, with what is owed of the last round first

If another one is lost in between, all of it begins anew: until the commit the engine is as it was frozen.
"""
from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..orchestration import messages
from ..orchestration.errors import CapacityError, PeerLostError, ProtocolError
from .generation import Generation
from .plans import Plans
from .succession import Succession
from .vertex import Vertex

if TYPE_CHECKING:
    from .control import Node

log = logging.getLogger("bpsfast.node")


class Recovery:
    """The recoveries of *node*, one after the other. Called by the control loop's thread.

    Parameters
    ----------
    part_with
        Called with the index of each lost node before its connection is closed: watch and expect it no more.
    """

    def __init__(self, node: Node, vertex: Vertex, plans: Plans, part_with: Callable[[int], None]) -> None:
        self._node = node
        self._vertex = vertex
        self._plans = plans
        self._part_with = part_with
        self._frozen: messages.Freeze | None = None
        self._since = 0.0
        self._prepared: tuple[Generation, Succession] | None = None
        #: How often this node has gone on without somebody.
        self.count = 0

    def freeze(self, message: messages.Freeze) -> None:
        """Stop, part with who is lost, and say so."""
        if not self._vertex.connected:
            raise PeerLostError(f"{message.reason}; this node was still connecting to its peers")
        if self._frozen is None:
            self._since = time.monotonic()
        self._frozen = message
        self._plans.forget()
        if self._prepared is not None:
            self._vertex.wiring.drop(self._prepared[0])
            self._prepared = None
        self._vertex.freeze(f"the job cannot go on after a loss ({message.reason})")
        for index in message.lost:
            self._part_with(index)
            self._node.patiently(lambda index=index: self._vertex.exclude(index))  # type: ignore[misc]
        wiring = self._vertex.wiring
        self._node.send(messages.Frozen(epoch=message.epoch, progress=wiring.progress(message.lost), near=wiring.near))

    def prepare(self, message: messages.Recover) -> None:
        """Prepare for the new owners; answer Ready once peers have said where they write to."""
        if self._frozen is None or self._frozen.epoch != message.epoch:
            raise ProtocolError(f"the scheduler recovers in epoch {message.epoch}, for which this node is not frozen")
        try:
            self._prepared = self._node.patiently(lambda: self._vertex.wiring.prepare_succession(message))
        except CapacityError as exc:
            self._node.send(messages.PrepareFailed(generation=message.generation, reason=str(exc)))
            return
        self._plans.await_for(self._prepared[0])

    def commit(self, message: messages.Commit) -> bool:
        """Go on if *message* is the commit of what was prepared here; whether it is."""
        if self._prepared is None or self._prepared[0].plan.generation != message.generation:
            return False
        assert self._frozen is not None
        generation, succession = self._prepared
        frozen, self._frozen, self._prepared = self._frozen, None, None
        self._plans.forget()
        self._vertex.succeed(generation, succession, message.order)
        self.count += 1
        if self._node.name == "node 0":
            moved = [part for unit in generation.plan.units for part in unit.parts if part.part in succession.parts]
            heirs = ", ".join(f"node {owner}" for owner in sorted({part.owner for part in moved}))
            log.warning("the job goes on without what it has lost (%s): %s; epoch %d, after %.0f ms", frozen.reason,
                        f"{len(moved)} partitions are summed by {heirs} from now on" if moved else
                        "nothing was summed there", frozen.epoch, (time.monotonic() - self._since) * 1e3)
        return True
