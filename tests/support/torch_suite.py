"""torch's own tests of `torch.distributed` (they ship inside the package), run with our backend's name.

    python tests/support/torch_suite.py [TEST ...]          with bpsfast: all tests that gloo passes on CPUs, or the
    named ones python tests/support/torch_suite.py --gloo              run with gloo; prints the names of tests that
    pass python tests/support/torch_suite.py --known             with bpsfast: those that this version of torch has

Each test forks three processes, so that they need no imports. Some of torch's tests require gloo by name, because only
gloo could do that on CPUs when they were written; they also accept our backend here.
"""
from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import types
import unittest
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden" / "torch_suite.txt"
#: Tests that gloo passes and bpsfast cannot, with reasons.
EXCEPTIONS = {
    "test_monitored_barrier_gloo": "torch.distributed.monitored_barrier refuses every backend but gloo by its name",
    "test_monitored_barrier_gloo_subgroup": "the same; bpsfast.torch.backend.monitored_barrier does it",
}
_WORLD_SIZE = 3


def suite(backend: str) -> type[unittest.TestCase]:
    """Return torch's tests as a test case for *backend*; the environment is changed for them."""
    os.environ |= {"BACKEND": backend, "WORLD_SIZE": str(_WORLD_SIZE), "INIT_METHOD": "env://",
                   "MASTER_ADDR": "127.0.0.1", "TEMP_DIR": tempfile.mkdtemp(), "OMP_NUM_THREADS": "1"}
    import torch
    from torch.testing._internal.common_distributed import DistTestCases

    torch.set_num_threads(1)  # threads do not survive a fork
    if backend == "bpsfast":
        import bpsfast.torch.backend  # noqa: F401 - registers it

        for feature in ("gpu", "ddp", "subgroup", "plugin"):
            DistTestCases.backend_feature[feature].add(backend)
    tests = _module()

    class TorchSuite(tests.TestDistBackend, tests.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return TorchSuite


def _module() -> types.ModuleType:
    """Return torch's module of tests, changed to accept our backend where it requires gloo."""
    spec = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test")
    assert spec is not None and spec.origin is not None, "torch ships its tests"
    text = Path(spec.origin).read_text(encoding="utf-8")
    for asked, instead in (('BACKEND != "gloo"', 'BACKEND not in ("gloo", "bpsfast")'),
                           ('BACKEND == "gloo"', 'BACKEND in ("gloo", "bpsfast")'),
                           ('require_backend_is_available({"gloo"', 'require_backend_is_available({"gloo", "bpsfast"')):
        assert asked in text or "==" in asked, f"torch's tests do not say {asked} any more"
        text = text.replace(asked, instead)
    module = types.ModuleType("torch_distributed_test")
    module.__file__ = spec.origin
    sys.modules[module.__name__] = module
    exec(compile(text, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


class _Result(unittest.TextTestResult):
    """Collects the names of tests that passed."""

    def __init__(self, *arguments: object, **more: object) -> None:
        super().__init__(*arguments, **more)  # type: ignore[arg-type]
        self.passed: list[str] = []

    def addSuccess(self, test: unittest.TestCase) -> None:
        super().addSuccess(test)
        self.passed.append(test._testMethodName)


def main(arguments: list[str]) -> int:
    """Run the tests in *arguments*; return the exit code, 0 if all passed."""
    is_gloo = arguments == ["--gloo"]
    case = suite("gloo" if is_gloo else "bpsfast")
    loader = unittest.TestLoader()
    names = loader.getTestCaseNames(case) if is_gloo else arguments or expected()
    if arguments == ["--known"]:
        names = sorted({*expected()} & {*loader.getTestCaseNames(case)})
    tests = unittest.TestSuite(case(name) for name in names)
    result = unittest.TextTestRunner(sys.stderr, verbosity=2, resultclass=_Result).run(tests)
    for name in sorted(result.passed):
        print(name)
    return 0 if is_gloo or len(result.passed) == len(names) else 1


def expected() -> list[str]:
    """Return the tests that must pass: those that gloo passed with CI's version of torch, without the exceptions."""
    return [name for name in GOLDEN.read_text().split() if name not in EXCEPTIONS]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
