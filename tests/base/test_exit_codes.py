"""Tests that each exit code has one meaning: in the table, of daemons, and of launchers."""
from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing

import pytest

from bpsfast.base import exit_codes
from bpsfast.base.exit_codes import ABORTED, ENVIRONMENT, FAILED, LEFT_BEHIND, TIMEOUT, USAGE, code_of, code_of_daemon
from bpsfast.launch.output import Output
from bpsfast.launch.processes import Command, Kind
from bpsfast.launch.supervisor import Limits, Supervisor
from bpsfast.orchestration import errors


def test_every_code_is_in_the_table_once():
    codes = {name: value for name, value in vars(exit_codes).items() if isinstance(value, int) and name.isupper()}
    words = exit_codes.WORDS | exit_codes.WORDS_OF_RUN
    assert len(set(codes.values())) == len(codes) == len(words) and set(words) == set(codes.values())
    assert not any(code - 128 in signal.valid_signals() for code in words), "those say which signal"
    assert all(exit_codes.words_of(code) == text for code, text in words.items())
    assert "SIGKILL" in exit_codes.words_of(128 + signal.SIGKILL) and exit_codes.words_of(77) == ""


@pytest.mark.parametrize(("error", "code", "daemon"), [
    (errors.LackingError(), ENVIRONMENT, ENVIRONMENT), (errors.ConfigError(), USAGE, USAGE),
    (errors.StallError(), TIMEOUT, TIMEOUT), (errors.PeerLostError(), FAILED, ABORTED),
    (errors.ClosedError(), FAILED, FAILED), (errors.CapacityError(), ENVIRONMENT, ENVIRONMENT)])
def test_the_code_of_an_error(error, code, daemon):
    assert (code_of(error), code_of_daemon(error)) == (code, daemon)


@pytest.mark.slow
def test_a_helper_that_the_machine_refuses_something_is_no_helper_left_behind(no_leaks):
    """It fails by `OSError`: here the address that it is to have is no address of this machine."""
    key = "ab" * 32
    environ = {**os.environ, "BPSFAST_SCHEDULER": "127.0.0.1:9", "BPSFAST_JOB_KEY": key, "BPSFAST_LOCAL_SIZE": "0",
               "BPSFAST_NODE_ID": "helper", "BPSFAST_NODE_HOST": "192.0.2.1", "PYTHONSAFEPATH": "1"}
    helper = Command("helper 0", Kind.HELPER, (sys.executable, "-m", "bpsfast", "node"), environ)
    rank = Command("rank 0", Kind.RANK, ("sleep", "600"), dict(os.environ))
    err = io.BytesIO()
    with closing(Output(io.BytesIO(), err)) as output:
        code = Supervisor([rank, helper], limits=Limits(job_s=60.0, after_failure_s=0.1), output=output).run()
    assert code not in (LEFT_BEHIND, 0), err.getvalue()
    assert f"helper 0 failed first: it ended with exit code {code}" in err.getvalue().decode()


@pytest.mark.slow
def test_whoever_waits_for_other_ranks_is_told_which(tmp_path):
    """Rank 0 has started the daemons, so it cannot end before rank 1 has left."""
    program = ("import bpsfast, sys; bpsfast.init(stall_warn_s=0.3)\n"
               "if bpsfast.rank() == 1: sys.stdin.read()\n"
               "bpsfast.shutdown()")
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    ranks = [subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={"PATH": os.environ["PATH"], "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
             "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(port)}) for rank in range(2)]
    try:
        said = []
        for line in ranks[0].stderr:
            said.append(line)
            if "missing: rank 1" in line:
                break
        assert "rank 0 has left the job and has waited" in said[-1] and "has not called shutdown" in said[-1], said
    finally:
        ends = [rank.communicate(timeout=60) for rank in reversed(ranks)]
    assert [rank.returncode for rank in ranks] == [0, 0], (said, ends)
