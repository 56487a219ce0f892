"""The .pyi beside each compiled module says what the module has: the same names, the same parameters."""
from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: By folder, the package of its modules.
FOLDERS = {ROOT / "pyx": "bpsfast.pyx", ROOT / "bench" / "paper" / "ladder": "bpsfast.bench.paper.ladder"}
MODULES = {path.stem: path for folder in FOLDERS for path in sorted(folder.glob("*.pyx"))}


class Parameter(NamedTuple):
    """As `inspect.Parameter`, without types and values."""

    name: str
    keyword_only: bool
    has_default: bool


def of_stub(function: ast.FunctionDef) -> list[Parameter]:
    """Return the parameters in a stub."""
    spec = function.args
    plain = [*spec.posonlyargs, *spec.args]
    first_default = len(plain) - len(spec.defaults)
    found = [Parameter(argument.arg, False, i >= first_default) for i, argument in enumerate(plain)]
    found += [Parameter(a.arg, True, value is not None) for a, value in zip(spec.kwonlyargs, spec.kw_defaults)]
    return [parameter for parameter in found if parameter.name not in ("self", "cls")]


def of_compiled(function: Any) -> list[Parameter]:
    """Return the parameters of a compiled function or method."""
    return [
        Parameter(p.name, p.kind is p.KEYWORD_ONLY, p.default is not p.empty)
        for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")
    ]


def of_constructor(source: str, name: str) -> list[Parameter]:
    """Return what class *name* is constructed with, which the compiled class does not tell."""
    body = re.split(r"^cdef class (\w+).*$", source, flags=re.M)
    own = dict(zip(body[1::2], body[2::2]))[name]
    # a __cinit__ without parameters leaves them to __init__
    return max(map(_declared, re.findall(r"^    def __c?init__\(self,?(.*?)\):$", own, re.S | re.M)), key=len)


def _declared(text: str) -> list[Parameter]:
    found, keyword_only = [], False
    for piece in filter(None, map(str.strip, text.replace("not None", "").split(","))):
        declaration, equals, _ = piece.partition("=")
        if declaration == "*":
            keyword_only = True
        else:
            found.append(Parameter(declaration.split()[-1].lstrip("*"), keyword_only, bool(equals)))
    return found


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def names_in(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Return what a stub's module or class defines."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
    return found


def load(name: str) -> tuple[ModuleType, dict[str, ast.stmt], str]:
    """Return the compiled module, its stub's names, its source."""
    path = MODULES[name]
    stub = ast.parse(path.with_suffix(".pyi").read_text())
    source = re.sub(r'^include "(.+)"$', lambda match: (path.parent / match[1]).read_text(), path.read_text(),
                    flags=re.M)
    return importlib.import_module(f"{FOLDERS[path.parent]}.{name}"), names_in(stub.body), source


@pytest.mark.parametrize("name", MODULES)
def test_names(name: str) -> None:
    module, stub, _ = load(name)
    own = {key for key, value in vars(module).items() if not inspect.ismodule(value)}
    assert public(stub) == public(own)
    for key, node in stub.items():
        if isinstance(node, ast.ClassDef):
            kind = getattr(module, key)
            if not issubclass(kind, tuple):
                assert public(names_in(node.body)) == public(vars(kind)), key


@pytest.mark.parametrize("name", MODULES)
def test_parameters(name: str) -> None:
    module, stub, source = load(name)
    n_compared = 0
    for key, node in stub.items():
        if isinstance(node, ast.FunctionDef):
            assert of_stub(node) == of_compiled(getattr(module, key)), key
            n_compared += 1
        elif isinstance(node, ast.ClassDef):
            for method_name, method in names_in(node.body).items():
                if method_name == "__init__":
                    assert isinstance(method, ast.FunctionDef)
                    assert of_stub(method) == of_constructor(source, key), f"{key}.__init__"
                elif isinstance(method, ast.FunctionDef) and not method_name.startswith("_"):
                    compiled = getattr(getattr(module, key), method_name)
                    assert of_stub(method) == of_compiled(compiled), f"{key}.{method_name}"
                n_compared += 1
    assert n_compared


def test_every_module_has_a_stub() -> None:
    assert MODULES
    assert {path.stem for folder in FOLDERS for path in folder.glob("*.pyi")} == set(MODULES)
