"""Who sums what: the exact optimum of the communication model, and a placement of partitions that comes close.

With n machines with ranks and k helpers, M bytes a step, s_m of them owned by machine m, one direction of a NIC carries

    machine with ranks    M - s_i (its own, not kept) + (n-1) s_i (as an owner)  =  M + (n-2) s_i
    helper                n s_j

Minimising the worst machine's time gives, with B_W and B_C the rates of all machines with ranks and of all helpers,

    t* = max( M / min b_i ,  2n(n-1) M / (n B_W + (n-2) B_C) )

Tests check this against a linear program. Source: BytePS (OSDI'20) section 4.1, extended to unequal NICs; no
aggregation along trees (rings included) can be faster. Pure: same input, same answer, on any machine.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from . import hashes
from .errors import ConfigError
from .messages import NodeInfo


class Machine(NamedTuple):
    """One node as placement sees it. `rate`: bytes/s of the slower direction of its NIC, 0 if unknown."""

    has_ranks: bool
    rate: float = 0.0


class Shares(NamedTuple):
    """The optimum: `time_s` of one step, bytes owned by each machine (seconds only if the rates are bytes/s)."""

    time_s: float
    owned: tuple[float, ...]


class WireBytes(NamedTuple):
    """Payload bytes that one machine's NIC sends and receives in one step."""

    tx: int
    rx: int


def machines_of(nodes: Sequence[NodeInfo]) -> list[Machine]:
    """Return the machines of *nodes*, in node order."""
    return [Machine(bool(node.ranks), node.nic_rate_bytes) for node in nodes]


def rates_of(machines: Sequence[Machine]) -> list[float]:
    """Return the machines' rates; all 1.0 unless every one is known: half a table says nothing about the rest."""
    if all(machine.rate > 0 for machine in machines):
        return [float(machine.rate) for machine in machines]
    return [1.0] * len(machines)


def optimal_shares(machines: Sequence[Machine], nbytes: float) -> Shares:
    """Return the shortest step for *nbytes* and the bytes that each machine should own.

    When the slowest machine with ranks sets the time there is slack: it is spent by giving everybody bytes in
    proportion to its rate, up to what it can carry within t*. So the slowest owns least (nothing, for n > 2).
    """
    rates = rates_of(machines)
    workers = [rate for machine, rate in zip(machines, rates) if machine.has_ranks]
    helpers = [rate for machine, rate in zip(machines, rates) if not machine.has_ranks]
    n = len(workers)
    if n == 0:
        raise ConfigError("placement needs at least one machine with ranks, got none")
    if n == 1:
        return Shares(0.0, tuple(float(nbytes) if machine.has_ranks else 0.0 for machine in machines))
    if nbytes == 0:
        return Shares(0.0, (0.0,) * len(machines))
    time_s = max(nbytes / min(workers), 2 * n * (n - 1) * nbytes / (n * sum(workers) + (n - 2) * sum(helpers)))
    most = []
    for machine, rate in zip(machines, rates):
        if not machine.has_ranks:
            most.append(rate * time_s / n)
        elif n == 2:
            most.append(float(nbytes))  # M + 0 * s: any share costs the same
        else:
            most.append(max(0.0, (rate * time_s - nbytes) / (n - 2)))
    return Shares(time_s, _fill(most, rates, nbytes))


def _fill(most: Sequence[float], rates: Sequence[float], nbytes: float) -> tuple[float, ...]:
    """Pour *nbytes* into vessels of *most* bytes whose levels rise as *rates*; those that are full stay full."""
    owned = [0.0] * len(most)
    left = float(nbytes)
    filling = sorted(range(len(most)), key=lambda m: most[m] / rates[m])
    while filling:
        level = left / sum(rates[m] for m in filling)
        first = filling[0]
        if most[first] >= level * rates[first]:
            for m in filling:
                owned[m] = level * rates[m]
            break
        owned[first] = most[first]
        left -= most[first]
        filling = filling[1:]
    return tuple(owned)


def check_policy(policy: str) -> None:
    """Raise ConfigError unless *policy* is one of "optimal", "colocated", "ps", "hash:NAME" with a known name."""
    if policy in ("optimal", "colocated", "ps"):
        return
    if policy.startswith("hash:") and policy[5:] in hashes.NAMES:
        return
    raise ConfigError(
        f"placement {policy!r} is unknown; use optimal, colocated, ps or hash:NAME with NAME one of "
        f"{', '.join(hashes.NAMES)}"
    )


