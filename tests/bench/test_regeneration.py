"""make results: every committed file has a piece that writes it, all commands parse, and outcomes of pieces."""
from __future__ import annotations

import os
import re
import shlex
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest
from click.testing import CliRunner

from bpsfast.bench import drawn, regeneration
from bpsfast.bench.cli import command as benches
from bpsfast.bench.regeneration import PIECES, RESULTS, ROOT, Piece, regenerate
from bpsfast.launch.namespaces import netns
from tests.guest.__main__ import _parser as guest_parser

TEXTS = ("README.md", "DESIGN.md", "bench/README.md", "bench/FINDINGS.md",
         *(str(path.relative_to(ROOT)) for path in (ROOT / "bpsfast" / "docs" / "design").glob("*.md")))


def test_each_kept_file_has_one_piece_that_writes_it() -> None:
    for path in (ROOT / RESULTS).iterdir():
        writers = [piece.name for piece in PIECES if any(fnmatch(path.name, pattern) for pattern in piece.files)]
        assert len(writers) == 1, f"{path.name} is written by {writers or 'no piece of make results'}"


def test_all_results_that_texts_name_are_written() -> None:
    named = {name for text in TEXTS for name in re.findall(r"results/([\w*.<>]+\w)", (ROOT / text).read_text())}
    assert len(named) > 10
    for name in named:
        pattern = re.sub("<.*?>", "*", name)
        assert any(fnmatch(pattern, of) or fnmatch(of, f"{pattern}*") for piece in PIECES for of in piece.files), name


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.name)
def test_commands_are_understood(piece: Piece, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RESULTS.mkdir(parents=True)
    words = shlex.split(piece.command)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M)
    elif words[:2] == ["bpsfast", "bench"]:
        bench = benches.get_command(None, words[2])  # type: ignore[arg-type]
        assert bench is not None
        found = bench.make_context(words[2], words[3:])
        assert found.params["json_path"] == str(RESULTS / piece.files[0])
    elif words[-1] == drawn.__name__:
        assert words[:2] == ["python", "-m"] and drawn.main.make_context("drawn", []).params["out"] == ROOT / RESULTS
    else:
        assert words[:3] == ["python", "-m", "tests.guest"]
        options = guest_parser().parse_args(words[3:])
        assert options.out == str(RESULTS) and options.command[:3] == ["--", "sh", "-c"]
        assert f"$OUT/{piece.files[0]}" in options.command[3]
        subprocess.run(["sh", "-n", "-c", options.command[3]], check=True)


def test_what_draws_says_beforehand_that_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netns, "missing", lambda: None)
    monkeypatch.setattr(regeneration.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else name)
    for piece in PIECES:
        draws = any(name.endswith(".png") for name in piece.files)
        assert not draws or piece.lacking() == "matplotlib not installed", piece.name


def piece_that(does: str, lacking: str | None = None) -> Piece:
    return Piece("some", f"python -c {shlex.quote(does)}", ("a.jsonl", "b_*.json"), 1, lambda: lacking)


WRITES = "open('bench/results/a.jsonl', 'a').write('x'); open('bench/results/b_1.json', 'a').write('x')"


@pytest.mark.parametrize(("piece", "state", "written"), [
    (piece_that(WRITES), "written", ("a.jsonl", "b_1.json")),
    (piece_that("open('bench/results/a.jsonl', 'a').write('x')"), "FAILED: it did not write b_*.json", ("a.jsonl",)),
    (piece_that(f"{WRITES}; raise SystemExit(3)"), "FAILED: it ended with 3; its output says why",
     ("a.jsonl", "b_1.json")),
    (piece_that(WRITES, "no GPU"), "not here: no GPU", ()),
])
def test_a_piece_says_what_it_wrote_or_why_not(piece: Piece, state: str, written: tuple[str, ...],
                                               tmp_path: Path) -> None:
    (tmp_path / RESULTS).mkdir(parents=True)
    for name in ("a.jsonl", "b_0.json"):  # from an earlier run
        (tmp_path / RESULTS / name).touch()
        os.utime(tmp_path / RESULTS / name, (1, 1))
    found = regenerate(piece, tmp_path)
    assert (found.state, found.written) == (state, written)
    assert found.is_failed == state.startswith("FAILED")


def test_the_list_says_files_minutes_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = (piece_that(WRITES), piece_that("0", "no GPU"))
    assert regeneration.listing(pieces).splitlines()[-4:] == [
        "some: 1 minutes; not here: no GPU", "    python -c 0", "    -> a.jsonl b_*.json",
        "1 of 2 can run here, in 1 minutes"]
    listed = CliRunner().invoke(regeneration.main, ["--list", "--only", "expr3"])
    assert listed.exit_code == 0 and "    make expr3\n    -> expr3.json expr3.md expr3.png\n" in listed.output


def test_a_failed_piece_is_the_exit_status_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(piece: Piece) -> regeneration.Outcome:
        ran.append(piece.name)
        return regeneration.Outcome(piece, "FAILED: it ended with 3" if piece.name == "expr3" else "written")

    monkeypatch.setattr(regeneration, "regenerate", run)
    done = CliRunner().invoke(regeneration.main, ["--only", "expr2, expr3"])
    assert done.exit_code == 1 and ran == ["expr3", "expr2"] and "expr3: FAILED: it ended with 3" in done.output


def test_pieces_are_chosen_and_left_out_by_name() -> None:
    def named(*options: str) -> list[str]:
        done = CliRunner().invoke(regeneration.main, ["--list", *options])
        assert done.exit_code == 0
        return re.findall(r"^(\w+): ", done.output, re.M)

    assert named("--without", "expr1,gpu") == [each.name for each in PIECES if each.name not in ("expr1", "gpu")]
    assert named("--only", "gpu,expr1", "--without", "gpu") == ["expr1"]
    for option in "--only", "--without":
        wrong = CliRunner().invoke(regeneration.main, [option, "expr1,expr9"])
        assert wrong.exit_code == 2
        assert "'expr9' is none of kernels, codecs, " in " ".join(wrong.output.split())
