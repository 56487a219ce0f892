"""The base class of services that execute operations on all ranks of a group in the order that its first rank decides.

`turn_service.TurnService` and `hvd.service.NegotiationService` are such services: they add what is decided and the
stall clock. This module has the connection to the first rank, the thread, and what happens at its end.
"""
from __future__ import annotations

import logging
import os
import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from ..orchestration.errors import BpsError, ConfigError, PeerLostError, StallError, error_of
from ..orchestration.priority.group_channel import Failed, FollowerChannel, Hello, LeaderChannel
from ..orchestration.security import prove
from ..orchestration.wake_up import WakeUp

_log = logging.getLogger("bpsfast")
_KEY_NBYTES = 32
#: Longest sleep of a service's thread.
_TICK_S = 0.5
OperationT = TypeVar("OperationT")


class _LeaderAddress(msgspec.Struct, frozen=True):
    """Where the first rank listens and what the channel's key is made of, or why it does not listen.

    Others may read this message. If all ranks share a secret, secret and `salt` make the key. Without a secret `salt`
    is the key, and whoever reads it can join the channel.
    """

    host: str = ""
    port: int = 0
    salt: bytes = b""
    has_secret: bool = False
    error: str = ""


def open_channel(is_leader: bool, share: Callable[[bytes | None], bytes], host: Callable[[], str],
                 listen: Callable[[bytes, str], LeaderChannel], connect: Callable[[str, int, bytes], FollowerChannel],
                 *, secret: bytes = b"", rank: int = 0, leader: str = "rank 0", others: str = "the other ranks",
                 advertise: str = "") -> LeaderChannel | FollowerChannel:
    """Return this rank's end of the channel between the first rank and the others. Called by all of them.

    *share* returns on all ranks the bytes that the first rank gives it; the others give None. *host* returns the
    address at which the others reach the first rank; it is called there only, and may raise OSError. *advertise*: the
    address that they are told in place of that one, at which the first rank listens. *secret* is the job's key, on all
    ranks or on none.

    Raises `ConfigError` on all ranks if the first one cannot listen, or if only one of this rank and the first one has
    a secret.
    """
    if not is_leader:
        found = msgspec.msgpack.decode(share(None), type=_LeaderAddress)
        if found.error:
            raise ConfigError(f"{leader} cannot be reached by {others}: {found.error}")
        if found.has_secret != bool(secret):
            keyed = leader if found.has_secret else f"rank {rank}"
            raise ConfigError(f"of {leader} and rank {rank} only one has a job key ({keyed} has): set BPSFAST_JOB_KEY "
                              "to the same random hex on all ranks, or on none")
        return connect(found.host, found.port, _channel_key(secret, found.salt))
    salt = os.urandom(_KEY_NBYTES)
    try:
        own_host = host()
        channel = listen(_channel_key(secret, salt), own_host)
    except (OSError, ConfigError) as exc:
        share(msgspec.msgpack.encode(_LeaderAddress(error=str(exc))))
        raise ConfigError(f"{leader} cannot be reached by {others}: {exc}") from exc
    try:
        share(msgspec.msgpack.encode(_LeaderAddress(advertise or own_host, channel.port, salt, bool(secret))))
    except BaseException:
        channel.close()
        raise
    return channel


def _channel_key(secret: bytes, salt: bytes) -> bytes:
    return prove(secret, "turns", salt) if secret else salt


class GroupService(ABC, Generic[OperationT]):
    """The part of rank *rank* in the group of *ranks*. All of them make and close it; any thread submits operations.

    *channel* leads to the other ranks; None if there are none.
    """

    #: How long the first rank tells ranks that are still connecting that it has ended, in seconds.
    _LATE_NOTICE_S = 5.0

    def __init__(self, ranks: Sequence[int], rank: int, channel: LeaderChannel | FollowerChannel | None,
                 name: str) -> None:
        self.ranks, self.rank = tuple(ranks), rank
        self._channel = channel
        try:
            self._wake = WakeUp()
        except OSError:
            if channel is not None:
                channel.close()
            raise
        self._lock = threading.Lock()  # guards what submitting threads and the service's thread both write
        self._operations: dict[Any, OperationT] = {}  # that are open, by their keys
        self._error: BpsError | None = None
        self._closing = False
        self._reads_channel = True
        self._tick_s = _TICK_S
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _start(self) -> None:
        """Begin to serve; the subclass calls it when it is complete."""
        try:
            if isinstance(self._channel, FollowerChannel):
                self._channel.tell(Hello(self.rank))
            self._thread.start()
        except BaseException:
            self._free()
            raise

    # -- what a service adds -----------------------------------------------------------------------------------------

    @abstractmethod
    def _is_over(self) -> bool:
        """Whether this rank may leave the group."""

    @abstractmethod
    def _turn(self, now: float) -> None:
        """Handle what was submitted and received, and look at the clock: *now*."""

    @abstractmethod
    def _fail(self, operation: OperationT, error: BpsError) -> None:
        """End an open *operation* with *error*."""

    def _leave(self) -> None:
        """Tell the other ranks that this one leaves. Called when `_is_over` is true."""

    def _late_deadline(self) -> float:
        """Return the time until which ranks that are still connecting are told of the end."""
        return time.monotonic() + self._LATE_NOTICE_S

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_over():
                self._sleep()
                self._turn(time.monotonic())
            self._leave()
        except BpsError as exc:
            self._end(exc)
        except Exception as exc:
            _log.exception("rank %d: an operation failed", self.rank)
            self._end(PeerLostError(f"an operation of rank {self.rank} failed: {type(exc).__name__}: {exc}"))
        finally:
            self._free()

    def _sleep(self) -> None:
        if self._channel is not None and self._reads_channel:
            self._channel.wait(self._wake.fileno(), self._tick_s)
        else:
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            poll.poll(self._tick_s * 1000)
        self._wake.clear()

    def _received(self) -> Iterator[Any]:
        """Yield the messages of the other ranks; raise the error of one that has failed."""
        for message in self._channel.recv_nowait() if self._channel is not None else ():
            if isinstance(message, Failed):
                raise error_of(message.error, message.reason)
            yield message

    def _send(self, message: msgspec.Struct) -> None:
        """Send *message*: the first rank to all others, another rank to the first one."""
        if self._channel is not None:
            self._channel.tell(message)

    def _end(self, error: BpsError, last: msgspec.Struct | None = None) -> None:
        """End all open operations with *error*, and tell the other ranks: *last*, or that this rank has failed."""
        last = Failed(type(error).__name__, str(error)) if last is None else last
        told = self._channel.present if isinstance(self._channel, LeaderChannel) else set[int]()
        with self._lock:
            self._error = error
            abandoned = list(self._operations.values())
            self._operations.clear()
        try:
            self._send(last)
        except Exception as exc:  # open operations must end, whatever the channel does
            _log.debug("rank %d could not say that it ends: %s", self.rank, exc)
        for operation in abandoned:
            try:
                self._fail(operation, error)
            except Exception:  # a callback that raises must not keep the next one from its error
                _log.exception("rank %d: the callback of a failed operation has failed", self.rank)
        if isinstance(self._channel, LeaderChannel) and not isinstance(error, StallError):
            # a rank that has not connected during a whole stall does not come any more
            self._channel.send_to_late_joiners(last, told, len(self.ranks) - 1, self._late_deadline())

    def _free(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._wake.close()
