"""How owner nodes keep weights, which pushes change and replies return: the settings, checked. Pure.

"add" is asynchronous training as in the BytePS paper (OSDI'20, section 4.4 and theorem 2): workers push what they have
added to the weights and get the newest ones. "nesterov" is the outer step of DiLoCo (Douillard et al., 2023).
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from .codec import WIDTHS
from .errors import ConfigError

Rule = Literal["add", "nesterov"]
Worker = Literal["job", "node", "rank"]
RULES = ("add", "nesterov")
WORKERS = ("job", "node", "rank")


class StoreSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the owners of a tensor keep it, the same on all ranks. The first round sets its value: `pyx/store.h`.

    `rule`: "add" adds a push; with "nesterov" it is an outer gradient, and the weights make a step of Nesterov's
    momentum with `learning_rate` and `momentum`. `worker`: who pushes together: the whole "job", each "node" for its
    ranks, or each "rank". Workers do not wait for each other, except that no reply is given before every other worker's
    push of `staleness` rounds before was applied (-1: no limit).

    With `backups` >= 0 workers step together, but wait for all except that many (`pyx/backups.h`): the weights move by
    the mean of the pushes that came first.
    """

    rule: Rule = "add"
    worker: Worker = "job"
    learning_rate: float = 1.0
    momentum: float = 0.0
    staleness: int = -1
    backups: int = -1


def check(store: StoreSpec) -> None:
    """Raise `ConfigError` if *store* is not valid."""
    if store.rule not in RULES or store.worker not in WORKERS:
        raise ConfigError(f"a store with rule {store.rule!r} for each {store.worker!r}: there are {', '.join(RULES)}, "
                          f"for each {', '.join(WORKERS)}")
    if store.rule == "nesterov" and store.worker != "job":
        raise ConfigError(f"outer steps are made by the whole job together, not by each {store.worker}: worker='job'")
    if not store.learning_rate > 0 or not 0 <= store.momentum < 1:
        raise ConfigError(f"a store with learning_rate={store.learning_rate:g} and momentum={store.momentum:g}: the "
                          "first is above 0, the second at least 0 and below 1")
    if store.staleness < -1:
        raise ConfigError(f"a store with staleness={store.staleness}: it is a number of rounds, or -1 for any")
    if store.backups < -1:
        raise ConfigError(f"a store with backups={store.backups}: it is a number of workers, or -1 for no common steps")
    if store.backups >= 0 and (store.rule != "add" or store.worker == "job" or store.staleness >= 0):
        raise ConfigError(f"a store with backups={store.backups}, rule {store.rule!r}, for each {store.worker}, and "
                          f"staleness={store.staleness}: backups are nodes or ranks whose changes are averaged "
                          "('add'), and each answer is the newest version: leave staleness away")


def has_momentum(store: StoreSpec) -> bool:
    """Return whether owners keep a momentum beside the weights."""
    return store.rule == "nesterov"


def width_of(dtype: str) -> int | None:
    """Return the bytes of an element of *dtype*, weight or momentum, as a store keeps it; None if it cannot."""
    return WIDTHS.get(dtype)


def workers_of(store: StoreSpec, ranks: Sequence[int], nodes: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the ranks of each worker of a tensor of *ranks* (empty: all); *nodes* are the ranks of each node."""
    if store.worker == "job":
        return [tuple(ranks)]
    theirs = [tuple(rank for rank in node if not ranks or rank in ranks) for node in nodes]
    if store.worker == "node":
        return [node for node in theirs if node]
    return [(rank,) for rank in sorted(rank for node in theirs for rank in node)]
