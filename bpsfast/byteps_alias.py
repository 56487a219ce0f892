"""`import byteps.torch` as a name for `bpsfast.torch`, for programs that are not to be changed.

    python -m bpsfast.byteps_alias train.py --epochs 3     # as python train.py --epochs 3
    import bpsfast.byteps_alias                            # or: this line before the first import of byteps

Nothing installs it by itself: a name that is somebody else's is taken by who asks for it, and only where BytePS is not
installed. Only what is here is found: `byteps.tensorflow`, for example, is not.
"""
from __future__ import annotations

import importlib
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from .orchestration.errors import ConfigError

#: Modules of BytePS that programs import, below `byteps`; the same names below `bpsfast`.
MODULES = ("torch", "torch.compression", "torch.cross_barrier", "torch.ops", "torch.parallel")


class _NothingElse:
    """Finds no other module of `byteps`; what lies beside ours would be loaded a second time under that name."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Raise `ModuleNotFoundError` for modules of `byteps`; leave others to who comes next."""
        if name.startswith("byteps."):
            raise ModuleNotFoundError(
                f"bpsfast stands for byteps here (bpsfast.byteps_alias), and has no {name}: it has "
                f"{', '.join('byteps.' + module for module in MODULES)}", name=name)
        return None


def install() -> None:
    """Let `import byteps.torch` import `bpsfast.torch` in this process. A second call changes nothing.

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
    found = {f"byteps.{name}": importlib.import_module(f"bpsfast.{name}") for name in MODULES}
    package.torch = found["byteps.torch"]  # type: ignore[attr-defined]
    sys.modules.update({"byteps": package, **found})
    sys.meta_path.insert(0, _NothingElse)  # type: ignore[arg-type]  # a class is as good as an instance here


def main() -> None:
    """Run the program that the command line names, with the rest as its arguments."""
    if len(sys.argv) < 2:
        raise SystemExit("which program? usage: python -m bpsfast.byteps_alias PROGRAM.py [ARGUMENT...]")
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


install()
if __name__ == "__main__":
    main()
