"""What the end of a program leaves of a session's hooks."""
from __future__ import annotations

import sys

from bpsfast.trainer.lifetime import Watch


class _NoDaemons:
    """A process that started nothing."""

    node = scheduler = None
    closed = 0

    def close(self):
        self.closed += 1


def test_an_uncaught_exception_is_noted_and_passed_on(capsys):
    before = sys.excepthook
    watch = Watch(lambda: None, _NoDaemons())
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
    watch = Watch(lambda: None, daemons)
    ours = sys.excepthook

    def other(*arguments):
        ours(*arguments)

    sys.excepthook = other
    watch.close()
    assert sys.excepthook is other and daemons.closed == 1
