"""Messages between the members of a group: torch's send and receive, and the barrier that says who is missing."""
from __future__ import annotations

import contextlib
import threading
import time
import zlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from ...collectives.group import Group
from ...orchestration.errors import BpsError, ClosedError, StallError
from .device_calls import current
from .operands import Operand
from .torch_compat import eager
from .work import Work, torch_error

if TYPE_CHECKING:
    from ...collectives.p2p.transfer import Transfer


class MessageWork(Work):
    """A message under way; *one* is what it is written into, None for a send."""

    def __init__(self, transfer: Transfer, one: Operand, members: tuple[int, ...], timeout_s: float,
                 text: str) -> None:
        self._call = current()
        super().__init__([one.tensor] if self._call is None else self._call.originals([one.tensor]), timeout_s, text,
                         self._call)
        if self._call is not None:
            self._call.is_under_way = True
        self._transfer = transfer
        self._one = one
        self._members = members
        self._late: StallError | None = None
        transfer.on_done(self._ended)

    def _ended(self, transfer: Transfer) -> None:
        error: BaseException | None = transfer.error
        if not transfer.is_send and error is None:
            try:
                self._one.take_back()
                if self._call is not None:
                    self._call.leave()
            except Exception as exc:  # of a tensor that cannot be written; whoever waits must hear of it
                error = exc
        if self._late is not None and isinstance(error, ClosedError):
            error = self._late
        source = self._members.index(transfer.source) if error is None and transfer.source is not None else -1
        self.finish(error, source)

    @eager
    def get_future(self) -> Any:
        """As `Work.get_future`. Nobody waits here, so a deadline of its own ends it."""
        if not self.is_completed():
            limit = threading.Timer(self._timeout_s, self._expire)
            limit.daemon = True
            limit.start()
            self._transfer.on_done(lambda _: limit.cancel())
        return super().get_future()

    def _expire(self) -> None:
        # Before anybody hears of the end: a message that comes from then on is another receive's.
        self._late = StallError(f"{self._text} was not complete within {self._timeout_s:g} s")
        with contextlib.suppress(ClosedError):  # the session has ended meanwhile, and the receive with it
            self._transfer.cancel()
        self.finish(self._late)

    @eager
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message has come, or left; the waiting thread moves messages on itself."""
        given_s = timeout.total_seconds() if timeout is not None else 0.0
        if not self.is_completed():
            try:
                self._transfer.wait(given_s if given_s > 0 else self._timeout_s)
            except BpsError as exc:
                error = torch_error(exc)
                self._note(error)
                raise error from exc
        return super().wait()


class Messages:
    """What members of *group* say to each other. Any thread; torch's tags are of a channel of the group's own."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._channel = zlib.crc32(f"{group.name}/messages".encode())
        self._barriers = zlib.crc32(f"{group.name}/barriers".encode())
        self._n_barriers = 0
        self._receives: set[Transfer] = set()

    def send(self, one: Operand, to: int, tag: int) -> Work:
        """Begin to send *one* to member *to*."""
        group, memory = self._group, one.memory
        transfer = group.p2p.send(self._channel, group.ranks[to], tag, memory.address, memory.nbytes,
                                           memory.owner)
        return MessageWork(transfer, one, group.ranks, group.timeout_s, f"send to rank {to}")

    def receive(self, one: Operand, source: int | None, tag: int) -> Work:
        """Begin to receive *one* from member *source*, None: from any."""
        group, memory = self._group, one.memory
        transfer = group.p2p.receive(self._channel, None if source is None else group.ranks[source], tag,
                                              memory.address, memory.nbytes, memory.owner)
        self._receives.add(transfer)
        transfer.on_done(self._receives.discard)
        return MessageWork(transfer, one, group.ranks, group.timeout_s,
                           "receive" + (f" from rank {source}" if source is not None else ""))

    def barrier(self, timeout_s: float, names_all: bool) -> None:
        """Wait for all members; member 0 finds out who is missing, and tells those that have come.

        Raises
        ------
        StallError
            Naming the first that has not come within *timeout_s*, or, with *names_all*, all of them.
        """
        self._n_barriers += 1
        if self._group.rank == 0:
            self._await_others(timeout_s, names_all)
        else:
            self._come(timeout_s)

    def _await_others(self, timeout_s: float, names_all: bool) -> None:
        group, post, tag = self._group, self._group.p2p, self._n_barriers
        if timeout_s <= 0.0 and group.size > 1:
            raise StallError(f"Rank 0 timed out in monitoredBarrier after {timeout_s * 1000:.0f} ms: it waited for "
                             "nobody")
        coming = {rank: post.receive_any_size(self._barriers, rank, tag) for rank in group.ranks[1:]}
        missing: dict[int, BpsError] = {}
        deadline = time.monotonic() + timeout_s
        for member, transfer in enumerate(coming.values(), 1):
            try:
                transfer.wait(max(0.0, deadline - time.monotonic()))
            except BpsError as exc:
                transfer.cancel()
                missing[member] = exc
                if not names_all:
                    break
        said = ""
        if missing:  # in the words of gloo's, for which people look
            named = ", ".join(map(str, missing))
            said = f"Rank{'s' if len(missing) > 1 else ''} {named} failed to pass monitoredBarrier in " \
                   f"{timeout_s * 1000:.0f} ms"
        text = np.frombuffer(said.encode() or b"\0", np.uint8)
        answers = []
        for rank, transfer in coming.items():
            if transfer.done() and transfer.error is None:
                answers.append(post.send(self._barriers, rank, tag, text.ctypes.data, text.nbytes, text))
            else:
                transfer.cancel()
        deadline = time.monotonic() + group.timeout_s
        for answer in answers:  # all are on their way: who does not take his keeps nobody else waiting
            answer.wait(max(0.0, deadline - time.monotonic()))
        if missing:
            raise StallError(said) from next(iter(missing.values()))

    def _come(self, timeout_s: float) -> None:
        post, tag, first = self._group.p2p, self._n_barriers, self._group.ranks[0]
        here = np.ones(1, np.uint8)
        post.send(self._barriers, first, tag, here.ctypes.data, here.nbytes, here)
        answer = post.receive_any_size(self._barriers, first, tag)
        try:
            # Member 0 waits as long for others, and may have begun later.
            answer.wait(2 * timeout_s + 1.0)
        except StallError as exc:
            answer.cancel()
            raise StallError("Rank 0 failed to pass monitoredBarrier, or has not said within "
                             f"{2 * timeout_s + 1.0:g} s who is missing") from exc
        assert answer.data is not None, "it has come"
        said = answer.data.tobytes().strip(b"\0").decode()
        if said:
            raise StallError(f"Rank {self._group.rank} successfully reached monitoredBarrier, but rank 0 says: {said}")

    def close(self) -> None:
        """Give up receives that no message has met."""
        for transfer in list(self._receives):
            transfer.cancel()
