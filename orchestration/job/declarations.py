"""Collects the tensors that all ranks declare (name, shape, dtype, ...) until the ranks agree. Pure.

A *bundle* is what must be declared together: a lone tensor, or all members of a group.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

import msgspec

from ..errors import BpsError, ConfigError, MismatchError, UnsupportedError
from ..messages import TensorSpec
from ..placement.partition import check_codec, check_store, has_state, nbytes_of

#: The fields that all ranks must declare alike. Not the priority: forward orders may differ, and rank 0's counts.
_FIELDS = ("dtype", "shape", "average", "group", "partition_nbytes", "fusion_nbytes", "n_streams", "edition_of", "op",
           "ranks", "codec", "max_rows", "store", "islands")

#: What bundles that are planned together have in common: (edition_of, ranks, whether owners keep state).
_Family = tuple[str, tuple[int, ...], bool]
_OF_ALL_RANKS: _Family = ("", (), False)
#: In the key of tensors that were committed under an earlier scheduler: how they were declared is not known.
_COMMITTED = "committed"


class FailedNames(NamedTuple):
    """Names that will not be summed, the reason, and the ranks to be told now."""

    names: tuple[str, ...]
    error: BpsError
    ranks: tuple[int, ...]


@dataclass
class _Bundle:
    """One lone tensor or group; `by_rank`: what each rank declared, in its order."""

    names: tuple[str, ...]
    by_rank: dict[int, tuple[TensorSpec, ...]] = field(default_factory=dict)
    taken: bool = False

    def is_declared_as(self, members: tuple[TensorSpec, ...]) -> bool:
        """Return whether a rank has declared exactly *members*, which are valid then."""
        return next(iter(self.by_rank.values()), None) == members


class Declarations:
    """What each of *size* ranks has declared, by name."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._bundles: dict[tuple[str, str], _Bundle] = {}
        self._key_of: dict[str, tuple[str, str]] = {}
        self._complete: list[tuple[str, str]] = []  # and not taken yet; may have failed since, or be said again
        self._failed: dict[str, BpsError] = {}
        self._position: dict[str, int] = {}  # of a name in the order of the first rank that declares it
        self._n_positions = 0

    def resume(self, committed: Iterable[str], failed: Mapping[str, BpsError], n_positions: int) -> None:
        """Take over the declarations of an earlier scheduler: all ranks have declared what is *committed*.

        *n_positions* are in use.
        """
        for name in committed:
            key = (_COMMITTED, name)
            self._bundles[key] = _Bundle((name,), taken=True)
            self._key_of[name] = key
        self._failed |= failed
        self._n_positions = n_positions

    def add(self, rank: int, tensors: Sequence[TensorSpec], positions: Sequence[int] = ()) -> list[FailedNames]:
        """Note what *rank* declares; return what fails by it. A repeated declaration counts once.

        *positions*: those of *tensors* in the order of all that the rank has declared, on a repetition.
        """
        failures = []
        before = {spec.name: position for spec, position in zip(tensors, positions)}
        for key, members in _bundles(tensors):
            if rank == _first(members[0]):
                for spec in members:
                    if spec.name not in self._position:
                        self._position[spec.name] = before.get(spec.name, self._n_positions)
                        self._n_positions += spec.name not in before
            failure = self._add_bundle(rank, key, members)
            if failure is not None:
                failures.append(failure)
        return failures

    def _add_bundle(self, rank: int, key: tuple[str, str], members: tuple[TensorSpec, ...]) -> FailedNames | None:
        bundle = self._bundles.get(key)
        if bundle is not None and rank in (members[0].ranks or range(self._size)) and bundle.is_declared_as(members):
            self._note(rank, key, bundle, members)  # with 8,192 ranks, nearly every declaration: no check anew
            return None
        names = tuple(spec.name for spec in members)
        if all(self._key_of.get(name) == (_COMMITTED, name) for name in names):
            return None
        for name in names:
            if name in self._failed:
                return self._fail(rank, key, names, self._failed[name])
        error = _invalid(members, self._size) or self._foreign(rank, members) or self._contradiction(rank, key, members)
        if error is not None:
            return self._fail(rank, key, names, error)
        self._note(rank, key, self._bundles.setdefault(key, _Bundle(names)), members)
        for name in names:
            self._key_of[name] = key
        return None

    def _note(self, rank: int, key: tuple[str, str], bundle: _Bundle, members: tuple[TensorSpec, ...]) -> None:
        bundle.by_rank.setdefault(rank, members)
        if len(bundle.by_rank) == (len(members[0].ranks) or self._size) and not bundle.taken:
            self._complete.append(key)

    def _foreign(self, rank: int, members: tuple[TensorSpec, ...]) -> BpsError | None:
        """Return the error if *rank* declares a tensor of other ranks only."""
        for spec in members:
            if spec.ranks and rank not in spec.ranks:
                return ConfigError(f"tensor {spec.name!r} is of ranks {_show(spec.ranks)} only; rank {rank} declared "
                                   "it")
        return None

    def _contradiction(self, rank: int, key: tuple[str, str], members: tuple[TensorSpec, ...]) -> MismatchError | None:
        """Return how *members* differ from an earlier declaration, by another rank or by this one."""
        for spec in members:
            before = self._first_declaration(spec.name)
            if before is None:
                continue
            other_rank, other = before
            for name in _FIELDS:
                ours, theirs = getattr(spec, name), getattr(other, name)
                if ours != theirs:
                    return MismatchError(f"tensor {spec.name!r}: {name} differs: {_show(theirs)} on rank {other_rank}, "
                                         f"{_show(ours)} on rank {rank}")
        bundle = self._bundles.get(key)
        names = tuple(spec.name for spec in members)
        if bundle is None or bundle.names == names:
            return None
        first = next(iter(bundle.by_rank))
        position, theirs, ours = next(
            (i, a, b) for i, (a, b) in enumerate(zip_longest(bundle.names, names)) if a != b)
        return MismatchError(
            f"group {key[1]!r}: members differ: rank {first} declared {len(bundle.names)}, rank {rank} declared "
            f"{len(names)}; member {position} is {_show(theirs)} on rank {first}, {_show(ours)} on rank {rank} "
            "(a group is declared whole, in one order, once)")

    def _first_declaration(self, name: str) -> tuple[int, TensorSpec] | None:
        """Return the rank that first declared *name*, and its declaration."""
        key = self._key_of.get(name)
        if key is None:
            return None
        for rank, members in self._bundles[key].by_rank.items():
            return rank, next(spec for spec in members if spec.name == name)
        return None

    def _fail(self, rank: int, key: tuple[str, str], names: tuple[str, ...], error: BpsError) -> FailedNames:
        """Give up *names* and all that is bundled with them, except for what was planned already."""
        doomed, ranks = list(names), {rank}
        for touched in sorted({key, *(self._key_of[name] for name in names if name in self._key_of)}):
            bundle = self._bundles.get(touched)
            if bundle is None or bundle.taken:
                continue
            del self._bundles[touched]
            doomed += bundle.names
            ranks |= bundle.by_rank.keys()
            for name in bundle.names:
                del self._key_of[name]
        for name in doomed:
            if name not in self._key_of:
                self._failed.setdefault(name, error)
        return FailedNames(tuple(dict.fromkeys(doomed)), error, tuple(sorted(ranks)))

    def take_complete(self) -> list[TensorSpec]:
        """Return, once, what all of its ranks have declared, in the order and with the priorities of the first rank.

        Editions are planned alone, one family at a time, so that one that no memory is left for can be refused without
        harm to anything else. So are tensors of other ranks, which are placed among their machines, and those whose
        owners keep state, which are placed among machines with ranks.
        """
        found: dict[_Family, list[_Bundle]] = {}
        for key in dict.fromkeys(self._complete):
            if key in self._bundles:
                found.setdefault(_family(self._bundles[key]), []).append(self._bundles[key])
        if not found:
            return []
        taken = _OF_ALL_RANKS if _OF_ALL_RANKS in found else next(iter(found))
        self._complete = [key for key in self._complete if key in self._bundles
                          and _family(self._bundles[key]) != taken]
        complete = sorted(found[taken], key=lambda bundle: self._position[bundle.names[0]])
        for bundle in complete:
            bundle.taken = True
        return [self._agreed(bundle, place) for bundle in complete
                for place in range(len(bundle.by_rank[min(bundle.by_rank)]))]

    def _agreed(self, bundle: _Bundle, place: int) -> TensorSpec:
        """Return what counts of the declarations of the member *place* of *bundle*."""
        spec = bundle.by_rank[min(bundle.by_rank)][place]
        priority = -self._position[spec.name] if spec.priority is None else spec.priority
        direct = all(members[place].direct for members in bundle.by_rank.values())
        return msgspec.structs.replace(spec, priority=priority, direct=direct)

    def give_up(self, names: Sequence[str], error: BpsError) -> None:
        """Let *names*, which were taken, fail for every rank that declares them again."""
        for name in names:
            key = self._key_of.pop(name, None)
            if key is not None:
                self._bundles.pop(key, None)
            self._failed[name] = error

    def forget(self, names: Sequence[str]) -> None:
        """Forget *names*, whose units are retired: a new declaration begins anew."""
        for name in names:
            key = self._key_of.pop(name, None)
            self._position.pop(name, None)
            bundle = self._bundles.get(key) if key is not None else None
            if bundle is not None and key is not None and not any(each in self._key_of for each in bundle.names):
                del self._bundles[key]

    def missing(self, name: str) -> list[int]:
        """Return the ranks that have not declared *name*."""
        key = self._key_of.get(name)
        if key is not None and self._bundles[key].taken:
            return []
        have = self._bundles[key].by_rank if key is not None else {}
        ranks = next(iter(have.values()))[0].ranks if have else ()
        return [rank for rank in ranks or range(self._size) if rank not in have]

    def why_failed(self, name: str) -> BpsError | None:
        """Return why *name* failed, if it did."""
        return self._failed.get(name)


