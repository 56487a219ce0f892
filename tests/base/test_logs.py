"""Tests log lines: both formats, and how a launcher shows them."""
from __future__ import annotations

import contextlib
import datetime
import io
import json
import logging
import os
import re
import subprocess
import sys

import pytest

from bpsfast.base import logs
from bpsfast.launch.output import Output

log = logging.getLogger("bpsfast.node")
_JOB = "0123456789abcdef"
_TEXT = (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d pid=(\d+) job=(\S+) bpsfast( \w+(?: \d+)?)? "
         r"(DEBUG|INFO|WARNING|ERROR): (.*)")
_TRAIN = """
import bpsfast, logging, numpy
bpsfast.init()
print("hello")
bpsfast.push_pull(numpy.ones(4, "f4"), name="x")
logging.getLogger("bpsfast.test").warning("rank's own words")
bpsfast.shutdown()
"""


@pytest.fixture
def configure(monkeypatch):
    """Configure logging as in a process of its own; return what returns the lines that are written then."""

    def begin(*arguments):
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own
        logs.configure(*arguments)
        return stream.getvalue

    return begin


def test_a_line_of_text_says_when_which_process_which_job_who_and_how_bad(configure):
    written = configure("INFO", "node")
    log.info("before the job has a name")
    logs.set_identity("node 1", _JOB)
    log.error("%s is lost", "rank 2")
    first, second = written().splitlines()
    assert re.fullmatch(_TEXT, first).groups() == (str(os.getpid()), "-", " node", "INFO", "before the job has a name")
    assert re.fullmatch(_TEXT, second).groups() == (str(os.getpid()), "01234567", " node 1", "ERROR", "rank 2 is lost")
    age = datetime.datetime.now().astimezone() - datetime.datetime.fromisoformat(second.split()[0])
    assert abs(age) < datetime.timedelta(minutes=1)


def test_a_line_of_json_says_the_same_and_the_exception(configure):
    written = configure("INFO", "helper", "json")
    logs.set_identity(job=lambda: _JOB)
    log.info("naïve\nline")
    logs.set_identity("helper 3")
    try:
        raise ValueError("boom")
    except ValueError:
        log.exception("it failed")
    lines = written().splitlines()
    first, second = map(json.loads, lines)
    assert all(logs.is_json_line(line.encode()) for line in lines)
    ts = datetime.datetime.fromisoformat(first.pop("ts"))
    assert ts.tzinfo is not None
    assert first == {"level": "INFO", "logger": "bpsfast.node", "pid": os.getpid(), "role": "helper", "job": _JOB,
                     "message": "naïve\nline"}
    assert second["role"] == "helper" and second["helper"] == 3 and second["message"] == "it failed"
    assert second["exception"].startswith("Traceback") and second["exception"].endswith("ValueError: boom")


def test_a_program_with_logging_of_its_own_keeps_it(monkeypatch, capsys):
    theirs = logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(logging.getLogger(), "handlers", [theirs])
    logs.configure("INFO", "rank 0", "json")
    log.info("once, and as the program has it")
    assert theirs.stream.getvalue() == "once, and as the program has it\n"
    assert capsys.readouterr().err == "" and not logging.getLogger("bpsfast").handlers


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("message, is_one", [
    ("PeerLostError: rank 2 is lost", True), (logs.ABORTED + "StallError: rank 1 is missing", True),
    ("StallError: the peers say PeerLostError", False), ("ConfigError: x", False)])
def test_a_consequence_is_known_in_both_formats(configure, form, message, is_one):
    written = configure("INFO", "node 2", form)
    log.warning(message)
    assert bool(re.match(logs.CONSEQUENCE, written().encode())) == is_one


def shown(form: str, *lines: str, name: str = "node 1", **options: bool) -> list[str]:
    """Return what a launcher shows of *lines* on the standard error of process *name*."""
    logs.configure("WARNING", "launcher", form)
    err = io.BytesIO()
    with contextlib.closing(Output(io.BytesIO(), err, **options)) as output:
        output.streams(name)[1].feed("".join(line + "\n" for line in lines).encode())
        output.say("over")
    return err.getvalue().decode().splitlines()


