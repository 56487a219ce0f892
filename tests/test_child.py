"""Pipes of children: what is handed on at a child's end. `test_supervisor` and `test_remote` have the processes."""
from __future__ import annotations

import errno
import fcntl
import os

import pytest

from bpsfast.launch.child import Child, Command, Kind, Pipe


class Echo:
    """A sink that puts back whatever it is fed: as a child's child that writes as fast as anybody reads."""

    def __init__(self, target: int) -> None:
        self._target = target
        self.nbytes = 0
        self.has_finished = False

    def feed(self, data: bytes) -> None:
        self.nbytes += len(data)
        os.write(self._target, data)

    def finish(self) -> None:
        self.has_finished = True


@pytest.mark.timeout(20)
def test_who_goes_on_writing_is_not_waited_for(no_leaks):
    source, target = os.pipe()
    sink = Echo(target)
    with open(source, "rb", buffering=0) as reader:
        pipe = Pipe(reader, sink)
        os.write(target, b"x" * 1000)
        pipe.drain()
        assert fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ) <= sink.nbytes, "all that the pipe may have held"
        assert sink.has_finished and not pipe.has_ended
    os.close(target)


def test_a_full_pipe_is_emptied(no_leaks):
    source, target = os.pipe()
    with open(source, "rb", buffering=0) as reader, open(os.devnull, "wb") as nowhere:
        sink = Echo(nowhere.fileno())
        pipe = Pipe(reader, sink)
        nbytes = fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ)
        os.write(target, bytes(nbytes))
        pipe.drain()
        assert sink.nbytes == nbytes and sink.has_finished
    os.close(target)


def test_what_cannot_be_watched_does_not_run(monkeypatch, no_leaks):
    pids = []

    def refuse(pid: int) -> int:
        pids.append(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        Child(Command("rank 0", Kind.RANK, ("sleep", "600"), os.environ))
    with pytest.raises(ChildProcessError):
        os.waitpid(pids[0], os.WNOHANG)  # it has been: it has ended and no zombie is left
    with pytest.raises(ProcessLookupError):
        os.killpg(pids[0], 0)
