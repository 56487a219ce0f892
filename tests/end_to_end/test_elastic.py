"""Elastic jobs, end to end: workers are killed at random points, replaced, added; every sum is replayed by NumPy."""
from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from tests.support.elastic_training import averaged

_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 150
_STEPS = 40


class Ran:
    """What became of an elastic job: exit code, output, and by worker what it wrote."""

    def __init__(self, folder: Path, process: subprocess.Popen[str], out: str, err: str) -> None:
        self.code, self.out, self.err = process.returncode, out, err
        self.said = {int(path.name[6:]): [json.loads(line) for line in path.read_text().splitlines()]
                     for path in folder.glob("worker*")}
        self.weights = {int(path.stem[7:]): np.load(path) for path in folder.glob("weights*.npy")}

    def nodes(self, job: int) -> list[int]:
        """The node of each rank of *job*."""
        found = {said["rank"]: said["node"] for lines in self.said.values() for said in lines
                 if said.get("job") == job and "rank" in said}
        return [found[rank] for rank in sorted(found)]

    def replayed(self, member: int) -> np.ndarray:
        """The weights as NumPy makes them of the steps that *member* has made, the last time each: with the averages of
        those who contributed then.
        """
        job_of: dict[int, tuple[int, list[int]]] = {}
        for lines in self.said.values():  # steps of a commit that *member* was given are in others' lines
            for said in lines:
                if "step" in said:
                    job_of[said["step"]] = max((said["job"], said["members"]), job_of.get(said["step"], (0, [])))
        assert sorted(job_of) == list(range(len(job_of)))
        weights = np.zeros_like(self.weights[member])
        for step, (job, members) in sorted(job_of.items()):
            weights += averaged(self.nodes(job), step, members)
        return weights


class Launched:
    """Starts elastic jobs of `tests.support.elastic_training`, and looks for what they leave behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *options: str, deeds: tuple[str, ...] = (), steps: int = _STEPS) -> subprocess.Popen[str]:
        """Start a job."""
        command = [sys.executable, "-m", "bpsfast", "run", "--elastic", *options, "--",
                   sys.executable, "-m", "tests.support.elastic_training", str(self.folder), str(steps), *deeds]
        environ = {**os.environ, "PYTHONPATH": str(_ROOT), "BPSTEST_MARK": self.mark, "BPSFAST_TIMEOUT_S": "60",
                   "BPSFAST_LOG_LEVEL": "WARNING"}
        self.processes.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                               text=True, cwd=_ROOT))
        return self.processes[-1]

    def ended(self, process: subprocess.Popen[str]) -> Ran:
        """Wait for the end of a job."""
        out, err = process.communicate(timeout=_TIMEOUT_S)
        return Ran(self.folder, process, out, err)

    def run(self, *options: str, deeds: tuple[str, ...] = (), steps: int = _STEPS) -> Ran:
        """Run a job to its end."""
        return self.ended(self.start(*options, deeds=deeds, steps=steps))

    def left(self) -> list[str]:
        """The command lines of processes that belong to these jobs."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (path / "environ").read_bytes():
                    found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
        return [line for line in found if line]


@pytest.fixture
def elastic(tmp_path):
    launched = Launched(tmp_path)
    yield launched
    for process in launched.processes:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=20)
    deadline = time.monotonic() + 20.0
    while launched.left() and time.monotonic() < deadline:
        time.sleep(0.1)  # daemons of a killed worker end a little later
    assert not launched.left(), "left behind"


def check_all(ran: Ran, members: set[int]) -> None:
    """All of *members* have ended with the same weights, which are those of NumPy."""
    assert ran.code == 0, ran.err
    assert set(ran.weights) == members, ran.err
    right = ran.replayed(min(members))
    assert all(found.tobytes() == right.tobytes() for found in ran.weights.values())


