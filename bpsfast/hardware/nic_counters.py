"""NIC counters: snapshots, their differences, and which differences mean loss, congestion or a slow receiver.

A low bandwidth looks the same whether packets were lost, the network asked senders to slow down, or the receiver had
no request posted. The counters tell these apart, so every bandwidth is printed beside `CounterDelta.line`.

References
----------
Kernel, ``Documentation/ABI/stable/sysfs-class-infiniband`` (counters, hw_counters, lifespan) and
``networking/device_drivers/ethernet/mellanox/mlx5/counters.rst``; InfiniBand specification, PortCounters;
``drivers/infiniband`` of the kernel for the names of mlx5, rxe, bnxt_re, irdma and efa.
"""
from __future__ import annotations

import enum
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from .kernel import Kernel
from .sysfs import Tree


class CounterMeaning(enum.Enum):
    """What an increase of a counter means."""

    LOSS = "packets were lost and sent again"
    CONGESTION = "the network or the peer asked to send more slowly"
    RECEIVER = "the receiver had no receive request posted"
    REFUSED = "a request was wrong: key, address, length or permission"
    LINK = "the link itself damaged or dropped packets"
    TRAFFIC = "packets and bytes"
    OTHER = "see the driver's documentation"


#: in the order in which `CounterDelta.verdicts` names them
_TROUBLES = (CounterMeaning.LOSS, CounterMeaning.LINK, CounterMeaning.RECEIVER, CounterMeaning.REFUSED,
             CounterMeaning.CONGESTION)
#: Shown even when they are 0, because 0 is the answer that the reader looks for.
_ALWAYS = ("out_of_sequence", "local_ack_timeout_err", "np_cnp_sent",  # mlx5
           "rcvd_seq_err", "completer_retry_err")  # rxe

_NAMES: dict[CounterMeaning, str] = {
    CounterMeaning.LOSS: """
        out_of_sequence packet_seq_err local_ack_timeout_err implied_nak_seq_err duplicate_request
        req_transport_retries_exceeded roce_adp_retrans roce_adp_retrans_to rx_icrc_encapsulated
        out_of_seq_request rcvd_seq_err completer_retry_err retry_exceeded_err
        to_retransmits seq_err_naks_rcvd max_retry_exceeded oos_drop_count missing_resp dup_req
        rx_roce_discards tx_roce_discards tcpRetransSegs retrans_pkts retrans_timeout_events rx_drops
        rx_discards_phy tx_discards_phy""",
    CounterMeaning.CONGESTION: """
        np_cnp_sent np_ecn_marked_roce_packets rp_cnp_handled rp_cnp_ignored roce_slow_restart
        roce_slow_restart_cnps roce_slow_restart_trans port_xmit_wait
        rx_cnp_pkts tx_cnp_pkts rx_ecn_marked_pkts cnpHandled cnpIgnored cnpSent RxECNMrkd
        rx_pause_ctrl_phy tx_pause_ctrl_phy""",
    CounterMeaning.RECEIVER: """
        rnr_nak_retry_err out_of_buffer rcvd_rnr_err send_rnr_err retry_rnr_exceeded_err rnr_naks_rcvd
        rx_out_of_buffer""",
    CounterMeaning.REFUSED: """
        req_remote_access_errors req_remote_invalid_request resp_remote_access_errors resp_local_length_error
        resp_cqe_error req_cqe_error local_protection_err remote_invalid_req_err remote_access_err remote_op_err
        local_qp_op_err bad_resp_err send_err""",
    CounterMeaning.LINK: """
        symbol_error link_error_recovery link_downed port_rcv_errors port_rcv_remote_physical_errors
        port_rcv_switch_relay_errors port_xmit_discards port_xmit_constraint_errors port_rcv_constraint_errors
        local_link_integrity_errors excessive_buffer_overrun_errors VL15_dropped
        rx_crc_errors_phy rx_symbol_err_phy rx_roce_errors""",
    CounterMeaning.TRAFFIC: """
        port_xmit_data port_rcv_data port_xmit_packets port_rcv_packets unicast_xmit_packets unicast_rcv_packets
        multicast_xmit_packets multicast_rcv_packets rx_write_requests rx_read_requests rx_atomic_requests
        sent_pkts rcvd_pkts rdma_sends rdma_recvs rx_bytes tx_bytes rx_pkts tx_pkts""",
}
_MEANINGS = {name: meaning for meaning, names in _NAMES.items() for name in names.split()}
#: the driver's statistics of an interface that concern RDMA
_PAUSE = re.compile(r"[rt]x_prio\d_pause|[rt]x_pfc_ena_frames_pri\d")
_DISCARD = re.compile(r"rx_prio\d_discards")
#: counters in units of four bytes
_WORDS = ("port_xmit_data", "port_rcv_data")


