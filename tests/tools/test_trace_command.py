"""``bpsfast trace``: merge and summary, errors in words."""
from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from bpsfast.tools.commands.trace import command
from tests.support import trace_format
from tests.support.trace_records import job as recorded


def run(*arguments: object):
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_merge_writes_a_trace_and_summary_reads_either(tmp_path):
    recorded(tmp_path)
    merged = run("merge", tmp_path)
    assert merged.exit_code == 0 and merged.stdout.splitlines()[1] == "clocks: 4 processes on 1 clock"
    trace_format.check(tmp_path / "trace.json")
    assert run("merge", tmp_path, "-o", tmp_path / "other.json").exit_code == 0
    assert (tmp_path / "other.json").read_bytes() == (tmp_path / "trace.json").read_bytes()
    of_folder, of_file = run("summary", tmp_path), run("summary", tmp_path / "other.json")
    assert of_folder.exit_code == 0 and of_folder.stdout == of_file.stdout and len(of_file.stdout.splitlines()) == 5


def test_json_is_one_document_of_numbers(tmp_path):
    recorded(tmp_path)
    told = json.loads(run("summary", tmp_path, "--json").stdout)
    assert told["wait_s"] == pytest.approx(39e-6) and told["inversions"] == 0 and told["writes"] == 2
    assert sum(told["waiting_s"].values()) == pytest.approx(told["wait_s"])


@pytest.mark.parametrize("arguments", [("merge",), ("summary",), ("summary", "--json")])
def test_a_cut_off_file_is_one_line_and_code_2(tmp_path, arguments):
    recorded(tmp_path)
    path = sorted(tmp_path.glob("*.trace.json"))[1]
    path.write_bytes(path.read_bytes()[:-100])
    done = run(arguments[0], tmp_path, *arguments[1:])
    assert done.exit_code == 2 and str(path) in done.stderr and len(done.stderr.splitlines()) == 1
    assert not done.stdout or "incomplete copy" in json.loads(done.stdout)["error"]["text"]
    assert not (tmp_path / "trace.json").exists()


def test_no_trace_is_an_error_that_says_how_to_get_one(tmp_path):
    for arguments in (("merge", tmp_path), ("summary", tmp_path)):
        done = run(*arguments)
        assert done.exit_code == 2 and "BPSFAST_TRACE_DIR" in done.stderr
    assert run("summary", tmp_path / "nothing.json").exit_code == 2
