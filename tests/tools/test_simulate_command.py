"""``bpsfast simulate``: table, JSON, errors in words."""
from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from bpsfast.tools.commands.simulate import command


def test_json_is_one_document_of_all_strategies() -> None:
    done = CliRunner().invoke(command, "--model resnet50 -n 2 -k 1 --nic 10 --compute 20 --json".split())
    assert done.exit_code == 0
    told = json.loads(done.stdout)
    assert [result["strategy"] for result in told["results"]] == ["ring", "all-reduce", "ps", "colocated",
                                                                   "optimal"]
    assert all(result["step_s"] >= 0.02 for result in told["results"])


def test_the_table_has_a_line_for_each_strategy() -> None:
    done = CliRunner().invoke(command, "--model vgg16 -n 2 --strategy optimal --strategy ring".split())
    assert done.exit_code == 0 and [line.split()[0] for line in done.stdout.splitlines()[2:]] == ["optimal", "ring"]


@pytest.mark.parametrize(("arguments", "words"), [
    ("-n 0", "one worker or more"), ("-n 2 --nic 0", "--nic is 0.0"), ("-n 2 -k -1", "negative"),
    ("-n 99999999", "at most 65536"), ("-n 2 --strategy ps", "has none"), ("-n 2 --compute -5", "is invalid"),
    ("-n 2 --steps 0", "one step"), ("-n 2 --gpus 0", "one rank or more"), ("-n 2 --latency nan", "latency_s"),
    ("-n 2 --partition 3", "a page")])
def test_bad_input_is_one_line_and_code_2(arguments: str, words: str) -> None:
    done = CliRunner().invoke(command, ["--model", "vgg16", *arguments.split()])
    assert done.exit_code == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1
