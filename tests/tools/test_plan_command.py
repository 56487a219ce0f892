"""``bpsfast plan``: its text, its JSON, its errors, and that it is quick and loads no framework."""
from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bpsfast.cli import cli
from bpsfast.tools.planner import catalog


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *arguments])


@pytest.mark.parametrize(("name", "arguments"), [
    ("vgg16", ["--workers", "8", "--helpers", "4", "--nic", "25", "--model", "vgg16"]),
    ("slow_worker", ["--workers", "7x10,2.5", "--model", "bert-large"]),
    ("two_workers", ["--workers", "2", "--servers", "1x25/8", "--model", "gpt2", "--forward-ms", "30",
                     "--backward-ms", "60"]),
    ("compression", ["--workers", "4", "--helpers", "2", "--nic", "10", "--model", "resnet50", "--compression",
                     "onebit"]),
    ("table", ["--table", "models"])])
def test_the_text_is_the_golden_one(name: str, arguments: list[str], golden: Callable[[str, str], None]) -> None:
    done = plan(*arguments)
    assert done.exit_code == 0, done.output
    golden(f"plan_{name}.txt", done.stdout)


@pytest.mark.parametrize("model", list(catalog.MODELS))
def test_json_holds_what_the_text_says(model: str) -> None:
    told = json.loads(plan("--workers", "8", "--helpers", "4", "--model", model, "--json").stdout)
    by_name = {each["layout"]: each for each in told["layouts"]}
    assert list(by_name) == ["ring", "ps", "colocated", "optimal"]
    nbytes = told["model"]["nbytes"]
    unit_s = nbytes / (25e9 / 8)
    assert by_name["ring"]["formula_s"] == pytest.approx(1.75 * unit_s)
    assert by_name["ps"]["formula_s"] == pytest.approx(2 * unit_s)
    assert by_name["optimal"]["formula_s"] == pytest.approx(112 / 88 * unit_s)
    for each in told["layouts"][1:]:
        assert each["formula_s"] * (1 - 1e-9) <= each["placed_s"]
    assert by_name["optimal"]["placed_s"] <= 1.02 * by_name["optimal"]["formula_s"]
    assert told["helpers"]["there"] == 4 and told["helpers"]["last_that_pays"] == 8
    assert told["bottleneck"]["time_s"] == by_name["optimal"]["placed_s"]
    assert [machine["role"] for machine in told["machines"]] == ["worker"] * 8 + ["helper"] * 4


def test_the_slow_worker_is_the_bottleneck_and_owns_nothing() -> None:
    told = json.loads(plan("--workers", "7x10,2.5", "--model", "bert-large", "--json").stdout)
    assert (told["bottleneck"]["machine"], told["bottleneck"]["owned_nbytes"]) == ("worker 7", 0)
    assert told["layouts"][0]["formula_s"] / told["layouts"][-1]["placed_s"] == pytest.approx(1.75, rel=0.01)


def test_a_quota_is_named_as_the_bottleneck() -> None:
    told = json.loads(plan("--workers", "2x100/4", "--helpers", "100/2", "--model", "vgg16", "--json").stdout)
    assert told["bottleneck"]["what"] == "sum"


def test_csv_is_the_table() -> None:
    table = list(csv.reader(io.StringIO(plan("--workers", "4", "--model", "gpt2", "--csv").stdout)))
    assert table[0][0] == "layout" and [row[0] for row in table[1:]] == ["ring", "colocated", "optimal"]


def test_the_batch_scales_compute() -> None:
    told = json.loads(plan("--workers", "4", "--model", "vgg16", "--batch", "64", "--json").stdout)
    assert (told["compute"]["forward_s"], told["compute"]["batch"]) == (pytest.approx(0.098), 64)


def test_the_table_of_models_in_json_names_its_contradictions() -> None:
    told = {line["model"]: line for line in json.loads(plan("--table", "models", "--json").stdout)}
    assert {name for name, line in told.items() if line["contradictions"]} == {"vgg16", "bert-base", "bert-large"}


