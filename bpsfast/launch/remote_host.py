"""One host of a job, as the launcher sees it: an ssh, an agent behind it (`remote`), and what runs there."""
from __future__ import annotations

import contextlib
import math
import os
import select
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

from .. import __version__
from ..base.exit_codes import LOST_HOST
from ..orchestration.errors import BpsError, MismatchError, ProtocolError, StallError
from . import remote_protocol as messages, ssh as ssh_
from .daemons import describe_exit, tie_to_parent
from .host_list import Host
from .output import Output, Sink
from .pipe_connection import PipeConnection
from .processes import AFTER_SIGKILL_S, Command, EndReport, watch
from .remote_agent import PULSE_S
from .ssh import Ssh

#: Silence after which a host counts as lost.
SILENCE_S = 30.0
#: After its line was closed, how long an agent may take to end what it has started.
_END_S = 6.0
#: How long an ssh whose output has ended may take to end itself, and how often it is looked at.
_SSH_END_S, _LOOK_S = 2.0, 0.02


class RemoteProcess:
    """A `child.Process` on another host."""

    def __init__(self, host: RemoteHost, number: int, command: Command, out: Sink, err: Sink) -> None:
        self.command = command
        self.code: int | None = None
        self.ended_s = 0.0
        self.is_lost = False
        self.streams = (out, err)
        self._host, self._number = host, number

    def signal_all(self, number: int) -> None:
        """See `child.Process`."""
        self._host.tell(messages.Signal(self._number, number))

    def end_in_words(self) -> str:
        """See `child.Process`."""
        return self._host.lost if self.is_lost else describe_exit(self.code or 0)

    def lose(self) -> None:
        """Its host is lost, so nothing more will be heard of it."""
        self.code, self.is_lost, self.ended_s = LOST_HOST, True, time.monotonic()


