"""`bpsfast run -H`: real jobs over real sshds, each in a network namespace, and every way in which they end."""
from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from bpsfast import settings
from bpsfast.launch import over_ssh
from bpsfast.launch.hosts import Host
from bpsfast.launch.ssh import Ssh
from bpsfast.orchestration.errors import ConfigError
from tests import ssh_hosts
from tests.ssh_hosts import SshHosts

_LACKING = ssh_hosts.missing()
over_sshd = [pytest.mark.root, pytest.mark.slow, pytest.mark.skipif(_LACKING is not None, reason=str(_LACKING))]

_DIGEST = """
import hashlib, numpy as np, bpsfast
bpsfast.init()
random = np.random.default_rng(bpsfast.rank())
digest = hashlib.sha256()
for step in range(3):
    for name, n in ("small", 1000), ("large", 1_500_000):
        digest.update(bpsfast.push_pull(random.standard_normal(n, np.float32), name=name).tobytes())
bpsfast.shutdown()
print("digest", digest.hexdigest())
"""
_WAIT = """
import subprocess, numpy as np, bpsfast
bpsfast.init()
subprocess.Popen(["sleep", "600"])
bpsfast.barrier()
print("waiting", flush=True)
while True:
    bpsfast.push_pull(np.ones(10), name="x")
"""
_MARK = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()"


@pytest.fixture(scope="module")
def shared_hosts(tmp_path_factory):
    with SshHosts(["gpu1", "gpu2", "cpu1"], tmp_path_factory.mktemp("ssh")) as hosts:
        yield hosts


@pytest.fixture
def hosts(shared_hosts):
    yield shared_hosts
    shared_hosts.know(shared_hosts.names)
    shared_hosts.configure()


@pytest.fixture
def trainer(tmp_path):
    def write(text: str) -> list[str]:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text))
        return ["--", "python", str(path)]

    return write


def digests(text: str) -> dict[str, str]:
    return dict(re.findall(r"^\[(rank \d)\] digest (\w{64})$", text, re.M))


def is_empty(hosts: SshHosts, within_s: float = 10.0) -> bool:
    """Whether nothing is left on any host; what is ending is waited for."""
    deadline = time.monotonic() + within_s
    for pid in {pid for name in hosts.names for pid in hosts.pids(name)}:
        with contextlib.suppress(ProcessLookupError), open_pidfd(pid) as fd:
            select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
    return not any(hosts.pids(name) for name in hosts.names)


@contextlib.contextmanager
def open_pidfd(pid: int):
    fd = os.pidfd_open(pid)
    try:
        yield fd
    finally:
        os.close(fd)


