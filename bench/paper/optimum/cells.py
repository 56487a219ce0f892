"""The cells of `bench optimum`: layouts of machines, the number of helpers, and the contestants."""
from __future__ import annotations

from dataclasses import dataclass
from math import prod

from bpsfast.base.settings import Settings
from bpsfast.bench.harness.option_lists import parse_counts
from bpsfast.orchestration.errors import ConfigError
from bpsfast.orchestration.messages import TensorSpec
from bpsfast.orchestration.placement.shares import Machine
from bpsfast.tools.planner import catalog

#: Bits/s of all links together that two cores can move and sum without being the bottleneck, and number of machines.
_TOTAL_BITS = {11: 0.8e9, 15: 0.5e9, 64: 0.4e9}
_PARTITION_NBYTES = 32 << 10
#: Bytes in flight to one peer: enough that no connection waits for an acknowledgement, and few enough that a switch
#: port can queue the bytes of all senders.
_CREDIT_PARTITIONS = 2
#: Half the size, for cells in which all workers' bytes queue at the ports of a few helpers (`Cell.crowded`).
_CROWDED_CREDIT_PARTITIONS = 3
#: Half the size, for cells in which every link is full in both directions (`Cell.full`), on slower links.
_FULL_CREDIT_PARTITIONS = 4
_FULL_RATE = 0.5
#: Nothing else is sent at the same time as the sums of the last partitions. Each takes its owner one transfer for each
#: worker, so a step of few partitions takes longer than any formula.
_NBYTES = 832 * _PARTITION_NBYTES
_BYTEPS_PARTITION_NBYTES = 4_096_000
_HASH_DIVISOR = 128
SETS = ("equal", "full", "unequal", "models")


@dataclass(frozen=True)
class Layout:
    """Machines of one cluster. `workers`, `helpers`: their links, relative to `rate_bits` (bits/s each way)."""

    title: str
    workers: tuple[float, ...]
    helpers: tuple[float, ...]
    rate_bits: float

    @property
    def rates(self) -> dict[str, float]:
        """Return machine name -> bits/s; the names are those of a job's shape."""
        named = {f"node{i}": share for i, share in enumerate(self.workers)}
        named |= {f"helper{i}": share for i, share in enumerate(self.helpers)}
        return {name: share * self.rate_bits for name, share in named.items()}