class RemoteHost:
    """A `child.ProcessHost` by ssh. Made in the main thread, as ssh dies with the thread that started it; owner thread only.

    `here` is what the agent said of itself, None until then. `lost`: why nothing more will be heard of it, "" if it
    will. Until `open` the owner has to call `receive` when `line.source` can be read, and `hear` for `complaints`.
    """

    def __init__(self, host: Host, ssh: Ssh, output: Output) -> None:
        self.host = host
        self.here: messages.Here | None = None
        self.lost = ""
        self.answers: list[Any] = []
        self._ssh = ssh
        self._processes: list[RemoteProcess] = []
        self._reports: list[EndReport] = []
        self._ssh_ends_by_s = math.inf
        self._n_ranks = host.slots
        self._selector: selectors.BaseSelector | None = None
        self._said: list[str] = []  # by ssh and login scripts, before there was an agent
        self._complaints = output.aside(host.name)
        self._process = subprocess.Popen(
            tie_to_parent(ssh.argv(host)), env=ssh_.environment(os.environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True, bufsize=0,
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin, self.complaints = self._process.stdin, self._process.stderr
        self._stdout = self._process.stdout
        os.set_blocking(self.complaints.fileno(), False)
        self.line = PipeConnection(self._stdout.fileno(), self._stdin.fileno(), messages.FromAgent, after_mark=True)
        self._sending = threading.Lock()
        self._heard_s = time.monotonic()
        self._hung_up_s: float | None = None

    @property
    def is_silent(self) -> bool:
        """Whether the agent, which shows its life every `PULSE_S`, has not for much longer."""
        return not self.lost and time.monotonic() - self._heard_s > 2 * PULSE_S

    # -- before the job --------------------------------------------------------------------------------------------

    def tell(self, message: Any) -> None:
        """Send *message*, from any thread; that the host is gone shows on what it sends."""
        with self._sending, contextlib.suppress(OSError):
            if not self._stdin.closed:
                self.line.send(message)

    def hear(self) -> bool:
        """Take what ssh or the agent complains of; return whether there may be more, now or later."""
        try:
            return self._take_complaint()
        except BlockingIOError:
            return True

    def _take_complaint(self) -> bool:
        data = os.read(self.complaints.fileno(), 65536)
        if self.here is not None:
            self._complaints.feed(data)
        else:
            self._said += data.decode(errors="replace").splitlines()
        return bool(data)

    def receive(self) -> None:
        """Take what the agent says; answers to what it was asked become `answers`.

        Raises
        ------
        BpsError
            There is no agent, in words, or not of this version, or no longer.
        """
        try:
            came = self.line.receive()
        except EOFError:
            raise self._why_it_ended() from None
        except ProtocolError as exc:
            raise ProtocolError(f"{self.host.name}: {exc}") from exc
        for message in came:
            if isinstance(message, messages.Here):
                if (message.version, message.package) != (messages.VERSION, __version__):
                    raise MismatchError(
                        f"{self.host.name} has bpsfast {message.package} (launch protocol {message.version}) for "
                        f"{self._ssh.python}, this host {__version__} ({messages.VERSION}): install the same on all "
                        "hosts, or name another interpreter by --remote-python")
                self.here = message
            elif not isinstance(message, messages.Alive):
                self.answers.append(message)

    def late(self, timeout_s: float) -> BpsError:
        """Return the error that this host has not answered within *timeout_s*."""
        if self.here is not None:
            return StallError(f"{self.host.name}: its agent has not answered within {timeout_s:g} s: is the host "
                              "overloaded, or its file system stuck?")
        return self._ssh.late(self.host, timeout_s, self.line.noise)

    def _why_it_ended(self, timeout_s: float = _SSH_END_S) -> BpsError:
        code = self._wait(timeout_s)
        with contextlib.suppress(BlockingIOError):
            while self._take_complaint():
                continue
        self._complaints.finish()
        if self.here is not None:  # whatever a login script complained of, it is not that
            return self._ssh.lost(self.host, code, [line.decode(errors="replace") for line in self._complaints.tail])
        return self._ssh.explain(self.host, code, self._said)

    def _wait(self, timeout_s: float) -> int:
        """Return ssh's exit code; it is killed if it takes too long, and let go if that is of no use (state D)."""
        for patience_s in (timeout_s, AFTER_SIGKILL_S):
            try:
                return self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
        return -signal.SIGKILL

    # -- as a place ------------------------------------------------------------------------------------------------

    def open(self, selector: selectors.BaseSelector) -> None:
        """See `child.ProcessHost`."""
        self._selector = selector
        self._heard_s = time.monotonic()
        selector.register(self.line.source, selectors.EVENT_READ, self._on_line)
        selector.register(self.complaints, selectors.EVENT_READ, self._on_complaint)

    def start(self, command: Command, out: Sink, err: Sink) -> RemoteProcess:
        """See `child.ProcessHost`; the environment of *command* is added to that of the host."""
        assert not self.lost, "nothing is started there"
        number = len(self._processes)
        process = RemoteProcess(self, number, command, out, err)
        self._processes.append(process)
        self.tell(messages.Start(number, command.name, command.kind.value, list(command.argv), dict(command.environ),
                                 self._n_ranks))
        return process

    def tick(self, now_s: float) -> tuple[float, Sequence[RemoteProcess]]:
        """See `child.ProcessHost`."""
        if self.lost:
            return math.inf, ()
        if self._ssh_ends_by_s < math.inf:
            if self._process.poll() is None and now_s < self._ssh_ends_by_s:
                return now_s + _LOOK_S, ()
            return math.inf, self._lose(str(self._why_it_ended(0.0)))
        if now_s >= self._heard_s + SILENCE_S:
            if not select.select([self.line.source], [], [], 0.0)[0]:
                return math.inf, self._lose(f"nothing was heard of it for {SILENCE_S:g} s")
            self._heard_s = now_s  # it is we who did not listen
        assert self._selector is not None, "opened"
        watch(self._selector, self.line.target, selectors.EVENT_WRITE, self._on_target, self.line.pending_nbytes > 0)
        return self._heard_s + SILENCE_S, ()

    def drain(self) -> None:
        """See `child.ProcessHost`; the agent sends all that a process wrote before it tells of its end."""
        for process in self._processes:
            for stream in process.streams:
                stream.finish()

    def reports(self) -> Sequence[EndReport]:
        """See `child.ProcessHost`."""
        found, self._reports = self._reports, []
        return found

    def begin_close(self) -> None:
        """See `child.ProcessHost`: the agent ends what is left when its line closes. Without one, ssh is ended."""
        if self._hung_up_s is not None:
            return
        self._hung_up_s = time.monotonic()
        if self._selector is not None and self.line.target in self._selector.get_map():
            self._selector.unregister(self.line.target)
        with self._sending:
            self._stdin.close()
        if self.here is None:
            self._process.terminate()

    def close(self) -> None:
        """See `child.ProcessHost`."""
        self.begin_close()
        assert self._hung_up_s is not None
        deadline = self._hung_up_s + _END_S
        with selectors.DefaultSelector() as ends:
            if not self._stdout.closed:
                for source in (self._stdout, self.complaints):
                    ends.register(source, selectors.EVENT_READ)
            while ends.get_map() and (left_s := deadline - time.monotonic()) > 0:
                for key, _ in ends.select(left_s):
                    is_over = not self.hear() if key.fileobj is self.complaints else not os.read(key.fd, 65536)
                    if is_over:
                        ends.unregister(key.fileobj)
        self._wait(max(0.1, deadline - time.monotonic()))
        self._complaints.finish()
        self._stdout.close()
        self.complaints.close()

    # -- events ----------------------------------------------------------------------------------------------------

    def _on_line(self) -> Sequence[RemoteProcess]:
        self._heard_s = time.monotonic()
        if self.lost:
            return ()
        try:
            came = self.line.receive()
        except EOFError:  # ssh is about to say why: `tick` waits for that
            assert self._selector is not None, "opened"
            self._selector.unregister(self.line.source)
            self._ssh_ends_by_s = self._heard_s + _SSH_END_S
            return ()
        except ProtocolError as exc:
            return self._lose(str(exc))
        ended = []
        for message in came:
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

    def _on_complaint(self) -> Sequence[RemoteProcess]:
        if not self.hear():
            assert self._selector is not None
            self._selector.unregister(self.complaints)
        return ()

    def _lose(self, why: str) -> list[RemoteProcess]:
        """Nothing more comes from this host: its agent ends what runs there, or ended with it."""
        assert self._selector is not None
        self.lost = f"was lost with its host {self.host.name} ({why})"
        for source in (self.line.source, self.line.target):
            if source in self._selector.get_map():
                self._selector.unregister(source)
        ended = [process for process in self._processes if process.code is None]
        for process in ended:
            process.lose()
        self._process.send_signal(signal.SIGTERM)
        return ended

    def _on_target(self) -> Sequence[RemoteProcess]:
        try:
            with self._sending:
                self.line.flush()
        except OSError:
            return () if self.lost else self._lose("it closed its line")
        return ()
