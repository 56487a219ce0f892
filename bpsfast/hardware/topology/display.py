"""Shows a topology: the connection of two parts in the words of ``nvidia-smi topo -m``, and a drawing."""
from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from ...orchestration.errors import LackingError
from .graph import LinkKind, Part, PartKind, Topology

#: The words of `connection` and their meaning; in NV# the # stands for the number of NVLinks.
CONNECTION_WORDS = {
    "NV#": "# NVLinks, directly or over NVSwitches",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches, no socket",
    "NODE": "one socket (nvidia-smi: PHB, too)",
    "SYS": "sockets and what is between them",
}
#: The word for parts without any connection.
NOT_CONNECTED = "-"


class Connection(NamedTuple):
    """The `word`, and bytes/s per direction of the slowest link on the path (0 if there is none)."""

    word: str
    rate_bytes: float


def connection(topology: Topology, one: str, other: str) -> Connection:
    """Return how the parts *one* and *other* are connected: by NVLinks if there are any, else over PCIe and sockets."""
    links = {name: link for name, link in topology.neighbours(one, LinkKind.NVLINK)}
    if other in links:
        return Connection(f"NV{links[other].n_links}", links[other].rate_bytes)
    beyond = {name: link for name, link in topology.neighbours(other, LinkKind.NVLINK)}
    ways = [(min(links[name].n_links, beyond[name].n_links), min(links[name].rate_bytes, beyond[name].rate_bytes))
            for name in links.keys() & beyond.keys() if topology.part(name).kind is PartKind.NVSWITCH]
    if ways:
        return Connection(f"NV{sum(n_links for n_links, _ in ways)}", sum(rate for _, rate in ways))
    path = topology.path(one, other)
    if not path:
        return Connection(NOT_CONNECTED, 0.0)
    kinds = [topology.part(name).kind for name in {end for link in path for end in (link.a, link.b)} - {one, other}]
    n_sockets, n_switches = kinds.count(PartKind.SOCKET), kinds.count(PartKind.SWITCH)
    word = "SYS" if n_sockets > 1 else "NODE" if n_sockets else "PXB" if n_switches > 1 else "PIX"
    return Connection(word, min(link.rate_bytes for link in path))


_COLORS = {PartKind.SOCKET: "#cfe2f3", PartKind.SWITCH: "#eeeeee", PartKind.GPU: "#d9ead3", PartKind.NIC: "#fff2cc",
           PartKind.NVSWITCH: "#b6d7a8"}
_LINES = {LinkKind.PCIE: "#444444", LinkKind.NVLINK: "#38761d", LinkKind.SOCKETS: "#1155cc"}
#: Inches between two parts, and between two rows.
_COLUMN, _ROW = 1.25, 1.4


def draw(topology: Topology, path: str) -> None:
    """Write a drawing of *topology* to *path*, as SVG: sockets on top, devices below, NVLinks as arcs at the bottom.

    Raises `LackingError` if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise LackingError("a picture needs matplotlib: pip install 'bpsfast[plot]'") from exc
    places = layout(topology)
    right, low = (end([place[axis] for place in places.values()] or [0.0]) for axis, end in enumerate((max, min)))
    figure = Figure(figsize=((right + 1.0) * _COLUMN, (2.5 - low) * _ROW))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(-0.5, right + 0.5)
    axes.set_ylim(low - 1.5, 1.0)
    axes.set_axis_off()
    axes.set_title(f"{topology.name}: GB/s per direction", y=0.93, parse_math=False)
    for link in topology.links:
        a, b = places[link.a], places[link.b]
        # NVLinks between GPUs of one row are arcs below them
        arc = 0.45 / max(1.0, abs(a[0] - b[0])) ** 0.5 if link.kind is LinkKind.NVLINK and a[1] == b[1] else 0.0
        axes.annotate("", a, b, arrowprops={
            "arrowstyle": "-", "color": _LINES[link.kind], "linewidth": 1.0 + min(link.n_links, 6) / 3,
            "connectionstyle": f"arc3,rad={arc if a[0] > b[0] else -arc}"}, zorder=1)
        if link.kind is not LinkKind.NVLINK:
            axes.text((a[0] + b[0]) / 2, (a[1] + b[1]) / 2, f"{link.rate_bytes / 1e9:.3g}", fontsize=7, ha="center",
                      va="center", zorder=2, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    for part in topology.parts:
        x, y = places[part.name]
        box = {"facecolor": _COLORS[part.kind], "edgecolor": "#444444", "boxstyle": "round"}
        axes.text(x, y, "\n".join(_words(part)), fontsize=8, ha="center", va="center", zorder=3, parse_math=False,
                  bbox=box)
    figure.savefig(path, format="svg")


def layout(topology: Topology) -> dict[str, tuple[float, float]]:
    """Return the position of each part: x in columns from 0, y in rows from 0 downward.

    Each GPU and card has a column of its own; a switch or socket is centred above its children. All GPUs are in one
    row, so that NVLinks do not cross other parts.
    """
    columns: dict[str, float] = {}
    rows: dict[str, float] = {}
    free = itertools.count()
    for part in (*topology.of(PartKind.SOCKET), *topology.of(PartKind.SWITCH), *topology.parts):
        if part.name not in rows and part.kind is not PartKind.NVSWITCH:
            _place(topology, part, 0, columns, rows, free)
    lowest = min(rows.values(), default=0.0)
    for part in topology.of(PartKind.GPU):
        rows[part.name] = lowest
    for number, part in enumerate(topology.of(PartKind.NVSWITCH)):
        below = [columns[name] for name, _ in topology.neighbours(part.name) if name in columns]
        columns[part.name] = sum(below) / len(below) if below else float(number)
        rows[part.name] = lowest - 1.0 - number
    return {name: (columns[name], rows[name]) for name in columns}


def _place(topology: Topology, part: Part, depth: int, columns: dict[str, float], rows: dict[str, float],
           free: Iterator[int]) -> None:
    """Set the position of *part* and of its children that have none yet; *free*: unused columns."""
    rows[part.name] = -float(depth)
    below = []
    if part.kind in (PartKind.SOCKET, PartKind.SWITCH):
        for name, _ in topology.neighbours(part.name, LinkKind.PCIE):
            if name not in rows:
                _place(topology, topology.part(name), depth + 1, columns, rows, free)
                below.append(columns[name])
    columns[part.name] = sum(below) / len(below) if below else float(next(free))


def _words(part: Part) -> Iterator[str]:
    yield part.name
    if part.cpus:
        yield f"CPUs {part.cpus}"
    if part.device and part.kind is PartKind.NIC:
        yield part.device
    if part.wire_rate_bytes:
        yield f"wire {part.wire_rate_bytes / 1e9:.3g}"
    if part.kind is PartKind.NVSWITCH and part.model:
        yield part.model
