"""Ranks and node processes report when they join and leave a job, so that the launcher finds the one that failed first.

Their output is not enough: an exception may be caught, chained or printed nowhere, and a rank that failed first may
take longest to end. So the launcher (`launch.processes.LocalProcesses`) has a memory file, which each process finds by
its environment. bpsfast appends a line to it with one of `WORDS`:

    attached  (a node) the first rank has attached to it
    joined    it has joined a job
    told      it was told that another process ended the job: its own end is a consequence
    leaves    it begins to leave the job: at exit, by an exception, or by `shutdown`
    left      the job has let it go, as all ranks have left: its end no longer concerns the others

A path through /proc works below shells, wrappers and network namespaces, and leaves nothing behind if the launcher is
killed. Where it does not work (another user, another PID namespace) nothing is reported, and the launcher judges by
output and order of ends alone.
"""
from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from typing import NamedTuple

#: Environment variable with the file's path and the number of the process.
VARIABLE = "_BPSFAST_END_REPORTS"
WORDS = ("attached", "joined", "told", "leaves", "left")
_LONGEST_NBYTES = 64
_FILE = "bpsfast-end-reports"
_said: set[str] = set()


class Report(NamedTuple):
    """Process *number* has reported *word* at *time_s* (`time.monotonic` of its machine)."""

    number: int
    word: str
    time_s: float


def report(word: str, environ: Mapping[str, str] = os.environ) -> None:
    """Append *word* and the time, if there is a launcher; each word once until the next "joined". Never raises; any
    thread.
    """
    path, _, number = environ.get(VARIABLE, "").rpartition(":")
    if not path:
        return
    if word == "joined":
        _said.clear()
    elif word in _said:
        return
    _said.add(word)
    with contextlib.suppress(OSError):
        if not os.readlink(path).startswith(f"/memfd:{_FILE}"):
            return  # in another PID namespace, the path may be of another process
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(fd, f"{number} {word} {time.monotonic_ns()}\n".encode())
        finally:
            os.close(fd)


class Reports:
    """The launcher's file. One thread."""

    def __init__(self) -> None:
        self._fd = os.memfd_create(_FILE, os.MFD_CLOEXEC)
        self._n_read = 0

    def environ(self, number: int) -> dict[str, str]:
        """Return the variable for the environment of process *number*."""
        return {VARIABLE: f"/proc/{os.getpid()}/fd/{self._fd}:{number}"}

    def read(self) -> list[Report]:
        """Return the reports since the last call, in order, without lines that are none."""
        data = os.pread(self._fd, os.fstat(self._fd).st_size - self._n_read, self._n_read)
        data = data[:data.rfind(b"\n") + 1]
        self._n_read += len(data)
        found = (_parsed(line) for line in data.splitlines() if len(line) < _LONGEST_NBYTES)
        return [each for each in found if each is not None]

    def close(self) -> None:
        """Close the file. Later reports are lost."""
        os.close(self._fd)


class EndTiming:
    """When a process began to end, from its reports; `take` them in order."""

    def __init__(self) -> None:
        self._told_s: float | None = None
        self._leaves_s: float | None = None

    def take(self, word: str, time_s: float) -> None:
        """Take one report."""
        if word == "joined":
            self._told_s = self._leaves_s = None
        elif word == "left":
            self._leaves_s = None
        elif word == "told" and self._told_s is None:
            self._told_s = time_s
        elif word == "leaves" and self._leaves_s is None:
            self._leaves_s = time_s

    def began_s(self, ended_s: float) -> float:
        """Return when it began to end: when it began to leave the job, if that was before its end *ended_s*."""
        return ended_s if self._leaves_s is None else min(ended_s, self._leaves_s)

    @property
    def follows(self) -> bool:
        """Whether it was told, before it began to end, that another process had ended the job."""
        return self._told_s is not None and (self._leaves_s is None or self._told_s <= self._leaves_s)


def _parsed(line: bytes) -> Report | None:
    number, word, time_ns = [*line.decode("ascii", "replace").split(), "", "", ""][:3]
    if not (number.isdecimal() and time_ns.isdecimal() and word in WORDS):
        return None
    return Report(int(number), word, int(time_ns) * 1e-9)
