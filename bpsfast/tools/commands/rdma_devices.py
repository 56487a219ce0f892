"""``bpsfast devices`` and ``bpsfast gids`` list RDMA devices, other network cards, and GID tables."""
from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import click

from ...base import exit_codes, output, settings
from ...hardware.host import Host, open_host
from ...hardware.interfaces import Netdev, PcieLink
from ...hardware.rdma_devices import Gid, Port, RdmaDevice, roce_mtu
from ...hardware.rdma_route import RailChoice, choose, peer_address
from ...hardware.verbs import provider
from ...orchestration.errors import ConfigError
from .options import overrides, root_option, set_option, verbs_option

_DEVICE_HEAD = ("DEVICE", "PORT", "STATE", "RATE", "LINK", "NETDEV", "MTU", "NUMA", "PCIE", "DRIVER", "FIRMWARE", "USE")
_CARD_HEAD = ("NETDEV", "STATE", "SPEED", "MTU", "NUMA", "PCIE", "DRIVER", "ADDRESSES")


@click.command()
@click.option("--peer", metavar="HOST", help="Mark what would be used to reach HOST.")
@verbs_option
@root_option
@set_option
@output.options(tabular=True)
@exit_codes.exit_on_error
def devices(peer: str | None, verbs: str | None, root: str | None, assignments: tuple[str, ...],
            form: output.OutputOptions) -> None:
    """List RDMA devices and network cards: state, rate, MTU, NUMA node, PCIe link.

    MTU is that of the interface, with the RoCE path MTU that fits it in brackets. With --verbs, ACTIVE_MTU is the path
    MTU that libibverbs reports. Exit code 3 if there is no RDMA device.

    \b
    bpsfast devices
    bpsfast devices --peer gpu08
    bpsfast devices --json | jq '.devices[].ports[].state'
    """
    host = open_host(root)
    choice = _choose(host, assignments, peer)
    library = asked(verbs, root)
    mtus = None if library is None else active_mtus(library, host)
    output.show(form, lambda: device_text(host, choice, mtus), device_data(host, choice, mtus),
                device_rows(host, choice, mtus))
    _require_devices(host)


def _choose(host: Host, assignments: tuple[str, ...], peer: str | None) -> RailChoice:
    """Return the ports of *host* that a job with these settings would use, towards *peer* if it is given."""
    loaded = settings.load(overrides(assignments), host.kernel.environ)
    return choose(host, loaded, peer_address(host, peer) if peer else None)


def _require_devices(host: Host) -> None:
    if not host.devices:
        click.echo("bpsfast: no RDMA device here (/sys/class/infiniband is empty); `bpsfast doctor` says why", err=True)
        sys.exit(exit_codes.ENVIRONMENT)


def device_text(host: Host, choice: RailChoice, mtus: dict[str, str] | None = None) -> str:
    """Return the tables as text; *mtus*: path MTUs from libibverbs by "device/port", None without them."""
    parts = []
    if host.devices:
        parts.append(output.table(device_rows(host, choice, mtus)))
        reasons = [(f"{rail.name} is used: ", rail.reason) for rail in choice.rails]
        reasons += [(f"{name} is not: ", reason) for name, reason in choice.rejected.items()]
        parts += [line for head, words in reasons for line in output.hanging(head, words)]
    else:
        parts.append("No RDMA device.")
    others = [(card.name, card.state, f"{card.speed_mbps / 1000:g} Gb/s" if card.speed_mbps else "-", str(card.mtu),
               "-" if card.numa_node is None else str(card.numa_node), _pcie(card.pcie), card.driver or "-",
               " ".join(map(str, card.ips)) or "-") for card in _other_cards(host)]
    if others:
        parts += ["", "Network cards without an RDMA device:", output.table([_CARD_HEAD, *others])]
    return "\n".join(parts)


def device_rows(host: Host, choice: RailChoice, mtus: dict[str, str] | None = None) -> list[tuple[str, ...]]:
    """Return the head and one row for each RDMA port."""
    if mtus is None:
        return [_DEVICE_HEAD, *(_row(host, choice, device, port) for device, port in host.ports)]
    return [(*_DEVICE_HEAD, "ACTIVE_MTU"), *((*_row(host, choice, device, port), mtus[f"{device.name}/{port.number}"])
                                      for device, port in host.ports)]


