"""SIGTERM to the launcher, or to one rank: all ranks end after the same step, by themselves, and the job with 0."""
from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

#: Trains for 100,000 steps at most, or until it gets SIGTERM; then each rank saves its weights and the number of steps.
#: EXTRA is replaced by lines that run before the training.
_TRAINING = """
import os, signal, sys, time
import numpy as np
import bpsfast
bpsfast.init()
EXTRA
weights = np.zeros(1000, np.float32)
for step in range(1, 100_001):
    weights += bpsfast.push_pull(np.full(1000, bpsfast.rank() + step, np.float32), name="gradient")
    if step == 5:
        print("trains", os.getpid(), flush=True)
    if bpsfast.preempted():
        time.sleep(globals().get("SLOW", 0.0))
        np.save(os.path.join(FOLDER, f"{bpsfast.rank()}.npy"), np.append(weights, step))
        assert bpsfast.preempted(), "it stays so"
        break
bpsfast.shutdown()
print("saved", flush=True)
"""
_IN_PID_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def launch(folder: Path, *options: str, extra: str = "", via: tuple[str, ...] = ()) -> subprocess.Popen:
    text = _TRAINING.replace("FOLDER", repr(str(folder))).replace("EXTRA", extra)
    return subprocess.Popen([*via, sys.executable, "-m", "bpsfast", "run", *options, "--", sys.executable, "-c", text],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "BPSFAST_TIMEOUT_S": "60"})


def pids_of(job: subprocess.Popen, n_ranks: int) -> list[int]:
    """Wait until all ranks train; return their processes, which are not in the order of ranks."""
    found: list[int] = []
    while len(found) < n_ranks:
        line = job.stdout.readline()
        assert line, job.stderr.read()
        if "trains" in line:
            found.append(int(line.split()[-1]))
    return found


def require_same_step(folder: Path, n_ranks: int) -> None:
    """Fail unless all ranks have saved the same weights and steps, and the weights are those after so many steps."""
    saved = [np.load(folder / f"{rank}.npy") for rank in range(n_ranks)]
    step = int(saved[0][-1])
    assert all(np.array_equal(each, saved[0]) for each in saved) and 5 < step < 100_000
    expected = np.float32(0.0)
    for each in range(1, step + 1):
        expected += np.float32(sum(rank + each for rank in range(n_ranks)) / n_ranks)
    assert set(saved[0][:-1].astype(np.float32)) == {expected}


def require_saved(job: subprocess.Popen, folder: Path, n_ranks: int) -> str:
    """Fail unless the job ends with 0 once all ranks have saved the same; return what the launcher says."""
    out, err = job.communicate(timeout=90)
    assert job.returncode == 0 and out.count("saved") == n_ranks, err
    require_same_step(folder, n_ranks)
    return err


@pytest.mark.timeout(150)
@pytest.mark.parametrize("options", [("-n", "2"), ("--ranks", "2,1", "--helpers", "1")])
def test_all_ranks_end_after_the_same_step(options, tmp_path):
    n_ranks = 2 if options[0] == "-n" else 3
    with launch(tmp_path, *options) as job:
        pids_of(job, n_ranks)
        job.send_signal(signal.SIGTERM)
        assert "got SIGTERM: the ranks have 30 s to end" in require_saved(job, tmp_path, n_ranks)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_one_rank_that_is_told_tells_the_others(tmp_path):
    """As a pod is, of which the launcher knows nothing."""
    with launch(tmp_path, "--ranks", "1,1,1") as job:
        os.kill(pids_of(job, 3)[1], signal.SIGTERM)
        require_saved(job, tmp_path, 3)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_processes_of_a_rank_get_no_signal(tmp_path):
    """Such as the workers of a data loader, which the step still needs."""
    extra = """
import subprocess
child = subprocess.Popen(["sleep", "600"])
forked = os.fork()
if forked == 0:
    signal.pause()
"""
    after = "assert child.poll() is None and os.waitpid(forked, os.WNOHANG) == (0, 0), 'a child was ended'\n" \
            "os.kill(forked, signal.SIGTERM)\nassert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == -15\n"
    program = extra + "import atexit\natexit.register(lambda: exec(" + repr(after) + ", globals()))"
    with launch(tmp_path, "-n", "2", extra=program) as job:
        pids_of(job, 2)
        job.send_signal(signal.SIGTERM)
        assert "a child was ended" not in require_saved(job, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_the_first_process_of_a_pid_namespace_is_told_too(tmp_path):
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("root and unshare are needed for a PID namespace")
    with launch(tmp_path, "--ranks", "1,1", via=_IN_PID_NAMESPACE) as job:
        pids_of(job, 2)  # as they are in there
        (first,) = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        assert Path(f"/proc/{first}/status").read_text().split("NSpid:")[1].split("\n")[0].split()[-1] == "1"
        os.kill(int(first), signal.SIGTERM)
        require_saved(job, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_program_that_does_not_ask_ends_at_once(tmp_path):
    with launch(tmp_path, "-n", "2", extra="bpsfast.preempted = lambda: False") as job:
        pids_of(job, 2)
        job.send_signal(signal.SIGTERM)
        _, err = job.communicate(timeout=20)
    assert job.returncode == 128 + signal.SIGTERM and "got SIGTERM: ending all processes" in err, err


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_an_elastic_job_ends_as_a_whole(tmp_path):
    with launch(tmp_path, "-n", "2", "--elastic", "--lost-worker", "wait") as job:
        pids_of(job, 2)
        job.send_signal(signal.SIGTERM)
        require_saved(job, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_an_elastic_job_whose_workers_are_lost_meanwhile_has_not_ended_well(tmp_path):
    extra = "bpsfast.preempted = lambda: step == 5 and signal.pause()  # so none sees that the other is lost\n" \
            "signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))"
    with launch(tmp_path, "-n", "2", "--elastic", "--lost-worker", "shrink", extra=extra) as job:
        pids_of(job, 2)
        job.send_signal(signal.SIGTERM)
        out, err = job.communicate(timeout=90)
    assert job.returncode == 128 + signal.SIGTERM and "saved" not in out, err


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_scheduler_that_is_lost_meanwhile_is_started_again(tmp_path):
    with launch(tmp_path, "--ranks", "1,1", extra="SLOW = 1.0") as job:
        pids_of(job, 2)
        (scheduler,) = [pid for pid in children_of(job.pid)
                        if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(b"scheduler\0")]
        job.send_signal(signal.SIGTERM)
        os.kill(scheduler, signal.SIGKILL)
        require_saved(job, tmp_path, 2)


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
