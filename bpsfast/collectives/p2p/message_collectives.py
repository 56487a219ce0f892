"""Gather, scatter and all-to-all of a group, made of messages. Sizes may differ and may be zero.

In step k a rank sends to the k-th rank after it and receives from the k-th before it, so that the load is even
(pairwise exchange: Thakur et al., IJHPCA 2005, section 3.4); a few steps are under way at a time. All ranks of a
channel make the same calls in the same order. A call blocks for at most *timeout_s*.
"""
from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...orchestration.errors import MismatchError
from .endpoint import P2PEndpoint
from .transfer import Transfer

#: Messages of one call under way in each direction.
N_UNDER_WAY = 4


class Memory(NamedTuple):
    """*nbytes* at *address*."""

    address: int
    nbytes: int


class _Step(NamedTuple):
    """One message: *is_send* to, else from, *rank*."""

    is_send: bool
    rank: int
    memory: Memory


def all_to_all(post: P2PEndpoint, channel: int, ranks: Sequence[int], me: int, sources: Sequence[Memory],
               destinations: Sequence[Memory], owner: object, timeout_s: float, tag: int = 0) -> None:
    """Send ``sources[i]`` to ``ranks[i]``, receive ``destinations[i]`` from it; *me*: this rank's place in *ranks*.

    *owner* keeps the memory alive, also if this raises while messages are under way. Raises `MismatchError` if the
    lists have not one entry for each rank, or a rank has sent another size than is expected here. Raises `StallError`
    or `PeerLostError` if a rank does not take part in time, or is gone.
    """
    n = len(ranks)
    _check(n, me, sources=sources, destinations=destinations)
    steps = []
    for k in range(n):
        before, after = (me - k) % n, (me + k) % n
        steps += [_Step(False, ranks[before], destinations[before]), _Step(True, ranks[after], sources[after])]
    _carry_out(post, channel, tag, steps, owner, timeout_s)


def gather(post: P2PEndpoint, channel: int, ranks: Sequence[int], me: int, root: int, source: Memory,
           destinations: Sequence[Memory], owner: object, timeout_s: float, tag: int = 0) -> None:
    """Bring each rank's *source* to the root's ``destinations[i]`` (ignored elsewhere), else as `all_to_all`.

    On other ranks than the root a small message may still be under way at the end; *source* may be written again.
    """
    steps = [_Step(True, ranks[root], source)]
    if me == root:
        n = len(ranks)
        _check(n, me, destinations=destinations)
        order = [(me + k) % n for k in range(n)]
        steps += [_Step(False, ranks[each], destinations[each]) for each in order]
    _carry_out(post, channel, tag, steps, owner, timeout_s)


def scatter(post: P2PEndpoint, channel: int, ranks: Sequence[int], me: int, root: int, sources: Sequence[Memory],
            destination: Memory, owner: object, timeout_s: float, tag: int = 0) -> None:
    """Bring the root's ``sources[i]`` (ignored elsewhere) to each rank's *destination*, else as `all_to_all`.
    """
    steps = [_Step(False, ranks[root], destination)]
    if me == root:
        n = len(ranks)
        _check(n, me, sources=sources)
        order = [(me + k) % n for k in range(n)]
        steps += [_Step(True, ranks[each], sources[each]) for each in order]
    _carry_out(post, channel, tag, steps, owner, timeout_s)


def _check(n: int, me: int, **lists: Sequence[Memory]) -> None:
    for name, given in lists.items():
        if len(given) != n:
            raise MismatchError(f"{name} has {len(given)} entries for a group of {n} ranks")
    if not 0 <= me < n:
        raise MismatchError(f"me={me} is no place in a group of {n} ranks")


def _carry_out(post: P2PEndpoint, channel: int, tag: int, steps: Iterable[_Step], owner: object, timeout_s: float
               ) -> None:
    """Begin *steps* in order, a few at a time in each direction, and wait for all of them."""
    deadline = time.monotonic() + timeout_s
    under_way: dict[bool, deque[tuple[_Step, Transfer]]] = {True: deque(), False: deque()}
    try:
        for step in steps:
            queue = under_way[step.is_send]
            if len(queue) == N_UNDER_WAY:
                _finish(*queue.popleft(), deadline)
            begin = post.send if step.is_send else post.receive
            queue.append((step, begin(channel, step.rank, tag, step.memory.address, step.memory.nbytes, owner)))
        for queue in under_way.values():
            while queue:
                _finish(*queue.popleft(), deadline)
    except BaseException:
        for _, transfer in under_way[False]:
            transfer.cancel()
        raise


def _finish(step: _Step, transfer: Transfer, deadline: float) -> None:
    try:
        transfer.wait(max(0.0, deadline - time.monotonic()))
    except BaseException:
        transfer.cancel()
        raise
    if transfer.nbytes != step.memory.nbytes:
        raise MismatchError(f"rank {step.rank} has sent {transfer.nbytes} bytes with tag {transfer.tag} on channel "
                            f"{transfer.channel}, {step.memory.nbytes} were expected")
