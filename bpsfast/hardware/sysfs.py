"""Reads small files (``/sys``, ``/proc``, ``/dev``, ``/etc``) of this machine, or a recorded machine's copies of them.

All facts from files are read through `Tree`, so the same code examines this machine and the recorded ones of
``tests/sysfs_trees``. A file that is missing or cannot be read gives None: an empty row of a GID table gives EINVAL,
the port name of a veth EOPNOTSUPP.
"""
from __future__ import annotations

import os
import re


class Tree:
    """The files below *root*. Paths are given in parts, relative to the root. Thread-safe; keeps nothing open."""

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self.root = os.fspath(root)

    def path(self, *parts: str) -> str:
        """Return the full path."""
        return os.path.join(self.root, *(part.lstrip("/") for part in parts))

    def text(self, *parts: str) -> str | None:
        """Return the content without surrounding blanks, None if it cannot be read."""
        try:
            with open(self.path(*parts), "rb") as file:
                return file.read().decode("utf-8", "replace").strip()
        except OSError:
            return None

    def number(self, *parts: str) -> int | None:
        """Return the integer at the beginning of the file (``0x`` for hexadecimal), None if there is none."""
        found = re.match(r"-?(0x[0-9a-fA-F]+|\d+)", self.text(*parts) or "")
        return int(found[0], 0 if "x" in found[0] else 10) if found else None

    def fields(self, *parts: str) -> dict[str, str]:
        """Return value by name of the lines "name: value", the first line of each name; empty if there is no file."""
        lines = [line.partition(":") for line in (self.text(*parts) or "").splitlines()]
        return {name.strip(): value.strip() for name, _, value in reversed(lines)}

    def numa_node(self, *parts: str) -> int | None:
        """Return the NUMA node of the device in a folder, None if firmware reports none (-1)."""
        node = self.number(*parts, "numa_node")
        return node if node is not None and node >= 0 else None

    def names(self, *parts: str) -> list[str]:
        """Return the entries of a folder in natural order; empty if it does not exist."""
        try:
            return sorted(os.listdir(self.path(*parts)), key=natural)
        except OSError:
            return []

    def target(self, *parts: str) -> str | None:
        """Return the last part of a link's target ("mlx5_core" for .../device/driver), None if it is not a link."""
        try:
            return os.path.basename(os.readlink(self.path(*parts)))
        except OSError:
            return None

    def exists(self, *parts: str) -> bool:
        """Whether the path exists, following links."""
        return os.path.exists(self.path(*parts))

    def objection(self, *parts: str) -> str | None:
        """Open a device file for reading and writing and close it; return the error's text, or None."""
        try:
            os.close(os.open(self.path(*parts), os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError as exc:
            return exc.strerror
        return None


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a sort key that orders numbers in names by value (mlx5_2 before mlx5_10)."""
    return tuple((0, int(word)) if word.isdecimal() else (1, word) for word in re.split(r"(\d+)", name) if word)
