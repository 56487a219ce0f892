"""The public names and how they are called, as written down in tests/golden/api_*.txt: nobody changes them unawares.

A change that is meant is written by ``pytest tests/project/test_api.py --write-golden``, and read in the commit.
"""
from __future__ import annotations

import enum
import importlib
import inspect
import re

import pytest

#: Modules by what they need: what is imported from them is what users write.
MODULES = {
    "bpsfast": None, "bpsfast.compression": None, "bpsfast.elastic": None, "bpsfast.trace": None,
    "bpsfast.launch.namespaces": None,
    "bpsfast.torch": "torch", "bpsfast.torch.backend": "torch", "bpsfast.hvd.torch": "torch", "bpsfast.jax": "jax",
    "bpsfast.tensorflow": "tensorflow", "bpsfast.hvd.tensorflow": "tensorflow", "bpsfast.keras": "keras",
    "bpsfast.hvd.keras": "keras", "bpsfast.mxnet": "mxnet",
}


def public(module):
    return sorted(getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")])


def called(thing):
    """Return the signature of *thing* with names of types only; how defaults that are objects print may differ."""
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):  # not of Python
        return "(...)"
    text = str(signature)
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z_])", "", text)


def described(module):
    for name in public(module):
        thing = getattr(module, name)
        if inspect.ismodule(thing):
            yield f"{name}: module"
        elif inspect.isclass(thing) and issubclass(thing, enum.Enum):  # whose call each Python describes otherwise
            yield f"class {name}(Enum): {', '.join(each.name for each in thing)}"
        elif inspect.isclass(thing):
            yield f"class {name}" + ("(Exception)" if issubclass(thing, Exception) else called(thing))
            for member in sorted(vars(thing)):
                value = inspect.getattr_static(thing, member)
                if member.startswith("_") or type(value).__name__ in ("member_descriptor", "_GeneratorContextManager"):
                    continue
                if isinstance(value, property):
                    yield f"    {member}: property"
                elif inspect.isroutine(getattr(thing, member)):
                    yield f"    {member}{called(getattr(thing, member))}"
        elif callable(thing):
            yield f"{name}{called(thing)}"
        else:
            yield f"{name}: {type(thing).__name__}"


@pytest.mark.parametrize("name", MODULES)
def test_public_names_and_signatures(name, golden):
    needed = MODULES[name]
    if needed:
        pytest.importorskip(needed, reason=f"{needed} is not installed", exc_type=ImportError)
    module = importlib.import_module(name)
    golden(f"api_{name.replace('.', '_')}.txt", "\n".join(described(module)) + "\n")
