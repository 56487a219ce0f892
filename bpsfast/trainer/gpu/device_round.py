"""A crossing: one round of a unit whose input, or result, lies on a device. From there to the sum and back."""
from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ...gpu.copies import DeviceCopy, ResultCopy
from ...gpu.device import Stream
from ...orchestration.errors import BpsError

if TYPE_CHECKING:
    from ..session import Session
    from ..unit import Unit


class DeviceRound:
    """Round `round` of *unit*. Any thread."""

    def __init__(self, session: Session, unit: Unit, round: int, departure: DeviceCopy, arrival: ResultCopy | None) -> None:
        self.unit = unit
        self.round = round
        self._session = session
        self._departure = departure
        self._arrival = arrival

    def done(self) -> bool:
        """Return whether `wait` will not block."""
        if not self._departure.is_over or self._departure.has_failed:
            return self._departure.is_over
        return self.unit.done(self.round) and (self._arrival is None or self._arrival.is_over)

    def wait(self, deadline: float) -> None:
        """Wait until the sum is complete, and all copies of it to the device are enqueued.

        Raises
        ------
        DeviceError
            If the device failed. If that was before the input had left it, the round is lost to all ranks.
        StallError, PeerLostError
            As `Unit.wait`; *deadline* is of time.monotonic.
        """
        self.wait_departed(deadline)
        self.unit.wait(self.round, max(0.0, deadline - time.monotonic()))
        if self._arrival is not None:
            self._arrival.wait(deadline, self._session.require_open)

    def wait_departed(self, deadline: float) -> None:
        """Wait until the input has left the device: it may be written again, by the host too. Raises as `wait`."""
        try:
            self._departure.wait(deadline, self._look)
        except BpsError as exc:
            if self._departure.has_failed:
                self.unit.give_up(exc)
                if self._arrival is not None:
                    self._arrival.end(exc)
                    if not self._arrival.is_queued:  # else partitions that were complete may be on their way
                        self._arrival.release_memory()
            raise

    def _look(self) -> None:
        """Start what was deferred: others may wait for it. Raise what the job was aborted with, if it was."""
        self._session.port.check()
        self._session.tensors.start_committed()

    def join(self, caller: Stream) -> None:
        """Let what is enqueued on *caller* from now on find the result on the device. After `wait`."""
        if self._arrival is not None and self._arrival.event is not None:
            caller.wait(self._arrival.event)
