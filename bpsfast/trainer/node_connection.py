"""The connection of a rank to its machine's node: attaching, messages, requests with replies.

`attach` connects, proves the job's key and gets lane, board and doorbell. There is no reader thread: a Python thread
that is woken beside a busy trainer waits for the GIL, and the data path needs no messages. Of several waiting threads
one reads and hands each message to the session; the others sleep until something was read.
"""
from __future__ import annotations

import contextlib
import itertools
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..base import message_socket as channels
from ..base.addresses import no_scheduler_hint
from ..base.end_reports import report
from ..base.message_socket import MessageSocket
from ..base.settings import Settings, fingerprint, format_addresses
from ..base.value_formats import format_cpus, parse_cpus
from ..hardware.affinity.binding import ThreadBinding, binding_variable, default_gpu
from ..launch.process_role import ProcessRole
from ..orchestration.errors import BpsError, ClosedError, PeerLostError, ProtocolError, StallError, error_of
from ..orchestration.messages import VERSION, Attach, Attached, Message, Refuse
from ..pyx.pages import Segment

#: The node and the scheduler know which process is missing; a rank's own deadline is this much later than theirs.
_GRACE_S = 5.0
T = TypeVar("T")
A = TypeVar("A", bound=Message)
#: How often a wait checks the job's state on the board, which no descriptor signals.
SLICE_S = 0.1


@dataclass
class Attachment:
    """What the node gave to this rank, whose process has *role*. The owner closes it, including `node_pidfd`.

    `pins`: the CPUs to which this process is bound meanwhile.
    """

    role: ProcessRole
    channel: MessageSocket
    attached: Attached
    lane: Segment
    board: Segment
    doorbell: Segment
    node_pidfd: int
    pins: ThreadBinding

    def close(self) -> None:
        """Close everything. The port must be closed before."""
        self.pins.undo()
        self.channel.close()
        for segment in (self.lane, self.board, self.doorbell):
            segment.close()
        os.close(self.node_pidfd)


def attach(role: ProcessRole, settings: Settings, version: str, failure: Callable[[], str | None]) -> Attachment:
    """Attach to this machine's node and return once the whole job has joined.

    *version*: this package's version; the node's must be the same. *failure* returns what became of the daemons that
    this process started, None while they run. Raises the error with which the node or the scheduler refused this rank
    (`MismatchError`, `ConfigError`, `StallError`), or `PeerLostError` if one of them is lost.
    """
    deadline = time.monotonic() + settings.start_timeout_s + _GRACE_S
    connection = _connect(role, settings, failure)
    try:
        _introduce(connection, role, settings, version)
        while True:
            try:
                message, fds = connection.recv(0.2)
                break
            except StallError:
                _raise_failure(failure)
                if time.monotonic() >= deadline:
                    raise StallError(
                        f"rank {role.rank} attached to its node (pid {connection.peer[0]}), but the job was not "
                        f"complete within start_timeout_s={settings.start_timeout_s:g} s: a node, helper, rank or the "
                        f"scheduler at {format_addresses(role.schedulers)} is missing."
                        f"{no_scheduler_hint(role.schedulers)}"
                    ) from None
            except PeerLostError as exc:
                _raise_failure(failure)
                report("told")
                raise PeerLostError(f"the node of this machine (pid {connection.peer[0]}) went away while rank "
                                    f"{role.rank} was attaching; see its output") from exc
        if isinstance(message, Refuse):
            if message.error == PeerLostError.__name__:
                report("told")
            raise error_of(message.error, message.reason)
        if not isinstance(message, Attached) or len(fds) != 4:
            _close_all(fds)
            raise ProtocolError(f"the node answered an attach with {type(message).__name__} and {len(fds)} descriptors")
        return _map(role, connection, message, fds)
    except BaseException:
        connection.close()
        raise


def _connect(role: ProcessRole, settings: Settings, failure: Callable[[], str | None]) -> MessageSocket:
    deadline = time.monotonic() + settings.start_timeout_s
    name = channels.address(role.job_key, role.node_id)
    while True:
        try:
            return channels.connect(name, min(0.5, max(0.0, deadline - time.monotonic())))
        except StallError as exc:
            _raise_failure(failure)
            if time.monotonic() >= deadline:
                raise StallError(
                    f"rank {role.rank}: no node of this job listened on this machine within start_timeout_s="
                    f"{settings.start_timeout_s:g} s (node_id {role.node_id!r}). {exc}."
                    f"{no_scheduler_hint(role.schedulers)}"
                ) from exc


def _raise_failure(failure: Callable[[], str | None]) -> None:
    text = failure()
    if text is not None:
        report("told")
        raise PeerLostError(text)


def _introduce(connection: MessageSocket, role: ProcessRole, settings: Settings, version: str) -> None:
    pid = os.getpid()
    proof = channels.attach_proof(role.job_key, pid, role.local_rank)
    pidfd = os.pidfd_open(pid)
    try:
        connection.send(
            Attach(version=VERSION, package=version, pid=pid, local_rank=role.local_rank, local_size=role.local_size,
                   rank=role.rank, size=role.size, proof=proof, settings=fingerprint(settings),
                   cpus=format_cpus(os.sched_getaffinity(0)),
                   stays=not settings.numa or bool(binding_variable(os.environ)),
                   gpu=default_gpu(os.environ, role.local_rank)),
            [pidfd],
        )
    except PeerLostError:
        # The node may have refused before it had read everything: its reason is read next.
        return
    finally:
        os.close(pidfd)


