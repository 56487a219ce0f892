"""What a job's scheduler must know of the settings."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class JobSettings:
    """What the scheduler must know. `fingerprint` None: the first node's settings are what others must agree with.

    `awaits_ranks`: the deadline of the start counts from the first node whose ranks have come, as its launcher ends the
    scheduler if none comes.
    """

    num_nodes: int
    num_helpers: int = 0
    max_helpers: int = 0
    num_server_processes: int = -1
    size: int = -1
    package: str = ""
    fingerprint: Mapping[str, str] | None = None
    placement: str = "optimal"
    partition_nbytes: int = 4096000
    fusion_nbytes: int = 4096000
    heartbeat_s: float = 1.0
    lease_s: float = 10.0
    helper_lease_s: float = 1.0
    start_timeout_s: float = 60.0
    awaits_ranks: bool = False
    first_round: int = 1
    name: str = ""  # that no other job has

    @property
    def most_helpers(self) -> int:
        """The most helpers that a running job has at a time: as many as it starts with, or more if it was told so.

        BytePS's server processes count as helpers here: on which machines they are is not known before they come.
        """
        return max(self.num_helpers, self.num_server_processes, self.max_helpers)