def test_json_says_what_compressing_would_give_and_for_which_tensors() -> None:
    arguments = ["--workers", "4", "--model", "resnet18", "--forward-ms", "10", "--backward-ms", "20", "--json"]
    chosen = ["--compression", "topk:k=0.01,error_feedback"]
    told = json.loads(plan(*arguments, *chosen, "--nic", "0.1").stdout)["compression"]
    assert told["codec"] == "topk:k=0.01,error_feedback"
    assert told["communication_without_s"] == pytest.approx(1.5 * told["nbytes_without"] / 12.5e6)
    assert told["communication_s"] == told["wire_s"] == pytest.approx(1.5 * told["nbytes"] / 12.5e6)
    assert told["nbytes"] == pytest.approx(0.02 * told["nbytes_without"], rel=0.02)
    assert 0.01 < told["step_s"] < 0.25 and "layer4.0.conv2.weight" not in told["uncompressed"]
    fast = json.loads(plan(*arguments, *chosen, "--nic", "200", "--copy-rate", "5").stdout)["compression"]
    assert len(fast["uncompressed"]) == 62 and fast["communication_s"] == fast["communication_without_s"]
    slow = json.loads(plan(*arguments, *chosen, "--nic", "200", "--copy-rate", "2000").stdout)["compression"]
    assert slow["communication_s"] < fast["communication_s"], "kernels take less where copies do"
    assert json.loads(plan(*arguments).stdout)["compression"] is None


def test_one_worker_compresses_nothing() -> None:
    arguments = ["--workers", "1", "--model", "resnet18", "--compression", "int8"]
    assert "int8: does not pay off, because a single worker sends nothing" in plan(*arguments).stdout
    assert json.loads(plan(*arguments, "--json").stdout)["compression"]["communication_s"] is None


def test_integers_are_not_compressed() -> None:
    done = plan("--workers", "4", "--model", "vgg16", "--dtype", "int8", "--compression", "int8")
    assert done.exit_code == 1 and "tensors of int8 are not compressed" in done.stderr


@pytest.mark.parametrize(("arguments", "words"), [
    (["--workers", "4", "--model", "vgg16", "--compression", "zip"], "no kind 'zip'; there are onebit, topk"),
    (["--workers", "4", "--model", "vgg16", "--compression", "topk:k=0"], "topk of k=0"),
    (["--model", "vgg16"], "--workers is missing"),
    (["--workers", "8"], "give --model or --from-torch"),
    (["--workers", "8", "--model", "vgg16", "--from-torch", "a:b"], "choose one"),
    (["--workers", "0", "--model", "vgg16"], "0 machines are impossible"),
    (["--workers", "-3", "--model", "vgg16"], "-3 machines are impossible"),
    (["--workers", "8", "--helpers", "-1", "--model", "vgg16"], "-1 machines are impossible"),
    (["--workers", "1000000000", "--model", "vgg16"], "more than 4096 machines"),
    (["--workers", "8", "--nic", "0", "--model", "vgg16"], "0 Gbit/s is impossible"),
    (["--workers", "8", "--nic", "nan", "--model", "vgg16"], "nan Gbit/s is impossible"),
    (["--workers", "4x0", "--model", "vgg16"], "0 Gbit/s is impossible"),
    (["--workers", "4x", "--model", "vgg16"], "'4x' is not a rate"),
    (["--workers", "4xfast", "--model", "vgg16"], "'fast' is not a rate in Gbit/s"),
    (["--workers", "8", "--model", "alexnet"], "'alexnet' is not built in; there are resnet50"),
    (["--workers", "8", "--model", "/nowhere/x.txt"], "cannot be read: No such file or directory"),
    (["--workers", "8", "--model", "vgg16", "--dtype", "float8"], "dtype 'float8' has no sum kernel"),
    (["--workers", "64", "--helpers", "400", "--model", "resnet50"], "464 machines are more than the"),
    (["--workers", "4", "--helpers", "0.0001", "--model", "vgg16"], "0 (0.0001 Gbit/s) is slower than its share"),
    (["--workers", "4", "--helpers", "25/0.0001", "--model", "vgg16"], "is slower than its share"),
    (["--workers", "4", "--model", "vgg16", "--forward-ms", "3"], "give both, or neither"),
    (["--workers", "4", "--model", "gpt2", "--batch", "8"], "no compute times of GPT-2 small are built in"),
    (["--workers", "4", "--from-torch", "nosuchmodule:f"], "ModuleNotFoundError"),
    (["--workers", "4", "--from-torch", "json"], "expected MODULE:CALLABLE")])
def test_bad_input_is_an_error_in_words(arguments: list[str], words: str) -> None:
    done = plan(*arguments)
    assert done.exit_code == 2 and words in done.stderr and "Traceback" not in done.output
    told = json.loads(plan(*arguments, "--json").stdout)
    assert words in told["error"]["text"]


def test_no_framework_is_loaded_and_it_is_quick(tmp_path: Path) -> None:
    code = ("import sys, time; begin = time.process_time()\nfrom bpsfast.cli import cli\n"
            "cli(['plan', '--workers', '32', '--helpers', '16', '--model', 'bert-large'], standalone_mode=False)\n"
            "print(sorted({'torch', 'numpy', 'numba', 'scipy', 'zmq'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60,
                          check=True)
    assert done.stdout.splitlines()[-1] == "[]"
