"""What the end of a program leaves of a session's hooks."""
from __future__ import annotations

import re
import subprocess
import sys

import pytest

from bpsfast.orchestration.errors import BpsError, PeerLostError, StallError
from bpsfast.pyx.direct import known_first
from bpsfast.trainer.exit_handling import ExitWatch


class _NoDaemons:
    """A process that started nothing."""

    node = scheduler = None
    closed = 0

    def close(self):
        self.closed += 1


def test_an_uncaught_exception_is_noted_and_passed_on(capsys):
    before = sys.excepthook
    watch = ExitWatch(lambda: None, _NoDaemons())
    try:
        raise ValueError("a bug")
    except ValueError as exc:
        sys.excepthook(type(exc), exc, exc.__traceback__)
    assert watch.failure == "ValueError: a bug" and not watch.holds_daemons
    assert "ValueError: a bug" in capsys.readouterr().err
    watch.close()
    assert sys.excepthook is before


def test_a_hook_chained_onto_ours_stays(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    daemons = _NoDaemons()
    watch = ExitWatch(lambda: None, daemons)
    ours = sys.excepthook

    def other(*arguments):
        ours(*arguments)

    sys.excepthook = other
    watch.close()
    assert sys.excepthook is other and daemons.closed == 1


@pytest.mark.parametrize("first", [0, 1])
def test_watches_may_end_in_any_order(first, capsys):
    before = sys.excepthook
    watches = [ExitWatch(lambda: None, _NoDaemons()) for _ in range(2)]
    watches[first].close()
    error = ValueError("a bug")
    sys.excepthook(ValueError, error, None)
    assert [watch.failure for watch in watches] == [None if i == first else "ValueError: a bug" for i in range(2)]
    assert capsys.readouterr().err.count("ValueError: a bug") == 1, "both watches are one hook"
    watches[1 - first].close()
    assert sys.excepthook is before


_LINGERS = """
import subprocess, sys
from bpsfast.trainer.exit_handling import ExitWatch
from bpsfast.launch.daemons import Daemons
daemons = Daemons(None)
daemons.node = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read(); print('the node ends')"],
                                stdin=subprocess.PIPE)
watch = ExitWatch(lambda: None, daemons)
watch.close(detaches=True)
assert daemons.node.poll() is None
print("the program ends", flush=True)
daemons.node.stdin.close()
"""


def test_the_end_of_the_program_waits_for_daemons_that_linger():
    done = subprocess.run([sys.executable, "-c", _LINGERS], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the program ends\nthe node ends\n", "")


def ended_by(error, capsys, **options):
    """Return what a program that *error* ends prints."""
    sys.excepthook = sys.__excepthook__  # torch.distributed, if a test has used it here, has left its own
    watch = ExitWatch(lambda: None, _NoDaemons(), **options)
    try:
        raise error
    except BpsError as exc:
        sys.excepthook(type(exc), exc, exc.__traceback__)
    watch.close()
    assert watch.failure == f"{type(error).__name__}: {error}"
    return capsys.readouterr().err


def test_a_lost_peer_is_one_line_where_a_launcher_shows_all_ranks(capsys):
    lost = PeerLostError("rank 1 is lost")
    text = ended_by(lost, capsys, brief=True)
    assert re.fullmatch(rf"bpsfast.PeerLostError: rank 1 is lost \(ended in {re.escape(__file__)}, line \d+\)\n", text)
    assert ended_by(lost, capsys).startswith("Traceback")
    assert ended_by(StallError("rank 1 is missing"), capsys, brief=True).startswith("Traceback"), "may be the cause"


def test_calls_of_compiled_functions_are_not_shown_as_the_programs(capsys):
    sys.excepthook = sys.__excepthook__
    watch = ExitWatch(lambda: None, _NoDaemons(), brief=True)

    @known_first({})
    def push_pull(*_arguments):
        raise StallError("rank 1 is missing")

    try:
        push_pull(1.0)
    except StallError as exc:
        sys.excepthook(type(exc), exc, exc.__traceback__)
    watch.close()
    text = capsys.readouterr().err
    assert text.count('  File "') == 2 == text.count(__file__) and "[1 calls within bpsfast" in text, text