@pytest.mark.timeout(200)
@pytest.mark.parametrize("seed", [1, 2])
def test_shrink_goes_on_with_the_averages_of_those_who_are_left(elastic, seed):
    draw = random.Random(seed)
    victim = draw.randrange(3)
    ran = elastic.run("-n", "3", "--nodes", "2" if seed % 2 else "3", "--lost-worker", "shrink",
                      deeds=(f"{victim}@{draw.randrange(5, 30)}+{draw.random() / 50}",))
    check_all(ran, {0, 1, 2} - {victim})
    assert {tuple(lines[-1]["sizes"]) for member, lines in ran.said.items() if member != victim} == {(3, 2)}
    assert f"worker {victim} was killed by SIGKILL: the job goes on without it" in ran.err


@pytest.mark.timeout(200)
@pytest.mark.parametrize("victim", [0, 2])
def test_wait_has_the_bits_of_a_job_that_lost_nobody(elastic, victim):
    draw = random.Random(victim)
    ran = elastic.run("-n", "3", "--nodes", "2", "--lost-worker", "wait",
                      deeds=(f"{victim}@{draw.randrange(5, 30)}+{draw.random() / 50}",))
    check_all(ran, {0, 1, 2, 3} - {victim})
    undisturbed = sum((averaged([0, 0, 1], step) for step in range(1, _STEPS)), averaged([0, 0, 1], 0))
    assert ran.weights[3].tobytes() == undisturbed.tobytes()
    assert ran.said[3][0]["rank"] == victim, "it has the lost one's place"


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("victim", "nodes"), [(0, 1), (2, 1), (1, 2)])
def test_a_job_goes_on_and_the_replacement_joins_without_a_repeated_step(elastic, victim, nodes):
    """Rank 0 has started the scheduler and the node, which stay. The others wait for the replacement in step 30."""
    draw = random.Random(victim)
    ran = elastic.run("-n", "3", "--nodes", str(nodes), "--lost-worker", "wait", "--set", "on_worker_loss=continue",
                      deeds=(f"{victim}@{draw.randrange(5, 25)}+{draw.random() / 50}", "+30"))
    check_all(ran, {0, 1, 2, 3} - {victim})
    assert ran.said[3][0]["rank"] == victim and ran.said[3][0]["job"] == 2, "it has the lost one's rank in the next job"
    for member in {0, 1, 2} - {victim}:
        assert [said["step"] for said in ran.said[member] if "step" in said] == [*range(_STEPS)]
    assert [said["step"] for said in ran.said[3] if "step" in said] == [*range(30, _STEPS)]
    assert f"worker {victim} was killed by SIGKILL: the job goes on without it" in ran.err


@pytest.mark.timeout(200)
def test_a_job_that_goes_on_lets_replacements_in_one_after_another_and_survives_a_loss_of_its_next_job(elastic):
    """Two are lost at once, and a replacement while it joins: the others go on in any case."""
    ran = elastic.run("-n", "4", "--lost-worker", "wait", "--set", "on_worker_loss=continue", "--set", "min_workers=2",
                      deeds=("0&3@8", "4~0.1", "+20"))
    assert ran.code == 0, ran.err
    assert {1, 2} < set(ran.weights), ran.err
    check_all(ran, set(ran.weights))


@pytest.mark.timeout(200)
def test_a_job_that_cannot_go_on_goes_back_to_the_last_commit(elastic):
    """Two of three are lost, and two must be left."""
    ran = elastic.run("-n", "3", "--lost-worker", "wait", "--min-ranks", "2", "--set", "on_worker_loss=continue",
                      deeds=("1&2@8",))
    assert ran.code == 0, ran.err
    assert 0 in ran.weights and ran.said[0][-1]["sizes"][:1] == [3] and ran.nodes(2), "there was another job"
    check_all(ran, set(ran.weights))


@pytest.mark.timeout(200)
def test_two_losses_in_a_row_and_one_while_the_next_job_is_formed(elastic):
    ran = elastic.run("-n", "4", "--nodes", "1", "--lost-worker", "shrink",
                      deeds=("3@5+0.002", "1%1+0.3", "0@20+0.01"))
    check_all(ran, {2})
    assert ran.said[2][-1]["sizes"][-1] == 1


