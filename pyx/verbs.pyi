"""Types of `bpsfast.pyx.verbs`."""

from collections.abc import Mapping
from typing import Any

Completion = tuple[int, int, int, int, int | None, int]

class VerbsMissing(OSError): ...

def load(library: str | None = ...) -> None: ...
def version() -> str: ...
def fork_safety() -> str: ...
def devices() -> list[str]: ...

class Device:
    name: str
    children: int
    handle: int
    closed: bool
    attributes: Mapping[str, Any]
    def __init__(self, name: str) -> None: ...
    def port(self, number: int = ...) -> dict[str, Any]: ...
    def gid(self, port: int, index: int) -> bytes: ...
    def events(self, timeout_s: float | None = ...) -> list[tuple[str, str]]: ...
    def close(self) -> None: ...
    def __enter__(self) -> Device: ...
    def __exit__(self, *exc: object) -> None: ...

class ProtectionDomain:
    device: Device
    children: int
    handle: int
    closed: bool
    def __init__(self, device: Device) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> ProtectionDomain: ...
    def __exit__(self, *exc: object) -> None: ...

class MemoryRegion:
    domain: ProtectionDomain
    address: int
    nbytes: int
    lkey: int
    rkey: int
    handle: int
    closed: bool
    def __init__(
        self,
        domain: ProtectionDomain,
        buffer: Any,
        *,
        remote_write: bool = ...,
        remote_read: bool = ...,
        relaxed_ordering: bool = ...,
    ) -> None: ...
    @classmethod
    def at(
        cls,
        domain: ProtectionDomain,
        address: int,
        nbytes: int,
        keep: object,
        *,
        remote_write: bool = ...,
        remote_read: bool = ...,
        relaxed_ordering: bool = ...,
    ) -> MemoryRegion: ...
    def close(self) -> None: ...
    def __enter__(self) -> MemoryRegion: ...
    def __exit__(self, *exc: object) -> None: ...

class CompletionQueue:
    device: Device
    children: int
    handle: int
    depth: int
    pending: int
    closed: bool
    def __init__(self, device: Device, depth: int, *, events: bool = ...) -> None: ...
    def poll(self, n: int = ...) -> list[Completion]: ...
    def wait(self, timeout_s: float | None = ...) -> bool: ...
    def close(self) -> None: ...
    def __enter__(self) -> CompletionQueue: ...
    def __exit__(self, *exc: object) -> None: ...

class QueuePair:
    domain: ProtectionDomain
    send_cq: CompletionQueue
    recv_cq: CompletionQueue
    number: int
    psn: int
    max_send: int
    max_recv: int
    max_inline: int
    peer: str
    handle: int
    closed: bool
    outstanding: tuple[int, int]
    failure: dict[str, Any] | None
    state: str
    def __init__(
        self,
        domain: ProtectionDomain,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        *,
        max_send: int,
        max_recv: int,
        max_inline: int = ...,
        max_send_sge: int = ...,
    ) -> None: ...
    def to_init(
        self, port: int = ..., *, remote_write: bool = ..., remote_read: bool = ..., pkey_index: int = ...
    ) -> None: ...
    def to_rtr(
        self,
        peer_number: int,
        peer_psn: int,
        *,
        gid: bytes | None = ...,
        gid_index: int = ...,
        lid: int = ...,
        mtu: int = ...,
        port: int | None = ...,
        min_rnr_timer: int = ...,
        max_dest_rd_atomic: int = ...,
        traffic_class: int = ...,
        sl: int = ...,
        hop_limit: int = ...,
        flow_label: int = ...,
        static_rate: int = ...,
    ) -> None: ...
    def to_rts(
        self, *, timeout: int = ..., retry_count: int = ..., rnr_retry: int = ..., max_rd_atomic: int = ...
    ) -> None: ...
    def to_error(self) -> None: ...
    def post_write(
        self,
        wr_id: int,
        address: int,
        nbytes: int,
        lkey: int,
        remote_address: int,
        rkey: int,
        immediate: int | None = ...,
        signaled: bool = ...,
        inline: bool = ...,
    ) -> None: ...
    def post_send(
        self,
        wr_id: int,
        address: int,
        nbytes: int,
        lkey: int,
        immediate: int | None = ...,
        signaled: bool = ...,
        inline: bool = ...,
    ) -> None: ...
    def post_read(
        self, wr_id: int, address: int, nbytes: int, lkey: int, remote_address: int, rkey: int, signaled: bool = ...
    ) -> None: ...
    def post_recv(self, wr_id: int, address: int, nbytes: int, lkey: int) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> QueuePair: ...
    def __exit__(self, *exc: object) -> None: ...