_HEAD = "2026-01-31T09:30:00.123+01:00 pid=4711 job=3fa9c1d2 "


@pytest.mark.parametrize("name, stamped, expected", [
    ("node 1", False, "[node 1] " + _HEAD + "ERROR: boom"),
    ("node", False, "[node] " + _HEAD + "bpsfast node 1 ERROR: boom"),
    ("worker 1", False, "[worker 1] " + _HEAD + "bpsfast node 1 ERROR: boom"),
    ("node 1", True, r"<now> [node 1] pid=4711 job=3fa9c1d2 ERROR: boom"),
])
def test_a_launcher_says_nothing_twice_in_a_line(name, stamped, expected):
    line, other, said = shown("text", _HEAD + "bpsfast node 1 ERROR: boom", "bpsfast node 1 said this", name=name,
                              stamped=stamped)
    time = r"\d{4}-\d\d-\d\dT[\d:.]{12}[+-]\d\d:\d\d"
    assert re.sub("^" + time, "<now>", line) == expected if stamped else line == expected
    assert other.endswith(f"[{name}] bpsfast node 1 said this")
    assert re.fullmatch((time + " " if stamped else "") + r"\[bpsfast run\] over", said)


def test_a_launcher_shows_json_lines_as_they_are_and_makes_objects_of_others():
    ours = '{"ts": "2026-01-31T09:30:00.123+01:00", "level": "ERROR", "message": "boom"}'
    first, second, third = shown("json", ours, 'print "this"', name="rank 3")
    assert first == ours
    second, third = json.loads(second), json.loads(third)
    assert second.pop("ts") <= third.pop("ts")
    assert second == {"role": "rank", "rank": 3, "stream": "stderr", "message": 'print "this"'}
    assert third == {"level": "INFO", "logger": "bpsfast.launcher", "pid": os.getpid(), "role": "launcher",
                     "message": "over"}


@pytest.mark.slow
def test_a_whole_job_in_json():
    """Each line of both streams is an object; processes of the job say the same job, each its role and process."""
    done = subprocess.run(
        [sys.executable, "-m", "bpsfast", "run", "-n", "2", "--helpers", "1", "--", sys.executable, "-c", _TRAIN],
        env={**os.environ, "BPSFAST_LOG_FORMAT": "json", "BPSFAST_LOG_LEVEL": "INFO"}, capture_output=True, text=True,
        timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    out, err = ([json.loads(line) for line in text.splitlines()] for text in (done.stdout, done.stderr))
    assert sorted((each["rank"], each["message"], each["stream"]) for each in out) == [
        (0, "hello", "stdout"), (1, "hello", "stdout")]
    own = [each for each in err if each.get("logger") == "bpsfast.test"]
    assert sorted((each["role"], each["rank"], each["level"]) for each in own) == [
        ("rank", 0, "WARNING"), ("rank", 1, "WARNING")]
    assert len({each["pid"] for each in own}) == 2
    in_job = [each for each in err if each.get("job")]
    assert len({each["job"] for each in in_job}) == 1
    assert {"rank", "node", "helper"} <= {each["role"] for each in in_job}
    assert {each["helper"] for each in in_job if each["role"] == "helper"} == {0}


def test_an_error_of_the_command_line_has_the_log_s_format():
    command = [sys.executable, "-m", "bpsfast", "node"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("BPSFAST_")}
    text = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert text.returncode == 2 and text.stderr.startswith("bpsfast: ConfigError: the node must know where")
    done = subprocess.run(command, env={**environ, "BPSFAST_LOG_FORMAT": "json"}, capture_output=True, text=True,
                          timeout=60, check=False)
    found = json.loads(done.stderr)
    assert done.returncode == 2 and found["level"] == "ERROR" and found["role"] == "node"
    assert found["message"].startswith("ConfigError: the node must know where the scheduler is")
