"""Checks RD05, RD07, RD08 and RD18 of ``bpsfast doctor``: GIDs, routes, packet sizes and host names."""
from __future__ import annotations

import ipaddress

from ...base.value_formats import PATH_MTUS
from ...hardware.kernel import Address, PingResult
from ...hardware.rdma_devices import ROCE_OVERHEAD_NBYTES, Gid, best_gid, roce_mtu
from ...hardware.rdma_route import Rail, on_route
from .facts import Facts, PeerPort
from .finding import Check, Outcome, Severity, Status, advice, failed, info, passed, skipped, warned


def gid(facts: Facts) -> Outcome:
    """RD05: check that a port has a GID that routers pass, of the same kind as the peer's."""
    roce = [(device, port) for device, port in facts.host.ports if port.is_roce and port.is_active]
    if not roce:
        infiniband = any(port.link_layer == "InfiniBand" for _, port in facts.usable)
        return passed("InfiniBand: ports are addressed by LID") if infiniband else skipped("no active RoCE port")
    if facts.choice_error and "gid_index" in facts.choice_error:
        return failed(facts.choice_error, job="unset BPSFAST_RDMA_GID_INDEX   # the row is chosen by its content",
                      check="bpsfast gids")
    empty = [f"{device.name}/{port.number} ({port.netdev or 'no interface'})" for device, port in roce
             if not facts.host.gids(device.name, port)]
    verdicts = [_judge(facts, rail, gid) for rail in (*facts.choice.rails, *facts.choice.spare)
                if (gid := _roce_gid(rail)) is not None]
    if not verdicts:
        return failed(f"the GID table of {', '.join(empty)} is empty: the interface is down or has no address",
                      host="sudo ip link set IFACE up && sudo ip addr add A.B.C.D/24 dev IFACE", check="bpsfast gids")
    if against_peer := _against_peer(facts):
        return against_peer
    worst = max(verdicts, key=lambda verdict: (verdict.status is Status.FAIL, verdict.status is Status.WARN))
    found = "\n".join([verdict.found for verdict in verdicts] + [f"{name}: empty GID table" for name in empty])
    return Outcome(worst.status, found, worst.actions)


def route(facts: Facts) -> Outcome:
    """RD07: check that the route to the peer leaves through the chosen network card."""
    if facts.peer is None:
        bare = [rail for rail in facts.choice.rails if _roce_gid(rail) is not None and not any(
            card.ips for name, card in facts.host.netdevs.items() if name in facts.host.family(rail.netdev or ""))]
        if bare:
            return warned(f"{bare[0].netdev} ({bare[0].name}) has no IP address: peers find it by its GID alone",
                          host=f"sudo ip addr add A.B.C.D/24 dev {bare[0].netdev}")
        return skipped("needs --peer HOST: the card depends on the route to it")
    if facts.route is None:
        return failed(f"there is no route to {facts.peer_name} ({facts.peer})", check=f"ip route get {facts.peer}")
    if facts.route.local:
        return info(f"{facts.peer_name} ({facts.peer}) is this machine itself: nodes here share memory")
    rail = facts.choice.rails[0]
    if on_route(facts.host, rail.netdev, facts.route):
        return passed(f"{facts.peer_name} ({facts.peer}) is reached by {facts.route.netdev}, the wire of {rail.name}")
    others = [each for each in facts.choice.spare if on_route(facts.host, each.netdev, facts.route)]
    job = f"BPSFAST_RDMA_DEVICES=={others[0].device}:{others[0].port}" if others else ""
    return warned(f"{facts.peer_name} ({facts.peer}) is reached by {facts.route.netdev}, but {rail.name} is on "
                  f"{rail.netdev or 'no interface'}: that works only if both networks lead there",
                  job=job, host=f"or give the peer's address on the network of {rail.netdev}",
                  check=f"ip route get {facts.peer}")


def hostname(facts: Facts) -> Outcome:
    """RD18: check that peers are not told a loopback address."""
    own = {str(address) for card in facts.host.netdevs.values() for address in card.ips}
    wanted = facts.settings.node_host
    if wanted:
        try:
            addresses = [str(ipaddress.ip_address(wanted))]
        except ValueError:
            try:
                addresses = list(map(str, facts.host.kernel.resolve(wanted)))
            except OSError as exc:
                return failed(f"BPSFAST_NODE_HOST = {wanted}: {exc.strerror}", job="unset BPSFAST_NODE_HOST")
        if own.isdisjoint(addresses):
            return failed(f"BPSFAST_NODE_HOST = {wanted} is not an address of this machine, which has "
                          f"{', '.join(sorted(own)) or 'none'}",
                          job="unset BPSFAST_NODE_HOST   # the address on the route to the scheduler is used")
        return passed(f"peers use {wanted} (BPSFAST_NODE_HOST)")
    try:
        addresses = list(map(str, facts.host.kernel.resolve(facts.hostname)))
    except OSError:
        addresses = []
    if any(ipaddress.ip_address(each).is_loopback for each in addresses):
        return info(f"{facts.hostname} resolves to {addresses[0]}; bpsfast tells peers the address on the route to the "
                    "scheduler, but gloo and torch.distributed may advertise the loopback",
                    host=f"remove the line `{addresses[0]} {facts.hostname}` from /etc/hosts")
    if not addresses:
        return info(f"{facts.hostname} does not resolve; bpsfast does not need it, gloo and MPI do",
                    host=f"add a line `ADDRESS {facts.hostname}` to /etc/hosts")
    return passed(f"{facts.hostname} is {', '.join(addresses)}")