@pytest.mark.timeout(200)
def test_a_replacement_and_a_survivor_are_lost_too(elastic):
    ran = elastic.run("-n", "2", "--nodes", "2", "--lost-worker", "wait", deeds=("1@6+0.001", "2@9+0", "0@15+0.003"))
    check_all(ran, {3, 4})
    undisturbed = sum((averaged([0, 1], step) for step in range(1, _STEPS)), averaged([0, 1], 0))
    assert ran.weights[4].tobytes() == undisturbed.tobytes()


@pytest.mark.timeout(200)
def test_another_one_is_lost_while_the_first_is_replaced(elastic):
    ran = elastic.run("-n", "3", "--nodes", "2", "--lost-worker", "wait", deeds=("1@6+0.002", "0%1+0.2"))
    check_all(ran, {2, 3, 4})
    undisturbed = sum((averaged([0, 0, 1], step) for step in range(1, _STEPS)), averaged([0, 0, 1], 0))
    assert ran.weights[2].tobytes() == undisturbed.tobytes()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("policy", ["shrink", "wait"])
def test_a_state_of_the_programs_own_goes_with_the_training(elastic, policy):
    ran = elastic.run("-n", "3", "--nodes", "2", "--lost-worker", policy, deeds=("own", "0@9+0.001"))
    check_all(ran, {1, 2} if policy == "shrink" else {1, 2, 3})


@pytest.mark.timeout(200)
def test_fewer_than_min_ranks_is_an_error_on_each_of_them(elastic):
    ran = elastic.run("-n", "3", "--nodes", "1", "--lost-worker", "shrink", "--min-ranks", "3", "--within", "3",
                      deeds=("1@9+0",))
    assert ran.code == 1 and not ran.weights
    text = "no quorum: 2 ranks have come within 3 s, min_ranks is 3 (rank 1 (worker 1) was killed by SIGKILL)"
    assert f"no further job: {text}" in ran.err
    for member in (0, 2):
        assert any(f"[worker {member}]" in line and (line.rstrip().endswith(f"StallError: {text}") or (
            " the traceback of worker " in line and line.rstrip().endswith("StallError")))
            for line in ran.err.splitlines()), ran.err


