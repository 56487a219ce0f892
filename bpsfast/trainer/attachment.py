"""How a rank becomes part of the job: connect to the machine's node, prove the key, get lane, board and doorbell."""
from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..base import message_socket as channels
from ..base.addresses import unreachable_hint
from ..base.end_reports import report
from ..base.message_socket import MessageSocket
from ..base.settings import Settings, fingerprint
from ..base.value_formats import format_cpus, parse_cpus
from ..hardware.affinity import binding
from ..hardware.affinity.binding import ThreadBinding
from ..launch.roles import ProcessRole
from ..orchestration.errors import PeerLostError, ProtocolError, StallError, error_of
from ..orchestration.messages import VERSION, Attach, Attached, Refuse
from ..pyx.pages import Segment

#: The node and the scheduler know who is missing; a rank's own deadline comes this much after theirs.
_GRACE_S = 5.0


@dataclass
class Attachment:
    """What the node gave to this rank at *place*. `node_pidfd` and everything else is the owner's to close.

    `pins`: the CPUs that this process keeps to meanwhile.
    """

    place: ProcessRole
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


def attach(place: ProcessRole, settings: Settings, version: str, failure: Callable[[], str | None]) -> Attachment:
    """Attach to this machine's node and return once the whole job has joined.

    Parameters
    ----------
    version
        This package's version; the node's must be the same.
    failure
        Says what became of the daemons this process started, or None while they are well.

    Raises
    ------
    MismatchError, ConfigError, StallError, PeerLostError
        What the node or the scheduler refused with, or what became of them.
    """
    deadline = time.monotonic() + settings.start_timeout_s + _GRACE_S
    connection = _connect(place, settings, failure)
    try:
        _introduce(connection, place, settings, version)
        while True:
            try:
                message, fds = connection.recv(0.2)
                break
            except StallError:
                _raise_failure(failure)
                if time.monotonic() >= deadline:
                    raise StallError(
                        f"rank {place.rank} attached to its node (pid {connection.peer[0]}), but the job was not "
                        f"complete within start_timeout_s={settings.start_timeout_s:g} s: a node, helper, rank or the "
                        f"scheduler at {place.scheduler[0]}:{place.scheduler[1]} is missing."
                        f"{unreachable_hint(*place.scheduler)}"
                    ) from None
            except PeerLostError as exc:
                _raise_failure(failure)
                report("told")
                raise PeerLostError(f"the node of this machine (pid {connection.peer[0]}) went away while rank "
                                    f"{place.rank} was attaching; see its output") from exc
        if isinstance(message, Refuse):
            if message.error == PeerLostError.__name__:
                report("told")
            raise error_of(message.error, message.reason)
        if not isinstance(message, Attached) or len(fds) != 4:
            _close_all(fds)
            raise ProtocolError(f"the node answered an attach with {type(message).__name__} and {len(fds)} descriptors")
        return _map(place, connection, message, fds)
    except BaseException:
        connection.close()
        raise


def _connect(place: ProcessRole, settings: Settings, failure: Callable[[], str | None]) -> MessageSocket:
    deadline = time.monotonic() + settings.start_timeout_s
    name = channels.address(place.job_key, place.node_id)
    while True:
        try:
            return channels.connect(name, min(0.5, max(0.0, deadline - time.monotonic())))
        except StallError as exc:
            _raise_failure(failure)
            if time.monotonic() >= deadline:
                raise StallError(
                    f"rank {place.rank}: no node of this job listened on this machine within start_timeout_s="
                    f"{settings.start_timeout_s:g} s (node_id {place.node_id!r}). {exc}.{unreachable_hint(*place.scheduler)}"
                ) from exc


def _raise_failure(failure: Callable[[], str | None]) -> None:
    text = failure()
    if text is not None:
        report("told")
        raise PeerLostError(text)


def _introduce(connection: MessageSocket, place: ProcessRole, settings: Settings, version: str) -> None:
    pid = os.getpid()
    proof = channels.attach_proof(place.job_key, pid, place.local_rank)
    pidfd = os.pidfd_open(pid)
    try:
        connection.send(
            Attach(version=VERSION, package=version, pid=pid, local_rank=place.local_rank, local_size=place.local_size,
                   rank=place.rank, size=place.size, proof=proof, settings=fingerprint(settings),
                   cpus=format_cpus(os.sched_getaffinity(0)),
                   stays=not settings.numa or bool(binding.binding_variable(os.environ)),
                   gpu=binding.default_gpu(os.environ, place.local_rank)),
            [pidfd],
        )
    except PeerLostError:
        # The node may have refused before it read everything: its reason is what counts, and is read next.
        return
    finally:
        os.close(pidfd)


def _map(place: ProcessRole, connection: MessageSocket, attached: Attached, fds: tuple[int, ...]) -> Attachment:
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
    return Attachment(place=place, channel=connection, attached=attached, node_pidfd=fds[3], lane=lane, board=board,
                      doorbell=doorbell, pins=ThreadBinding(parse_cpus(attached.cpus)))


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
