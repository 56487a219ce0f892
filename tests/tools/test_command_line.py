"""Every command alike: help with examples, JSON by a schema also when it fails, exit codes, what nobody may do."""
from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner, Result

from bpsfast.base import exit_codes, settings
from bpsfast.bench.drawn import RESULTS
from bpsfast.cli import cli
from bpsfast.hardware.topology.graph import Topology
from bpsfast.tools import bug_report, inventory
from bpsfast.tools.commands.info import SettingRow
from tests.support import json_schemas as schemas, measurement_schemas
from tests.support.terminal import on_terminal
from tests.support.trace_records import job as recorded_job
from tests.sysfs_trees.machine import Machine

_GROUPS = ("bench", "perf", "trace", "tune")


def invoke(*arguments: str, **variables: str) -> Result:
    return CliRunner(env=variables).invoke(cli, arguments)


def commands() -> dict[tuple[str, ...], click.Command]:
    """Return every command that is shown, and those below groups, by what is typed."""
    context = click.Context(cli)
    found: dict[tuple[str, ...], click.Command] = {}
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None, name
        if command.hidden:
            continue
        found[name,] = command
        if isinstance(command, click.Group):
            found |= {(name, below): each for below, each in command.commands.items()}
    return found


COMMANDS = commands()


def interface() -> list[str]:
    """Return what users have typed into scripts: commands with their options, settings, exit codes."""
    found = []
    for path, command in sorted(COMMANDS.items()):
        words = sorted(word for parameter in command.params for word in (
            (*parameter.opts, *parameter.secondary_opts) if isinstance(parameter, click.Option)
            else [str(parameter.name).upper()]))
        found.append(f"command {' '.join(path)}: {' '.join(words)}")
    found += [f"setting {row.name}: {row.kind}, {row.default!r}, {' '.join((row.variable, *sorted(row.aliases)))}"
              for row in settings.table()]
    codes = {name: value for name, value in vars(exit_codes).items() if name.isupper() and isinstance(value, int)}
    return [*found, *(f"exit code {value}: {name}" for name, value in sorted(codes.items(), key=lambda each: each[1]))]


def test_what_users_type_stays(golden) -> None:
    """A change that is meant is written by ``pytest tests/tools/test_command_line.py --write-golden``."""
    golden("interface.txt", "\n".join(interface()) + "\n")


def test_those_that_were_promised_are_there() -> None:
    assert {name for name, *_ in COMMANDS} >= {
        "run", "scheduler", "node", "info", "devices", "gids", "topo", "doctor", "ping", "perf", "bench", "plan",
        "tune", "trace", "top", "env", "explain", "report", "clean", "completion", "add", "simulate", "version"}


@pytest.mark.parametrize("width", [80, 120])
def test_help_has_examples_and_fits_the_terminal(width: int) -> None:
    for typed in [(), *COMMANDS]:
        done = CliRunner().invoke(cli, [*typed, "--help"], terminal_width=width)
        assert done.exit_code == 0 and done.output.startswith("Usage: "), typed
        assert [line for line in done.output.splitlines() if len(line) > width] == [], typed
        if typed[:1] != ("bench",) or len(typed) < 2:
            shown = " ".join(typed).removesuffix(" job")
            assert re.search(rf"^  .*bpsfast {shown}", done.output, re.M), f"no example: {typed}"
    root = CliRunner().invoke(cli, ["--help"], terminal_width=width).output
    for code, words in exit_codes.WORDS.items():
        assert f"  {code}  {words.split(':')[0]}" in root
    run = " ".join(CliRunner().invoke(cli, ["run", "--help"], terminal_width=width).output.split())
    for code, words in exit_codes.WORDS_OF_RUN.items():
        assert f"{code} {words}" in run


def test_what_is_typed_wrongly_is_exit_code_2_and_json_if_that_was_asked_for() -> None:
    for typed, command in COMMANDS.items():
        done = invoke(*typed, "--no-such-option")
        assert done.exit_code == 2 and "--no-such-option" in done.output, typed
        if any(option.name == "as_json" for option in command.params) and typed != ("run",):
            done = invoke(*typed, "--json", "--no-such-option")
            assert done.exit_code == 2, typed
            said = msgspec.json.decode(done.stdout, type=schemas.Error).error
            assert said.kind == "NoSuchOption" and "--no-such-option" in said.text


@pytest.mark.parametrize(("arguments", "words"), [
    (("tpo",), "did you mean topo?"), (("dctor",), "did you mean doctor?"), (("xyz",), "`bpsfast --help` lists all"),
    (("trace", "sumary"), "summary"), (("env", "--set", "partition_byte=1"), "did you mean partition_bytes?"),
    (("info", "--set", "tcp-streems=1"), "did you mean tcp_streams?"),
    (("explain", "ETIMEDOU"), "did you mean ETIMEDOUT?")])
