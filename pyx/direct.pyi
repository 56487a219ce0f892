"""Types of `bpsfast.pyx.direct`."""
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from typing_extensions import Buffer

DONE: int
TIMED_OUT: int
ABORTED: int
NODE_DIED: int
DIFFERENT: int
DECLINED: int
MOST_RANKS: int
ANY_NBYTES: int
DTYPES: tuple[str, ...]
OPS: tuple[str, ...]
CALL_FACTOR_OF_GROUPS: int
NO_PART_OF_GROUPS: int
CODES: dict[str, int]
NBITS: dict[str, int]
LEVELS: tuple[str, ...]

def level() -> str: ...
def channel_nbytes(n_ranks: int, most_nbytes: int) -> int: ...
def format_channel(address: int, n_ranks: int, first: int = ...) -> None: ...

class Channel:
    n_waits: int
    cell_nbytes: int
    busy: bool
    refuses: bool
    is_broken: bool
    def __init__(self, memory: Buffer, n_ranks: int, me: int, most_nbytes: int, *, board: Buffer | None = ...,
                 doorbell: Buffer | None = ..., node_pidfd: int = ..., awake_us: int = ...,
                 is_crowded: bool = ...) -> None: ...
    def all_reduce(self, destination: int, source: int, nbytes: int, dtype: int, op: int, divisor: int, what: int,
                   timeout_s: float, look: Callable[[], None] | None = ...) -> int: ...
    def broadcast(self, root: int, address: int, nbytes: int, what: int, timeout_s: float,
                  look: Callable[[], None] | None = ...) -> int: ...
    def all_gather(self, addresses: Sequence[int], sizes: Sequence[int], own: int, what: int, timeout_s: float,
                   look: Callable[[], None] | None = ...) -> int: ...
    def all_to_all(self, sources: Sequence[tuple[int, int]], destinations: Sequence[tuple[int, int]],
                   offered: list[int], what: int, timeout_s: float,
                   look: Callable[[], None] | None = ...) -> int: ...
    def barrier(self, what: int, timeout_s: float, look: Callable[[], None] | None = ...) -> int: ...
    def missing(self) -> tuple[int, ...]: ...
    def close(self) -> None: ...

class Rounds:
    n_begun: int
    round: int
    in_flight: bool
    has_begun: bool
    is_retired: bool
    pushed_nbytes: int
    def __init__(self, port: Any, last: int, sample: Callable[[int], None] | None = ...) -> None: ...
    def begin(self, nbytes: int) -> int | None: ...
    def finish(self, round: int) -> None: ...
    def follow(self, other: Rounds) -> None: ...

class DirectTensor:
    n_sums: int
    n_declined: int
    def __init__(self, channel: Channel, rounds: Rounds, port: Any, waits: Any, deferred: dict[str, Any], part: int,
                 dtype: str, nbytes: int, divisor: int) -> None: ...
    def begin(self, nbytes: int) -> int | None: ...
    def all_reduce(self, source: int, destination: int) -> None: ...

class DirectPush:
    def __init__(self, tensor: DirectTensor, like: object, is_array: bool, dtype: str, shape: tuple[int, ...],
                 average: bool, priority: int | None, shared: tuple[int, int],
                 locate: Callable[[int, int], object]) -> None: ...
    def push_pull(self, x: object, out: object, average: bool, priority: int | None) -> Any: ...

_F = TypeVar("_F", bound=Callable[..., Any])

def known_first(pushes: dict[str, DirectPush]) -> Callable[[_F], _F]: ...
def known_first_in_place(pushes: dict[str, DirectPush]) -> Callable[[_F], _F]: ...

class CallCount:
    n: int
    is_inside: bool

class DirectSums:
    n_sums: int
    refuses: bool
    def __init__(self, channel: Channel, port: Any, deferred: dict[str, Any], kind: type, options: type,
                 hash_of_sum: int, turn: Any, lock: Any, count: CallCount, what: Any) -> None: ...
    def all_reduce(self, tensors: Any, opts: Any) -> bool: ...
