"""Tests the supervisor: names of lines, the process that failed first, and that nothing is left."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import os
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

from bpsfast.base.exit_codes import LEFT_BEHIND
from bpsfast.launch.output import Output
from bpsfast.launch.processes import Command, Kind
from bpsfast.launch.supervisor import Limits, Supervisor

_FAST = Limits(job_s=60.0, after_failure_s=0.3, after_ranks_s=0.3, after_sigterm_s=1.5)

#: A launcher of its own: starts argv[1:] as programs of ranks.
_LAUNCHER = """
import os, sys
from bpsfast.launch.processes import Command, Kind
from bpsfast.launch.supervisor import Limits, Supervisor
commands = [Command(f"rank {i}", Kind.RANK, (sys.executable, "-c", text), os.environ)
            for i, text in enumerate(sys.argv[1:])]
sys.exit(Supervisor(commands, limits=Limits(job_s=60.0)).run())
"""
_STUBBORN = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
print(os.getpid(), child.pid, flush=True)
child.wait()
"""


#: What a rank of bpsfast reports: without it nobody waits for the daemons at the end.
_JOINED = """
import os, time
path, _, number = os.environ["_BPSFAST_END_REPORTS"].rpartition(":")
open(path, "a").write(f"{number} joined {time.monotonic_ns()}\\n")
"""


def program(name: str, text: str, kind: Kind = Kind.RANK, **variables: str) -> Command:
    """Return a command that runs Python *text*."""
    return Command(name, kind, (sys.executable, "-S", "-c", text), {**os.environ, **variables})


def supervise(*commands: Command, limits: Limits = _FAST, **options):
    """Run *commands*; return exit code, output and error output."""
    out, err = io.BytesIO(), io.BytesIO()
    with contextlib.closing(Output(out, err, **options)) as output:
        code = Supervisor(commands, limits=limits, output=output).run()
    return code, out.getvalue().decode(), err.getvalue().decode()


def fifo(folder) -> str:
    """Make a named pipe: who reads it goes on when who writes it has opened it and ended."""
    path = str(folder / "gate")
    os.mkfifo(path)
    return path


def test_what_a_signal_has_ended_is_started_again_if_the_job_waits_for_it(tmp_path):
    """It is, twice; the third end is the job's."""
    said = tmp_path / "said"
    text = f"import os, signal; open({str(said)!r}, 'a').write('x'); os.kill(os.getpid(), signal.SIGKILL)"
    waits = program("rank 0", "import time; time.sleep(600)")
    killed = Command("scheduler", Kind.DAEMON, (sys.executable, "-S", "-c", text), dict(os.environ), n_restarts=2)
    code, _, err = supervise(waits, killed)
    assert code == 128 + signal.SIGKILL and said.read_text() == "xxx"
    assert "scheduler was killed by SIGKILL: it is started again (2 of 2 times)" in err
    assert "scheduler failed first: it was killed by SIGKILL" in err


def test_every_line_says_whose_it_is():
    code, out, err = supervise(
        program("rank 0", "import sys; print('one'); print('two', end=''); print('wrong', file=sys.stderr)"),
        program("rank 1", "print('10%', end='\\r'); print('20%')"),
    )
    assert code == 0
    assert set(out.splitlines()) == {"[rank 0] one", "[rank 0] two", "[rank 1] 10%", "[rank 1] 20%"}
    assert err == "[rank 0] wrong\n"


def test_a_lot_of_output_arrives_whole():
    code, out, _ = supervise(program("rank 0", "print(('x' * 999 + '\\n') * 3000, end='')"))
    assert code == 0
    assert out == ("[rank 0] " + "x" * 999 + "\n") * 3000


class Watched(Output):
    """Output that tells when the processes have to wait for its reader; `most_nbytes` is the most that has waited.

    `has_spoken`: the launcher has said something itself.
    """

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.has_been_full, self.has_spoken = threading.Event(), threading.Event()
        self.most_nbytes = 0

    @property
    def is_full(self) -> bool:
        self.most_nbytes = max(self.most_nbytes, self.pending_nbytes)
        if super().is_full:
            self.has_been_full.set()
        return super().is_full

    def say(self, text: str) -> None:
        self.has_spoken.set()
        super().say(text)


