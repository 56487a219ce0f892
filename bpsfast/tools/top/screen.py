"""The tables of ``bpsfast top``: plain columns in a log, rich tables on a terminal, with the same cells."""
from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rich.console import Group

    from .sample import NodeSample, RankSample, Sample

#: Width from which all columns fit.
_WIDE = 110
#: Lines of the screen without nodes, ranks and remarks: heads and blank lines.
_N_OTHER = 9
_UP = "up"


class _Column(NamedTuple):
    """A column: its head, the function for its cells, whether it holds numbers, whether it needs a wide screen."""

    head: str
    cell: Callable[[Any], str]
    is_number: bool = True
    is_wide: bool = False


class Table(NamedTuple):
    """Cells below heads, the indices of numeric columns, and the indices of rows to highlight."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[int, ...]
    marked: frozenset[int]


_NODES = (
    _Column("NODE", lambda node: str(node.node)),
    _Column("HOST", lambda node: node.host[:14], False),
    _Column("KIND", lambda node: "helper" if node.is_helper else "ranks", False),
    _Column("STATE", lambda node: node.state, False),
    _Column("SENT/s", lambda node: _bytes(node.sent_bytes_per_s)),
    _Column("RECV/s", lambda node: _bytes(node.received_bytes_per_s)),
    _Column("GOODPUT/s", lambda node: _bytes(node.goodput_bytes_per_s)),
    _Column("SUMS/s", lambda node: _number(node.sums_per_s)),
    _Column("QUEUE", lambda node: _number(node.queued)),
    _Column("FLIGHT", lambda node: _bytes(node.in_flight_bytes), True, True),
    _Column("CREDIT", lambda node: _bytes(node.credit_bytes), True, True),
    _Column("MEMORY", lambda node: _bytes(node.segment_bytes), True, True),
    _Column("RELINKED", lambda node: str(node.links_replaced), True, True),
)
_RANKS = (
    _Column("RANK", lambda rank: str(rank.rank)),
    _Column("NODE", lambda rank: str(rank.node)),
    _Column("STEPS", lambda rank: str(rank.steps), True, True),
    _Column("STEPS/s", lambda rank: f"{rank.steps_per_s:.2f}"),
    _Column("STEP ms", lambda rank: _ms(rank.step_s)),
    _Column("EXPOSED", lambda rank: _share(rank.exposed)),
    _Column("OVERLAP", lambda rank: _share(rank.overlap)),
    _Column("PUSHED/s", lambda rank: _bytes(rank.pushed_bytes_per_s)),
    _Column("STALLS", lambda rank: str(rank.stalls)),
    _Column("LAG ms", lambda rank: _ms(rank.lag_s)),
    _Column("LAST", lambda rank: _share(rank.last_share)),
)


def tables(sample: Sample, width: int, n_lines: int | None = None) -> tuple[Table, ...]:
    """Return the tables of nodes and ranks.

    If they exceed *n_lines*: nodes that are not up or send most (half of the lines if ranks need the rest), and the
    ranks with the largest lag.
    """
    late = latest(sample)
    nodes: Sequence[NodeSample] = sample.nodes
    ranks: Sequence[RankSample] = sample.ranks
    room = len(nodes) + len(ranks) if n_lines is None else n_lines - _N_OTHER
    title = ""
    n_nodes = max(1, room - min(len(ranks), room // 2))
    if len(nodes) > n_nodes:
        n_nodes = max(1, n_nodes - 1)  # the title takes a line
        room -= 1
        title = f"{n_nodes} of {len(nodes)} nodes, those that are not up or send most"
        nodes = sorted(nodes, key=lambda node: (node.state == _UP, -(node.sent_bytes_per_s or 0.0)))[:n_nodes]
    found = [_table(title, _NODES, nodes, width, lambda node: node.state != _UP)]
    title = ""
    room = max(1, room - len(nodes))
    if len(ranks) > room:
        ranks = sorted(ranks, key=lambda rank: -(rank.lag_s or 0.0))[:room]
        title = f"the {room} latest of {len(sample.ranks)} ranks"
    if ranks:
        found.append(_table(title, _RANKS, ranks, width, lambda rank: rank is late))
    return tuple(found)


def head(sample: Sample) -> list[str]:
    """Return the lines above the tables: the job, its members, the latest rank."""
    with_ranks = [node for node in sample.nodes if not node.is_helper]
    helpers = [node for node in sample.nodes if node.is_helper]
    there = sum(node.state in (_UP, "unseen") for node in helpers)
    clock = time.strftime("%H:%M:%S", time.localtime(sample.time))
    lines = [f"job {sample.job[:12]}, bpsfast {sample.version}, {clock}, over {sample.seconds:.1f} s"]
    recoveries = max((node.recoveries for node in sample.nodes), default=0)
    joined = max((node.joined for node in sample.nodes), default=0)
    lines.append(f"nodes {len(with_ranks)}, helpers {there} of {len(helpers)}, ranks {len(sample.ranks)}, "
                 f"recoveries {recoveries}, joined {joined}, stalls {sample.stalls}")
    late = latest(sample)
    if late is not None:
        lines.append(f"late: rank {late.rank}, {_ms(late.lag_s)} ms on average, last in {_share(late.last_share)} "
                     "of units")
    return lines


def latest(sample: Sample) -> RankSample | None:
    """Return the rank that others wait for: last in most units, and at least half more often than its share."""
    ranks = [rank for rank in sample.ranks if rank.last_share is not None]
    if len(ranks) < 2:
        return None
    late = max(ranks, key=lambda rank: (rank.last_share or 0.0, rank.lag_s or 0.0))
    return late if (late.last_share or 0.0) > 1.5 / len(ranks) else None


def text(sample: Sample, width: int) -> str:
    """Return the sample as plain text."""
    from ...base import output

    lines = head(sample)
    for table in tables(sample, width):
        lines += ["", *([table.title] if table.title else []),
                  output.columns([table.heads, *table.rows], right=table.numbers)]
    return "\n".join([*lines, *(["", *sample.remarks] if sample.remarks else [])])


def picture(sample: Sample, width: int, n_lines: int, remarks: Sequence[str]) -> Group:
    """Return the sample as a rich renderable of this size; *remarks* are the last ones of all samples."""
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    below = [line for remark in remarks for line in textwrap.wrap(remark, width)]
    parts: list[Any] = [Text(line, style="bold" if number == 0 else "yellow" if line.startswith("late:") else "")
                        for number, line in enumerate(head(sample))]
    for table in tables(sample, width, n_lines - len(below)):
        shown = RichTable(box=None, pad_edge=False, header_style="bold", title=table.title or None,
                          title_justify="left", padding=(0, 2, 0, 0))
        for number, name in enumerate(table.heads):
            shown.add_column(name, justify="right" if number in table.numbers else "left", no_wrap=True)
        for number, row in enumerate(table.rows):
            shown.add_row(*row, style="yellow" if number in table.marked else "")
        parts += [Text(), shown]
    return Group(*parts, *([Text(), *map(Text, below)] if below else []))


def _table(title: str, columns: tuple[_Column, ...], rows: Sequence[NodeSample | RankSample], width: int,
           is_marked: Callable[[Any], bool]) -> Table:
    chosen = [column for column in columns if width >= _WIDE or not column.is_wide]
    return Table(title, tuple(column.head for column in chosen),
                 tuple(tuple(column.cell(row) for column in chosen) for row in rows),
                 tuple(number for number, column in enumerate(chosen) if column.is_number),
                 frozenset(number for number, row in enumerate(rows) if is_marked(row)))


def _bytes(nbytes: float | None) -> str:
    """Return bytes in at most seven characters, in powers of 1000 as for network rates."""
    if nbytes is None:
        return "-"
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}" if nbytes < 999.5 * scale else f"{nbytes / scale:.0f} {unit}"
    return f"{nbytes:.0f} B"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
