"""``bpsfast devices`` and ``bpsfast gids`` on recorded machines."""
from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result

from bpsfast.cli import cli
from bpsfast.hardware.rdma_route import choose
from bpsfast.pyx import verbs
from bpsfast.tools.commands import rdma_devices
from tests.sysfs_trees import NAMES
from tests.sysfs_trees.machine import Machine

_EXITS = {"none": 3}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("command", ["devices", "gids"])
def test_the_table_is_the_golden_one(command: str, name: str, recorded_machine: Callable[[str], Machine],
                                     golden: Callable[[str, str], None]) -> None:
    done = run(command, "--root", str(recorded_machine(name).root))
    assert done.exit_code == _EXITS.get(name, 0), done.output
    golden(f"{command}_{name}.txt", done.stdout)


def test_json_has_base_units(recorded_machine: Callable[[str], Machine]) -> None:
    told = json.loads(run("devices", "--json", "--root", str(recorded_machine("mlx5_roce").root)).stdout)
    port = told["devices"][1]["ports"][0]
    assert port["rate_bits_per_s"] == 100e9 and port["netdev_mtu"] == 1500 and port["roce_mtu"] == 1024
    assert port["use"] == "used" and told["devices"][0]["ports"][0]["use"] == "used"
    assert told["devices"][1]["pcie"]["bits_per_s"] < told["devices"][1]["pcie"]["max_bits_per_s"]
    assert told["cards"][0]["netdev"] == "eth0"


def test_the_peer_and_the_settings_decide_what_is_used(recorded_machine: Callable[[str], Machine]) -> None:
    root = str(recorded_machine("mlx5_roce").root)

    def used(*arguments: str) -> list[str]:
        told = json.loads(run("gids", "--json", "--root", root, *arguments).stdout)
        return [f"{row['device']} {row['index']}" for row in told if row["used"]]

    assert used() == used("--peer", "10.2.0.8") == ["mlx5_0 3", "mlx5_1 3"]
    assert used("--set", "rdma_devices=mlx5_1") == ["mlx5_1 3"]
    assert used("--set", "rdma_gid_index=1") == ["mlx5_0 1", "mlx5_1 1"]


def test_csv_has_the_same_rows(recorded_machine: Callable[[str], Machine]) -> None:
    done = run("gids", "--csv", "-d", "mlx5_1", "--root", str(recorded_machine("mlx5_roce").root))
    rows = list(csv.reader(io.StringIO(done.stdout)))
    assert rows[0][:6] == ["DEV", "PORT", "INDEX", "GID", "IPv4", "VER"] and len(rows) == 5
    assert rows[4][2:6] == ["3", "0000:0000:0000:0000:0000:ffff:0a02:0007", "10.2.0.7", "v2"]


def test_a_device_that_does_not_exist_is_an_error_with_the_others(recorded_machine: Callable[[str], Machine]) -> None:
    done = run("gids", "-d", "mlx5_9", "--root", str(recorded_machine("mlx5_roce").root))
    assert done.exit_code == 2 and "there are mlx5_0, mlx5_1" in done.output


def test_a_peer_that_does_not_resolve_is_an_error_in_json_too(recorded_machine: Callable[[str], Machine]) -> None:
    done = run("devices", "--json", "--peer", "nobody", "--root", str(recorded_machine("mlx5_roce").root))
    assert done.exit_code == 3 and "nobody" in json.loads(done.stdout)["error"]["text"]


def test_the_result_may_go_to_a_file(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("rxe")
    path = machine.root / "out.json"
    assert run("devices", "--json", "-o", str(path), "--root", str(machine.root)).stdout == ""
    assert json.loads(path.read_text())["devices"][0]["name"] == "rxe0"


def test_a_recorded_machine_has_no_library_to_ask(recorded_machine: Callable[[str], Machine]) -> None:
    for command in ("devices", "gids"):
        done = run(command, "--verbs", "native", "--root", str(recorded_machine("rxe").root))
        assert done.exit_code == 2 and "choose one" in done.output


def test_what_the_library_says_stands_beside_it(recorded_machine: Callable[[str], Machine]) -> None:
    host = recorded_machine("rxe").host
    assert rdma_devices.active_mtus(verbs, host) == {"rxe0/1": "not listed", "rxe1/1": "not listed"}
    table = rdma_devices.device_rows(host, choose(host), {"rxe0/1": "4096", "rxe1/1": "not listed"})
    assert [row[-1] for row in table] == ["ACTIVE_MTU", "4096", "not listed"]
    told = rdma_devices.device_data(host, choose(host), {"rxe0/1": "4096", "rxe1/1": "not listed"})["devices"]
    assert [device["ports"][0]["active_mtu"] for device in told] == [4096, "not listed"]
    found = rdma_devices.gid_table(host)
    assert set(rdma_devices.verdicts(verbs, found).values()) == {"not listed"}
    rows = rdma_devices.gid_rows(found, choose(host), dict.fromkeys(found, "same"))
    assert [row[-1] for row in rows] == ["VERBS"] + ["same"] * 4
