"""RD09: loss and congestion: what the card counted, and whether PFC, ECN and DCQCN are on where the driver shows it.

RoCE was made for networks that lose nothing. Either switches stop the sender in time (PFC, per priority), or they mark
packets early and the cards slow down by themselves (ECN marks, DCQCN); mostly both. All of it hangs on the traffic
class: packets of another priority than the one that is protected are lost like any other.

References
----------
NVIDIA, MLNX_OFED, "Explicit Congestion Notification": /sys/class/net/IFACE/ecn/roce_{np,rp}/enable/PRIORITY; kernel,
drivers/infiniband/hw/mlx5/cong.c: debugfs, mlx5/ADDRESS/cc_params; Zhu et al., SIGCOMM 2015 (DCQCN).
"""
from __future__ import annotations

from dataclasses import dataclass

from ...hardware.nic_counters import CounterDelta, CounterMeaning, CounterSnapshot, difference, snapshot
from ...hardware.rdma_devices import Port, RdmaDevice
from .facts import Facts
from .finding import Check, Outcome, Severity, advice, passed, skipped, told, warned

#: Lost packets among this many are noise: a card that ran for months has seen a link flap.
_NOISE = 1e-6
_PRIORITY = 3
_SWITCH = (f"for RoCE (DSCP 26, priority {_PRIORITY}): PFC on priority {_PRIORITY} of all ports, no drop; ECN marking "
           "(WRED) on its queue from about 150 KB to 1.5 MB at 100 Gb/s; CNPs (DSCP 48) in a strict queue, priority 6")


@dataclass(frozen=True)
class FlowControl:
    """What the driver shows of a port: priorities with PFC and with ECN (None: not shown), DCQCN's parameters."""

    pause: tuple[int, ...] | None
    notify: tuple[int, ...] | None
    react: tuple[int, ...] | None
    parameters: dict[str, int]

    @property
    def is_known(self) -> bool:
        """Whether the driver shows anything."""
        return self.pause is not None or self.notify is not None or bool(self.parameters)

    def __str__(self) -> str:
        words = ["PFC " + ("not shown" if self.pause is None else f"on {_listed(self.pause)}")]
        if self.notify is not None or self.react is not None:
            words.append(f"ECN answered on {_listed(self.notify or ())}, obeyed on {_listed(self.react or ())}")
        if self.parameters:
            words.append("DCQCN " + " ".join(f"{name} {value}" for name, value in self.parameters.items()))
        return ", ".join(words)


def loss(facts: Facts) -> Outcome:
    """RD09: were packets lost, and would the network have prevented it?"""
    ports = facts.usable
    if not ports:
        return skipped("no RDMA device" if not facts.host.devices else "no port can be used")
    if all(device.driver in ("rxe", "siw") for device, _ in ports):
        return skipped("the device is software: there is no flow control to look at")
    lines, lossy, unprotected = [], [], []
    for device, port in ports:
        counted = _counted(facts, device, port)
        if counted is not None:
            bad = _troubles(counted)
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
        return skipped("the driver counts nothing")
    found = "\n".join(lines)
    netdev = next((port.netdev for port in [*lossy, *unprotected] if port.is_roce and port.netdev), None)
    if lossy:
        return warned(found, **(_congestion_remedy(netdev) if netdev else {
            "host": "look at cables and transceivers: ibqueryerrors; ibdiagnet", "check": "perfquery -x"}))
    if unprotected:
        return told(f"{found}\nnothing was lost yet, but nothing protects RoCE from loss either", **_congestion_remedy(netdev))
    return passed(found)


def flow_control(facts: Facts, device: RdmaDevice, port: Port) -> FlowControl:
    """Read what the driver shows: DCB by netlink, mlx5's /sys/class/net/IFACE/ecn, mlx5's debugfs (root only)."""
    tree, netdev = facts.host.tree, port.netdev or ""
    ecn = f"sys/class/net/{netdev}/ecn"
    parameters = {name: value for name in ("cnp_dscp", "cnp_802p_prio", "min_time_between_cnps")
                  if (value := tree.number(ecn, "roce_np", name)) is not None}
    address = device.pcie.address if device.pcie else ""
    for name in ("np_cnp_dscp", "np_cnp_prio", "np_cnp_prio_mode", "np_min_time_between_cnps"):
        value = tree.number("sys/kernel/debug/mlx5", address, "cc_params", name) if address else None
        if value is not None:
            parameters.setdefault(name.removeprefix("np_"), value)
    return FlowControl(facts.host.kernel.pause_priorities(netdev), _enabled(facts, f"{ecn}/roce_np/enable"),
                       _enabled(facts, f"{ecn}/roce_rp/enable"), parameters)


MORE_CHECKS = (
    Check("RD09", "loss and congestion", Severity.SLOW,
          ("throughput falls to 0.x GB/s", "transport retry count exceeded", "local_ack_timeout_err grows"),
          "RoCE on a network without PFC and ECN, or with a traffic class that they do not cover.",
          "A lost packet costs a timeout of milliseconds, and everything after it is sent again.",
          "NVIDIA/nccl#306 and #378, openucx/ucx#6000, bytedance/byteps#179", loss,
          advice(host=f"sudo dcb pfc set dev IFACE prio-pfc all:off {_PRIORITY}:on   # or: mlnx_qos -i IFACE "
                      "--pfc 0,0,0,1,0,0,0,0 --trust dscp",
                 switch=_SWITCH, job="give RoCE the class that the network protects (DSCP 26: traffic class 106)",
                 check="ethtool -S IFACE | grep -E 'pause|discard'")),
)


def _counted(facts: Facts, device: RdmaDevice, port: Port) -> CounterDelta | None:
    """Return what was counted since the driver was loaded, None without counters."""
    now = snapshot(facts.host.tree, device.name, port.number, netdev=port.netdev, kernel=facts.host.kernel)
    return difference(CounterSnapshot(device.name, port.number, 0.0, 0.0, {}), now) if now.values else None


def _troubles(counted: CounterDelta) -> list[str]:
    """Return what is bad enough to be told: losses above noise, damage on the link, receivers that were not ready."""
    packets = counted.changes.get("port_rcv_packets", 0) + counted.changes.get("port_xmit_packets", 0)
    troubles = []
    for meaning in (CounterMeaning.LOSS, CounterMeaning.LINK, CounterMeaning.RECEIVER):
        found = counted.of(meaning)
        if found and (not packets or sum(found.values()) > packets * _NOISE):
            share = f", {sum(found.values()) / packets:.1e} of all packets" if packets else ""
            troubles.append(f"{meaning.value} ({', '.join(f'{name} {n}' for name, n in found.items())}{share})")
    return troubles


def _enabled(facts: Facts, folder: str) -> tuple[int, ...] | None:
    """Return the priorities whose file holds 1, None without the folder."""
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
