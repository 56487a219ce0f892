"""Which package may import which: the order of the packages, no import circle, and third-party packages by folder.

The tests walk the syntax trees of all files, so they see imports inside functions and below `TYPE_CHECKING` as well.
"""
from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
STDLIB = sys.stdlib_module_names


#: The packages, lowest first: a package imports itself and packages before it. `orchestration` means the files at its
#: top level; any other folder belongs to the package that it lies in.
ORDER = (
    "pyx", "orchestration", "orchestration/placement", "orchestration/priority", "orchestration/elastic",
    "orchestration/job", "orchestration/failover", "bpsfast/base", "bpsfast/hardware", "bpsfast/kernels",
    "bpsfast/compression", "bpsfast/gpu", "bpsfast/launch", "bpsfast/node", "bpsfast/trainer", "bpsfast/collectives",
    "bpsfast/elastic", "bpsfast/jax", "bpsfast/tensorflow", "bpsfast/mxnet", "bpsfast/torch", "bpsfast/keras",
    "bpsfast/hvd", "bpsfast/tools",
)
#: The files at the top level (`__init__`, `cli`, ...) are above all packages: nothing imports them.
TOP = "bpsfast"
MOST_PACKAGES, MOST_LAYERS = 24, 10


class Layer(NamedTuple):
    """A folder or file: third-party packages imported at the top level, and those imported only in functions."""

    folder: str
    at_once: frozenset[str]
    when_used: frozenset[str] = frozenset()


_CORE = frozenset({"numpy", "numba", "llvmlite", "ml_dtypes", "msgspec", "psutil", "click", "zmq", "bpsfast"})
_SHOW = frozenset({"rich", "matplotlib", "sklearn", "scipy"})
LAYERS = [  # subfolders before their parents
    Layer("bpsfast/torch_autoload.py", _CORE, frozenset({"torch"})),
    Layer("bpsfast/torch", _CORE | {"torch"}, frozenset({"cloudpickle"})),
    Layer("bpsfast/gpu", _CORE, frozenset({"cupy"})),
    Layer("bpsfast/hvd/keras", _CORE | {"keras"}),
    Layer("bpsfast/hvd/tensorflow", _CORE | {"tensorflow"}),
    Layer("bpsfast/hvd", _CORE | {"torch"}),
    Layer("bpsfast/jax", _CORE | {"jax", "optax"}),
    Layer("bpsfast/keras/jax_backend.py", _CORE | {"jax"}),
    Layer("bpsfast/keras/tensorflow_backend.py", _CORE | {"tensorflow"}),
    Layer("bpsfast/keras/torch_backend.py", _CORE | {"torch"}),
    Layer("bpsfast/keras", _CORE | {"keras"}),
    Layer("bpsfast/docs", _CORE | {"pygments", "sphinx"}),
    Layer("bpsfast/mxnet", _CORE | {"mxnet"}),
    Layer("bpsfast/tensorflow", _CORE | {"tensorflow"}),
    Layer("bpsfast/trainer/object_broadcast.py", _CORE, frozenset({"cloudpickle"})),
    Layer("bpsfast", _CORE, _SHOW | {"tomli", "prometheus_client", "pynvml"}),
    Layer("orchestration", frozenset({"zmq", "msgspec"})),
    Layer("pyx", frozenset()),
    Layer("bench/schedule/trainer.py", _CORE | {"torch"}),
    Layer("bench/worker_loss/rejoin_rank.py", _CORE | {"torch"}),
    Layer("bench/worker_loss", _CORE, frozenset({"torch", "torchft"})),
    Layer("bench/schedule/timed_network.py", _CORE | {"torch"}),
    Layer("bench/frameworks/jax_rows.py", _CORE | {"jax"}),
    Layer("bench/frameworks/tensorflow_rows.py", _CORE | {"tensorflow"}),
    Layer("bench/training/__init__.py", _CORE, frozenset({"torch"})),
    Layer("bench/training/backends.py", _CORE, frozenset({"torch", "horovod"})),
    Layer("bench/training/models.py", _CORE),
    Layer("bench/training", _CORE | {"torch"}, frozenset({"PIL"})),  # ranks, which train
    Layer("bench", _CORE, _SHOW | {"torch", "mpi4py"}),
]


