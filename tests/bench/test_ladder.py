"""The parts of the ladder without a device: shares, the control connection, the verdict, the command line."""
from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from bpsfast.base import settings
from bpsfast.bench.paper.ladder import control, device, report, run, shares
from bpsfast.bench.paper.ladder.shares import OURS, TCP, VANILLA, VARIANTS, Model
from bpsfast.bench.paper.ladder.worker import Row
from bpsfast.orchestration import security
from bpsfast.orchestration.errors import ConfigError, MismatchError, PeerLostError, ProtocolError, StallError
from bpsfast.tools.perf.control import secret_for
from bpsfast.tools.planner.catalog import MODELS, n_elements

PARTITION_NBYTES = 4_096_000


def test_models_have_divisors():
    assert shares.parse_models("vgg19/8, resnet50", {"resnet50": 2}) == [Model("vgg19", 8), Model("resnet50", 2)]
    assert [str(model) for model in shares.parse_models("vgg19/8,resnet50", {})] == ["vgg19/8", "resnet50"]


@pytest.mark.parametrize("text", ["", "alexnet", "vgg19/0", "vgg19/", "vgg19/x", "8 bytes"])
def test_impossible_models_are_refused(text):
    with pytest.raises(ConfigError, match="models"):
        shares.parse_models(text, {})


@pytest.mark.parametrize("name", MODELS)
def test_partitions_hold_every_byte_and_both_hosts_sum_half(name):
    parts = shares.parts_of(Model(name), PARTITION_NBYTES)
    assert sum(part.nbytes for part in parts) == 4 * sum(n_elements(name))
    assert all(0 < part.nbytes <= PARTITION_NBYTES and part.nbytes % 4 == 0 for part in parts)
    difference = sum(part.nbytes if part.remote else -part.nbytes for part in parts)
    assert abs(difference) <= PARTITION_NBYTES


def test_a_divided_list_has_as_many_messages():
    whole, part = (shares.parts_of(Model("vgg19", divisor), PARTITION_NBYTES) for divisor in (1, 8))
    assert len(part) == len(whole)
    assert sum(each.nbytes for each in part) == pytest.approx(sum(each.nbytes for each in whole) / 8, rel=1e-4)


def test_partitions_lie_on_pages_apart_even_when_shifted():
    parts = shares.parts_of(Model("resnet50", 64), PARTITION_NBYTES)
    offsets, total = shares.offsets(parts)
    assert all(offset % shares.PAGE == 0 for offset in offsets)
    ends = [offset + shares.SHIFT + part.nbytes for offset, part in zip(offsets, parts)]
    assert all(end <= following for end, following in zip(ends, [*offsets[1:], total]))


def test_the_pattern_is_the_same_from_wherever_it_is_computed():
    whole = shares.pattern(0, 4096)
    assert (shares.pattern(52, 400) == whole[13:113]).all()
    assert np.unique(whole).size == whole.size


def test_each_variant_except_the_combined_ones_changes_one_decision():
    changes = [bool(variant.switches) + variant.own_by_wire + variant.unaligned
               for variant in VARIANTS if not variant.is_tcp]
    assert changes == [0, 1, 1, 1, 1, 1, 1, 1, 3]
    single = [variant for variant in VARIANTS if variant not in (OURS, VANILLA) and not variant.is_tcp]
    assert all(variant.switches.bit_count() <= 1 for variant in single)
    assert VANILLA.switches == sum(variant.switches for variant in single)


def row(variant, *samples_s):
    return Row(variant, 10, 1000, list(samples_s), [len(samples_s)], [0.5], [1.0])


def test_the_verdict_says_who_loses():
    rows = [row(OURS, 1.0), row(VANILLA, 3.0, 5.0), row(TCP, 2.0)]
    found = report.verdict(Model("vgg19", 8), rows)
    assert found["vanilla_loses"] and found["vanilla_over_tcp"] == 2.0 and found["ours_over_tcp"] == 0.5
    assert found["sentence"].startswith("vgg19/8: vanilla loses to tcp here: a step takes 2.00 times as long "
                                        "(longer in 1 of 1 rounds, 1.50 by the best steps)")
    assert "beats" in report.verdict(Model("vgg19"), [row(OURS, 1.0), row(VANILLA, 1.0), row(TCP, 2.0)])["sentence"]
    assert len(report.block(Model("vgg19"), rows).splitlines()) == 4