@pytest.mark.timeout(200)
@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_one_of_two_newcomers_is_lost_before_it_has_joined(elastic, seconds):
    control = elastic.folder / "control"
    process = elastic.start("-n", "2", "--nodes", "2", "--max-ranks", "4", "--control", str(control),
                            "--lost-worker", "shrink", deeds=("+7", f"2~{seconds}"))
    deadline = time.monotonic() + 60.0
    while not (elastic.folder / "add").exists():
        assert time.monotonic() < deadline and process.poll() is None, "step 7 was not begun"
        time.sleep(0.02)
    command = [sys.executable, "-m", "bpsfast", "add", "-n", "2", str(control)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [each.communicate(timeout=60) for each in both]
    assert sorted(out for out, _ in said) == ["0 workers are started\n", "2 workers are started\n"], said
    ran = elastic.ended(process)
    check_all(ran, {0, 1, 3})
    assert "worker 2 was killed by SIGKILL: the job goes on without it" in ran.err
    assert ran.said[0][-1]["sizes"][-1] == 3


@pytest.mark.timeout(200)
def test_a_worker_is_added_at_a_step(elastic):
    control = elastic.folder / "control"
    process = elastic.start("-n", "2", "--nodes", "2", "--max-ranks", "3", "--control", str(control), deeds=("+7",))
    deadline = time.monotonic() + 60.0
    while not (elastic.folder / "add").exists():
        assert time.monotonic() < deadline and process.poll() is None, "step 7 was not begun"
        time.sleep(0.02)
    assert control.stat().st_mode & 0o777 == 0o600
    command = [sys.executable, "-m", "bpsfast", "add", "-n", "2", str(control)]
    added = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (added.returncode, added.stdout) == (1, "1 worker is started\n")
    assert "1 of 2 workers were started: 2 workers run, and the job may have 3 (--max-ranks)" in added.stderr
    ran = elastic.ended(process)
    check_all(ran, {0, 1, 2})
    assert [lines[-1]["sizes"] for _, lines in sorted(ran.said.items())] == [[2, 3], [2, 3], [3]]
    assert not control.exists()


@pytest.mark.timeout(200)
def test_no_quorum_is_an_error_in_words(elastic):
    ran = elastic.run("-n", "3", "--nodes", "3", "--lost-worker", "shrink", deeds=("0&1@9",))
    assert ran.code == 1 and not ran.weights
    assert "no further job: no quorum: " in ran.err
    assert "ranks are left on 1 of 3 nodes, which with the launcher are 2 of 4 voters, and more than half" in ran.err
    assert "PeerLostError: no quorum: " in ran.err, "the survivor raises it"


@pytest.mark.timeout(200)
def test_when_all_are_lost_the_launcher_says_so(elastic):
    ran = elastic.run("-n", "2", "--lost-worker", "wait", deeds=("0&1@9",))
    assert ran.code == 1 and "nobody is left who has the state" in ran.err


@pytest.mark.timeout(200)
def test_the_last_one_is_lost_long_after_the_others(elastic):
    ran = elastic.run("-n", "2", "--lost-worker", "shrink", deeds=("1@5+0", "0@20+0"))
    assert ran.code == 1 and not ran.weights and "no further job: no quorum: " in ran.err


@pytest.mark.timeout(200)
def test_an_exception_of_the_program_ends_the_job_by_default(elastic):
    begin = time.monotonic()
    ran = elastic.run("-n", "2", deeds=("1!9",))
    assert ran.code == 1 and not ran.weights
    said = ran.err.rstrip().splitlines()  # last, if anything, who has ended because of that
    assert any(line.endswith("ValueError: a bug of the user") for line in said[-2:]), ran.err
    assert "is started" not in ran.err and time.monotonic() - begin < 100


@pytest.mark.timeout(200)
@pytest.mark.parametrize("policy", ["shrink", "wait"])
def test_a_worker_that_raises_is_lost_as_one_that_is_killed(elastic, policy):
    ran = elastic.run("-n", "3", "--nodes", "2", "--lost-worker", policy, deeds=("1!9",))
    check_all(ran, {0, 2} if policy == "shrink" else {0, 2, 3})
    assert "worker 1 ended with exit code 1: the job goes on without it" in ran.err
    assert "ValueError: a bug of the user" in ran.err


@pytest.mark.timeout(200)
@pytest.mark.parametrize("policy", ["shrink", "wait"])
def test_a_worker_that_hangs_is_ended_and_counts_as_lost(elastic, policy):
    ran = elastic.run("-n", "3", "--nodes", "2", "--lost-worker", policy, "--within", "3", "--set", "timeout_s=4",
                      deeds=("1=9",))
    check_all(ran, {0, 2} if policy == "shrink" else {0, 2, 3})
    assert "worker 1 has not joined the others in time: ending it" in ran.err
    assert "worker 1 was killed by SIGKILL: the job goes on without it" in ran.err


@pytest.mark.timeout(200)
@pytest.mark.parametrize("policy", ["abort", "shrink", "wait"])
def test_a_program_that_fails_on_all_ranks_ends_with_its_exit_code(elastic, policy):
    program = elastic.folder / "fails.py"
    program.write_text("import sys, bpsfast\nbpsfast.init()\nbpsfast.barrier()\nsys.exit(7)\n")
    command = [sys.executable, "-m", "bpsfast", "run", "--elastic", "-n", "2", "--lost-worker", policy, "--",
               sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    assert done.returncode == 7, done.stderr
    assert "failed first: it ended with exit code 7" in done.stderr


@pytest.mark.timeout(200)
def test_abort_ends_the_job(elastic):
    ran = elastic.run("-n", "2", deeds=("1@9+0.002",))
    assert ran.code == 137 and not ran.weights
    assert "worker 1 failed first: it was killed by SIGKILL" in ran.err
