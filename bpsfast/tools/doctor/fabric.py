"""RD06, RD13, RD14: ports, cables and filters: whether packets of RDMA can pass at all."""
from __future__ import annotations

from collections.abc import Sequence

from ...hardware.netlink import Address
from ...hardware.ping import PingResult
from ...hardware.rdma_devices import Port, RdmaDevice
from ...hardware.rdma_route import Rail
from .facts import Facts
from .finding import Check, Outcome, Severity, advice, failed, passed, skipped, told, warned
from .peer_report import PeerPort

_PING_NBYTES = 64
_OPEN_PORTS = "TCP: the scheduler's port and ports above 1024 between all nodes; UDP 4791 (RoCE v2) between all cards"


def port_state(facts: Facts) -> Outcome:
    """RD13: is a port up?"""
    if not facts.host.ports:
        return skipped("no RDMA device" if not facts.host.devices else "the device has no ports")
    down = [(device, port) for device, port in facts.host.ports if not port.is_active]
    shown = "\n".join(_shown(device, port) for device, port in facts.host.ports)
    if not down:
        return passed(shown)
    causes = {_cause(device, port) for device, port in down}
    actions = {where: command for cause in sorted(causes) for where, command in _remedy(cause, down).items()}
    if len(down) == len(facts.host.ports):
        return failed(f"{shown}\nno port is ACTIVE: {'; '.join(sorted(causes))}", **actions)
    named = {rail.name for rail in facts.choice.rails}
    wanted = facts.settings.rdma_devices and any(f"{device.name}/{port.number}" not in named for device, port in down)
    return (warned if wanted else told)(f"{shown}\n{'; '.join(sorted(causes))}", **actions)


def rails(facts: Facts) -> Outcome:
    """RD06: does each of our rails reach its counterpart, and the others?"""
    if not facts.host.devices:
        return skipped("no RDMA device")
    if facts.peer_report is None:
        return skipped(facts.peer_silence or "needs --peer HOST, with `bpsfast doctor --listen` running there")
    ours, theirs = facts.choice.rails, facts.peer_report.used
    if not ours:
        return skipped("no port can be used")
    if not theirs:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in facts.peer_report.rejected.items())
        return failed(f"{facts.peer_name} has no port that could be used: {reasons or 'it has no RDMA device'}",
                      peer="bpsfast doctor")
    if len(ours) != len(theirs):
        return failed(f"number of ports that would be used: {len(ours)} here ({_names(ours)}), {len(theirs)} at "
                      f"{facts.peer_name} ({_names(theirs)}); rails pair up by position",
                      job="set BPSFAST_RDMA_DEVICES to as many ports on all machines, in the same order")
    if len(ours) < 2:
        return skipped("one port is used: no rails to compare")
    reached = {(i, j): answered for i, rail in enumerate(ours) for j, other in enumerate(theirs)
               if (answered := _answers(facts, rail.netdev, other.address)) is not None}
    works = facts.trial_error == ""  # a queue pair for each position, which says more than a ping
    if not any(reached.values()) and (works or not reached):
        return (passed(f"a queue pair carried data for each of {_names(ours)}") if works
                else skipped("no ping can be sent over these ports"))
    broken = [(i, j) for (i, j), answered in reached.items() if i == j and not answered and not works]
    if broken:
        pairs = ", ".join(f"{ours[i].name} ({ours[i].netdev}) to {theirs[j].name} ({theirs[j].gid})" for i, j in broken)
        return failed(f"no answer over {pairs}: the ports of one position are not on one network",
                      job="set BPSFAST_RDMA_DEVICES so that position by position the ports share a network")
    if not all(reached.values()):
        return told(f"rail-only network: each of {_names(ours)} reaches its counterpart only; bpsfast sends so",
                    job="keep BPSFAST_RDMA_DEVICES in the same order everywhere (for NCCL: NCCL_CROSS_NIC=0)")
    return passed(f"each of {_names(ours)} reaches each of {_names(theirs)}")


def filters(facts: Facts) -> Outcome:
    """RD14: does anything stand between the machines; is rdma_cm there for those who need it?"""
    if not facts.host.devices:
        return skipped("no RDMA device")
    cm = facts.host.tree.exists("dev/infiniband/rdma_cm")
    local = "/dev/infiniband/rdma_cm is there" if cm else (
        "no /dev/infiniband/rdma_cm: bpsfast does not need it, perftest -R and UCX do")
    load = {} if cm else facts.variants("sudo modprobe rdma_ucm", "docker run --device=/dev/infiniband/rdma_cm ...",
                                        "on the node: modprobe rdma_ucm")
    if facts.peer_report is None:
        silence = f"; {facts.peer_silence}" if facts.peer_silence else "; the way to a peer needs --peer HOST"
        if facts.peer_silence:
            return warned(local + silence, peer="bpsfast doctor --listen", **load)
        return (passed if cm else told)(local + silence, **load)
    if facts.peer_report.reached not in ("", "open"):
        return failed(f"{facts.peer_name} is reached, but cannot connect back to this machine: "
                      f"{facts.peer_report.reached}", host=f"open in the firewall: {_OPEN_PORTS}")
    if facts.trial_error:
        return failed(f"TCP to {facts.peer_name} works both ways, a queue pair does not: {facts.trial_error}",
                      host=f"open in the firewall: {_OPEN_PORTS}",
                      check="sudo tcpdump -ni IFACE udp port 4791   # on the receiving machine; bypassing cards show "
                            "nothing")
    proven = "; a queue pair to it carried data and was acknowledged" if facts.trial_error == "" else ""
    ways = "to and from" if facts.peer_report.reached else "to"  # without a key a doctor connects to nobody
    return (passed if cm else told)(f"TCP {ways} {facts.peer_name} works{proven}; {local}", **load)


