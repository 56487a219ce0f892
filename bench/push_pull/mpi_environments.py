"""Commands that start Python ranks under an MPI library: Open MPI of the system, MPICH and Intel MPI from PyPI.

The latter two are installed once into an environment of their own below the cache folder; its Python also finds the
packages of this one.
"""
from __future__ import annotations

import importlib.util
import os
import shutil
import site
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

#: What each library of PyPI is installed from.
_PACKAGES = {"mpich": ("mpich",), "impi": ("impi-rt",)}
NAMES = ("mpi", *_PACKAGES)
TITLES = {"mpi": "Open MPI", "mpich": "MPICH", "impi": "Intel MPI"}
_INSTALL_TIMEOUT_S = 600.0


def missing(name: str) -> str | None:
    """Return in one line why ranks cannot be started under library *name*, or None; installs it if needed."""
    if name == "mpi":
        if importlib.util.find_spec("mpi4py") is None:
            return "mpi is left out: mpi4py is not installed (pip install mpi4py)"
        return None if shutil.which("mpirun") else "mpi is left out: no mpirun on the PATH (apt install openmpi-bin)"
    try:
        _make(name)
    except (OSError, subprocess.SubprocessError) as exc:
        told = getattr(exc, "stderr", b"") or b""
        return (f"{name} is left out: {', '.join(_PACKAGES[name])} and mpi4py could not be installed into "
                f"{_folder(name)}: {exc} {told.decode(errors='replace')[-300:]}".rstrip())
    return None


def command(name: str, n_ranks: int, program: Sequence[str]) -> list[str]:
    """Return the command that starts *n_ranks* ranks of ``python`` *program* under library *name*."""
    if name == "mpi":
        as_root = ["--allow-run-as-root"] if os.getuid() == 0 else []
        return ["mpirun", *as_root, "--oversubscribe", "--bind-to", "none", "-np", str(n_ranks), sys.executable,
                *program]
    folder = _folder(name) / "bin"
    return [str(folder / "mpiexec"), "-n", str(n_ranks), str(folder / "python"), *program]


def _folder(name: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "bpsfast" / "bench" / f"{name}-{sys.version_info.major}.{sys.version_info.minor}"


def _make(name: str) -> None:
    """Make the environment of *name*, unless it is there, and let it find the packages of this Python.

    Raises as `subprocess.run`.
    """
    folder = _folder(name)
    done = folder / "installed"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        _run(sys.executable, "-m", "venv", str(folder))
        _run(str(folder / "bin" / "python"), "-m", "pip", "install", "--no-input", "mpi4py", *_PACKAGES[name])
        done.touch()
    packages = next(folder.glob("lib/python*/site-packages"))
    # after its own, so that its mpi4py comes first; with their .pth files, by which editable packages are found. Each
    # time: another environment may have made the folder, and its bpsfast would be measured
    others = "".join(f"import site; site.addsitedir({each!r})\n" for each in site.getsitepackages())
    (packages / "zz_bpsfast.pth").write_text(others)


def _run(*arguments: str) -> None:
    subprocess.run(arguments, check=True, capture_output=True, timeout=_INSTALL_TIMEOUT_S)
