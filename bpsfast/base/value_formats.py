"""Parses values of settings and options: sizes (4M), lists of CPUs (0-3,8) and of RDMA devices (=mlx5_0:1).

Lists of RDMA devices have the syntax of NCCL_IB_HCA:

    mlx5_0,mlx5_1      devices whose name begins so          ("mlx5_1" matches mlx5_1 and mlx5_10)
    =mlx5_0:1          exactly this device, port 1 only
    ^mlx5_1            all but these;    ^=mlx5_1 all but exactly this

In NCCL ``^`` and ``=`` stand once, at the beginning, for the whole list. Here each entry may have modifiers of its own,
which hold until an entry with others, so every NCCL list means the same, and ``=mlx5_0:1,^mlx5_1`` is allowed as well.
A port is used if any of the admitting entries matches it (or there are none) and none of the excluding ones does.

References
----------
NCCL, ``src/misc/utils.cc``: parseStringList, matchIfList; NVIDIA, NCCL user guide, environment variables.
"""
from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..orchestration.errors import ConfigError

#: The path MTUs that RDMA has, in bytes.
PATH_MTUS = (4096, 2048, 1024, 512, 256)
_SHIFTS = {"": 0, "K": 10, "M": 20, "G": 30}
#: Linux has at most 8192; a larger number is an error, not a reason for a set of that size.
_MAX_CPUS = 1 << 16


def parse_size(text: str) -> int | None:
    """Return the bytes of a size such as 4M, None if it is not a size. 4M, 4MB and 4MiB are all 4 * 1024**2."""
    match = re.fullmatch(r"(\d+)\s*(?:([KMG])(?:i?B)?|B?)", text.strip(), re.IGNORECASE)
    return int(match[1]) << _SHIFTS[(match[2] or "").upper()] if match else None


def parse_ports(text: str) -> tuple[int, int]:
    """Return the first and the last port of a range such as "30000-30999"; (0, 0), any free one, of "".

    Raises `ConfigError` if *text* is no range.
    """
    if not text:
        return 0, 0
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) <= 65535):
        raise ConfigError(f"ports={text!r} is no range of ports: expected one such as 30000-30999")
    return int(first), int(last)


def parse_cpus(text: str) -> frozenset[int]:
    """Return the CPUs of a list such as "0-3,8,10-11", without invalid entries (see `is_cpu_list`)."""
    cpus: set[int] = set()
    for word in text.split(","):
        if (ends := _ends(word)) is not None:
            cpus.update(range(ends[0], ends[1] + 1))
    return frozenset(cpus)


def is_cpu_list(text: str) -> bool:
    """Whether *text* is a list such as "0-3,8" with at least one CPU and no invalid entry."""
    return all(_ends(word) is not None for word in text.split(","))


def _ends(word: str) -> tuple[int, int] | None:
    found = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", word, re.ASCII)
    if found is None:
        return None
    first, last = int(found[1]), int(found[2] or found[1])
    return (first, last) if first <= last < _MAX_CPUS else None


def format_cpus(cpus: Iterable[int]) -> str:
    """Return *cpus*, or other distinct numbers, as a list such as "0-3,8", the inverse of `parse_cpus`."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


@dataclass(frozen=True)
class DeviceEntry:
    """One entry of a list of RDMA devices; `port` None: every port."""

    name: str
    port: int | None = None
    exact: bool = False
    excludes: bool = False

    def matches(self, device: str, port: int) -> bool:
        """Whether the entry admits or excludes this port."""
        if self.port is not None and self.port != port:
            return False
        return device == self.name if self.exact else device.startswith(self.name)

    def __str__(self) -> str:
        port = "" if self.port is None else f":{self.port}"
        return f"{'^' if self.excludes else ''}{'=' if self.exact else ''}{self.name}{port}"


@dataclass(frozen=True)
class RdmaDeviceList:
    """A parsed list of RDMA devices. An empty one admits every device."""

    entries: tuple[DeviceEntry, ...] = ()

    def admits(self, device: str, port: int) -> bool:
        """Whether the list allows this port."""
        admitting = [entry for entry in self.entries if not entry.excludes]
        admitted = not admitting or any(entry.matches(device, port) for entry in admitting)
        return admitted and not any(entry.excludes and entry.matches(device, port) for entry in self.entries)

    @property
    def names_devices(self) -> bool:
        """Whether the list names devices to use, not only devices to exclude."""
        return any(not entry.excludes for entry in self.entries)

    def unmatched(self, ports: list[tuple[str, int]]) -> list[DeviceEntry]:
        """Return the admitting entries that match none of *ports*, probably misspelled."""
        return [entry for entry in self.entries
                if not entry.excludes and not any(entry.matches(device, port) for device, port in ports)]

    def __str__(self) -> str:
        """Return the list in its text form, with modifiers where they change."""
        shown, before = [], ""
        for entry in self.entries:
            modifiers = ("^" if entry.excludes else "") + ("=" if entry.exact else "")
            # an entry without modifiers comes first, since "no modifiers from here on" cannot be written
            shown.append(str(entry) if modifiers != before else str(entry).removeprefix(modifiers))
            before = modifiers
        return ",".join(shown)


def parse_rdma_devices(text: str) -> RdmaDeviceList:
    """Return the device list of *text*; blanks around entries and empty entries are ignored.

    Raises `ValueError` for a port that is not a positive number, or modifiers without a name.
    """
    entries: list[DeviceEntry] = []
    exact = excludes = False
    for raw in text.split(","):
        word = raw.strip()
        if not word:
            continue
        bare = word.lstrip("^=")
        modifiers = word[:len(word) - len(bare)]
        if modifiers not in ("", "^", "=", "^="):
            raise ValueError(f"entry {word!r} begins with {modifiers!r}: expected ^ (all but), = (exactly) or ^=")
        if modifiers:
            excludes, exact = "^" in modifiers, "=" in modifiers
        name, colon, number = bare.partition(":")
        if not name:
            raise ValueError(f"entry {word!r} names no device")
        if colon and not (number.isascii() and number.isdecimal() and int(number) > 0):
            raise ValueError(f"entry {word!r} names port {number!r}: ports are numbered from 1")
        entries.append(DeviceEntry(name, int(number) if colon else None, exact, excludes))
    return RdmaDeviceList(tuple(entries))
