"""The launcher's side of a job on other hosts: starts an agent on each host over ssh, and by it the job's processes.

All hosts are connected and checked (`RemoteHosts`) before a process is started on any of them (`RemoteHost`).
"""
from __future__ import annotations

import contextlib
import functools
import math
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from .._version import __version__
from ..base.exit_codes import LOST_HOST
from ..base.resources import Closing, is_ready
from ..orchestration.errors import BpsError, ConfigError, MismatchError, ProtocolError, StallError
from . import remote_protocol as messages, ssh as ssh_
from .daemons import tie_to_parent
from .host_list import Host
from .output import Output, Sink
from .processes import AFTER_SIGKILL_S, Command, EndReport, Process, ProcessHost, set_watched
from .remote_agent import PULSE_S, reached
from .remote_protocol import PipeConnection
from .ssh import Ssh

#: From the start of ssh to the agent's first message: connecting, login scripts, Python.
AGENT_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 30.0
#: How long an ssh whose output has ended may take to end, and the interval of checks.
SSH_END_S, LOOK_S = 2.0, 0.02
_LOOPBACK = "127.0.0.1"
#: On how many hosts besides the first one a scheduler may take over: each costs a round of connections at the start.
_N_SPARES = 2


class RemoteHosts(Closing):
    """An agent on each of *hosts*, from `connect` until `close`. A context manager; main thread only."""

    def __init__(self, hosts: Sequence[Host], ssh: Ssh, output: Output) -> None:
        self._ssh = ssh
        self.hosts: list[RemoteHost] = []
        self._is_over = threading.Event()
        # a thread, since the main thread may be blocked by a terminal that its user has stopped
        self._pulse = threading.Thread(target=self._send_pulse, name="bpsfast-pulse", daemon=True)
        if not all(host.is_here for host in hosts):
            ssh.check()
        try:
            for host in hosts:
                self.hosts.append(RemoteHost(host, ssh, output))
            self._pulse.start()
        except BaseException:
            self.close()
            raise

    def add(self, host: Host, output: Output) -> RemoteHost:
        """Begin to connect another host, without blocking; the caller waits for its agent."""
        if not host.is_here:
            self._ssh.check()
        added = RemoteHost(host, self._ssh, output)
        self.hosts.append(added)
        return added

    def forget(self, host: RemoteHost) -> None:
        """Forget *host*, which the caller closes."""
        self.hosts.remove(host)

    def connect(self) -> None:
        """Wait until every host has an agent of this version in the working directory.

        Raises `BpsError`: one line for each host that has none, with a command to type.
        """
        self._until(lambda host: host.agent is not None, self.hosts, AGENT_TIMEOUT_S)
        answers = self.ask(self.hosts, messages.Prepare(self._ssh.directory or os.getcwd()))
        refused = [(host, answer.reason) for host, answer in zip(self.hosts, answers)
                   if isinstance(answer, messages.Refused)]
        if refused:
            raise ConfigError("; ".join(f"{host.host.name}: {reason}" for host, reason in refused))

    def ask(self, hosts: Sequence[RemoteHost], message: Any) -> list[Any]:
        """Return the answer of each of *hosts* to *message*."""
        for host in hosts:
            host.send(message)
        self._until(lambda host: bool(host.answers), hosts, ANSWER_TIMEOUT_S)
        return [host.answers.pop(0) for host in hosts]

    def scheduler_address(self, address_wanted: str = "") -> tuple[str, int]:
        """Return an address and port for the scheduler on the first host, by which all hosts reach it.

        Raises `ConfigError`: see `address_of`.
        """
        first, others = self.hosts[0], self.hosts[1:]
        if not others and not address_wanted:
            port = self.ask([first], messages.Listen(is_loopback=True))[0].port
            self.ask([first], messages.StopListening())
            return _LOOPBACK, port
        try:
            return self.address_of(first, others, address_wanted)
        except ConfigError as exc:
            if address_wanted:
                raise ConfigError(f"{exc}. --scheduler-host takes a name or an address of {first.host.name}, where the "
                                  "scheduler runs, that every host can look up and reach") from exc
            raise ConfigError(f"{exc}. The scheduler runs on the first host: open its ports, name another host first, "
                              "or --scheduler-host") from exc

    def spare_addresses(self) -> list[tuple[RemoteHost, tuple[str, int]]]:
        """Return addresses of further hosts for a scheduler that takes over, as `scheduler_address`, and their hosts.

        There are at most `_N_SPARES`. A host that not all others reach is left out.
        """
        found = []
        for host in self.hosts[1:1 + _N_SPARES]:
            assert host.agent is not None, "connected"
            others = [other for other in self.hosts if other is not host]
            # First alone the one that ssh uses: trying all takes seconds if some do not answer.
            for address_wanted in (*host.agent.addresses[:1], ""):
                with contextlib.suppress(ConfigError):
                    found.append((host, self.address_of(host, others, address_wanted)))
                    break
        return found

    def master_port(self) -> int:
        """Return a free port on the first host, where rank 0 runs; the agent reserves it."""
        return self.ask([self.hosts[0]], messages.Reserve())[0].port

    def address_of(self, target: RemoteHost, others: Sequence[RemoteHost], address_wanted: str = "",
                   from_here: bool = False) -> tuple[str, int]:
        """Return an address of *target* by which *others* (and this machine) reach it, and a free port there.

        Tries all addresses of *target*, first the one that ssh uses; or *address_wanted* alone, also from *target*
        itself, as its own processes look it up.

        Raises `ConfigError` if no address is reached by all; the text lists the tries and their errors.
        """
        assert target.agent is not None, "connected"
        name, candidates = target.host.name, [address_wanted] if address_wanted else target.agent.addresses
        if target.host.is_here and not (address_wanted or others):
            candidates = [*candidates, _LOOPBACK]  # a machine without a network reaches itself
        if not candidates:
            raise ConfigError(f"{name} has no address besides loopback by which other hosts could reach it")
        listening = self.ask([target], messages.Listen(is_loopback=False))[0]
        question = messages.Reach(candidates, listening.port, listening.token)
        asked = [target, *others] if address_wanted else others
        found = {host.host.name: answer.errors for host, answer in zip(asked, self.ask(asked, question))}
        if from_here:
            found["here"] = reached(question)
        self.ask([target], messages.StopListening())
        for number, address in enumerate(candidates):
            if not any(errors[number] for errors in found.values()):
                return address, listening.port
        tried = "; ".join(f"from {where} {address}: {error}" for where, errors in found.items()
                          for address, error in zip(candidates, errors) if error)
        raise ConfigError(f"no address of {name} is reached by all ({tried})")

    def close(self) -> None:
        """End all that runs on the hosts, at the same time, and wait for that. Idempotent."""
        for host in self.hosts:
            host.begin_close()
        self._is_over.set()
        if self._pulse.is_alive():
            self._pulse.join()
        for host in self.hosts:
            host.close()

    def _send_pulse(self) -> None:
        """Send `Alive` to the agents at intervals."""
        while not self._is_over.wait(PULSE_S):
            for host in list(self.hosts):  # the main thread may add some
                host.send(messages.Alive())

    def _until(self, is_done: Callable[[RemoteHost], bool], hosts: Sequence[RemoteHost], timeout_s: float) -> None:
        """Receive from *hosts* until all are done or have failed; raise the errors of those that have failed."""
        deadline = time.monotonic() + timeout_s
        failed: dict[RemoteHost, BpsError] = {}
        with selectors.DefaultSelector() as selector:
            for host in hosts:
                selector.register(host.connection.source, selectors.EVENT_READ,
                                  functools.partial(_receive, host, failed))
                selector.register(host.stderr, selectors.EVENT_READ, functools.partial(host.on_errors, selector))
            while waiting := [host for host in hosts if host not in failed and not is_done(host)]:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    failed |= {host: host.late(timeout_s) for host in waiting}
                    break
                for key, _ in selector.select(left_s):
                    key.data()
                for host in failed:
                    with contextlib.suppress(KeyError):
                        selector.unregister(host.connection.source)
        if failed:
            raise together([failed[host] for host in hosts if host in failed], len(self.hosts))


