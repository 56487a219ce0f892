"""``bpsfast devices``: RDMA devices as ibv_devinfo and ibdev2netdev tell them, and the other network cards."""
from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from ...base import command_errors, output
from .options import overrides, set_option, verbs_option
from .root_option import root_option

if TYPE_CHECKING:
    from ...hardware.host import Host
    from ...hardware.interfaces import Netdev, PcieLink
    from ...hardware.rdma_devices import Port, RdmaDevice
    from ...hardware.rdma_route import RailChoice

_DEVICE_HEAD = ("DEVICE", "PORT", "STATE", "RATE", "LINK", "NETDEV", "MTU", "NUMA", "PCIE", "DRIVER", "FIRMWARE", "USE")
_CARD_HEAD = ("NETDEV", "STATE", "SPEED", "MTU", "NUMA", "PCIE", "DRIVER", "ADDRESSES")


@click.command()
@click.option("--peer", metavar="HOST", help="Mark what would be used towards HOST.")
@verbs_option
@root_option
@set_option
@output.options(tabular=True)
@command_errors.exit_on_error
def devices(peer: str | None, verbs: str | None, root: str | None, assignments: tuple[str, ...], as_json: bool,
            as_csv: bool, path: str | None, no_color: bool) -> None:
    """List RDMA devices and network cards: state, rate, MTU, NUMA node, PCIe link.

    MTU is the interface's and, in brackets, the RoCE path MTU that fits it. With --verbs, ACTIVE_MTU is the path MTU
    that libibverbs reports. Exit code 3 if there is no RDMA device.

    \b
    bpsfast devices
    bpsfast devices --peer gpu08
    bpsfast devices --json | jq '.devices[].ports[].state'
    """
    from ...base import settings
    from ...hardware import recorded_host
    from ...hardware.rdma_route import choose, peer_address
    from . import verbs_answers

    chosen = output.form(as_json, path, no_color, as_csv)
    host = recorded_host.host(root)
    loaded = settings.load(overrides(assignments), host.kernel.environ)
    choice = choose(host, devices=loaded.rdma_devices, gid_index=loaded.rdma_gid_index,
                    peer=peer_address(host, peer) if peer else None)
    library = verbs_answers.asked(verbs, root)
    mtus = None if library is None else verbs_answers.active_mtus(library, host)
    output.show(chosen, lambda: device_text(host, choice, mtus), device_data(host, choice, mtus),
                device_rows(host, choice, mtus))
    if not host.devices:
        click.echo("bpsfast: no RDMA device here (/sys/class/infiniband is empty); `bpsfast doctor` says why", err=True)
        sys.exit(command_errors.ENVIRONMENT)


def device_text(host: Host, choice: RailChoice, mtus: dict[str, str] | None = None) -> str:
    """Return the tables for people; *mtus*: what libibverbs says, by "device/port", None if it was not asked."""
    parts = []
    if host.devices:
        parts.append(output.table(device_rows(host, choice, mtus)))
        said = [(f"{rail.name} is used: ", rail.reason) for rail in choice.rails]
        said += [(f"{name} is not: ", reason) for name, reason in choice.rejected.items()]
        parts += [line for head, words in said for line in output.hanging(head, words)]
    else:
        parts.append("No RDMA device.")
    others = _other_cards(host)
    if others:
        parts += ["", "Network cards without an RDMA device:", output.table([_CARD_HEAD, *map(_card_row, others)])]
    return "\n".join(parts)


def device_rows(host: Host, choice: RailChoice, mtus: dict[str, str] | None = None) -> list[tuple[str, ...]]:
    """Return the head and one row for each RDMA port."""
    if mtus is None:
        return [_DEVICE_HEAD, *(_row(host, choice, device, port) for device, port in host.ports)]
    return [(*_DEVICE_HEAD, "ACTIVE_MTU"), *((*_row(host, choice, device, port), mtus[f"{device.name}/{port.number}"])
                                      for device, port in host.ports)]


def device_data(host: Host, choice: RailChoice, mtus: dict[str, str] | None = None) -> dict[str, Any]:
    """Return what JSON shows: base units, null where the kernel does not say."""
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
                "use": uses.get(f"{device.name}/{port.number}", ("rejected", ""))[0],
                "reason": uses.get(f"{device.name}/{port.number}", ("", ""))[1],
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
    """Return what is to become of each port ("used", "spare", "rejected"), and why."""
    uses = {name: ("rejected", reason) for name, reason in choice.rejected.items()}
    uses |= {rail.name: ("spare", rail.reason) for rail in choice.spare}
    return uses | {rail.name: ("used", rail.reason) for rail in choice.rails}


def _mtu(host: Host, port: Port) -> int | None:
    netdev = host.netdevs.get(port.netdev or "")
    return netdev.mtu if netdev else None


def _roce_mtu(host: Host, port: Port) -> int | None:
    from ...hardware.rdma_devices import roce_mtu

    mtu = _mtu(host, port)
    return roce_mtu(mtu) if mtu is not None and port.is_roce else None


def _other_cards(host: Host) -> list[Netdev]:
    """Return the network cards whose interface no RDMA port shares."""
    shared = {port.netdev for _, port in host.ports}
    return [netdev for netdev in host.netdevs.values() if netdev.is_card and netdev.name not in shared]


def _card_row(card: Netdev) -> tuple[str, ...]:
    return (card.name, card.state, f"{card.speed_mbps / 1000:g} Gb/s" if card.speed_mbps else "-", str(card.mtu),
            "-" if card.numa_node is None else str(card.numa_node), _pcie(card.pcie), card.driver or "-",
            " ".join(map(str, card.ips)) or "-")


def _pcie(link: PcieLink | None) -> str:
    """Return "16 GT/s x8 of x16": what runs, and what could where that is more."""
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
