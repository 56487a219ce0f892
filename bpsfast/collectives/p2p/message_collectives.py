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
    the memory alive, also if a call raises while messages are under way. A call raises `MismatchError` if a rank has
    sent another size than is expected here, and `StallError` or `PeerLostError` if a rank does not take part in time,
    or is gone.
    """

    endpoint: P2PEndpoint
    channel: int
    ranks: Sequence[int]
    me: int
    owner: object
    timeout_s: float
    tag: int = 0

    def exchange(self, sends: Mapping[int, TensorInput], receives: Mapping[int, TensorInput]) -> None:
        """Send and receive these, by the place of the other rank, a few at a time in each direction; wait for all.

        A small message may still be under way at the end; its memory may be written again.
        """
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
