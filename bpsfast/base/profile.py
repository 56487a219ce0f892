"""Profile files: settings in TOML, which commands can change and restore.

    read     return the settings of the file
    apply    change some keys and keep every other byte; the previous content is saved in FILE.undo
    undo     restore the content from before the last `apply`, byte for byte

``FILE.undo`` is JSON: a list with one entry for each `apply` that was not undone, the last one at the end.
"""
from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..orchestration.errors import ConfigError, LackingError

_UNDO_SUFFIX = ".undo"


class Change(NamedTuple):
    """The result of `apply` or `undo`: file, reason and date (ISO 8601) of the change; whether the file was removed."""

    path: str
    reason: str
    date: str
    removed: bool = False


def read(path: str) -> dict[str, Any]:
    """Return the settings of the file by name, with TOML's types; raises `ConfigError`."""
    try:
        return msgspec.toml.decode(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as exc:
        raise ConfigError(f"BPSFAST_PROFILE = {path!r} cannot be read: {exc.strerror}") from exc
    except ImportError as exc:
        raise LackingError(f"BPSFAST_PROFILE = {path!r}: TOML needs Python 3.11, or `pip install tomli`") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"BPSFAST_PROFILE = {path!r} is not TOML: {exc}") from exc


def edited(text: str, values: Mapping[str, Any]) -> str:
    """Return the TOML *text* with *values* set and everything else unchanged, including comments.

    Raises `ConfigError` if the text cannot be changed line by line without losing something.
    """
    end = "\r\n" if "\r\n" in text else "\n"
    lines = text.removesuffix(end).split(end) if text else []
    for name, value in values.items():
        line = f"{name} = {json.dumps(value)}"  # TOML has the same form for such numbers, booleans and strings
        found = [i for i, each in enumerate(lines) if re.match(rf"\s*[\"']?{name}[\"']?\s*=", each)]
        if found:
            comment = re.search(r"\s+#[^\"']*$", lines[found[0]])
            lines[found[0]] = line + (comment[0] if comment else "")
        else:
            lines.append(line)
    result = end.join(lines) + end
    try:
        faithful = msgspec.toml.decode(result) == msgspec.toml.decode(text) | dict(values)
    except (msgspec.DecodeError, ImportError):
        faithful = False
    if not faithful:
        raise ConfigError(f"the profile cannot be changed line by line without losing something; add these lines "
                          f"yourself: {', '.join(f'{name} = {json.dumps(value)}' for name, value in values.items())}")
    return result


def writable(path: str) -> None:
    """Raise `ConfigError` if `apply` could not write *path*."""
    place = Path(path).resolve()
    if place.exists():
        read(path)
    if not os.access(place.parent, os.W_OK):
        raise ConfigError(f"the profile {path} cannot be written: {place.parent} is not a writable folder")


def apply(path: str, values: Mapping[str, Any], reason: str) -> Change:
    """Set *values* in the file, which need not exist; save the previous content with *reason* and date.

    The file is unchanged if this raises `ConfigError` or `OSError`.
    """
    place = Path(path).resolve()
    before = _content(place)
    after = edited(before or "", values)
    entries = _entries(place)
    date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    entries.append({"date": date, "reason": reason, "before": before, "after": after})
    _replace(_undo_file(place), json.dumps(entries, indent=1) + "\n", place)
    _replace(place, after, place)
    return Change(str(place), reason, date)


def undo(path: str) -> Change:
    """Restore the file from before the last `apply`; remove it if it did not exist.

    Raises `ConfigError` if nothing was applied, or the file was changed since then.
    """
    place = Path(path).resolve()
    entries = _entries(place)
    if not entries:
        raise ConfigError(f"nothing to undo: {_undo_file(place)} does not exist or is empty, so no --apply has "
                          f"changed {place}")
    last = entries.pop()
    now = _content(place)
    if now not in (last["after"], last["before"]):  # the latter if `apply` was interrupted between its two files
        raise ConfigError(f"{place} was changed since {last['date']}, when `{last['reason']}` was applied: --undo "
                          f"would lose that change. The content from before is in {_undo_file(place)}")
    if last["before"] is None:
        place.unlink(missing_ok=True)
    else:
        _replace(place, last["before"], place)
    if entries:
        _replace(_undo_file(place), json.dumps(entries, indent=1) + "\n", place)
    else:
        _undo_file(place).unlink()
    return Change(str(place), last["reason"], last["date"], last["before"] is None)


def _content(place: Path) -> str | None:
    """Return the file's content with its line ends, None if it does not exist."""
    try:
        return place.read_bytes().decode()
    except FileNotFoundError:
        return None


def _undo_file(place: Path) -> Path:
    return place.with_name(place.name + _UNDO_SUFFIX)


def _entries(place: Path) -> list[dict[str, Any]]:
    try:
        return json.loads(_undo_file(place).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except ValueError as exc:
        raise ConfigError(f"{_undo_file(place)} cannot be read ({exc}); move it away, after which --undo is not "
                          "possible") from exc


def _replace(place: Path, text: str, like: Path) -> None:
    """Replace a file atomically, with the mode of *like*."""
    import tempfile  # every process reads a profile, and few write one

    handle, name = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
    try:
        with open(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, like.stat().st_mode & 0o777 if like.exists() else 0o644)
        os.replace(name, place)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
