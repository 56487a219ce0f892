"""Small files of the kernel (``/sys``, ``/proc``, ``/dev``, ``/etc``) below a root: the machine's, or a recorded tree.

Everything that files tell about network cards is read through `Tree`, so the same code examines this machine and the
trees under ``tests/sysfs_trees``. A file that is missing reads as None, and so does one that the kernel refuses to
read: an empty row of a GID table gives EINVAL, a veth's port name EOPNOTSUPP.
"""
from __future__ import annotations

import os
import re


class Tree:
    """The files below *root*. Paths are given in parts, without the root. Any thread; nothing is kept open."""

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self.root = os.fspath(root)

    def path(self, *parts: str) -> str:
        """Return the full path."""
        return os.path.join(self.root, *(part.lstrip("/") for part in parts))

    def text(self, *parts: str) -> str | None:
        """Return the content without surrounding blanks, None if there is none to be had."""
        try:
            with open(self.path(*parts), "rb") as file:
                return file.read().decode("utf-8", "replace").strip()
        except OSError:
            return None

    def number(self, *parts: str) -> int | None:
        """Return the whole number that the file begins with (``0x`` for hexadecimal), None if it holds none."""
        found = re.match(r"-?(0x[0-9a-fA-F]+|\d+)", self.text(*parts) or "")
        return int(found[0], 0 if "x" in found[0] else 10) if found else None

    def names(self, *parts: str) -> list[str]:
        """Return what a folder holds, numbers in names sorted as numbers; empty if it does not exist."""
        try:
            return sorted(os.listdir(self.path(*parts)), key=natural)
        except OSError:
            return []

    def target(self, *parts: str) -> str | None:
        """Return the last part of where a link points ("mlx5_core" for .../device/driver), None if it is no link."""
        try:
            return os.path.basename(os.readlink(self.path(*parts)))
        except OSError:
            return None

    def exists(self, *parts: str) -> bool:
        """Whether the path exists, links followed."""
        return os.path.exists(self.path(*parts))

    def objection(self, *parts: str) -> str | None:
        """Try to open a device node for reading and writing; return why that fails, in words, or None."""
        try:
            os.close(os.open(self.path(*parts), os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError as exc:
            return exc.strerror
        return None


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a sort key that puts mlx5_2 before mlx5_10."""
    return tuple((0, int(word)) if word.isdecimal() else (1, word) for word in re.split(r"(\d+)", name) if word)
