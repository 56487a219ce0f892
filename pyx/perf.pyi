"""Types of `bpsfast.pyx.perf`."""

from collections.abc import Sequence
from typing import Any

MAX_RECORDS: int

class VerbsLoop:
    all_sent: int | None
    failure: tuple[int, int, int, bool] | None
    def __init__(
        self,
        send_cq: int,
        recv_cq: int,
        pairs: Sequence[tuple[int, int, int, int, int, int]],
        *,
        operation: str,
        nbytes: int,
        depth: int,
        receive_depth: int,
        receive_nbytes: int,
        receives: bool,
        moderation: int,
        inlined: bool = ...,
        idle_s: float | None = ...,
        nap_s: float = ...,
        stall_s: float = ...,
        keep: object = ...,
    ) -> None: ...
    def post_receives(self) -> None: ...
    def bandwidth(
        self, n_send: int | None, n_receive: int | None, duration_s: float = ...
    ) -> tuple[int, int, float, bytes, bytes]: ...
    def latency(self, n: int, first: bool) -> bytes: ...
    def expect(self, n: int) -> None: ...
    def cancel(self) -> None: ...

class MemoryLoop:
    def __init__(
        self,
        incoming: Any,
        outgoing: Any,
        own_bell: Any,
        peer_bell: Any,
        peer_data: Any,
        sink: Any,
        *,
        nbytes: int,
        depth: int,
        awake_s: float = ...,
        stall_s: float = ...,
        stream_nbytes: int = ...,
    ) -> None: ...
    def bandwidth(
        self, n_send: int | None, n_receive: int | None, duration_s: float = ...
    ) -> tuple[int, int, float]: ...
    def latency(self, n: int, first: bool) -> bytes: ...
    def expect(self, n: int) -> None: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...

class Mailbox:
    handle: int
    arrived_address: int
    notify_address: int
    arrived: int
    delivered: int
    lost: int | None
    def wait(self, arrived: int | None, delivered: int | None, timeout_s: float, awake_s: float = ...) -> bool: ...
