"""The output of a job's processes: each line with its process's name, to the launcher's streams and into files.

Under ``log_format=json`` each shown line is a JSON object: log lines of bpsfast's processes as they are, others with
the keys ts, role, its number, stream ("stdout" or "stderr") and message, a whole traceback in one.

Many ranks may fail in the same way, or because one has failed: a common traceback is shown once (`DuplicateOutput`).
Files (``--tee-dir``) have every line as it was written, and ``log_level=INFO`` shows them all.

A reader that stops (a pager, a terminal) does not stop the launcher: `OutputStream` buffers what it does not take.
"""
from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import select
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from ..base import logs
from ..base.resources import is_ready
from ..base.value_formats import format_cpus

_TAIL_LINES = 200
#: At most this many lines back, a line is still visible on a terminal.
_IN_SIGHT_LINES = 20
#: A longer line is cut.
_LINE_NBYTES = 1 << 20
#: While this many bytes wait for a reader, the job waits, too.
_PENDING_NBYTES = 1 << 20
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


class Sink(Protocol):
    """Takes the bytes of one of a process's two streams as they come."""

    def feed(self, data: bytes) -> None:
        """Take *data*, which need not end with a line."""

    def finish(self) -> None:
        """The stream has ended."""


class Output:
    """The two streams that a launcher writes, and its files. `close` closes the files. Owner thread only.

    Writing blocks until the reader has taken all, except within `attending`.

    *out* and *err* are standard output and error by default; names are coloured on a terminal. *tee_dir* is a folder
    for a log of each process, with both streams; None: no logs. *rank_dir* is a folder for the output of each rank,
    named as by horovodrun: ``rank.0/stdout`` and ``rank.0/stderr``, numbers padded to one width; None: no such files.
    *stamped*: whether each line begins with the time at which it came.
    """

    def __init__(self, out: BinaryIO | None = None, err: BinaryIO | None = None, tee_dir: Path | None = None,
                 rank_dir: Path | None = None, stamped: bool = False) -> None:
        out = sys.stdout.buffer if out is None else out
        err = sys.stderr.buffer if err is None else err
        self._out = OutputStream(out)
        self._err = self._out if is_one(out, err) else OutputStream(err)  # else lines of both would mix
        self._is_attended = False
        self._is_hurried = False
        self._n_dropped = 0
        self._tee_dir, self._rank_dir, self._stamped = tee_dir, rank_dir, stamped
        self._as_json = logs.is_json()
        shows_all = self._as_json or logging.getLogger("bpsfast").isEnabledFor(logging.INFO)
        self._duplicates = DuplicateOutput(not shows_all)
        self._n_lines = 0
        self._n_named = 0
        self._files = contextlib.ExitStack()

    def streams(self, name: str, rank: int | None = None, n_ranks: int = 0) -> tuple[Transcript, Transcript]:
        """Return the sinks for standard output and error of the process *name*, which may be *rank* of *n_ranks*.

        Raises `OSError` if a file cannot be made.
        """
        colour = _COLOURS[self._n_named % len(_COLOURS)]
        self._n_named += 1
        log = [] if self._tee_dir is None else [self._file(self._tee_dir / f"{name.replace(' ', '-')}.log")]
        own: list[list[BinaryIO]] = [[], []]
        if self._rank_dir is not None and rank is not None:
            folder = self._rank_dir / f"rank.{rank:0{len(str(max(0, n_ranks - 1)))}}"
            own = [[self._file(folder / stream)] for stream in ("stdout", "stderr")]
        return (self._transcript(name, colour, self._out, [*log, *own[0]], None),
                self._transcript(name, colour, self._err, [*log, *own[1]], StreamFilter(name, self._duplicates)))

    def extra_stream(self, name: str) -> Transcript:
        """Return a sink for lines of *name*, no process of the job: they go to the error stream and into no file."""
        return self._transcript(name, _COLOURS[0], self._err, [], StreamFilter(name, self._duplicates))

    def say(self, text: str) -> None:
        """Write a line of the launcher itself."""
        if self._as_json:
            self._write(self._err, _json_line({"level": "INFO", "logger": "bpsfast.launcher", "pid": os.getpid(),
                                               "role": "launcher", "message": text}))
        else:
            self._write(self._err, f"{_stamp() if self._stamped else ''}[bpsfast run] {text}\n".encode())

    def quote(self, lines: Sequence[bytes]) -> None:
        """Write *lines* as they are to the error stream."""
        if self._as_json:
            self.say("\n".join(line.decode(errors="replace") for line in lines))
        else:
            self._write(self._err, b"".join(line + b"\n" for line in lines))

    def say_cause(self, text: str, cause: Sequence[bytes], err: Transcript) -> None:
        """Write last that *text* ended the job, and *cause*, lines of that process's error output *err*.

        The lines are repeated only if they are out of sight or were not shown. Processes that ended only because of
        that one, and whose lines were not shown, are named.
        """
        last = cause[-1].decode(errors="replace").strip() if cause else ""
        if not last:
            self.say(text)
        elif not err.has_withheld and self._n_lines - err.shown_at < _IN_SIGHT_LINES:
            self.say(f"{text}: {last}")
        else:
            self.say(f"{text}. Its last output:")
            self.quote(cause)
        err.forget()
        if self._duplicates.withheld:
            self.say(f"{self._duplicates.withheld_names()} ended because of that (their own output: --tee-dir, or "
                     "BPSFAST_LOG_LEVEL=INFO)")

    @contextlib.contextmanager
    def attending(self) -> Iterator[None]:
        """Never block: the caller flushes `out_streams` when they can be written, and feeds nothing while `is_full`.

        At the end the rest is dropped, and its size is written if possible.
        """
        self._is_attended = True
        try:
            yield
        finally:
            self._n_dropped += sum(stream.drop() for stream in self.out_streams)
            if self._n_dropped:
                with contextlib.suppress(OSError):
                    self.say(f"{self._n_dropped} bytes of output are dropped: the reader had stopped")
                self._err.drop()
            self._is_attended = self._is_hurried = False
            self._n_dropped = 0

    @property
    def out_streams(self) -> list[OutputStream]:
        """Both streams, or the one that they are."""
        return list(dict.fromkeys((self._out, self._err)))

    @property
    def pending_nbytes(self) -> int:
        """Bytes not yet taken by the readers."""
        return sum(stream.pending_nbytes for stream in self.out_streams)

    @property
    def is_full(self) -> bool:
        """Whether the processes must wait for the readers."""
        return not self._is_hurried and self.pending_nbytes >= _PENDING_NBYTES

    def hurry(self) -> None:
        """Wait for no reader any more, as the job is being ended: drop what exceeds the limit."""
        self._is_hurried = True

    def _show(self, stream: OutputStream, data: bytes) -> None:
        """Write output of a process."""
        self._n_lines += data.count(b"\n")
        if self._is_hurried and stream.pending_nbytes >= _PENDING_NBYTES:
            self._n_dropped += len(data)
        else:
            self._write(stream, data)

    def _write(self, stream: OutputStream, data: bytes) -> None:
        stream.write(data)
        if not self._is_attended:
            stream.wait()

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._files.close()

    def _transcript(self, name: str, colour: int, stream: OutputStream, files: Sequence[BinaryIO],
                    errors: StreamFilter | None) -> Transcript:
        if self._as_json:
            format_lines: Callable[[list[bytes]], bytes] = _JsonLines(name, "stderr" if errors else "stdout")
        else:
            format_lines = _PrefixedLines(name, colour if stream.is_terminal else None, self._stamped)
        return Transcript(format_lines, functools.partial(self._show, stream), files, errors, lambda: self._n_lines)

    def _file(self, path: Path) -> BinaryIO:
        path.parent.mkdir(parents=True, exist_ok=True)
        return self._files.enter_context(path.open("wb"))