def _roce_gid(rail: Rail) -> Gid | None:
    """Return the GID of a RoCE port, None on InfiniBand."""
    return None if rail.gid is None or rail.gid.version == "IB" else rail.gid


def _rows(facts: Facts, rail: Rail) -> list[Gid]:
    port = next(port for device, port in facts.host.ports if f"{device.name}/{port.number}" == rail.name)
    return facts.host.gids(rail.device, port)


def _judge(facts: Facts, rail: Rail, row: Gid) -> Outcome:
    """Return a verdict on *row*, the GID of one port."""
    shown = f"{rail.name} GID {row.index} RoCE {row.version} {row.address}"
    pinned = facts.settings.rdma_gid_index >= 0
    better = best_gid(_rows(facts, rail), facts.route)
    if pinned and better is not None and better.index != row.index and (row.version == "v1" or row.is_link_local):
        return failed(f"{shown}, by BPSFAST_RDMA_GID_INDEX ({facts.origins.get('rdma_gid_index', 'setting')}): row "
                      f"{better.index} (RoCE {better.version} {better.address}) passes routers",
                      job=f"use index {better.index}: BPSFAST_RDMA_GID_INDEX={better.index}, or unset it")
    address = f"sudo ip addr add A.B.C.D/24 dev {rail.netdev or 'IFACE'}"
    if row.version == "v1":
        return failed(f"{shown}: RoCE v1 is not IP and passes no router; there is no RoCE v2 row", host=address,
                      check="bpsfast gids")
    if row.is_link_local:
        return warned(f"{shown}: link-local, it reaches the same wire only ({rail.netdev} has no IP address)",
                      host=address, check="bpsfast gids")
    return passed(shown)


def _against_peer(facts: Facts) -> Outcome | None:
    """Compare our ports with those of the peer, pair by pair; return the first mismatch, or None."""
    theirs = facts.peer_report.used if facts.peer_report else []
    for ours, other in zip(facts.choice.rails, theirs):
        mine = _roce_gid(ours)
        if mine is None or other.address is None:
            if (mine is None) != (other.address is None):
                return failed(f"{ours.name} here and {other.name} at {facts.peer_name} have different link layers: "
                              "InfiniBand and Ethernet", job="choose ports with BPSFAST_RDMA_DEVICES")
            continue
        if mine.version != other.gid_version or mine.address.version != other.address.version:
            return failed(f"{ours.name} would use RoCE {mine.version} {mine.address}, {facts.peer_name} RoCE "
                          f"{other.gid_version} {other.gid}: both ends must use the same version and IP version",
                          job=_common_row(facts, ours, other), check="bpsfast gids   # on both machines")
    return None


def _common_row(facts: Facts, rail: Rail, other: PeerPort) -> str:
    for row in _rows(facts, rail):
        if other.address and row.version == other.gid_version and row.address.version == other.address.version:
            return f"BPSFAST_RDMA_GID_INDEX={row.index} on this machine"
    return "give both interfaces an IPv4 address"

_WANTED_MTU = 9000
#: Smallest MTU of an interface for a RoCE path MTU of 4096 bytes.
_ENOUGH_MTU = PATH_MTUS[0] + ROCE_OVERHEAD_NBYTES
_SMALL_NBYTES = 576
_ETHERNET_MTU = 1500


def packet_size(facts: Facts) -> Outcome:
    """RD08: check that the path MTU is the largest possible and that the path to the peer carries it."""
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
    if blocked := _blocked(facts):
        return Outcome(blocked.status, "\n".join([blocked.found, *small, *shown]), blocked.actions)
    if first is not None:
        return warned("\n".join(small + shown), **(_raise(facts, first) if _roce_gid(first) else {
            "switch": "the subnet manager's partition sets the MTU: mtu=5 in opensm's partitions.conf (4096 bytes)"}))
    return passed("\n".join(shown))


def _mtus(facts: Facts, rail: Rail) -> tuple[int, int]:
    """Return the MTU of a port's interface and the port's path MTU in bytes, 0 if unknown."""
    card = facts.host.netdevs.get(rail.netdev or "")
    mtu = card.mtu if card else 0
    return mtu, facts.path_mtus.get(rail.name, 0) or (roce_mtu(mtu) if mtu and _roce_gid(rail) else 0)


def _peer_mtu(facts: Facts, rail: Rail) -> int:
    """Return the MTU of the peer's interface in the same position, 0 if unknown."""
    if facts.peer_report is None:
        return 0
    ours, theirs = ((facts.choice.rails, facts.peer_report.used) if rail in facts.choice.rails
                    else (facts.choice.spare, facts.peer_report.spare))
    place = ours.index(rail)
    return theirs[place].mtu if place < len(theirs) else 0


