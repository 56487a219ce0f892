"""Checks the shell lines of pages without a second machine, with the real parser of each command or its files.

`check(line, tags)` raises an error for a line that cannot work. An unknown command is an error, so every line is
checked.
"""
from __future__ import annotations

import argparse
import configparser
import functools
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import yaml
from click.testing import CliRunner

from bpsfast.base import byteps_variables, settings
from bpsfast.cli import cli
from tests.support.doc_pages import ROOT

#: Commands without effects or other machines, which are run here, with exit codes (doctor reports missing things).
_RUN_HERE = {"completion": {0}, "devices": {0, 3}, "doctor": {0, 1, 3}, "env": {0}, "explain": {0}, "gids": {0, 3},
             "info": {0}, "plan": {0}, "simulate": {0}, "topo": {0}, "version": {0}}
#: Files that pages save or assume: the reader's program.
_READERS_FILES = {"train.py"}
_VARIABLE = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)", re.S)
_SUBSTITUTED = re.compile(r"\$\([^)]*\)")
_BYTEPS = {*byteps_variables.ALIASES, *byteps_variables.ROLE_VARIABLES, *byteps_variables.NO_EFFECT}
_SETTINGS = {row.variable: row for row in settings.table()}


def lines(text: str) -> list[str]:
    """Return the commands of a block; joins lines that end in a backslash, and skips comments."""
    joined = text.replace("\\\n", " ").splitlines()
    return [line for line in joined if line.strip() and not line.lstrip().startswith("#")]


def check(line: str, tags: set[str]) -> None:
    """Check one command; *tags* are the docker images of earlier lines; adds new ones."""
    _check(shlex.split(_SUBSTITUTED.sub("$", line), comments=True), tags)


def _check(words: Sequence[str], tags: set[str]) -> None:
    words = list(words)
    while words and (match := _VARIABLE.fullmatch(words[0])):
        _variable(match[1], match[2])
        words.pop(0)
    assert words, "nothing is run"
    command, *rest = words
    if command == "docker":
        _docker(rest, tags)
        return
    checks: dict[str, Callable[[list[str]], None]] = {
        "bpsfast": _bpsfast, "export": _export, "kubectl": _kubectl, "make": _make, "mpirun": _mpirun,
        "nohup": lambda inner: _check(inner, tags), "pip": _pip, "python": _python, "srun": _srun,
        "torchrun": _torchrun, ".": _source,
    }
    assert command in checks, f"nothing checks {command!r}"
    checks[command](rest)


def _variable(name: str, value: str) -> None:
    """Check that bpsfast reads the variable, and its value unless it is a placeholder."""
    if name.startswith(settings.PREFIX):
        assert name in _SETTINGS, f"{name} is no setting"
        if value and not value.startswith(("...", "$")):
            settings.load_with_origins(environ={name: value})
    elif name.startswith(("BYTEPS_", "DMLC_", "PS_")):
        assert name in _BYTEPS, f"{name} is no variable of BytePS's"
    else:
        assert name in ("SEEDS", "MINUTES", "KERAS_BACKEND"), f"nothing is known of {name}"


def _export(words: list[str]) -> None:
    for word in words:
        match = _VARIABLE.fullmatch(word)
        assert match is not None, word
        _variable(match[1], match[2])


def _bpsfast(words: list[str]) -> None:
    """Parse with the real command; run commands without effects, and `run` with --dry-run."""
    name = words[0]
    if name in _RUN_HERE and "--listen" not in words and "--peer" not in words:
        _invoke(words, _RUN_HERE[name])
    elif name == "run" and "--dry-run" not in words:
        _parse(words)
        if "--control" not in words and "--elastic" not in words:
            _invoke(["run", "--dry-run", *words[1:]], {0})
    else:
        _parse(words)
    if "--" in words:
        _check(words[words.index("--") + 1:], set())


def _invoke(words: Sequence[str], codes: set[int]) -> None:
    done = CliRunner().invoke(cli, list(words))
    assert done.exit_code in codes and done.output, f"exit code {done.exit_code}: {done.output[-400:]} {done.exception}"