def device_data(host: Host, choice: RailChoice, mtus: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the JSON data: base units, null if the kernel does not say."""
    uses = _uses(choice)
    return {
        "devices": [{
            "name": device.name, "driver": device.driver, "kind": device.kind, "firmware": device.firmware,
            "numa_node": device.numa_node, "local_cpus": device.local_cpus, "uverbs": device.uverbs,
            "pcie": _pcie_data(device.pcie),
            "ports": [{
                "number": port.number, "state": port.state, "phys_state": port.phys_state,
                "rate_bits_per_s": None if port.rate_gbps is None else port.rate_gbps * 1e9,
                "link_layer": port.link_layer, "lid": port.lid, "sm_lid": port.sm_lid, "netdev": port.netdev,
                "netdev_mtu": _mtu(host, port), "roce_mtu": _roce_mtu(host, port),
                **dict(zip(("use", "reason"), uses.get(f"{device.name}/{port.number}", ("rejected", "")))),
                **({} if mtus is None else {"active_mtu": _number(mtus[f"{device.name}/{port.number}"])}),
            } for port in device.ports],
        } for device in host.devices],
        "cards": [{
            "netdev": card.name, "state": card.state, "mtu": card.mtu, "driver": card.driver,
            "speed_bits_per_s": None if card.speed_mbps is None else card.speed_mbps * 1e6,
            "numa_node": card.numa_node, "pcie": _pcie_data(card.pcie), "addresses": list(map(str, card.addresses)),
        } for card in _other_cards(host)],
    }


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _row(host: Host, choice: RailChoice, device: RdmaDevice, port: Port) -> tuple[str, ...]:
    roce_mtu, mtu = _roce_mtu(host, port), _mtu(host, port)
    return (
        device.name, str(port.number), f"{port.state} {port.phys_state}",
        f"{port.rate_gbps:g} Gb/s" if port.rate_gbps else "-",
        "RoCE" if port.is_roce else port.link_layer, port.netdev or "-",
        "-" if mtu is None else f"{mtu} ({roce_mtu})" if roce_mtu is not None else str(mtu),
        "-" if device.numa_node is None else str(device.numa_node), _pcie(device.pcie), device.driver,
        device.firmware or "-", _uses(choice).get(f"{device.name}/{port.number}", ("-", ""))[0],
    )


def _uses(choice: RailChoice) -> dict[str, tuple[str, str]]:
    """Return the use of each port ("used", "spare", "rejected"), and the reason."""
    uses = {name: ("rejected", reason) for name, reason in choice.rejected.items()}
    uses |= {rail.name: ("spare", rail.reason) for rail in choice.spare}
    return uses | {rail.name: ("used", rail.reason) for rail in choice.rails}


def _mtu(host: Host, port: Port) -> int | None:
    netdev = host.netdevs.get(port.netdev or "")
    return netdev.mtu if netdev else None


def _roce_mtu(host: Host, port: Port) -> int | None:
    mtu = _mtu(host, port)
    return roce_mtu(mtu) if mtu is not None and port.is_roce else None


def _other_cards(host: Host) -> list[Netdev]:
    """Return the network cards without an RDMA port."""
    shared = {port.netdev for _, port in host.ports}
    return [netdev for netdev in host.netdevs.values() if netdev.is_card and netdev.name not in shared]


def _pcie(link: PcieLink | None) -> str:
    """Return the link as "16 GT/s x8 of x16": current values, and the maximum if it is larger."""
    if link is None:
        return "-"
    width = f"x{link.width}" + (f" of x{link.max_width}" if link.width < link.max_width else "")
    speed = f"{link.speed:g}" + (f" of {link.max_speed:g}" if link.speed < link.max_speed else "")
    return f"{speed} GT/s {width}"


def _pcie_data(link: PcieLink | None) -> dict[str, Any] | None:
    if link is None:
        return None
    return {"address": link.address, "transfers_per_s": link.speed * 1e9, "width": link.width,
            "max_transfers_per_s": link.max_speed * 1e9, "max_width": link.max_width,
            "bits_per_s": link.gbps * 1e9, "max_bits_per_s": link.max_gbps * 1e9}

_GID_HEAD = ("DEV", "PORT", "INDEX", "GID", "IPv4", "VER", "DEV", "USE")


@click.command()
@click.option("-d", "--device", "name", metavar="DEV", help="Show only this device.")
@click.option("--peer", metavar="HOST", help="Mark what would be used to reach HOST.")
@verbs_option
@root_option
@set_option
@output.options(tabular=True)
@exit_codes.exit_on_error
def gids(name: str | None, peer: str | None, verbs: str | None, root: str | None, assignments: tuple[str, ...],
         form: output.OutputOptions) -> None:
    """List the GID table and the GID that would be used.

    "*" marks the row that would be used, "+" the best row of an unused port. With --verbs, VERBS shows whether
    libibverbs has the same GID in each row. Exit code 3 if there is no RDMA device.

    \b
    bpsfast gids
    bpsfast gids -d mlx5_0 --peer gpu08
    """
    host = open_host(root)
    names = [device.name for device in host.devices]
    if name is not None and names and name not in names:
        raise ConfigError(f"there is no RDMA device {name!r}; there are {', '.join(names)}")
    choice = _choose(host, assignments, peer)
    found = gid_table(host, name)
    library = asked(verbs, root)
    lib = None if library is None else verdicts(library, found)
    output.show(form, lambda: gid_text(found, choice, lib), gid_data(found, choice, lib),
                gid_rows(found, choice, lib))
    _require_devices(host)


def gid_table(host: Host, name: str | None = None) -> list[Gid]:
    """Return the used rows of all devices, or of device *name*."""
    return [gid for device, port in host.ports if name in (None, device.name) for gid in host.gids(device.name, port)]


def gid_text(found: list[Gid], choice: RailChoice, lib: dict[Gid, str] | None = None) -> str:
    """Return the table as text; *lib*: libibverbs's verdict on each row, None without them."""
    if not found:
        return "No GID in use."
    lines = [output.table(gid_rows(found, choice, lib))]
    lines += [line for rail in choice.rails for line in output.hanging(f"{rail.name}: ", rail.reason)]
    return "\n".join(lines)


def gid_rows(found: list[Gid], choice: RailChoice, lib: dict[Gid, str] | None = None) -> list[tuple[str, ...]]:
    """Return the head and one row for each GID, as show_gids does."""
    head = _GID_HEAD if lib is None else (*_GID_HEAD, "VERBS")
    return [head, *((gid.device, str(gid.port), str(gid.index), gid.text, str(gid.ipv4 or "-"), gid.version,
                     gid.netdev or "-", _mark(gid, choice), *(() if lib is None else (lib[gid],))) for gid in found)]


def gid_data(found: list[Gid], choice: RailChoice, lib: dict[Gid, str] | None = None) -> list[dict[str, Any]]:
    """Return the JSON data."""
    return [{"device": gid.device, "port": gid.port, "index": gid.index, "gid": gid.text,
             "ipv4": str(gid.ipv4) if gid.ipv4 else None, "version": gid.version, "netdev": gid.netdev,
             "used": _mark(gid, choice) == "*", **({} if lib is None else {"verbs": lib[gid]})} for gid in found]


def _mark(gid: Gid, choice: RailChoice) -> str:
    return next((mark for mark, rails in (("*", choice.rails), ("+", choice.spare))
                 if any(rail.gid == gid for rail in rails)), "")


def asked(verbs: str | None, root: str | None) -> Any:
    """Return the implementation that ``--verbs`` names, None without it; raise `VerbsMissing` if it does not work."""
    if verbs is not None and root is not None:
        raise click.UsageError("--verbs queries libibverbs of this machine, --root examines another machine: choose "
                               "one")
    return None if verbs is None else provider(verbs)


def active_mtus(verbs: Any, host: Host) -> dict[str, str]:
    """Return the active path MTU of each port by "device/port", or the reason why there is none."""
    listed = verbs.devices()

    def active_mtu(number: int, opened: Any) -> str:
        return str(opened.port(number)["active_mtu"])

    return {f"{device.name}/{port.number}": _ask(verbs, listed, device.name, partial(active_mtu, port.number))
            for device, port in host.ports}


def verdicts(verbs: Any, rows: list[Gid]) -> dict[Gid, str]:
    """Return libibverbs's GID for each row of the kernel's table: "same", the other GID, or the error."""
    listed = verbs.devices()

    def compare(row: Gid, opened: Any) -> str:
        found = opened.gid(row.port, row.index)
        return "same" if found == row.value else found.hex(":", 2)

    return {row: _ask(verbs, listed, row.device, partial(compare, row)) for row in rows}


def _ask(verbs: Any, listed: list[str], name: str, question: Callable[[Any], str]) -> str:
    if name not in listed:
        return "not listed"
    try:
        with verbs.Device(name) as opened:
            return question(opened)
    except OSError as exc:
        return exc.strerror or str(exc)
