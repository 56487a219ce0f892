"""Types of `bpsfast.pyx.port`."""

from typing_extensions import Buffer

DONE: int
TIMED_OUT: int
ABORTED: int
NODE_DIED: int

class LaneFull(TimeoutError): ...

class Port:
    def __init__(
        self,
        lane: Buffer,
        board: Buffer,
        doorbell: Buffer,
        node_pidfd: int,
        *,
        awake_us: int = ...,
        trace_capacity: int = ...,
        patience_s: float = ...,
    ) -> None: ...
    def submit(self, part: int, n_parts: int, round: int, segment: int, offset: int, empty: bool = ...) -> None: ...
    def copy_in(
        self, destination: int, source: int, nbytes: int, part: int, stride: int, round: int, segment: int, offset: int
    ) -> None: ...
    def stream_in(
        self,
        window: int,
        source: int,
        nbytes: int,
        part: int,
        stride: int,
        round: int,
        segment: int,
        offset: int,
        n_slots: int,
        begin: int,
        timeout_s: float,
    ) -> tuple[int, int]: ...
    def done(self, part: int, n_parts: int, round: int) -> bool: ...
    def wait(self, part: int, n_parts: int, round: int, timeout_s: float) -> int: ...
    def deliver(
        self, destination: int, source: int, nbytes: int, part: int, stride: int, round: int, timeout_s: float
    ) -> int: ...
    def state(self) -> tuple[int, str]: ...
    def trace(self) -> bytes: ...
    def close(self) -> None: ...

def copy(destination: int, source: int, nbytes: int) -> None: ...
