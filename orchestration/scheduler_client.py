"""A node's connection to the scheduler: a ZeroMQ DEALER, heartbeats, reconnection, and the error when it is gone."""
from __future__ import annotations

import math
import os
import random
import secrets
import time
from collections.abc import Sequence

import zmq

from . import messages as m
from .clock_offset import ClockOffset
from .errors import CapacityError, PeerLostError, StallError
from .long_lists import as_sent
from .scheduler_addresses import SchedulerAddresses
from .security import curve_pair
from .zmq_connections import monitor_event

_EVENTS = (zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_SUCCEEDED
           | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
           | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
#: Number of clock samples in a row at the start; afterwards there is one in each heartbeat.
_FIRST_QUESTIONS = 8
#: Share of the lease after which a silent connection is given up. TCP may keep a dead one for longer than any lease,
#: because it retransmits ever more rarely; a new one must be made before the scheduler calls this node lost.
_PATIENCE = 0.5
#: Share of the lease after which a new connection without any message is given up.
_IMPATIENCE = 0.25
#: The same, where the next address of several is tried, if this one refuses connections.
_REFUSED_PATIENCE = 0.1
#: Longest time between two calls of `tick` that does not mean that this process was stopped: a node's loop may wait for
#: half of it.
_USUAL_TICK_S = 0.5
#: Share of the lease after which a scheduler that hears no majority is left for the next address. Each node draws a
#: time in these limits, so that nodes at two such schedulers do not change places again and again.
_SHORT_PATIENCE = 0.3, 0.6
#: Multiple of `start_timeout_s` in which one of several schedulers has to take over. A scheduler itself waits for
#: missing nodes for `start_timeout_s`, and then gives a better reason.
_UNLED_TIMEOUTS = 1.5
#: Time that the first connection waits for the scheduler's address: most names resolve at once.
_RESOLVE_S = 0.2


class SchedulerClient:
    """One node's connection to the scheduler at *host*:*port*. Owner thread only.

    Only `close` blocks, and the constructor for at most 0.2 s if *host* is a name. Put `sockets` into a `zmq.Poller`;
    whenever it fires, and several times a heartbeat, call `recv_nowait` and then `tick`. The scheduler need not run
    yet: connecting is retried until `start_timeout_s` after *now*. If it is lost later, it has as long to come back,
    and `tick` reconnects. A thread looks up a name again and again while the scheduler does not answer; until the
    resolver answers, its last answer counts. *pulse_s*: interval of the heartbeats of libzmq's own thread, which do not
    depend on this one; 0: none. *asks_time*: heartbeats ask for the scheduler's monotonic clock, and `clock` estimates
    how far it is ahead of ours.

    *further*: the other addresses at which the scheduler may be; and a name may have several. While none answers, they
    are tried in turn, first the present one again: at most one connection is open at a time. At the start the first
    address is tried first, though its name may be resolved later than that of others. One that answers and hears
    no majority of the nodes (`Heartbeat.is_short`) is left for the next one after a while.
    """

    def __init__(self, host: str, port: int, key: bytes, *, now: float, heartbeat_s: float = 1.0, lease_s: float = 10.0,
                 start_timeout_s: float = 60.0, pulse_s: float = 0.0, asks_time: bool = False,
                 further: Sequence[tuple[str, int]] = ()) -> None:
        self._addresses = SchedulerAddresses([(host, port), *further], now)
        self.address = str(self._addresses)
        self._key = key
        self._heartbeat_s = heartbeat_s
        self._lease_s = lease_s
        self._start_timeout_s = start_timeout_s
        self._pulse_s = pulse_s
        self._started = self._last_tick = now
        self._next_heartbeat = now + (0.0 if asks_time else heartbeat_s)  # so that short jobs have a trace, too
        self._n_heartbeats = 0
        self._n_first = 0  # which connection was the first one to the first address
        self._process, self._n_dialled = f"{os.getpid()}-{secrets.token_hex(12)}", 0
        self._asks_time = asks_time
        self.clock = ClockOffset()
        self._clock_host = ""
        self._n_connected = 0
        self._was_secure = False
        self._ended = False
        self._was_heard = False
        self._lost: tuple[float, str] | None = None  # when the scheduler was heard last, and why it counts as lost
        self._was_led = False  # a scheduler has admitted this node
        self._unled: tuple[float, str] | None = None  # since when no scheduler decides, and why
        self._connected_to: tuple[str, int] | None = None
        self._context = zmq.Context()
        self._dial(now)

    def _dial(self, now: float) -> None:
        """Begin a connection; messages are sent once it is established."""
        self._addresses.look_up(now)
        if self._addresses.choose() is None or (self._n_dialled == 0 and self._addresses.awaits_first):
            self._addresses.take_answers(_RESOLVE_S)
        self._heard: float | None = None  # over this connection
        self._dialled = now
        self._short: float | None = None  # since when the scheduler has heard no majority
        self._secure = self._disconnected = self._is_refused = False
        # Two heartbeats at least: the next one may say that it hears a majority by now.
        self._short_patience_s = max(self._lease_s * random.uniform(*_SHORT_PATIENCE), 2 * self._heartbeat_s)
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
        self._connected_to = None
        self._connect()

    def _connect(self) -> None:
        """Connect to the chosen address, if there is one."""
        self._connected_to = self._addresses.choose()
        if self._connected_to is None:
            return
        if self._addresses.is_at_first:
            self._n_first = self._n_first or self._n_dialled
        host, port = self._connected_to
        if ":" in host:
            self._socket.ipv6 = True
            host = f"[{host}]"
        self._socket.connect(f"tcp://{host}:{port}")
        unsent, self._unsent = self._unsent, []
        for data in unsent:
            self._socket.send(data, zmq.NOBLOCK)

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
        if self._connected_to is not None:
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
            self._addresses.keep()
            message = m.decode(data, "scheduler")
            self._ended = self._ended or isinstance(message, m.Finish | m.Abort | m.Refuse)
            self._note_lead(now, message)
            if isinstance(message, m.Echo):
                self._take_time(message)
                if self._n_heartbeats < _FIRST_QUESTIONS:
                    self._beat()
            elif not isinstance(message, m.Heartbeat):
                received.append(message)

    def _take_time(self, message: m.Echo) -> None:
        """Compare clocks, always with the host whose scheduler was asked first: another host has another clock."""
        host = self._connected_to[0] if self._connected_to is not None else ""
        self._clock_host = self._clock_host or host
        if host == self._clock_host:
            self.clock.sample(message.sent_ns, message.there_ns, time.monotonic_ns())

    def _note_lead(self, now: float, message: m.Message) -> None:
        """Note what *message* tells of whether this scheduler decides."""
        if isinstance(message, m.Heartbeat):
            self._short = None if not message.is_short else now if self._short is None else self._short
        elif isinstance(message, m.Welcome | m.Resume):
            self._was_led, self._unled = True, None
        elif isinstance(message, m.RejoinRequest) and self._was_led:
            self._unled = self._unled or (now, "it has asked all nodes to rejoin")

    def tick(self, now: float) -> bool:
        """Send a heartbeat if it is due; reconnect if the scheduler is gone. Call `recv_nowait` before.

        Returns whether it has reconnected: then `sockets` are others, messages in flight in both directions are lost,
        and the scheduler that answers may know nothing of this node. Raises `PeerLostError` if no scheduler has
        answered for `start_timeout_s` (never after its last message), or if of several none has taken over for half as
        long again; `StallError` if none has answered since the start for `start_timeout_s`.
        """
        slept_s, self._last_tick = now - self._last_tick, now
        if self._ended:
            return False
        # This process was stopped, and what came meanwhile is unread.
        if slept_s > max(self._lease_s * _IMPATIENCE / 2, _USUAL_TICK_S):
            self._heard = min(now, self._heard + slept_s) if self._heard is not None else None
            self._dialled = min(now, self._dialled + slept_s)
            self._short = None
            self._unled = (min(now, self._unled[0] + slept_s), self._unled[1]) if self._unled is not None else None
        self._addresses.take_answers()
        if self._heard is None:
            self._addresses.look_up(now)
        if self._connected_to is None:
            self._connect()
        trouble = self._trouble(now)
        # Counts from the next tick on, so that an Abort on its way in is read first.
        self._read_monitor()
        if not self._was_heard and now - self._started >= self._start_timeout_s:
            raise StallError(self._nobody())
        if trouble and self._was_heard:
            self._lost = self._lost or (self._heard or now, trouble)
        if trouble and self._was_led:
            self._unled = self._unled or (self._heard or now, trouble)
        if self._lost is not None and now - self._lost[0] >= self._start_timeout_s:
            since, first = self._lost
            raise PeerLostError(f"the scheduler at {self.address} is gone: {first}, and none has answered there since, "
                                f"for {now - since:.1f} s (start_timeout_s = {self._start_timeout_s:g})")
        if self._unled is not None and self._addresses.are_several and (
                now - self._unled[0] >= _UNLED_TIMEOUTS * self._start_timeout_s):
            since, first = self._unled
            raise PeerLostError(f"the scheduler at one of {self.address} is gone: {first}, and no scheduler there has "
                                f"taken over since, for {now - since:.1f} s ({_UNLED_TIMEOUTS:g} times start_timeout_s "
                                f"= {self._start_timeout_s:g}): none hears a majority of the nodes with ranks")
        if trouble:
            self._hang_up(0.0)
            if (self._heard is None or self._short is not None) and self._connected_to == self._addresses.choose():
                self._addresses.advance()  # else the same one first: it may be started again there
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
        if self._heard is None and now - self._dialled >= self._patience_s:
            return "nobody answers there"
        chosen = self._addresses.choose()
        if self._heard is None and chosen is not None and self._connected_to not in (None, chosen):
            return f"its name means {chosen[0]} by now"
        if self._short is not None and self._addresses.are_several and (
                now - self._short >= self._short_patience_s):
            return "it hears no majority of the nodes with ranks"
        return ""

    @property
    def _patience_s(self) -> float:
        """How long a connection may take to bring the first message."""
        if not self._addresses.are_several:
            return self._lease_s * _IMPATIENCE if self._was_heard else math.inf
        if not self._was_heard and self._n_dialled == (self._n_first if self._connected_to is not None else 1):
            return self._lease_s  # the job starts at the first address, perhaps later than this node
        if self._secure:
            return self._lease_s * _PATIENCE  # its process lives, and sends heartbeats
        return self._lease_s * (_REFUSED_PATIENCE if self._is_refused else _IMPATIENCE)

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
            elif event == zmq.EVENT_CONNECT_RETRIED:
                self._is_refused = True
            elif event == zmq.EVENT_DISCONNECTED and self._secure:
                self._disconnected = True

    def _nobody(self) -> str:
        """Explain why no scheduler answered, by what the sockets saw."""
        if self._was_secure:
            seen = "connected, but the scheduler never answered: it hangs, or is overloaded"
        elif self._n_connected:
            seen = f"connected {self._n_connected} times; the listener has another job key or is no scheduler"
        elif self._connected_to is None:
            names = ", ".join(map(repr, self._addresses.unresolved))
            seen = f"the name {names} was not resolved: check it with `getent hosts`"
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
