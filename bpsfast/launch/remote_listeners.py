"""Start the listening side of a measurement on other hosts, over ssh: for ``bpsfast ping -H`` and ``perf -H``."""
from __future__ import annotations

import re
import selectors
import threading
import time
from collections.abc import Sequence

from ..base.resources import Closing
from ..orchestration.errors import PeerLostError, StallError
from ..orchestration.wake_up import WakeUp
from .host_list import Host
from .output import Output, Sink
from .processes import Command, Kind, Process
from .remote_hosts import RemoteHosts
from .ssh import Ssh

_NO_NEWS_S = 60.0
_START_TIMEOUT_S = 60.0
#: The line of ``bpsfast ping`` and ``perf`` once clients can connect.
_LISTENS = re.compile(rb"bpsfast [ \w]+: (listening|waiting)\b")


class RemoteListeners(Closing):
    """``python -m bpsfast *arguments* -p PORT`` on each of *hosts*, until `close`. A context manager; main thread.

    Their error output goes to standard error, with the host's name; the client shows results. `addresses`: an address
    of each by which this and the other hosts reach it, and its port: *port*, or if None a free one. The listeners get
    the job's *key* (hex) in their environment, as ranks do.

    Raises `BpsError` if a host cannot be used, or its listener does not come up.
    """

    def __init__(self, hosts: Sequence[Host], ssh: Ssh, arguments: Sequence[str], key: str,
                 port: int | None = None) -> None:
        self._output = Output()
        self._hosts = RemoteHosts(hosts, ssh, self._output)
        self._failed: list[Process] = []
        self._selector = selectors.DefaultSelector()
        self._wake = WakeUp()
        self._thread: threading.Thread | None = None
        try:
            self._hosts.connect()
            self.addresses = []
            for host in self._hosts.hosts:
                others = [other for other in self._hosts.hosts if other is not host]
                address, free = self._hosts.address_of(host, others, from_here=True)
                self.addresses.append((address, port or free))
            self._start(arguments, key, ssh.python)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raise `PeerLostError` if a listener has failed, since its client would only wait."""
        for process in self._failed:
            raise PeerLostError(f"the listener on {process.command.name} {process.end_in_words()}; its output is above")

    def close(self) -> None:
        """End the listeners. Idempotent."""
        if self._thread is not None:
            self._wake.ring()
            self._thread.join()
            self._thread = None
        self._hosts.close()
        self._selector.close()
        self._wake.close()

    def _start(self, arguments: Sequence[str], key: str, python: str) -> None:
        self._selector.register(self._wake, selectors.EVENT_READ)
        announced = []
        for host, (_, port) in zip(self._hosts.hosts, self.addresses):
            host.open(self._selector)
            argv = [python, "-m", "bpsfast", *arguments, "-p", str(port)]
            environ = {"BPSFAST_JOB_KEY": key, "PYTHONSAFEPATH": "1"}
            announced.append(_Announced(self._output.extra_stream(host.host.name)))
            host.start(Command(host.host.name, Kind.DAEMON, argv, environ), _Nowhere(), announced[-1])
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not all(each.is_announced for each in announced) and not self._failed:
            if time.monotonic() >= deadline:
                silent = [host.host.name for host, each in zip(self._hosts.hosts, announced) if not each.is_announced]
                raise StallError(f"the listener on {', '.join(silent)} does not listen after {_START_TIMEOUT_S:g} s")
            self._step(deadline)
        self.check()
        self._thread = threading.Thread(target=self._attend, name="bpsfast-listeners", daemon=True)
        self._thread.start()

    def _attend(self) -> None:
        """Pass on error output of the listeners, and note their ends, until `close`."""
        while self._step(time.monotonic() + _NO_NEWS_S):
            continue

    def _step(self, until_s: float) -> bool:
        """Handle the events until *until_s*; return False once `close` was called."""
        now = time.monotonic()
        for host in self._hosts.hosts:
            due_s, ended = host.tick(now)
            self._failed += [process for process in ended if process.code]
            until_s = min(until_s, due_s)
        for key, _ in self._selector.select(max(0.0, until_s - now)):
            if key.fileobj is self._wake:
                return False
            self._failed += [process for process in key.data() if process.code]
        return True


class _Announced:
    """A sink that removes the line by which a listener announces itself, and passes on all others."""

    def __init__(self, further: Sink) -> None:
        self.is_announced = False
        self._further = further
        self._line = b""

    def feed(self, data: bytes) -> None:
        if self.is_announced:
            self._further.feed(data)
            return
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if not self.is_announced and _LISTENS.match(line):
                self.is_announced = True
            else:
                self._further.feed(line + b"\n")
        if self.is_announced:
            self._further.feed(self._line)

    def finish(self) -> None:
        if not self.is_announced:
            self._further.feed(self._line)
            self._line = b""
        self._further.finish()


class _Nowhere:
    """A sink that drops everything."""

    def feed(self, data: bytes) -> None:
        """See `output.Sink`."""

    def finish(self) -> None:
        """See `output.Sink`."""
