"""Runs a user's script at intervals that lists the hosts of an elastic job, as ``horovodrun --host-discovery-script``.

The script prints ``host`` or ``host:slots`` on each line (`host_list.listed`) and ends with exit code 0. It runs in a
thread, so the launcher does not wait for it. If it fails, is late or prints something else, the last list is kept.
"""
from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from ..base.resources import Closing, is_ready
from ..orchestration.errors import BpsError, ConfigError, StallError
from ..orchestration.wake_up import WakeUp
from . import host_list
from .daemons import clean_environment, describe_exit, tie_to_parent
from .host_list import Host
from .processes import AFTER_SIGKILL_S

INTERVAL_S = 1.0
#: Time for one run of the script.
SCRIPT_TIMEOUT_S = 10.0
_MOST_NBYTES = 1 << 20
_AFTER_OUTPUT_S = 1.0


class HostDiscovery(Closing):
    """The hosts that *script* lists, from construction until `close`. Owner thread only; never blocks, but in `close`.

    *slots*: of a host without a number. Poll `fileno`, which is readable once there is something to `take`.

    Raises `ConfigError` if *script* is no file, or not executable.
    """

    def __init__(self, script: Path, slots: int = 1, interval_s: float = INTERVAL_S,
                 timeout_s: float = SCRIPT_TIMEOUT_S) -> None:
        if not script.is_file():
            raise ConfigError(f"--host-discovery-script {script}: there is no such file")
        if not os.access(script, os.X_OK):
            raise ConfigError(f"--host-discovery-script {script} is not executable: chmod +x it, and give it a first "
                              "line such as #!/bin/sh")
        self._path = script.absolute()
        self._where = f"--host-discovery-script {script}"
        self._slots, self._interval_s, self._timeout_s = slots, interval_s, timeout_s
        self._found: deque[list[Host] | BpsError] = deque()
        self._last: tuple[str, str] | None = None  # what the last run has printed, and its error
        self._ready, self._stop = WakeUp(), WakeUp()
        self._thread = threading.Thread(target=self._serve, name="bpsfast-discovery", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor that can be read when there is something to `take`."""
        return self._ready.fileno()

    def take(self) -> list[list[Host] | BpsError]:
        """Return the changes since the last call, oldest first: another list of hosts, or the error of a failed run."""
        self._ready.clear()
        return [self._found.popleft() for _ in range(len(self._found))]

    def close(self) -> None:
        """End the thread and a running script. Idempotent."""
        self._stop.ring()
        self._thread.join()
        self._ready.close()
        self._stop.close()

    def _serve(self) -> None:
        begin_s = time.monotonic()
        while self._look():
            begin_s = max(begin_s + self._interval_s, time.monotonic())  # a slow script has no runs to catch up with
            if is_ready(self._stop, begin_s - time.monotonic()):
                return

    def _look(self) -> bool:
        """Run the script once; return False if `close` was called meanwhile."""
        found: list[Host] | BpsError
        text = ""
        try:
            output = self._run()
            if output is None:
                return False
            text = output
            if self._last == (text, ""):
                return True
            found = host_list.with_own(host_list.listed(text, self._slots, self._where))
        except BpsError as exc:
            found = exc
        except OSError as exc:
            found = ConfigError(f"{self._where} cannot be run: {exc}")
        error = str(found) if isinstance(found, BpsError) else ""
        if self._last != (text, error):
            self._last = text, error
            self._found.append(found)
            self._ready.ring()
        return True

    def _run(self) -> str | None:
        """Return what the script prints, None if `close` was called meanwhile.

        Raises `BpsError` if it fails, or is not done in time.
        """
        environ = clean_environment(os.environ)  # without the job's key
        process = subprocess.Popen(tie_to_parent([str(self._path)]), env=environ, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, bufsize=0)
        assert process.stdout is not None and process.stderr is not None
        try:
            pidfd = os.pidfd_open(process.pid)
            try:
                texts = self._read((process.stdout, process.stderr))
                if texts is None:
                    return None
                if not is_ready(pidfd, _AFTER_OUTPUT_S):
                    raise StallError(f"{self._where} has closed its output and not ended {_AFTER_OUTPUT_S:g} s later")
            finally:
                os.close(pidfd)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # before it is reaped, and its number may be another one's
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(AFTER_SIGKILL_S)
            process.stdout.close()
            process.stderr.close()
        out, err = (text.decode(errors="replace") for text in texts)
        if process.returncode:
            last = next((line for line in reversed(err.splitlines()) if line.strip()), "no error output")
            raise ConfigError(f"{self._where} {describe_exit(process.returncode)} ({last})")
        return out

    def _read(self, streams: Sequence[IO[bytes]]) -> list[bytes] | None:
        """Return what *streams* carry until both end; None if `close` was called meanwhile."""
        deadline = time.monotonic() + self._timeout_s
        texts = {stream: bytearray() for stream in streams}
        with selectors.DefaultSelector() as selector:
            selector.register(self._stop, selectors.EVENT_READ)
            for stream in streams:
                selector.register(stream, selectors.EVENT_READ)
            n_open = len(streams)
            while n_open:
                left_s = deadline - time.monotonic()
                if left_s <= 0.0:
                    raise StallError(f"{self._where} has not ended within {self._timeout_s:g} s")
                for key, _ in selector.select(left_s):
                    if key.fileobj is self._stop:
                        return None
                    stream = next(each for each in streams if each is key.fileobj)
                    data = os.read(stream.fileno(), 65536)
                    texts[stream] += data
                    if len(texts[stream]) > _MOST_NBYTES:
                        raise ConfigError(f"{self._where} prints more than {_MOST_NBYTES} bytes")
                    if not data:
                        selector.unregister(stream)
                        n_open -= 1
        return [bytes(texts[stream]) for stream in streams]
