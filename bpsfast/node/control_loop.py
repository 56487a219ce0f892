"""The interface of a node's control loop for its other parts; `main.Node` implements it."""
from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from ..orchestration.errors import BpsError
from ..orchestration.messages import Message
from .runtime import NodeRuntime

T = TypeVar("T")


class ControlLoop(Protocol):
    """The thread of a node that handles all messages. All members are for that thread only."""

    @property
    def name(self) -> str:
        """The node's name in messages, "node 3"."""

    @property
    def runtime(self) -> NodeRuntime:
        """The engine and what it needs."""

    @property
    def admitted(self) -> bool:
        """Whether the scheduler has closed the job's list of members."""

    @property
    def ending(self) -> bool:
        """Whether the job is over for this node, well or not."""

    @property
    def is_without_scheduler(self) -> bool:
        """Whether the scheduler is lost, and no other one has yet taken over."""

    def join(self) -> None:
        """Ask to be admitted with the ranks that have attached; asking again replaces the earlier request."""

    def first_rank_attached(self) -> None:
        """Note that the first rank has attached."""

    def starter_left(self, rank: int) -> None:
        """Note that *rank*, whose process started this one, has left the job."""

    def send(self, message: Message) -> None:
        """Send *message* to the scheduler; while there is none, it is kept for the next one if it still matters."""

    def send_unrecorded(self, message: Message) -> None:
        """Send *message* to the present scheduler; it is lost if that dies."""

    def fail(self, error: BpsError, who: str = "", reason: str = "", tell: bool = True) -> None:
        """End the job with *error*; see `main.Node.fail`."""

    def run_with_heartbeats(self, work: Callable[[], T]) -> T:
        """Return what *work* returns, and send heartbeats meanwhile: it may take long."""

    def catch_up(self) -> None:
        """Handle everything that the scheduler has sent until now."""

    def count_message(self) -> None:
        """Count a message of a peer."""

    def counters(self) -> dict[str, int]:
        """Return all counters of the node."""
