"""Strangers on every socket that a running job listens on: its sums stay right, it keeps nothing of theirs, and ends
in order. ``make strangers MESSAGES=1000000`` says a million messages to each kind of socket.
"""
from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest

import bpsfast
from bpsfast.base import reference_sum
from tests.support import listening_sockets, rank_messages, recordings
from tests.support.strangers import Stranger

NAME = "the-name-of-a-tensor"
RANKS = (2, 1)
_N_SILENT = 300
#: What allocators keep. It does not grow with the number of messages: a dozen bytes of each of a million would be seen.
_RSS_SLACK_NBYTES = 12 << 20


def inputs(number):
    """What all ranks push in step *number*."""
    generator = np.random.default_rng(number)
    return [generator.standard_normal(20_000).astype(np.float32) for _ in range(sum(RANKS))]


def train(folder):
    """Sum until there is a file "over" in *folder*; return how many sums were wrong, and how many there were.

    From the third step on there is a file "begun RANK".
    """
    rank, n_wrong, number = bpsfast.rank(), 0, 0
    rank_messages.ring([100, 1 << 20])  # ranks listen from their first message on
    while True:
        arrays = inputs(number)
        found = bpsfast.push_pull(arrays[rank], name=NAME)
        n_wrong += found.tobytes() != reference_sum.reduce([arrays[:2], arrays[2:]], average=True).tobytes()
        number += 1
        if number == 3:
            Path(folder, f"begun {rank}").touch()
        over = bpsfast.push_pull(np.array([Path(folder, "over").exists()], np.float32), name="over", average=False)
        if over[0]:
            rank_messages.ring([100, 1 << 20])
            return n_wrong, number


class Held:
    """Descriptors, threads and resident bytes of *processes*, by name, at one moment."""

    def __init__(self, processes):
        self.counts, self.nbytes = {}, {}
        for name, process in processes.items():
            own = psutil.Process(process.pid)
            self.counts[name] = own.num_fds(), own.num_threads()
            self.nbytes[name] = own.memory_info().rss

    @classmethod
    def settled(cls, processes, before, timeout_s=30.0):
        """Wait until no process has more descriptors or threads than *before*."""
        deadline = time.monotonic() + timeout_s
        while True:
            now = cls(processes)
            if all(a <= b for name in now.counts for a, b in zip(now.counts[name], before.counts[name])):
                return now
            assert time.monotonic() < deadline, f"descriptors and threads: {before.counts} -> {now.counts}"
            time.sleep(0.05)


def strangers_of(processes, job_key):
    """One stranger for each listening socket, with recordings of this job and of another one."""
    everywhere = [each for name, process in processes.items() for each in listening_sockets.of(name, process.pid)]
    [scheduler] = [each for each in everywhere if each.kind == "control"]
    made = {}
    for whose, key in (("own", job_key), ("foreign", secrets.token_bytes(32))):
        made[whose] = {"data": recordings.data(key), "messages": recordings.posts(key), "local": recordings.local(key)}
    made["own"]["control"] = recordings.control(scheduler.address, job_key)
    made["foreign"]["control"] = recordings.foreign_control(scheduler.address)
    return [Stranger(each, made["own"][each.kind], made["foreign"][each.kind], seed)
            for seed, each in enumerate(everywhere)]


def throw(strangers, n):
    """Let each kind of socket hear *n* messages, all sockets at the same time."""
    of_kind = Counter(each.listening.kind for each in strangers)
    errors = []

    def run(each):
        try:
            each.throw(-(-n // of_kind[each.listening.kind]))
        except Exception as exc:
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(each,)) for each in strangers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def stay_silent(strangers, n):
    """Connect to each socket *n* times, say nothing, and stay for a moment in which the job goes on."""
    with contextlib.ExitStack() as stack:
        for each in strangers:
            for _ in range(n):
                try:
                    stack.enter_context(each.listening.call(0.2))
                except OSError:  # refused, or not let in
                    break


@pytest.mark.slow
@pytest.mark.timeout(0)  # as long as it takes for as many messages as were asked for
def test_strangers_change_nothing(job, tmp_path, n_strangers_messages, capfd):
    started = job(ranks=RANKS, transport="tcp", log_level="DEBUG")
    started.begin(train, str(tmp_path))
    processes = {**started.daemons, **{f"rank {i}": process for i, process in enumerate(started.ranks)}}
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("begun *"))) < sum(RANKS):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    strangers = strangers_of(processes, started.key)
    doors = Counter(each.listening.kind for each in strangers)
    assert doors == {"control": 1, "data": 2, "local": 2, "messages": 6}  # of each rank one by tcp, one local
    first = Held(processes)
    throw(strangers, min(n_strangers_messages // 4, 5000))
    before = Held.settled(processes, first)
    began = time.monotonic()
    throw(strangers, n_strangers_messages)
    took_s = time.monotonic() - began
    stay_silent(strangers, _N_SILENT)
    after = Held.settled(processes, before)
    grown = {name: after.nbytes[name] - before.nbytes[name] for name in processes}
    (tmp_path / "over").touch()
    outcomes = [outcome.value for outcome in started.outcomes()]
    said = {kind: dict(sum((each.said for each in strangers if each.listening.kind == kind), Counter()))
            for kind in ("control", "data", "local", "messages")}
    unheard = {f"{each.listening.kind} of {each.listening.owner}": each.n_unheard for each in strangers
               if each.n_unheard}
    captured = capfd.readouterr()
    with capfd.disabled():
        print("\n" + json.dumps({"took_s": round(took_s, 1), "said": said, "unheard": unheard, "steps": outcomes,
                                 "grown_nbytes": grown, "log_nbytes": len(captured.err)}, indent=1))
    assert all(outcome is not None and outcome[0] == 0 and outcome[1] > 5 for outcome in outcomes), outcomes
    assert max(grown.values()) <= _RSS_SLACK_NBYTES, grown
    answers = b"".join(bytes(each.answers) for each in strangers)
    assert NAME.encode() not in answers and started.key not in answers and started.key.hex().encode() not in answers
    assert "Traceback" not in captured.err, captured.err
