"""The options of `bench push_pull`."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

#: Begins the lines of JSON that rank 0 of `paired_rank` prints.
PAIRED = "paired "
#: The contestant that sums nothing: a process group of torch.distributed whose calls return at once.
EMPTY = "empty"

@dataclass(frozen=True)
class Plan:
    """Sizes in bytes, ranks, our operations ("numpy", "torch"), peers by name.

    `libraries`: of MPI, beside which one process measures both (`paired`).
    """

    sizes: tuple[int, ...]
    n_ranks: int
    operations: tuple[str, ...]
    peers: tuple[str, ...]
    quick: bool
    say: Callable[[str], None] = print
    libraries: tuple[str, ...] = ()

    @property
    def n_rounds(self) -> int:
        """Return the number of turns of every contestant at every size."""
        return 3 if self.quick else 9
