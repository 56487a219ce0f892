"""Tests the launcher's output: names and times of lines, and the files with them."""
from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys

from hypothesis import given, strategies as st

from bpsfast.launch.output import Output


class Terminal(io.BytesIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@given(st.lists(st.sampled_from([b"a", b"\n", b"bc", b"\xff", b"d\ne", b"\r\n", b"50%\r"]), max_size=20))
def test_lines_are_whole_whatever_the_pieces(pieces):
    out = io.BytesIO()
    stream = Output(out, io.BytesIO()).streams("rank 0")[0]
    for piece in pieces:
        stream.feed(piece)
    stream.finish()
    stream.finish()
    text = b"".join(pieces).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    lines = text.split(b"\n")
    expected = lines if lines[-1] else lines[:-1]
    assert out.getvalue() == b"".join(b"[rank 0] " + line + b"\n" for line in expected)


def test_a_line_that_does_not_end_is_cut(no_leaks):
    out, piece = io.BytesIO(), b"x" * 65536
    stream = Output(out, io.BytesIO()).streams("rank 0")[0]
    for _ in range(40):
        stream.feed(piece)
    stream.feed(b"y\nz\n")
    long, rest = b"[rank 0] " + piece * 16 + b"\n", b"[rank 0] " + piece * 8 + b"y\n[rank 0] z\n"
    assert out.getvalue() == long * 2 + rest, "1 MiB, 1 MiB, and the rest"


def test_heads_have_a_colour_each_on_a_terminal_only():
    out, err = Terminal(), io.BytesIO()
    output = Output(out, err)
    for name in ("rank 0", "rank 1"):
        for stream in output.streams(name):
            stream.feed(b"x\n")
    assert out.getvalue() == b"\x1b[36m[rank 0]\x1b[0m x\n\x1b[32m[rank 1]\x1b[0m x\n"
    assert err.getvalue() == b"[rank 0] x\n[rank 1] x\n"


def test_times_stand_before_the_head():
    out = io.BytesIO()
    Output(out, io.BytesIO(), stamped=True).streams("rank 0")[0].feed(b"x\ny\n")
    time = rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"
    assert re.fullmatch(time + rb" \[rank 0\] x\n" + time + rb" \[rank 0\] y\n", out.getvalue())


def test_files_have_the_lines_without_heads(tmp_path, no_leaks):
    with contextlib.closing(Output(io.BytesIO(), io.BytesIO(), tee_dir=tmp_path / "tee", rank_dir=tmp_path / "of",
                                   stamped=True)) as output:
        for name, rank in (("scheduler", None), ("rank 3", 3)):
            for stream, text in zip(output.streams(name, rank, n_ranks=11), (b"out\n", b"err\n")):
                stream.feed(text)
    assert {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == {
        "tee/scheduler.log": "out\nerr\n", "tee/rank-3.log": "out\nerr\n",
        "of/rank.03/stdout": "out\n", "of/rank.03/stderr": "err\n",
    }


def test_the_last_error_lines_are_kept():
    out, err = Output(io.BytesIO(), io.BytesIO()).streams("rank 0")
    for i in range(1000):
        out.feed(b"%d\n" % i)
        err.feed(b"%d\n" % i)
    assert len(err.tail) == 200 and err.tail[-1] == b"999" and not out.tail


def test_a_local_job_has_the_files_too(tmp_path):
    text = "import os; print('out', os.environ['BPSFAST_RANK']); raise SystemExit(9)"
    done = subprocess.run(
        [sys.executable, "-m", "bpsfast", "run", "-n", "1", "--output-filename", str(tmp_path), "--", sys.executable,
         "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 9, done.stderr
    assert (tmp_path / "rank.0" / "stdout").read_text() == "out 0\n"
