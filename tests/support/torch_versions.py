"""Runs the tests that use torch with other versions of it, each in a temporary environment.

    python -m tests.support.torch_versions [--index URL] [VERSION ...]

Without arguments: the oldest version that setup.cfg allows, some between, and the newest known. All packages except
torch (and NumPy, which must be below 2 for the oldest) come from the present environment. A version that cannot be
installed here is reported and skipped. Exits with 0 if all others pass.
"""
from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

VERSIONS = ("2.2.2", "2.6.0", "2.10.0", "2.14.1", "2.15.0")
TESTS = ("test_process_group_forms", "test_process_group_trouble", "test_compiled", "test_torch_messages", "test_work",
         "test_operands", "test_worlds", "test_ddp", "test_torch_ops", "test_torch_optimizer", "test_torch_parallel",
         "test_torch_autoload")
#: FSDP2 of earlier versions requests a stream of the CPU, and also fails with gloo.
SHARDED = ("test_sharded_training",)
_TESTS = Path(__file__).parents[1]
_LIMIT_S = 3600


def main(arguments: list[str]) -> int:
    """Test each version in *arguments*; return the exit code."""
    index = []
    if arguments[:1] == ["--index"]:
        index, arguments = ["--extra-index-url", arguments[1]], arguments[2:]
    said = [(version, tried(version, index)) for version in arguments or VERSIONS]
    print("\n".join(f"torch {version}: {words}" for version, words in said))
    return int(any("failed" in words or "error" in words for _, words in said))


def tried(version: str, index: list[str]) -> str:
    """Return the result of the tests with torch *version*."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"torch-{version}-") as folder:
        venv.create(folder, with_pip=True)
        python = f"{folder}/bin/python"
        number = tuple(map(int, version.split(".")[:2]))
        wanted = [f"torch=={version}+cpu" if index else f"torch=={version}"]
        if number < (2, 3):
            wanted.append("numpy<2")
        installed = subprocess.run([python, "-m", "pip", "install", "--quiet", *index, *wanted], text=True,
                                   capture_output=True, timeout=_LIMIT_S)
        if "No matching distribution" in installed.stderr:
            return f"skipped: no build for Python {sys.version_info.major}.{sys.version_info.minor}"
        if "ResolutionImpossible" in installed.stderr:
            return "skipped: pip cannot install its dependencies from the package indexes at hand"
        if installed.returncode:
            return f"error: {installed.stderr[-300:]}"
        site = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True,
                              capture_output=True, check=True).stdout.strip()
        Path(site, "others.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        files = [str(next(_TESTS.rglob(f"{name}.py"))) for name in (*TESTS, *(SHARDED if number >= (2, 10) else ()))]
        command = [python, "-m", "pytest", "-q", "--thorough", "--timeout", "900", "-p", "no:cacheprovider", *files]
        ended = subprocess.run(command, text=True, cwd=_TESTS.parent, stdout=subprocess.PIPE, timeout=_LIMIT_S)
        sys.stdout.write(ended.stdout)
        totals = re.findall(r"^=* ?(\d+ (?:passed|failed|skipped|error).*)$", ended.stdout, re.MULTILINE)
        suite = subprocess.run([python, str(_TESTS / "support" / "torch_suite.py"), "--known"], text=True,
                               stdout=subprocess.PIPE, cwd=_TESTS.parent, timeout=_LIMIT_S)
        return (f"{totals[-1] if totals else f'error: pytest ended with {ended.returncode}'}; torch's own suite: "
                f"{len(suite.stdout.split())} passed{', others failed' if suite.returncode else ''}; "
                f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
