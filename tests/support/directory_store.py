"""A store for `rendezvous` in a directory, with a file for each key."""
from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta
from pathlib import Path


class DirectoryStore:
    """Each key is set by one process, as in a rendezvous, so counters need no lock."""

    def __init__(self, folder: str | Path, default_s: float = 30.0) -> None:
        self._folder = Path(folder)
        self._default = timedelta(seconds=default_s)

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", ".")

    def set(self, key: str, value: str) -> None:
        path = self._path(key)
        new = path.with_name(f"{path.name}.{os.getpid()}.new")
        new.write_text(value)
        new.replace(path)

    def get(self, key: str) -> bytes:
        self.wait([key], self._default)
        return self._path(key).read_bytes()

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not all(self._path(key).exists() for key in keys):
            if time.monotonic() >= deadline:
                raise LookupError(f"{keys} are not all there")
            time.sleep(0.005)

    def add(self, key: str, amount: int) -> int:
        path = self._path(key)
        count = amount
        with contextlib.suppress(FileNotFoundError):
            count += int(path.read_text())
        self.set(key, str(count))
        return count