class Import(NamedTuple):
    """One imported module: its name ("" for the package itself), dots, line, and whether it is inside a function."""

    name: str
    level: int
    line: int
    in_function: bool


def imports_of(tree: ast.AST, in_function: bool = False) -> Iterator[Import]:
    """Yield every import below *tree*, except those for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, 0, node.lineno, in_function)
        elif isinstance(node, ast.ImportFrom):
            yield Import(node.module or "", node.level, node.lineno, in_function)
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for branch in node.orelse:
                yield from imports_of(ast.Module([branch], []), in_function)
        else:
            inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports_of(node, inside)


def forbidden(path: Path, layer: Layer, found: Import) -> str | None:
    """Return the reason why an import in the file *path* is forbidden, or None."""
    top = found.name.split(".")[0]
    if found.level:
        # a relative import must stay inside its own package
        depth = len(path.relative_to(ROOT / layer.folder.split("/")[0]).parts)
        return None if found.level <= depth else "leaves its package by dots"
    if top in STDLIB or top in layer.at_once:
        return None
    if top in layer.when_used:
        return None if found.in_function else f"imports {top} at once, not where it is used"
    return f"imports {top}"


def python_files() -> list[tuple[Path, Layer]]:
    """Return every Python file of the package with its layer."""
    files = {path: layer for layer in reversed(LAYERS) for path in _files(ROOT / layer.folder)}
    return sorted(files.items())


def _files(place: Path) -> list[Path]:
    return [place] if place.is_file() else sorted(place.rglob("*.py"))


def test_no_module_imports_what_its_layer_may_not() -> None:
    files = python_files()
    assert len(files) > 40
    wrong = [
        f"{path.relative_to(ROOT)}:{found.line} {reason}"
        for path, layer in files
        for found in imports_of(ast.parse(path.read_text()))
        if (reason := forbidden(path, layer, found))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("file", "source", "reason"), [
    ("orchestration/x.py", "import numpy", "imports numpy"),
    ("orchestration/x.py", "from .. import node", "leaves its package by dots"),
    ("orchestration/x.py", "import bpsfast.node", "imports bpsfast"),
    ("orchestration/x.py", "from . import errors", None),
    ("bpsfast/x.py", "import torch", "imports torch"),
    ("bpsfast/x.py", "if x:\n    import rich", "imports rich at once, not where it is used"),
    ("bpsfast/x.py", "def f():\n    import rich", None),
    ("bpsfast/x.py", "class A:\n    def f(self):\n        import torch", "imports torch"),
    ("bpsfast/x.py", "if TYPE_CHECKING:\n    import torch", None),
    ("bpsfast/torch/x.py", "import torch\nfrom ..orchestration import errors", None),
    ("bench/x.py", "def f():\n    import torch", None),
    ("bench/training/x.py", "import torch", None),
])
def test_rule(file: str, source: str, reason: str | None) -> None:
    path = ROOT / file
    layer = next(layer for layer in LAYERS if file.startswith(layer.folder + "/"))
    reasons = [forbidden(path, layer, found) for found in imports_of(ast.parse(source))]
    assert [r for r in reasons if r] == ([reason] if reason else [])


def modules() -> dict[str, Path]:
    """Return the files of the package by module name, without those that are not installed (configuration of docs)."""
    found = {}
    for folder, name in (("bpsfast", "bpsfast"), ("orchestration", "bpsfast.orchestration"), ("pyx", "bpsfast.pyx")):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if parts[0] not in ("docs", "orchestration", "pyx", "bench"):  # bench is a link of the installation
                found[".".join([name, *parts]).removesuffix(".__init__")] = path
    for path in (ROOT / "pyx").glob("*.pyx"):
        found[f"bpsfast.pyx.{path.stem}"] = path
    return found


def imported(module: str, path: Path, tree: ast.AST, known: Collection[str]) -> Iterator[tuple[str, int]]:
    """Yield each of *known* that the file *path* of *module* imports anywhere, with the line."""
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[:len(package.split(".")) - (node.level - 1)] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{source}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            while name and name not in known:
                name = name.rpartition(".")[0]
            if name and name != module:
                yield name, node.lineno


def package_of(path: Path) -> str:
    """Return the name in `ORDER` of the package that the file *path* belongs to, or `TOP`."""
    if path.name == "_version.py":  # any package may import the version
        return "bpsfast/base"
    folder = path.relative_to(ROOT).parent.as_posix()
    while folder not in ORDER and folder != TOP:
        folder, slash, _ = folder.rpartition("/")
        assert slash, f"{path} lies in no package of ORDER"
    return folder


@cache
def imports() -> list[tuple[Path, int, Path]]:
    """Return every import of one of our files by another: importer, line, imported file."""
    files = modules()
    return [(path, line, files[name]) for module, path in files.items() if path.suffix == ".py"
            for name, line in imported(module, path, ast.parse(path.read_text()), files)]


def upward(found: Iterable[tuple[Path, int, Path]]) -> list[str]:
    """Return the imports among *found* of a package that is later in `ORDER`."""
    rank = {name: i for i, name in enumerate((*ORDER, TOP))}
    return [f"{importer.relative_to(ROOT)}:{line} imports {target.relative_to(ROOT)}, which stands above it"
            for importer, line, target in found if rank[package_of(target)] > rank[package_of(importer)]]


def circles(found: Iterable[tuple[Path, int, Path]]) -> list[list[str]]:
    """Return the groups of files that import each other, directly or through others."""
    graph: dict[Path, set[Path]] = {}
    for importer, _, target in found:
        graph.setdefault(importer, set()).add(target)
        graph.setdefault(target, set())
    sorter, left = TopologicalSorter(graph), dict(graph)
    try:
        sorter.prepare()
        return []
    except CycleError:
        pass
    while True:  # files without imports, or importers, among the remaining ones are in no circle
        targets = {target for several in left.values() for target in several}
        kept = {path: several & left.keys() for path, several in left.items()
                if several & left.keys() and path in targets}
        if kept == left:
            return [sorted(str(path.relative_to(ROOT)) for path in left)]
        left = kept


def layers(found: Iterable[tuple[Path, int, Path]]) -> dict[str, int]:
    """Return the layer of each package: one more than the highest layer that it imports."""
    below: dict[str, set[str]] = {name: set() for name in ORDER}
    for importer, _, target in found:
        a, b = package_of(importer), package_of(target)
        if a != b and a in below:
            below[a].add(b)
    result: dict[str, int] = {}
    for name in ORDER:
        result[name] = 1 + max((result[each] for each in below[name]), default=0)
    return result


def test_no_package_imports_one_that_stands_above_it() -> None:
    found = imports()
    assert len(found) > 1000
    assert not upward(found), "\n".join(upward(found))


def test_no_import_circle() -> None:
    assert circles(imports()) == []


def test_few_packages_in_few_layers() -> None:
    found = layers(imports())
    print(f"{len(found)} packages in {max(found.values())} layers")
    for layer in range(1, max(found.values()) + 1):
        print(f"{layer:3}  {', '.join(name for name in ORDER if found[name] == layer)}")
    assert len(found) <= MOST_PACKAGES and max(found.values()) <= MOST_LAYERS


@pytest.mark.parametrize(("file", "source", "target"), [
    ("bpsfast/base/x.py", "from ..trainer import session", "bpsfast/trainer/session.py"),
    ("bpsfast/node/x.py", "def f():\n    from ..trainer import session", "bpsfast/trainer/session.py"),
    ("bpsfast/node/x.py", "if TYPE_CHECKING:\n    from ..trainer.session import Session", "bpsfast/trainer/session.py"),
    ("bpsfast/node/x.py", "import bpsfast.tools.commands", "bpsfast/tools/commands/__init__.py"),
    ("bpsfast/torch/x.py", "from .. import __version__", "bpsfast/__init__.py"),
    ("orchestration/x.py", "from .job import joinings", "orchestration/job/__init__.py"),
])
def test_an_import_upward_is_found_wherever_it_stands(file: str, source: str, target: str) -> None:
    files = modules()
    path = ROOT / file
    module = next(name for name, other in files.items() if other.parent == path.parent).rpartition(".")[0] + ".x"
    found = [(path, line, files[name]) for name, line in imported(module, path, ast.parse(source), files)]
    assert [str(each.relative_to(ROOT)) for _, _, each in found] == [target]
    assert len(upward(found)) == 1


def test_a_circle_is_found() -> None:
    a, b, c, d = (ROOT / "bpsfast" / "base" / f"{name}.py" for name in "abcd")
    assert circles([(a, 1, b), (b, 1, c), (c, 1, d)]) == []
    assert circles([(a, 1, b), (b, 1, c), (c, 1, b), (c, 2, d)]) == [["bpsfast/base/b.py", "bpsfast/base/c.py"]]


def test_cython_modules_import_c_and_the_standard_library_only() -> None:
    files = [*sorted((ROOT / "pyx").glob("*.p[yx][xd]")), *(ROOT / "bench").rglob("*.pyx")]
    assert len(files) > 1
    statement = re.compile(
        r"^\s*(?:from\s+(?P<source>[\w.]+)\s+(?P<kind>c?import)\s|(?P<plain>c?import)\s+(?P<name>[\w.]+)\s*$)", re.M)
    for path in files:
        for match in statement.finditer(path.read_text()):
            top = (match["source"] or match["name"]).split(".")[0]
            c_level = (match["kind"] or match["plain"]) == "cimport"
            # our .pxd files have only `extern` declarations, without cost at run time
            allowed = {"cpython", "libc", "posix", "cython", "pyx"} if c_level else STDLIB
            assert top in allowed, f"{path.name}: {match[0].strip()}"


def loaded_after(code: str, cwd: Path) -> dict[str, list[str]]:
    """Run *code* in a fresh interpreter; return the modules that it loaded, and the files that it made below *cwd*."""
    program = f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=True)
    return {"modules": json.loads(done.stdout.splitlines()[-1]), "files": [str(p) for p in cwd.rglob("*")]}


FRAMEWORKS = {
    "torch", "tensorflow", "jax", "mxnet", "cupy", "numba", "llvmlite", "scipy", "matplotlib", "rich", "sklearn",
    "pynvml"}


def test_import_loads_no_framework_and_compiles_nothing(tmp_path: Path) -> None:
    found = loaded_after("import bpsfast", tmp_path)
    loaded = {name.split(".")[0] for name in found["modules"]}
    assert not loaded & (FRAMEWORKS | {"numpy", "zmq"})
    assert not [name for name in found["modules"] if name.startswith("bpsfast.pyx")]
    assert not found["files"]


def test_everything_a_rank_uses_loads_no_framework_and_no_compiler(tmp_path: Path) -> None:
    found = loaded_after("import bpsfast\nfor name in bpsfast.__all__:\n    getattr(bpsfast, name)", tmp_path)
    assert {name.split(".")[0] for name in found["modules"]} & FRAMEWORKS == set()
    assert "bpsfast.trainer.session" in found["modules"]


def test_a_node_and_a_scheduler_start_without_numpy_and_asyncio(tmp_path: Path) -> None:
    """There may be a node on each of a thousand machines, or 64 on one."""
    for module in ("bpsfast.node.main", "bpsfast.orchestration.failover.scheduler"):
        found = loaded_after(f"import {module}", tmp_path)
        assert {"zmq", module} <= set(found["modules"])
        assert not {"numpy", "ml_dtypes", "numba", "llvmlite", "asyncio"} & set(found["modules"])


@pytest.mark.parametrize("layer", ["torch", "hvd.torch"])
def test_torch_layers_load_no_compiler_of_ours(tmp_path: Path, layer: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    found = loaded_after(f"import bpsfast.{layer}", tmp_path)
    assert {"torch", f"bpsfast.{layer.partition('.')[0]}.optimizer"} <= set(found["modules"])
    assert not {"numba", "llvmlite"} & set(found["modules"])


def test_jax_layer_loads_no_compiler_of_ours_and_no_torch(tmp_path: Path) -> None:
    pytest.importorskip("jax", reason="jax is not installed")
    pytest.importorskip("optax", reason="optax is not installed")
    found = loaded_after("import bpsfast.jax", tmp_path)
    assert {"jax", "optax", "bpsfast.jax.optimizer"} <= set(found["modules"])
    assert not {"numba", "llvmlite", "torch"} & set(found["modules"])
