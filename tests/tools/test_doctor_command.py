"""``bpsfast doctor``: its whole output for each recorded machine, its exit codes, its options."""
from __future__ import annotations

import json
import threading
from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result

from bpsfast.base import settings
from bpsfast.cli import cli
from bpsfast.hardware.host import Host
from bpsfast.hardware.kernel import Address
from bpsfast.orchestration.errors import ConfigError
from bpsfast.tools.commands import doctor as command
from bpsfast.tools.doctor import peer as other
from bpsfast.tools.doctor.examination import CHECKS
from bpsfast.tools.doctor.facts import Facts
from bpsfast.tools.perf.control import host_and_port, secret_for
from tests.sysfs_trees import NAMES
from tests.sysfs_trees.machine import Machine

_EXITS = {"mlx5_roce": 1, "infiniband": 0, "efa": 3, "rxe": 0, "none": 3}


def doctor(*arguments: str) -> Result:
    """Run the command without the variables of whoever runs the tests."""
    return CliRunner().invoke(cli, ["doctor", *arguments])


@pytest.mark.parametrize("name", NAMES)
def test_the_report_is_the_golden_one(name: str, recorded_machine: Callable[[str], Machine],
                                      golden: Callable[[str, str], None]) -> None:
    done = doctor("--root", str(recorded_machine(name).root))
    assert done.exit_code == _EXITS[name], done.output
    golden(f"doctor_{name}.txt", done.output)


@pytest.mark.parametrize(("name", "peer"), [("mlx5_roce", "gpu08-roce"), ("infiniband", "node043-ib")])
def test_the_report_about_both_ends_is_the_golden_one(name: str, peer: str, golden: Callable[[str, str], None],
                                                      recorded_machine: Callable[[str], Machine]) -> None:
    done = doctor("--root", str(recorded_machine(name).root), "--peer", peer)
    assert done.exit_code == _EXITS[name], done.output
    golden(f"doctor_{name}_peer.txt", done.output)


@pytest.mark.parametrize("name", NAMES)
def test_json_has_every_check_once_and_the_same_verdicts(name: str,
                                                         recorded_machine: Callable[[str], Machine]) -> None:
    root = str(recorded_machine(name).root)
    told = json.loads(doctor("--root", root, "--json").output)
    assert sorted(each["code"] for each in told["findings"]) == [check.code for check in CHECKS]
    text = doctor("--root", root).output
    for each in told["findings"]:
        assert f"  {each['status']}  {each['code']}  " in text
        assert all(action["command"] in text for action in each["actions"] if each["status"] != "PASS")
    assert told["blocked"] == [each["code"] for each in told["findings"] if each["status"] == "FAIL"]


def test_the_recorded_machine_s_settings_count_and_not_ours(recorded_machine: Callable[[str], Machine],
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BPSFAST_TRANSPORT", "rdma")
    machine = recorded_machine("none").answer(environ={"BPSFAST_TRANSPORT": "tcp"})
    told = json.loads(doctor("--root", str(machine.root), "--json").output)
    setting = next(each for each in told["findings"] if each["code"] == "RD17")
    assert setting["found"] == "tcp (by BPSFAST_TRANSPORT)"


def test_this_machine_can_be_examined() -> None:
    done = doctor("--json")
    assert done.exit_code in (0, 1, 3), done.output
    told = json.loads(done.stdout)
    assert len(told["findings"]) == len(CHECKS)
    assert not any("itself failed" in each["found"] for each in told["findings"]), told


@pytest.mark.parametrize(("arguments", "words"), [
    (("--root", "/nowhere/at/all"), "there is no such folder"),
    (("--listen", "--peer", "x"), "--listen cannot be combined"),
    (("--listen", "70000"), "70000"),
    (("--peer", "host:port"), "expected HOST or HOST:PORT"),
    (("--set", "no_such=1"), "not a setting of bpsfast"),
])
def test_wrong_usage_is_exit_code_2(arguments: tuple[str, ...], words: str) -> None:
    done = doctor(*arguments)
    assert done.exit_code == 2 and words in done.output


def test_answers_that_cannot_be_read_are_named(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("none").write("answers.json", '{"shm_nbytes": "much"}')
    done = doctor("--root", str(machine.root))
    assert done.exit_code == 2 and "answers.json" in done.output and "shm_nbytes" in done.output


@pytest.mark.parametrize(("text", "split"), [
    ("gpu08", ("gpu08", 18619)), ("gpu08:7000", ("gpu08", 7000)), ("10.0.0.1:1", ("10.0.0.1", 1)),
    ("fe80::1", ("fe80::1", 18619)), ("[fe80::1]", ("fe80::1", 18619)), ("[fe80::1]:7000", ("fe80::1", 7000)),
])
def test_a_peer_may_have_a_port(text: str, split: tuple[str, int]) -> None:
    assert host_and_port(text, 18619) == split


@pytest.mark.parametrize("text", ["gpu08:0", "gpu08:65536", ":7000", "gpu08:"])
def test_a_peer_with_a_wrong_port_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected HOST"):
        host_and_port(text, 18619)


def test_the_default_port_is_the_listener_s() -> None:
    assert command.DEFAULT_PORT == other.DEFAULT_PORT


def test_one_doctor_listens_and_another_asks(no_leaks: None) -> None:
    with other.Listener("127.0.0.1", 0, secret_for(settings.load({}, {}), ["127.0.0.1"]), _facts) as listener:
        thread = threading.Thread(target=listener.serve, args=(20,))
        thread.start()
        done = doctor("--json", "--peer", f"127.0.0.1:{listener.port}")
        thread.join(20)
    told = json.loads(done.stdout)
    assert told["peer"] == "127.0.0.1"
    assert not any("no doctor answers" in each["found"] for each in told["findings"])


def _facts(_: Address) -> Facts:
    loaded, origins = settings.load_with_origins({}, {})
    return Facts(Host(), loaded, origins)
