"""Builds wheels for publication, and tests that each works without a compiler.

    make wheels PYTHONS="python3.10 python3.11 python3.12"        # writes dist/

Two builds of the sdist must have the same bytes. From it, it builds a wheel for each interpreter, whose platform is the
oldest C library that works, according to auditwheel (manylinux). Each is installed with wheels of PyPI only into a new
environment, where two ranks sum with only that environment in PATH. Exits with 1 if a wheel is larger than 3 MB or
anything else fails.
"""
from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_NBYTES = 3_000_000
_TIMEOUT_S = 900.0
_JOB = """
import numpy as np, bpsfast
bpsfast.init()
got = bpsfast.push_pull(np.full(1000, bpsfast.rank() + 1, np.float32), average=False, name="x")
assert bpsfast.size() == 2 and (got == 3).all(), got
print("rank", bpsfast.rank(), "has the sum")
bpsfast.shutdown()
"""
_IMPORT = "import time; t = time.perf_counter(); import bpsfast; print(time.perf_counter() - t)"


def run(*words: str | Path, environ: dict[str, str] | None = None, folder: str | Path = ROOT) -> str:
    """Run a command in *folder* and return its output; raises `SystemExit` with the output if it fails."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=_TIMEOUT_S,
                          check=False, env=environ, cwd=folder)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def epoch() -> int:
    """Return the time of the last commit (Unix, s), which all packed files get."""
    return int(run("git", "log", "-1", "--format=%ct"))


def repack(sdist: Path, seconds: int) -> None:
    """Rewrite *sdist* with members sorted by name, without owners, and with time *seconds*."""
    with tarfile.open(sdist) as archive:
        members = [(each, archive.extractfile(each))
                   for each in sorted(archive.getmembers(), key=lambda each: each.name)]
        with tempfile.NamedTemporaryFile(dir=sdist.parent, delete=False) as raw, \
                gzip.GzipFile("", "wb", fileobj=raw, mtime=seconds) as packed, \
                tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as out:
            for member, content in members:
                member.mtime, member.uid, member.gid, member.uname, member.gname = seconds, 0, 0, "", ""
                member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                member.pax_headers = {}
                out.addfile(member, content)
    os.replace(raw.name, sdist)


def sdist(out: Path, seconds: int) -> Path:
    """Build the sdist of a clone of the last commit, so that it has no stale files."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        run("git", "clone", "--quiet", "--no-hardlinks", ROOT, clone)
        run(sys.executable, "-m", "build", "--sdist", "--outdir", out, clone)
    (found,) = out.glob("*.tar.gz")
    repack(found, seconds)
    return found


def wheel(source: Path, python: str, out: Path, environ: dict[str, str]) -> Path:
    """Build the wheel of *source* for the interpreter *python*, stripped, with the platform that auditwheel finds."""
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", Path(folder) / "venv")
        pip = Path(folder) / "venv" / "bin" / "pip"
        run(pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, source, environ=environ)
        (plain,) = Path(folder).glob("*.whl")
        run(sys.executable, "-m", "auditwheel", "repair", "--strip", "--wheel-dir", Path(folder) / "repaired", plain,
            environ={**environ, "PATH": f"{Path(sys.executable).parent}:{environ['PATH']}"})
        (repaired,) = (Path(folder) / "repaired").glob("*.whl")
        return Path(shutil.copy(repaired, out))


def try_it(built: Path, python: str) -> float:
    """Install *built* and let two ranks sum; return how long the import takes (s, the best of five).

    It uses another folder, because Python before 3.11 imports packages from the current folder.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "venv"
        run(python, "-m", "venv", environment)
        alone = {"PATH": str(environment / "bin"), "HOME": folder}  # without a compiler
        run(environment / "bin" / "pip", "install", "--quiet", "--only-binary", ":all:", built,
            environ={**os.environ, "PATH": alone["PATH"]})
        script = Path(folder) / "job.py"
        script.write_text(_JOB)
        said = run(environment / "bin" / "bpsfast", "run", "-n", "2", "--", environment / "bin" / "python", script,
                   environ=alone, folder=folder)
        if said.count("has the sum") != 2:
            raise SystemExit(f"{built.name}: two ranks did not both have the sum:\n{said}")
        return min(float(run(environment / "bin" / "python", "-c", _IMPORT, environ=alone, folder=folder))
                   for _ in range(5))


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, check, and print a line for each file."""
    parser = argparse.ArgumentParser(prog="tests.support.wheels", description=__doc__.partition("\n")[0])
    parser.add_argument("pythons", nargs="*", default=[sys.executable], help="interpreters (this one)")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    seconds = epoch()
    environ = {**os.environ, "SOURCE_DATE_EPOCH": str(seconds)}
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        first, second = sdist(Path(one), seconds), sdist(Path(other), seconds)
        sums = {hashlib.sha256(path.read_bytes()).hexdigest() for path in (first, second)}
        if len(sums) != 1:
            print(f"{first.name}: built twice, and the bytes differ", file=sys.stderr)
            return 1
        source = Path(shutil.copy(first, chosen.out))
    print(f"{source.name}  {source.stat().st_size / 1e6:.2f} MB  sha256 {sums.pop()}, the same twice")
    too_large = False
    for python in chosen.pythons:
        began = time.monotonic()
        built = wheel(source, python, chosen.out, environ)
        import_s = try_it(built, python)
        nbytes = built.stat().st_size
        too_large |= nbytes >= MOST_NBYTES
        print(f"{built.name}  {nbytes / 1e6:.2f} MB{' IS TOO LARGE' if nbytes >= MOST_NBYTES else ''}  two ranks sum; "
              f"import {import_s:.2f} s; made and tried in {time.monotonic() - began:.0f} s")
    return int(too_large)


if __name__ == "__main__":
    sys.exit(main())
