"""Old module paths of bpsfast that pages or examples have shown, still importable with a `DeprecationWarning`."""
from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader
else:
    Loader = object  # importlib.abc loads ten modules that few processes need

#: Old path -> new path, below `bpsfast`; submodules follow.
MODULES = {
    "cluster": "launch.namespaces",
    "orchestration.placement.placement": "orchestration.placement.assignment",
    "reference": "base.reference_sum",
    "trainer.current": "trainer.process",
}


class AliasLoader(Loader):
    """Loads the module *name* under another name: both names refer to the same object."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import and return the module, to which the import system then gives the other name's spec."""
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back; its code ran when it was imported."""
        module.__spec__ = self._spec


class _Finder:
    """Finds the modules of `MODULES` when a program imports them."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of a module that has moved, and warn; None for any other module."""
        package, _, module = name.partition(".")
        if package != "bpsfast":
            return None
        parts = module.split(".")
        for n_parts in range(len(parts), 0, -1):
            moved = MODULES.get(".".join(parts[:n_parts]))
            if moved is not None:
                now = ".".join(["bpsfast", moved, *parts[n_parts:]])
                warnings.warn(f"{name} has moved to {now}", DeprecationWarning, stacklevel=2)
                return ModuleSpec(name, AliasLoader(now))
        return None


def install() -> None:
    """Let this process import the old paths. A second call changes nothing."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]  # a class is as good as an instance here