def test_a_reader_that_stops_for_a_while_gets_all_and_little_waits(no_leaks):
    source, target = os.pipe()
    came = []
    with open(source, "rb") as reader, open(target, "wb") as writer:
        output = Watched(writer, io.BytesIO())

        def read() -> None:
            assert output.has_been_full.wait(30.0)
            came.append(reader.read())

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read)
            code = Supervisor([program("rank 0", "for i in range(9_000): print(f'{i:999}')")], limits=_FAST,
                              output=output).run()
            writer.close()
            reading.result(30.0)
    assert code == 0
    assert came == [b"".join(b"[rank 0] %999d\n" % i for i in range(9_000))]
    assert output.most_nbytes < 2 << 20, "of 9 MB"


def test_nobody_is_ended_for_being_late_while_a_reader_stops(tmp_path, no_leaks):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    rank = program("rank 0", f"{_JOINED}\ng = open({str(gate)!r}, 'w')")
    # what it says comes after the end of the rank
    node = program("node 0", f"open({str(gate)!r}).read(); print(('x' * 999 + '\\n') * 3000, end='')", Kind.DAEMON)
    source, target = os.pipe()
    with open(source, "rb") as reader, open(target, "wb") as writer:
        output = Watched(writer, io.BytesIO())

        def read() -> bytes:
            assert output.has_been_full.wait(30.0)
            output.has_spoken.wait(2.5)
            return reader.read()

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read)
            code = Supervisor([rank, node], limits=Limits(job_s=60.0, after_ranks_s=1.0), output=output).run()
            writer.close()
            came = reading.result(30.0)
    assert code == 0 and not output.has_spoken.is_set(), "it has not stayed of its own accord"
    assert came == (b"[node 0] " + b"x" * 999 + b"\n") * 3000


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("text", "is_too_much"), [
    ("import signal; signal.signal(15, signal.SIG_IGN)\nwhile True: print('y' * 99)", True),
    ("print(('x' * 99 + '\\n') * 5000, end='')", False),
])
def test_a_reader_that_stops_holds_up_no_signal(together, text, is_too_much, no_leaks):
    with subprocess.Popen([sys.executable, "-c", _LAUNCHER, text], stdout=subprocess.PIPE, bufsize=0,
                          stderr=subprocess.STDOUT if together else subprocess.PIPE) as launcher:
        os.read(launcher.stdout.fileno(), 1000)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(20.0) == 128 + signal.SIGTERM
        if not together:
            said = launcher.stderr.read()
            assert b"got SIGTERM" in said
            assert b" bytes of output are dropped" in said or not is_too_much


def test_a_failure_ends_the_others_and_its_reason_comes_last():
    code, _, err = supervise(
        program("rank 0", "import time; time.sleep(600)"),
        program("rank 1", "raise ValueError('boom')"),
    )
    assert code == 1
    assert err.splitlines()[-1] == "[bpsfast run] rank 1 failed first: it ended with exit code 1: ValueError: boom"
    assert err.count("Traceback") == 1


def test_a_traceback_that_is_out_of_sight_is_shown_again(tmp_path):
    gate = fifo(tmp_path)
    code, _, err = supervise(
        program("rank 0", f"import sys, time; open({gate!r}).read(); print('x\\n' * 30, file=sys.stderr); "
                          "time.sleep(600)"),
        program("rank 1", f"import atexit; atexit.register(open, {gate!r}, 'w')\n"
                          "try: raise KeyError('inner')\nexcept KeyError as e: raise ValueError('boom') from e"),
        limits=Limits(job_s=60.0, after_failure_s=3.0))
    assert code == 1
    head = "[bpsfast run] rank 1 failed first: it ended with exit code 1. Its last output:"
    last = err[err.index(head) :].splitlines()[1:]
    assert last[0] == "Traceback (most recent call last):"
    assert last[-1] == "ValueError: boom"
    assert "KeyError: 'inner'" in last, "the exception it came from belongs to it"


@pytest.mark.parametrize(
    "text, code, words",
    [
        ("raise SystemExit(3)", 3, "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", 128 + 9, "killed by SIGKILL"),
        ("import os; os.abort()", 128 + 6, "killed by SIGABRT"),
    ],
)
def test_the_exit_code_is_that_of_the_first_failure(text, code, words):
    found, _, err = supervise(program("rank 0", text))
    assert found == code
    assert words in err


