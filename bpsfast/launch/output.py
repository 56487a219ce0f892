"""Where the output of a job's processes goes: line by line, headed by whose it is, to a terminal and into files.

Under ``log_format=json`` each line that is shown is a JSON object instead: the log lines of bpsfast's processes as they
are, others with the keys ts, role, its number, stream ("stdout" or "stderr") and message, a whole traceback in one.
What is shown of lines that repeat each other is the business of `folding`. Files have all lines as they were written.
"""
from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from ..base import logs
from .duplicate_output import DuplicateOutput, Folder
from .output_stream import OutputStream, is_one

_TAIL_LINES = 200
#: What was shown so many lines ago still stands on a terminal.
_IN_SIGHT_LINES = 20
#: After which a line is cut that does not end.
_LINE_NBYTES = 1 << 20
#: What may wait for a reader before the job has to wait for it.
_PENDING_NBYTES = 1 << 20
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


class Sink(Protocol):
    """Takes what a process writes to one of its two streams, as it comes."""

    def feed(self, data: bytes) -> None:
        """Take *data*, whatever it ends with."""

    def finish(self) -> None:
        """The stream has ended."""


class Output:
    """The two streams that a launcher writes, and its files. `close` closes the files. Owner thread only.

    Who writes waits for the reader; but not while somebody is `attending`.

    Parameters
    ----------
    out, err
        Standard output and error by default; heads are coloured on a terminal.
    tee_dir
        Folder for one log of each process, both streams in it; None: none.
    rank_dir
        Folder for what each rank writes, as horovodrun names it: ``rank.0/stdout`` and ``rank.0/stderr``, numbers
        padded to one width; None: none.
    stamped
        Whether each line is headed by the time at which it came, too.
    """

    def __init__(self, out: BinaryIO | None = None, err: BinaryIO | None = None, tee_dir: Path | None = None,
                 rank_dir: Path | None = None, stamped: bool = False) -> None:
        out = sys.stdout.buffer if out is None else out
        err = sys.stderr.buffer if err is None else err
        self._out = OutputStream(out)
        self._err = self._out if is_one(out, err) else OutputStream(err)  # lines of one must not come amid those of the other
        self._is_attended = False
        self._is_hurried = False
        self._n_dropped = 0
        self._tee_dir, self._rank_dir, self._stamped = tee_dir, rank_dir, stamped
        self._as_json = logs.is_json()
        self._folding = DuplicateOutput(not self._as_json and not logging.getLogger("bpsfast").isEnabledFor(logging.INFO))
        self._n_lines = 0
        self._n_named = 0
        self._files = contextlib.ExitStack()

    def streams(self, name: str, rank: int | None = None, n_ranks: int = 0) -> tuple[Transcript, Transcript]:
        """Return where standard output and error of the process *name* go; *rank* of *n_ranks*, if it is one.

        Raises
        ------
        OSError
            If a file cannot be made.
        """
        colour = _COLOURS[self._n_named % len(_COLOURS)]
        self._n_named += 1
        log = [] if self._tee_dir is None else [self._file(self._tee_dir / f"{name.replace(' ', '-')}.log")]
        own: list[list[BinaryIO]] = [[], []]
        if self._rank_dir is not None and rank is not None:
            folder = self._rank_dir / f"rank.{rank:0{len(str(max(0, n_ranks - 1)))}}"
            own = [[self._file(folder / stream)] for stream in ("stdout", "stderr")]
        return (self._transcript(name, colour, self._out, [*log, *own[0]], n_kept=0),
                self._transcript(name, colour, self._err, [*log, *own[1]], n_kept=_TAIL_LINES))

    def aside(self, name: str) -> Transcript:
        """Return where lines of *name* go that is no process of the job: to the error stream, and into no file."""
        return self._transcript(name, _COLOURS[0], self._err, [], n_kept=_TAIL_LINES)

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

    def conclude(self, text: str, cause: Sequence[bytes], err: Transcript) -> None:
        """Say as the last words that *text* has ended the job, and *cause*: lines of that process's error output *err*.

        They are shown again only if they are out of sight, or have not been shown yet. Processes whose lines were kept
        back, because they only ended by that, are named.
        """
        last = cause[-1].decode(errors="replace").strip() if cause else ""
        if not last:
            self.say(text)
        elif not err.is_kept_back and self._n_lines - err.shown_at < _IN_SIGHT_LINES:
            self.say(f"{text}: {last}")
        else:
            self.say(f"{text}. Its last output:")
            self.quote(cause)
        err.forget()
        if self._folding.kept:
            self.say(f"{self._folding.names_kept()} ended because of that (in their words: --tee-dir, or "
                     "BPSFAST_LOG_LEVEL=INFO)")

    # -- a reader that stalls --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def attending(self) -> Iterator[None]:
        """Meanwhile nobody waits: the caller flushes `outlets` when they can be written, feeds nothing while `is_full`.

        In the end what still waits is dropped, and how much that was is said where it can be.
        """
        self._is_attended = True
        try:
            yield
        finally:
            self._n_dropped += sum(outlet.drop() for outlet in self.outlets)
            if self._n_dropped:
                with contextlib.suppress(OSError):
                    self.say(f"{self._n_dropped} bytes of output are left out: nobody read on")
                self._err.drop()
            self._is_attended = self._is_hurried = False
            self._n_dropped = 0

    @property
    def outlets(self) -> list[OutputStream]:
        """The streams; one, if both are the same."""
        return list(dict.fromkeys((self._out, self._err)))

    @property
    def pending_nbytes(self) -> int:
        """Bytes that wait for their readers."""
        return sum(outlet.pending_nbytes for outlet in self.outlets)

    @property
    def is_full(self) -> bool:
        """Whether so much waits for a reader that the processes have to wait, too."""
        return not self._is_hurried and self.pending_nbytes >= _PENDING_NBYTES

    def hurry(self) -> None:
        """The job is being ended: have nobody wait for a reader, but drop what comes after all that may wait."""
        self._is_hurried = True

    def _show(self, outlet: OutputStream, data: bytes) -> None:
        """Write what a process has written."""
        self._n_lines += data.count(b"\n")
        if self._is_hurried and outlet.pending_nbytes >= _PENDING_NBYTES:
            self._n_dropped += len(data)
        else:
            self._write(outlet, data)

    def _write(self, outlet: OutputStream, data: bytes) -> None:
        outlet.write(data)
        if not self._is_attended:
            outlet.wait()

    # -- files -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._files.close()

    def _transcript(self, name: str, colour: int, outlet: OutputStream, files: Sequence[BinaryIO], n_kept: int) -> Transcript:
        if self._as_json:
            spell: Callable[[list[bytes]], bytes] = _Objects(name, "stdout" if n_kept == 0 else "stderr")
        else:
            spell = _Headed(name, colour if outlet.is_terminal else None, self._stamped)
        folder = Folder(name, self._folding) if n_kept else None
        return Transcript(spell, functools.partial(self._show, outlet), files, n_kept, folder, lambda: self._n_lines)

    def _file(self, path: Path) -> BinaryIO:
        path.parent.mkdir(parents=True, exist_ok=True)
        return self._files.enter_context(path.open("wb"))


