"""``bpsfast agent``: starts and watches processes on a host for a launcher elsewhere, over ssh's two pipes.

It passes on what the processes print, and reports their ends. It never outlives the launcher: it ends all that it has
started, first by SIGTERM, when its standard input ends, when it has received nothing for `SILENCE_S` (a cable is out;
the launcher sends `Alive` at intervals), or by a signal. If it is killed itself, the kernel ends them
(`die_with_parent`).
"""
from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import platform
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .._version import __version__
from ..base.addresses import any_host, family_of, own_addresses
from ..base.exit_codes import NOT_EXECUTABLE
from ..base.resources import is_ready
from ..orchestration.errors import ProtocolError
from ..orchestration.host_lookup import resolve
from . import remote_protocol as messages
from .daemons import clean_environment, reserve_master_port, reserve_port
from .processes import Command, Kind, LocalProcess, LocalProcesses, Process, SignalEvents, set_watched, thread_defaults
from .remote_protocol import PipeConnection

#: Silence after which the launcher counts as gone: it, or the connection, may be stopped for some time.
SILENCE_S = 60.0
PULSE_S = 5.0
_AFTER_SIGTERM_S = 1.5
#: Time for one address; for all, which the launcher waits for; number of addresses tried at the same time.
_REACH_S, _REACH_ALL_S, _N_AT_ONCE = 3.0, 12.0, 64
TOKEN_NBYTES = 16
#: Interval at which an agent that tries its own listener answers it.
_GREET_S = 0.02
#: While this much output waits for the launcher, the job waits, too.
_WAITING_NBYTES = 1 << 20


class Agent:
    """One agent, with its connection to the launcher. Main thread only."""

    def __init__(self, connection: PipeConnection) -> None:
        self._connection = connection
        self._selector = selectors.DefaultSelector()
        # separate, as it is not watched while too much output waits for the launcher
        self._outputs = selectors.DefaultSelector()
        self._children = LocalProcesses()
        self._by_number: dict[int, LocalProcess] = {}
        self._resources = contextlib.ExitStack()
        self._listener: socket.socket | None = None
        self._last_received_s = time.monotonic()
        self._pulse_s = self._last_received_s + PULSE_S
        self._is_over = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            messages.Prepare: self._prepare, messages.Listen: self._listen, messages.Reach: self._reach,
            messages.StopListening: self._stop_listening, messages.Reserve: self._reserve, messages.Start: self._start,
            messages.Signal: self._signal, messages.Alive: lambda message: None}

    def run(self) -> None:
        """Serve until the launcher is done or gone, then end all processes."""
        with SignalEvents() as signals, self._selector, self._outputs, self._resources:
            self._selector.register(signals, selectors.EVENT_READ, self._end)
            self._selector.register(self._connection.source, selectors.EVENT_READ, self._receive)
            self._children.open(self._outputs)
            try:
                self._connection.mark()
                self._send(messages.Here(messages.VERSION, __version__, platform.python_version(), addresses()))
                while not self._is_over:
                    self._step()
            finally:
                self._is_over = True
                self._end_children()

    def _receive(self) -> None:
        self._last_received_s = time.monotonic()
        try:
            for message in self._connection.receive():
                self._handlers[type(message)](message)
        except EOFError:
            self._end()
        except ProtocolError as exc:
            print(f"bpsfast agent: {exc}", file=sys.stderr)
            self._end()

    def _prepare(self, asked: messages.Prepare) -> None:
        try:
            os.chdir(asked.directory)
        except OSError as exc:
            self._send(messages.Refused(f"the working directory {asked.directory} cannot be entered there "
                                        f"({exc.strerror}): create it, or name another one by --remote-dir"))
        else:
            self._send(messages.Ready())

    def _listen(self, asked: messages.Listen) -> None:
        host = "127.0.0.1" if asked.is_loopback else any_host()
        reserved = self._resources.enter_context(reserve_port(host))
        port = reserved.getsockname()[1]
        # beside the reserving socket, until the scheduler binds the port
        self._listener = self._resources.enter_context(socket.create_server(
            (host, port), family=family_of(host), dualstack_ipv6=":" in host))
        self._listener.setblocking(False)
        token = secrets.token_bytes(TOKEN_NBYTES)
        self._selector.register(self._listener, selectors.EVENT_READ,
                                functools.partial(_greet, self._listener, token))
        self._send(messages.Listening(port, token))

    def _reach(self, asked: messages.Reach) -> None:
        if self._listener is None:
            self._send(messages.Reached(reached(asked)))
            return
        with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:  # this agent may have to answer
            answer = pool.submit(reached, asked)
            while not answer.done():
                if is_ready(self._listener, _GREET_S):
                    self._selector.get_key(self._listener).data()
            self._send(messages.Reached(answer.result()))

    def _stop_listening(self, asked: messages.StopListening) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        self._send(messages.Ready())

    def _reserve(self, asked: messages.Reserve) -> None:
        self._send(messages.Reserved(self._resources.enter_context(reserve_master_port()).getsockname()[1]))

    def _start(self, asked: messages.Start) -> None:
        kind = Kind(asked.kind)
        environ = environment(os.environ, asked.variables, asked.n_ranks if kind is Kind.RANK else 0)
        out, err = (_ToLauncher(self._send, asked.number, is_error) for is_error in (False, True))
        try:
            self._by_number[asked.number] = self._children.start(Command(asked.name, kind, asked.argv, environ),
                                                                 out, err)
        except OSError as exc:
            err.feed(f"bpsfast: cannot start {asked.argv[0]}: {exc.strerror}\n".encode())
            self._send(messages.Ended(asked.number, NOT_EXECUTABLE))

    def _signal(self, asked: messages.Signal) -> None:
        if (child := self._by_number.get(asked.number)) is not None:
            (child.signal_all if asked.is_for_group else child.signal)(asked.signal)

    def _step(self) -> None:
        now = time.monotonic()
        silent_s = self._last_received_s + SILENCE_S
        if now >= silent_s and not is_ready(self._connection.source, 0.0):  # else this process has not read
            self._end()
            return
        if now >= self._pulse_s:
            self._pulse_s = now + PULSE_S
            self._send(messages.Alive())
        waiting_nbytes = self._connection.pending_nbytes
        set_watched(self._selector, self._connection.target, selectors.EVENT_WRITE, self._flush, waiting_nbytes > 0)
        set_watched(self._selector, self._outputs, selectors.EVENT_READ, self._pass_on,
                    waiting_nbytes < _WAITING_NBYTES)
        for key, _ in self._selector.select(max(0.0, min(self._pulse_s, silent_s) - now)):
            key.data()

    def _pass_on(self) -> None:
        """Pass on output and ends of the processes."""
        for key, _ in self._outputs.select(0):
            for child in key.data():
                self._children.drain_one(child)
                for reporter, word, time_s in self._children.reports():
                    self._send(messages.Reported(self._number_of(reporter), word, time.monotonic() - time_s))
                self._send(messages.Ended(self._number_of(child), child.code))

    def _number_of(self, child: Process) -> int:
        return next(number for number, each in self._by_number.items() if each is child)

    def _send(self, message: Any) -> None:
        if not self._is_over:
            try:
                self._connection.send(message)
            except OSError:  # the launcher has closed the pipe
                self._end()

    def _flush(self) -> None:
        try:
            self._connection.flush()
        except OSError:
            self._end()

    def _end(self) -> None:
        self._is_over = True

    def _end_children(self) -> None:
        """End all that still runs, by SIGTERM and then SIGKILL."""
        running = [child for child in self._by_number.values() if child.code is None]
        for child in running:
            child.signal_all(signal.SIGTERM)
        deadline = time.monotonic() + _AFTER_SIGTERM_S
        while any(child.code is None for child in running) and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in self._outputs.select(left_s):
                key.data()
        self._children.close()