class _PrefixedLines:
    """Formats lines for showing: time, the process's name, and the line without its own copy of these."""

    def __init__(self, name: str, colour: int | None, stamped: bool) -> None:
        self._name, self._stamped = name.encode(), stamped
        self._head = f"[{name}] " if colour is None else f"\x1b[{colour}m[{name}]\x1b[0m "

    def __call__(self, lines: list[bytes]) -> bytes:
        head = (_stamp() + self._head if self._stamped else self._head).encode()
        return b"".join(head + logs.strip_log_prefix(line, self._name, self._stamped) + b"\n" for line in lines)


class _JsonLines:
    """Formats lines that belong together as one JSON object."""

    def __init__(self, name: str, stream: str) -> None:
        self._stream, self._identity = stream, logs.identity(name)

    def __call__(self, lines: list[bytes]) -> bytes:
        if len(lines) == 1 and logs.is_json_line(lines[0]):
            return lines[0] + b"\n"
        text = b"\n".join(lines).decode(errors="replace")
        return _json_line({**self._identity, "stream": self._stream, "message": text})


def _json_line(values: dict[str, str | int]) -> bytes:
    return json.dumps({"ts": logs.time_of(time.time()), **values}, ensure_ascii=False).encode() + b"\n"


def _stamp() -> str:
    return logs.time_of(time.time()) + " "