CHECKS = (
    Check("RD06", "rails", Severity.BLOCKS,
          ("only some pairs of ranks fail to connect", "works with one NIC, hangs with all"),
          "Card k of one machine reaches only card k of another (rail-only fabric), or cards are numbered otherwise.",
          "Pairs of ports that do not share a network cannot connect.", "NVIDIA/nccl#2013", rails,
          advice(job="BPSFAST_RDMA_DEVICES in the same order on all machines", check="bpsfast doctor --peer HOST")),
    Check("RD13", "port state", Severity.BLOCKS,
          ("PORT_DOWN", "PORT_INIT", "phys_state: POLLING"),
          "The cable or the switch's port is off; the interface is down; on InfiniBand no subnet manager runs.",
          "A port that is not ACTIVE moves nothing.", "the documentation of ibv_devinfo", port_state,
          advice(host="sudo ip link set IFACE up; InfiniBand: sudo systemctl start opensm   # on one machine",
                 switch="look whether the port is enabled, and the cable of the right kind and rate",
                 check="bpsfast devices")),
    Check("RD14", "filters", Severity.BLOCKS,
          ("works without -R, fails with it", "rdma_create_event_channel: No such device",
           "TCP connects, RDMA times out"),
          "A firewall drops UDP 4791 (RoCE v2) or the TCP ports; or the module rdma_ucm is not loaded.",
          "Queue pairs connect on paper and every packet is lost.", "linux-rdma/perftest#132", filters,
          advice(host=f"open in the firewall: {_OPEN_PORTS}", check="bpsfast doctor --peer HOST")),
)


def _shown(device: RdmaDevice, port: Port) -> str:
    layer = "RoCE" if port.is_roce else port.link_layer
    lid = f" lid {port.lid} sm_lid {port.sm_lid}" if port.link_layer == "InfiniBand" else ""
    rate = f" {port.rate_gbps:g} Gb/s" if port.rate_gbps else ""
    return f"{device.name}/{port.number} {port.state} {port.phys_state}{rate} {layer}{lid} ({port.netdev or '-'})"


def _cause(device: RdmaDevice, port: Port) -> str:
    name = f"{device.name}/{port.number}"
    if port.phys_state == "LinkUp" and port.link_layer == "InfiniBand":
        return f"{name} waits for a subnet manager" if not port.sm_lid else f"{name} is not configured yet"
    if port.phys_state == "Polling":
        return f"{name} sees no signal: cable or switch port"
    if port.phys_state == "Disabled" and port.netdev:
        return f"{name} is switched off ({port.netdev} is down) or has no signal"
    return f"{name} is {port.state}, {port.phys_state}"


def _remedy(cause: str, down: list[tuple[RdmaDevice, Port]]) -> dict[str, str]:
    if "subnet manager" in cause or "configured" in cause:
        return {"host": "sudo systemctl start opensm   # on one machine of the subnet, if no switch runs one",
                "check": "sudo sminfo; ibstat"}
    if "signal" in cause and "switched off" not in cause:
        return {"switch": "look whether the port is enabled, and the cable of the right kind and rate"}
    netdevs = [port.netdev for device, port in down if port.netdev and f"{device.name}/{port.number} " in cause + " "]
    return {"host": f"sudo ip link set {netdevs[0] if netdevs else 'IFACE'} up", "check": "bpsfast devices"}


def _names(each_end: Sequence[Rail | PeerPort]) -> str:
    return ", ".join(each.name for each in each_end) or "none"


def _answers(facts: Facts, netdev: str | None, address: Address | None) -> bool | None:
    """Whether *address* answers a ping over *netdev*; None if it cannot be asked."""
    if address is None or netdev not in facts.host.netdevs:
        return None  # InfiniBand; or an interface in another network namespace than ours
    try:
        answer = facts.host.kernel.ping(address, _PING_NBYTES, netdev, facts.timeout_s)
    except OSError:
        return None
    return None if answer is PingResult.FORBIDDEN else answer is PingResult.ANSWERED
