"""Tests what is built from a clean tree: sdist, wheel from the sdist, an install that works from any folder."""
from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Compiled modules by package: those of the product, and those of one bench.
COMPILED = {"bpsfast.pyx": ROOT / "pyx", "bpsfast.bench.paper.ladder": ROOT / "bench" / "paper" / "ladder"}
MODULES = sorted(f"{package}.{path.stem}" for package, folder in COMPILED.items() for path in folder.glob("*.pyx"))
NOT_SOURCE = (".*", "build", "dist", "out", "*.egg-info", "__pycache__", "*.so", "pyx/*.c", "ladder/*.c")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class Built(NamedTuple):
    """Paths of the built files; `python` is the interpreter of a new environment with the wheel."""

    sdist: Path
    wheel: Path
    python: Path


def run(command: Sequence[str | Path], cwd: Path, timeout_s: float = 300.0) -> str:
    """Run *command* in *cwd* and return its output, which is also the failure message."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build once, like `python -m build`: an sdist of the sources, then a wheel of only that sdist."""
    pytest.importorskip("build", reason="the package 'build' is not installed")
    folder = tmp_path_factory.mktemp("packaging")
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=lambda path, names: [
        name for name in names if any((Path(Path(path).name) / name).match(pattern) for pattern in NOT_SOURCE)])
    assert not list(source.rglob("*.so"))
    run([sys.executable, "-m", "build", "--outdir", folder / "dist", source], cwd=folder)
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    environment = folder / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python]
    run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], cwd=folder)
    # dependencies come from this environment; a folder in the path does not provide its editable installation
    site = environment / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Built(sdist, wheel, python)


def test_setup_cfg_lists_every_package() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    folders = {"bpsfast": "bpsfast", **{name: f"bpsfast.{name}" for name in ("pyx", "orchestration", "bench")}}
    found = {
        ".".join([name, *path.parent.relative_to(ROOT / folder).parts])
        for folder, name in folders.items() for path in (ROOT / folder).rglob("__init__.py")
    }
    assert set(config["options"]["packages"].split()) == found


@pytest.mark.thorough
def test_sdist_holds_sources_and_nothing_built(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"LICENSE", "README.md", "Makefile", "constraints.txt", "setup.cfg", "pyproject.toml", "bpsfast/py.typed"}
    wanted |= {str(path.relative_to(ROOT)) for folder in COMPILED.values() for path in folder.iterdir()
               if path.suffix in (".pyx", ".pxd", ".pyi", ".h")}
    for folder in ("bpsfast", "orchestration", "bench", "tests", "examples"):
        wanted |= {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py")}
    wanted |= {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "native").rglob("*.[ch]")}
    wanted |= {str(path.relative_to(ROOT)) for path in (ROOT / "bpsfast" / "docs").glob("*.md")}
    wanted |= {str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("*file")}
    assert wanted <= names, wanted - names
    assert not [name for name in names if name.endswith((".so", ".pyc")) or re.fullmatch(r"(pyx|bench)/.*\.c", name)]


@pytest.mark.thorough
def test_wheel_holds_types_and_compiled_modules(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = set(archive.namelist())
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    assert {"bpsfast/py.typed", "bpsfast/orchestration/py.typed"} <= names
    assert {f"{module.replace('.', '/')}{end}" for module in MODULES for end in (".pyi", suffix)} <= names
    others = ("tests/", "examples/", "pyx/", "bench/", "orchestration/", "bpsfast/docs/")
    assert not [name for name in names if name.startswith(others)]


@pytest.mark.thorough
def test_installed_package_works_from_another_folder(built: Built, tmp_path: Path) -> None:
    program = f"""
import importlib, pathlib, sys
import numpy as np, bpsfast
home = pathlib.Path(bpsfast.__file__).parent
assert str(home).startswith(sys.prefix), home
for name in {MODULES!r}:
    folder = home.joinpath(*name.split(".")[1:-1])
    assert pathlib.Path(importlib.import_module(name).__file__).parent == folder
bpsfast.init()
x = np.arange(5, dtype=np.float32)
assert (bpsfast.push_pull(x, name="x") == x).all()
bpsfast.shutdown()
print("done")
"""
    assert run([built.python, "-c", program], cwd=tmp_path, timeout_s=90).strip() == "done"
    assert run([built.python.with_name("bpsfast"), "version"], cwd=tmp_path, timeout_s=60).strip()


@pytest.mark.thorough
def test_compiled_modules_need_nothing_but_the_c_library(built: Built, tmp_path: Path) -> None:
    if shutil.which("readelf") is None:
        pytest.skip("readelf is missing (package binutils)")
    with zipfile.ZipFile(built.wheel) as archive:
        archive.extractall(tmp_path)
    files = sorted(tmp_path.rglob("*.so"))
    assert len(files) == len(MODULES)
    for file in files:
        needed = re.findall(r"\(NEEDED\).*\[(.*?)\]", run(["readelf", "-d", file], cwd=tmp_path))
        unexpected = [name for name in needed if not re.match(r"(libc|libpthread|libm|ld-linux[\w-]*)\.so", name)]
        assert not unexpected, f"{file.name} needs {unexpected}"
