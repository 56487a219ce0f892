"""Where the output of a job's processes goes: line by line, headed by whose it is, to a terminal and into files."""
from __future__ import annotations

import contextlib
import datetime
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

_TAIL_LINES = 200
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


class Sink(Protocol):
    """Takes what a process writes to one of its two streams, as it comes."""

    def feed(self, data: bytes) -> None:
        """Take *data*, whatever it ends with."""

    def finish(self) -> None:
        """The stream has ended."""


class Output:
    """The two streams that a launcher writes, and its files. `close` closes the files. Owner thread only.

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
        self.out = sys.stdout.buffer if out is None else out
        self.err = sys.stderr.buffer if err is None else err
        self._tee_dir, self._rank_dir, self._stamped = tee_dir, rank_dir, stamped
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
        return (Transcript(name, colour, self.out, [*log, *own[0]], self._stamped, n_kept=0),
                Transcript(name, colour, self.err, [*log, *own[1]], self._stamped, n_kept=_TAIL_LINES))

    def aside(self, name: str) -> Transcript:
        """Return where lines of *name* go that is no process of the job: to the error stream, and into no file."""
        return Transcript(name, _COLOURS[0], self.err, [], self._stamped, n_kept=_TAIL_LINES)

    def say(self, text: str) -> None:
        """Write a line of the launcher itself."""
        self.err.write(f"[bpsfast run] {text}\n".encode())
        self.err.flush()

    def quote(self, lines: Sequence[bytes]) -> None:
        """Write *lines* as they are to the error stream."""
        self.err.write(b"".join(line + b"\n" for line in lines))
        self.err.flush()

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._files.close()

    def _file(self, path: Path) -> BinaryIO:
        path.parent.mkdir(parents=True, exist_ok=True)
        return self._files.enter_context(path.open("wb"))


class Transcript:
    """One stream of one process, cut into lines; `tail`: the last ones, of standard error. See `Output.streams`."""

    def __init__(self, name: str, colour: int, target: BinaryIO, files: Sequence[BinaryIO], stamped: bool,
                 n_kept: int) -> None:
        self._head = f"[{name}]"
        if target.isatty():
            self._head = f"\x1b[{colour}m{self._head}\x1b[0m"
        self._target, self._files, self._stamped = target, files, stamped
        self._rest = b""
        self._cut_at_return = False
        self.tail: deque[bytes] = deque(maxlen=n_kept)

    def feed(self, data: bytes) -> None:
        """Show the lines that *data* completes."""
        if self._cut_at_return and data.startswith(b"\n"):
            data = data[1:]  # the other half of the end of a line that was shown
        self._cut_at_return = data.endswith(b"\r")
        # a progress bar rewrites its line by \r: each state becomes a line
        lines = (self._rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop()
        self._show(lines)

    def finish(self) -> None:
        """Show what is left without an end of line."""
        rest, self._rest = self._rest, b""
        self._show([rest] if rest else [])

    def _show(self, lines: Sequence[bytes]) -> None:
        if not lines:
            return
        head = self._head
        if self._stamped:
            head = f"{datetime.datetime.now().astimezone().isoformat(timespec='milliseconds')} {head}"
        for line in lines:
            self.tail.append(line)
            for file in self._files:
                file.write(line + b"\n")
            self._target.write(head.encode() + b" " + line + b"\n")
        for file in (*self._files, self._target):
            file.flush()
