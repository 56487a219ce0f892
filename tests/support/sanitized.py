"""Builds C programs of `tests/native`, and compiled modules, with sanitizers.

`Unavailable` states in one line what is missing on this machine.
"""
from __future__ import annotations

import functools
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "tests" / "native"

# -Wno-tsan: it does not support fences; ours order wake-up words, not data (`bps_publish`).
# -Wno-unused-function: headers define hooks that a program may not use.
_FLAGS = ("-std=gnu11", "-D_GNU_SOURCE", "-g", "-O1", "-fno-omit-frame-pointer", "-Wall", "-Wextra", "-Werror",
          "-Wno-unused-function", "-Wno-psabi")
_THREAD = ("-fsanitize=thread", "-Wno-tsan")
_ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


class Unavailable(Exception):
    """A tool to build or run a program is missing."""


@functools.cache
def compiler(library: str = "") -> str:
    """Return the path of gcc, which must have *library* ("tsan", "asan")."""
    gcc = shutil.which("gcc")
    if gcc is None:
        raise Unavailable("gcc is missing")
    if library and not Path(runtime(gcc, library)).is_absolute():
        raise Unavailable(f"gcc has no lib{library}")
    return gcc


def runtime(gcc: str, library: str) -> str:
    """Return the path of a sanitizer's shared library, or its bare name if there is none."""
    asked = [gcc, f"-print-file-name=lib{library}.so"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def build(command: Sequence[str | Path]) -> None:
    """Run a compiler; raise an error with its output."""
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr}")


def spoilt_headers(folder: Path, header: str, right: str, wrong: str) -> Path:
    """Copy the headers of `pyx` into *folder*, with *right* replaced by *wrong* in *header*; return their folder."""
    headers = folder / "pyx"
    shutil.copytree(ROOT / "pyx", headers, ignore=lambda path, names: [n for n in names if not n.endswith(".h")])
    text = (headers / header).read_text()
    assert text.count(right) == 1, f"{header} no longer says {right!r}"
    (headers / header).write_text(text.replace(right, wrong))
    return headers


def run_program(name: str, folder: Path, headers: Path = ROOT / "pyx") -> subprocess.CompletedProcess[str]:
    """Build `NATIVE`/*name*.c against *headers* in *folder*, and run it; skip without a compiler."""
    program = folder / name
    try:
        gcc = compiler()
    except Unavailable as exc:
        pytest.skip(str(exc))
    build([gcc, "-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Werror", "-I", headers, NATIVE / f"{name}.c", "-o", program,
           "-lpthread", "-ldl"])
    return subprocess.run([program], capture_output=True, text=True, timeout=30, check=False)


def race_program(name: str, folder: Path, *flags: str, headers: Path = ROOT / "pyx") -> Path:
    """Build ``tests/native/races/NAME.c`` for ThreadSanitizer with the *headers* of a folder."""
    program = folder / name
    source = NATIVE / "races" / f"{name}.c"
    build([compiler("tsan"), *_FLAGS, *_THREAD, *flags, "-I", headers, source, "-o", program, "-lpthread"])
    return program


def fuzz_program(name: str, folder: Path, headers: Path = ROOT / "pyx") -> Path:
    """Build ``tests/native/fuzz/NAME.c`` and its random driver for AddressSanitizer and UBSan, like `race_program`."""
    program = folder / name
    sources = [NATIVE / "fuzz" / f"{name}.c", NATIVE / "fuzz" / "driver.c"]
    build([compiler("asan"), *_FLAGS, *_ADDRESS, "-I", headers, *sources, "-o", program, "-lpthread"])
    return program


def race_module(name: str, folder: Path) -> Path:
    """Build the compiled module ``bpsfast.pyx.NAME`` for ThreadSanitizer, from the C code of the usual build."""
    source = ROOT / "pyx" / f"{name}.c"
    if not source.exists():
        raise Unavailable(f"{source.name} is missing: build the package first")
    module = folder / f"{name}.so"
    include = sysconfig.get_path("include")
    build([compiler("tsan"), "-std=gnu11", "-g", "-O1", "-w", "-shared", "-fPIC", *_THREAD, "-I", ROOT / "pyx", "-I",
           ROOT, "-I", include, source, "-o", module, "-lpthread", "-ldl"])
    return module


@functools.cache
def fixed_addresses() -> tuple[str, ...]:
    """Return a prefix of commands; ThreadSanitizer fails if the kernel randomizes too many bits of addresses."""
    setarch = shutil.which("setarch")
    if setarch and subprocess.run([setarch, "-R", "true"], capture_output=True, check=False).returncode == 0:
        return (setarch, "-R")
    return ()


def race_environment(environ: dict[str, str], report: Path) -> dict[str, str]:
    """Return *environ* with ThreadSanitizer's options; it writes findings to files with prefix *report*."""
    options = f"suppressions={NATIVE / 'races' / 'suppressions.txt'} log_path={report} exitcode=66 " \
              "allocator_may_return_null=1"  # tests request tables larger than any memory
    return {**environ, "TSAN_OPTIONS": options}


def findings(report: Path) -> str:
    """Return ThreadSanitizer's findings, or ""; raises `Unavailable` if it could not start."""
    text = "".join(path.read_text(errors="replace") for path in sorted(report.parent.glob(f"{report.name}.*")))
    if "unexpected memory mapping" in text:
        raise Unavailable("ThreadSanitizer cannot place its memory here: too many random bits in addresses")
    return text
