"""A process that has not got the key, or is another user's: it cannot join a running job, read from it, write to it, or
learn names; and a second job beside it, however alike, is none of its business.
"""
from __future__ import annotations

import base64
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import bpsfast
from bpsfast.base import message_socket, reference_sum
from bpsfast.base.settings import environment, load
from bpsfast.node.transport import shm
from bpsfast.orchestration import messages, security
from bpsfast.orchestration.errors import StallError
from bpsfast.orchestration.scheduler_client import SchedulerClient
from tests.support import listening_sockets, rank_messages, recordings

NAME = "a-name-that-nobody-else-may-learn"
#: A user that owns nothing.
NOBODY = 65534
LIMIT_S = 20.0


def inputs(number, n_ranks):
    generator = np.random.default_rng(number)
    return [generator.standard_normal(30_000).astype(np.float32) for _ in range(n_ranks)]


def begin():
    """Let ranks listen for each other, and the job know a name."""
    rank_messages.ring([100])
    return step(0)


def step(number):
    """Whether the sum of everybody's inputs of that *number* is right, to the bit. Ranks are on two nodes."""
    arrays = inputs(number, bpsfast.size())
    found = bpsfast.push_pull(arrays[bpsfast.rank()], name=NAME)
    return found.tobytes() == reference_sum.reduce([[each] for each in arrays], average=True).tobytes()


@pytest.fixture(scope="module")
def running(shared_job):
    """A job of two nodes that has pushed a tensor."""
    started = shared_job(ranks=(1, 1), transport="auto")
    assert started.run(begin) == [True, True]
    return started


@pytest.fixture
def unharmed(running):
    """After the test the job's next sums are right."""
    yield
    assert running.run(step, 1) == [True, True]


def doors(job, kind):
    processes = {**job.daemons, **{f"rank {i}": process for i, process in enumerate(job.ranks)}}
    return [each for name, process in processes.items() for each in listening_sockets.of(name, process.pid)
            if each.kind == kind]


# -- without the key --------------------------------------------------------------------------------------------------

@pytest.mark.usefixtures("unharmed", "no_leaks")
@pytest.mark.parametrize("guess", ["any", "of the scheduler's address"])
def test_a_node_without_the_key_cannot_join(running, guess):
    [scheduler] = doors(running, "control")
    address = "bpsfast|{}:{}".format(*scheduler.address)
    key = secrets.token_bytes(32) if guess == "any" else security.job_key(None, address)
    node = SchedulerClient(*scheduler.address, key, now=time.monotonic(), start_timeout_s=1.0)
    try:
        node.send(messages.Join(version=messages.VERSION, package="", host="x", pid=1, index=-1, ranks=(0,),
                                server_processes=0, address="x:1", shm_name="", nic_rate_bytes=0.0, settings={}))
        with pytest.raises(StallError, match="wrong job key"):
            while True:
                assert node.recv_nowait(time.monotonic()) == []
                node.tick(time.monotonic())
                node.sockets[1].poll(20)
    finally:
        node.close()


@pytest.mark.usefixtures("unharmed", "no_leaks")
@pytest.mark.parametrize("which", range(3), ids=["a node", "a rank", "a lane"])
def test_the_local_socket_gives_nothing_to_whoever_has_another_key(running, which):
    pieces = recordings.local(secrets.token_bytes(32))[which]
    n_fds = pieces[0][3] >> 4
    for door in doors(running, "local"):
        with door.call(LIMIT_S) as sock, open(os.devnull, "rb") as file:
            socket.send_fds(sock, [b"".join(pieces)], [file.fileno()] * n_fds)
            answer, fds, _, _ = socket.recv_fds(sock, 1 << 16, 15)
            assert not fds
            refusal = shm.decode(answer[4:])
            assert isinstance(refusal, messages.Refuse)
            assert "another job key" in refusal.reason or "has not attached" in refusal.reason
            assert NAME not in refusal.reason
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""


@pytest.mark.usefixtures("unharmed", "no_leaks")
def test_what_a_node_of_this_job_has_said_cannot_be_said_again(running):
    """The right proof, twice: the first one may be the node itself, the second one has only heard it."""
    hello = b"".join(recordings.local(running.key)[0])
    door = next(each for each in doors(running, "local") if each.owner == "node 0")
    answers = []
    for _ in range(2):
        with door.call(LIMIT_S) as sock:
            sock.sendall(hello)
            answer, fds, _, _ = socket.recv_fds(sock, 1 << 16, 15)
            for fd in fds:
                os.close(fd)
            answers.append((shm.decode(answer[4:]), len(fds)))
    assert isinstance(answers[0][0], shm.PeerWelcome)
    assert isinstance(answers[1][0], messages.Refuse) and "counts once" in answers[1][0].reason and answers[1][1] == 0


