"""``bpsfast info`` shows what is installed and works, or every setting with its value and origin."""
from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING

import click
import msgspec

from ...base import exit_codes, output, settings
from .options import overrides, set_option, verbs_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...base.settings import Settings
    from ..inventory import Inventory, Machine, Part


@click.command()
@click.option("--effective", "as_settings", is_flag=True,
              help="Show every setting, its value and where that comes from, instead (as `bpsfast env` does).")
@verbs_option
@set_option
@output.options()
@exit_codes.exit_on_error
def command(as_settings: bool, verbs: str | None, assignments: tuple[str, ...], form: output.OutputOptions) -> None:
    """Show what is installed and works, and why the rest does not.

    [X] works; [ ] does not, with the reason. Frameworks are found by package metadata and are not imported. Exit code
    3 if a compiled module of bpsfast does not load.

    \b
    bpsfast info
    bpsfast info --json | jq '.transports[] | select(.works | not)'
    bpsfast info --effective
    """
    loaded, origins = settings.load_with_origins(overrides(assignments, verbs=verbs))
    if as_settings:
        found = setting_rows(loaded, origins)
        return output.show(form, lambda: settings_text(found), found)
    here = taken(loaded, origins)
    output.show(form, lambda: text(here), here)
    if not here.is_whole:
        sys.exit(exit_codes.ENVIRONMENT)


def taken(loaded: Settings, origins: dict[str, str]) -> Inventory:
    """Take the inventory under these settings."""
    from ...hardware.host import Host
    from .. import inventory
    from .doctor import gather_facts

    return inventory.take(gather_facts(Host(), loaded, origins, None, 1.0))


def text(here: Inventory) -> str:
    """Return the inventory as text."""
    machine, limits = here.machine, here.limits
    lines = output.hanging("", f"bpsfast {here.version}, Python {here.python}, {machine.system}, kernel "
                               f"{machine.kernel}")
    lines += _pairs([("from", here.folder), ("python", here.interpreter), *_machine_rows(machine)])
    broken = [part for part in here.modules if not part.works]
    lines += ["", f"Compiled modules: {len(here.modules) - len(broken)} of {len(here.modules)} load", *_parts(broken)]
    lines += ["", "Transports", *_parts(here.transports)]
    lines += ["", "RDMA", *_parts((here.verbs, *here.devices))]
    lines += ["", "Frameworks", *_parts(here.frameworks)]
    lines += ["", "GPUs", *_parts(here.gpus)]
    lines += ["", "Packages", *_pairs([(part.name, f"{part.found or 'not installed':<14} {part.reason}")
                                       for part in here.packages])]
    locked = f"{output.size(limits.memlock_bytes)}, hard {output.size(limits.memlock_hard_bytes)}"
    lines += ["", "Limits", *_pairs([
        ("memlock", f"{locked}{', lifted by CAP_IPC_LOCK' if limits.may_lock_all else ''}"),
        ("nofile", f"{_number(limits.n_files)}, hard {_number(limits.n_files_hard)}"),
        ("/dev/shm", "not there" if limits.shm_bytes is None else output.size(limits.shm_bytes)),
        ("max_map_count", "not told" if limits.max_map_count is None else str(limits.max_map_count))])]
    return "\n".join(lines)


def _machine_rows(machine: Machine) -> list[tuple[str, str]]:
    cpus = f"{machine.n_cpus} CPUs" + (f", {machine.n_cpus_allowed} of them for this process"
                                       if machine.n_cpus_allowed != machine.n_cpus else "")
    return [("cpu", f"{machine.cpu}, {machine.architecture}: {cpus}, {machine.n_numa_nodes} NUMA node"
                    f"{'' if machine.n_numa_nodes == 1 else 's'}"),
            ("memory", output.size(machine.memory_bytes)), ("SIMD", " ".join(machine.simd) or "none known"),
            ("sums for", f"{machine.kernels_for} (compiled by numba where they run)"),
            ("container", machine.container or "none")]


def _pairs(rows: Sequence[tuple[str, str]], marks: Sequence[str] = ()) -> list[str]:
    """Return a line for each name and value, aligned, with its mark before it."""
    width = max((len(name) for name, _ in rows), default=0)
    return [line for (name, value), mark in zip(rows, marks or [""] * len(rows))
            for line in output.hanging(f"  {mark}{name:<{width}}  ", value)]


def _parts(parts: Sequence[Part]) -> list[str]:
    return _pairs([(part.name, "; ".join(filter(None, (part.found, part.reason)))) for part in parts],
                  [click.style("[X]", fg="green") + " " if part.works else "[ ] " for part in parts])


def _number(limit: int | None) -> str:
    return "unlimited" if limit is None else str(limit)

_INDENT = "    "
_SECRET = "job_key"


class SettingRow(msgspec.Struct, frozen=True):
    """One setting. `value` of a secret is "(set)"; `origin`: default, a variable, a profile or the command line.

    `byteps`: BytePS's variables for it; `agree`: all processes of a job need the same value.
    """

    name: str
    variable: str
    value: bool | int | float | str
    origin: str
    default: bool | int | float | str
    kind: str
    unit: str
    byteps: tuple[str, ...]
    agree: bool
    doc: str


def setting_rows(loaded: settings.Settings, origins: dict[str, str]) -> list[SettingRow]:
    """Return every setting, in the order of the table."""
    return [SettingRow(row.name, row.variable, _shown(row.name, getattr(loaded, row.name)), origins[row.name],
                      row.default, row.kind, row.unit, row.aliases, row.agree, row.doc) for row in settings.table()]


def _shown(name: str, value: bool | int | float | str) -> bool | int | float | str:
    """Return *value*, or for a secret only whether it is set."""
    return "(set)" if name == _SECRET and value else value


def settings_text(found: list[SettingRow]) -> str:
    """Return one line per setting; on a terminal its meaning follows, wrapped."""
    cells = [(each.variable, "-" if each.value == "" else str(each.value), each.origin) for each in found]
    docs = [f"{each.kind}{f' [{each.unit}]' if each.unit else ''}: {each.doc}"
            f"{f' (BytePS: {chr(44).join(each.byteps)})' if each.byteps else ''}" for each in found]
    width = output.terminal_width()
    if width is None:
        return output.columns([(*row, doc) for row, doc in zip(cells, docs)])
    heads = output.columns(cells).splitlines()
    return "\n".join(f"{head}\n{textwrap.fill(doc, width, initial_indent=_INDENT, subsequent_indent=_INDENT)}"
                     for head, doc in zip(heads, docs))
