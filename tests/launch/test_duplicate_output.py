"""Tests what a launcher shows of repeated error lines: piece by piece, and in whole jobs."""
from __future__ import annotations

import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from bpsfast.base import logs
from bpsfast.launch.output import DuplicateOutput, Output, StreamFilter

_BLAME = b"bpsfast.PeerLostError: rank 2 is lost: KeyError: 'x' (ended in train.py, line 3)"


def traceback(error: str, n_calls: int = 4) -> list[bytes]:
    return [b"Traceback (most recent call last):", b'  File "train.py", line 3, in <module>', b"    step()",
            b"  [%d calls within bpsfast: BPSFAST_LOG_LEVEL=DEBUG shows them]" % n_calls, error.encode()]


def test_a_traceback_is_shown_whole_and_once():
    duplicates = DuplicateOutput(wanted=True)
    first, second = StreamFilter("rank 0", duplicates), StreamFilter("rank 1", duplicates)
    lines = traceback("bpsfast.StallError: rank 0 waited 4 s: missing: rank 2")
    others = traceback("bpsfast.StallError: rank 1 waited 4.01 s: missing: rank 2", n_calls=8)
    assert first.take(lines[:3]) == second.take(others[:2]) == []
    assert first.take([*lines[3:], b"a last word"]) == [lines, [b"a last word"]]
    assert second.take([*others[2:], b"another"]) == [
        [b"the traceback of rank 0, too: bpsfast.StallError"], [b"another"]]
    assert first.take(lines) == [lines], "one process may show the same again: it is what it does"


@pytest.mark.parametrize("error", ["bpsfast.StallError: rank 1 waited 4 s: missing: rank 3", "KeyError: 0"])
def test_another_reason_is_shown(error):
    duplicates = DuplicateOutput(wanted=True)
    StreamFilter("rank 0", duplicates).take(traceback("bpsfast.StallError: rank 0 waited 4 s: missing: rank 2"))
    assert StreamFilter("rank 1", duplicates).take(traceback(error)) == [traceback(error)]


def test_of_a_chain_that_is_known_nothing_is_left_over():
    chain = [*traceback("KeyError: 'x'"), b"", b"The above exception was the direct cause of the following exception:",
             b"", *traceback("ValueError: boom")]
    duplicates = DuplicateOutput(wanted=True)
    assert [*itertools.chain.from_iterable(StreamFilter("rank 0", duplicates).take(chain))] == chain
    assert StreamFilter("rank 1", duplicates).take([*chain, b"", b"more"])[-2:] == [
        [b"the traceback of rank 0, too: ValueError"], [b"more"]]


def test_what_begins_like_a_traceback_and_is_none_is_shown():
    stream_filter = StreamFilter("rank 0", DuplicateOutput(wanted=True))
    begun = traceback("")[:-1]
    assert stream_filter.take(begun) == [] and stream_filter.finish() == [begun] and stream_filter.finish() == []
    endless = [begun[0], *[b"  x"] * 5000]
    assert [*itertools.chain.from_iterable(stream_filter.take(endless))] == endless, "and is not waited for without end"


@pytest.mark.parametrize("line", [
    _BLAME, b"2026-01-31T09:30:00.123+01:00 pid=1 job=- bpsfast node 1 WARNING: " + logs.ABORTED.encode() + b"X: y"])
def test_consequences_are_kept_back_and_may_be_released(line):
    duplicates = DuplicateOutput(wanted=True)
    stream_filter = StreamFilter("rank 0", duplicates)
    assert stream_filter.take([line, b"x"]) == [[b"x"]] and stream_filter.has_withheld
    assert stream_filter.release() == [[line]] and not stream_filter.has_withheld and stream_filter.release() == []
    assert StreamFilter("rank 0", DuplicateOutput(wanted=False)).take([line]) == [[line]]


def test_a_rank_that_a_stopped_scheduler_ends_is_one():
    block = traceback("bpsfast.orchestration.errors.ClosedError: the scheduler got SIGTERM")
    stream_filter = StreamFilter("rank 0", DuplicateOutput(wanted=True))
    assert stream_filter.take(block) == [] and stream_filter.has_withheld
    assert stream_filter.release() == [[line] for line in block]
    own = traceback("bpsfast.orchestration.errors.ClosedError: bpsfast is not running in this process")
    assert stream_filter.take(own) == [own] and not stream_filter.has_withheld


def test_names_are_put_together():
    duplicates = DuplicateOutput(wanted=True)
    for name in ("rank 3", "rank 0", "rank 1", "node 1", "scheduler"):
        StreamFilter(name, duplicates).take([_BLAME])
    assert duplicates.withheld_names() == "scheduler, node 1, ranks 0-1, 3"


def concluded(level: str) -> list[str]:
    """Return what is shown of a cause that blames somebody whom this launcher has not started."""
    logs.configure(level)
    err = io.BytesIO()
    output = Output(io.BytesIO(), err)
    streams = [output.streams(f"rank {i}")[1] for i in range(2)]
    for stream in streams:
        stream.feed(_BLAME + b"\n")
        stream.finish()
    output.say_cause("rank 0 failed first: it ended with exit code 1", [_BLAME], streams[0])
    return err.getvalue().decode().splitlines()


def test_a_cause_that_was_kept_back_is_shown_in_the_end():
    said = concluded("WARNING")
    assert said[:2] == ["[bpsfast run] rank 0 failed first: it ended with exit code 1. Its last output:",
                        _BLAME.decode()]
    assert said[2].startswith("[bpsfast run] rank 1 ended because of that") and len(said) == 3