def _receive(host: RemoteHost, failed: dict[RemoteHost, BpsError]) -> None:
    try:
        host.receive()
    except BpsError as exc:
        failed[host] = exc


def together(errors: Sequence[BpsError], n_hosts: int) -> BpsError:
    """Return one error for the *errors* of several hosts."""
    if len(errors) == 1:
        return errors[0]
    kinds = {type(error) for error in errors}
    kind = kinds.pop() if len(kinds) == 1 else ConfigError
    lines = "".join(f"\n  {error}" for error in errors)
    return kind(f"{len(errors)} of {n_hosts} hosts cannot be used:{lines}")


#: A host that has sent nothing for this time counts as lost.
SILENCE_S = 30.0
#: How long an agent may take to end its processes after its connection was closed.
_END_S = 6.0


class RemoteProcess(Process):
    """A `processes.Process` on another host."""

    def __init__(self, host: RemoteHost, number: int, command: Command, out: Sink, err: Sink) -> None:
        super().__init__(command)
        self.streams = (out, err)
        self._host, self._number = host, number

    def signal_all(self, number: int) -> None:
        self._host.send(messages.Signal(self._number, number))

    def signal(self, number: int) -> None:
        self._host.send(messages.Signal(self._number, number, is_for_group=False))

    def end_in_words(self) -> str:
        return self._host.lost if self.is_lost else super().end_in_words()


