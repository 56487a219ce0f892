"""A node's connection to the scheduler: a ZeroMQ DEALER, heartbeats, reconnection, and the error when it is gone."""
from __future__ import annotations

import contextlib
import os
import secrets
import time

import zmq

from . import messages as m
from .clock_offset import ClockOffset
from .errors import CapacityError, PeerLostError, StallError
from .host_lookup import HostLookup, format_address, is_address
from .long_lists import as_sent
from .security import curve_pair
from .zmq_connections import monitor_event

_EVENTS = (zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
           | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
           | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
#: Number of clock samples in a row at the start; afterwards there is one in each heartbeat.
_FIRST_QUESTIONS = 8
#: Share of the lease after which a silent connection is given up. TCP may keep a dead one for longer than any lease,
#: because it retransmits ever more rarely; a new one must be made before the scheduler calls this node lost.
_PATIENCE = 0.5
#: Share of the lease after which a new connection without any message is given up.
_IMPATIENCE = 0.25
#: Time that the first connection waits for the scheduler's address: most names resolve at once.
_RESOLVE_S = 0.2
#: Interval of look-ups of the scheduler's name while it does not answer.
_LOOK_AGAIN_S = 1.0


class SchedulerClient:
    """One node's connection to the scheduler at *host*:*port*. Owner thread only.

    Only `close` blocks, and the constructor for at most 0.2 s if *host* is a name. Put `sockets` into a `zmq.Poller`;
    whenever it fires, and several times a heartbeat, call `recv_nowait` and then `tick`. The scheduler need not run
    yet: connecting is retried until `start_timeout_s` after *now*. If it is lost later, it has as long to come back,
    and `tick` reconnects. A thread looks up a name again and again while the scheduler does not answer; until the
    resolver answers, its last answer counts. *pulse_s*: interval of the heartbeats of libzmq's own thread, which do not
    depend on this one; 0: none. *asks_time*: heartbeats ask for the scheduler's monotonic clock, and `clock` estimates
    how far it is ahead of ours.
    """

    def __init__(self, host: str, port: int, key: bytes, *, now: float, heartbeat_s: float = 1.0, lease_s: float = 10.0,
                 start_timeout_s: float = 60.0, pulse_s: float = 0.0, asks_time: bool = False) -> None:
        self.address = format_address(host, port)
        self._host, self._port, self._key = host, port, key
        self._heartbeat_s = heartbeat_s
        self._lease_s = lease_s
        self._start_timeout_s = start_timeout_s
        self._pulse_s = pulse_s
        self._started = self._last_tick = now
        self._next_heartbeat = now + (0.0 if asks_time else heartbeat_s)  # so that short jobs have a trace, too
        self._n_heartbeats = 0
        self._process, self._n_dialled = f"{os.getpid()}-{secrets.token_hex(12)}", 0
        self._asks_time = asks_time
        self.clock = ClockOffset()
        self._n_connected = 0
        self._was_secure = False
        self._ended = False
        self._was_heard = False
        self._lost: tuple[float, str] | None = None  # when the scheduler was heard last, and why it counts as lost
        self._last_known = host if is_address(host) else ""  # the scheduler's address
        self._connected_to = ""
        self._lookup: HostLookup | None = None
        self._look_at = now
        self._context = zmq.Context()
        self._dial(now)

    def _dial(self, now: float) -> None:
        """Begin a connection; messages are sent once it is established."""
        self._look_up(now)
        if not self._last_known:
            self._take_lookup(_RESOLVE_S)
        self._heard: float | None = None  # over this connection
        self._dialled = now
        self._secure = self._disconnected = False
        socket = self._socket = self._context.socket(zmq.DEALER)
        self._monitor = socket.get_monitor_socket(_EVENTS)
        socket.curve_publickey, socket.curve_secretkey = curve_pair(self._key, "node")
        socket.curve_serverkey = curve_pair(self._key, "scheduler")[0]
        self._n_dialled += 1
        socket.identity = m.connection_id(self._process, self._n_dialled)
        socket.sndhwm = socket.rcvhwm = 0
        if self._pulse_s:
            socket.heartbeat_ivl = max(10, round(1000 * self._pulse_s))
            socket.heartbeat_timeout = max(10, round(1000 * self._lease_s))  # by default as short as that
        socket.reconnect_ivl = 50
        socket.reconnect_ivl_max = 500
        self._unsent: list[bytes] = []  # until the scheduler's address is known
        self._connected_to = ""
        if self._last_known:
            self._connect()

    def _connect(self) -> None:
        host = self._connected_to = self._last_known
        if ":" in host:
            self._socket.ipv6 = True
            host = f"[{host}]"
        self._socket.connect(f"tcp://{host}:{self._port}")
        unsent, self._unsent = self._unsent, []
        for data in unsent:
            self._socket.send(data, zmq.NOBLOCK)

    def _look_up(self, now: float) -> None:
        if self._lookup is None and not is_address(self._host):
            self._lookup, self._look_at = HostLookup(self._host), now + _LOOK_AGAIN_S

    def _take_lookup(self, timeout_s: float = 0.0) -> None:
        """Take the resolver's answer, waiting up to *timeout_s*."""
        lookup = self._lookup
        if lookup is None or not lookup.wait(timeout_s):
            return
        self._lookup = None
        with contextlib.suppress(OSError):
            first = lookup.address(0.0)
            if self._connected_to not in lookup.addresses:  # a resolver may give several, in any order
                self._last_known = first

    def _hang_up(self, linger_s: float) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=int(linger_s * 1000))

    @property
    def is_heard(self) -> bool:
        """Whether the scheduler has sent something over the current connection. Any thread."""
        return self._heard is not None and self._lost is None

    @property
    def sockets(self) -> tuple[zmq.Socket, zmq.Socket]:
        """The sockets to poll for input."""
        return self._socket, self._monitor

    def send(self, message: m.Message) -> None:
        """Send *message*, once the connection is established. Of many declared tensors only their digest is sent."""
        data = m.encode(as_sent(message))
        if len(data) > m.LONGEST_NBYTES:
            raise CapacityError(f"a {type(message).__name__} of {len(data)} bytes is longer than the scheduler reads "
                                f"({m.LONGEST_NBYTES}): use shorter names or values")
        data = m.compressed(data)
        if self._connected_to:
            self._socket.send(data, zmq.NOBLOCK)
        else:
            self._unsent.append(data)

    def recv_nowait(self, now: float) -> list[m.Message]:
        """Return all messages that have arrived, except heartbeats and their replies."""
        received: list[m.Message] = []
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return received
            self._heard, self._was_heard, self._lost = now, True, None
            message = m.decode(data, "scheduler")
            self._ended = self._ended or isinstance(message, m.Finish | m.Abort | m.Refuse)
            if isinstance(message, m.Echo):
                self.clock.sample(message.sent_ns, message.there_ns, time.monotonic_ns())
                if self._n_heartbeats < _FIRST_QUESTIONS:
                    self._beat()
            elif not isinstance(message, m.Heartbeat):
                received.append(message)

    def tick(self, now: float) -> bool:
        """Send a heartbeat if it is due; reconnect if the scheduler is gone. Call `recv_nowait` before.

        Returns whether it has reconnected: then `sockets` are others, messages in flight in both directions are lost,
        and the scheduler that answers may know nothing of this node. Raises `PeerLostError` if no scheduler has
        answered for `start_timeout_s` (never after its last message); `StallError` if none has answered since the start
        for as long.
        """
        slept_s, self._last_tick = now - self._last_tick, now
        if self._ended:
            return False
        if slept_s > self._lease_s * _IMPATIENCE / 2:  # this process was stopped: what came meanwhile is unread
            self._heard = min(now, self._heard + slept_s) if self._heard is not None else None
            self._dialled = min(now, self._dialled + slept_s)
        self._take_lookup()
        if self._heard is None and now >= self._look_at:
            self._look_up(now)
        if self._last_known and not self._connected_to:
            self._connect()
        trouble = self._trouble(now)
        # Counts from the next tick on, so that an Abort on its way in is read first.
        self._read_monitor()
        if not self._was_heard and now - self._started >= self._start_timeout_s:
            raise StallError(self._nobody())
        if trouble and self._was_heard:
            self._lost = self._lost or (self._heard or now, trouble)
        if self._lost is not None and now - self._lost[0] >= self._start_timeout_s:
            since, first = self._lost
            raise PeerLostError(f"the scheduler at {self.address} is gone: {first}, and none has answered there since, "
                                f"for {now - since:.1f} s (start_timeout_s = {self._start_timeout_s:g})")
        if trouble:
            self._hang_up(0.0)
            self._dial(now)
            self._beat()  # a short first message: senders that are not known yet may not send much
            return True
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._heartbeat_s
            self._beat()
        return False

    def _trouble(self, now: float) -> str:
        """Say why this connection is to be given up, "" if it is not."""
        if self._disconnected:
            return "the connection closed without a last message"
        if self._heard is not None and now - self._heard >= self._lease_s * _PATIENCE:
            return f"it has been silent for {now - self._heard:.1f} s (lease_s = {self._lease_s:g})"
        if self._was_heard and self._heard is None and now - self._dialled >= self._lease_s * _IMPATIENCE:
            return "nobody answers there"
        if self._heard is None and self._connected_to not in ("", self._last_known):
            return f"its name means {self._last_known} by now"
        return ""

    def _beat(self) -> None:
        self._n_heartbeats += 1
        self.send(m.Heartbeat(sequence=self._n_heartbeats, sent_ns=time.monotonic_ns() if self._asks_time else 0))

    def _read_monitor(self) -> None:
        while self._monitor.poll(0):
            event = monitor_event(self._monitor)[0]
            if event == zmq.EVENT_CONNECTED:
                self._n_connected += 1
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._secure = self._was_secure = True
            elif event == zmq.EVENT_DISCONNECTED and self._secure:
                self._disconnected = True

    def _nobody(self) -> str:
        """Explain why no scheduler answered, by what the sockets saw."""
        if self._was_secure:
            seen = "connected, but the scheduler never answered: it hangs, or is overloaded"
        elif self._n_connected:
            seen = f"connected {self._n_connected} times; the listener has another job key or is no scheduler"
        elif not self._connected_to:
            seen = f"the name {self._host!r} was not resolved: check it with `getent hosts`"
        else:
            seen = "nobody listens there"
        return (f"wrong job key or no scheduler at {self.address}: nothing was heard within start_timeout_s = "
                f"{self._start_timeout_s:g} s ({seen})")

    def close(self, linger_s: float = 1.0) -> None:
        """Close the connection; blocks up to *linger_s* to send what is queued. Idempotent."""
        if self._context.closed:
            return
        self._hang_up(linger_s)
        self._context.term()
