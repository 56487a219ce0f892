"""Public names and their signatures, compared with tests/golden/api_*.txt, and old module paths that still work.

Settings, commands and exit codes are compared in tests/tools/test_command_line.py (tests/golden/interface.txt).

An intended change is written by ``pytest tests/project/test_api.py --write-golden``.
"""
from __future__ import annotations

import enum
import importlib
import inspect
import re
import subprocess
import sys

import pytest

from bpsfast import _renamed

#: Modules by the packages that they need; users import names from these modules.
MODULES = {
    "bpsfast": None, "bpsfast.compression": None, "bpsfast.elastic": None, "bpsfast.trace": None,
    "bpsfast.cluster": None,
    "bpsfast.torch": "torch", "bpsfast.torch.backend": "torch", "bpsfast.torch.compression": "torch",
    "bpsfast.torch.hooks": "torch", "bpsfast.torch.scheduling": "torch",
    "bpsfast.hvd": "torch", "bpsfast.hvd.torch": "torch", "bpsfast.jax": "jax",
    "bpsfast.tensorflow": "tensorflow", "bpsfast.hvd.tensorflow": "tensorflow", "bpsfast.keras": "keras",
    "bpsfast.hvd.keras": "keras", "bpsfast.mxnet": "mxnet",
}


def public(module):
    return sorted(getattr(module, "__all__", None) or [
        name for name, thing in vars(module).items()
        if not name.startswith("_") and getattr(thing, "__module__", None) == module.__name__])


def called(thing):
    """Return the signature of *thing*; types are given by name, because the text of default objects may differ."""
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):  # not a Python function
        return "(...)"
    text = str(signature)
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z_])", "", text)


def described(module):
    for name in public(module):
        thing = getattr(module, name)
        if inspect.ismodule(thing):
            yield f"{name}: module"
        elif inspect.isclass(thing) and issubclass(thing, enum.Enum):  # whose signature depends on the Python version
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


@pytest.mark.filterwarnings("ignore:bpsfast.cluster has moved:DeprecationWarning")
@pytest.mark.parametrize("name", MODULES)
def test_public_names_and_signatures(name, golden):
    needed = MODULES[name]
    if needed:
        pytest.importorskip(needed, reason=f"{needed} is not installed", exc_type=ImportError)
    module = importlib.import_module(name)
    golden(f"api_{name.replace('.', '_')}.txt", "\n".join(described(module)) + "\n")


@pytest.mark.parametrize("old", [*_renamed.MODULES, "cluster.netns"])
def test_modules_that_have_moved_can_be_imported_by_their_old_paths(old):
    program = (f"import sys, warnings\nwith warnings.catch_warnings(record=True) as told:\n"
               f"    warnings.simplefilter('always')\n    import bpsfast.{old} as found\n"
               f"print(found.__name__, found.__spec__.name, sys.modules[found.__name__] is found, "
               "told[-1].category.__name__, told[-1].message, sep='|')")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    now, spec, is_same, category, text = done.stdout.strip().split("|")
    assert now == spec and is_same == "True" and category == "DeprecationWarning"
    assert text == f"bpsfast.{old} has moved to {now}"


def test_a_module_that_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("bpsfast.clusters")
