"""The kernels' machine code, for this CPU and others, and the disk cache it is kept in."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from bpsfast import base, kernels
from bpsfast.base import dtypes, reference_sum
from bpsfast.kernels import element_ir, object_cache, sum_ir
from bpsfast.orchestration import errors

IS_X86 = platform.machine() in ("x86_64", "AMD64")
FEATURES = {  # CPUs this one may not be: narrower registers, and no instruction for half
    "haswell": "+avx,+avx2,+f16c,+fma,+bmi,+bmi2,+sse4.2",
    "x86-64": "+sse2",
}


@pytest.mark.parametrize("name", dtypes.NAMES)
def test_machine_code_has_no_fused_multiply_add_and_calls_nothing_slow(name: str) -> None:
    text = kernels.assembly(name)
    assert not re.search(r"\b(vfn?m(add|sub)|fn?m(add|sub)|fml[as])", text)
    assert not re.search(r"extendhf|truncsf|floorf?\b", text) or not IS_X86


@pytest.mark.skipif(not IS_X86, reason="names x86 instructions")
@pytest.mark.parametrize("name", dtypes.NAMES)
def test_machine_code_is_vectors_and_non_temporal_stores(name: str) -> None:
    text = kernels.assembly(name)
    register = {64: "zmm", 32: "ymm", 16: "xmm"}[sum_ir.vector_nbytes(sum_ir.target()[2])]
    assert re.search(rf"v?movnt(ps|pd|dq)\s+%{register}", text)
    assert "sfence" in text
    if name == "float32":
        assert re.search(rf"v?addps\s.*%{register}", text)


@pytest.mark.parametrize("name", dtypes.NAMES)
def test_code_for_arm_has_neither_x86_parts_nor_calls(name: str) -> None:
    triple = "aarch64-unknown-linux-gnu"
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    try:
        machine = llvm.Target.from_triple(triple).create_target_machine(cpu="generic", features="+neon", opt=2)
    except RuntimeError as error:
        pytest.skip(f"this LLVM has no ARM: {error}")
    module = ir.Module()
    pointer = ir.IntType(8).as_pointer()
    arguments = [pointer, pointer.as_pointer(), *[element_ir.I64] * 6]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), "kernel")
    builder = ir.IRBuilder(function.append_basic_block())
    sum_ir.SumLoop(builder, name, (triple, "generic", "+neon"), function.args).build()
    builder.ret_void()
    module.triple = triple
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    text = machine.emit_assembly(parsed)
    assert "stnp" in text
    assert "x86" not in text
    assert not re.search(r"\tbl\t(?!floor)|fml[as]|fmadd", text)


@pytest.fixture
def copied() -> Iterator[Path]:
    """Copy the modules a kernel needs to a folder any user may read, beside an empty working directory."""
    root = Path(tempfile.mkdtemp(prefix="bpsfast-kernels-"))
    package = root / "bpsfast"
    shutil.copytree(Path(errors.__file__).parent, package / "orchestration",
                    ignore=shutil.ignore_patterns("__pycache__"))
    ours = Path(kernels.__file__).parents[1]
    for module in (base, dtypes, element_ir, kernels, object_cache, reference_sum, sum_ir):
        copy = package / Path(module.__file__).relative_to(ours)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(module.__file__, copy)
    (package / "__init__.py").touch()
    (root / "cwd").mkdir()
    for path in (root, *root.rglob("*")):
        path.chmod(0o755)
    (root / "cwd").chmod(0o777)
    yield root
    for path in (root, *root.rglob("*")):
        path.chmod(0o755)
    shutil.rmtree(root)


PROGRAM = """
import numpy as np
from bpsfast import base, kernels
from bpsfast.base import reference_sum as reference
assert kernels.__file__.startswith({root!r}), kernels.__file__
for dtype in (np.float32, np.float16):
    dst, src = np.arange(9.0, dtype=dtype), np.full(9, 0.1, dtype)
    want = reference.reduce([[dst], [src]], average=False)
    kernels.add_into(dst, src)
    assert dst.tobytes() == want.tobytes()
