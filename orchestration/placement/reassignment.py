"""Who sums what after a node is lost: as few keys as possible change hands. Pure."""
from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigError
from .assignment import assign, machine_times_s, owned_by
from .refinement import TOLERANCE
from .shares import Machine, capacities, optimal_shares


def reassign(parts: Sequence[tuple[int, int]], machines: Sequence[Machine], lost: int,
             policy: str = "optimal") -> list[int]:
    """Return the owner of each of *parts*, given as (nbytes, owner), once machine *lost* is gone.

    Owners keep their indices into *machines*, of which none has a bound of memory; *lost* is no owner. What the lost
    machine owned is spread over the others. What they own stays, unless policy "optimal" would then miss the new
    optimum by more than `refinement.TOLERANCE`: whoever owns more than it can carry in the new optimum's time gives up
    whole partitions, the largest first, and never more bytes than it has too many. So at most the lost machine's bytes
    and those that the new optimum forces are moved, and whoever stays above the optimum does so by less than one
    partition.

    Raises
    ------
    ConfigError
        If no machine with ranks is left, *lost* is none of *machines*, or *policy* cannot place anything on the rest.
    """
    if not 0 <= lost < len(machines):
        raise ConfigError(f"machine {lost} cannot be lost: there are {len(machines)}, numbered from 0")
    left = [m for m in range(len(machines)) if m != lost]
    survivors = [machines[m] for m in left]
    if not any(machine.has_ranks for machine in survivors):
        raise ConfigError(f"machine {lost} was the last with ranks: nothing is left to be summed")
    sizes = [nbytes for nbytes, _ in parts]
    place = {m: i for i, m in enumerate(left)}
    owners = [place.get(owner, -1) for _, owner in parts]
    found = _fill_gaps(sizes, owners, survivors, policy)
    nbytes = sum(sizes)
    bound_s = optimal_shares(survivors, nbytes).time_s
    own = owned_by(zip(sizes, found), len(survivors))
    if policy == "optimal" and nbytes and max(machine_times_s(own, survivors)) > bound_s * (1 + TOLERANCE):
        found = _fill_gaps(sizes, _shed(sizes, owners, survivors, bound_s), survivors, policy)
    return [left[owner] for owner in found]


def _fill_gaps(sizes: Sequence[int], owners: Sequence[int], machines: Sequence[Machine], policy: str) -> list[int]:
    """Return *owners* with those of -1 replaced by the placement's choice."""
    gaps = [p for p, owner in enumerate(owners) if owner < 0]
    owned = owned_by(((sizes[p], owner) for p, owner in enumerate(owners) if owner >= 0), len(machines))
    filled = list(owners)
    for p, owner in zip(gaps, assign([sizes[p] for p in gaps], machines, policy, owned, gaps)):
        filled[p] = owner
    return filled


def _shed(sizes: Sequence[int], owners: Sequence[int], machines: Sequence[Machine], time_s: float) -> list[int]:
    """Return *owners* with -1 for what its owner cannot carry within *time_s* beside the rest."""
    own = owned_by(((nbytes, owner) for nbytes, owner in zip(sizes, owners) if owner >= 0), len(machines))
    excess = [have - most for have, most in zip(own, capacities(machines, sum(sizes), time_s))]
    kept = list(owners)
    for p in sorted(range(len(sizes)), key=lambda p: (-sizes[p], p)):
        owner = kept[p]
        if owner >= 0 and sizes[p] <= excess[owner]:
            excess[owner] -= sizes[p]
            kept[p] = -1
    return kept
