"""Ranks that use torch, forked from one process that has imported it: each would spend three seconds of a core on that.

What a rank sees is as if it had been started as a program: its environment, folder, output, the end by `exit`. Only
torch is there already, and what torch imports with its first optimizer.
"""
from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from typing import Any

_context: Any = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed", "pytest"])


def start_server() -> None:
    """Start the process that is forked, before any test counts descriptors. Idempotent."""
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # or torch begins a thread, which would be missing in what is forked
    try:
        forkserver.ensure_running()
        resource_tracker.ensure_running()
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = threads


class ForkedRank:
    """A rank's process that reads what to do from *commands*; as a `subprocess.Popen`, as far as tests use one."""

    def __init__(self, environ: Mapping[str, str], commands: Connection) -> None:
        start_server()
        self._process = _context.Process(target=_main, args=(dict(environ), os.getcwd(), commands, _Output()))
        self._process.start()
        self.pid: int = self._process.pid
        #: How it ended, -N by signal N; None as long as nobody has asked since.
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return how it ended, if it did."""
        if self.returncode is None and self._process.exitcode is not None:
            self.returncode = self._process.exitcode
            self._process.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return how it ended; raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(f"rank (pid {self.pid})", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


class _Output:
    """Where this process writes to now, wherever that is sent."""

    def __reduce__(self) -> Any:
        return _Descriptors, (DupFd(1), DupFd(2))


class _Descriptors:
    def __init__(self, *duplicates: Any) -> None:
        self.numbers = [each.detach() for each in duplicates]


def _main(environ: Mapping[str, str], folder: str, commands: Connection, output: _Descriptors) -> None:
    for number, standard in zip(output.numbers, (1, 2)):
        os.dup2(number, standard)
        os.close(number)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    code = 1
    try:
        from tests.support import rank_process  # imports nothing of ours before the environment is a rank's

        rank_process.serve(commands)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    ctypes.pythonapi.Py_Exit(code)  # multiprocessing's own end calls nothing that was registered with atexit