class RemoteHost(ProcessHost):
    """A `processes.ProcessHost` by ssh. Created in the main thread, as ssh dies with the thread that started it; owner
    thread only.

    `agent` is the agent's first message, None until it has come. `lost`: why the host is lost, "" if it is not;
    `why_lost`: the reason alone. Until
    `open`, the owner calls `receive` when `connection.source` is readable, and `on_errors` when `stderr` is.
    """

    def __init__(self, host: Host, ssh: Ssh, output: Output) -> None:
        self.host = host
        self.agent: messages.Here | None = None
        self.lost = self.why_lost = ""
        self.answers: list[Any] = []
        self._ssh = ssh
        self._processes: list[RemoteProcess] = []
        self._reports: list[EndReport] = []
        self._ssh_ends_by_s = math.inf
        self._n_ranks = host.slots
        self._selector: selectors.BaseSelector | None = None
        self._early_lines: list[str] = []  # by ssh and login scripts, before the agent
        self._errors = output.extra_stream(host.name)
        self._process = subprocess.Popen(
            tie_to_parent(ssh.argv(host)), env=ssh_.environment(os.environ), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, bufsize=0)
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin, self.stderr = self._process.stdin, self._process.stderr
        self._stdout = self._process.stdout
        os.set_blocking(self.stderr.fileno(), False)
        self.connection = PipeConnection(self._stdout.fileno(), self._stdin.fileno(), messages.FromAgent,
                                         after_mark=True)
        self._sending = threading.Lock()
        self._last_received_s = time.monotonic()
        self._closing_since_s: float | None = None

    @property
    def is_silent(self) -> bool:
        """Whether the agent, which sends `Alive` every `PULSE_S`, has sent nothing for much longer."""
        return not self.lost and time.monotonic() - self._last_received_s > 2 * PULSE_S

    def send(self, message: Any) -> None:
        """Send *message*, from any thread. The loss of the host shows when receiving."""
        with self._sending, contextlib.suppress(OSError):
            if not self._stdin.closed:
                self.connection.send(message)

    def read_errors(self) -> bool:
        """Read from the error output of ssh and the agent; return whether there may be more, now or later."""
        try:
            return self._take_errors()
        except BlockingIOError:
            return True

    def on_errors(self, selector: selectors.BaseSelector) -> Sequence[RemoteProcess]:
        """Read from `stderr`, which is readable; unregister it from *selector* at its end."""
        if not self.read_errors() and self.stderr in selector.get_map():  # another event may have ended the watch
            selector.unregister(self.stderr)
        return ()

    def _take_errors(self) -> bool:
        data = os.read(self.stderr.fileno(), 65536)
        if self.agent is not None:
            self._errors.feed(data)
        else:
            self._early_lines += data.decode(errors="replace").splitlines()
        return bool(data)

    def receive(self) -> None:
        """Receive messages of the agent; answers are appended to `answers`.

        Raises `BpsError` if there is no agent, it has another version, or it has ended; the text says why.
        """
        try:
            self.receive_if_any()
        except EOFError:
            raise self.why_it_ended() from None

    def receive_if_any(self) -> None:
        """As `receive`, but raises `EOFError` if the agent has ended: ssh is about to end, see `why_it_ended`."""
        try:
            received = self.connection.receive()
        except ProtocolError as exc:
            raise ProtocolError(f"{self.host.name}: {exc}") from exc
        for message in received:
            if isinstance(message, messages.Here):
                if (message.version, message.package) != (messages.VERSION, __version__):
                    raise MismatchError(
                        f"{self.host.name} has bpsfast {message.package} (launch protocol {message.version}) for "
                        f"{self._ssh.python}, this host {__version__} ({messages.VERSION}): install the same on all "
                        "hosts, or name another interpreter by --remote-python")
                self.agent = message
            elif not isinstance(message, messages.Alive):
                self.answers.append(message)

    def late(self, timeout_s: float) -> BpsError:
        """Return the error that this host has not answered within *timeout_s*."""
        if self.agent is not None:
            return StallError(f"{self.host.name}: its agent has not answered within {timeout_s:g} s: is the host "
                              "overloaded, or its file system stuck?")
        return self._ssh.late(self.host, timeout_s, self.connection.noise)

    @property
    def has_running(self) -> bool:
        """Whether a process there is not known to have ended."""
        return any(process.code is None for process in self._processes)

    @property
    def has_ended(self) -> bool:
        """Whether ssh has ended, so that `close` does not block."""
        return self._process.poll() is not None

    def why_it_ended(self, timeout_s: float = SSH_END_S) -> BpsError:
        """Return the error that there is no agent any more; wait for ssh's end, and kill ssh after *timeout_s*."""
        code = self._wait(timeout_s)
        with contextlib.suppress(BlockingIOError):
            while self._take_errors():
                continue
        self._errors.finish()
        if self.agent is not None:  # so login scripts are not the cause
            return self._ssh.lost(self.host, code, [line.decode(errors="replace") for line in self._errors.tail])
        return self._ssh.explain(self.host, code, self._early_lines)

    def _wait(self, timeout_s: float) -> int:
        """Return ssh's exit code; kill ssh if it takes too long, and give up if that does not help (state D)."""
        for patience_s in (timeout_s, AFTER_SIGKILL_S):
            try:
                return self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
        return -signal.SIGKILL

    def open(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._last_received_s = time.monotonic()
        selector.register(self.connection.source, selectors.EVENT_READ, self._on_messages)
        selector.register(self.stderr, selectors.EVENT_READ, functools.partial(self.on_errors, selector))

    def start(self, command: Command, out: Sink, err: Sink) -> RemoteProcess:
        """See `processes.ProcessHost`; the environment of *command* is added to the host's."""
        assert not self.lost, "nothing is started there"
        number = len(self._processes)
        process = RemoteProcess(self, number, command, out, err)
        self._processes.append(process)
        self.send(messages.Start(number, command.name, command.kind.value, list(command.argv), dict(command.environ),
                                 self._n_ranks))
        return process

    def tick(self, now_s: float) -> tuple[float, Sequence[RemoteProcess]]:
        if self.lost:
            return math.inf, ()
        if self._ssh_ends_by_s < math.inf:
            if self._process.poll() is None and now_s < self._ssh_ends_by_s:
                return now_s + LOOK_S, ()
            return math.inf, self._lose(str(self.why_it_ended(0.0)))
        if now_s >= self._last_received_s + SILENCE_S:
            if not is_ready(self.connection.source, 0.0):
                return math.inf, self._lose(f"nothing was heard of it for {SILENCE_S:g} s")
            self._last_received_s = now_s  # this process has not read
        assert self._selector is not None, "opened"
        if self._closing_since_s is None:  # else the descriptor is closed
            set_watched(self._selector, self.connection.target, selectors.EVENT_WRITE, self._on_target,
                        self.connection.pending_nbytes > 0)
        return self._last_received_s + SILENCE_S, ()

    def drain(self) -> None:
        """See `processes.ProcessHost`; the agent sends a process's output before its end."""
        for process in self._processes:
            for stream in process.streams:
                stream.finish()

    def reports(self) -> Sequence[EndReport]:
        found, self._reports = self._reports, []
        return found

    def begin_close(self) -> None:
        """See `processes.ProcessHost`: an agent ends its processes when its connection closes; without one, end ssh."""
        if self._closing_since_s is not None:
            return
        self._closing_since_s = time.monotonic()
        if self._selector is not None and self.connection.target in self._selector.get_map():
            self._selector.unregister(self.connection.target)
        with self._sending:
            self._stdin.close()
        if self.agent is None:
            self._process.terminate()

    def kill(self) -> None:
        """End ssh at once; an agent whose connection is gone ends what it has started."""
        if not self.has_ended:
            self._process.kill()

    def close(self) -> None:
        self.begin_close()
        assert self._closing_since_s is not None
        watched = None if self._selector is None else self._selector.get_map()  # None, too, once it is closed
        if watched is not None and self._selector is not None and not self._stdout.closed:
            for watched_source in (self.connection.source, self.stderr):
                if watched_source in watched:
                    self._selector.unregister(watched_source)
        deadline = self._closing_since_s + _END_S
        with selectors.DefaultSelector() as ends:
            if not self._stdout.closed:
                for source in (self._stdout, self.stderr):
                    ends.register(source, selectors.EVENT_READ)
            while ends.get_map() and (left_s := deadline - time.monotonic()) > 0:
                for key, _ in ends.select(left_s):
                    goes_on = self.read_errors() if key.fileobj is self.stderr else os.read(key.fd, 65536)
                    if not goes_on:
                        ends.unregister(key.fileobj)
        self._wait(max(0.1, deadline - time.monotonic()))
        self._errors.finish()
        self._stdout.close()
        self.stderr.close()

    def _on_messages(self) -> Sequence[RemoteProcess]:
        self._last_received_s = time.monotonic()
        if self.lost:
            return ()
        try:
            received = self.connection.receive()
        except EOFError:  # ssh is about to print why: `tick` waits for that
            assert self._selector is not None, "opened"
            self._selector.unregister(self.connection.source)
            self._ssh_ends_by_s = self._last_received_s + SSH_END_S
            return ()
        except ProtocolError as exc:
            return self._lose(str(exc))
        ended = []
        for message in received:
            if isinstance(message, messages.Said):
                self._processes[message.number].streams[message.is_error].feed(message.data)
            elif isinstance(message, messages.Ended):
                process = self._processes[message.number]
                process.code, process.ended_s = message.code, time.monotonic()
                for stream in process.streams:
                    stream.finish()
                ended.append(process)
            elif isinstance(message, messages.Reported):
                self._reports.append(EndReport(self._processes[message.number], message.word,
                                          time.monotonic() - message.age_s))
        return ended

    def _lose(self, why: str) -> list[RemoteProcess]:
        """Mark the host as lost; its agent, if alive, ends what runs there. Return the processes that were running."""
        assert self._selector is not None
        self.why_lost, self.lost = why, f"was lost with its host {self.host.name} ({why})"
        sources = [self.connection.source, *([self.connection.target] if self._closing_since_s is None else [])]
        for source in sources:
            if source in self._selector.get_map():
                self._selector.unregister(source)
        ended = [process for process in self._processes if process.code is None]
        for process in ended:
            process.code, process.is_lost, process.ended_s = LOST_HOST, True, time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        return ended

    def _on_target(self) -> Sequence[RemoteProcess]:
        try:
            with self._sending:
                self.connection.flush()
        except OSError:
            return () if self.lost else self._lose("it closed its connection")
        return ()
