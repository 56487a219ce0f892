"""Types of `bpsfast.pyx.engine`."""

from collections.abc import Sequence

from typing_extensions import Buffer

EVENT_FORWARD: int
EVENT_RESULT: int
EVENT_DELIVERED: int
EVENT_LOST: int
FLAG_EMPTY: int

class Engine:
    arrived_address: int
    notify_address: int
    handle: int
    generation: int
    def __init__(
        self,
        board: Buffer,
        doorbell: Buffer,
        *,
        n_threads: int,
        nontemporal_nbytes: int = ...,
        awake_us: int = ...,
        trace_capacity: int = ...,
    ) -> None: ...
    def add_rank(self, lane: Buffer) -> int: ...
    def add_shm_peer(self, incoming: Buffer, outgoing: Buffer, doorbell: Buffer) -> int: ...
    def add_wire_peer(self) -> int: ...
    def map_segment(self, source: int, segment: int, address: int, nbytes: int) -> None: ...
    def add_owned(
        self,
        part: int,
        *,
        nbytes: int,
        n_elements: int,
        unit_offset: int,
        kernel: int,
        divisor: int,
        before: Sequence[tuple[int, int]],
        local: Sequence[int],
        after: Sequence[tuple[int, int]],
        outputs: tuple[int, int],
        shm_peers: Sequence[int],
        to_wire: bool,
    ) -> None: ...
    def add_member(
        self,
        part: int,
        *,
        nbytes: int,
        n_elements: int,
        unit_offset: int,
        kernel: int,
        local: Sequence[int],
        owner: int,
        partial: tuple[int, int, int],
    ) -> None: ...
    def remove(self, part: int) -> None: ...
    def freeze(self, timeout_s: float) -> None: ...
    def report(self) -> list[tuple[int, int, int]]: ...
    def missing(self, part: int) -> tuple[int, list[int]]: ...
    def commit(self, generation: int, order: Sequence[int]) -> None: ...
    def events(self, timeout_s: float) -> list[tuple[int, int, int, int, int, int, int]]: ...
    def wake(self) -> None: ...
    def arrived(self, source: int, part: int, round: int, flags: int) -> None: ...
    def abort(self, reason: str) -> None: ...
    def counters(self) -> dict[str, int]: ...
    def trace(self) -> bytes: ...
    def close(self) -> None: ...
