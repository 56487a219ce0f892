"""``python -m tests.support.line_count [COMMIT]``: lines of the product's sources by folder, now or in a commit.

It counts all lines of the Python, Cython and C files in git, except those below ``tests/``.
"""
from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = (".py", ".pyx", ".pxi", ".pxd", ".h", ".c")


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout


def count(commit: str = "") -> Counter[str]:
    """Return the number of lines by folder (two levels) of *commit*, or of the files as they are now."""
    names = _git("ls-tree", "-r", "--name-only", commit) if commit else _git("ls-files")
    lines: Counter[str] = Counter()
    for name in names.decode().splitlines():
        if name.endswith(SUFFIXES) and not name.startswith("tests/"):
            text = _git("show", f"{commit}:{name}") if commit else (ROOT / name).read_bytes()
            folder = "/".join(name.split("/")[:-1][:2])
            lines[folder] += text.count(b"\n")
    return lines


def main() -> None:
    """Print the lines of each folder, and of all."""
    found = count(*sys.argv[1:2])
    for folder, n in sorted(found.items()):
        print(f"{n:8} {folder}")
    print(f"{sum(found.values()):8} in all")


if __name__ == "__main__":
    main()