class Transcript:
    """One stream of one process, cut into lines. See `Output.streams`.

    *format_lines* formats lines for *write*. *errors*, for standard error only, decides which lines are shown; then
    `tail` has the last lines. `shown_at` is the number of lines of all processes (*n_lines*) when this one's last was
    shown.
    """

    def __init__(self, format_lines: Callable[[list[bytes]], bytes], write: Callable[[bytes], None],
                 files: Sequence[BinaryIO], errors: StreamFilter | None, n_lines: Callable[[], int]) -> None:
        self._format_lines, self._write, self._files = format_lines, write, files
        self._filter, self._n_lines = errors, n_lines
        self.shown_at = 0
        self._rest = bytearray()
        self._cut_at_return = False
        self.tail: deque[bytes] = deque(maxlen=_TAIL_LINES if errors else 0)

    def feed(self, data: bytes) -> None:
        """Show the lines that *data* completes; cut one that grows too long."""
        if self._cut_at_return and data.startswith(b"\n"):
            data = data[1:]  # the second half of a line end
        self._cut_at_return = data.endswith(b"\r")
        # a progress bar rewrites its line by \r; each state becomes a line
        first, *others = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest += first
        lines: list[bytes] = []
        if others:
            lines = [bytes(self._rest), *others[:-1]]
            self._rest = bytearray(others[-1])
        if len(self._rest) >= _LINE_NBYTES:
            lines.append(bytes(self._rest))
            self._rest.clear()
        self._show(lines)

    def finish(self) -> None:
        """Show the rest, which has no line end."""
        rest = bytes(self._rest)
        self._rest.clear()
        self._show([rest] if rest else [])
        if self._filter is not None:
            self._write_groups(self._filter.finish())

    @property
    def has_withheld(self) -> bool:
        """Whether lines that blame another process have not been shown."""
        return self._filter is not None and self._filter.has_withheld

    def release(self) -> None:
        """Show these lines, as the job goes on without the process."""
        if self._filter is not None:
            self._write_groups(self._filter.release())

    def forget(self) -> None:
        """Drop these lines."""
        if self._filter is not None:
            self._filter.release()

    def _show(self, lines: Sequence[bytes]) -> None:
        if not lines:
            return
        self.tail.extend(lines)
        for file in self._files:
            file.write(b"".join(line + b"\n" for line in lines))
            file.flush()
        self._write_groups([[line] for line in lines] if self._filter is None else self._filter.take(lines))

    def _write_groups(self, groups: list[list[bytes]]) -> None:
        if groups:
            self._write(b"".join(map(self._format_lines, groups)))
            self.shown_at = self._n_lines()


TRACEBACK = b"Traceback (most recent call last)"
CHAINED = (b"another exception occurred:", b"direct cause of the following exception:")
#: A line of a rank or daemon that ends only because of another process.
_CONSEQUENCE = re.compile(rb"bpsfast\.PeerLostError: .* \(ended in |" + logs.CONSEQUENCE)
#: The end of a rank's traceback if the launcher has ended the scheduler just before the rank.
_STOPPED = re.compile(rb"(?:[\w.]+\.)?ClosedError: the scheduler got SIG")
#: A longer traceback is shown as it comes: it only began like one.
_MOST_LINES = 1000
#: Tracebacks that are remembered for comparison.
_MOST_KNOWN = 100


class DuplicateOutput:
    """Tracebacks that the processes of one launcher have shown, and lines that were not shown: see `StreamFilter`.

    *wanted* False: everything is shown.
    """

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self.withheld: dict[str, list[bytes]] = {}  # lines that blame another process, by process name
        self._known: dict[bytes, str] = {}

    def first_with(self, name: str, block: Iterable[bytes]) -> str:
        """Return the process that has shown the same traceback before, or *name* if none has."""
        # equal but for the process's name, how long it has waited, and the depth of calls
        key = re.sub(rb"(?<=Error: )" + re.escape(name.encode()) + rb"\b|\b\d+(?:\.\d+)?(?= s\b)|\d+(?= calls within)",
                     b"#", b"\n".join(block))
        if len(self._known) < _MOST_KNOWN:
            self._known.setdefault(key, name)
        return self._known.get(key, name)

    def withheld_names(self) -> str:
        """Return the processes whose lines were not shown: "nodes 0, 1, ranks 0-2, 4"."""
        numbers: dict[str, list[int]] = {}
        others: list[str] = []
        for name in self.withheld:
            kind, _, number = name.rpartition(" ")
            if number.isdecimal() and kind:
                numbers.setdefault(kind, []).append(int(number))
            else:
                others.append(name)
        return ", ".join([*others, *(f"{kind}{'s' if len(found) > 1 else ''} {format_cpus(found).replace(',', ', ')}"
                                     for kind, found in sorted(numbers.items()))])