def _parse(words: Sequence[str]) -> None:
    """Let click parse the words of a command and its subcommands, without running them."""
    command, name, rest = cli, "bpsfast", list(words)
    parent: click.Context | None = None
    while True:
        context = command.make_context(name, rest, parent=parent)
        if not isinstance(command, click.Group):
            return
        rest = [*context._protected_args, *context.args]
        if not rest:
            return
        name_, found, rest = command.resolve_command(context, rest)
        assert found is not None, f"{name} has no {rest}"
        command, name, parent = found, str(name_), context


def _python(words: list[str]) -> None:
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None, f"there is no module {words[1]}"
        if words[1] == "bpsfast.byteps_alias":
            _file(words[2])
    else:
        _file(words[0])


def _file(name: str) -> None:
    assert name in _READERS_FILES or (ROOT / name).exists(), f"{name} is not there"


def _torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    _file(get_args_parser().parse_args(words).training_script)


def _make(words: list[str]) -> None:
    command = ["make", "--dry-run", "--no-print-directory", "-C", str(ROOT), f"PYTHON={sys.executable}", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@functools.cache
def extras() -> frozenset[str]:
    """Return the extras of the package."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return frozenset(config["options.extras_require"])


def _pip(words: list[str]) -> None:
    assert words[0] == "install" and len(words) == 2, words
    match = re.fullmatch(r"(?:\.|bpsfast)(?:\[([\w,]+)\])?", words[1])
    assert match is not None, words[1]
    assert set(filter(None, (match[1] or "").split(","))) <= extras(), f"{words[1]}: there are {sorted(extras())}"


def _source(words: list[str]) -> None:
    assert words == [".venv/bin/activate"], words


def _launched(words: list[str], *options: tuple[str, ...]) -> argparse.Namespace:
    """Check the line of another launcher: options that pages use, then a program."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    for names in options:
        parser.add_argument(*names, action="append")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    found = parser.parse_args(words)
    _check(found.program, set())
    return found


def _srun(words: list[str]) -> None:
    found = _launched(words, ("--nodes",), ("--ntasks",))
    assert int(found.ntasks[0]) % int(found.nodes[0]) == 0, f"{found.ntasks} tasks on {found.nodes} nodes"


def _mpirun(words: list[str]) -> None:
    found = _launched(words, ("-np",), ("--host",), ("-x",))
    given = found.x or []
    _export([each for each in given if "=" in each])
    for name in given:
        _variable(name.partition("=")[0], "")
    if found.host:
        assert "BPSFAST_JOB_KEY" in given, "a job over several machines needs a key"
        slots = sum(int(host.partition(":")[2]) for host in found.host[0].split(","))
        assert slots == int(found.np[0]), f"{found.np} ranks on {slots} slots"


def _kubectl(words: list[str]) -> None:
    assert words[:2] == ["apply", "-f"] and len(words) == 3, words
    for document in yaml.safe_load_all((ROOT / words[2]).read_text()):
        assert {"apiVersion", "kind", "metadata"} <= set(document), f"{words[2]}: {document}"


def _docker(words: list[str], tags: set[str]) -> None:
    """Check `docker build -f FILE -t TAG .`, or `docker run OPTIONS TAG COMMAND` with a tag built before."""
    if words[0] == "build":
        file, tag, folder = words[words.index("-f") + 1], words[words.index("-t") + 1], words[-1]
        assert len(words) == 6 and folder == "." and Path(ROOT / file).is_file(), words
        tags.add(tag)
        return
    assert words[0] == "run", words
    (at,) = [index for index, word in enumerate(words) if word in tags]
    parser = argparse.ArgumentParser(exit_on_error=False)
    for flag in ("--rm", "-it"):
        parser.add_argument(flag, action="store_true")
    for option in ("--shm-size", "-v", "--gpus", "--network", "--ulimit", "--cap-add", "--device", "-e"):
        parser.add_argument(option, action="append")
    parser.parse_args(words[1:at])
    _check(words[at + 1:], tags)
