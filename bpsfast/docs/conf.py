"""Sphinx configuration of ``make docs``. The source folder is the whole tree, so that links to files work."""
from __future__ import annotations

import importlib.util
from typing import Any

from pygments.lexers.special import TextLexer
from sphinx.ext.autodoc.mock import _MockObject

import bpsfast

project = "bpsfast"
author = "the authors of bpsfast"
version = release = bpsfast.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"bpsfast {version}"
root_doc = "bpsfast/docs/index"
include_patterns = ["*.md", "bench/*.md", "bench/results/*.md", "bpsfast/docs/*.md",
                    "bpsfast/docs/design/*.md"]
exclude_patterns = [".*", "build", "dist", "out", "**/__pycache__"]

myst_heading_anchors = 3

default_role = "code"
napoleon_google_docstring = False
napoleon_use_rtype = False
autodoc_typehints = "none"
autodoc_default_options = {"members": True, "show-inheritance": True}
#: Frameworks that are not installed; mocked so that the docstrings of their adapters can be read.
autodoc_mock_imports = [name for name in ("jax", "optax", "keras", "mxnet", "tensorflow")
                        if importlib.util.find_spec(name) is None]
# JAX's tables, to which a primitive adds its rules.
setattr(_MockObject, "__setitem__", lambda self, key, value: None)  # noqa: B010 - mypy knows no such method


def setup(app: Any) -> None:
    """Show the examples of docstrings as code, and diagrams as their text."""
    app.add_lexer("mermaid", TextLexer)
    app.connect("autodoc-process-docstring", _mark_examples, priority=400)  # before napoleon, which indents


def _mark_examples(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Put reStructuredText's mark for code before indented lines that follow a paragraph."""
    if what == "module":  # as written: autodoc removes the indentation where all lines below the first are an example
        lines[:] = [*(obj.__doc__ or "").splitlines(), ""]
    marked: list[str] = []
    above = ""  # the last line that is not empty
    for line in lines:
        if line.startswith("    ") and marked and not marked[-1].strip() and above and not above.startswith(" ") \
                and not above.startswith("..") and not above.endswith("::"):
            marked += ["::", ""]
        if line.strip():
            above = line
        marked.append(line)
    lines[:] = marked