def test_rounds_are_compared_one_by_one():
    vanilla, tcp = row(VANILLA, 3.0, 5.0, 1.0), row(TCP, 2.0, 2.0, 2.0)
    vanilla.n_steps, tcp.n_steps = [2, 1], [1, 2]
    assert vanilla.turns_s() == [4.0, 1.0]
    found = report.verdict(Model("vgg19"), [row(OURS, 1.0), vanilla, tcp])
    assert (found["n_rounds_lost"], found["n_rounds"]) == (1, 2)


def test_processor_time_is_per_gigabyte():
    found = row(OURS, 1.0, 1.0)
    assert found.per_gigabyte([0.5, 0.5]) == pytest.approx(1.0 / (2 * 1000 / 1e9))
    assert row(OURS, 1.0, 2.0, 3.0).quartiles_s() == (1.5, 2.5)


@pytest.fixture
def connected():
    """Return one end, and the socket of the other, which has proved the key."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(control.accept, server, secret_for(settings.load({}), ["127.0.0.1"]))
        connection = control.connect("127.0.0.1", server.getsockname()[1])
        accepted_end = accepted.result(20)
    accepted_end._file.close()  # only the socket remains
    other = accepted_end._socket
    yield connection, other
    connection.close()
    other.close()


def test_a_stranger_is_refused_and_the_next_one_served():
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(control.accept, server, secret_for(settings.load({}), ["127.0.0.1"]))
        with socket.create_connection(server.getsockname()) as stranger:
            with pytest.raises((PeerLostError, MismatchError)):
                security.plain_handshake_dialer(stranger, bytes(32), control._CONTEXT, control._HELLO, 20)
        connection = control.connect("127.0.0.1", server.getsockname()[1])
        accepted.result(20).close()
        connection.close()


def test_another_machine_needs_a_key():
    with pytest.raises(ConfigError, match="BPSFAST_JOB_KEY"):
        control.connect("10.0.0.1", 1)


def test_messages_arrive_as_they_were_sent(connected):
    connection, other = connected
    peer = control.Control(other)
    offer = control.Offer(1, 2, "ff", 0, 1024, 5, 6)
    for message in (control.Open("vgg19", 8, 4096), control.Make("ours", offer, True),
                    control.Made(port=7, n_streams=2), control.Ran(0.5, 1.0, 0)):
        connection.send(message)
        assert peer.receive(20) == message
    peer.close()
    assert connection.receive(20) is None


@pytest.mark.parametrize(("line", "error", "text"), [
    (b"GET / HTTP/1.1\n", ProtocolError, "no line of a ladder"),
    (b'{"type":"Run","variant":1}\n', ProtocolError, "no line of a ladder"),
    (b'{"type":"Failed","text":"no memory"}\n', PeerLostError, "failed: no memory"),
    (b'{"type":"Ready"}\n', ProtocolError, "sent Ready, not Opened"),
    (b"", StallError, "said nothing for 0.1 s"),
])
def test_unexpected_lines_are_errors_in_words(connected, line, error, text):
    connection, other = connected
    other.sendall(line)
    with pytest.raises(error, match=text):
        connection.expect(control.Opened, timeout_s=0.1 if not line else 20)


def test_a_peer_that_ends_is_lost(connected):
    connection, other = connected
    other.close()
    with pytest.raises(PeerLostError, match="ended before its Opened"):
        connection.expect(control.Opened, timeout_s=20)


def test_nobody_listening_is_said_with_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(PeerLostError, match="bench ladder --listen"):
        control.connect("127.0.0.1", port, is_gone=lambda: True)


@pytest.mark.parametrize("options", [
    {"peer": "x", "listen": ""}, {"devices": "a,b,c"}, {"peer": "x", "devices": "a,b"}, {"models": "alexnet"}])
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError):
        run(options)


@pytest.mark.skipif(Path("/sys/class/infiniband").is_dir() and bool(os.listdir("/sys/class/infiniband")),
                    reason="this machine has RDMA devices")
def test_without_a_device_one_line_and_exit_code_3():
    with pytest.raises(OSError, match="needs an RDMA device") as caught:
        device.usable("", -1)
    assert caught.value.errno == errno.ENODEV
    for arguments in ((), ("--listen",), ("nowhere",)):
        done = subprocess.run([sys.executable, "-m", "bpsfast", "bench", "ladder", *arguments], capture_output=True,
                              text=True, timeout=60, check=False)
        assert done.returncode == 3 and not done.stdout
        assert len(done.stderr.splitlines()) == 1 and "bpsfast doctor" in done.stderr
