"""The scheduler process: a ZeroMQ ROUTER around `SchedulerState`. It carries decisions, never tensor bytes.

Clients must know the scheduler's CURVE key to be understood, and have the job's client key to be admitted (ZAP,
answered in the same loop). Both follow from the job key: a client with another key gets no byte back, and its deadline
passes.
"""
from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import secrets
import time
from collections import deque
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from .. import messages as m
from ..errors import DECODE_ERRORS, ClosedError, ConfigError, MismatchError, ProtocolError
from ..job.admission import JobSettings
from ..security import curve_pair
from ..wake_up import WakeUp
from ..zmq_connections import ConnectionActivity, ZmqHandshakeLimiter
from .scheduler_state import SchedulerState

log = logging.getLogger("bpsfast.scheduler")

#: The address at which libzmq asks, within one context, whether a client may connect (ZeroMQ RFC 27).
_ZAP_ADDRESS = "inproc://zeromq.zap.01"

#: The most unread messages of one node; beyond that its connection is not read.
_MOST_UNREAD = 10_000
#: Interval of tries to listen on a port that another process has.
_PORT_RETRY_S = 0.1


class _Versioned(msgspec.Struct):
    """The fields of a `Join` that all versions have: those are read of a message of another version."""

    version: int
    type: str = ""
    ranks: Any = ()


