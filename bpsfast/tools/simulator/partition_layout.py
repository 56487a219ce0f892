"""Simulated placement: the machine that sums each partition, and its traffic: in full (every machine) or one per role.

In a *folded* layout one worker and one helper stand for all others of their role: every partition is spread over all
owners by their optimal shares, and one transfer stands for the transfers to all peers. A step of 4,096 machines then
costs as many events as a step of two. `tests/tools/simulator/test_simulated_layout.py` compares folded and full
simulations of small systems. If all owners have one role and partitions are fine, the folded time is within 3 %. It is
too short by 14 % of a step with 8 partitions per owner and layer and by 2 % with 32, because a full simulation also
moves partitions that wait for more urgent layers. With some helpers (0 < k < n) it is up to 20 % too short, because
connections to workers and to helpers get equal turns; folding is then never the default.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...orchestration.errors import ConfigError
from ...orchestration.placement.assignment import assign
from ...orchestration.placement.shares import Machine, optimal_shares
from ...orchestration.priority.send_queue import rank_parts
from .network import Cluster, Load
from .workload import PartitionedWorkload


class LayoutPart(NamedTuple):
    """One partition in the simulation.

    `push`, `result`: the load of each transfer from, or to, a worker that is not the owner. `own`: the load between
    owners, if one stands for several workers; None: its own input is local. `n_inputs` arrivals complete the sum, for
    which the owner reads `sum_nbytes`.
    """

    key: int
    unit: int
    first: int
    nbytes: float
    owner: int
    push: Load
    result: Load
    own: Load | None
    n_inputs: int
    sum_nbytes: float


class Layout(NamedTuple):
    """Simulated machines and their partitions; `order` as in `rank_parts`. `fold`: workers that one stands for."""

    machines: tuple[Machine, ...]
    parts: tuple[LayoutPart, ...]
    parts_of_unit: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    fold: int = 1

    @property
    def n_workers(self) -> int:
        """Number of simulated workers."""
        return sum(machine.has_ranks for machine in self.machines)


def full(cluster: Cluster, plan: PartitionedWorkload, policy: str, interleave: bool = False) -> Layout:
    """Place every partition on one machine, as the scheduler does; *interleave*: as if declared one by one."""
    n = cluster.n_workers
    planned = [(part, unit) for unit in plan.units for part in unit.parts]
    keys = [(unit.unit << 16) | index for unit in plan.units for index in range(len(unit.parts))]
    sizes = [part.nbytes for part, _ in planned]
    owners = (_interleaved if interleave else assign)(sizes, cluster.machines, policy, keys=keys)
    parts = []
    for (part, unit), owner in zip(planned, owners):
        load = Load(part.nbytes, part.nbytes)
        parts.append(LayoutPart(part.part, unit.unit, unit.parts[0].part, part.nbytes, owner, load, load, None, n,
                                n * part.nbytes))
    return Layout(cluster.machines, tuple(parts), _by_unit(parts, len(plan.units)), tuple(rank_parts(plan.units)))


def _interleaved(sizes: Sequence[int], machines: Sequence[Machine], policy: str, keys: Sequence[int]) -> list[int]:
    owned = [0] * len(machines)
    owners = []
    for nbytes, key in zip(sizes, keys):
        owners += assign([nbytes], machines, policy, owned=owned, keys=[key])
        owned[owners[-1]] += nbytes
    return owners


def folded(cluster: Cluster, plan: PartitionedWorkload, policy: str) -> Layout:
    """Spread every partition over all owners, with one machine for each role.

    Raises `ConfigError` if cards differ within a role, or the policy does not spread bytes by shares.
    """
    if not cluster.is_uniform:
        raise ConfigError("only a cluster whose workers are all alike, and its helpers too, can be folded; "
                          "simulate it in full")
    n, k = cluster.n_workers, cluster.n_helpers
    worker_share, helper_share = _shares(cluster, policy)
    order = rank_parts(plan.units)
    parts: list[LayoutPart] = []
    ranks: list[int] = []
    for unit in plan.units:
        for part in unit.parts:
            for owner, share in ((0, worker_share), (1, helper_share)):
                nbytes = share * part.nbytes
                if not nbytes:
                    continue
                if owner == 0:
                    push = result = _to_all(n - 1, n - 1, share, nbytes)
                    own = push if n > 1 else None
                else:
                    push, result, own = _to_all(k, n, share, nbytes), _to_all(n, k, share, nbytes), None
                parts.append(LayoutPart(len(parts), unit.unit, unit.parts[0].part, nbytes, owner, push, result, own, 1,
                                        n * nbytes))
                ranks.append(order[part.part])
    # the first partition of a unit determines its urgency, and is found by its key
    firsts = {unit: min(p.key for p in parts if p.unit == unit) for unit in {p.unit for p in parts}}
    parts = [part._replace(first=firsts[part.unit]) for part in parts]
    machines = (cluster.machines[0], *cluster.machines[n:n + 1])  # those with ranks first
    return Layout(machines, tuple(parts), _by_unit(parts, len(plan.units)), tuple(ranks), n)


def _to_all(n_tx: int, n_rx: int, share: float, nbytes: float) -> Load:
    """Return the load of *n_tx* transfers out and *n_rx* in; a share counts as that share of a message.

    A partition that is not folded is one message to one owner.
    """
    return Load(n_tx * nbytes, n_rx * nbytes, n_tx * share, n_rx * share)


def is_symmetric(cluster: Cluster, policy: str) -> bool:
    """Tell whether folding changes only the grain: equal cards, and owners of one role."""
    if not cluster.is_uniform or policy not in ("optimal", "colocated", "ps"):
        return False
    return 0.0 in _shares(cluster, policy)


def _shares(cluster: Cluster, policy: str) -> tuple[float, float]:
    """Return the shares of all bytes that one worker and one helper own."""
    n, k = cluster.n_workers, cluster.n_helpers
    if policy == "optimal":
        owned = optimal_shares(cluster.machines, 1.0).owned
        return owned[0], owned[n] if k else 0.0
    if policy == "colocated":
        return 1 / n, 0.0
    if policy == "ps":
        if not k:
            raise ConfigError("placement ps puts all sums on helper nodes, but the cluster has none; add helpers or "
                              "use placement optimal")
        return 0.0, 1 / k
    raise ConfigError(f"placement {policy!r} does not spread bytes by shares and cannot be folded; simulate it in full")


def _by_unit(parts: Sequence[LayoutPart], n_units: int) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in range(n_units)]
    for index, part in enumerate(parts):
        found[part.unit].append(index)
    return tuple(tuple(indexes) for indexes in found)
