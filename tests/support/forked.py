"""Ranks that use torch, forked from one process that has imported it, because each import takes three CPU seconds.

A rank has the environment, folder, output and exit of a program. Only torch, and the modules that it imports with its
first optimizer, are imported already.
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
    """Start the process to fork, before any test counts descriptors. Idempotent."""
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # otherwise torch starts a thread, which forked processes would not have
    try:
        forkserver.ensure_running()
        resource_tracker.ensure_running()
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = threads


class ForkedRank:
    """A rank's process that reads *commands*, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, environ: Mapping[str, str], commands: Connection) -> None:
        start_server()
        self._process = _context.Process(target=_main, args=(dict(environ), os.getcwd(), commands, _Output()))
        self._process.start()
        self.pid: int = self._process.pid
        #: Exit code, -N for signal N; None until `poll` or `wait` has seen the end.
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None if it still runs."""
        if self.returncode is None and self._process.exitcode is not None:
            self.returncode = self._process.exitcode
            self._process.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit code; raises `subprocess.TimeoutExpired`."""
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
    """The present output of this process, wherever it goes."""

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
        from tests.support import rank_process  # must not import bpsfast before the environment is set

        rank_process.serve(commands)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    ctypes.pythonapi.Py_Exit(code)  # multiprocessing's own exit does not call atexit functions
