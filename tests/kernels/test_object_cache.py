"""Kernels on disk: loaded without numba, with the same bits; and what is damaged, foreign or unusual is not run."""
from __future__ import annotations

import os
import platform
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bpsfast import kernels
from bpsfast.base import dtypes, reference_sum
from bpsfast.kernels import object_cache, stores, sum_ir

pytestmark = [pytest.mark.skipif(platform.machine() != "x86_64", reason="objects are loaded on x86-64 only")]
KEY = ("sum", "float32")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Keep kernels in a folder of the test."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    object_cache._folder.cache_clear()
    yield tmp_path
    object_cache._folder.cache_clear()


@pytest.fixture(scope="module")
def compiled():
    return sum_ir.compile_kernel("float32", cache=False)


def entry(folder: Path) -> Path:
    [path] = folder.rglob("*.kernel")
    return path


def summed(address: int) -> bytes:
    inputs = [np.arange(1000, dtype=np.float32) / 3, np.full(1000, 0.1, np.float32)]
    out = np.empty(1000, np.float32)
    pointers = np.array([each.ctypes.data for each in inputs], np.uintp)
    kernels.SIGNATURE(address)(out.ctypes.data, pointers.ctypes.data, 2, 0, 0, 1000, 1, 0)
    return out.tobytes()


def test_a_saved_kernel_has_the_same_bits(folder, compiled):
    assert object_cache.load(KEY) is None
    assert object_cache.save(KEY, compiled)
    found = object_cache.load(KEY)
    inputs = [np.arange(1000, dtype=np.float32) / 3, np.full(1000, 0.1, np.float32)]
    wanted = reference_sum.reduce([[x] for x in inputs], False).tobytes()
    assert summed(found.address) == summed(compiled.address) == wanted
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["sum-float32.kernel"], "nothing half written"


@pytest.mark.parametrize("name", [row for row in dtypes.NAMES if dtypes.lookup(row).is_float])
def test_kernels_of_stores_can_be_kept(folder, name, monkeypatch):
    monkeypatch.setattr(kernels, "_compiled", {})
    stores.address(name)
    assert entry(folder).name == f"store-{name}.kernel"
    assert isinstance(object_cache.load(("store", name)), object_cache.LoadedKernel)


@pytest.mark.parametrize("damage", [
    lambda data: b"", lambda data: data[:100], lambda data: data[:-1],
    lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:], lambda data: b"x" + data[1:],
    lambda data: b"\x7fELF" + data[4:],
], ids=["empty", "cut", "a byte short", "a byte changed", "another format", "an object alone"])
def test_what_is_damaged_is_not_loaded(folder, compiled, damage):
    assert object_cache.save(KEY, compiled)
    path = entry(folder)
    path.write_bytes(damage(path.read_bytes()))
    assert object_cache.load(KEY) is None
    assert object_cache.save(KEY, compiled) and object_cache.load(KEY) is not None, "it is replaced"


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_what_others_can_write_is_not_loaded(folder, compiled, mode):
    assert object_cache.save(KEY, compiled)
    entry(folder).chmod(mode)
    assert object_cache.load(KEY) is None


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away needs root")
def test_what_belongs_to_somebody_else_is_not_loaded(folder, compiled):
    assert object_cache.save(KEY, compiled)
    os.chown(entry(folder), 54321, -1)
    assert object_cache.load(KEY) is None


@pytest.mark.parametrize(("at", "value", "words"), [
    (18, struct.pack("<H", 183), "no ELF object of x86-64"), (16, struct.pack("<H", 2), "no ELF object"),
])
def test_another_machines_object_is_refused(compiled, at, value, words):
    data = bytearray(compiled._library._get_compiled_object())
    data[at:at + len(value)] = value
    with pytest.raises(object_cache.UnusableObjectError, match=words):
        object_cache._linked(compiled.native_name, bytes(data))


def test_an_object_that_calls_numba_is_not_kept(folder):
    from bpsfast.kernels.codecs import compilation

    assert not object_cache.save(KEY, compilation.compile_kernel("encode_onebit", "float32", "float32"))
    assert not list(folder.rglob("*.kernel"))


def test_the_folder_depends_on_numbas_variables(folder, monkeypatch):
    first = object_cache._folder()
    object_cache._folder.cache_clear()
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    assert object_cache._folder() not in (None, first)


def test_a_package_without_a_version_module_is_known_by_its_metadata(tmp_path, monkeypatch):
    from importlib.machinery import ModuleSpec
    from importlib.metadata import version

    def find_spec(name):
        return None if name == "absent" else ModuleSpec(name, None, origin=str(tmp_path / "__init__.py"))

    monkeypatch.setattr(object_cache.importlib.util, "find_spec", find_spec)
    assert object_cache._version_of("numba") == version("numba").encode()
    (tmp_path / "_version.py").write_text("version = 1\n")
    assert object_cache._version_of("numba") == b"version = 1\n"
    with pytest.raises(ImportError, match="absent is not installed"):
        object_cache._version_of("absent")


def test_no_folder_is_no_error(folder, compiled, monkeypatch):
    object_cache._folder.cache_clear()
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/dev/null/a")
    assert not object_cache.is_usable() and not object_cache.save(KEY, compiled) and object_cache.load(KEY) is None