@dataclass(frozen=True)
class Cell:
    """One measurement: `n_helpers` of the layout's helpers, and the contestants that take turns.

    A contestant is "gloo" (its ring), or one of our placements: "optimal", "colocated", "ps", "equal" (optimal if all
    links were equal), "hash:NAME". `load` is "numpy" (one array of `nbytes`) or "gradients of MODEL/N", as in
    `BpsfastRank`. `crowded`: helpers own everything, so all workers' bytes, and the messages that give the helpers
    credit for the next sums, queue at the ports of a few machines: steps take 10 % longer than the formula with
    partitions of 32 KiB, and 2 % with smaller partitions and queues. `full`: every link moves equally many bytes in
    both directions, so nothing hides the time of the last sums: smaller partitions.
    """

    n_helpers: int
    contestants: tuple[str, ...]
    nbytes: int
    load: str = "numpy"
    hash_partition_nbytes: int = _PARTITION_NBYTES
    crowded: bool = False
    full: bool = False

    def partition_nbytes(self, contestant: str) -> int:
        """Return the partition size of *contestant*; BytePS's hash is measured with BytePS's default."""
        if contestant.startswith("hash:"):
            return self.hash_partition_nbytes
        return _PARTITION_NBYTES // 2 if self.full or self._is_crowded(contestant) else _PARTITION_NBYTES

    def credit_nbytes(self, contestant: str) -> int:
        """Return how many bytes *contestant* may have in flight to one peer."""
        if contestant.startswith("hash:"):
            return self.partition_nbytes(contestant)  # a switch port can queue only eight of its partitions
        n = (_FULL_CREDIT_PARTITIONS if self.full else _CROWDED_CREDIT_PARTITIONS if self._is_crowded(contestant)
             else _CREDIT_PARTITIONS)
        return n * self.partition_nbytes(contestant)

    @property
    def awake_us(self) -> int:
        """Return how long a wait spins; not long, because up to sixteen machines share two cores."""
        return 0 if self.full else Settings().awake_us

    def _is_crowded(self, contestant: str) -> bool:
        return contestant == "ps" and self.crowded

    def specs(self) -> list[TensorSpec]:
        """Return the tensors that the job declares, in order of priority."""
        if self.load == "numpy":
            return [TensorSpec(name=self.load, dtype="float32", shape=(self.nbytes // 4,))]
        model, _, divisor = self.load.removeprefix("gradients of ").partition("/")
        return [TensorSpec(name=name, dtype="float32", shape=shape, group=model)
                for name, shape in catalog.divided(model, int(divisor)).items()]

    def machines(self, layout: Layout, rate_bytes: dict[float, float]) -> list[Machine]:
        """Return the participating machines; *rate_bytes*: relative link -> measured bytes/s."""
        return ([Machine(True, rate_bytes[share]) for share in layout.workers]
                + [Machine(False, rate_bytes[share]) for share in layout.helpers[: self.n_helpers]])


def chosen(sets: str, workers: str, quick: bool) -> list[tuple[Layout, list[Cell]]]:
    """Return layouts with their cells. *sets*: some of `SETS`; *workers*: counts where links are equal.

    Raises `ConfigError` if there is no such set, or a count is not from 2 to 32.
    """
    found: list[tuple[Layout, list[Cell]]] = []
    for name in sets.split(","):
        if name == "equal":
            found += [_equal(n, quick) for n in parse_counts("workers", workers, 32)]
        elif name == "full":
            found += [_full(n) for n in parse_counts("workers", workers, 32)]
        elif name == "unequal":
            found += _unequal(quick)
        elif name == "models":
            found.append(_models(quick))
        else:
            raise ConfigError(f"bench optimum has no set {name!r}: expected {', '.join(SETS)}")
    return found


def _rate_bits(n_machines: int) -> float:
    return next(total for most, total in _TOTAL_BITS.items() if n_machines <= most) / n_machines


def _equal(n: int, quick: bool) -> tuple[Layout, list[Cell]]:
    """Return cells with fewer helpers than workers; others run only with none and with half as many."""
    layout = Layout(f"{n} workers, equal links", (1.0,) * n, (1.0,) * (n - 1), _rate_bits(2 * n))
    some = (0, n // 2)
    return layout, [
        Cell(k, ("optimal", *(["ps"] if k else []), *(["colocated", "gloo"] if k in some else [])), _NBYTES,
             crowded=2 * k <= n)
        for k in (some if quick else range(n))]


def _full(n: int) -> tuple[Layout, list[Cell]]:
    """Return the cell with as many helpers as workers; more would not help."""
    rate_bits = _FULL_RATE * _rate_bits(2 * n)
    layout = Layout(f"{n} workers, as many helpers, equal links", (1.0,) * n, (1.0,) * n, rate_bits)
    return layout, [Cell(n, ("optimal", "ps", "colocated", "gloo"), _NBYTES, full=True)]


def _unequal(quick: bool) -> list[tuple[Layout, list[Cell]]]:
    one_slow = Layout("7 workers and 1 at a quarter", (1.0,) * 7 + (0.25,), (), _rate_bits(8))
    half_slow = Layout("4 workers and 4 at 40 %, 2 helpers", (1.0,) * 4 + (0.4,) * 4, (1.0,) * 2, _rate_bits(10))
    return [(one_slow, [Cell(0, ("optimal", "equal", "gloo"), _NBYTES)]),
            (half_slow, [Cell(2, ("optimal", "equal", "gloo"), _NBYTES)])]


def _models(quick: bool) -> tuple[Layout, list[Cell]]:
    """Return cells with lists of whole tensors, 16 or 32 times smaller.

    For BytePS's hash tensors and BytePS's default partitions are 128 times smaller: larger partitions that eight
    machines send to one overflow a switch port, so the measurement would show lost packets.
    """
    layout = Layout("8 workers, 4 helpers, gradient lists", (1.0,) * 8, (1.0,) * 4, _rate_bits(12))
    cells = []
    for model, least in (("vgg16", 16), ("bert-large", 32)):
        for contestant, divisor in (("optimal", 4 * least if quick else least), ("hash:mixed", _HASH_DIVISOR)):
            nbytes = 4 * sum(prod(shape) for shape in catalog.divided(model, divisor).values())
            cells.append(Cell(4, (contestant,), nbytes, f"gradients of {model}/{divisor}",
                              _BYTEPS_PARTITION_NBYTES // divisor // 4096 * 4096))
    return layout, cells