def _raise(facts: Facts, rail: Rail) -> dict[str, str]:
    actions = {"host": f"sudo ip link set {rail.netdev} mtu {_WANTED_MTU}   # on both machines, lasting: in netplan, "
                       "NetworkManager or ifcfg"}
    if not facts.is_software:
        actions["switch"] = f"mtu 9216 on all ports of that network ({_ENOUGH_MTU} is the least for 4096)"
    if facts.peer is not None:
        actions["check"] = f"ping -M do -s {_WANTED_MTU - 28} {facts.peer}"
    return actions


def _blocked(facts: Facts) -> Outcome | None:
    """Ping the peer with the largest packets of each interface; return a problem if they do not arrive, or None."""
    for rail, address in _ways(facts):
        card = facts.host.netdevs.get(rail.netdev or "")
        if card is None or card.mtu <= _SMALL_NBYTES:
            continue
        if (_ping(facts, address, card.mtu, card.name) is not PingResult.SILENT
                or _ping(facts, address, _SMALL_NBYTES, card.name) is not PingResult.ANSWERED):
            continue  # the large packet passes, or pings are not answered at all, which says nothing about sizes
        sizes = sorted([each + ROCE_OVERHEAD_NBYTES for each in PATH_MTUS] + [_ETHERNET_MTU], reverse=True)
        passing = next((each for each in sizes if each < card.mtu
                        and _ping(facts, address, each, card.name) is PingResult.ANSWERED), _SMALL_NBYTES)
        outcome = failed if passing < _mtus(facts, rail)[1] + ROCE_OVERHEAD_NBYTES else warned
        return outcome(
            f"packets of {card.mtu} bytes ({card.name}'s mtu) do not reach {facts.peer_name} ({address}), packets of "
            f"{passing} do: the path or the other end has a smaller MTU",
            switch=f"mtu 9216 on all ports between the two, also between switches; or, until then, here: sudo ip link "
                   f"set {card.name} mtu {passing}",
            peer=f"sudo ip link set IFACE mtu {card.mtu}", check=f"ping -M do -s {card.mtu - 28} {address}")
    return None


def _ways(facts: Facts) -> list[tuple[Rail, Address]]:
    """Return each of our ports with the peer's address on its network: that of the peer's port, or the given one."""
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


CHECKS = (
    Check("RD05", "GID", Severity.BLOCKS,
          ("ibv_modify_qp failed with error Connection timed out (110)", "status=12 vendor err 129",
           "Network is unreachable", "modify QP to RTR: Invalid argument (22)"),
          "The row of the GID table is link-local (fe80::), of RoCE v1, or of another IP version than the peer's; or "
          "there is no IPv4 row because the interface has no address.",
          "The queue pair does not connect, or connects and every packet is lost.",
          "NVIDIA/nccl#426, #769 and #1131, NVIDIA/nccl-tests#185 and #227", gid,
          advice(host="sudo ip addr add A.B.C.D/24 dev IFACE   # adds the rows that RoCE v2 needs",
                 job="BPSFAST_RDMA_GID_INDEX=3   # only if the choice by content is wrong",
                 check="bpsfast gids --peer HOST"), "device"),
    Check("RD07", "route", Severity.BLOCKS,
          ("RDMA_CM_EVENT_ADDR_ERROR", "connects over the wrong network"),
          "The address that was given belongs to another interface than the RDMA card.",
          "Traffic takes the slow network, or none.", "bytedance/byteps#365, #394 and #397", route,
          advice(host="give the peer's address on the card's own network", job="BPSFAST_RDMA_DEVICES==mlx5_1:1",
                 check="ip route get PEER; bpsfast devices --peer PEER"), "port"),
    Check("RD18", "own name", Severity.SLOW,
          ("a peer tries to connect to 127.0.0.1", "gloo: connect 127.0.1.1: Connection refused"),
          "The host name resolves to a loopback address, which some libraries then advertise.",
          "bpsfast takes the source address of the route to the scheduler instead, other libraries do not.",
          "aws-samples/aws-do-eks PR#50, #51 and #69", hostname,
          advice(host="remove the line with the host name and 127.0.x.1 from /etc/hosts",
                 check="getent hosts $(hostname)")),
    Check("RD08", "MTU", Severity.SLOW,
          ("modify QP to RTR: Invalid argument, with path_mtu 4096", "small messages pass, large ones hang"),
          "The RoCE path MTU is the power of two below the interface's MTU: 1500 bytes leave 1024. Ends or switches "
          "with different MTUs drop larger packets silently.",
          "More packets per message (slow), or none of the large ones arrive.", "tensorflow PR#9432", packet_size,
          advice(host=f"sudo ip link set IFACE mtu {_WANTED_MTU}   # on all machines",
                 switch=f"mtu 9216 on all ports of that network ({_ENOUGH_MTU} is the least for a path MTU of 4096)",
                 check="ping -M do -s 8972 PEER"), "port"),
)
