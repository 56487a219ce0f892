"""The cells of `bench optimum`: layouts of machines, the number of helpers, and who runs."""
from __future__ import annotations

from dataclasses import dataclass
from math import prod

from bpsfast.base.settings import Settings
from bpsfast.bench.harness.option_lists import parse_counts
from bpsfast.orchestration.errors import ConfigError
from bpsfast.orchestration.messages import TensorSpec
from bpsfast.orchestration.placement.shares import Machine
from bpsfast.tools.planner import catalog

#: Of all links together, up to so many machines: what two cores can move and sum without being the limit.
_TOTAL_BITS = {11: 0.8e9, 15: 0.5e9, 64: 0.4e9}
_PARTITION_NBYTES = 32 << 10
#: May be under way to one peer: enough that no connection waits for an acknowledgement, little enough that a switch's
#: port holds what all send to it.
_CREDIT_PARTITIONS = 2
#: Of half the size, where all workers' bytes stand at the ports of a few helpers (`Cell.crowded`).
_CROWDED_CREDIT_PARTITIONS = 3
#: Of half the size, where every link is full both ways (`Cell.full`), on links that are so much slower.
_FULL_CREDIT_PARTITIONS = 4
_FULL_RATE = 0.5
#: The sums of the last partitions leave when nothing else does: each costs its owner as many transfers as there are
#: workers, so a step of few partitions is above any formula.
_NBYTES = 832 * _PARTITION_NBYTES
_BYTEPS_PARTITION_NBYTES = 4_096_000
_HASH_DIVISOR = 128
SETS = ("equal", "full", "unequal", "models")


@dataclass(frozen=True)
class Layout:
    """Machines of one cluster. `workers`, `helpers`: each one's link, relative to `rate_bits` (bits/s each way)."""

    title: str
    workers: tuple[float, ...]
    helpers: tuple[float, ...]
    rate_bits: float

    @property
    def rates(self) -> dict[str, float]:
        """Machine name -> bits/s; names as a job's shape has them."""
        named = {f"node{i}": share for i, share in enumerate(self.workers)}
        named |= {f"helper{i}": share for i, share in enumerate(self.helpers)}
        return {name: share * self.rate_bits for name, share in named.items()}


@dataclass(frozen=True)
class Cell:
    """One measurement: `n_helpers` of the layout's helpers, and the contestants that take turns.

    A contestant is "gloo" (its ring), or one of our placements: "optimal", "colocated", "ps", "equal" (knows nothing
    of links: what is optimal if all were alike), "hash:NAME". `load` is "numpy" (one array of `nbytes`) or
    "gradients of MODEL/N", as `BpsfastRank` names them. `crowded`: where helpers own everything, all workers' bytes
    stand at the ports of a few, and with them what gives the helpers credit for the next sums: with partitions of 32
    KiB sums fall 10 % behind, with less in the queue, in smaller pieces, 2 %. `full`: where every link has to move as
    many bytes both ways as any other, no time is left to make up for what the last sums take: smaller pieces.
    """

    n_helpers: int
    contestants: tuple[str, ...]
    nbytes: int
    load: str = "numpy"
    hash_partition_nbytes: int = _PARTITION_NBYTES
    crowded: bool = False
    full: bool = False

    def partition_nbytes(self, contestant: str) -> int:
        """Return what *contestant* cuts tensors into: BytePS has a default, which its hash is measured with."""
        if contestant.startswith("hash:"):
            return self.hash_partition_nbytes
        return _PARTITION_NBYTES // 2 if self.full or self._is_crowded(contestant) else _PARTITION_NBYTES

    def credit_nbytes(self, contestant: str) -> int:
        """Return how many bytes *contestant* may have under way to one peer."""
        if contestant.startswith("hash:"):
            return self.partition_nbytes(contestant)  # eight of its partitions fit into a switch's port, not more
        n = (_FULL_CREDIT_PARTITIONS if self.full else _CROWDED_CREDIT_PARTITIONS if self._is_crowded(contestant)
             else _CREDIT_PARTITIONS)
        return n * self.partition_nbytes(contestant)

    @property
    def awake_us(self) -> int:
        """Return how long a wait keeps its core: sixteen machines share two, and what one keeps another wants."""
        return 0 if self.full else Settings().awake_us

    def _is_crowded(self, contestant: str) -> bool:
        return contestant == "ps" and self.crowded

    def specs(self) -> list[TensorSpec]:
        """Return the tensors as the job declares them, in the order of their priority."""
        if self.load == "numpy":
            return [TensorSpec(name=self.load, dtype="float32", shape=(self.nbytes // 4,))]
        model, _, divisor = self.load.removeprefix("gradients of ").partition("/")
        return [TensorSpec(name=name, dtype="float32", shape=shape, group=model)
                for name, shape in catalog.divided(model, int(divisor)).items()]

    def machines(self, layout: Layout, rate_bytes: dict[float, float]) -> list[Machine]:
        """Return the machines that take part; *rate_bytes*: relative link -> what it really moves."""
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
    """Fewer helpers than workers; whom they change nothing for takes part without any, and with half of them."""
    layout = Layout(f"{n} workers, equal links", (1.0,) * n, (1.0,) * (n - 1), _rate_bits(2 * n))
    some = (0, n // 2)
    return layout, [
        Cell(k, ("optimal", *(["ps"] if k else []), *(["colocated", "gloo"] if k in some else [])), _NBYTES,
             crowded=2 * k <= n)
        for k in (some if quick else range(n))]


def _full(n: int) -> tuple[Layout, list[Cell]]:
    """As many helpers as workers: all that can help."""
    rate_bits = _FULL_RATE * _rate_bits(2 * n)
    layout = Layout(f"{n} workers, as many helpers, equal links", (1.0,) * n, (1.0,) * n, rate_bits)
    return layout, [Cell(n, ("optimal", "ps", "colocated", "gloo"), _NBYTES, full=True)]


def _unequal(quick: bool) -> list[tuple[Layout, list[Cell]]]:
    one_slow = Layout("7 workers and 1 at a quarter", (1.0,) * 7 + (0.25,), (), _rate_bits(8))
    half_slow = Layout("4 workers and 4 at 40 %, 2 helpers", (1.0,) * 4 + (0.4,) * 4, (1.0,) * 2, _rate_bits(10))
    return [(one_slow, [Cell(0, ("optimal", "equal", "gloo"), _NBYTES)]),
            (half_slow, [Cell(2, ("optimal", "equal", "gloo"), _NBYTES)])]


def _models(quick: bool) -> tuple[Layout, list[Cell]]:
    """Lists of whole tensors, 16 or 32 times smaller.

    For BytePS's hash 128 times smaller, as is what BytePS cuts them into by default: of larger partitions those that
    eight machines send to one overflow a switch's port, and what is measured are losses.
    """
    layout = Layout("8 workers, 4 helpers, gradient lists", (1.0,) * 8, (1.0,) * 4, _rate_bits(12))
    cells = []
    for model, least in (("vgg16", 16), ("bert-large", 32)):
        for contestant, divisor in (("optimal", 4 * least if quick else least), ("hash:mixed", _HASH_DIVISOR)):
            nbytes = 4 * sum(prod(shape) for shape in catalog.divided(model, divisor).values())
            cells.append(Cell(4, (contestant,), nbytes, f"gradients of {model}/{divisor}",
                              _BYTEPS_PARTITION_NBYTES // divisor // 4096 * 4096))
    return layout, cells
