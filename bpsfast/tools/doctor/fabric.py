"""Checks RD06, RD09, RD13 and RD14 of ``bpsfast doctor``: RDMA network ports, reachability, packet loss and filters."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...hardware.kernel import Address, PingResult
from ...hardware.nic_counters import CounterDelta, CounterMeaning, CounterSnapshot, difference, snapshot
from ...hardware.rdma_devices import Port, RdmaDevice
from ...hardware.rdma_route import Rail
from .facts import Facts, PeerPort
from .finding import Check, Outcome, Severity, advice, failed, info, passed, skipped, warned

_PING_NBYTES = 64
_OPEN_PORTS = "TCP: the scheduler's port and ports above 1024 between all nodes; UDP 4791 (RoCE v2) between all cards"


def port_state(facts: Facts) -> Outcome:
    """RD13: check that the ports are up."""
    if not facts.host.ports:
        return skipped("the device has no ports")
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
    return (warned if wanted else info)(f"{shown}\n{'; '.join(sorted(causes))}", **actions)


def rails(facts: Facts) -> Outcome:
    """RD06: check that each of our ports reaches its counterpart and the other ports of the peer."""
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
        return warned(f"number of ports that would be used: {len(ours)} here ({_names(ours)}), {len(theirs)} at "
                      f"{facts.peer_name} ({_names(theirs)}); those without a counterpart carry nothing",
                      job="set BPSFAST_RDMA_DEVICES to as many ports on all machines, in the same order")
    if len(ours) < 2:
        return skipped("one port is used: no rails to compare")
    reached = {(i, j): answered for i, rail in enumerate(ours) for j, other in enumerate(theirs)
               if (answered := _answers(facts, rail.netdev, other.address)) is not None}
    works = facts.trial_error == ""  # one queue pair per position tests more than a ping
    if not any(reached.values()) and (works or not reached):
        return (passed(f"a queue pair carried data for each of {_names(ours)}") if works
                else skipped("no ping can be sent over these ports"))
    broken = [(i, j) for (i, j), answered in reached.items() if i == j and not answered and not works]
    if broken:
        pairs = ", ".join(f"{ours[i].name} ({ours[i].netdev}) to {theirs[j].name} ({theirs[j].gid})" for i, j in broken)
        return failed(f"no answer over {pairs}: the ports of one position are not on one network",
                      job="set BPSFAST_RDMA_DEVICES so that position by position the ports share a network")
    if not all(reached.values()):
        return info(f"rail-only network: each of {_names(ours)} reaches its counterpart only; bpsfast sends so",
                    job="keep BPSFAST_RDMA_DEVICES in the same order everywhere (for NCCL: NCCL_CROSS_NIC=0)")
    return passed(f"each of {_names(ours)} reaches each of {_names(theirs)}")


def filters(facts: Facts) -> Outcome:
    """RD14: check that no filter blocks RDMA between the machines, and that rdma_cm is available."""
    cm = facts.host.tree.exists("dev/infiniband/rdma_cm")
    local = "/dev/infiniband/rdma_cm is there" if cm else (
        "no /dev/infiniband/rdma_cm: bpsfast does not need it, perftest -R and UCX do")
    load = {} if cm else facts.variants("sudo modprobe rdma_ucm", "docker run --device=/dev/infiniband/rdma_cm ...",
                                        "on the node: modprobe rdma_ucm")
    if facts.peer_report is None and facts.peer_silence:
        return warned(f"{local}; {facts.peer_silence}", peer="bpsfast doctor --listen", **load)
    if facts.peer_report is None:
        return (passed if cm else info)(f"{local}; the way to a peer needs --peer HOST", **load)
    if facts.peer_report.reached not in ("", "open"):
        return failed(f"{facts.peer_name} is reachable, but cannot connect back to this machine: "
                      f"{facts.peer_report.reached}", host=f"open in the firewall: {_OPEN_PORTS}")
    if facts.trial_error:
        return failed(f"TCP to {facts.peer_name} works both ways, a queue pair does not: {facts.trial_error}",
                      host=f"open in the firewall: {_OPEN_PORTS}",
                      check="sudo tcpdump -ni IFACE udp port 4791   # on the receiving machine; bypassing cards show "
                            "nothing")
    proven = "; a queue pair to it carried data and was acknowledged" if facts.trial_error == "" else ""
    ways = "to and from" if facts.peer_report.reached else "to"  # without a key a doctor connects to no asker
    return (passed if cm else info)(f"TCP {ways} {facts.peer_name} works{proven}; {local}", **load)


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
        return {"switch": "check that the port is enabled and the cable has the right kind and rate"}
    netdevs = [port.netdev for device, port in down if port.netdev and f"{device.name}/{port.number} " in cause + " "]
    return {"host": f"sudo ip link set {netdevs[0] if netdevs else 'IFACE'} up", "check": "bpsfast devices"}


def _names(each_end: Sequence[Rail | PeerPort]) -> str:
    return ", ".join(each.name for each in each_end) or "none"


def _answers(facts: Facts, netdev: str | None, address: Address | None) -> bool | None:
    """Tell whether *address* answers a ping over *netdev*; None if it cannot be pinged."""
    if address is None or netdev not in facts.host.netdevs:
        return None  # InfiniBand, or an interface in another network namespace
    try:
        answer = facts.host.kernel.ping(address, _PING_NBYTES, netdev, facts.timeout_s)
    except OSError:
        return None
    return None if answer is PingResult.FORBIDDEN else answer is PingResult.ANSWERED

#: Share of lost packets that is noise: a card that runs for months sees a link flap.
_NOISE = 1e-6
_PRIORITY = 3
_SWITCH = (f"for RoCE (DSCP 26, priority {_PRIORITY}): PFC on priority {_PRIORITY} of all ports, no drop; ECN marking "
           "(WRED) on its queue from about 150 KB to 1.5 MB at 100 Gb/s; CNPs (DSCP 48) in a strict queue, priority 6")


@dataclass(frozen=True)
class FlowControl:
    """Flow control of a port, from its driver: priorities with PFC and ECN (None: unknown), DCQCN parameters."""

    pause: tuple[int, ...] | None
    notify: tuple[int, ...] | None
    react: tuple[int, ...] | None
    parameters: dict[str, int]

    @property
    def is_known(self) -> bool:
        """Tell whether the driver reports anything."""
        return self.pause is not None or self.notify is not None or bool(self.parameters)

    def __str__(self) -> str:
        words = ["PFC " + ("not shown" if self.pause is None else f"on {_listed(self.pause)}")]
        if self.notify is not None or self.react is not None:
            words.append(f"ECN answered on {_listed(self.notify or ())}, obeyed on {_listed(self.react or ())}")
        if self.parameters:
            words.append("DCQCN " + " ".join(f"{name} {value}" for name, value in self.parameters.items()))
        return ", ".join(words)


def loss(facts: Facts) -> Outcome:
    """RD09: check that no packets were lost, and that the network is set up to prevent loss."""
    if facts.is_software:
        return skipped("the device is software and has no flow control")
    lines, lossy, unprotected = [], [], []
    for device, port in facts.usable:
        now = snapshot(facts.host.tree, device.name, port.number, netdev=port.netdev, kernel=facts.host.kernel)
        if now.values:
            bad = _troubles(difference(CounterSnapshot(device.name, port.number, 0.0, 0.0, {}), now))
            lines.append(f"{device.name}/{port.number} since its driver was loaded: "
                         + ("; ".join(bad) if bad else "nothing lost"))
            lossy += [port] if bad else []
        if not port.is_roce:
            continue
        control = flow_control(facts, device, port)
        lines.append(f"{port.netdev}: {control}" if control.is_known
                     else f"{port.netdev}: the driver does not show PFC, ECN or DCQCN here")
        if control.is_known and not control.pause and not (control.notify and control.react):
            unprotected.append(port)
    if not lines:
        return skipped("the driver has no counters")
    found = "\n".join(lines)
    netdev = next((port.netdev for port in [*lossy, *unprotected] if port.is_roce and port.netdev), None)
    if lossy:
        return warned(found, **(_congestion_remedy(netdev) if netdev else {
            "host": "check cables and transceivers: ibqueryerrors; ibdiagnet", "check": "perfquery -x"}))
    if unprotected:
        return info(f"{found}\nnothing was lost so far, but nothing protects RoCE from loss either",
                    **_congestion_remedy(netdev))
    return passed(found)


def flow_control(facts: Facts, device: RdmaDevice, port: Port) -> FlowControl:
    """Read flow control: DCB over netlink, mlx5's /sys/class/net/IFACE/ecn and, for root, mlx5's debugfs."""
    tree, netdev = facts.host.tree, port.netdev or ""
    ecn = f"sys/class/net/{netdev}/ecn"
    places: list[tuple[str, tuple[str, ...]]] = [
        (name, (ecn, "roce_np", name)) for name in ("cnp_dscp", "cnp_802p_prio", "min_time_between_cnps")]
    if device.pcie and device.pcie.address:
        places += [(name, ("sys/kernel/debug/mlx5", device.pcie.address, "cc_params", f"np_{name}"))
                   for name in ("cnp_dscp", "cnp_prio", "cnp_prio_mode", "min_time_between_cnps")]
    parameters: dict[str, int] = {}
    for name, place in places:
        if (value := tree.number(*place)) is not None:
            parameters.setdefault(name, value)
    return FlowControl(facts.host.kernel.pause_priorities(netdev), _enabled(facts, f"{ecn}/roce_np/enable"),
                       _enabled(facts, f"{ecn}/roce_rp/enable"), parameters)


def _troubles(counted: CounterDelta) -> list[str]:
    """Return the troubles worth reporting: loss above noise, link damage, receivers that were not ready."""
    packets = counted.changes.get("port_rcv_packets", 0) + counted.changes.get("port_xmit_packets", 0)
    troubles = []
    for meaning in (CounterMeaning.LOSS, CounterMeaning.LINK, CounterMeaning.RECEIVER):
        found = counted.of(meaning)
        if found and (not packets or sum(found.values()) > packets * _NOISE):
            share = f", {sum(found.values()) / packets:.1e} of all packets" if packets else ""
            troubles.append(f"{meaning.value} ({', '.join(f'{name} {n}' for name, n in found.items())}{share})")
    return troubles


def _enabled(facts: Facts, folder: str) -> tuple[int, ...] | None:
    """Return the priorities whose file holds 1, None if the folder does not exist."""
    names = facts.host.tree.names(folder)
    return tuple(int(name) for name in names if facts.host.tree.number(folder, name) == 1) if names else None


def _listed(priorities: tuple[int, ...]) -> str:
    if not priorities:
        return "no priority"
    return "all priorities" if len(priorities) == 8 else "priority " + ", ".join(map(str, priorities))


def _congestion_remedy(netdev: str | None) -> dict[str, str]:
    return {
        "host": f"sudo dcb pfc set dev {netdev} prio-pfc all:off {_PRIORITY}:on && sudo dcb app add dev {netdev} "
                f"dscp-prio 26:{_PRIORITY}   # MLNX_OFED: mlnx_qos -i {netdev} --pfc 0,0,0,1,0,0,0,0 --trust dscp",
        "ecn": f"echo 1 | sudo tee /sys/class/net/{netdev}/ecn/roce_np/enable/{_PRIORITY} "
               f"/sys/class/net/{netdev}/ecn/roce_rp/enable/{_PRIORITY}   # MLNX_OFED",
        "switch": _SWITCH,
        "check": f"ethtool -S {netdev} | grep -E 'prio{_PRIORITY}_(pause|discards)'",
    }


CHECKS = (
    Check("RD06", "rails", Severity.BLOCKS,
          ("only some pairs of ranks fail to connect", "works with one NIC, hangs with all"),
          "Card k of one machine reaches only card k of another (rail-only fabric), or cards are numbered otherwise.",
          "Pairs of ports that do not share a network cannot connect.", "NVIDIA/nccl#2013", rails,
          advice(job="BPSFAST_RDMA_DEVICES in the same order on all machines", check="bpsfast doctor --peer HOST"),
          "device"),
    Check("RD13", "port state", Severity.BLOCKS,
          ("PORT_DOWN", "PORT_INIT", "phys_state: POLLING"),
          "The cable or the switch's port is off; the interface is down; on InfiniBand no subnet manager runs.",
          "A port that is not ACTIVE carries no data.", "the documentation of ibv_devinfo", port_state,
          advice(host="sudo ip link set IFACE up; InfiniBand: sudo systemctl start opensm   # on one machine",
                 switch="check that the port is enabled and the cable has the right kind and rate",
                 check="bpsfast devices"), "device"),
    Check("RD14", "filters", Severity.BLOCKS,
          ("works without -R, fails with it", "rdma_create_event_channel: No such device",
           "TCP connects, RDMA times out"),
          "A firewall drops UDP 4791 (RoCE v2) or the TCP ports; or the module rdma_ucm is not loaded.",
          "Queue pairs connect formally, but every packet is lost.", "linux-rdma/perftest#132", filters,
          advice(host=f"open in the firewall: {_OPEN_PORTS}", check="bpsfast doctor --peer HOST"), "device"),
    Check("RD09", "loss and congestion", Severity.SLOW,
          ("throughput falls to 0.x GB/s", "transport retry count exceeded", "local_ack_timeout_err grows"),
          "RoCE on a network without PFC and ECN, or with a traffic class that they do not cover.",
          "A lost packet costs a timeout of milliseconds, and everything after it is sent again.",
          "NVIDIA/nccl#306 and #378, openucx/ucx#6000, bytedance/byteps#179", loss,
          advice(host=f"sudo dcb pfc set dev IFACE prio-pfc all:off {_PRIORITY}:on   # or: mlnx_qos -i IFACE "
                      "--pfc 0,0,0,1,0,0,0,0 --trust dscp",
                 switch=_SWITCH, job="give RoCE the class that the network protects (DSCP 26: traffic class 106)",
                 check="ethtool -S IFACE | grep -E 'pause|discard'"), "port"),
)
