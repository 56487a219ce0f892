"""torch's own tests of torch.distributed with bpsfast's backend: what gloo passes on CPUs passes, or has a reason."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import torch_suite
from tests.support.portions import chosen, portion_of_commit

_PROGRAM = str(Path(torch_suite.__file__))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_what_gloo_passes_passes(takes_all):
    pytest.importorskip("expecttest", reason="expecttest is missing: torch's tests need it")
    names = torch_suite.expected() if takes_all else sorted(chosen(torch_suite.expected(), portion_of_commit()))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ended = subprocess.run([sys.executable, _PROGRAM, *names], env=environ, text=True, timeout=1400,
                           capture_output=True)
    missing = set(names) - set(ended.stdout.split())
    assert not missing and ended.returncode == 0, f"{sorted(missing)}\n{ended.stderr[-8000:]}"


def test_exceptions_are_few_and_are_tests_that_gloo_passes():
    assert set(torch_suite.EXCEPTIONS) <= set(torch_suite.GOLDEN.read_text().split())
    assert len(torch_suite.expected()) >= 85
