"""Packs tensors into units (a tensor, or a bucket of small ones), and cuts units into partitions. Pure.

A unit has one round: a lone tensor, or small members of a declared group packed together (a message for each bias
vector would cost more than its bytes). A unit is cut into partitions, so that it can be summed in several places
and so that an urgent tensor overtakes a long one.

A table of the op "rows" is declared with the shape of the whole table, which no process holds in memory. Row r is row r
// n of partition r % n, of n partitions: in real tables rows that are pushed often are neighbours, and would all fall
into one range. A partition is a frame (`pyx/rows.h`) with room for a fixed number of rows; a sum of more rows sets a
flag.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from .. import codec, store
from ..errors import CapacityError, ConfigError, UnsupportedError
from ..messages import MemberPlan, PartPlan, TensorSpec, UnitPlan

#: Partitions of one job: the board and the slot tables of the engine are this long.
MAX_PARTS = 65536

#: Bytes of one element, by the dtype's name on the wire.
ITEM_NBYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
               "uint8": 1}

#: The op of tables that are summed by rows.
ROWS = "rows"
#: The other ops; the bitwise ones take integers only.
OPS = ("sum", "product", "min", "max", "band", "bor", "bxor")
BITWISE_OPS = ("band", "bor", "bxor")

#: Members begin at multiples of this: a cache line, and a multiple of every element's size.
MEMBER_ALIGNMENT = 64
#: Fused tensors of more bytes are summed by the node: they are copied together first, and apart afterwards, which a
#: rank does while the node sums others.
_MOST_DIRECT_OF_GROUP_NBYTES = 256 << 10
#: A lone tensor of at least this many bytes has two partitions or more, so that two threads, or two nodes, share its
#: sum. In a group other units do that, and a second partition would only cost.
_SHARED_NBYTES = 1 << 20

#: The most bytes of a partition that CPUs copy within one machine: a few of them, of all ranks, stay in caches from
#: their copy in to their copy out.
CACHED_NBYTES = 512 << 10

#: Beyond this number of partitions `CACHED_NBYTES` does not apply.
_MANY_PARTS = MAX_PARTS // 2


#: A row frame begins with three 64-bit words: the bytes that follow, the number of rows, flags.
HEADER_NBYTES = 24
#: Flag of a row frame that was too short; its number of rows is the number that it would have needed.
OVERFLOW = 1
#: Bytes of a row index.
INDEX_NBYTES = 4
#: The values of a row frame begin at a multiple of this.
_ALIGNMENT = 64

#: Rounds of a unit are counted modulo this, so that a job may have any number of them.
N_ROUNDS = 1 << 32


def nbytes_of(spec: TensorSpec) -> int:
    """Return the bytes of *spec*; of a table that is summed by rows those of the whole table.

    Raises `UnsupportedError` if no kernel does that with that dtype, or a dimension is negative; `ConfigError` if a
    table is not declared correctly.
    """
    if spec.op == ROWS:
        check_rows(spec.name, spec.shape, spec.max_rows, spec.group)
    elif spec.op not in OPS:
        raise UnsupportedError(f"tensor {spec.name!r} is to be reduced by {spec.op!r}; supported: {', '.join(OPS)}")
    if spec.average and spec.op not in ("sum", ROWS):
        raise UnsupportedError(f"tensor {spec.name!r}: the {spec.op} of inputs cannot be averaged; average=False")
    if spec.op in BITWISE_OPS and "float" in spec.dtype:
        raise UnsupportedError(f"tensor {spec.name!r} has dtype {spec.dtype}, whose bits {spec.op} does not mean; it "
                               "takes integers")
    if spec.dtype not in ITEM_NBYTES:
        raise UnsupportedError(f"tensor {spec.name!r} has dtype {spec.dtype!r}; supported: {', '.join(ITEM_NBYTES)}")
    if any(length < 0 for length in spec.shape):
        raise UnsupportedError(f"tensor {spec.name!r} has the negative dimension of shape {spec.shape}")
    return math.prod(spec.shape) * ITEM_NBYTES[spec.dtype]


def check_codec(spec: TensorSpec) -> None:
    """Raise `ConfigError` or `UnsupportedError` if *spec* cannot be compressed with its codec."""
    if spec.codec is None:
        return
    codec.check(spec.codec)
    codec.width_of(spec.dtype)
    if spec.op != "sum":
        raise UnsupportedError(f"tensor {spec.name!r} is compressed ({spec.codec.kind}), so it can only be summed, not "
                               f"reduced by {spec.op!r}")
    if spec.edition_of:
        raise UnsupportedError(f"tensor {spec.name!r} is compressed ({spec.codec.kind}), so it cannot have editions: "
                               "what one of them has not sent would be lost")


def check_store(spec: TensorSpec) -> None:
    """Raise `ConfigError` or `UnsupportedError` if owners cannot keep *spec* with its store."""
    if spec.store is None:
        return
    store.check(spec.store)
    if store.width_of(spec.dtype) is None:
        raise UnsupportedError(f"tensor {spec.name!r} is to be kept by its owners, so it is of floats, not of "
                               f"{spec.dtype}")
    if spec.op != "sum":
        raise UnsupportedError(f"tensor {spec.name!r} is kept by its owners, so it can only be summed, not reduced by "
                               f"{spec.op!r}")
    if spec.codec is not None:
        raise UnsupportedError(f"tensor {spec.name!r} is kept by its owners, so it cannot be compressed "
                               f"({spec.codec.kind}): answers are weights, not gradients")
    if spec.edition_of:
        raise UnsupportedError(f"tensor {spec.name!r} is kept by its owners, so it cannot have editions: each would "
                               "keep weights of its own")


def has_state(spec: TensorSpec) -> bool:
    """Return whether owners of *spec* keep more than a sum; then they are machines with ranks of it."""
    return spec.store is not None or (spec.codec is not None and spec.codec.has_state)


def round_up(nbytes: int, multiple: int) -> int:
    """Return the smallest multiple of *multiple* that is not below *nbytes*."""
    return -(-nbytes // multiple) * multiple


def plan_units(specs: Sequence[TensorSpec], first_unit: int, first_part: int, partition_nbytes: int, fusion_nbytes: int,
               page_nbytes: int = 4096, is_within: bool = False) -> list[UnitPlan]:
    """Pack *specs* into units and cut these into partitions; owners are left -1 for `assignment`.

    Lone tensors are units of their own. Members of a group are packed by urgency into units of at most *fusion_nbytes*,
    called "group#0", "group#1", ...; a member of *fusion_nbytes* or more stands alone under its own name; dtypes,
    `average`, `op` and `store` never mix in a unit. A tensor's own partition and fusion sizes override the arguments. A
    unit's priority is its most urgent member's; a priority of None means minus the position in *specs*. Units come most
    urgent first. A unit without bytes has no partitions: it is complete at once.

    Partitions of a unit are even, the last is short; of at most *partition_nbytes* rounded down to pages, one at least.
    If the job *is_within* one machine, lone tensors that the CPU copies have smaller ones (`CACHED_NBYTES`), while
    there are few. *page_nbytes* is the largest page of any machine of the job: each maps results of several owners side
    by side. Raises `UnsupportedError` if a dtype or shape cannot be summed; `CapacityError` if the job would have more
    than `MAX_PARTS` partitions.
    """
    units = _cut(specs, first_unit, first_part, partition_nbytes, fusion_nbytes, page_nbytes, is_within)
    part = first_part + sum(len(unit.parts) for unit in units)
    if is_within and part > _MANY_PARTS:
        units = _cut(specs, first_unit, first_part, partition_nbytes, fusion_nbytes, page_nbytes, False)
        part = first_part + sum(len(unit.parts) for unit in units)
    if part > MAX_PARTS:
        n_bytes = sum(unit.nbytes for unit in units)
        raise CapacityError(
            f"{len(specs)} tensors of {n_bytes} bytes would bring the job to {part} partitions, a job has at most "
            f"{MAX_PARTS}; raise partition_bytes (now {partition_nbytes}) or declare small tensors as a group")
    return units


def _cut(specs: Sequence[TensorSpec], first_unit: int, first_part: int, partition_nbytes: int, fusion_nbytes: int,
         page_nbytes: int, is_within: bool) -> list[UnitPlan]:
    units: list[UnitPlan] = []
    part = first_part
    for name, members, priority in _bundles(specs, fusion_nbytes):
        most = min(partition_nbytes, CACHED_NBYTES) if is_within and _is_copied(members[0]) else partition_nbytes
        unit = _lay_out(first_unit + len(units), name, members, priority, part, most, page_nbytes)
        part += len(unit.parts)
        units.append(unit)
    return units


def _is_copied(spec: TensorSpec) -> bool:
    """Return whether ranks copy *spec* in and out by the CPU, as a whole, and owners keep nothing of it."""
    return (not spec.on_device and spec.group is None and spec.op != ROWS and spec.codec is None
            and spec.store is None)


def _bundles(specs: Sequence[TensorSpec], fusion_nbytes: int) -> Iterator[tuple[str, list[TensorSpec], int]]:
    """Yield (unit name, members, priority), the most urgent first, both units and members."""
    bundles: list[tuple[str, list[TensorSpec], int]] = []
    filling: dict[tuple[object, ...], tuple[list[TensorSpec], int]] = {}
    n_units: dict[str, int] = {}
    urgency = [-position if spec.priority is None else spec.priority for position, spec in enumerate(specs)]
    for position in sorted(range(len(specs)), key=lambda position: (-urgency[position], position)):
        spec = specs[position]
        nbytes = round_up(nbytes_of(spec), MEMBER_ALIGNMENT)
        most = spec.fusion_nbytes or fusion_nbytes
        if spec.group is None or nbytes >= most or spec.codec is not None or spec.op == ROWS:
            bundles.append((spec.name, [spec], urgency[position]))
            continue
        kind = (spec.group, spec.dtype, spec.average, spec.op, spec.partition_nbytes, spec.n_streams, most, spec.store,
                spec.islands)
        members, filled = filling.get(kind, ([], 0))
        if not members or filled + nbytes > most:
            members, filled = [], 0
            number = n_units.get(spec.group, 0)
            n_units[spec.group] = number + 1
            bundles.append((f"{spec.group}#{number}", members, urgency[position]))
        members.append(spec)
        filling[kind] = (members, filled + nbytes)
    return iter(bundles)


def _lay_out(unit: int, name: str, members: Sequence[TensorSpec], priority: int, first_part: int, partition_nbytes: int,
             page_nbytes: int) -> UnitPlan:
    """Return the plan of one unit: members at aligned offsets, partitions at page-aligned ones."""
    most = max((members[0].partition_nbytes or partition_nbytes) // page_nbytes * page_nbytes, page_nbytes)
    if members[0].op == ROWS:
        return _lay_out_rows(unit, members[0], priority, first_part, most, page_nbytes)
    placed = []
    end = 0
    for spec in members:
        offset = round_up(end, MEMBER_ALIGNMENT)
        placed.append(MemberPlan(name=spec.name, shape=spec.shape, offset=offset, nbytes=nbytes_of(spec)))
        end = offset + nbytes_of(spec)
    n_parts = -(-end // most)
    if members[0].group is None and end >= _SHARED_NBYTES:
        n_parts = max(n_parts, 2)
    stride = round_up(-(-end // max(n_parts, 1)), page_nbytes) or page_nbytes
    parts = tuple(part_of(members[0], first_part + index, offset, min(stride, end - offset))
                  for index, offset in enumerate(range(0, end, stride)))
    return UnitPlan(unit=unit, name=name, dtype=members[0].dtype, average=members[0].average, priority=priority,
                    nbytes=end, stride=stride, members=tuple(placed), parts=parts,
                    n_streams=members[0].n_streams, op=members[0].op, ranks=members[0].ranks, codec=members[0].codec,
                    store=members[0].store, islands=members[0].islands, separate=members[0].separate,
                    direct=all(spec.direct for spec in members)
                    and (len(members) == 1 or end <= _MOST_DIRECT_OF_GROUP_NBYTES))


def _lay_out_rows(unit: int, spec: TensorSpec, priority: int, first_part: int, partition_nbytes: int,
                  page_nbytes: int) -> UnitPlan:
    """Return the plan of a table that is summed by rows: its bytes are the room for the frames, in whole pages."""
    row_nbytes = math.prod(spec.shape[1:]) * ITEM_NBYTES[spec.dtype]
    n_parts, frame_rows = split_rows(spec.shape[0], spec.max_rows, row_nbytes, partition_nbytes)
    room = round_up(row_frame_nbytes(frame_rows, row_nbytes), page_nbytes)
    parts = tuple(PartPlan(part=first_part + i, offset=i * room, nbytes=room, owner=-1) for i in range(n_parts))
    member = MemberPlan(name=spec.name, shape=spec.shape, offset=0, nbytes=n_parts * room)
    return UnitPlan(unit=unit, name=spec.name, dtype=spec.dtype, average=spec.average, priority=priority,
                    nbytes=n_parts * room, stride=room, members=(member,), parts=parts, n_streams=spec.n_streams,
                    op=spec.op, ranks=spec.ranks, frame_rows=frame_rows)


def part_of(kind: TensorSpec | UnitPlan, part: int, offset: int, nbytes: int) -> PartPlan:
    """Return partition *part* of a tensor or unit, without an owner."""
    frame = 0
    if kind.codec is not None:
        frame = codec.frame_nbytes(kind.codec, nbytes // ITEM_NBYTES[kind.dtype], kind.dtype)
    return PartPlan(part=part, offset=offset, nbytes=nbytes, owner=-1, frame_nbytes=frame)


def with_owners(unit: UnitPlan, owner_of: Callable[[PartPlan], int]) -> UnitPlan:
    """Return *unit* with each of its partitions owned by the node that *owner_of* gives."""
    return msgspec.structs.replace(unit, parts=tuple(
        msgspec.structs.replace(part, owner=owner_of(part)) for part in unit.parts))


class RowSplit(NamedTuple):
    """How a table is split: `n_parts` partitions, each frame with room for `frame_rows` rows."""

    n_parts: int
    frame_rows: int


def check_rows(name: str, shape: tuple[int, ...], max_rows: int, group: str | None) -> None:
    """Raise `ConfigError` or `UnsupportedError` unless table *name* can be summed by rows, *max_rows* at once."""
    if not shape or 0 in shape[1:]:
        raise UnsupportedError(f"table {name!r} has shape {shape}: a table has rows, and these at least one element")
    if max_rows < 1:
        raise ConfigError(f"table {name!r}: a sum has room for max_rows={max_rows} rows; it must be 1 at least")
    if group is not None:
        raise ConfigError(f"table {name!r} is in group {group!r}, but what is summed by rows is fused with nothing")


def split_rows(n_rows: int, max_rows: int, row_nbytes: int, partition_nbytes: int) -> RowSplit:
    """Split a table of *n_rows*, of which a sum has at most *max_rows*, into partitions of about *partition_nbytes*.

    Some partitions get more of those rows than others: a frame has room for four standard deviations more than the mean
    if all rows are equally likely, and for all of its rows if *max_rows* is the whole table.
    """
    if n_rows == 0:
        return RowSplit(0, 0)
    most = min(n_rows, max_rows)
    nbytes = most * (INDEX_NBYTES + row_nbytes)
    n_parts = max(-(-nbytes // partition_nbytes), 2 if nbytes >= _SHARED_NBYTES else 1, -(-n_rows >> 8 * INDEX_NBYTES))
    n_parts = min(n_parts, n_rows)
    mean = -(-most // n_parts)
    return RowSplit(n_parts, min(-(-n_rows // n_parts), mean + 4 * math.isqrt(mean) + 16))


def part_rows(n_rows: int, n_parts: int, index: int) -> int:
    """Return the number of rows of *n_rows* that partition *index* of *n_parts* has."""
    return -(-(n_rows - index) // n_parts)


def values_offset(n_rows: int) -> int:
    """Return where the values of a frame of *n_rows* begin."""
    return -(-(HEADER_NBYTES + INDEX_NBYTES * n_rows) // _ALIGNMENT) * _ALIGNMENT


def row_frame_nbytes(n_rows: int, row_nbytes: int) -> int:
    """Return the bytes of a frame of *n_rows* rows of *row_nbytes*."""
    return values_offset(n_rows) + n_rows * row_nbytes


def round_after(round_: int, n: int = 1) -> int:
    """Return the *n*-th round after *round_*."""
    return (round_ + n) % N_ROUNDS


def rounds_ahead(round_: int, than: int) -> int:
    """Return how far *round_* is ahead of *than*, negative if it is behind; they must be less than 2^31 apart."""
    return (round_ - than + N_ROUNDS // 2) % N_ROUNDS - N_ROUNDS // 2