def _map(role: ProcessRole, connection: MessageSocket, attached: Attached, fds: tuple[int, ...]) -> Attachment:
    mapped: list[Segment] = []
    try:
        for fd, is_writable in zip(fds, (True, False, True)):
            mapped.append(Segment.attach(fd, writable=is_writable))
    except BaseException:
        for segment in mapped:
            segment.close()
        _close_all(fds[len(mapped):])
        raise
    lane, board, doorbell = mapped
    return Attachment(role=role, channel=connection, attached=attached, node_pidfd=fds[3], lane=lane, board=board,
                      doorbell=doorbell, pins=ThreadBinding(parse_cpus(attached.cpus)))


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


class Mailbox:
    """Messages to and from the node over *channel*, which `close` closes. Any thread.

    *node_pidfd* is polled beside the socket: it fires when the node dies, even if a forked child of the node holds the
    socket open. *deliver* is called with each message and its descriptors, which it must close; one at a time. *check*
    is called before each sleep, and raises if the job is over. *lost* returns the error to raise when the node is lost.
    *require_open* raises `ClosedError` when the session is closed, or is another process's.
    """

    def __init__(self, channel: MessageSocket, node_pidfd: int, deliver: Callable[[Message, tuple[int, ...]], None],
                 check: Callable[[], None], lost: Callable[[], BpsError],
                 require_open: Callable[[], None] = lambda: None) -> None:
        self._channel = channel
        self._require_open = require_open
        self._deliver = deliver
        self._check = check
        self._lost = lost
        self._condition = threading.Condition()
        self._reading = False
        self._poller = select.poll()
        self._poller.register(channel.fileno(), select.POLLIN)
        self._poller.register(node_pidfd, select.POLLIN)
        self._node_pidfd = node_pidfd

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send *message*. If the node is lost, raise what the job was aborted with, or what `lost` returns."""
        self._require_open()
        try:
            self._channel.send(message, fds)
        except PeerLostError as exc:
            self._check()  # what the job was aborted with is why the node has left
            raise self._lost() from exc

    def wait(self, ready: Callable[[], T | None], timeout_s: float) -> T | None:
        """Read messages until ``ready()`` is not None and return that, or None after *timeout_s* seconds.

        Raises `PeerLostError` if the node died, or what `check` raises; messages that came before are handled first.
        """
        self._require_open()  # before any lock, which a fork may have inherited locked
        deadline = time.monotonic() + timeout_s
        while True:
            with self._condition:
                found = ready()
                remaining_s = deadline - time.monotonic()
                if found is not None or remaining_s <= 0:
                    return found
                if self._reading:
                    self._condition.wait(min(remaining_s, SLICE_S))
                    continue
                self._reading = True
            try:
                self._read(min(remaining_s, SLICE_S))
            except ClosedError:
                raise
            except BpsError:
                with self._condition:
                    found = ready()
                if found is None:
                    raise
                return found
            finally:
                with self._condition:
                    self._reading = False
                    self._condition.notify_all()

    def pump(self) -> None:
        """Handle the messages that have arrived, without waiting; do nothing if another thread is reading."""
        self._require_open()
        with self._condition:
            if self._reading:
                return
            self._reading = True
        try:
            self._read(0.0)
        finally:
            with self._condition:
                self._reading = False
                self._condition.notify_all()

    def _read(self, timeout_s: float) -> None:
        """Handle messages that arrive in time. An abort, read from the board, overtakes messages about its cause."""
        try:
            self._check()
        except ClosedError:  # the socket belongs to the parent process, or another thread has closed it
            raise
        except BpsError:
            with contextlib.suppress(PeerLostError):
                self._take()
            raise
        events = dict(self._poller.poll(timeout_s * 1000))
        if self._channel.fileno() in events:
            try:
                self._take()
            except PeerLostError as exc:
                self._check()  # an abort that was published before is the better reason
                raise self._lost() from exc
        elif self._node_pidfd in events:
            self._check()
            raise self._lost()

    def _take(self) -> None:
        arrived = self._channel.recv_nowait()
        with self._condition:
            for message, fds in arrived:
                self._deliver(message, fds)

    def close(self) -> None:
        """Close the socket. No thread may be waiting."""
        self._channel.close()


class NodeRequests:
    """Requests to the node, or through it to the scheduler, numbered so that several threads may wait for replies.

    *timeout_s*: how long a reply may take, by default. *mailbox* sends the requests. Its owner calls `receive` with the
    replies.
    """

    def __init__(self, timeout_s: float, mailbox: Mailbox) -> None:
        self._timeout_s = timeout_s
        self.mailbox = mailbox
        self._numbers = itertools.count(1)
        self._answers: dict[int, list[Message]] = {}  # of requests that a thread waits for

    def receive(self, number: int, answer: Message) -> None:
        """Enter the reply to request *number*; drop it if no thread waits for it. One at a time."""
        answers = self._answers.get(number)
        if answers is not None:
            answers.append(answer)

    def ask(self, kind: type[A], question: Callable[[int], Message], trouble: str, timeout_s: float = 0.0,
            given_up: Callable[[], A | None] = lambda: None, fds: Sequence[int] = ()) -> A:
        """Send ``question(number)`` and return the reply, of *kind*; raise `StallError`, which begins with *trouble*,
        if none comes within *timeout_s* (0: the default).

        *given_up* is called now and then; what it returns, unless None, is the reply. *fds* are sent with the request;
        the caller closes them.
        """
        timeout_s = timeout_s or self._timeout_s
        number = next(self._numbers)
        answers = self._answers[number] = []
        try:
            self.mailbox.send(question(number), fds)
            answer = self.mailbox.wait(lambda: answers[0] if answers else given_up(), timeout_s)
        finally:
            del self._answers[number]
        if answer is None:
            raise StallError(f"{trouble} within {timeout_s:g} s")
        assert isinstance(answer, kind)
        return answer
