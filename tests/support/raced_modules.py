"""Run tests with modules built for ThreadSanitizer: ``python -m tests.support.raced_modules FOLDER PYTEST...``.

The folder has NAME.so for each ``bpsfast.pyx.NAME`` to check; the interpreter must have the sanitizer's library
preloaded.
"""
from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

_PACKAGE = "bpsfast.pyx."


class RacedModules:
    """Finds these modules before other finders."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        module = self._folder / f"{name.removeprefix(_PACKAGE)}.so"
        if not name.startswith(_PACKAGE) or not module.exists():
            return None
        return importlib.util.spec_from_file_location(name, module)


if __name__ == "__main__":
    sys.meta_path.insert(0, RacedModules(Path(sys.argv[1])))
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