class _ToLauncher:
    """A sink that sends one stream of one process to the launcher."""

    def __init__(self, tell: Callable[[Any], None], number: int, is_error: bool) -> None:
        self._send, self._number, self._is_error = tell, number, is_error

    def feed(self, data: bytes) -> None:
        self._send(messages.Said(self._number, self._is_error, data))

    def finish(self) -> None:
        """Nothing: `Ended` tells the launcher."""


def addresses() -> list[str]:
    """Return this machine's addresses except loopback, first the one that ssh uses, then those of IPv4."""
    own = own_addresses()
    ssh = os.environ.get("SSH_CONNECTION", "").split()
    came_to = [ssh[2].removeprefix("::ffff:")] if len(ssh) == 4 else []
    return list(dict.fromkeys([*(address for address in came_to if address in own), *own]))


def environment(environ: Mapping[str, str], variables: Mapping[str, str], n_ranks: int) -> dict[str, str]:
    """Return the environment of a process: *environ* without the role of another job, and *variables* over it.

    PATH begins with this interpreter's folder, so that ``python`` is the one that has bpsfast. Each of *n_ranks* (0:
    this is no rank) gets its share of the cores, unless the variables are set.
    """
    found = clean_environment(environ)
    found.pop("PYTHONSAFEPATH", None)  # set for the agent; programs import from their own folder
    found["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])
    return {**(thread_defaults(n_ranks) if n_ranks else {}), **found, **variables}


def _greet(listener: socket.socket, token: bytes) -> None:
    with contextlib.suppress(OSError):  # the client is gone again
        sock, _ = listener.accept()
        with sock:
            sock.send(token)


def reached(asked: messages.Reach) -> list[str]:
    """Return for each address of *asked* "" if it is reached from this machine, else the error.

    Takes at most `_REACH_ALL_S`, however many do not answer.
    """
    until_s = time.monotonic() + _REACH_ALL_S
    with concurrent.futures.ThreadPoolExecutor(max_workers=_N_AT_ONCE) as pool:
        return list(pool.map(lambda address: _reached(address, asked.port, asked.token, until_s), asked.addresses))


def _reached(address: str, port: int, token: bytes, until_s: float) -> str:
    """Return "" if the listener with *token* answers there, else the error."""
    until_s = min(until_s, time.monotonic() + _REACH_S)
    try:
        with socket.create_connection((resolve(address, _left(until_s)), port), _left(until_s)) as sock:
            sock.settimeout(_left(until_s))
            received = sock.recv(max(1, len(token)), socket.MSG_WAITALL)
    except OSError as exc:
        return exc.strerror or str(exc)
    return "" if received == token else "another program answers there"


def _left(until_s: float) -> float:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out, as earlier addresses did")
    return left_s


def main() -> int:
    """Run the agent for the launcher at the other end of standard input and output."""
    with os.fdopen(os.dup(1), "wb", buffering=0) as out:
        os.dup2(2, 1)  # other output of this process must not mix with messages
        Agent(PipeConnection(0, out.fileno(), messages.FromLauncher, after_mark=False)).run()
    return 0