@pytest.mark.usefixtures("unharmed", "no_leaks")
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX], ids=["tcp", "local"])
def test_ranks_give_a_stranger_a_nonce_and_nothing_else(running, family):
    for door in (each for each in doors(running, "messages") if each.family == family):
        with door.call(LIMIT_S) as sock:
            said = b"".join(recordings.posts(running.key)[0])  # recorded with this job's key, for another nonce
            sock.sendall(said)
            heard = bytearray()
            with contextlib.suppress(ConnectionResetError):
                while piece := sock.recv(1 << 16):
                    heard += piece
            assert len(heard) <= 40  # magic and nonce


@contextlib.contextmanager
def tapped(secret):
    """Read every packet of the loopback meanwhile; yields the ports to which CURVE was spoken, and what of *secret* was
    in one.
    """
    if os.geteuid() != 0:
        pytest.skip("packets can be read by root only")
    last, found, ports = secrets.token_bytes(16), set(), set()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as tap:
        tap.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
        tap.bind(("lo", 0))
        tap.settimeout(LIMIT_S)

        def listen():
            while last not in (packet := tap.recv(1 << 17)):
                found.update(each for each in secret if each in packet)
                if b"CURVE" in packet:
                    ports.add(packet[36:38])  # behind 14 bytes of ethernet and 20 of IP: where to

        listener = threading.Thread(target=listen)
        listener.start()
        try:
            yield ports, found
        finally:
            until = time.monotonic() + LIMIT_S
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                while listener.is_alive() and time.monotonic() < until:
                    sock.sendto(last, ("127.0.0.1", 9))  # behind all that waits to be read; dropped if that is too much
                    listener.join(0.1)
            assert not listener.is_alive()


def test_no_name_and_no_key_is_on_the_wire(job):
    """Everything that the loopback carries while a job begins, declares a name, sums, and sends messages."""
    key = secrets.token_bytes(32)
    with tapped([NAME.encode(), *_forms(key)]) as (ports, found):
        started = job(ranks=(1, 1), transport="tcp", key=key)
        assert started.run(begin) == [True, True]
    [scheduler] = doors(started, "control")
    assert scheduler.address[1].to_bytes(2, "big") in ports, "packets were read"
    assert not found


def conversation():
    """Sum what all ranks know beforehand, and send a message that they know, too; what of it may be on a wire."""
    assert rank_messages.ring([40_000], False) == {False}
    return step(0)


