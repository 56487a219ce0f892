"""``bpsfast topo``: what is inside a machine, and how fast what joins it is."""
from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ...base import command_errors, output
from .options import overrides, set_option
from .root_option import root_option

if TYPE_CHECKING:
    from ...hardware.topology.graph import Part, Topology

_HEAD = ("PART", "GB/s UP", "WIRE GB/s", "DEVICE", "ADDRESS", "MODEL", "CPUS")


@click.command()
@click.option("--read", "source", type=click.Path(dir_okay=False), metavar="FILE",
              help="Show the machine that FILE describes, which --json has written, instead of this one.")
@click.option("--svg", "picture_path", type=click.Path(dir_okay=False), metavar="FILE",
              help="Draw it, too. Needs matplotlib.")
@click.option("--strategy", "as_strategy", is_flag=True,
              help="Show how its GPUs' gradients are best summed, instead. Needs scipy.")
@click.option("--service", type=click.FloatRange(min=0.0), default=0.0, metavar="X", show_default=True,
              help="For --strategy: how much the machine sums for others, in sizes of the gradient.")
@click.option("--cores", "as_seats", is_flag=True,
              help="Show which CPUs and memory the node and local ranks of a job get, instead.")
@click.option("--ranks", "n_ranks", type=click.IntRange(1), metavar="N",
              help="For --cores: local ranks. By default one for each GPU, else for each NUMA node.")
@click.option("--nic", "nics", multiple=True, metavar="NAME",
              help="For --cores: an RDMA device or interface that bytes go through; may be repeated.")
@root_option
@set_option
@output.options()
@command_errors.exit_on_error
def command(source: str | None, picture_path: str | None, as_strategy: bool, service: float, as_seats: bool,
            n_ranks: int | None, nics: tuple[str, ...], root: str | None, assignments: tuple[str, ...], as_json: bool,
            path: str | None, no_color: bool) -> None:
    """Show what is inside a machine: GPUs, PCIe switches, sockets, network cards, and how fast each link is.

    Rates are in GB/s per direction, as the kernel and NVML tell them; none is measured. NVLinks need the package
    nvidia-ml-py. A file of --json may be changed by hand before it is read: a machine that you do not have.
    Settings that force a strategy (pcie_switch_size, reduce_roots; BytePS's variables, too) or allow GPUs to send
    straight to network cards (gpu_direct) are obeyed by --strategy.

    \b
    bpsfast topo
    bpsfast topo --json >machine.json
    bpsfast topo --read machine.json --svg machine.svg
    bpsfast topo --strategy --service 0.75
    bpsfast topo --cores --ranks 4
    bpsfast topo --strategy --set reduce_roots=2,3   the forced beside the best
    """
    import msgspec

    from ...base import settings
    from ...hardware.topology import discovery

    if source is not None and root is not None:
        raise click.UsageError("--read has the machine from a file, --root from a folder: choose one")
    if service and not as_strategy:
        raise click.UsageError("--service says what --strategy shall reckon with: give both")
    if (n_ranks or nics) and not as_seats:
        raise click.UsageError("--ranks and --nic say what --cores shall reckon with: give it, too")
    if as_seats and (source is not None or picture_path is not None or as_strategy):
        raise click.UsageError("--cores goes with --root, --ranks and --nic only")
    if assignments and not as_strategy:
        raise click.UsageError("--set changes what --strategy shows: give both")
    chosen = output.form(as_json, path, no_color)
    if as_seats:
        from .affinity_table import AffinityTable

        seating = AffinityTable(root, n_ranks or 0, nics)
        output.show(chosen, seating.text, seating.as_dict())
        return
    topology = discovery.discover(root) if source is None else read(source)
    if picture_path is not None:
        from ...hardware.topology import display

        display.draw(topology, picture_path)
    if as_strategy:
        from ...hardware.topology.decision import report_strategy

        advice = report_strategy(topology, service, settings.load(overrides(assignments)))
        output.show(chosen, lambda: "\n".join(output.fitting(advice.lines())), advice.as_dict())
    else:
        output.show(chosen, lambda: text(topology), msgspec.to_builtins(topology))