class _Headed:
    """Makes of lines what is shown of them: time, whose it is, and the line, which then need not say the same again."""

    def __init__(self, name: str, colour: int | None, stamped: bool) -> None:
        self._name, self._stamped = name.encode(), stamped
        self._head = f"[{name}] " if colour is None else f"\x1b[{colour}m[{name}]\x1b[0m "

    def __call__(self, lines: list[bytes]) -> bytes:
        head = (_stamp() + self._head if self._stamped else self._head).encode()
        return b"".join(head + logs.strip_log_prefix(line, self._name, self._stamped) + b"\n" for line in lines)


class _Objects:
    """Makes a JSON object of lines that belong together."""

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
    """One stream of one process, cut into lines; `tail`: the last ones, of standard error. See `Output.streams`.

    *spell* makes of lines what *write* shows of them; *folder* decides which those are, None: all. `shown_at`: how many
    lines of all processes, by *n_lines*, had been shown when this one's last was.
    """

    def __init__(self, spell: Callable[[list[bytes]], bytes], write: Callable[[bytes], None], files: Sequence[BinaryIO],
                 n_kept: int, folder: Folder | None, n_lines: Callable[[], int]) -> None:
        self._spell, self._write, self._files = spell, write, files
        self._folder, self._n_lines = folder, n_lines
        self.shown_at = 0
        self._rest = bytearray()
        self._cut_at_return = False
        self.tail: deque[bytes] = deque(maxlen=n_kept)

    def feed(self, data: bytes) -> None:
        """Show the lines that *data* completes; one that grows too long is cut."""
        if self._cut_at_return and data.startswith(b"\n"):
            data = data[1:]  # the other half of the end of a line that was shown
        self._cut_at_return = data.endswith(b"\r")
        # a progress bar rewrites its line by \r: each state becomes a line
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
        """Show what is left without an end of line."""
        rest = bytes(self._rest)
        self._rest.clear()
        self._show([rest] if rest else [])
        if self._folder is not None:
            self._spell_out(self._folder.finish())

    @property
    def is_kept_back(self) -> bool:
        """Whether lines by which the process blames another one have not been shown."""
        return self._folder is not None and self._folder.keeps

    def release(self) -> None:
        """Show them: the job goes on, and nobody else says what they do."""
        if self._folder is not None:
            self._spell_out(self._folder.release())

    def forget(self) -> None:
        """Leave them out for good."""
        if self._folder is not None:
            self._folder.release()

    def _show(self, lines: Sequence[bytes]) -> None:
        if not lines:
            return
        self.tail.extend(lines)
        for file in self._files:
            file.write(b"".join(line + b"\n" for line in lines))
            file.flush()
        self._spell_out([[line] for line in lines] if self._folder is None else self._folder.take(lines))

    def _spell_out(self, groups: list[list[bytes]]) -> None:
        if groups:
            self._write(b"".join(map(self._spell, groups)))
            self.shown_at = self._n_lines()
