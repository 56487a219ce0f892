"""The best that any order of partitions reaches, by exhaustive search: the oracle of the scheduling theorem's tests.

It shares no code with the queues or the simulator. Times and bytes are integers; `links` is the time of a byte on the
single link of all-reduces, or on the two links of pushes and pulls. An iteration lasts from the start of a backward
pass to the end of the next forward pass, which needs all sums, so iterations do not overlap.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple


class Chain(NamedTuple):
    """Layers in forward order: times of forward and backward, and bytes (above zero) of gradients."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def ready(self) -> tuple[int, ...]:
        """Return the time at which each layer's gradients are ready."""
        return tuple(accumulate(reversed(self.backward)))[::-1]

    @property
    def tails(self) -> tuple[int, ...]:
        """Return the compute time from the start of each layer's forward to the end."""
        return tuple(accumulate(reversed(self.forward)))[::-1]


def least(chain: Chain, links: Sequence[int]) -> int:
    """Return a lower bound of all schedules with any partitions; with infinitely small ones it is the optimum.

    The sums of layers 0..j cannot begin before layer j's gradients are ready, they use each link for all their bytes,
    and after the last of them the forward passes of layer j and later still have to run.
    """
    computing = sum(chain.backward) + sum(chain.forward)
    return max(computing, *(ready + max(links) * nbytes + tail for ready, nbytes, tail in zip(
        chain.ready, accumulate(chain.sizes), chain.tails)))


def best(chain: Chain, part: int, links: Sequence[int], known: int) -> int:
    """Return the least iteration time over all orders of partitions of *part* bytes; *known* is an upper bound."""
    within = within_one_link if len(links) == 1 else within_two_links
    while known > least(chain, links) and within(chain, part, links, known - 1):
        known -= 1
    return known


def within_one_link(chain: Chain, part: int, links: Sequence[int], limit: int, prune: bool = True) -> bool:
    """Return whether any order ends an iteration by *limit*. *prune*: skip orders that must be late by `least`.

    Whenever the link is free it takes a partition of any ready layer, or waits for the next layer.
    """
    ready, due = chain.ready, [limit - tail for tail in chain.tails]
    layers = range(len(ready))
    part_s = part * links[0]

    @cache
    def ends(now: int, left: tuple[int, ...]) -> bool:
        if not any(left):
            return True
        if prune and any(left[i] and max(now, ready[i]) + part_s * sum(left[:i + 1]) > due[i] for i in layers):
            return False
        if any(left[i] and ready[i] <= now and now + part_s <= due[i] and ends(now + part_s, _changed(left, i, -1))
               for i in layers):
            return True
        later = [ready[i] for i in layers if left[i] and ready[i] > now]
        return bool(later) and ends(min(later), left)

    return sum(chain.backward) + sum(chain.forward) <= limit and ends(0, _parts(chain, part))