"""

# Python itself may be installed where only root can read: load all of numba first, then become the user.
LEAVE_HOME = """
import os
from bpsfast import base, kernels
from bpsfast.base import reference_sum as reference
from bpsfast.kernels import sum_ir
sum_ir.compile_kernel("int8", cache=False)
os.setgroups([])
os.setgid(54321)
os.setuid(54321)
assert os.path.expanduser("~") == "~"
"""


def _run_copy(root: Path, program: str = PROGRAM, environ: dict[str, str] | None = None) -> None:
    command = [sys.executable, "-B", "-W", "error", "-c", program.format(root=str(root))]
    done = subprocess.run(
        command,
        env={"PYTHONPATH": str(root), "PATH": os.environ["PATH"], **(environ or {})},
        cwd=root / "cwd",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def _entries(folder: Path, pattern: str) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob(pattern)}


@pytest.mark.slow
@pytest.mark.skipif(not IS_X86, reason="objects are loaded on x86-64 only")
def test_objects_lie_where_numba_is_told(copied: Path) -> None:
    cache = copied / "cwd" / "cache"
    _run_copy(copied, environ={"NUMBA_CACHE_DIR": str(cache)})
    entries = _entries(cache, "*.*")
    assert sorted(path.name for path in entries) == ["sum-float16.kernel", "sum-float32.kernel"]
    _run_copy(copied, "import sys\n" + PROGRAM + "assert 'numba' not in sys.modules\n",
              environ={"NUMBA_CACHE_DIR": str(cache)})
    assert _entries(cache, "*.*") == entries


@pytest.mark.slow
def test_numbas_own_cache_is_used_where_objects_cannot_be_kept(copied: Path) -> None:
    environ = {"XDG_CACHE_HOME": "/dev/null/b"}
    _run_copy(copied, environ=environ)
    entries = _entries(copied / "bpsfast", "*.nb?")
    assert sorted(re.sub(r"_[0-9a-f]{16}.*\.", ".", path.name) for path in entries) == [
        "sum_ir.fused_sum_float16.nbc",
        "sum_ir.fused_sum_float16.nbi",
        "sum_ir.fused_sum_float32.nbc",
        "sum_ir.fused_sum_float32.nbi",
    ]
    _run_copy(copied, environ=environ)
    assert _entries(copied / "bpsfast", "*.nb?") == entries


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("content", [b"", b"not a pickle", b"\x80\x05K\x01."], ids=["empty", "text", "other"])
def test_damaged_cache_entry_is_compiled_again(copied: Path, suffix: str, content: bytes) -> None:
    environ = {"XDG_CACHE_HOME": "/dev/null/b"}
    _run_copy(copied, environ=environ)
    for path in copied.rglob(f"*.{suffix}"):
        path.write_bytes(content)
    _run_copy(copied, environ=environ)


@pytest.mark.slow
def test_no_writable_cache_folder_is_no_error(copied: Path) -> None:
    (copied / "bpsfast" / "kernels" / "__pycache__").touch()  # a file, so that not even root can make the folder
    _run_copy(copied, environ={"NUMBA_CACHE_DIR": "/dev/null/a", "XDG_CACHE_HOME": "/dev/null/b"})


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming a user without a home needs root")
def test_read_only_install_and_no_home(copied: Path) -> None:
    """A container run under a user id that no passwd file knows, without HOME."""
    for path in (copied / "bpsfast").rglob("*"):
        path.chmod(0o555)
    _run_copy(copied, LEAVE_HOME + PROGRAM)
    _run_copy(copied, LEAVE_HOME + PROGRAM, environ={"NUMBA_CACHE_DIR": "/dev/null/a"})
    assert not list((copied / "cwd").iterdir()), "a cache was littered into the working directory"


HALVES = """
import numpy as np, ml_dtypes
from bpsfast import base, kernels
from bpsfast.base import reference_sum as reference
for dtype in (np.float16, ml_dtypes.bfloat16):
    patterns = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    for partner in (0.0, 1.0, -0.3, 6e4, 6e-8, np.inf):
        left, right = patterns.copy(), np.full(1 << 16, partner, dtype)
        want = reference.reduce([[left, right], [right]], average=True)
        got = np.empty_like(left)
        kernels.fused_sum(got, [], [left, right], [right], 3)
        assert got.tobytes() == want.tobytes(), (dtype, partner)
"""


@pytest.mark.slow
@pytest.mark.skipif(not IS_X86, reason="names x86 CPUs")
@pytest.mark.parametrize("cpu", [pytest.param("haswell", marks=pytest.mark.thorough), "x86-64"])
def test_halves_are_exact_on_other_cpus(copied: Path, cpu: str) -> None:
    """Also without any half instruction, where LLVM would call a library routine that does not exist."""
    if cpu == "haswell" and "+avx2" not in sum_ir.target()[2]:
        pytest.skip("this CPU cannot run code for it")
    environ = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": FEATURES[cpu]}
    _run_copy(copied, HALVES, environ=environ)
