"""Types of `bpsfast.pyx.direct`."""
from collections.abc import Callable, Sequence

from typing_extensions import Buffer

DONE: int
TIMED_OUT: int
ABORTED: int
NODE_DIED: int
DIFFERENT: int
MOST_RANKS: int
ANY_NBYTES: int
DTYPES: tuple[str, ...]
OPS: tuple[str, ...]
LEVELS: tuple[str, ...]

def level() -> str: ...
def channel_nbytes(n_ranks: int, most_nbytes: int) -> int: ...
def format_channel(address: int, n_ranks: int, first: int = ...) -> None: ...

class Channel:
    n_waits: int
    cell_nbytes: int
    def __init__(self, memory: Buffer, n_ranks: int, me: int, most_nbytes: int, *, board: Buffer | None = ...,
                 doorbell: Buffer | None = ..., node_pidfd: int = ..., awake_us: int = ...,
                 is_crowded: bool = ...) -> None: ...
    def all_reduce(self, destination: int, source: int, nbytes: int, dtype: int, op: int, divisor: int, what: int,
                   timeout_s: float, look: Callable[[], None] | None = ...) -> int: ...
    def broadcast(self, root: int, address: int, nbytes: int, what: int, timeout_s: float,
                  look: Callable[[], None] | None = ...) -> int: ...
    def all_gather(self, addresses: Sequence[int], sizes: Sequence[int], own: int, what: int, timeout_s: float,
                   look: Callable[[], None] | None = ...) -> int: ...
    def barrier(self, what: int, timeout_s: float, look: Callable[[], None] | None = ...) -> int: ...
    def missing(self) -> tuple[int, ...]: ...
    def close(self) -> None: ...
