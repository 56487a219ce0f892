"""Collects the tensors that all ranks declare (name, shape, dtype, ...) until the ranks agree. Pure.

A *bundle* is what must be declared together: a lone tensor, or all members of a group. A *list* is what one call
declares. With thousands of ranks nearly all lists are equal: the ranks are counted for a list, not for each bundle.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

import msgspec

from ..errors import BpsError, ConfigError, MismatchError, UnsupportedError
from ..long_lists import digest_of
from ..messages import TensorSpec
from ..placement.partition import check_codec, check_store, has_state, nbytes_of

#: The fields that all ranks must declare alike. Not the priority: forward orders may differ, and rank 0's counts.
_FIELDS = ("dtype", "shape", "average", "group", "partition_nbytes", "fusion_nbytes", "n_streams", "edition_of", "op",
           "ranks", "codec", "max_rows", "store", "islands", "separate")

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


#: Bundles: (key, members).
_Bundles = Sequence[tuple[tuple[str, str], tuple[TensorSpec, ...]]]


class _Overlap:
    """Lists that have bundles in common, directly or by way of others; their ranks, and `n`, those of each added up."""

    def __init__(self, only: _List) -> None:
        self.lists = [only]
        self.ranks: set[int] = set()
        self.n = 0


class _List:
    """Bundles of the same ranks, *of*, that were declared in one call, and the ranks that have made that call.

    *call*: the digest of all that it declared. `first`: the lowest of the ranks that have made it.
    """

    def __init__(self, call: bytes, of: Sequence[int], first: int = -1) -> None:
        self.call, self.of, self.first = call, of, first
        self.ranks: set[int] = set()
        self.bundles: list[tuple[str, str]] = []
        self.overlap = _Overlap(self)

    def add(self, rank: int) -> None:
        """Note that *rank*, which had not, has declared this list."""
        self.ranks.add(rank)
        self.first = rank if self.first < 0 else min(self.first, rank)
        self.overlap.ranks.add(rank)
        self.overlap.n += 1

    def join(self, other: _List) -> None:
        """Note that *other* has a bundle of this list."""
        less, more = sorted((self.overlap, other.overlap), key=lambda each: len(each.lists))
        if less is more:
            return
        for each in less.lists:
            each.overlap = more
        more.lists += less.lists
        more.ranks |= less.ranks
        more.n += less.n


class _Call(NamedTuple):
    """What a call has led to: its lists, and the names of each bundle that failed, with the reason."""

    lists: list[_List]
    failed: list[tuple[tuple[str, ...], BpsError]]


@dataclass
class _Bundle:
    """One lone tensor or group; `declared`: its members as each list has them, and that list, in order of arrival."""

    names: tuple[str, ...]
    declared: list[tuple[tuple[TensorSpec, ...], _List]] = field(default_factory=list)
    taken: bool = False

    @property
    def first(self) -> tuple[int, tuple[TensorSpec, ...]] | None:
        """The lowest rank of the list that declared it first, and its members there; None: it is not known."""
        return (self.declared[0][1].first, self.declared[0][0]) if self.declared else None

    @property
    def ranks(self) -> set[int]:
        """The ranks that have declared it."""
        return set().union(*(each.ranks for _, each in self.declared))

    def is_declared_as(self, members: tuple[TensorSpec, ...]) -> bool:
        """Return whether a rank has declared exactly *members*, which are valid then."""
        return bool(self.declared) and self.declared[0][0] == members

    def add(self, rank: int, members: tuple[TensorSpec, ...], new: _List) -> bool:
        """Add this bundle, with *members*, to the list *new*, which *rank* alone has declared.

        Returns False, and does nothing, if *rank* had declared it before.
        """
        if self.taken:
            return False
        if self.declared:
            lists = self.declared[0][1].overlap  # of all that have declared it
            if rank in lists.ranks and (new.overlap is not lists or len(lists.lists) > 1) and any(
                    rank in each.ranks for _, each in self.declared):
                return False
            self.declared[0][1].join(new)
        self.declared.append((members, new))
        return True

    def take(self) -> None:
        """Note that it is planned: who has declared it is of no matter any more, except for the first."""
        self.taken = True
        members, first = self.declared[0]
        self.declared = [(members, _List(b"", first.of, first.first))]


class Declarations:
    """What each of *size* ranks has declared, by name. Those in *lost*, which changes, need not."""

    def __init__(self, size: int, lost: AbstractSet[int] = frozenset()) -> None:
        self._size = size
        self._lost = lost
        self._bundles: dict[tuple[str, str], _Bundle] = {}
        self._key_of: dict[str, tuple[str, str]] = {}
        self._calls: dict[bytes, _Call] = {}  # each bundle of which has failed, or is to be declared by others, too
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

    def add(self, rank: int, tensors: Sequence[TensorSpec], positions: Sequence[int] = (), digest: bytes = b""
            ) -> list[FailedNames]:
        """Note what *rank* declares; return what fails by it. A repeated declaration counts once.

        *positions*: those of *tensors* in the order of all that the rank has declared, on a repetition. *digest*: what
        identifies *tensors* (`long_lists`), if it is known.
        """
        call = digest or digest_of(tensors)
        known = self._calls.get(call)
        places = dict(zip((spec.name for spec in tensors), positions))
        if known is None or any(rank not in each.of or (rank in each.overlap.ranks and rank not in each.ranks)
                                for each in known.lists):
            return self._add(rank, call, _bundles(tensors), places)
        if any(rank == self._first(each.of) for each in known.lists):
            self._number(rank, _bundles(tensors), places)
        for each in known.lists:
            if rank not in each.ranks:
                each.add(rank)
                self._note_complete(each)
        return [FailedNames(names, error, (rank,)) for names, error in known.failed]

    def _add(self, rank: int, call: bytes, bundles: _Bundles, positions: Mapping[str, int]) -> list[FailedNames]:
        """Note *bundles*, which *rank* declares in *call*."""
        self._number(rank, bundles, positions)
        lists: dict[tuple[int, ...], _List] = {}
        failed: list[tuple[tuple[str, ...], BpsError]] = []
        failures = []
        for key, members in bundles:
            ranks = members[0].ranks
            if ranks not in lists:
                lists[ranks] = _List(call, ranks or range(self._size))
                lists[ranks].add(rank)
            failure = self._add_bundle(rank, key, members, lists[ranks])
            if failure is not None:
                failures.append(failure)
                failed.append((tuple(dict.fromkeys(spec.name for spec in members)), failure.error))
        for each in lists.values():
            self._note_complete(each)
        n_names = sum(len(members) for _, members in bundles)
        if (sum(len(each.bundles) for each in lists.values()) + len(failed) == len(bundles)
                and len({spec.name for _, members in bundles for spec in members}) == n_names):
            self._calls[call] = _Call([each for each in lists.values() if each.bundles], failed)
        return failures

    def _number(self, rank: int, bundles: _Bundles, positions: Mapping[str, int]) -> None:
        """Give the tensors whose first rank is *rank* their *positions*, or the next ones."""
        for _, members in bundles:
            if rank == self._first(members[0].ranks or range(self._size)):
                for spec in members:
                    if spec.name not in self._position:
                        self._position[spec.name] = positions.get(spec.name, self._n_positions)
                        self._n_positions += spec.name not in positions

    def _add_bundle(self, rank: int, key: tuple[str, str], members: tuple[TensorSpec, ...], new: _List
                    ) -> FailedNames | None:
        """Add a bundle, which *rank* declares, to the list *new*; or return why it fails."""
        bundle = self._bundles.get(key)
        names = tuple(spec.name for spec in members)
        if bundle is None or rank not in new.of or not bundle.is_declared_as(members):
            if all(self._key_of.get(name) == (_COMMITTED, name) for name in names):
                return None
            for name in names:
                if name in self._failed:
                    return self._fail(rank, key, names, self._failed[name])
            error = (_invalid(members, self._size) or self._foreign(rank, members)
                     or self._contradiction(rank, key, members))
            if error is not None:
                return self._fail(rank, key, names, error)
            bundle = self._bundles.setdefault(key, _Bundle(names))
            for name in names:
                self._key_of[name] = key
        if bundle.add(rank, members, new):
            new.bundles.append(key)
        return None

    def _note_complete(self, changed: _List) -> None:
        """Note which bundles of the list *changed* all their ranks have declared now."""
        n = len(changed.of) - (sum(rank in self._lost for rank in changed.of) if self._lost else 0)
        if changed.overlap.n < n or n == 0:  # all of its ranks are lost
            return
        counts: dict[tuple[_List, ...], int] = {}
        for key in changed.bundles:
            bundle = self._bundles.get(key)
            if bundle is None or bundle.taken:
                continue
            lists = tuple(each for _, each in bundle.declared)
            if lists not in counts:
                counts[lists] = len((lists[0].ranks if len(lists) == 1 else bundle.ranks) - self._lost)
            if counts[lists] == n:
                self._complete.append(key)

    def rank_lost(self) -> None:
        """Look again for what all ranks have declared that are not lost: one more is."""
        lists = {id(each): each for bundle in self._bundles.values() if not bundle.taken for _, each in bundle.declared}
        for each in lists.values():
            self._note_complete(each)

    def _first(self, ranks: Sequence[int]) -> int:
        """Return the first of *ranks*, which declare a tensor, that is not lost."""
        return next((rank for rank in ranks if rank not in self._lost), -1)

    def _position_of(self, name: str) -> int:
        """Return the position of *name*; the next one if the rank whose order counts was lost before it had one."""
        if name not in self._position:
            self._position[name] = self._n_positions
            self._n_positions += 1
        return self._position[name]

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
        if bundle is None or bundle.names == names or bundle.first is None:
            return None
        first = bundle.first[0]
        position, theirs, ours = next(
            (i, a, b) for i, (a, b) in enumerate(zip_longest(bundle.names, names)) if a != b)
        return MismatchError(
            f"group {key[1]!r}: members differ: rank {first} declared {len(bundle.names)}, rank {rank} declared "
            f"{len(names)}; member {position} is {_show(theirs)} on rank {first}, {_show(ours)} on rank {rank} "
            "(a group is declared whole, in one order, once)")

    def _first_declaration(self, name: str) -> tuple[int, TensorSpec] | None:
        """Return the rank that first declared *name*, and its declaration."""
        key = self._key_of.get(name)
        first = self._bundles[key].first if key is not None else None
        if first is None:
            return None
        rank, members = first
        return rank, next(spec for spec in members if spec.name == name)

    def _fail(self, rank: int, key: tuple[str, str], names: tuple[str, ...], error: BpsError) -> FailedNames:
        """Give up *names* and all that is bundled with them, except for what was planned already."""
        doomed, ranks = list(names), {rank}
        for touched in sorted({key, *(self._key_of[name] for name in names if name in self._key_of)}):
            bundle = self._bundles.get(touched)
            if bundle is None or bundle.taken:
                continue
            self._drop(touched)
            doomed += bundle.names
            ranks |= bundle.ranks
            for name in bundle.names:
                del self._key_of[name]
        for name in doomed:
            if name not in self._key_of:
                self._failed.setdefault(name, error)
        return FailedNames(tuple(dict.fromkeys(doomed)), error, tuple(sorted(ranks)))

    def _drop(self, key: tuple[str, str]) -> None:
        """Forget a bundle."""
        self._close(self._bundles.pop(key))

    def _close(self, bundle: _Bundle) -> None:
        """See to it that *bundle* is looked at when it is declared again."""
        for _, each in bundle.declared:
            self._calls.pop(each.call, None)

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
        complete = sorted(found[taken], key=lambda bundle: self._position_of(bundle.names[0]))
        agreed = [spec for bundle in complete for spec in self._agreed(bundle)]
        for bundle in complete:
            self._close(bundle)
            bundle.take()
        return agreed

    def _agreed(self, bundle: _Bundle) -> list[TensorSpec]:
        """Return what counts of the declarations of *bundle*: those of its lowest rank, with their priorities."""
        members = min(bundle.declared, key=lambda each: each[1].first)[0]
        agreed = []
        for place, spec in enumerate(members):
            priority = -self._position_of(spec.name) if spec.priority is None else spec.priority
            direct = all(theirs[place].direct for theirs, _ in bundle.declared)
            if (priority, direct) != (spec.priority, spec.direct):
                spec = msgspec.structs.replace(spec, priority=priority, direct=direct)
            agreed.append(spec)
        return agreed

    def give_up(self, names: Sequence[str], error: BpsError) -> None:
        """Let *names*, which were taken, fail for every rank that declares them again."""
        for name in names:
            key = self._key_of.pop(name, None)
            if key is not None and key in self._bundles:
                self._drop(key)
            self._failed[name] = error

    def forget(self, names: Sequence[str]) -> None:
        """Forget *names*, whose units are retired: a new declaration begins anew."""
        for name in names:
            key = self._key_of.pop(name, None)
            self._position.pop(name, None)
            bundle = self._bundles.get(key) if key is not None else None
            if bundle is not None and key is not None and not any(each in self._key_of for each in bundle.names):
                self._drop(key)

    def missing(self, name: str) -> list[int]:
        """Return the ranks that have not declared *name*."""
        key = self._key_of.get(name)
        if key is not None and self._bundles[key].taken:
            return []
        first = self._bundles[key].first if key is not None else None
        have = self._bundles[key].ranks if key is not None else set()
        return [rank for rank in (first[1][0].ranks if first else ()) or range(self._size)
                if rank not in have and rank not in self._lost]

    def why_failed(self, name: str) -> BpsError | None:
        """Return why *name* failed, if it did."""
        return self._failed.get(name)


def _bundles(tensors: Sequence[TensorSpec]) -> _Bundles:
    """Return (key, members) for each lone tensor and group of one declaration, by first member."""
    bundles: dict[tuple[str, str], list[TensorSpec]] = {}
    for spec in tensors:
        key = ("tensor", spec.name) if spec.group is None else ("group", spec.group)
        bundles.setdefault(key, []).append(spec)
    return [(key, tuple(members)) for key, members in bundles.items()]


def _family(bundle: _Bundle) -> _Family:
    """Return the family of which *bundle* is an edition ("" if none), its ranks, and whether its owners keep state."""
    members = bundle.declared[0][0]
    return members[0].edition_of, members[0].ranks, any(has_state(spec) for spec in members)


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
