"""RD08: how large packets may be, at this end, at the other, and in between."""
from __future__ import annotations

from ...base.value_formats import PATH_MTUS
from ...hardware.netlink import Address
from ...hardware.ping import PingResult
from ...hardware.rdma_devices import ROCE_OVERHEAD_NBYTES, roce_mtu
from ...hardware.rdma_route import Rail
from .facts import Facts
from .finding import Check, Outcome, Severity, advice, failed, passed, skipped, warned

_WANTED_MTU = 9000
#: The interface's MTU from which RoCE packets carry 4096 bytes.
_ENOUGH_MTU = PATH_MTUS[0] + ROCE_OVERHEAD_NBYTES
_SMALL_NBYTES = 576
_ETHERNET_MTU = 1500


def packet_size(facts: Facts) -> Outcome:
    """RD08: is the path MTU the largest one, and does the way to the peer carry it?"""
    if not facts.choice.rails:
        return skipped("no RDMA device" if not facts.host.devices else "no port can be used")
    small, shown, first = [], [], None
    for rail in (*facts.choice.rails, *facts.choice.spare):
        mtu, path_mtu = _mtus(facts, rail)
        words = f"{rail.name} path MTU {path_mtu or 'unknown'}" + (f" ({rail.netdev} mtu {mtu})" if mtu else "")
        peer = _peer_mtu(facts, rail)
        if peer:
            words += f"; {facts.peer_name} has mtu {peer}"
        if 0 < path_mtu < PATH_MTUS[0] or (peer and mtu and peer != mtu):
            small.append(words)
            first = first or rail
        else:
            shown.append(words)
    blocked = _blocked(facts)
    if blocked:
        return Outcome(blocked.status, "\n".join([blocked.found, *small, *shown]), blocked.actions)
    if first is not None:
        roce = first.gid is not None and first.gid.version != "IB"
        return warned("\n".join(small + shown), **(_raise(facts, first) if roce else {
            "switch": "the subnet manager's partition sets the MTU: mtu=5 in opensm's partitions.conf (4096 bytes)"}))
    return passed("\n".join(shown))


CHECKS = (
    Check("RD08", "MTU", Severity.SLOW,
          ("modify QP to RTR: Invalid argument, with path_mtu 4096", "small messages pass, large ones hang"),
          "The RoCE path MTU is the power of two below the interface's MTU: 1500 bytes leave 1024. Ends or switches "
          "with different MTUs drop the larger packets without a word.",
          "More packets per message (slow), or none of the large ones arrive.", "tensorflow PR#9432", packet_size,
          advice(host=f"sudo ip link set IFACE mtu {_WANTED_MTU}   # on all machines",
                 switch=f"mtu 9216 on all ports of that network ({_ENOUGH_MTU} is the least for a path MTU of 4096)",
                 check="ping -M do -s 8972 PEER")),
)


def _mtus(facts: Facts, rail: Rail) -> tuple[int, int]:
    """Return the interface's MTU and the path MTU of a port (bytes), 0 where unknown."""
    card = facts.host.netdevs.get(rail.netdev or "")
    mtu = card.mtu if card else 0
    fits = roce_mtu(mtu) if mtu and rail.gid is not None and rail.gid.version != "IB" else 0
    return mtu, facts.path_mtus.get(rail.name, 0) or fits


def _peer_mtu(facts: Facts, rail: Rail) -> int:
    """Return the MTU of the peer's interface in the same position, 0 if unknown."""
    if facts.peer_report is None:
        return 0
    ours, theirs = ((facts.choice.rails, facts.peer_report.used) if rail in facts.choice.rails
                    else (facts.choice.spare, facts.peer_report.spare))
    place = ours.index(rail)
    return theirs[place].mtu if place < len(theirs) else 0


def _raise(facts: Facts, rail: Rail) -> dict[str, str]:
    virtual = all(device.driver in ("rxe", "siw") for device, _ in facts.usable)
    actions = {"host": f"sudo ip link set {rail.netdev} mtu {_WANTED_MTU}   # on both machines, lasting: in netplan, "
                       "NetworkManager or ifcfg"}
    if not virtual:
        actions["switch"] = f"mtu 9216 on all ports of that network ({_ENOUGH_MTU} is the least for 4096)"
    if facts.peer is not None:
        actions["check"] = f"ping -M do -s {_WANTED_MTU - 28} {facts.peer}"
    return actions


def _blocked(facts: Facts) -> Outcome | None:
    """Ping the peer with packets as large as the interfaces allow; return what is wrong if they do not arrive."""
    for rail, address in _ways(facts):
        card = facts.host.netdevs.get(rail.netdev or "")
        if card is None or card.mtu <= _SMALL_NBYTES:
            continue
        if (_ping(facts, address, card.mtu, card.name) is not PingResult.SILENT
                or _ping(facts, address, _SMALL_NBYTES, card.name) is not PingResult.ANSWERED):
            continue  # it passes, or pings are not answered at all, which says nothing about sizes
        sizes = sorted([each + ROCE_OVERHEAD_NBYTES for each in PATH_MTUS] + [_ETHERNET_MTU], reverse=True)
        passing = next((each for each in sizes if each < card.mtu
                        and _ping(facts, address, each, card.name) is PingResult.ANSWERED), _SMALL_NBYTES)
        outcome = failed if passing < _mtus(facts, rail)[1] + ROCE_OVERHEAD_NBYTES else warned
        return outcome(
            f"packets of {card.mtu} bytes ({card.name}'s mtu) do not reach {facts.peer_name} ({address}), packets of "
            f"{passing} do: something in between, or the other end, has a smaller MTU",
            switch=f"mtu 9216 on all ports between the two, also between switches; or, until then, here: sudo ip link "
                   f"set {card.name} mtu {passing}",
            peer=f"sudo ip link set IFACE mtu {card.mtu}", check=f"ping -M do -s {card.mtu - 28} {address}")
    return None


def _ways(facts: Facts) -> list[tuple[Rail, Address]]:
    """Return each of our ports with the peer's address on its network: of its ports, or the one that was given."""
    if facts.peer is None or facts.route is None or facts.route.local:
        return []
    theirs = facts.peer_report.used if facts.peer_report else []
    found = [(rail, other.address) for rail, other in zip(facts.choice.rails, theirs) if other.address is not None]
    return found or [(rail, facts.peer) for rail in facts.choice.rails[:1] if rail.netdev == facts.route.netdev]


def _ping(facts: Facts, address: Address, nbytes: int, netdev: str) -> PingResult:
    try:
        return facts.host.kernel.ping(address, nbytes, netdev, facts.timeout_s)
    except OSError:
        return PingResult.FORBIDDEN
