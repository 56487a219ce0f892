"""Computes the machines' rates that placement assumes from what nodes report, and remarks about them. Pure.

A NIC with an unknown rate is assumed to be like the slowest known one: an overloaded link delays all, one that could do
more does not. Limits say less: that a node may take 5 Gbit/s of its NIC implies that the NIC carries 5, so only where
no NIC's rate is known the largest limit stands for the others.
"""
from __future__ import annotations

from collections.abc import Sequence

from ..messages import NodeInfo
from ..roster import describe_node
from .shares import Machine, optimal_shares

#: A share that is smaller by less than this is not reported.
_LESS = 0.99
_MORE = "more cores (BPSFAST_CORES), or idler ones, sum more"


def machines_of(nodes: Sequence[NodeInfo]) -> list[Machine]:
    """Return the machines of *nodes*, in node order: all with a rate if any NIC's rate or limit is known, else none."""
    stand_in = _stand_in(nodes)
    return [Machine(bool(node.ranks),
                    min(node.nic_rate_bytes or stand_in, node.nic_limit_bytes or float("inf")) if stand_in else 0.0,
                    node.sum_rate_bytes) for node in nodes]


def ownable(nodes: Sequence[NodeInfo]) -> list[int]:
    """Return the bytes that the memory of each node lets it own at first, -1 where it is not bounded.

    A byte that is owned takes a slot for each machine with ranks, and a result of either parity.
    """
    n = sum(bool(node.ranks) for node in nodes)
    return [node.room_nbytes if node.room_nbytes < 0 else node.room_nbytes // (n + 2) for node in nodes]


def bounded(machines: Sequence[Machine], owned: Sequence[int], more: Sequence[int]) -> list[Machine]:
    """Return *machines*, which own *owned* bytes, bounded by what *more* each can own (-1: not bounded)."""
    return [machine if rest < 0 else machine._replace(most_nbytes=have + rest)
            for machine, have, rest in zip(machines, owned, more)]


def bound_remark(nodes: Sequence[NodeInfo], free: Sequence[Machine], bound: Sequence[Machine], nbytes: float) -> str:
    """Describe which memory bounds cost time: *bound* are the machines with them, *free* without. "" if none does."""
    wanted, found = optimal_shares(free, nbytes), optimal_shares(bound, nbytes)
    if found.time_s * _LESS <= wanted.time_s:
        return ""
    short = [node.index for node in nodes if bound[node.index].limit_nbytes < wanted.owned[node.index]]
    slower = found.time_s / wanted.time_s
    return (f"a step takes {slower:.2f} times as long as it could: {_names(nodes, short)} may use too little memory "
            "for its share (BPSFAST_MAX_BYTES), so others sum more")


def remarks(nodes: Sequence[NodeInfo], policy: str) -> list[str]:
    """Return, in words, what was assumed of NICs, and which machines cannot sum what their NIC could bring."""
    stand_in = _stand_in(nodes)
    found = []
    unknown = [node.index for node in nodes if not node.nic_rate_bytes]
    if stand_in and unknown:
        source = "the least known" if any(node.nic_rate_bytes for node in nodes) else "the largest limit of a node"
        found.append(f"no NIC rate is known of {_names(nodes, unknown)}: taken as {_gbps(stand_in)}, {source}; "
                     "BPSFAST_NIC_RATE says it")
    slow = [node.index for node in nodes if node.sum_rate_bytes]
    if slow and not stand_in:
        found.append(f"{_names(nodes, slow)} can sum only so much, but no NIC's rate is known to weigh that against: "
                     "set BPSFAST_NIC_RATE")
    elif slow:
        found += _slower_than_their_share(nodes, slow, policy)
    return found


def _slower_than_their_share(nodes: Sequence[NodeInfo], slow: Sequence[int], policy: str) -> list[str]:
    machines = machines_of(nodes)
    share = optimal_shares(machines, 1.0).owned
    found = []
    for index in slow:
        machine = machines[index]
        if policy != "optimal":
            if machine.sum_rate < machine.rate and not machine.has_ranks:
                found.append(f"{describe_node(nodes, index)} sums {_gbps(machine.sum_rate)} of input, less than its "
                             f"NIC brings ({_gbps(machine.rate)}): with placement {policy} the others may wait for it; "
                             f"{_MORE}")
            continue
        free = optimal_shares([*machines[:index], machine._replace(sum_rate=0.0), *machines[index + 1:]],
                              1.0).owned[index]
        if share[index] >= free * _LESS:
            continue
        found.append(f"{describe_node(nodes, index)} sums {_gbps(machine.sum_rate)} of input, too slow for its share: "
                     f"it is given {share[index]:.1%} of the bytes, and not the {free:.1%} that its NIC "
                     f"({_gbps(machine.rate)}) could take; {_MORE}")
    return found


def _stand_in(nodes: Sequence[NodeInfo]) -> float:
    """Return the rate assumed for NICs with an unknown one, 0 if there is nothing to compare with."""
    known = [node.nic_rate_bytes for node in nodes if node.nic_rate_bytes]
    return min(known) if known else max((node.nic_limit_bytes for node in nodes), default=0.0)


def _names(nodes: Sequence[NodeInfo], indices: Sequence[int]) -> str:
    return "every node" if len(indices) == len(nodes) else ", ".join(describe_node(nodes, index) for index in indices)


def _gbps(rate_bytes: float) -> str:
    return f"{rate_bytes * 8 / 1e9:.3g} Gbit/s"
