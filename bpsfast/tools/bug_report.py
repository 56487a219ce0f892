"""The report itself: every entry scrubbed, then one file that only its owner may read."""
from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from .._version import __version__
from ..orchestration.errors import ConfigError
from .bug_report_contents import Entry, Omission, as_text, had
from .redaction import Leak, Redactor

_ROOT = "bpsfast-report"
_N_THREADS = 4
_README = f"""A report of bpsfast {__version__}, made by `bpsfast report` on its user's machine.

Secrets are replaced by (hidden); users, hosts, addresses and cards by user-1, host-1, 10.0.1.1, fd00:0:0:1::1 and
02:00:00:00:00:01: each one by the same stand-in everywhere, addresses of one network by addresses of one network.

"""


class File(msgspec.Struct, frozen=True):
    """One file of the archive, as it is written."""

    name: str
    about: str
    content: bytes
    n_lines: int


def gather(entries: Iterable[Entry], scrubber: Redactor) -> tuple[list[File], list[Omission]]:
    """Return the files, and what could not be had or still held a secret."""
    files: list[File] = []
    left_out: list[Omission] = []
    chosen = list(entries)
    with ThreadPoolExecutor(_N_THREADS, thread_name_prefix="bpsfast-report") as executor:
        for entry, (found, reason) in zip(chosen, executor.map(had, chosen)):
            try:
                name, about = scrubber.text(entry.name), scrubber.text(entry.about)
                if reason:
                    left_out.append(Omission(name, scrubber.text(reason)))
                    continue
                shown = scrubber.text(found, not entry.has_versions) if isinstance(found, str) else as_text(
                    scrubber.data(found, not entry.has_versions))
                scrubber.check(shown)
            except Leak as exc:
                left_out.append(Omission(f"entry {len(files) + len(left_out) + 1}", str(exc)))
                continue
            files.append(File(name, about, shown.encode("utf-8", "replace"), shown.count("\n")))
    return files, left_out


def readme(files: Sequence[File], left_out: Sequence[Omission]) -> File:
    """Return the file that explains the others."""
    lines = [f"{file.name:<24} {file.about}" for file in files]
    lines += [f"{each.name:<24} not here: {each.reason}" for each in left_out]
    content = _README + "\n".join(lines) + "\n"
    return File("README.txt", "what is what", content.encode(), content.count("\n"))


def write(path: Path, files: Sequence[File]) -> int:
    """Write the archive, which this user alone may read; return its bytes. Never in the place of another file.

    Raises
    ------
    ConfigError
        There is such a file, or none can be made.
    OSError
        The system lets it not be made, or has no room for it; then nothing is left of it.
    """
    packed = io.BytesIO()
    with gzip.GzipFile("", "wb", fileobj=packed, mtime=0) as zipped, tarfile.open(
            fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for file in files:
            entry = tarfile.TarInfo(f"{_ROOT}/{file.name}")
            entry.size, entry.mode = len(file.content), 0o600
            archive.addfile(entry, io.BytesIO(file.content))
    try:
        out = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
    except FileExistsError as exc:
        raise ConfigError(f"{path}: there is such a file: name another one with -o, or remove it") from exc
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise ConfigError(f"{path}: there is no such folder") from exc
    try:
        with out:
            out.write(packed.getvalue())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return len(packed.getvalue())
