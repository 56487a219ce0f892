"""What is traced on one node: when each write could leave and did, and the records of engine and links."""
from __future__ import annotations

from collections.abc import Mapping

from ..base.settings import Settings
from ..base.trace_records import RECORD
from ..orchestration.clock_offset import Point
from ..pyx.engine import Engine
from ..trace import Origin, Part, SendLog, limits, write
from .transport import WireLink


class Tracing:
    """Kept until the end, then written. The control loop's own; *sends* is the communication service's to fill."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.limits = limits(settings)
        #: Of the communication service; None if nothing is traced.
        self.sends = SendLog(self.limits) if self.limits.trace_capacity else None
        self._records: list[bytes] = []

    def keep(self, ended: Engine | WireLink) -> None:
        """Keep what *ended* has traced, which is about to be closed, or is."""
        if self.limits.trace_capacity:
            self._records += [ended.trace()] if isinstance(ended, Engine) else ended.traces()

    def write(self, node: int, parts: Mapping[int, Part], peers: Mapping[int, int], clock: tuple[Point, ...]) -> None:
        """Write it, if anything was to be traced; *parts* by number, *peers*: nodes by source, *clock*: as in `Origin`.
        """
        if self.sends is None:
            return
        room = self.limits.trace_capacity * RECORD.size
        origin = Origin(node=node, clock=clock, peers=dict(peers), credit_nbytes=self._settings.credit_bytes,
                        full=self.sends.full or any(len(records) >= room for records in self._records))
        write(self._settings.trace_dir, f"node {node}", b"".join(self._records), parts, origin, self.sends.spans(peers))
