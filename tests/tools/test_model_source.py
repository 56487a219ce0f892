"""Models for a plan: built in, from a file, from a function that builds a torch module."""
from __future__ import annotations

from pathlib import Path

import pytest

from bpsfast.orchestration.errors import ConfigError
from bpsfast.tools.planner import catalog

MODULE = '''
class Parameter:
    def __init__(self, shape, dtype="torch.float32", requires_grad=True):
        self.shape, self.dtype, self.requires_grad = shape, dtype, requires_grad

class Net:
    def __init__(self, parameters): self.parameters = parameters
    def named_parameters(self): return self.parameters.items()

def build(): return Net({"w": Parameter((4, 3)), "b": Parameter((4,)), "frozen": Parameter((9,), requires_grad=False)})
def mixed(): return Net({"w": Parameter((4, 3)), "h": Parameter((4,), "torch.float16")})
def frozen(): return Net({"w": Parameter((4, 3), requires_grad=False)})
def broken(): raise OSError("no weights here")
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A module in the working directory; its name is the test's own, for modules stay imported."""
    name = "net_" + "".join(c if c.isalnum() else "_" for c in request.node.name)
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return name


def test_built_in_models_are_found_first(tmp_path, monkeypatch):
    (tmp_path / "vgg16").write_text("x 1")
    monkeypatch.chdir(tmp_path)
    assert catalog.named("vgg16") == catalog.load("vgg16")
    assert catalog.named("vgg16", "bfloat16").nbytes == 2 * 138_357_544


@pytest.mark.parametrize("text", [
    "# a net\nw 4x3\nb 4  # bias\n\n", "w 4,3\nb 4", '{"w": [4, 3], "b": [4]}', '{"w": {"shape": [4, 3]}, "b": [4]}'])
def test_files_of_shapes(tmp_path, text):
    path = tmp_path / "net.txt"
    path.write_text(text)
    model = catalog.named(str(path), "float16")
    assert (model.name, dict(model.shapes), model.nbytes) == ("net", {"w": (4, 3), "b": (4,)}, 32)


@pytest.mark.parametrize(("text", "words"), [
    ("", "names no tensor"), ("# nothing\n", "names no tensor"), ("w\n", "line 1: 'w': expected NAME SHAPE"),
    ("a 1\nw 4xx3", "line 2: 'w 4xx3': expected NAME SHAPE"), ("w 4x-3", "expected NAME SHAPE"),
    ("w 1\nw 2", "line 2: tensor 'w' occurs twice"), ("w 0", "tensor 'w' has the shape"),
    ('{"w": "4"}', "tensor 'w' has the shape '4'"), ('{"w": [1.5]}', "has the shape"),
    ('{"w": [true]}', "has the shape"),
    ('{"w": ', "is not JSON"), ("{}", "names no tensor"), ("\0\xff", "is not text")])
def test_files_of_anything_else_are_errors_in_words(tmp_path, text, words):
    path = tmp_path / "net.txt"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="net.txt.*" + words.replace("'", ".")):
        catalog.named(str(path))


def test_unreadable_files_are_errors_in_words(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        catalog.named(str(tmp_path))
    huge = tmp_path / "huge.bin"
    with huge.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ConfigError, match="1073741824 bytes are too many for a list of shapes"):
        catalog.named(str(huge))


def test_parameters_that_take_gradients_count(module):
    model = catalog.from_torch(f"{module}:build")
    assert dict(model.shapes) == {"w": (4, 3), "b": (4,)} and model.dtype == "float32"


def test_mixed_dtypes_need_a_word(module):
    with pytest.raises(ConfigError, match="float16 and float32; choose the dtype of gradients with --dtype"):
        catalog.from_torch(f"{module}:mixed")
    assert catalog.from_torch(f"{module}:mixed", "float16").nbytes == 32


@pytest.mark.parametrize(("function", "words"), [
    ("frozen", "no parameter that takes a gradient"), ("broken", "OSError: no weights here"),
    ("missing", "AttributeError"), ("Parameter", "TypeError"), ("", "expected MODULE:CALLABLE")])
def test_what_the_function_does_wrong_is_quoted(module, function, words):
    with pytest.raises(ConfigError, match=words):
        catalog.from_torch(f"{module}:{function}")


def test_a_real_torch_module(tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="torch is not installed")
    (tmp_path / "realnet.py").write_text("import torch\ndef build(): return torch.nn.Linear(20, 3).bfloat16()\n")
    monkeypatch.chdir(tmp_path)
    model = catalog.from_torch("realnet:build")
    assert (dict(model.shapes), model.dtype) == ({"weight": (3, 20), "bias": (3,)}, "bfloat16")