def assign(nbytes_of: Sequence[int], machines: Sequence[Machine], policy: str = "optimal",
           owned: Sequence[int] | None = None, keys: Sequence[int] | None = None) -> list[int]:
    """Return the owner (node index) of each new partition.

    Parameters
    ----------
    nbytes_of : sizes of the new partitions, in bytes.
    machines : all nodes, in node order, those with ranks first.
    policy : "optimal", "colocated" (nodes with ranks only), "ps" (helpers only), "hash:NAME".
    owned : bytes that each node owns already; those partitions stay where they are.
    keys : tensor number << 16 | partition number, for hash policies; default: the position.

    Raises
    ------
    ConfigError
        If the policy is unknown, or is "ps" and there is no helper.
    """
    check_policy(policy)
    workers = [m for m, machine in enumerate(machines) if machine.has_ranks]
    helpers = [m for m, machine in enumerate(machines) if not machine.has_ranks]
    if not workers:
        raise ConfigError("placement needs at least one machine with ranks, got none")
    if policy == "ps":
        if not helpers:
            raise ConfigError("placement ps puts all sums on helper nodes, but the job has none; "
                              "start helpers (num_helpers) or use placement optimal")
        return _greedy(nbytes_of, machines, helpers, owned)
    if len(workers) == 1:
        return [workers[0]] * len(nbytes_of)  # everything is local: any other owner would put bytes on a wire
    if policy.startswith("hash:"):
        keys = range(len(nbytes_of)) if keys is None else keys
        return [hashes.server(policy[5:], key, len(workers), len(helpers)) for key in keys]
    return _greedy(nbytes_of, machines, workers + helpers if policy == "optimal" else workers, owned)


def _greedy(nbytes_of: Sequence[int], machines: Sequence[Machine], candidates: Sequence[int],
            owned: Sequence[int] | None) -> list[int]:
    """Place the largest first, each where the worst time grows least; of equals where least is owned for the rate."""
    rates = rates_of(machines)
    n = sum(machine.has_ranks for machine in machines)
    own = list(owned) if owned is not None else [0] * len(machines)
    total = sum(own) + sum(nbytes_of)
    fixed = [total if machine.has_ranks else 0 for machine in machines]
    slope = [n - 2 if machine.has_ranks else n for machine in machines]
    worst = max((fixed[m] + slope[m] * own[m]) / rates[m] for m in range(len(machines)))
    owners = [-1] * len(nbytes_of)
    for position in sorted(range(len(nbytes_of)), key=lambda p: (-nbytes_of[p], p)):
        nbytes = nbytes_of[position]
        best = min(candidates, key=lambda m: (
            max(worst, (fixed[m] + slope[m] * (own[m] + nbytes)) / rates[m]), (own[m] + nbytes) / rates[m], m))
        own[best] += nbytes
        worst = max(worst, (fixed[best] + slope[best] * own[best]) / rates[best])
        owners[position] = best
    return owners


def predict_wire(parts: Iterable[tuple[int, int]], machines: Sequence[Machine]) -> list[WireBytes]:
    """Return what each node's NIC sends and receives in one step that pushes all *parts*, given as (nbytes, owner).

    Every node with ranks that is not the owner sends its partial sum and receives the result: both directions of every
    node carry the same. Payload only: a 32-byte header a partition, TCP/IP and control messages come on top.
    """
    n = sum(machine.has_ranks for machine in machines)
    wire = [0] * len(machines)
    for nbytes, owner in parts:
        for m, machine in enumerate(machines):
            if m == owner:
                wire[m] += nbytes * (n - 1 if machine.has_ranks else n)
            elif machine.has_ranks:
                wire[m] += nbytes
    return [WireBytes(nbytes, nbytes) for nbytes in wire]


def ring_wire(nbytes: int, machines: Sequence[Machine]) -> list[WireBytes]:
    """Return what a ring all-reduce of *nbytes* over the nodes with ranks would carry, for comparison."""
    n = sum(machine.has_ranks for machine in machines)
    share = 2 * (n - 1) * nbytes // n
    return [WireBytes(share, share) if machine.has_ranks else WireBytes(0, 0) for machine in machines]


def step_time_s(parts: Iterable[tuple[int, int]], machines: Sequence[Machine]) -> float:
    """Return the model's time of the worst machine (seconds if the rates are known, else bytes at rate 1)."""
    rates = rates_of(machines)
    return max(wire.tx / rate for wire, rate in zip(predict_wire(parts, machines), rates))
