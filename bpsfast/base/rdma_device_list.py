"""Which devices a user allows, in the syntax of NCCL_IB_HCA (and NCCL_SOCKET_IFNAME).

    mlx5_0,mlx5_1      devices whose name begins so          ("mlx5_1" matches mlx5_1 and mlx5_10)
    =mlx5_0:1          exactly this device, port 1 only
    ^mlx5_1            all but these;    ^=mlx5_1 all but exactly this

In NCCL ``^`` and ``=`` stand once, at the beginning, for the whole list. Here an entry may bring modifiers of its own,
which hold until another entry brings some, so every NCCL list means the same and ``=mlx5_0:1,^mlx5_1`` means something
too. A port is used if any of the admitting entries matches it (or there are none) and none of the excluding ones does.

References
----------
NCCL, ``src/misc/utils.cc``: parseStringList, matchIfList; NVIDIA, NCCL user guide, environment variables.
"""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceEntry:
    """One entry of the list; `port` None means every port."""

    name: str
    port: int | None = None
    exact: bool = False
    excludes: bool = False

    def matches(self, device: str, port: int) -> bool:
        """Whether the entry speaks of this port, be it to admit or to exclude it."""
        if self.port is not None and self.port != port:
            return False
        return device == self.name if self.exact else device.startswith(self.name)

    def __str__(self) -> str:
        port = "" if self.port is None else f":{self.port}"
        return f"{'^' if self.excludes else ''}{'=' if self.exact else ''}{self.name}{port}"


@dataclass(frozen=True)
class RdmaDeviceList:
    """A parsed list. The empty one admits everything."""

    entries: tuple[DeviceEntry, ...] = ()

    def admits(self, device: str, port: int) -> bool:
        """Whether the list allows this port."""
        admitting = [entry for entry in self.entries if not entry.excludes]
        admitted = not admitting or any(entry.matches(device, port) for entry in admitting)
        return admitted and not any(entry.excludes and entry.matches(device, port) for entry in self.entries)

    @property
    def names_devices(self) -> bool:
        """Whether the list names devices to use, rather than only ones to leave out."""
        return any(not entry.excludes for entry in self.entries)

    def unmatched(self, ports: list[tuple[str, int]]) -> list[DeviceEntry]:
        """Return the admitting entries that match none of *ports*: most likely misspelled."""
        return [entry for entry in self.entries
                if not entry.excludes and not any(entry.matches(device, port) for device, port in ports)]

    def __str__(self) -> str:
        """Return the list with the modifiers of each entry spelled out where they change."""
        shown, before = [], ""
        for entry in self.entries:
            modifiers = ("^" if entry.excludes else "") + ("=" if entry.exact else "")
            # There is no way to write "no modifiers from here on": such an entry comes first, see `parse`.
            shown.append(str(entry) if modifiers != before else str(entry).removeprefix(modifiers))
            before = modifiers
        return ",".join(shown)


def parse(text: str) -> RdmaDeviceList:
    """Return the selection that *text* describes; blanks around entries and empty entries do not count.

    Raises
    ------
    ValueError
        A port that is no positive number, or modifiers without a name.
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