class TestJobs:
    pytestmark = over_sshd

    def test_two_hosts_and_a_helper_give_the_bits_of_a_local_job(self, hosts, trainer, tmp_path):
        program = trainer(_DIGEST)
        before = hosts.cluster["cpu1"].traffic()
        logs = tmp_path / "logs"
        done = hosts.run("run", "-H", "gpu1:2,gpu2:1", "--helpers-on", "cpu1", "--set", "placement=ps", "--tee-dir",
                         str(logs), *program)
        assert done.returncode == 0, done.stderr
        local = subprocess.run([sys.executable, "-m", "bpsfast", "run", "--ranks", "2,1", *program],
                               capture_output=True, text=True, timeout=90, check=True,
                               env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"})
        assert set(digests(done.stdout)) == {"rank 0", "rank 1", "rank 2"}
        assert digests(done.stdout) == digests(local.stdout)
        moved = hosts.cluster["cpu1"].traffic() - before
        assert moved.rx > 3 * 2 * 4 * 1_500_000, "with this placement the helper sums everything"
        assert {path.name for path in logs.iterdir()} == {
            "scheduler.log", "node-0.log", "node-1.log", "helper-0.log", "rank-0.log", "rank-1.log", "rank-2.log"}
        assert is_empty(hosts)

    def test_ranks_fill_hosts_in_the_order_of_the_hostfile(self, hosts, trainer, tmp_path):
        hostfile = tmp_path / "hosts"
        hostfile.write_text("# ours\ngpu2 slots=2\n\ngpu1:4   # not all of it\n")
        program = trainer("""
            import os
            print(*(os.environ[f"BPSFAST_{name}"] for name in ("RANK", "LOCAL_RANK", "LOCAL_SIZE", "NODE_ID")))
            raise SystemExit(9)
        """)
        done = hosts.run("run", "--hostfile", str(hostfile), "-n", "3", *program)
        assert done.returncode == 9, done.stderr
        shown = {line for line in done.stdout.splitlines() if line.startswith("[rank")}
        assert shown <= {"[rank 0] 0 0 2 node0", "[rank 1] 1 1 2 node0", "[rank 2] 2 0 1 node1"} and shown

    def test_variables_and_folder_are_those_of_the_launcher(self, hosts, trainer, tmp_path):
        (tmp_path / "lib").mkdir()
        (tmp_path / "lib" / "beside.py").write_text("value = 'imported'")
        program = trainer("""
            import os, sys, beside, bpsfast
            bpsfast.init()
            print(os.getcwd(), beside.value, os.environ["GIVEN"], os.environ["TAKEN"], os.environ.get("RANK"),
                  os.environ.get("SECRET"), sys.executable)
            bpsfast.shutdown()
        """)
        done = hosts.run("run", "-H", "root@gpu1,gpu2", "-x", "GIVEN=a b", "-x", "TAKEN", *program, cwd=tmp_path,
                         env={"PYTHONPATH": "lib", "TAKEN": "c'd", "SECRET": "stays", "RANK": "7"})
        assert done.returncode == 0, done.stderr
        python = Path(sys.executable).with_name("python")  # pytest may have been started by another of its names
        expected = f"{tmp_path} imported a b c'd None None {python}"
        assert set(done.stdout.splitlines()) == {f"[rank 0] {expected}", f"[rank 1] {expected}"}

    def test_ssh_may_go_by_ipv6(self, hosts, trainer):
        for machine, interface, number in ((hosts.cluster.hub, "br0", 1), (hosts.cluster["gpu1"], "eth0", 2)):
            subprocess.run(["ip", "-n", machine.namespace, "addr", "replace", f"fd77::{number}/64", "dev", interface,
                            "nodad"], check=True, timeout=20)
        hosts.configure(f"HostKeyAlias {hosts.cluster['gpu1'].address}")
        hosts.know(["gpu1", "gpu1"], keys_of=["gpu1", "gpu2"])
        done = hosts.run("run", "-H", "root@[fd77::2]:1,gpu2:1", *trainer(_DIGEST))
        assert done.returncode == 0, done.stderr
        assert set(digests(done.stdout)) == {"rank 0", "rank 1"}

    def test_every_rank_has_its_files_and_lines_their_time(self, hosts, trainer, tmp_path):
        program = trainer("import os, sys\nprint('out', os.environ['BPSFAST_RANK'])\nprint('err', file=sys.stderr)\n"
                          "import bpsfast; bpsfast.init(); bpsfast.shutdown()")
        done = hosts.run("run", "-H", "gpu1:1,gpu2:1", "--output-filename", str(tmp_path / "of"),
                         "--prefix-output-with-timestamp", *program)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "of/rank.0/stdout").read_text() == "out 0\n"
        assert (tmp_path / "of/rank.1/stdout").read_text() == "out 1\n"
        assert (tmp_path / "of/rank.1/stderr").read_text() == "err\n"
        assert re.search(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d \[rank 0\] out 0$", done.stdout, re.M)

    def test_what_a_login_script_prints_is_no_message(self, hosts, trainer):
        loud = "ForceCommand yes motd | head -c 300000; printf 'no end of line'; echo careful >&2; " \
               "exec sh -c \"$SSH_ORIGINAL_COMMAND\""
        hosts.start_sshd("gpu2", loud)
        try:
            done = hosts.run("run", "-H", "gpu1,gpu2", *trainer(_DIGEST))
        finally:
            hosts.start_sshd("gpu2")
        assert done.returncode == 0, done.stderr
        assert set(digests(done.stdout)) == {"rank 0", "rank 1"} and "motd" not in done.stdout
        assert "careful" not in done.stderr

    def test_the_jobs_key_is_in_no_command_line_and_not_in_sshs_environment(self, hosts, trainer):
        key = "5e" * 32
        program = trainer(_WAIT)
        with hosts.launch("run", "-H", "gpu1,gpu2", *program, env={"BPSFAST_JOB_KEY": key}) as launcher:
            assert "waiting" in launcher.stdout.readline()
            in_environment = []
            for folder in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    argv = (folder / "cmdline").read_bytes()
                    assert key.encode() not in argv
                    if key.encode() in (folder / "environ").read_bytes():
                        in_environment.append(argv.replace(b"\0", b" "))
            assert any(b"train.py" in argv for argv in in_environment), "ranks have it"
            assert not [argv for argv in in_environment if argv.startswith(b"ssh ") or b"bpsfast agent" in argv]
            launcher.send_signal(signal.SIGTERM)
            launcher.communicate(timeout=30)
        assert is_empty(hosts)

    def test_this_machine_needs_no_ssh(self, trainer):
        done = subprocess.run([sys.executable, "-m", "bpsfast", "run", "-H", "localhost:2", *trainer(_DIGEST)],
                              capture_output=True, text=True, timeout=90, check=False, env={"PATH": os.environ["PATH"]})
        assert done.returncode == 0, done.stderr
        assert set(digests(done.stdout)) == {"rank 0", "rank 1"}


class TestEnds:
    pytestmark = over_sshd

    def test_the_rank_that_failed_first_is_shown_last_and_its_code_is_the_jobs(self, hosts, trainer):
        program = trainer("""
            import os, numpy as np, bpsfast
            bpsfast.init()
            while True:
                bpsfast.push_pull(np.ones(10), name="x")
                if bpsfast.rank() == 2:
                    raise ValueError("a bug in the trainer")
        """)
        done = hosts.run("run", "-H", "gpu1:2,gpu2:1", *program)
        assert done.returncode == 1
        before, _, last = done.stderr.partition("[bpsfast run] rank 2 failed first: it ended with exit code 1")
        assert last.endswith("ValueError: a bug in the trainer\n") and last.count("Traceback") == 1
        told = re.findall(r"^\[rank [01]\] bpsfast.PeerLostError: rank 2 .* is lost: ValueError", before, re.M)
        assert len(told) == 2
        assert is_empty(hosts)

    def test_an_exit_code_is_handed_on(self, hosts, trainer):
        program = trainer("import os, sys, time\nif os.environ['BPSFAST_RANK'] == '1': sys.exit(37)\ntime.sleep(600)")
        done = hosts.run("run", "-H", "gpu1,gpu2", *program)
        assert done.returncode == 37, done.stderr
        assert is_empty(hosts)

    def test_nothing_is_left_on_any_host_when_the_launcher_is_killed(self, hosts, trainer, pidfd_of):
        with hosts.launch("run", "-H", "gpu1:2,gpu2:1", "--helpers-on", "cpu1", *trainer(_WAIT)) as launcher:
            for _ in range(3):
                assert "waiting" in launcher.stdout.readline()
            running = {name: hosts.pids(name) for name in hosts.names}
            assert all(running.values())
            ends = [pidfd_of(pid) for pids in running.values() for pid in pids]
            launcher.kill()
            for end in ends:
                assert select.select([end], [], [], 20.0)[0]
        assert is_empty(hosts)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_one_signal_ends_everything_everywhere_within_two_seconds(self, hosts, trainer, number):
        stubborn = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        with hosts.launch("run", "-H", "gpu1:1,gpu2:1", *trainer(stubborn + _WAIT)) as launcher:
            for _ in range(2):
                assert "waiting" in launcher.stdout.readline()
            begin = time.monotonic()
            launcher.send_signal(number)
            _, err = launcher.communicate(timeout=30)
            took_s = time.monotonic() - begin
        assert launcher.returncode == 128 + number, err
        assert f"got {signal.Signals(number).name}: ending all processes" in err
        assert not any(hosts.pids(name) for name in hosts.names) or is_empty(hosts, within_s=0.5)
        assert took_s < 2.8, "two seconds, and some of a busy machine"

    def test_a_lost_host_is_named(self, hosts, trainer):
        with hosts.launch("run", "-H", "gpu1,gpu2", *trainer(_WAIT)) as launcher:
            for _ in range(2):
                assert "waiting" in launcher.stdout.readline()
            try:
                for pid in hosts.pids("gpu2"):
                    if b"sshd" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        os.kill(pid, signal.SIGKILL)
                _, err = launcher.communicate(timeout=60)
            finally:
                hosts.start_sshd("gpu2")
        assert launcher.returncode == 255, err
        assert re.search(r"rank 1 failed first: it was lost with its host gpu2 \(", err), err
        assert is_empty(hosts)

    def test_a_link_that_is_cut_is_noticed(self, hosts, trainer):
        quick = ("--ssh-option", "ServerAliveInterval=1", "--ssh-option", "ServerAliveCountMax=2")
        with hosts.launch("run", "-H", "gpu1,gpu2", *quick, *trainer(_WAIT)) as launcher:
            for _ in range(2):
                assert "waiting" in launcher.stdout.readline()
            link = ["ip", "-n", hosts.cluster["gpu2"].namespace, "link", "set", "eth0"]
            subprocess.run([*link, "down"], check=True, timeout=20)
            try:
                _, err = launcher.communicate(timeout=60)
                assert launcher.returncode != 0
                assert "was lost with its host gpu2" in err or "PeerLostError" in err, err
            finally:
                subprocess.run([*link, "up"], check=True, timeout=20)
                hosts.start_sshd("gpu2")
        for pid in hosts.pids("gpu2"):  # its agent hears nothing, and would end itself after a minute
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert is_empty(hosts)

    def test_an_interrupt_while_hosts_are_looked_at_leaves_nothing(self, hosts, trainer, tmp_path):
        entered = tmp_path / "entered"
        os.mkfifo(entered)
        hosts.start_sshd("gpu2", f"ForceCommand echo came > {entered}; exec sleep 600")
        try:
            with hosts.launch("run", "-H", "gpu1,gpu2", *trainer(_WAIT)) as launcher:
                assert entered.read_text() == "came\n"
                begin = time.monotonic()
                launcher.send_signal(signal.SIGINT)
                _, err = launcher.communicate(timeout=30)
                assert time.monotonic() - begin < 5.0
        finally:
            hosts.start_sshd("gpu2")
        assert launcher.returncode == 130 and "interrupted before anything was started" in err, err
        for pid in hosts.pids("gpu2"):  # what a login script does without reading its input is out of reach
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert is_empty(hosts)

    def test_the_jobs_deadline_is_kept(self, hosts, trainer):
        done = hosts.run("run", "-H", "gpu1,gpu2", "--timeout", "4", *trainer(_WAIT))
        assert done.returncode == 124 and "has not ended within 4 s" in done.stderr
        assert is_empty(hosts)


class TestHostsThatCannotBeUsed:
    pytestmark = over_sshd

    def refused(self, hosts, tmp_path, *options: str, code: int = 2, on: str = "gpu1,gpu2") -> str:
        """Return the one error of a job that must not start anywhere."""
        mark = tmp_path / "started"
        done = hosts.run("run", "-H", on, *options, "--", "python", "-c", _MARK, str(mark))
        assert done.returncode == code, done.stderr
        assert not mark.exists() and not done.stdout and "Traceback" not in done.stderr
        assert done.stderr.startswith("bpsfast: ") and is_empty(hosts)
        return done.stderr

    def test_an_unknown_host_key(self, hosts, tmp_path):
        hosts.know(["gpu1"])
        text = self.refused(hosts, tmp_path)
        assert "ConfigError: gpu2: its host key is not known here" in text and "`ssh gpu2 true`" in text

    def test_a_changed_host_key(self, hosts, tmp_path):
        hosts.know(["gpu1", "gpu2"], keys_of=["gpu1", "cpu1"])
        text = self.refused(hosts, tmp_path)
        assert "gpu2: its host key is another one than before" in text and "ssh-keygen -R gpu2" in text

    def test_a_refused_login(self, hosts, tmp_path):
        stranger = str(hosts.folder / "stranger")
        hosts.configure()
        config = hosts.folder / "config"
        config.write_text(re.sub(r"  IdentityFile .*\n", "", config.read_text()))
        text = self.refused(hosts, tmp_path, "--identity-file", stranger)
        assert "2 of 2 hosts cannot be used:\n  gpu1: login refused" in text and "\n  gpu2: login refused" in text
        assert f"ssh -i {stranger} gpu1 true" in text

    def test_an_identity_file_is_passed_on(self, hosts, trainer):
        config = hosts.folder / "config"
        config.write_text(re.sub(r"  IdentityFile .*\n", "", config.read_text()))
        done = hosts.run("run", "-H", "gpu1,gpu2", "--identity-file", str(hosts.folder / "user"), *trainer(_DIGEST))
        assert done.returncode == 0, done.stderr

    def test_a_host_that_is_down(self, hosts, tmp_path):
        hosts.stop_sshd("gpu2")
        try:
            text = self.refused(hosts, tmp_path, code=1)
        finally:
            hosts.start_sshd("gpu2")
        assert "PeerLostError: gpu2: not reached by ssh" in text and "Connection refused" in text

    def test_another_port(self, hosts, trainer, tmp_path):
        for name in ("gpu1", "gpu2"):
            hosts.start_sshd(name, port=2222)
        try:
            text = self.refused(hosts, tmp_path, code=1)
            assert "Connection refused" in text
            hosts.configure("StrictHostKeyChecking yes", f"HostKeyAlias {hosts.cluster['gpu1'].address}")
            hosts.know(["gpu1", "gpu1"], keys_of=["gpu1", "gpu2"])
            done = hosts.run("run", "-H", "gpu1,gpu2", "--ssh-port", "2222", *trainer(_DIGEST))
            assert done.returncode == 0, done.stderr
        finally:
            for name in ("gpu1", "gpu2"):
                hosts.start_sshd(name)

    def test_a_name_that_nobody_knows(self, hosts, tmp_path):
        text = self.refused(hosts, tmp_path, on="gpu1,no-such-host.invalid")
        assert "no-such-host.invalid: " in text and "Could not resolve hostname" in text

    def test_a_python_that_is_not_there(self, hosts, tmp_path):
        text = self.refused(hosts, tmp_path, "--remote-python", "/no/such/python")
        assert "gpu1: /no/such/python cannot be run there" in text and "--remote-python" in text

    def test_a_python_without_bpsfast(self, hosts, tmp_path):
        bare = tmp_path / "bare"
        bare.write_text(f"#!/bin/sh\nexec {sys.executable} -I -S \"$@\"\n")
        bare.chmod(0o755)
        text = self.refused(hosts, tmp_path, "--remote-python", str(bare))
        assert f"gpu1: bpsfast is not installed for {bare} there" in text

    def test_another_version(self, hosts, tmp_path):
        older = tmp_path / "older"
        older.write_text(f"#!/bin/sh\nexec {sys.executable} -c \"from bpsfast.launch import remote\n"
                         "remote.__version__ = '0.0.9'\nremote.main()\"\n")
        older.chmod(0o755)
        text = self.refused(hosts, tmp_path, "--remote-python", str(older), code=1)
        assert "MismatchError" in text and "gpu1 has bpsfast 0.0.9" in text

    def test_a_version_without_an_agent(self, hosts, tmp_path):
        oldest = tmp_path / "oldest"
        oldest.write_text("#!/bin/sh\necho \"Error: No such command 'agent'.\" >&2\nexit 2\n")
        oldest.chmod(0o755)
        text = self.refused(hosts, tmp_path, "--remote-python", str(oldest), code=1)
        assert "MismatchError" in text and "older than" in text

    def test_a_folder_that_is_not_there(self, hosts, tmp_path):
        text = self.refused(hosts, tmp_path, "--remote-dir", "/no/such/folder")
        assert "gpu1: the working directory /no/such/folder cannot be entered" in text and "--remote-dir" in text

    def test_a_scheduler_address_that_others_do_not_reach(self, hosts, tmp_path):
        text = self.refused(hosts, tmp_path, "--scheduler-host", "127.0.0.1")
        assert "no address of gpu1" in text and "from gpu2 127.0.0.1: " in text


@pytest.mark.parametrize(("assigned", "found"), [
    (["A=1", "B", "C=x=y", "D="], {"A": "1", "B": "here", "C": "x=y", "D": ""}), ([], {}),
])
def test_variables(assigned, found):
    assert over_ssh.variables(assigned, {"B": "here"}) == found


@pytest.mark.parametrize(("assigned", "text"), [
    ("NONE", "not set here"), ("BPSFAST_RANK=1", "--set"), ("WORLD_SIZE=2", "place"), ("=1", "place"),
])
def test_variables_that_are_refused(assigned, text):
    with pytest.raises(ConfigError, match=text):
        over_ssh.variables([assigned], {})


def test_a_dry_run_says_what_runs_where_and_asks_nobody():
    shown: list[str] = []
    plan = over_ssh.Plan(hosts=[Host("a", 2), Host("me@b", 1)], helpers=[Host("c", 0)],
                         ssh=Ssh(port=23, python="/opt/python", directory="/w"), variables={"LANG": "C C"})
    over_ssh.dry_run(plan, ["python", "train.py"], settings.Settings(job_key="ab" * 32), shown.append)
    heads = [line.partition(":")[0] for line in shown]
    assert heads == ["# a, in /w", "scheduler", "node 0", "rank 0", "rank 1", "# me@b, in /w", "node 1", "rank 2",
                     "# c, in /w", "helper 0"]
    assert "LANG='C C'" in shown[3] and shown[3].endswith("python train.py")
    assert "-p 23" in shown[0] and "/opt/python -m bpsfast agent" in shown[0]
    assert "abab" not in "".join(shown) and "SCHEDULER" not in "".join(shown)


def test_one_address_cannot_be_that_of_several_hosts():
    plan = over_ssh.Plan(hosts=[Host("a"), Host("b")], ssh=Ssh())
    with pytest.raises(ConfigError, match="interface"):
        over_ssh.run(plan, ["python"], settings.Settings(node_host="10.0.0.1"))
