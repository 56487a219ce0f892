"""A machine that was written down answers like one that is there."""
from __future__ import annotations

import ipaddress
from collections.abc import Callable
from pathlib import Path

import pytest

from bpsfast.hardware.host import ANSWERS, RecordedKernel, open_host
from bpsfast.hardware.kernel import Kernel, PingResult
from bpsfast.orchestration.errors import ConfigError
from tests.sysfs_trees.machine import Machine

PEER = ipaddress.ip_address("10.1.0.8")


def test_every_question_to_the_kernel_is_answered_from_the_file() -> None:
    asked = {name for name, value in vars(Kernel).items() if not name.startswith("_")}
    assert asked == {name for name in vars(RecordedKernel) if not name.startswith("_")} - {"answers"}


def test_answers(recorded_machine: Callable[[str], Machine]) -> None:
    kernel = recorded_machine("mlx5_roce").host.kernel
    route = kernel.route(PEER)
    assert (route.netdev, str(route.source), route.gateway, route.local) == ("eth2", "10.1.0.7", None, False)
    assert [each.version for each in kernel.addresses()["eth2"]] == [4, 6]
    assert kernel.pause_priorities("eth2") == (3,) and kernel.pause_priorities("eth0") is None
    assert kernel.statistics("eth3")["rx_discards_phy"] == 3499 and kernel.statistics("eth0") == {}
    assert kernel.ping(PEER, 1500) is PingResult.ANSWERED and kernel.ping(PEER, 1501) is PingResult.SILENT
    assert kernel.connect(PEER, 1) == "refused" and kernel.connect(ipaddress.ip_address("1.1.1.1"), 1) == "no answer"
    with pytest.raises(OSError, match=r"no route to 1\.1\.1\.1"):
        kernel.route(ipaddress.ip_address("1.1.1.1"))
    with pytest.raises(OSError, match="'x' cannot be resolved"):
        kernel.resolve("x")


def test_a_folder_without_answers_is_a_machine_of_which_little_is_known(tmp_path: Path) -> None:
    host = open_host(str(tmp_path))
    assert host.devices == [] and host.netdevs == {} and host.kernel.shm_nbytes() is None


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        open_host(str(tmp_path / "nothing"))
    (tmp_path / ANSWERS).write_text('{"adresses": {}}')
    with pytest.raises(ConfigError, match="adresses"):
        open_host(str(tmp_path))


def test_without_a_root_it_is_this_machine() -> None:
    assert type(open_host().kernel) is Kernel and open_host().tree.root == "/"
