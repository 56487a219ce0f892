"""`bpsfast run -H`: real jobs over real sshds, each in a network namespace; what it passes on, and a dry run."""
from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bpsfast.base import settings
from bpsfast.launch import ssh_job
from bpsfast.launch.host_list import Host
from bpsfast.launch.ssh import Ssh
from bpsfast.orchestration.errors import ConfigError
from tests.end_to_end.test_keyless import STRANGER, TRAINS
from tests.support import ssh_jobs
from tests.support.ssh_jobs import DIGEST, OVER_SSHD, WAIT, digests, is_empty

shared_hosts, hosts, trainer = ssh_jobs.shared_hosts, ssh_jobs.hosts, ssh_jobs.trainer


class TestJobs:
    pytestmark = OVER_SSHD

    def test_two_hosts_and_a_helper_give_the_bits_of_a_local_job(self, hosts, trainer, tmp_path):
        program = trainer(DIGEST)
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
        nodes = {line.partition(" of ")[0] for line in shown}  # what follows is the job's
        assert nodes <= {"[rank 0] 0 0 2 node0", "[rank 1] 1 1 2 node0", "[rank 2] 2 0 1 node1"} and nodes

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
        assert set(done.stdout.splitlines()) == {
            f"[rank {rank}] {tmp_path} imported a b c'd {rank} None {python}" for rank in range(2)}

    def test_torchs_store_has_a_free_port_on_the_first_host(self, hosts, trainer):
        program = trainer("""
            import os, socket, struct
            rank, address = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            if rank == 0:  # as torch's store does it
                with socket.create_server(("", address[1])) as server:
                    server.accept()[0].sendall(b"hello")
            else:
                while True:
                    try:
                        with socket.create_connection(address, 5) as sock:
                            print(sock.recv(5, socket.MSG_WAITALL).decode(), os.environ["NODE_RANK"])
                        break
                    except ConnectionRefusedError:
                        pass
        """)
        done = hosts.run("run", "-H", "gpu1:1,gpu2:1", *program, env={"MASTER_ADDR": "gpu9", "MASTER_PORT": "1"})
        assert done.returncode == 0 and done.stdout == "[rank 1] hello 1\n", done.stderr
        assert "no rank has joined the job" in done.stderr and "still running" not in done.stderr

    def test_ssh_may_go_by_ipv6(self, hosts, trainer):
        for machine, interface, number in ((hosts.cluster.hub, "br0", 1), (hosts.cluster["gpu1"], "eth0", 2)):
            subprocess.run(["ip", "-n", machine.namespace, "addr", "replace", f"fd77::{number}/64", "dev", interface,
                            "nodad"], check=True, timeout=20)
        hosts.configure(f"HostKeyAlias {hosts.cluster['gpu1'].address}")
        hosts.know(["gpu1", "gpu1"], keys_of=["gpu1", "gpu2"])
        done = hosts.run("run", "-H", "root@[fd77::2]:1,gpu2:1", *trainer(DIGEST))
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
            done = hosts.run("run", "-H", "gpu1,gpu2", *trainer(DIGEST))
        finally:
            hosts.start_sshd("gpu2")
        assert done.returncode == 0, done.stderr
        assert set(digests(done.stdout)) == {"rank 0", "rank 1"} and "motd" not in done.stdout
        assert "careful" not in done.stderr

    def test_the_jobs_key_is_in_no_command_line_and_not_in_sshs_environment(self, hosts, trainer):
        key = "5e" * 32
        program = trainer(WAIT)
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

    def test_a_stranger_on_a_third_host_is_refused(self, hosts, trainer, tmp_path):
        """The launcher has drawn a key; the stranger knows where the scheduler listens, and all that follows."""
        stop = tmp_path / "stop"
        program = trainer("import os; print('at', os.environ['BPSFAST_SCHEDULER'], flush=True)\n" + TRAINS)
        with hosts.launch("run", "-H", "gpu1,gpu2", *program, str(stop)) as launcher:
            said = iter(launcher.stdout.readline, "")
            address = next(line.split()[-1].split(",")[0] for line in said if " at " in line)
            assert any("step" in line for line in said)
            with hosts.cluster["cpu1"].popen([sys.executable, "-c", STRANGER, address], stdout=subprocess.PIPE,
                                             stderr=subprocess.PIPE, text=True) as stranger:
                out, err = stranger.communicate(timeout=90)
            assert out == "refused 2\n", out + err
            stop.touch()
            out, err = launcher.communicate(timeout=90)
            assert launcher.returncode == 0 and out.count("right") == 2, out + err
        assert is_empty(hosts)

    def test_this_machine_needs_no_ssh(self, trainer):
        done = subprocess.run([sys.executable, "-m", "bpsfast", "run", "-H", "localhost:2", *trainer(DIGEST)],
                              capture_output=True, text=True, timeout=90, check=False, env={"PATH": os.environ["PATH"]})
        assert done.returncode == 0, done.stderr
        assert set(digests(done.stdout)) == {"rank 0", "rank 1"}


@pytest.mark.parametrize(("assigned", "found"), [
    (["A=1", "B", "C=x=y", "D="], {"A": "1", "B": "here", "C": "x=y", "D": ""}), ([], {}),
])
def test_variables(assigned, found):
    assert ssh_job.variables(assigned, {"B": "here"}) == found


@pytest.mark.parametrize(("assigned", "text"), [
    ("NONE", "not set here"), ("BPSFAST_RANK=1", "--set"), ("WORLD_SIZE=2", "role"), ("=1", "role"),
])
def test_variables_that_are_refused(assigned, text):
    with pytest.raises(ConfigError, match=text):
        ssh_job.variables([assigned], {})


def test_a_dry_run_says_what_runs_where_and_asks_nobody():
    shown: list[str] = []
    plan = ssh_job.SshPlan(hosts=[Host("a", 2), Host("me@b", 1)], helpers=[Host("c", 0)],
                         ssh=Ssh(port=23, python="/opt/python", directory="/w"), variables={"LANG": "C C"})
    ssh_job.dry_run(plan, ["python", "train.py"], settings.Settings(job_key="ab" * 32), shown.append)
    heads = [line.partition(":")[0] for line in shown]
    assert heads == ["# a, in /w", "scheduler", "node 0", "rank 0", "rank 1", "# me@b, in /w", "node 1", "rank 2",
                     "# c, in /w", "helper 0"]
    assert "LANG='C C'" in shown[3] and shown[3].endswith("python train.py")
    assert "-p 23" in shown[0] and "/opt/python -m bpsfast agent" in shown[0]
    assert not any(word in "".join(shown) for word in ("abab", "SCHEDULER", "MASTER")), "they come with a job"


def test_one_address_cannot_be_that_of_several_hosts():
    plan = ssh_job.SshPlan(hosts=[Host("a"), Host("b")], ssh=Ssh())
    with pytest.raises(ConfigError, match="interface"):
        ssh_job.run(plan, ["python"], settings.Settings(node_host="10.0.0.1"))