def test_the_nearest_is_named(arguments: tuple[str, ...], words: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2 and words in done.output


def test_an_unknown_variable_is_met_with_the_nearest() -> None:
    done = invoke("env", "--json", BPSFAST_PARTION_BYTES="1")
    assert done.exit_code == 2 and "did you mean BPSFAST_PARTITION_BYTES?" in done.stderr
    assert msgspec.json.decode(done.stdout, type=schemas.Error).error.kind == "ConfigError"


@pytest.mark.parametrize("arguments", [
    ("run", "--json", "--", "x"), ("node", "--local-size", "-1"), ("scheduler", "--num-nodes", "0"),
    ("devices", "--json", "--csv"), ("topo", "--service", "1"), ("doctor", "--peer", "x:y"),
    ("ping",), ("ping", "h", "-p", "0"), ("perf", "bw", "--size", "x"), ("bench", "kernels", "extra"),
    ("plan", "--workers", "x"), ("simulate", "--model", "vgg16"), ("simulate", "--model", "vgg16", "-n", "0"),
    ("tune", "rdma", "--budget", "soon"), ("trace", "merge"), ("trace", "summary", "/nowhere"),
    ("top", "--once", "-n", "2"), ("explain",), ("explain", "nothing like it"), ("env", "--set", "x"),
    ("info", "--verbs", "x"), ("report", "/no/log"), ("clean", "--yes", "--dry-run"),
    ("completion", "tcsh"), ("add",), ("add", "/nowhere"), ("version", "2"), ("gids", "-d"), ("dmlc", "--set", "x")])
def test_bad_arguments_are_exit_code_2_without_a_traceback(arguments: tuple[str, ...]) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2, done.output
    assert isinstance(done.exception, SystemExit) and "Traceback" not in done.output and done.output.strip()


@pytest.mark.parametrize("arguments", [
    ("info",), ("explain", "12"), ("explain", "RD18"), ("topo", "--strategy"),
    ("plan", "--workers", "8", "--helpers", "4", "--model", "vgg16", "--compression", "topk:k=0.01"),
    ("compare", str(RESULTS / "ddp.jsonl"), str(RESULTS / "ddp.jsonl"))], ids=lambda arguments: arguments[0])
def test_sentences_and_names_end_where_the_terminal_does(arguments: tuple[str, ...]) -> None:
    if "--strategy" in arguments:
        pytest.importorskip("scipy", reason="scipy is not installed")
    code, shown = on_terminal(arguments, width=80)
    lines = click.unstyle(shown).splitlines()
    assert code == 0 and len(lines) > 3
    assert not [line for line in lines if len(line) > 80]


@pytest.mark.parametrize("group", ["bench", "perf", "trace", "tune"])
def test_no_command_s_sentence_is_cut(group: str) -> None:
    shown = invoke(group, "--help").output
    assert "..." not in shown.partition("Commands:")[2] and max(map(len, shown.splitlines())) <= 80


def test_a_bench_that_is_refused_leaves_no_result_file(tmp_path: Path) -> None:
    kept, new = tmp_path / "kept.jsonl", tmp_path / "new.jsonl"
    kept.write_text("of a former run\n")
    for path in (kept, new):
        done = invoke("bench", "push_pull", "--sizes", "x", "--json", str(path))
        assert done.exit_code == 2 and "no size" in done.output
    assert list(tmp_path.iterdir()) == [kept] and kept.read_text() == "of a former run\n"


@pytest.mark.parametrize("arguments", [("push_pull", "--json"), ("ladder", "--json"), ("saturation", "--plot")])
def test_a_result_file_that_cannot_be_written_is_refused_before_measuring(arguments: tuple[str, ...],
                                                                          tmp_path: Path) -> None:
    done = invoke("bench", *arguments, str(tmp_path / "none" / "x.png"))
    assert done.exit_code == 2 and "cannot be written: No such file or directory" in done.output


@pytest.mark.parametrize(("arguments", "schema"), [
    (("version",), schemas.Version), (("env",), list[SettingRow]), (("info",), inventory.Inventory),
    (("info", "--effective"), list[SettingRow]), (("explain", "RD05"), list[schemas.Explanation]),
    (("plan", "--workers", "3", "--helpers", "1", "--model", "vgg16"), schemas.Plan),
    (("simulate", "--model", "vgg16", "-n", "2", "-k", "1"), schemas.Simulated), (("topo",), Topology),
    (("run", "-n", "2", "--helpers", "1", "--dry-run", "--", "x"), schemas.Started),
    (("run", "-H", "here,there:2", "--dry-run", "--", "x"), schemas.Started), (("clean",), schemas.Left)])
def test_json_is_by_its_schema(arguments: tuple[str, ...], schema: Any) -> None:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    done = invoke(*arguments[:at], "--json", *arguments[at:])
    assert done.exit_code in (0, 1 if arguments == ("clean",) else 0), done.output
    assert msgspec.json.decode(done.stdout, type=schema, strict=True)


@pytest.mark.parametrize(("arguments", "schema", "code"), [
    (("devices",), schemas.Devices, 0), (("gids",), list[schemas.Gid], 0), (("doctor",), schemas.Doctor, 1),
    (("topo", "--strategy"), schemas.Strategy, 0), (("topo", "--cores"), schemas.Cores, 0), (("topo",), Topology, 0)])
def test_json_of_a_recorded_machine_is_by_its_schema(arguments: tuple[str, ...], schema: Any, code: int,
                                                     recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("dgx1" if "--strategy" in arguments else "mlx5_roce")
    done = invoke(*arguments, "--root", str(machine.root), "--json")
    assert done.exit_code == code, done.output
    assert msgspec.json.decode(done.stdout, type=schema, strict=True)


def test_json_of_files_and_hosts_is_by_its_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_job(tmp_path)
    merged = invoke("trace", "merge", str(tmp_path), "--json")
    assert merged.exit_code == 0 and msgspec.json.decode(merged.stdout, type=schemas.Merged).processes > 1
    summed_up = invoke("trace", "summary", str(tmp_path), "--json")
    assert summed_up.exit_code == 0
    assert msgspec.json.decode(summed_up.stdout, type=measurement_schemas.TraceSummary).ranks
    pinged = invoke("ping", "127.0.0.1", "-p", "9", "--wait", "0.2", "--json")
    assert pinged.exit_code == 1 and msgspec.json.decode(pinged.stdout, type=list[schemas.Pinged])[0].error
    monkeypatch.setattr(bug_report, "_command", lambda *arguments: {})
    reported = invoke("report", "--dry-run", "--json")
    assert reported.exit_code == 0 and msgspec.json.decode(reported.stdout, type=schemas.Report).files


@pytest.mark.parametrize("arguments", [("devices",), ("env",), ("info", "--effective"), ("topo",), ("explain", "RD05"),
                                       ("plan", "--workers", "2", "--model", "vgg16")])
def test_where_nobody_may_write_is_exit_code_3_and_said_in_json_too(arguments: tuple[str, ...]) -> None:
    done = invoke(*arguments, "-o", "/sys/kernel/refused.json", "--json")
    assert done.exit_code == 3 and "/sys/kernel/refused.json" in done.stderr
    assert msgspec.json.decode(done.stdout, type=schemas.Error).error.kind == "PermissionError"


@pytest.mark.parametrize(("package", "arguments"), [
    ("matplotlib", ("bench", "saturation", "--plot", "x.png")), ("torch", ("bench", "ddp")),
    ("prometheus_client", ("top", "127.0.0.1:1")), ("sklearn", ("bench", "accuracy", "--quick"))])
def test_what_is_not_installed_is_exit_code_3(package: str, arguments: tuple[str, ...],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    done = invoke(*arguments)
    assert done.exit_code == 3 and "pip install" in done.stderr and "LackingError" in done.stderr, done.output


def test_without_root_what_needs_it_is_refused_in_words_and_the_rest_works() -> None:
    other = ["unshare", "--user"] if os.geteuid() == 0 else []  # nobody's capabilities, and still the owner of files
    if other and (shutil.which("unshare") is None or subprocess.run([*other, "true"], check=False).returncode):
        pytest.skip("this root cannot put its rights down: no user namespaces")
    for arguments, code, words in ((("info", "--json"), 0, '"transports"'), (("clean", "--dry-run"), 0, ""),
                                   (("run", "--netns", "--", "true"), 3, "network namespaces need root")):
        done = subprocess.run([*other, sys.executable, "-m", "bpsfast", *arguments], capture_output=True, text=True,
                              timeout=60, check=False)
        assert done.returncode == code and words in done.stdout + done.stderr, done


def test_shells_complete_commands_and_settings() -> None:
    for shell in ("bash", "zsh", "fish"):
        assert "_BPSFAST_COMPLETE" in invoke("completion", shell).output
    if shutil.which("bash"):
        script = invoke("completion", "bash").output
        asked = 'COMP_WORDS=(bpsfast node --set tcp); COMP_CWORD=3; _bpsfast_completion "$0"; echo "${COMPREPLY[@]}"'
        place = str(Path(sys.executable).with_name("bpsfast"))
        done = subprocess.run(["bash", "-c", f"{script}\n{asked}", place], capture_output=True, text=True, timeout=60,
                              check=True)
        assert done.stdout.split() == ["tcp_streams=", "tcp_sndbuf_bytes="], done
