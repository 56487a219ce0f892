"""Moves partitions between owners: to newcomers, or away from a lost machine, as few bytes as that takes. Pure."""
from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigError
from .assignment import assign, interleaved, machine_times_s, owned_by, times_of
from .layout import TOLERANCE
from .shares import Machine, capacities, optimal_shares


def shared(sizes: Sequence[int], owners: Sequence[int], candidates_of: Sequence[tuple[int, ...]],
           machines: Sequence[Machine], owned: Sequence[int], policy: str = "optimal") -> list[int]:
    """Return the owner of each partition once newcomers have got their share; most keep their owner.

    Again and again the machine that is done last gives away the largest partition by which it is done sooner, to a
    newcomer that is still done sooner than that. With "optimal" until the machine that is done last has none to give,
    because then the step is not shorter; else until no machine has one. With "ps" machines with ranks first give away
    all that they own; with "colocated" nothing moves.

    *sizes*, *owners*, *candidates_of*: of each partition that can move: its bytes, its owner, the newcomers that can
    own it. *machines*, *owned*: all nodes in node order, and the bytes that each owns, these partitions included.
    """
    found = list(owners)
    if policy == "colocated":
        return found
    sharing = _Sharing(sizes, found, candidates_of, machines, owned)
    if policy == "ps":
        for position in sorted(range(len(sizes)), key=lambda p: (-sizes[p], p)):
            if machines[found[position]].has_ranks:
                sharing.move(position, sharing.best(position))
    sharing.balance(until_last=policy == "optimal")
    return _spread(sizes, owners, candidates_of, found)


class _Sharing:
    """The state of `shared`: `found` changes, and with it what each machine owns, and when it is done."""

    def __init__(self, sizes: Sequence[int], found: list[int], candidates_of: Sequence[tuple[int, ...]],
                 machines: Sequence[Machine], owned: Sequence[int]) -> None:
        self._sizes = sizes
        self._found = found
        self._candidates_of = candidates_of
        self._own = list(owned)
        self._time_of = times_of(machines, sum(owned))
        newcomers = {node for candidates in candidates_of for node in candidates}
        #: By owner: what it can give, by size and candidates; of equal ones the last is given first.
        self._kinds: dict[int, dict[tuple[int, tuple[int, ...]], list[int]]] = {}
        for position, owner in enumerate(found):
            if owner not in newcomers:
                kind = sizes[position], candidates_of[position]
                self._kinds.setdefault(owner, {}).setdefault(kind, []).append(position)

    def best(self, position: int) -> int:
        """Return the newcomer that would be done first with partition *position*."""
        return self._best(self._sizes[position], self._candidates_of[position])[1]

    def move(self, position: int, to: int) -> None:
        """Give partition *position* to newcomer *to*, unless that has no memory for it."""
        nbytes, owner = self._sizes[position], self._found[position]
        if self._time_of(to, self._own[to] + nbytes) == float("inf"):
            return
        self._own[owner] -= nbytes
        self._own[to] += nbytes
        self._found[position] = to
        self._kinds[owner][nbytes, self._candidates_of[position]].remove(position)

    def balance(self, until_last: bool) -> None:
        """Move partitions while that makes the last machine (or, not *until_last*, any that gives) faster."""
        givers = {owner for owner, kinds in self._kinds.items() if any(kinds.values())}
        while givers:
            among = range(len(self._own)) if until_last else sorted(givers)
            last = max(among, key=lambda m: (self._time_of(m, self._own[m]), -m))
            if last not in givers or not self._give_one(last):
                if until_last:
                    return
                givers.discard(last)

    def _give_one(self, owner: int) -> bool:
        now_s = self._time_of(owner, self._own[owner])
        for (nbytes, candidates), positions in sorted(self._kinds[owner].items(), reverse=True):
            if not positions or self._time_of(owner, self._own[owner] - nbytes) >= now_s:
                continue
            then_s, to = self._best(nbytes, candidates)
            if then_s < now_s:
                self.move(positions[-1], to)
                return True
        return False

    def _best(self, nbytes: int, candidates: tuple[int, ...]) -> tuple[float, int]:
        then_s, _, to = min((self._time_of(m, self._own[m] + nbytes), self._own[m], m) for m in candidates)
        return then_s, to


def _spread(sizes: Sequence[int], owners: Sequence[int], candidates_of: Sequence[tuple[int, ...]],
            found: Sequence[int]) -> list[int]:
    """Return *found* exchanged among partitions that are alike, so that each owner has its share of every stretch."""
    kinds: dict[tuple[object, ...], int] = {}
    kind_of = [kinds.setdefault((owners[p], sizes[p], candidates_of[p]), len(kinds)) for p in range(len(sizes))]
    return interleaved(kind_of, found)


def reassign(parts: Sequence[tuple[int, int]], machines: Sequence[Machine], lost: int,
             policy: str = "optimal") -> list[int]:
    """Return the owner of each of *parts*, given as (nbytes, owner), once machine *lost* is gone.

    Owners keep their indices into *machines*, of which none has a bound of memory; *lost* is no owner. What the lost
    machine owned is spread over the others. What they own stays, unless policy "optimal" would then miss the new
    optimum by more than `layout.TOLERANCE`: a machine that owns more than it can carry in the new optimum's time gives
    up whole partitions, the largest first, and never more bytes than it has too many. So at most the lost machine's
    bytes and those that the new optimum forces are moved, and a machine stays above the optimum by less than one
    partition. Raises `ConfigError` if no machine with ranks is left, *lost* is none of *machines*, or *policy* cannot
    place anything on the rest.
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
