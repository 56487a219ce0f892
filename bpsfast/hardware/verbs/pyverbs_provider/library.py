"""Finding pyverbs, and its errors as ours."""
from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from ....pyx import verbs as native
from ....pyx.verbs import VerbsMissing

#: Where Debian and Ubuntu install python3-pyverbs, for the system's Python; virtual environments do not look there.
SYSTEM_FOLDER = Path("/usr/lib/python3/dist-packages")


def load() -> None:
    """Import pyverbs: this interpreter's own, else Debian's if it was built for this version of Python. Idempotent.

    Of Debian's folder only the package pyverbs is used, nothing that lies beside it.

    Raises
    ------
    VerbsMissing
        With what to install.
    """
    native.load()  # before any region is registered: it prepares for forks
    if "pyverbs" in sys.modules:
        return
    if importlib.util.find_spec("pyverbs") is None:
        _use_system_package()
    try:
        module("device")
    except ImportError as exc:
        sys.modules.pop("pyverbs", None)
        raise VerbsMissing(errno.ENOENT, f"pyverbs cannot be imported: {exc}") from exc


def _use_system_package() -> None:
    package = SYSTEM_FOLDER / "pyverbs"
    python = f"Python {sys.version_info.major}.{sys.version_info.minor} at {sys.executable}"
    built = [path.name for path in package.glob("device.*")]
    if not built:
        raise VerbsMissing(errno.ENOENT, f"verbs=pyverbs: no pyverbs for {python}: `pip install bpsfast[pyverbs]` "
                                         "(needs rdma-core's headers), or Debian's python3-pyverbs with the system's "
                                         "own Python; verbs=native needs neither")
    if not any(f"device{suffix}" in built for suffix in importlib.machinery.EXTENSION_SUFFIXES):
        raise VerbsMissing(errno.ENOEXEC, f"verbs=pyverbs: python3-pyverbs is for another version ({built[0]}) than "
                                          f"{python}: run with /usr/bin/python3, or `pip install bpsfast[pyverbs]` "
                                          "(needs rdma-core's headers); verbs=native needs neither")
    spec = importlib.util.spec_from_file_location("pyverbs", package / "__init__.py",
                                                  submodule_search_locations=[str(package)])
    assert spec is not None and spec.loader is not None
    sys.modules["pyverbs"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["pyverbs"])


def module(name: str) -> ModuleType:
    """Return pyverbs's module *name*."""
    return importlib.import_module(f"pyverbs.{name}")


def version() -> str:
    """Return what is loaded, as "pyverbs at PATH over libibverbs 44.0 at PATH"."""
    load()
    return f"pyverbs at {Path(sys.modules['pyverbs'].__file__ or '').parent} over {native.version()}"


def fork_safety() -> str:
    """As `bpsfast.pyx.verbs.fork_safety`: both use one libibverbs."""
    load()
    return native.fork_safety()


def devices() -> list[str]:
    """Return the names of the devices that libibverbs can open, in its order; none where the kernel has no RDMA."""
    load()
    try:
        return [device.name.decode() for device in module("device").get_device_list()]
    except module("pyverbs_error").PyverbsError:
        return native.devices()  # pyverbs does not tell why; no RDMA in the kernel is no error


def told(rc: int) -> str:
    """Return an errno's name and meaning."""
    return f"{errno.errorcode.get(rc, rc)}: {os.strerror(rc)}"


@contextlib.contextmanager
def words(text: Callable[[int], str]) -> Iterator[None]:
    """Turn pyverbs's errors into OSError with their errno (EIO where it has none) and *text* of it."""
    pyverbs_error = module("pyverbs_error")
    try:
        yield
    except pyverbs_error.PyverbsError as exc:
        rc = getattr(exc, "error_code", -1)
        rc = abs(rc) if rc not in (-1, 0) else errno.EIO
        raise OSError(rc, text(rc)) from exc
