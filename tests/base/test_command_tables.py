"""Tests the layout of tables of commands: columns on a wide terminal, a block for each row on a narrow one."""
from __future__ import annotations

from collections.abc import Callable

import pytest
from click.testing import CliRunner

from bpsfast.base import output
from bpsfast.cli import cli
from tests.sysfs_trees.machine import Machine

ROWS = [("NAME", "STATE", "WORDS", "EMPTY"), ("one", "up", "a b c d e f", ""), ("two", "down", "x" * 30, "")]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Let standard output be a terminal of that width, or none."""
    return lambda width: monkeypatch.setattr(output, "terminal_width", lambda: width)


def test_a_table_is_columns_where_there_is_room_and_in_files(terminal: Callable[[int | None], None]) -> None:
    for width in (None, 200):
        terminal(width)
        assert output.table(ROWS) == output.columns(ROWS)


def test_a_table_without_room_has_each_row_by_itself(terminal: Callable[[int | None], None]) -> None:
    terminal(40)
    lines = output.click.unstyle(output.table(ROWS)).splitlines()
    assert lines == ["one  STATE up  WORDS a b c d e f", "two  STATE down", f"     WORDS {'x' * 30}"]


def test_words_hang_below_words(terminal: Callable[[int | None], None]) -> None:
    terminal(40)
    assert output.hanging("  head  ", "some words that do not find room in one line") == [
        "  head  some words that do not find room", "        in one line"]
    terminal(None)
    assert len(output.hanging("  head  ", "some words that do not find room in one line")) == 1


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", ["devices", "gids", "topo", "doctor"])
def test_a_screen_is_no_wider_than_the_terminal(command: str, width: int, terminal: Callable[[int | None], None],
                                                recorded_machine: Callable[[str], Machine]) -> None:
    terminal(width)
    lines = CliRunner().invoke(cli, [command, "--root", str(recorded_machine("mlx5_roce").root)]).output.splitlines()
    if command == "doctor":  # what is to be typed stays in one line, to be copied
        lines = lines[:next(number for number, line in enumerate(lines) if line.startswith("[RD"))]
    assert lines and max(map(len, lines)) <= width


@pytest.mark.parametrize("width", [80, 120])
def test_info_and_settings_fit_the_terminal(width: int, terminal: Callable[[int | None], None]) -> None:
    terminal(width)
    for arguments in (["info"], ["info", "--effective"]):
        lines = CliRunner().invoke(cli, arguments).output.splitlines()
        assert [line for line in lines if len(line) > width and "/" not in line] == []  # but for long paths
