"""Gather, scatter and all-to-all among ranks, made of point-to-point messages, whose sizes may differ and may be zero.

In step k a rank sends to the k-th rank after it and receives from the k-th before it, so that the load is even
(pairwise exchange: Thakur et al., IJHPCA 2005, section 3.4); a few steps are under way at a time.
"""
from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...orchestration.errors import MismatchError
from ...trainer.tensor_input import TensorInput
from .endpoint import P2PEndpoint
from .transfer import Transfer

#: Messages of one call under way in each direction.
N_UNDER_WAY = 4


class MessageCall(NamedTuple):
    """One call of *ranks*, of which this rank is the *me*-th, by messages on *channel* with *tag*.

    All ranks of a channel make the same calls in the same order. A call blocks for at most *timeout_s*. *owner* keeps
    the memory alive, also if a call raises while messages are under way. Calls raise `MismatchError` if a list has not
    one entry for each rank, or a rank has sent another size than is expected here, and `StallError` or `PeerLostError`
    if a rank does not take part in time, or is gone.
    """

    endpoint: P2PEndpoint
    channel: int
    ranks: Sequence[int]
    me: int
    owner: object
    timeout_s: float
    tag: int = 0

    def all_to_all(self, sources: Sequence[TensorInput], destinations: Sequence[TensorInput]) -> None:
        """Send ``sources[i]`` to the i-th rank, and receive ``destinations[i]`` from it."""
        self._check(sources=sources, destinations=destinations)
        self._exchange(dict(enumerate(sources)), dict(enumerate(destinations)))

    def gather(self, root: int, source: TensorInput, destinations: Sequence[TensorInput]) -> None:
        """Bring each rank's *source* to the root's ``destinations[i]`` (ignored elsewhere).

        On other ranks than the root a small message may still be under way at the end; *source* may be written again.
        """
        if self.me == root:
            self._check(destinations=destinations)
        self._exchange({root: source}, dict(enumerate(destinations)) if self.me == root else {})

    def scatter(self, root: int, sources: Sequence[TensorInput], destination: TensorInput) -> None:
        """Bring the root's ``sources[i]`` (ignored elsewhere) to each rank's *destination*."""
        if self.me == root:
            self._check(sources=sources)
        self._exchange(dict(enumerate(sources)) if self.me == root else {}, {root: destination})

    def _check(self, **lists: Sequence[TensorInput]) -> None:
        n = len(self.ranks)
        for name, given in lists.items():
            if len(given) != n:
                raise MismatchError(f"{name} has {len(given)} entries for a group of {n} ranks")
        if not 0 <= self.me < n:
            raise MismatchError(f"me={self.me} is no place in a group of {n} ranks")

    def _exchange(self, sends: Mapping[int, TensorInput], receives: Mapping[int, TensorInput]) -> None:
        """Send and receive these, by number of the other rank, a few at a time in each direction; wait for all."""
        n, deadline = len(self.ranks), time.monotonic() + self.timeout_s
        receiving: deque[tuple[Transfer, int]] = deque()  # with the bytes that are expected
        sending: deque[tuple[Transfer, int]] = deque()
        try:
            for k in range(n):
                for queue, begin, other, memories in (
                        (receiving, self.endpoint.receive, (self.me - k) % n, receives),
                        (sending, self.endpoint.send, (self.me + k) % n, sends)):
                    if other not in memories:
                        continue
                    if len(queue) == N_UNDER_WAY:
                        _finish(*queue.popleft(), deadline)
                    memory = memories[other]
                    queue.append((begin(self.channel, self.ranks[other], self.tag, memory.address, memory.nbytes,
                                        self.owner), memory.nbytes))
            for queue in (sending, receiving):
                while queue:
                    _finish(*queue.popleft(), deadline)
        except BaseException:
            for transfer, _ in receiving:
                transfer.cancel()
            raise


def _finish(transfer: Transfer, nbytes: int, deadline: float) -> None:
    try:
        transfer.wait(max(0.0, deadline - time.monotonic()))
    except BaseException:
        transfer.cancel()
        raise
    if transfer.nbytes != nbytes:
        raise MismatchError(f"rank {transfer.peer} has sent {transfer.nbytes} bytes with tag {transfer.tag} on channel "
                            f"{transfer.channel}, {nbytes} were expected")