@dataclass(frozen=True)
class CounterSnapshot:
    """The counters of one port at one moment (s, monotonic). The driver refreshes them at most every *lifespan_s*."""

    device: str
    port: int
    at_s: float
    lifespan_s: float
    values: Mapping[str, int]


@dataclass(frozen=True)
class CounterDelta:
    """The difference of two snapshots of a port, `seconds` apart.

    `too_soon`: the driver may have answered both snapshots from its cache. `restarted`: some counters decreased, so
    the driver was reloaded or the counters were cleared.
    """

    device: str
    port: int
    seconds: float
    changes: Mapping[str, int]
    too_soon: bool
    restarted: bool

    def of(self, meaning: CounterMeaning) -> dict[str, int]:
        """Return the counters of one meaning that increased."""
        return {name: value for name, value in self.changes.items() if value and meaning_of(name) is meaning}

    @property
    def is_clean(self) -> bool:
        """Whether nothing was lost, slowed down, refused or damaged."""
        return not any(map(self.of, _TROUBLES))

    def verdicts(self) -> list[str]:
        """Return one sentence for each kind of trouble, with its counters in brackets."""
        return [f"{meaning.value} ({', '.join(f'{name} {value}' for name, value in found.items())})"
                for meaning in _TROUBLES if (found := self.of(meaning))]

    def line(self) -> str:
        """Return the counters in the line that benches print: some always, the others if they increased."""
        shown = {name: self.changes[name] for name in _ALWAYS if name in self.changes}
        for meaning in CounterMeaning:
            if meaning in _TROUBLES:
                shown |= self.of(meaning)
        counted = "  ".join(f"{name} {value}" for name, value in shown.items()) or "none of a kind that is known"
        return f"# NIC counters (delta) : {self.device}/{self.port}  {counted}"


def meaning_of(name: str) -> CounterMeaning:
    """Return what an increase of the counter *name* means."""
    if _PAUSE.fullmatch(name):
        return CounterMeaning.CONGESTION
    return CounterMeaning.LOSS if _DISCARD.fullmatch(name) else _MEANINGS.get(name, CounterMeaning.OTHER)


def snapshot(tree: Tree, device: str, port: int, *, netdev: str | None = None,
             kernel: Kernel | None = None) -> CounterSnapshot:
    """Read the counters of a port; with *netdev* and *kernel*, also the interface's pause frames and discards.

    The snapshot is empty if the device has no counters. Byte counters are in bytes.
    """
    base = f"sys/class/infiniband/{device}"
    values: dict[str, int] = {}
    lifespan_ms = 0
    for folder in (f"{base}/hw_counters", f"{base}/ports/{port}/counters", f"{base}/ports/{port}/hw_counters"):
        for name in tree.names(folder):
            number = tree.number(folder, name)
            if name == "lifespan":
                lifespan_ms = max(lifespan_ms, number or 0)
            elif number is not None:
                values[name] = number * 4 if name in _WORDS else number
    if netdev is not None and kernel is not None:
        values |= {name: number for name, number in kernel.statistics(netdev).items()
                   if meaning_of(name) is not CounterMeaning.OTHER and meaning_of(name) is not CounterMeaning.TRAFFIC}
    return CounterSnapshot(device, port, time.monotonic(), lifespan_ms / 1000, values)


def difference(before: CounterSnapshot, after: CounterSnapshot) -> CounterDelta:
    """Return the difference of two snapshots of one port. A counter that decreased is taken to have restarted at 0.

    The 32-bit counters of older InfiniBand cards stop at their largest value; they then show no difference.
    """
    if (before.device, before.port) != (after.device, after.port):
        raise ValueError(f"snapshots of {before.device}/{before.port} and of {after.device}/{after.port} "
                         "have no difference")
    changes = {name: value - before.values.get(name, 0) for name, value in after.values.items()}
    restarted = any(value < 0 for value in changes.values())
    seconds = after.at_s - before.at_s
    return CounterDelta(after.device, after.port, seconds,
                        {name: after.values[name] if value < 0 else value for name, value in changes.items()},
                        too_soon=seconds < after.lifespan_s, restarted=restarted)