def within_two_links(chain: Chain, part: int, links: Sequence[int], limit: int, prune: bool = True) -> bool:
    """The same for partitions that are pushed over one link and then pulled over the other.

    At every event, each free link takes any possible partition, or waits for the next event.
    """
    ready, due = chain.ready, [limit - tail for tail in chain.tails]
    layers = range(len(ready))
    push_s, pull_s = part * links[0], part * links[1]
    nothing = -1, 0

    def is_late(now: int, left: tuple[int, ...], pushing: tuple[int, int], pushed: tuple[int, ...],
                pull_free: int) -> bool:
        to_push = to_pull = 0
        for i in layers:
            to_push += push_s * left[i]
            to_pull += pull_s * (left[i] + pushed[i] + (pushing[0] == i))
            if to_pull and max(now, pull_free) + to_pull > due[i]:
                return True
            if left[i] and max(now, pushing[1], ready[i]) + to_push + pull_s > due[i]:
                return True
        return False

    @cache
    def ends(now: int, left: tuple[int, ...], pushing: tuple[int, int], pushed: tuple[int, ...],
             pull_free: int) -> bool:
        if pushing != nothing and pushing[1] == now:
            pushing, pushed = nothing, _changed(pushed, pushing[0], +1)
        if pushing == nothing and not any(left) and not any(pushed):
            return True
        if prune and is_late(now, left, pushing, pushed, pull_free):
            return False
        may_push = [i for i in layers if left[i] and ready[i] <= now] if pushing == nothing else []
        may_pull = [i for i in layers if pushed[i] and now + pull_s <= due[i]] if pull_free <= now else []
        for i in (*may_push, -1):
            for j in (*may_pull, -1):
                next_pushing = (i, now + push_s) if i >= 0 else pushing
                next_free = now + pull_s if j >= 0 else pull_free
                then = [time for time in (next_pushing[1], next_free, *ready) if time > now]
                if then and ends(min(then), _changed(left, i, -1), next_pushing, _changed(pushed, j, -1), next_free):
                    return True
        return False

    return sum(chain.backward) + sum(chain.forward) <= limit and ends(0, _parts(chain, part), nothing,
                                                                      (0,) * len(ready), 0)


def _parts(chain: Chain, part: int) -> tuple[int, ...]:
    assert all(size % part == 0 for size in chain.sizes), "the search knows whole partitions only"
    return tuple(size // part for size in chain.sizes)


def _changed(counts: tuple[int, ...], index: int, by: int) -> tuple[int, ...]:
    """Return *counts* with the one at *index* changed, or unchanged for index -1."""
    return counts if index < 0 else (*counts[:index], counts[index] + by, *counts[index + 1:])


class Op(NamedTuple):
    """An uninterruptible operation of an accelerator, after other ops and the sum of tensor `needs` (-1: none).

    `seconds`: above zero. When it ends the gradient of `makes` is ready. `ready`: earliest start.
    """

    seconds: int
    after: tuple[int, ...] = ()
    needs: int = -1
    makes: int = -1
    ready: int = 0


def best_of_graph(ops: Sequence[Op], sizes: Sequence[int], known: int) -> int:
    """Return the earliest end of all *ops*, one at a time in any order, with all-reduces in any order of single bytes.

    *known* is an upper bound. The accelerator and the link may also wait although they could work.
    """
    while _graph_within(ops, tuple(sizes), known - 1):
        known -= 1
    return known


def _graph_within(ops: Sequence[Op], sizes: tuple[int, ...], limit: int) -> bool:
    tensors = range(len(sizes))
    nothing = -1, 0

    @cache
    def ends(now: int, over: frozenset[int], running: tuple[int, int], left: tuple[int, ...],
             reducing: tuple[int, int]) -> bool:
        if running != nothing and running[1] == now:
            over, running = over | {running[0]}, nothing
        if reducing != nothing and reducing[1] == now:
            reducing = nothing
        if len(over) == len(ops):
            return True
        to_run = sum(op.seconds for i, op in enumerate(ops) if i not in over and i != running[0])
        if max(now, running[1]) + to_run > limit:
            return False
        made = {ops[i].makes for i in over}
        summed = {-1, *(i for i in tensors if not left[i] and reducing[0] != i)}
        may_run = [i for i, op in enumerate(ops) if i not in over and op.ready <= now and over.issuperset(op.after)
                   and op.needs in summed] if running == nothing else []
        may_reduce = [i for i in tensors if left[i] and i in made] if reducing == nothing else []
        for i in (*may_run, -1):
            for j in (*may_reduce, -1):
                next_running = (i, now + ops[i].seconds) if i >= 0 else running
                next_reducing = (j, now + 1) if j >= 0 else reducing
                then = [time for time in (next_running[1], next_reducing[1], *(op.ready for op in ops)) if time > now]
                if then and ends(min(then), over, next_running, _changed(left, j, -1), next_reducing):
                    return True
        return False

    return ends(0, frozenset(), nothing, sizes, nothing)