@pytest.mark.parametrize("encryption", ["on", "off"])
def test_gradients_and_messages_are_on_the_wire_unless_they_are_encrypted(job, encryption):
    """16 bytes in a row of each rank's gradients, of their sum or mean, and of each rank's message."""
    arrays = inputs(0, 2)
    known = [*arrays,
             *(reference_sum.reduce([[each] for each in arrays], average=average) for average in (False, True)),
             *(rank_messages.pattern(40_000, rank) for rank in (0, 1))]
    texts = [each.tobytes() for each in known]
    pieces = {text[begin:begin + 16]: number for number, text in enumerate(texts)
              for begin in range(0, len(text) - 16, len(text) // 16)}
    with tapped(pieces) as (ports, found):
        started = job(ranks=(1, 1), transport="tcp", encryption=encryption)
        assert started.run(conversation) == [True, True]
    assert ports, "packets were read"
    seen = {pieces[each] for each in found}
    if encryption == "on":
        assert not seen
    else:
        assert seen & {0, 1} and seen & {2, 3} and seen >= {4, 5}, "all of that goes over this wire"


# -- the key itself ---------------------------------------------------------------------------------------------------

def _forms(key):
    """The key, and what follows from it and opens as much, as it might be printed."""
    secret_keys = [security.curve_pair(key, role)[1] for role in ("scheduler", "node")]
    return [key, key.hex().encode(), base64.b64encode(key), repr(key)[2:-1].encode(), *secret_keys]


@pytest.mark.slow
def test_the_key_is_in_no_command_line_and_in_no_log(tmp_path):
    """A whole job by ``bpsfast run`` with a log that tells everything, and a rank that looks at all command lines."""
    key = secrets.token_bytes(32)
    program = tmp_path / "program.py"
    program.write_text(
        "import numpy as np, psutil, bpsfast\n"
        "bpsfast.init()\n"
        f"bpsfast.push_pull(np.ones(1000, 'f4'), name={NAME!r})\n"
        "for each in psutil.process_iter():\n"
        "    try:\n"
        "        print('command line:', each.pid, *each.cmdline())\n"
        "    except psutil.Error:\n"
        "        pass\n"
        "bpsfast.shutdown()\n")
    environ = {**os.environ, "BPSFAST_LOG_LEVEL": "DEBUG", "BPSFAST_JOB_KEY": key.hex()}
    done = subprocess.run([sys.executable, "-m", "bpsfast", "run", "-n", "2", "--nodes", "2", "--helpers", "1", "--",
                           sys.executable, str(program)], env=environ, capture_output=True, timeout=100, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said.decode()
    assert said.count(b"command line:") >= 2 * 6 and b"-m bpsfast node" in said, "the job's own were among them"
    assert b"DEBUG" in said
    assert not [form for form in _forms(key) if form in said]


# -- another job, another user ----------------------------------------------------------------------------------------

@pytest.mark.usefixtures("unharmed")
def test_a_second_job_of_the_same_names_beside_it_sums_its_own(running, job):
    second = job(ranks=(1, 1), transport="auto")
    for number in (3, 4):
        running.begin(step, number)
        assert second.run(step, number + 10) == [True, True]
        assert [each.value for each in running.outcomes()] == [True, True]
    assert {each.address for each in doors(running, "local")}.isdisjoint(
        each.address for each in doors(second, "local"))


@pytest.mark.usefixtures("unharmed")
def test_a_second_job_on_the_same_port_ends_in_words(running):
    """Its scheduler finds the port taken; its node reaches the first job's scheduler, and is not understood."""
    [scheduler] = doors(running, "control")
    host, port = scheduler.address
    settings = load({"scheduler": f"{host}:{port}", "job_key": secrets.token_hex(32), "num_nodes": 1, "local_size": 0,
                     "num_helpers": 1, "start_timeout_s": 3.0, "node_id": "node0", "node_host": "127.0.0.1"}, {})
    for role, words in (("scheduler", b"cannot listen on"), ("node", b"wrong job key or no scheduler")):
        done = subprocess.run([sys.executable, "-m", "bpsfast", role], env={**os.environ, **environment(settings)},
                              capture_output=True, timeout=60, check=False)
        assert done.returncode != 0 and words in done.stderr, done.stderr.decode()


def _as_nobody(function, *arguments):
    """Return what *function* prints, called in a process of another user, whose groups are that user's, too."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reader)
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.write(writer, "\n".join(function(*arguments)).encode() or b"nothing")
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with open(reader, "rb") as pipe:
        said = pipe.read().decode()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return said.split("\n")


def _segments(pid):
    """Where the memory that a process shares with others could be opened, had one the right."""
    return [str(path) for path in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(path).startswith("/memfd:bpsfast")]


def _opened(paths):
    """Those of *paths* that this user can open."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError), open(path, "rb"):
            found.append(path)
    return found


def _answers(places):
    """What this user hears on abstract sockets, and how many descriptors came."""
    found = []
    for address in places:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(LIMIT_S)
            sock.connect(address)
            with contextlib.suppress(ConnectionError):
                sock.sendall(bytes(40))
            heard, n_fds = b"", 0
            with contextlib.suppress(ConnectionError):
                while True:
                    data, fds, _, _ = socket.recv_fds(sock, 1 << 16, 15)
                    heard, n_fds = heard + data, n_fds + len(fds)
                    if not data:
                        break
            found.append(f"{n_fds} {heard!r}")
    return found


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
@pytest.mark.usefixtures("unharmed")
def test_another_user_opens_no_segment_and_gets_none_on_local_sockets(running):
    processes = [*running.daemons.values(), *running.ranks]
    pids = [each.pid for each in processes]
    segments = [path for pid in pids for path in _segments(pid)]
    paths = segments + [f"/proc/{pid}/{name}" for pid in pids for name in ("environ", "mem", "map_files", "fd")]
    assert len(segments) > 5 and set(_opened(paths)) >= set(segments), "this user can"
    assert _as_nobody(_opened, paths) == ["nothing"]
    nodes = _as_nobody(_answers, [each.address for each in doors(running, "local")])
    assert len(nodes) == 2
    for answer in nodes:
        assert answer.startswith("0 ") and f"runs as user {NOBODY}" in answer and NAME not in answer
    ranks = _as_nobody(_answers, [each.address for each in doors(running, "messages")
                                  if each.family == socket.AF_UNIX])
    assert ranks == ["0 b''"] * 2


@pytest.mark.usefixtures("no_leaks")
def test_proofs_of_attaching_are_of_one_process_and_one_key():
    proof = message_socket.attach_proof(b"k" * 32, 1, 0)
    others = [message_socket.attach_proof(*each) for each in ((b"k" * 32, 2, 0), (b"k" * 32, 1, 1), (b"l" * 32, 1, 0))]
    assert proof not in others