def test_a_lower_level_shows_everything_at_once():
    said = concluded("INFO")
    assert said[:2] == [f"[rank {i}] {_BLAME.decode()}" for i in range(2)]
    assert said[2:] == ["[bpsfast run] rank 0 failed first: it ended with exit code 1: " + _BLAME.decode()]


def test_in_json_a_traceback_is_one_object():
    logs.configure("WARNING", form="json")
    err = io.BytesIO()
    stream = Output(io.BytesIO(), err).streams("rank 1")[1]
    stream.feed(b"\n".join([*traceback("KeyError: 0"), _BLAME]) + b"\n")
    first, second = map(json.loads, err.getvalue().splitlines())
    assert first["message"].encode() == b"\n".join(traceback("KeyError: 0")) and first["rank"] == 1
    assert second["message"] == _BLAME.decode()


# -- whole jobs ----------------------------------------------------------------------------------------------------

_TRAIN = """
import bpsfast, numpy as np, os, sys, time
bpsfast.init()
rank, fault = bpsfast.rank(), sys.argv[1]

def step(i):
    x = np.ones(8 + (fault == "mismatch" and rank == 2), "c8" if fault == "argument" else "f4")
    if rank == 2 and i == 3:
        if fault == "raise":
            raise ValueError("my own mistake")
        if fault == "exit":
            sys.exit(7)
        if fault == "kill":
            os.kill(os.getpid(), 9)
        if fault == "stall":
            time.sleep(600)
    bpsfast.push_pull(x, name="x")
    if i == 1 and rank == 0:
        print("up", flush=True)

i = 0
while True:
    step(i)
    i += 1
"""


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(_TRAIN)
    return str(path)


def launch(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `bpsfast run` and return how it ended."""
    return subprocess.run([sys.executable, "-m", "bpsfast", "run", *arguments], env={**os.environ, **variables},
                          capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize("fault, code, reason, summary", [
    ("raise", 1, "ValueError: my own mistake", "rank 2 failed first: it ended with exit code 1: ValueError: my own"),
    ("exit", 7, "StallError: rank \\d waited .*: has called shutdown",
     "rank 2 failed first: it ended with exit code 7"),
    ("kill", 137, "", "rank 2 failed first: it was killed by SIGKILL"),
    ("stall", 1, "StallError: rank \\d waited .* has not pushed",
     r"rank \d failed first: it ended with exit code 1: bpsfast\.orchestration\.errors\.StallError: rank \d waited "),
    ("argument", 1, "UnsupportedError: dtype complex64",
     r"rank \d failed first: it ended with exit code 1: bpsfast\.orchestration\.errors\.UnsupportedError: dtype c"),
    ("mismatch", 1, "MismatchError: tensor 'x': shape differs",
     r"rank \d failed first: it ended with exit code 1: bpsfast\.orchestration\.errors\.MismatchError: tensor 'x'"),
])
def test_one_fault_is_told_once(train, fault, code, reason, summary):
    done = launch("-n", "4", "--nodes", "2", "--", sys.executable, train, fault, BPSFAST_TIMEOUT_S="3",
                  BPSFAST_STALL_WARN_S="0")
    assert done.returncode == code, done.stderr
    lines = done.stderr.splitlines()
    by_launcher = [line for line in lines if line.startswith("[bpsfast run] ")]
    assert re.match(r"\[bpsfast run\] " + summary, by_launcher[0]) and len(by_launcher) <= 2, done.stderr
    told = [line for line in lines if line not in by_launcher]
    assert not [line for line in told if not line.startswith("[rank ")], "nodes and scheduler say nothing"
    assert sum("Traceback" in line for line in told) == (1 if reason else 0), done.stderr
    assert sum(bool(re.search(reason, line)) for line in told) == (1 if reason else 0), done.stderr
    if fault != "raise" and reason:  # the program's calls, and none of ours
        files = [line for line in told if 'File "' in line]
        assert files and all(train in line for line in files), done.stderr


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_end_that_was_asked_for_is_no_fault(train, number):
    with subprocess.Popen([sys.executable, "-m", "bpsfast", "run", "-n", "2", "--nodes", "2", "--helpers", "1", "--",
                           sys.executable, train, "none"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as launcher:
        assert launcher.stdout.readline() == "[rank 0] up\n"
        launcher.send_signal(number)
        err = launcher.stderr.read()
        assert launcher.wait(30.0) == 128 + number
    first = "[bpsfast run] got SIGTERM: the ranks have 30 s to end\n" if number == signal.SIGTERM else ""
    assert err == f"{first}[bpsfast run] got {number.name}: ending all processes\n"


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_neither_is_a_time_out(train):
    done = launch("-n", "2", "--timeout", "5", "--", sys.executable, train, "none")
    assert done.returncode == 124
    assert done.stderr == "[bpsfast run] the job has not ended within 5 s: ending all processes\n"


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize("text, code, words", [
    ("print(1)", 0, r"no rank has joined the job \(bpsfast.init\): ending scheduler, node 0"),
    ("raise SystemExit(3)", 3, "failed first: it ended with exit code 3")])
def test_a_program_that_never_imports_bpsfast(text, code, words):
    done = launch("-n", "2", "--", sys.executable, "-c", text)
    assert done.returncode == code
    assert re.fullmatch(rf"\[bpsfast run\] .*{words}.*\n", done.stderr), done.stderr


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_without_our_launcher_the_traceback_is_the_program_s_own(train):
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("BPSFAST_", "DMLC_"))}
    done = subprocess.run([sys.executable, train, "argument"], env=alone, capture_output=True, text=True, timeout=60,
                          check=False)
    assert done.returncode == 1 and "calls within bpsfast" not in done.stderr
    assert done.stderr.startswith("Traceback") and "in push_pull" in done.stderr
    assert done.stderr.count("UnsupportedError: dtype complex64") == 1, done.stderr