def _bundles(tensors: Sequence[TensorSpec]) -> list[tuple[tuple[str, str], tuple[TensorSpec, ...]]]:
    """Return (key, members) for each lone tensor and group of one declaration, by first member."""
    bundles: dict[tuple[str, str], list[TensorSpec]] = {}
    for spec in tensors:
        key = ("tensor", spec.name) if spec.group is None else ("group", spec.group)
        bundles.setdefault(key, []).append(spec)
    return [(key, tuple(members)) for key, members in bundles.items()]


def _family(bundle: _Bundle) -> _Family:
    """Return the family of which *bundle* is an edition ("" if none), its ranks, and whether its owners keep state."""
    members = next(iter(bundle.by_rank.values()))
    return members[0].edition_of, members[0].ranks, any(has_state(spec) for spec in members)


def _first(spec: TensorSpec) -> int:
    """Return the first of the ranks that declare *spec*."""
    return spec.ranks[0] if spec.ranks else 0


def _invalid(members: tuple[TensorSpec, ...], size: int) -> BpsError | None:
    """Return what is wrong with *members*, whatever other ranks declare."""
    for spec in members:
        if list(spec.ranks) != sorted(set(spec.ranks) & set(range(size))):
            return ConfigError(f"tensor {spec.name!r}: ranks {_show(spec.ranks)} are not ascending ranks of a job of "
                               f"{size}")
        if (spec.ranks, spec.edition_of) != (members[0].ranks, members[0].edition_of):
            return ConfigError(f"group {spec.group!r}: members of one group are of the same ranks; {spec.name!r} is of "
                               f"{_show(spec.ranks)}, {members[0].name!r} of {_show(members[0].ranks)}")
    names = [spec.name for spec in members]
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        return ConfigError(f"tensor {twice!r} is declared twice in one call; give each tensor a name of its own")
    try:
        for spec in members:
            nbytes_of(spec)
            check_codec(spec)
            check_store(spec)
    except (ConfigError, UnsupportedError) as exc:
        return exc
    return None


def _show(value: object) -> str:
    return "nothing" if value is None else str(value) if not isinstance(value, str) else repr(value)