class Scheduler:
    """One job's scheduler. Call `run` in any one thread; only `stop` may be called from others.

    Parameters
    ----------
    bind_host, port : where to listen; port 0 takes a free one, see `port`.
    shutdown_notice_s : how long to go on after an abort, so that latecomers hear the reason. After a good end
        it goes on until all nodes have closed their connections, at most `lease_s`: a node that was cut off
        reconnects to hear the end.
    tick_s : longest time between two looks at the clock.

    Raises
    ------
    ConfigError
        If the address cannot be bound: at once, or after `lease_s` if another process has the port.
    """

    def __init__(self, settings: JobSettings, key: bytes, *, bind_host: str = "*", port: int = 0,
                 shutdown_notice_s: float = 1.0, tick_s: float = 0.2) -> None:
        self._state = SchedulerState(
            dataclasses.replace(settings, name=settings.name or secrets.token_hex(8)), time.monotonic())
        self._shutdown_notice_s = shutdown_notice_s
        self._lease_s = settings.lease_s
        self._tick_s = tick_s
        self._stop_reason = ""
        self._is_host_ending = False
        self._is_abort_told = False
        self._n_unreadable = 0
        self._client_key = curve_pair(key, "node")[0]
        self._context = zmq.Context()
        self._wake = WakeUp()
        self._zap = self._context.socket(zmq.REP)
        self._router = self._context.socket(zmq.ROUTER)
        self._handshake_limiter = ZmqHandshakeLimiter(self._router, settings.most_nodes)
        self._pulses = ConnectionActivity()
        try:
            self._zap.bind(_ZAP_ADDRESS)
            self.port = self._listen(key, bind_host, port)
        except BaseException:
            self.close()
            raise
        self._poller = zmq.Poller()
        for source in (self._zap, self._router, self._handshake_limiter.monitor, self._wake.fileno()):
            self._poller.register(source, zmq.POLLIN)

    def _listen(self, key: bytes, host: str, port: int) -> int:
        router = self._router
        router.curve_server = True
        router.curve_publickey, router.curve_secretkey = curve_pair(key, "scheduler")
        router.zap_domain = b"bpsfast"
        router.router_mandatory = True  # a send to a closed connection must fail, not vanish
        # Before `bind`, whose value every connection keeps: by default one that breaks while the socket closes waits
        # for ever to deliver what is left (libzmq 4.3.5, issue 2733; once in 5000 closings beside other work).
        router.linger = 1000
        router.sndhwm = 0
        router.rcvhwm = _MOST_UNREAD
        router.maxmsgsize = m.LONGEST_NBYTES
        router.ipv6 = True  # "*" then means addresses of both versions
        if ":" in host:
            host = f"[{host.strip('[]')}]"
        self._bind(f"tcp://{host}:{port or '*'}")
        return int(router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])

    def _bind(self, address: str) -> None:
        """Listen on *address*, for up to `lease_s`: after a restart the job's scheduler before may still have it."""
        deadline = time.monotonic() + self._lease_s
        while True:
            try:
                self._router.bind(address)
                return
            except zmq.ZMQError as exc:
                why = "Set"
                if exc.errno == zmq.EADDRINUSE:
                    if time.monotonic() < deadline:
                        log.info("waiting for %s, on which another process listens", address)
                        time.sleep(_PORT_RETRY_S)
                        continue
                    why = f"Another program has that port, and still had it after {self._lease_s:g} s (lease_s): set"
                raise ConfigError(
                    f"the scheduler cannot listen on {address}: {exc}. {why} another MASTER_PORT (under torchrun the "
                    "scheduler's port follows from it), or BPSFAST_SCHEDULER to host:port of a free one, on all roles"
                ) from exc

    def run(self) -> int:
        """Serve until the job is over, or `has_given_up`; return the exit code: 0 if all ranks left, else 1.

        Ends within `start_timeout_s` (with `JobSettings.awaits_ranks` after the first node with ranks has joined),
        `lease_s` or `stop`. Closes everything.
        """
        try:
            while not self._state.over:
                self._turn()
            until = time.monotonic() + (self._shutdown_notice_s if self.aborted is not None else self._lease_s)
            while (self._is_waited_for() and not (self._stop_reason or self.has_given_up)
                   and time.monotonic() < until):
                self._turn()
            self._log_abort()
            return 0 if self._state.job.finished else 1
        finally:
            self.close()

    def _log_abort(self) -> None:
        """Log why the job was aborted: as an error only if no rank could be told."""
        if self.has_given_up and self.aborted is not None:
            log.warning("this scheduler ends, and leaves the job to one at another address: %s", self.aborted.reason)
        elif self.aborted is not None:
            is_said = self._is_abort_told or bool(self._stop_reason)  # the process that stopped it knows
            log.log(logging.INFO if is_said else logging.ERROR, "the job is aborted: %s: %s", self.aborted.error,
                    self.aborted.reason)

    @property
    def aborted(self) -> m.Abort | None:
        """Return what ended the job, if it did not end well."""
        return self._state.job.aborted

    @property
    def has_given_up(self) -> bool:
        """Whether the job may go on under another scheduler: this one hears too few nodes, or its host ends."""
        return self._state.has_given_up

    @property
    def job_name(self) -> str:
        """The name of the job, "" before its nodes know it; after a restart it is the name from before."""
        return self._state.job.name if self._state.job.admitted else ""

    def stop(self, reason: str = "the scheduler was stopped", *, is_host_ending: bool = False) -> None:
        """Abort the job with *reason* and make `run` return at once. Any thread, signal handlers too.

        *is_host_ending*: maybe only this host ends: if another scheduler can take over (`SchedulerState.leave`), the
        nodes are told nothing, and look for that one.
        """
        self._is_host_ending = is_host_ending
        self._stop_reason = reason
        if not self._context.closed:
            self._wake.ring()

    def close(self) -> None:
        """Send what is queued, for at most a second, and free the sockets. Idempotent."""
        if self._context.closed:
            return
        self._zap.close(linger=0)
        self._handshake_limiter.close()
        self._router.close()
        self._context.term()
        self._wake.close()

    def _is_waited_for(self) -> bool:
        """Whether a node may still connect to hear how the job ended."""
        is_told = self._state.job.is_known_to_be_over
        return self.aborted is not None or not is_told or self._handshake_limiter.n_known > 0

    def _turn(self) -> None:
        """Wait for at most one tick, then read all messages, and only then the clock: what was sent in time counts.

        But read for at most a tick, so that a node that never stops sending does not delay heartbeats and deadlines.
        All nodes are read in turn, so none seems silent.
        """
        ready = dict(self._poller.poll(int(self._tick_s * 1000)))
        if self._zap in ready:
            self._admit()
        if self._router not in ready or self._read_all():
            self._handshake_limiter.update()  # else connections with unread messages might seem to be strangers
        if self._wake.fileno() in ready:
            self._wake.clear()
            error = ClosedError(self._stop_reason)
            if not (self._is_host_ending and self._state.leave(error)):
                self._send(self._state.abort(error))
        now = time.monotonic()
        for sender in self._state.quiet(now):
            silence_s = self._pulses.silence_s(sender)
            self._state.pulse(sender, None if silence_s is None else now - silence_s)
        self._send(self._state.tick(now))
        for remark in self._state.take_remarks():
            log.warning("%s", remark)

    def _admit(self) -> None:
        """Answer libzmq's question whether a client's CURVE key is the job's."""
        version, request, _, _, _, mechanism, *credentials = self._zap.recv_multipart()
        expected = z85.decode(self._client_key)
        known = mechanism == b"CURVE" and credentials == [expected]
        status = (b"200", b"OK", b"node") if known else (b"400", b"not the job's key", b"")
        self._zap.send_multipart([version, request, *status, b""])

    def _read_all(self) -> bool:
        """Read all messages that have come; return False if a tick passed before."""
        until = time.monotonic() + self._tick_s
        while time.monotonic() < until:
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            fd = self._handshake_limiter.note_message(frames[-1])
            sender, *rest = (frame.bytes for frame in frames)
            self._pulses.note_message(sender, fd)
            try:
                if len(rest) != 1:
                    raise ProtocolError(f"{len(rest)} frames came from a node where a control message is one")
                message = m.decode(rest[0], "node")
            except (ProtocolError, *DECODE_ERRORS) as exc:
                self._unreadable(sender, rest[0] if rest else b"", exc if isinstance(exc, ProtocolError) else
                                 ProtocolError(f"{len(rest[0])} bytes from a node are no control message: "
                                               f"{type(exc).__name__}"))
                continue
            self._send(self._state.receive(time.monotonic(), sender, message))
            if isinstance(message, m.Lost) and message.who.startswith("rank ") and self.aborted is not None:
                self._is_abort_told = True  # the rank, or its launcher, reports it
        return False

    def _unreadable(self, sender: bytes, data: bytes, error: ProtocolError) -> None:
        """Report to the job a message of *sender* that cannot be read; blame the version if it differs."""
        reason: ProtocolError | MismatchError = error
        has_ranks = False
        with contextlib.suppress(ProtocolError, *DECODE_ERRORS):
            said = msgspec.msgpack.decode(m.uncompressed(data, "node"), type=_Versioned)
            has_ranks = said.type == "Join" and bool(said.ranks)
            if said.version != m.VERSION:
                reason = m.version_mismatch(said.version, "a node")
        self._n_unreadable += 1
        if self._n_unreadable <= 8 or self._n_unreadable & (self._n_unreadable - 1) == 0:  # a flood would fill the disk
            log.warning("a message from %s cannot be read: %s", self._pulses.address(sender), reason)
        self._send(self._state.unreadable(time.monotonic(), sender, reason, has_ranks))

    def _send(self, outgoing: m.Outgoing) -> None:
        """Send in order; report closed connections to the job, and send what follows.

        A message to many nodes is encoded once, and their queues share its bytes.
        """
        pending = deque(outgoing)
        last, frame = None, zmq.Frame()
        while pending:
            destination, message = pending.popleft()
            if message is not last:
                data = m.encode(message)
                if not isinstance(message, m.KeyValueReply):  # its value is opaque, and each goes to one node
                    data = m.compressed(data)
                last, frame = message, zmq.Frame(data, copy=True)
            try:
                self._router.send_multipart([destination, frame], zmq.NOBLOCK, copy=False)
                self._is_abort_told |= isinstance(message, m.Abort | m.Refuse) and self.aborted is not None
            except zmq.ZMQError as exc:
                if exc.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                    raise
                pending.extend(self._state.unreachable(time.monotonic(), destination))