class StreamFilter:
    """Decides which lines of the process *name* are shown, whole tracebacks at a time."""

    def __init__(self, name: str, duplicates: DuplicateOutput) -> None:
        self._name, self._duplicates = name, duplicates
        self._block: list[bytes] = []
        self._is_duplicate = False

    def take(self, lines: Iterable[bytes]) -> list[list[bytes]]:
        """Return the groups of lines to show now: single lines, and whole tracebacks."""
        found: list[list[bytes]] = []
        for line in lines:
            if self._block:
                self._block.append(line)
                if line and line[:1] not in b" \t":  # the exception
                    found += self._settle()
                elif len(self._block) >= _MOST_LINES:
                    found += self.finish()
            elif line.startswith(TRACEBACK):
                self._block = [line]
            elif self._duplicates.wanted and _CONSEQUENCE.match(line):
                self._duplicates.withheld.setdefault(self._name, []).append(line)
            elif not self._is_duplicate or (line.strip() and not line.endswith(CHAINED)):
                self._is_duplicate = False
                found.append([line])
        return found

    def finish(self) -> list[list[bytes]]:
        """Return the rest of a traceback that does not continue."""
        block, self._block = self._block, []
        return [block] if block else []

    @property
    def has_withheld(self) -> bool:
        """Whether lines were not shown."""
        return self._name in self._duplicates.withheld

    def release(self) -> list[list[bytes]]:
        """Return, and forget, the lines that were not shown."""
        return [[line] for line in self._duplicates.withheld.pop(self._name, [])]

    def _settle(self) -> list[list[bytes]]:
        block, self._block = self._block, []
        if self._duplicates.wanted and _STOPPED.match(block[-1]):
            self._duplicates.withheld.setdefault(self._name, []).extend(block)
            self._is_duplicate = True
            return []
        first = self._duplicates.first_with(self._name, block) if self._duplicates.wanted else self._name
        self._is_duplicate = first != self._name
        if not self._is_duplicate:
            return [block]
        kind = block[-1].partition(b":")[0]
        return [[f"the traceback of {first}, too: ".encode() + kind]]


#: A writable pipe takes this many bytes without blocking (POSIX), in blocking mode, too.
_AT_ONCE_NBYTES = select.PIPE_BUF


class OutputStream:
    """Writes to *target* in order, without blocking. Owner thread only.

    What a pipe, a terminal or a socket does not take now stays here until `flush`. *target* is not made non-blocking,
    as the mode is shared with other programs. Files take everything at once.

    `fd`: to be watched while `pending_nbytes` is not 0; None for a file. `is_terminal`: of *target*.
    """

    def __init__(self, target: BinaryIO) -> None:
        self.is_terminal = target.isatty()
        self._target = target
        self.fd = target.fileno() if _may_stall(target) else None
        self._pending = bytearray()

    @property
    def pending_nbytes(self) -> int:
        """Bytes not yet taken by the reader."""
        return len(self._pending)

    def write(self, data: bytes) -> None:
        """Append *data*, and write what the target takes now. Raises as `flush`."""
        if self.fd is None:
            self._target.write(data)
            self._target.flush()
            return
        self._pending += data
        self.flush()

    def flush(self) -> None:
        """Write what the target takes now.

        Raises `BrokenPipeError` or `OSError` if the reader is gone, or the target has another fault; the rest is
        dropped.
        """
        while self._pending and self._can_be_written(0.0):
            assert self.fd is not None, "a file leaves nothing"
            try:
                n_written = os.write(self.fd, self._pending[:_AT_ONCE_NBYTES])
            except BlockingIOError:  # another program has made it non-blocking
                return
            except OSError:
                self._pending.clear()
                raise
            del self._pending[:n_written]

    def wait(self) -> None:
        """Block until all is written. Raises as `flush`."""
        while self._pending:
            self._can_be_written(None)
            self.flush()

    def drop(self) -> int:
        """Drop what is not written; return its number of bytes."""
        nbytes = len(self._pending)
        self._pending.clear()
        return nbytes

    def _can_be_written(self, timeout_s: float | None) -> bool:
        assert self.fd is not None, "a file leaves nothing"
        return is_ready(self.fd, timeout_s, select.POLLOUT)


def is_one(out: BinaryIO, err: BinaryIO) -> bool:
    """Tell whether *out* and *err* are the same pipe, terminal or socket (``2>&1``)."""
    return _may_stall(out) and _may_stall(err) and os.path.sameopenfile(out.fileno(), err.fileno())


def _may_stall(target: BinaryIO) -> bool:
    try:
        mode = os.fstat(target.fileno()).st_mode
    except OSError:  # it is memory
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or target.isatty()
