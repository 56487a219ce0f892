"""``bpsfast gids``: the GID table with show_gids' columns, and the row that would be used."""
from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from ...base import command_errors, output
from ...orchestration.errors import ConfigError
from .options import overrides, set_option, verbs_option
from .root_option import root_option

if TYPE_CHECKING:
    from ...hardware.gids import Gid
    from ...hardware.host import Host
    from ...hardware.rdma_route import Rail, RailChoice

_GID_HEAD = ("DEV", "PORT", "INDEX", "GID", "IPv4", "VER", "DEV", "USE")


@click.command()
@click.option("-d", "--device", "name", metavar="DEV", help="Only this device.")
@click.option("--peer", metavar="HOST", help="Mark what would be used towards HOST.")
@verbs_option
@root_option
@set_option
@output.options(tabular=True)
@command_errors.exit_on_error
def gids(name: str | None, peer: str | None, verbs: str | None, root: str | None, assignments: tuple[str, ...],
            as_json: bool, as_csv: bool, path: str | None, no_color: bool) -> None:
    """List the GID table, and which GID would be used.

    "*" marks the row that would be used, "+" the best row of a port that is not. With --verbs, VERBS says whether
    libibverbs has the same GID in each row. Exit code 3 without RDMA devices.

    \b
    bpsfast gids
    bpsfast gids -d mlx5_0 --peer gpu08
    """
    from ...base import settings
    from ...hardware import recorded_host
    from ...hardware.rdma_route import choose, peer_address
    from . import verbs_answers

    chosen = output.form(as_json, path, no_color, as_csv)
    host = recorded_host.host(root)
    loaded = settings.load(overrides(assignments), host.kernel.environ)
    check_device(host, name)
    choice = choose(host, devices=loaded.rdma_devices, gid_index=loaded.rdma_gid_index,
                    peer=peer_address(host, peer) if peer else None)
    found = gid_table(host, name)
    library = verbs_answers.asked(verbs, root)
    said = None if library is None else verbs_answers.verdicts(library, found)
    output.show(chosen, lambda: gid_text(found, choice, said), gid_data(found, choice, said),
                gid_rows(found, choice, said))
    if not host.devices:
        click.echo("bpsfast: no RDMA device here (/sys/class/infiniband is empty); `bpsfast doctor` says why", err=True)
        sys.exit(command_errors.ENVIRONMENT)


def check_device(host: Host, name: str | None) -> None:
    """Raise `ConfigError` if there are devices, and *name* is none of them."""
    names = [device.name for device in host.devices]
    if name is not None and names and name not in names:
        raise ConfigError(f"there is no RDMA device {name!r}; there is {', '.join(names)}")


def gid_table(host: Host, name: str | None = None) -> list[Gid]:
    """Return the rows in use, of all devices or the one named."""
    return [gid for device, port in host.ports if name in (None, device.name) for gid in host.gids(device.name, port)]


def gid_text(found: list[Gid], choice: RailChoice, said: dict[Gid, str] | None = None) -> str:
    """Return the table for people; *said*: what libibverbs says of each row, None if it was not asked."""
    if not found:
        return "No GID in use."
    lines = [output.table(gid_rows(found, choice, said))]
    lines += [line for rail in choice.rails for line in output.hanging(f"{rail.name}: ", rail.reason)]
    return "\n".join(lines)


def gid_rows(found: list[Gid], choice: RailChoice, said: dict[Gid, str] | None = None) -> list[tuple[str, ...]]:
    """Return the head and one row for each GID, as show_gids prints them."""
    head = _GID_HEAD if said is None else (*_GID_HEAD, "VERBS")
    return [head, *((gid.device, str(gid.port), str(gid.index), gid.text, str(gid.ipv4 or "-"), gid.version,
                     gid.netdev or "-", _mark(gid, choice), *(() if said is None else (said[gid],))) for gid in found)]


def gid_data(found: list[Gid], choice: RailChoice, said: dict[Gid, str] | None = None) -> list[dict[str, Any]]:
    """Return what JSON shows."""
    return [{"device": gid.device, "port": gid.port, "index": gid.index, "gid": gid.text,
             "ipv4": str(gid.ipv4) if gid.ipv4 else None, "version": gid.version, "netdev": gid.netdev,
             "used": _mark(gid, choice) == "*", **({} if said is None else {"verbs": said[gid]})} for gid in found]


def _mark(gid: Gid, choice: RailChoice) -> str:
    def holds(rails: tuple[Rail, ...]) -> bool:
        return any(rail.gid == gid for rail in rails)

    return "*" if holds(choice.rails) else "+" if holds(choice.spare) else ""
