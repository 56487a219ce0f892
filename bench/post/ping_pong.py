"""For `bench post`: a message to the other rank and back, for any library that sends and receives."""
from __future__ import annotations

from collections.abc import Callable

from bpsfast.bench.harness import pattern
from bpsfast.bench.harness.contestant import Operation

VARIANT = "ping-pong"


def operation(rank: int, array: pattern.Array, send: Callable[[int], object],
              receive: Callable[[int], object]) -> Operation:
    """Return the operation of ranks 0 and 1 on rank 0's *array*; *send* and *receive* take a rank and block."""
    def run() -> None:
        if rank == 0:
            send(1)
            receive(1)
        else:
            receive(0)
            send(0)

    def fill(known: bool) -> None:
        pattern.fill(array, 0, known and rank == 0)

    return Operation(run, fill, lambda: pattern.n_wrong(array, 1))
