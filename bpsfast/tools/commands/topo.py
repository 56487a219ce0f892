"""``bpsfast topo`` shows the topology of a machine, the best way to sum in it, or the CPU affinity of a job."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from ...base import addresses, exit_codes, output, settings
from ...base.value_formats import format_cpus
from ...hardware import numa
from ...hardware.affinity import locality, plan as affinity
from ...hardware.host import RecordedKernel, open_host
from ...hardware.topology import discovery, display, graph
from ...hardware.topology.graph import LinkKind, Part, PartKind, Topology
from ...orchestration.errors import ConfigError
from .options import overrides, root_option, set_option

_HEAD = ("PART", "GB/s UP", "WIRE GB/s", "DEVICE", "ADDRESS", "MODEL", "CPUS")


@click.command()
@click.option("--read", "source", type=click.Path(dir_okay=False), metavar="FILE",
              help="Show the machine described by FILE, written by --json, instead of this one.")
@click.option("--svg", "picture_path", type=click.Path(dir_okay=False), metavar="FILE",
              help="Also draw the topology. Needs matplotlib.")
@click.option("--strategy", "as_strategy", is_flag=True,
              help="Show instead how to sum the gradients of its GPUs. Needs scipy.")
@click.option("--service", type=click.FloatRange(min=0.0), default=0.0, metavar="X", show_default=True,
              help="For --strategy: what the machine sums for others, in gradient sizes.")
@click.option("--cores", "as_cores", is_flag=True,
              help="Show instead which CPUs and memory the node and local ranks of a job get.")
@click.option("--ranks", "n_ranks", type=click.IntRange(1), metavar="N",
              help="For --cores: number of local ranks.  [default: one per GPU, or per NUMA node]")
@click.option("--nic", "nics", multiple=True, metavar="NAME",
              help="For --cores: RDMA device or interface that a job uses; may be repeated.")
@root_option
@set_option
@output.options()
@exit_codes.exit_on_error
def command(source: str | None, picture_path: str | None, as_strategy: bool, service: float, as_cores: bool,
            n_ranks: int | None, nics: tuple[str, ...], root: str | None, assignments: tuple[str, ...],
            form: output.OutputOptions) -> None:
    """Show what is inside a machine: GPUs, PCIe switches, sockets, network cards, and how fast each link is.

    Rates are in GB/s per direction, as the kernel and NVML report them; none is measured. NVLinks need the package
    nvidia-ml-py. A file written by --json may be edited before --read, to describe a machine that you do not have.
    Settings that force a strategy (pcie_switch_size, reduce_roots; BytePS's variables, too) or allow GPUs to send
    straight to network cards (gpu_direct) are obeyed by --strategy.

    \b
    bpsfast topo
    bpsfast topo --json >machine.json
    bpsfast topo --read machine.json --svg machine.svg
    bpsfast topo --strategy --service 0.75
    bpsfast topo --cores --ranks 4
    bpsfast topo --strategy --set reduce_roots=2,3   the forced and the best
    """
    if source is not None and root is not None:
        raise click.UsageError("--read reads a machine from a file, --root from a folder: choose one")
    if service and not as_strategy:
        raise click.UsageError("--service needs --strategy")
    if (n_ranks or nics) and not as_cores:
        raise click.UsageError("--ranks and --nic need --cores")
    if as_cores and (source is not None or picture_path is not None or as_strategy):
        raise click.UsageError("--cores can be combined only with --root, --ranks and --nic")
    if assignments and not as_strategy:
        raise click.UsageError("--set needs --strategy")
    if as_cores:
        table = AffinityTable(root, n_ranks or 0, nics)
        return output.show(form, table.text, table.as_dict())
    topology = discovery.discover(root) if source is None else read(source)
    if picture_path is not None:
        display.draw(topology, picture_path)
    if as_strategy:
        from ...hardware.topology.decision import report_strategy

        advice = report_strategy(topology, service, settings.load(overrides(assignments)))
        output.show(form, lambda: "\n".join(output.fitting(advice.lines())), advice.as_dict())
    else:
        output.show(form, lambda: text(topology), msgspec.to_builtins(topology))


def read(source: str) -> Topology:
    """Return the machine that the file *source* describes; raise `ConfigError` if it cannot be parsed."""
    try:
        return graph.from_json(Path(source).read_bytes())
    except ConfigError as exc:
        raise ConfigError(f"--read {source}: {exc}") from exc


def text(topology: Topology) -> str:
    """Return the topology as text: the matrix of connections, the tree of parts, links of sockets, a legend."""
    counts = [(len(topology.of(kind)), words) for kind, words in (
        (PartKind.SOCKET, "socket"), (PartKind.SWITCH, "PCIe switch"), (PartKind.GPU, "GPU"),
        (PartKind.NIC, "network card"))]
    lines = [f"{topology.name}: " + ", ".join(_counted(*each) for each in counts), ""]
    matrix = matrix_rows(topology)
    if len(matrix) > 2:
        lines += ["Connection, and GB/s of the slowest link on the path:", output.columns(matrix), ""]
    lines.append(output.table(part_rows(topology), right=(1, 2)))
    between = [link for link in topology.links if link.kind is LinkKind.SOCKETS]
    if between:
        lines += ["", *(f"{link.a} - {link.b}: {_gb(link.rate_bytes)} GB/s" for link in between)]
    words = {cell.split()[0].rstrip("0123456789") for row in matrix[1:] for cell in row[1:]}
    legend = [f"{word:<5} {meaning}" for word, meaning in display.CONNECTION_WORDS.items() if word.rstrip("#") in words]
    return "\n".join(lines + (["", *legend] if legend else []))


def matrix_rows(topology: Topology) -> list[tuple[str, ...]]:
    """Return the head and a row for each GPU and card: its connection to each, as ``nvidia-smi topo -m`` prints it."""
    names = [part.name for kind in (PartKind.GPU, PartKind.NIC) for part in topology.of(kind)]

    def cell(one: str, other: str) -> str:
        found = display.connection(topology, one, other)
        return "X" if one == other else f"{found.word} {_gb(found.rate_bytes)}" if found.rate_bytes else found.word

    return [("", *names), *((one, *(cell(one, other) for other in names)) for one in names)]


def part_rows(topology: Topology) -> list[tuple[str, ...]]:
    """Return the head and a row for each part, below its parent; at the end parts without one."""
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

_AFFINITY_HEAD = ("WHO", "CORES", "CPUS", "MEMORY ON NODE", "DEVICE")


class AffinityTable:
    """The CPU affinity of a job on this machine or a recorded one.

    *n_ranks*: number of local ranks (0: one for each GPU, or for each NUMA node). *names*: network cards of the job;
    none: those that settings and routes choose, or the fastest one. Uses the settings of this process. Raises
    `ConfigError` if a card does not exist, or settings do not suit the machine.
    """

    def __init__(self, root: str | None, n_ranks: int, names: tuple[str, ...]) -> None:
        host = open_host(root)
        given, _ = settings.load_with_origins(None, None if root is None else host.kernel.environ)
        self.cores = affinity.read_cores(host.tree, given.whole_cores)
        self.allowed = numa.allowed_cpus(host.tree) or self.cores.cpus
        self.cards = _cards(host, given, names)
        gpus = locality.gpu_numa_nodes(host)
        ranks = [affinity.Rank(self.allowed, beside=gpus[number] if number < len(gpus) else None)
                 for number in range(n_ranks or len(gpus) or len(self.cores.nodes))]
        self._gpus = gpus
        wishes = affinity.AffinityOptions.of(given)
        is_one = len(self.cores.within(self.allowed).nodes) < 2 and not wishes.some
        self.why_not = "BPSFAST_NUMA is off" if not given.numa else "all CPUs are of one NUMA node" if is_one else ""
        self.node, self.ranks = affinity.CpuAffinity(), (affinity.CpuAffinity(),) * len(ranks)
        if not self.why_not:
            mems = numa.allowed_nodes(host.tree)
            node = affinity.plan_node(self.cores, self.allowed, self.cards.nodes, len(ranks), wishes)
            self.node = affinity.with_allowed_memory(node, mems)
            taken = self.node.cpus if self.node.alone else frozenset[int]()
            self.ranks = tuple(affinity.with_allowed_memory(each, mems)
                               for each in affinity.plan_ranks(self.cores, ranks, wishes, taken))

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as data; no CPUs mean no restriction."""
        return {
            "nodes": {str(number): format_cpus(self.cores.cpus_of(number)) for number in self.cores.nodes},
            "allowed": format_cpus(self.allowed), "cards": list(self.cards.names), "why_not": self.why_not,
            "node": _data(self.node), "ranks": list(map(_data, self.ranks)),
        }

    def text(self) -> str:
        """Return the plan as text."""
        lines = [f"NUMA node {number}: {len(found)} cores, CPUs {format_cpus(self.cores.cpus_of(number))}"
                 for number, found in self.cores.nodes.items()]
        if self.allowed != self.cores.cpus:
            lines.append(f"This process may use CPUs {format_cpus(self.allowed)}")
        if self.why_not:
            return "\n".join([*lines, "", f"No process is bound: {self.why_not}."])
        rows = [_AFFINITY_HEAD, self._row("node", self.node, ", ".join(self.cards.names))]
        rows += [self._row(f"local rank {number}", bound, f"gpu{number}" if number < len(self._gpus) else "")
                 for number, bound in enumerate(self.ranks)]
        return "\n".join([*lines, "", output.columns(rows, right=(1,))])

    def _row(self, who: str, bound: affinity.CpuAffinity, device: str) -> tuple[str, ...]:
        return (who, str(self.cores.within(bound.cpus or self.allowed).count), format_cpus(bound.cpus) or "any",
                "any" if bound.home is None else str(bound.home), device or "-")


def _cards(host: Any, given: settings.Settings, names: tuple[str, ...]) -> locality.NicLocality:
    if names:
        found = locality.nics_by_name(host, names)
        if missing := sorted(set(names) - {device.name for device in host.devices} - set(host.netdevs)):
            raise ConfigError(f"--nic {missing[0]}: there is no such device or interface; there are "
                              f"{', '.join([device.name for device in host.devices] + list(host.netdevs)) or 'none'}")
        return found
    address = given.node_host
    if not isinstance(host.kernel, RecordedKernel):
        address = addresses.configured_host(given) or addresses.default_route_host()
    found = locality.traffic_nics(host, given, address)
    return found if found.nodes else locality.fastest_nics(host)


def _data(bound: affinity.CpuAffinity) -> dict[str, Any]:
    return {"cpus": format_cpus(bound.cpus), "home": bound.home}
