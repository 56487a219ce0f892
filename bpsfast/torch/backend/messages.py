"""Messages in a torch process group: torch's send and receive, and the barrier that names missing members."""
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
    """A message under way: sent from *one*, or received into it."""

    def __init__(self, transfer: Transfer, one: Operand, members: tuple[int, ...], timeout_s: float, text: str) -> None:
        self._call = current()
        super().__init__([one.tensor], timeout_s, text, self._call)
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
            except Exception as exc:  # the tensor cannot be written; `wait` raises the error
                error = exc
        if self._late is not None and isinstance(error, ClosedError):
            error = self._late
        source = self._members.index(transfer.source) if error is None and transfer.source is not None else -1
        self.finish(error, source)

    @eager
    def get_future(self) -> Any:
        """As `Work.get_future`. A timer enforces the deadline, because no thread waits here."""
        if not self.is_completed():
            limit = threading.Timer(self._timeout_s, self._expire)
            limit.daemon = True
            limit.start()
            self._transfer.on_done(lambda _: limit.cancel())
        return super().get_future()

    def _expire(self) -> None:
        # Set before the end is reported: a message that comes later belongs to another receive.
        self._late = StallError(f"{self._text} was not complete within {self._timeout_s:g} s")
        with contextlib.suppress(ClosedError):  # the session may have ended meanwhile, and the receive with it
            self._transfer.cancel()
        self.finish(self._late)

    @eager
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message was received or sent; the waiting thread itself makes progress on messages."""
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
    """Sends and receives for *group*. Any thread; torch's tags belong to a channel of the group's own."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._channel = zlib.crc32(f"{group.name}/messages".encode())
        self._barriers = zlib.crc32(f"{group.name}/barriers".encode())
        self._n_barriers = 0
        self._receives: set[Transfer] = set()

    def send(self, one: Operand, to: int, tag: int) -> Work:
        """Begin to send *one* to member *to*."""
        group, memory = self._group, one.memory
        transfer = group.p2p.send(self._channel, group.ranks[to], tag, memory.address, memory.nbytes, memory.owner)
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
        """Wait for all members; member 0 finds out who is missing, and tells the others.

        Raises `StallError` that names the first member that did not come within *timeout_s*, or, with *names_all*, all.
        """
        self._n_barriers += 1
        if self._group.rank == 0:
            self._collect(timeout_s, names_all)
        else:
            self._report(timeout_s)

    def _collect(self, timeout_s: float, names_all: bool) -> None:
        """Wait for the other members' messages, and answer them."""
        group, p2p, tag = self._group, self._group.p2p, self._n_barriers
        if timeout_s <= 0.0 and group.size > 1:
            raise StallError(f"Rank 0 timed out in monitoredBarrier after {timeout_s * 1000:.0f} ms: it waited for no "
                             "other rank")
        coming = {rank: p2p.receive_any_size(self._barriers, rank, tag) for rank in group.ranks[1:]}
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
        reason = ""
        if missing:  # in gloo's words, because people search for them
            named = ", ".join(map(str, missing))
            reason = f"Rank{'s' if len(missing) > 1 else ''} {named} failed to pass monitoredBarrier in " \
                     f"{timeout_s * 1000:.0f} ms"
        text = np.frombuffer(reason.encode() or b"\0", np.uint8)
        answers = []
        for rank, transfer in coming.items():
            if transfer.done() and transfer.error is None:
                answers.append(p2p.send(self._barriers, rank, tag, text.ctypes.data, text.nbytes, text))
            else:
                transfer.cancel()
        deadline = time.monotonic() + group.timeout_s
        for answer in answers:  # all were sent before, so a slow member does not delay the others
            answer.wait(max(0.0, deadline - time.monotonic()))
        if missing:
            raise StallError(reason) from next(iter(missing.values()))

    def _report(self, timeout_s: float) -> None:
        """Tell member 0 that this one has come, and wait for its answer."""
        p2p, tag, first = self._group.p2p, self._n_barriers, self._group.ranks[0]
        here = np.ones(1, np.uint8)
        p2p.send(self._barriers, first, tag, here.ctypes.data, here.nbytes, here)
        answer = p2p.receive_any_size(self._barriers, first, tag)
        limit_s = 2 * timeout_s + 1.0  # member 0 waits for others for *timeout_s*, and may have begun later
        try:
            answer.wait(limit_s)
        except StallError as exc:
            answer.cancel()
            raise StallError("Rank 0 failed to pass monitoredBarrier, or has not said within "
                             f"{limit_s:g} s who is missing") from exc
        assert answer.data is not None, "it has come"
        text = answer.data.tobytes().strip(b"\0").decode()
        if text:
            raise StallError(f"Rank {self._group.rank} successfully reached monitoredBarrier, but rank 0 says: {text}")

    def close(self) -> None:
        """Cancel receives that no message has matched."""
        for transfer in list(self._receives):
            transfer.cancel()
