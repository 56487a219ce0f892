"""Makes `import byteps.torch` import `bpsfast.torch`, so that BytePS programs run unchanged; TensorFlow and Keras, too.

    python -m bpsfast.byteps_alias train.py --epochs 3     # as python train.py --epochs 3
    import bpsfast.byteps_alias                            # or: this line before the first import of byteps

The alias is never installed by default, since the name belongs to BytePS, and not at all where BytePS is installed.
Only `MODULES` can be imported, `byteps.server` for example cannot.
"""
from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from ._renamed import AliasLoader
from .orchestration.errors import ConfigError

#: Modules of BytePS that programs import, below `byteps`; the same names below `bpsfast`.
MODULES = (
    "keras",
    "keras.callbacks",
    "tensorflow",
    "tensorflow.compression",
    "tensorflow.keras",
    "tensorflow.keras.callbacks",
    "tensorflow.ops",
    "torch",
    "torch.compression",
    "torch.cross_barrier",
    "torch.ops",
    "torch.parallel",
)


class _AliasFinder:
    """Finds `MODULES` when they are imported, and no other module of `byteps`: it would be loaded a second time."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of a module of `byteps`, raise `ModuleNotFoundError` for one that is missing, else None."""
        package, _, module = name.partition(".")
        if package != "byteps":
            return None
        if module not in MODULES:
            raise ModuleNotFoundError(
                f"bpsfast stands for byteps here (bpsfast.byteps_alias), and has no {name}: it has "
                f"{', '.join('byteps.' + each for each in MODULES)}", name=name)
        return ModuleSpec(name, AliasLoader(f"bpsfast.{module}"))


def install() -> None:
    """Make `import byteps.torch` import `bpsfast.torch` in this process. A second call changes nothing.

    Raises
    ------
    ConfigError
        If BytePS is installed, or was imported.
    """
    if getattr(sys.modules.get("byteps"), "is_bpsfast", False):
        return
    if "byteps" in sys.modules or importlib.util.find_spec("byteps") is not None:
        raise ConfigError("BytePS itself is installed here, and bpsfast does not hide it: uninstall it, or write "
                          "`import bpsfast.torch as bps` in the program")
    package = ModuleType("byteps", "bpsfast under BytePS's name: see bpsfast.byteps_alias.")
    package.__path__ = []
    package.is_bpsfast = True  # type: ignore[attr-defined]
    sys.modules["byteps"] = package
    sys.meta_path.insert(0, _AliasFinder)  # type: ignore[arg-type]  # a class is as good as an instance here


def main() -> None:
    """Run the program named on the command line, with the remaining arguments."""
    if len(sys.argv) < 2:
        raise SystemExit("which program? usage: python -m bpsfast.byteps_alias PROGRAM.py [ARGUMENT...]")
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


install()
if __name__ == "__main__":
    main()
