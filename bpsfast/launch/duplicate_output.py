"""What of a process's error lines is shown at once: tracebacks whole, one that others have shown before as one line.

A launcher shows the lines of all ranks. Where many fail in the same way, or because one has failed, the one reason
would be told as often as there are ranks. Files (``--tee-dir``) have every line, and ``log_level=INFO`` shows them all.
"""
from __future__ import annotations

import re
from collections.abc import Iterable

from ..base import logs

TRACEBACK = b"Traceback (most recent call last)"
CHAINED = (b"another exception occurred:", b"direct cause of the following exception:")
#: What a rank of ours, or a daemon, says if it ends only because of another process.
_CONSEQUENCE = re.compile(rb"bpsfast\.PeerLostError: .* \(ended in |" + logs.CONSEQUENCE)
#: What a rank's traceback ends with where the launcher has ended the scheduler a moment before the rank.
_STOPPED = re.compile(rb"(?:[\w.]+\.)?ClosedError: the scheduler got SIG")
#: A traceback is shown from there on as it comes: something else must have begun like one.
_MOST_LINES = 1000
#: Tracebacks that are remembered, to be known again.
_MOST_KNOWN = 100


class DuplicateOutput:
    """What the processes of one launcher have shown, and what is kept back: see `Folder`.

    *wanted* False: tracebacks are shown whole, and nothing is left out.
    """

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self.kept: dict[str, list[bytes]] = {}  # consequences by the name of the process
        self._known: dict[bytes, str] = {}

    def first_with(self, name: str, block: Iterable[bytes]) -> str:
        """Return who has shown the same traceback before; *name* itself if nobody else has."""
        # what differs though it is the same: who says it, how long it has waited, how deep in bpsfast that was
        key = re.sub(rb"(?<=Error: )" + re.escape(name.encode()) + rb"\b|\b\d+(?:\.\d+)?(?= s\b)|\d+(?= calls within)",
                     b"#", b"\n".join(block))
        if len(self._known) < _MOST_KNOWN:
            self._known.setdefault(key, name)
        return self._known.get(key, name)

    def names_kept(self) -> str:
        """Name the processes whose lines are kept back: "nodes 0, 1, ranks 0-2, 4"."""
        numbers: dict[str, list[int]] = {}
        others: list[str] = []
        for name in self.kept:
            kind, _, number = name.rpartition(" ")
            if number.isdecimal() and kind:
                numbers.setdefault(kind, []).append(int(number))
            else:
                others.append(name)
        return ", ".join([*others, *(f"{kind}{'s' if len(found) > 1 else ''} {_spans(found)}"
                                     for kind, found in sorted(numbers.items()))])


class Folder:
    """One stream of the process *name*: `take` makes of its lines the groups of lines that are shown."""

    def __init__(self, name: str, folding: DuplicateOutput) -> None:
        self._name, self._folding = name, folding
        self._block: list[bytes] = []
        self._is_folded = False

    def take(self, lines: Iterable[bytes]) -> list[list[bytes]]:
        """Return what is shown now: single lines, and whole tracebacks."""
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
            elif self._folding.wanted and _CONSEQUENCE.match(line):
                self._folding.kept.setdefault(self._name, []).append(line)
            elif not self._is_folded or (line.strip() and not line.endswith(CHAINED)):
                self._is_folded = False
                found.append([line])
        return found

    def finish(self) -> list[list[bytes]]:
        """Return what is left of a traceback that does not go on."""
        block, self._block = self._block, []
        return [block] if block else []

    @property
    def keeps(self) -> bool:
        """Whether lines are kept back."""
        return self._name in self._folding.kept

    def release(self) -> list[list[bytes]]:
        """Return the lines that were kept back: they are to be shown after all."""
        return [[line] for line in self._folding.kept.pop(self._name, [])]

    def _settle(self) -> list[list[bytes]]:
        block, self._block = self._block, []
        if self._folding.wanted and _STOPPED.match(block[-1]):
            self._folding.kept.setdefault(self._name, []).extend(block)
            self._is_folded = True
            return []
        first = self._folding.first_with(self._name, block) if self._folding.wanted else self._name
        self._is_folded = first != self._name
        if not self._is_folded:
            return [block]
        kind = block[-1].partition(b":")[0]
        return [[f"the traceback of {first}, too: ".encode() + kind]]


def _spans(numbers: Iterable[int]) -> str:
    """Return "0-2, 4" for 4, 0, 1, 2."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