def test_the_cause_is_named_and_not_its_consequence(tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    code, _, err = supervise(
        program(
            "rank 0", f"g = open({str(gate)!r}, 'w'); import sys; sys.exit('bpsfast.PeerLostError: rank 1 failed')"
        ),
        # ends only after rank 0 has: the gate is open for writing as long as rank 0 lives
        program("rank 1", f"open({str(gate)!r}).read(); raise SystemExit(5)"),
        limits=Limits(job_s=60.0, after_failure_s=20.0),
    )
    assert code == 5
    assert "rank 1 failed first" in err


@pytest.mark.parametrize(
    "text",
    [
        "try: raise PeerLostError('rank 1 is lost')\nexcept PeerLostError as e: raise ValueError('no step') from e",
        "import atexit\natexit.register(print, 'a last word', file=sys.stderr)\nraise PeerLostError('rank 1 is lost')",
        "sys.exit('bpsfast node 2 WARNING: the job was aborted: StallError: rank 1 is missing')",
    ],
)
def test_a_consequence_is_known_by_more_than_the_last_line(tmp_path, text):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    text = f"import sys\ng = open({str(gate)!r}, 'w')\nclass PeerLostError(Exception): pass\n{text}"
    code, _, err = supervise(
        program("rank 0", text),
        program("rank 1", f"open({str(gate)!r}).read(); raise SystemExit(5)"),
        limits=Limits(job_s=60.0, after_failure_s=20.0),
    )
    assert code == 5
    assert "rank 1 failed first" in err


def test_a_daemon_that_fails_is_named():
    code, _, err = supervise(
        program("rank 0", "import time; time.sleep(600)"), program("helper 0", "raise SystemExit(4)", Kind.DAEMON)
    )
    assert code == 4
    assert "helper 0 failed first" in err


def test_a_helper_that_a_job_has_left_behind_fails_nothing(tmp_path):
    gate = fifo(tmp_path)

    class Attentive(Supervisor):
        def _have_ended(self, processes):
            super()._have_ended(processes)
            if "helper 0" in [each.command.name for each in processes]:
                open(gate, "w").close()  # now rank 0 ends, too

    out, err = io.BytesIO(), io.BytesIO()
    with contextlib.closing(Output(out, err)) as output:
        code = Attentive([program("rank 0", f"open({gate!r}).read()"),
                          program("helper 0", f"raise SystemExit({LEFT_BEHIND})", Kind.HELPER)],
                         limits=_FAST, output=output).run()
    assert code == 0
    assert f"helper 0 ended with exit code {LEFT_BEHIND}: the job goes on without it" in err.getvalue().decode()


def test_neither_does_one_that_ends_so_while_all_leave(tmp_path):
    gate = fifo(tmp_path)

    class Attentive(Supervisor):
        def _enter(self, phase):
            super()._enter(phase)
            if phase == "leaving":
                open(gate, "w").close()

    out, err = io.BytesIO(), io.BytesIO()
    with contextlib.closing(Output(out, err)) as output:
        code = Attentive([program("rank 0", _JOINED), program(
            "helper 0", f"open({gate!r}).read(); raise SystemExit({LEFT_BEHIND})", Kind.HELPER)],
            limits=Limits(job_s=60.0, after_ranks_s=20.0), output=output).run()
    assert code == 0 and b"helper 0 ended with exit code" in err.getvalue()


def test_a_daemon_that_ends_well_ends_nothing():
    code, out, _ = supervise(
        program("node 0", "", Kind.DAEMON), program("rank 0", "import time; time.sleep(0.5); print('done')")
    )
    assert (code, out) == (0, "[rank 0] done\n")


def test_a_daemon_that_stays_is_ended_and_named():
    stays = program("scheduler", "import time; time.sleep(600)", Kind.DAEMON)
    code, _, err = supervise(program("rank 0", _JOINED), stays)
    assert code == 0
    assert "still running 0.3 s after the last rank ended: scheduler" in err


@pytest.mark.parametrize(("report", "after_ranks_s", "words"), [
    ("", 60.0, "no rank has joined the job (bpsfast.init): ending node 0\n"),
    (_JOINED.replace("joined", "attached"), 0.3, "still running 0.3 s after the last rank ended: node 0"),
])
def test_daemons_to_which_no_rank_has_come_are_ended_at_once(report, after_ranks_s, words, tmp_path):
    """A node may know of a rank that could not report itself, as it is in a container."""
    node = program("node 0", f"{report}\nopen({(gate := fifo(tmp_path))!r}, 'w').close()\n"
                   "import time; time.sleep(600)", Kind.DAEMON)
    code, _, err = supervise(program("rank 0", f"open({gate!r}).read()"), node,
                             limits=Limits(job_s=120.0, after_ranks_s=after_ranks_s))
    assert code == 0 and words in err


def test_the_jobs_deadline_is_kept():
    code, _, err = supervise(program("rank 0", "import time; time.sleep(600)"), limits=Limits(job_s=0.3))
    assert code == 124
    assert "has not ended within 0.3 s" in err


def test_a_missing_program_is_named():
    code, _, err = supervise(Command("rank 0", Kind.RANK, ("no-such-program",), dict(os.environ)))
    assert code == 127
    assert "command not found: no-such-program" in err


def test_every_process_has_a_log_file(tmp_path):
    commands = program("rank 0", "print('to the log')"), program("node 0", "", Kind.DAEMON)
    code, _, _ = supervise(*commands, tee_dir=tmp_path / "logs")
    assert code == 0
    assert (tmp_path / "logs" / "rank-0.log").read_text() == "to the log\n"
    assert (tmp_path / "logs" / "node-0.log").read_text() == ""


def test_what_a_finished_rank_left_running_is_ended(pidfd_of):
    code, out, _ = supervise(
        program("rank 0", "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=-3, stderr=-3).pid)")
    )
    assert code == 0
    pid = int(out.split()[-1])
    with contextlib.suppress(ProcessLookupError):  # it is gone already
        assert select.select([pidfd_of(pid)], [], [], 20.0)[0]


def test_signal_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT)
    supervise(program("rank 0", ""))
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_ends_everything(number, pidfd_of):
    with subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, _STUBBORN, _STUBBORN],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        pids = [int(pid) for _ in range(2) for pid in launcher.stdout.readline().split()[2:]]
        ends = [pidfd_of(pid) for pid in pids]
        begin = time.monotonic()
        launcher.send_signal(number)
        _, err = launcher.communicate(timeout=30)
        assert time.monotonic() - begin < 5.0, "SIGKILL after 1.5 s, and a busy machine"
    assert launcher.returncode == 128 + number
    assert signal.Signals(number).name in err
    assert len(pids) == 4
    for end in ends:
        assert select.select([end], [], [], 20.0)[0]