def read(source: str) -> Topology:
    """Return the machine that the file *source* describes; raises `ConfigError` with what is wrong in which file."""
    from ...hardware.topology import graph
    from ...orchestration.errors import ConfigError

    with open(source, "rb") as file:
        content = file.read()
    try:
        return graph.from_json(content)
    except ConfigError as exc:
        raise ConfigError(f"--read {source}: {exc}") from exc


def text(topology: Topology) -> str:
    """Return what people read: the matrix, what hangs where, what joins sockets, what the words mean."""
    from ...hardware.topology.display import CONNECTION_WORDS
    from ...hardware.topology.graph import LinkKind, PartKind

    counts = [(len(topology.of(kind)), words) for kind, words in (
        (PartKind.SOCKET, "socket"), (PartKind.SWITCH, "PCIe switch"), (PartKind.GPU, "GPU"), (PartKind.NIC, "network card"))]
    lines = [f"{topology.name}: " + ", ".join(_counted(*each) for each in counts), ""]
    matrix = matrix_rows(topology)
    if len(matrix) > 2:
        lines += ["Joined by, and GB/s of the slowest link on the way:", output.columns(matrix), ""]
    lines.append(output.table(part_rows(topology), right=(1, 2)))
    between = [link for link in topology.links if link.kind is LinkKind.SOCKETS]
    if between:
        lines += ["", *(f"{link.a} - {link.b}: {_gb(link.rate_bytes)} GB/s" for link in between)]
    words = {cell.split()[0].rstrip("0123456789") for row in matrix[1:] for cell in row[1:]}
    legend = [f"{word:<5} {meaning}" for word, meaning in CONNECTION_WORDS.items() if word.rstrip("#") in words]
    return "\n".join(lines + (["", *legend] if legend else []))


def matrix_rows(topology: Topology) -> list[tuple[str, ...]]:
    """Return the head and a row for each GPU and card: how it is joined to each, as ``nvidia-smi topo -m`` has it."""
    from ...hardware.topology.display import connection
    from ...hardware.topology.graph import PartKind

    names = [part.name for kind in (PartKind.GPU, PartKind.NIC) for part in topology.of(kind)]
    rows: list[tuple[str, ...]] = [("", *names)]
    for one in names:
        cells = []
        for other in names:
            found = connection(topology, one, other)
            cells.append("X" if one == other else f"{found.word} {_gb(found.rate_bytes)}" if found.rate_bytes
                         else found.word)
        rows.append((one, *cells))
    return rows


def part_rows(topology: Topology) -> list[tuple[str, ...]]:
    """Return the head and a row for each part, below what it hangs at; at the end what hangs nowhere."""
    from ...hardware.topology.graph import LinkKind, PartKind

    rows: list[tuple[str, ...]] = [_HEAD]
    seen = set()

    def show(part: Part, depth: int, rate_bytes: float) -> None:
        seen.add(part.name)
        rows.append(("  " * depth + part.name, _gb(rate_bytes), _gb(part.wire_rate_bytes), part.device or "-",
                     part.address or "-", part.model or "-", part.cpus or "-"))
        if part.kind in (PartKind.SOCKET, PartKind.SWITCH):
            for name, link in topology.neighbours(part.name, LinkKind.PCIE):
                if name not in seen:
                    show(topology.part(name), depth + 1, link.rate_bytes)

    for part in (*topology.of(PartKind.SOCKET), *topology.parts):
        if part.name not in seen:
            show(part, 0, 0.0)
    return rows


def _counted(number: int, words: str) -> str:
    return f"{number} {words}{'' if number == 1 else 'es' if words.endswith('ch') else 's'}"


def _gb(rate_bytes: float) -> str:
    return f"{rate_bytes / 1e9:.3g}" if rate_bytes else "-"
