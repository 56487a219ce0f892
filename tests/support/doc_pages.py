"""The contents of README.md and the pages of bpsfast/docs: code blocks, links and headings.

A block begins with ``` and its language. Comments, which GitHub does not show, may be before and after it:

    <!-- before: / lines of Python / -->       run before a Python block, in the same program
    <!-- after: / lines of Python / -->        run after it
    <!-- runs -->                              the shell block below is run, in a folder with the page's train.py
    <!-- installs -->                          the shell block below installs: its lines are checked, but not run
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^( *)```(.*)$")
_COMMENT = re.compile(r"<!-- (before|after):\n(.*?)^-->$", re.S | re.M)
_LINK = re.compile(r"\[(?:[^\]\[]|!\[[^\]]*\]\([^)]*\))*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """One code block of `page`, from `line` on; `runs`: the whole block is run."""

    page: str
    line: int
    language: str
    text: str
    before: str = ""
    after: str = ""
    mark: str = ""

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def program(self) -> str:
        """Return the whole Python program."""
        return f"{self.before}{self.text}{self.after}"


@dataclass(frozen=True)
class Page:
    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def blocks(self) -> list[Block]:
        """Return all fenced blocks; raises AssertionError for one that does not end."""
        found, text, at = [], self.text, 0
        lines = text.splitlines()
        for begin, language, inside, end in _fenced(lines):
            prefix = "\n".join(lines[at:begin]).rstrip("\n") + "\n"
            mark = re.search(r"^<!-- (runs|installs) -->\s*\Z", prefix, re.M)
            befores = [m for m in _COMMENT.finditer(prefix) if m[1] == "before"]
            before = befores[-1][2] if befores and not prefix[befores[-1].end():].strip() else ""
            after = _COMMENT.match("\n".join(lines[end + 1:]))
            found.append(Block(self.name, begin + 1, language, "\n".join(inside) + "\n", before,
                               after[2] if after and after[1] == "after" else "", mark[1] if mark else ""))
            at = end + 1
        assert text.count("<!-- before:") == sum(bool(block.before) for block in found), f"{self.name}: a stray comment"
        assert text.count("<!-- after:") == sum(bool(block.after) for block in found), f"{self.name}: a stray comment"
        return found

    def prose(self) -> str:
        """Return the text without blocks and comments."""
        lines = self.text.splitlines()
        for begin, _, _, end in reversed(list(_fenced(lines))):
            del lines[begin:end + 1]
        return re.sub(r"<!--.*?-->", "", "\n".join(lines), flags=re.S)

    def links(self) -> list[str]:
        """Return the targets of links and pictures, except web addresses."""
        prose = re.sub(r"`[^`]*`", "", self.prose())
        return [to for to in _LINK.findall(prose) if not re.match(r"[a-z]+:", to)]

    def anchors(self) -> set[str]:
        """Return the anchors of the headings, as GitHub makes them."""
        heads = re.findall(r"^#+ (.*)$", self.prose(), re.M)
        return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def pages() -> list[Page]:
    """Return README.md, CONTRIBUTING.md, CHANGELOG.md and all pages of bpsfast/docs."""
    return [Page(ROOT / name) for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + [
        Page(path) for path in sorted((ROOT / "bpsfast" / "docs").glob("*.md"))]


def _fenced(lines: list[str]) -> Iterator[tuple[int, str, list[str], int]]:
    """Yield for each fenced block: index of its first line, language, lines inside, index of its last line."""
    begin, language, indent = -1, "", ""
    for index, line in enumerate(lines):
        match = _FENCE.match(line)
        if match is None:
            continue
        if begin < 0:
            begin, indent, language = index, match[1], match[2].strip()
        else:
            assert not match[2].strip(), f"line {index + 1}: a block begins inside that of line {begin + 1}"
            yield begin, language, [inside.removeprefix(indent) for inside in lines[begin + 1:index]], index
            begin = -1
    assert begin < 0, f"the block of line {begin + 1} does not end"