@pytest.mark.slow
def test_everything_dies_with_a_launcher_that_is_killed(pidfd_of):
    text = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", _LAUNCHER, text, text], stdout=subprocess.PIPE, text=True) as launcher:
        ends = [pidfd_of(int(launcher.stdout.readline().split()[-1])) for _ in range(2)]
        launcher.kill()
        for end in ends:
            assert select.select([end], [], [], 20.0)[0]


def test_a_lost_helper_is_started_again_so_many_times(tmp_path):
    """And whatever becomes of it then, the job goes on."""
    helper = program("helper 0", f"""
import os, signal
n = len(os.listdir({str(tmp_path)!r}))
print("start", n, flush=True)
open({str(tmp_path / "started")!r} + str(n), "w").close()  # from the fourth on the rank ends, and all with it
if n >= 2:
    raise SystemExit("refused" if n == 2 else 0)
os.kill(os.getpid(), signal.SIGKILL)
""", Kind.HELPER)
    rank = program("rank 0", f"""
import os, time
while len(os.listdir({str(tmp_path)!r})) < 4:
    time.sleep(0.01)
""")
    out, err = io.BytesIO(), io.BytesIO()
    with contextlib.closing(Output(out, err)) as output:
        code = Supervisor([helper, rank], limits=_FAST, output=output, restarts=3).run()
    said = err.getvalue().decode()
    assert code == 0, said
    assert [line for line in out.getvalue().decode().splitlines() if "start" in line] == [
        f"[helper 0] start {n}" for n in range(4)]
    assert said.count("helper 0 was killed by SIGKILL: the job goes on without it") == 2
    assert "helper 0 ended with exit code 1: the job goes on without it" in said
    assert "helper 0 is started again, to join the job; 0 restarts are left" in said and said.count("again") == 3
