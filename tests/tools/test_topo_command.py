"""``bpsfast topo`` on recorded machines and on descriptions of machines."""
from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bpsfast.cli import cli
from bpsfast.hardware.topology.graph import Link, LinkKind, Part, PartKind, Topology, to_json
from tests.sysfs_trees import INSIDES, NAMES
from tests.sysfs_trees.machine import Machine

Machines = Callable[[str], Machine]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["topo", *arguments])


@pytest.mark.parametrize("name", [*INSIDES, *NAMES])
def test_what_people_read_is_the_golden_text(name: str, recorded_machine: Machines,
                                             golden: Callable[[str, str], None]) -> None:
    done = run("--root", str(recorded_machine(name).root))
    assert done.exit_code == 0, done.output
    golden(f"topo_{name}.txt", done.stdout)


@pytest.mark.parametrize("name", INSIDES)
def test_json_read_back_is_the_same_machine(name: str, recorded_machine: Machines, tmp_path: Path) -> None:
    root, file = str(recorded_machine(name).root), tmp_path / "machine.json"
    assert run("--root", root, "--json", "-o", str(file)).stdout == ""
    assert run("--read", str(file)).stdout == run("--root", root).stdout
    assert json.loads(run("--read", str(file), "--json").stdout) == json.loads(file.read_text())


@pytest.mark.parametrize("name", INSIDES)
def test_strategies(name: str, recorded_machine: Machines) -> None:
    pytest.importorskip("scipy", reason="scipy is not installed")
    root = str(recorded_machine(name).root)
    told = json.loads(run("--root", root, "--strategy", "--service", "0.75", "--json").stdout)
    assert sum(way["share"] for way in told["ways"]) == pytest.approx(1.0)
    assert told["bound_seconds_per_byte"] <= told["seconds_per_byte"] * (1 + 1e-6)
    assert told["seconds_per_byte"] <= told["rule_seconds_per_byte"] * (1 + 1e-6)
    text = run("--root", root, "--strategy", "--service", "0.75").stdout
    assert f"{told['seconds_per_byte'] * 1e12:.3g} ms for each GB" in text and "and 0.75 of its size" in text


@pytest.mark.parametrize("name", ["dgx1", "cpu_two_socket", "mlx5_roce"])
def test_seats_are_the_golden_text(name: str, recorded_machine: Machines, golden: Callable[[str, str], None]) -> None:
    root = str(recorded_machine(name).hyperthreads().root)
    done = run("--cores", "--root", root)
    assert done.exit_code == 0, done.output
    golden(f"topo_cores_{name}.txt", done.stdout)


def test_seats_by_cards_ranks_and_byteps_variables(recorded_machine: Machines) -> None:
    machine = recorded_machine("dgx1").hyperthreads()
    arguments = ("--cores", "--root", str(machine.root), "--json")
    told = json.loads(run(*arguments, "--nic", "mlx5_3", "--ranks", "2").stdout)
    assert told["cards"] == ["mlx5_3"] and told["node"] == {"cpus": "20-39,60-79", "home": 1}
    assert [seat["home"] for seat in told["ranks"]] == [0, 0], "GPUs 0 and 1"
    machine.answer(environ={"BYTEPS_VISIBLE_CPU_CORES": "0-3:4,5", "BYTEPS_CPU_BLACKLIST": "3"})
    told = json.loads(run(*arguments, "--ranks", "2").stdout)
    assert [seat["cpus"] for seat in told["ranks"]] == ["0-2", "4-5"]
    machine.answer(environ={"BYTEPS_NUMA_ON": "0"})
    assert json.loads(run(*arguments).stdout)["why_not"] == "BPSFAST_NUMA is off"
    machine.answer(environ={}).allow("0-19")
    assert "may use CPUs 0-19" in run("--cores", "--root", str(machine.root)).stdout
    machine.write("proc/self/status", "Cpus_allowed_list:\t0-79\nMems_allowed_list:\t1")
    told = json.loads(run(*arguments, "--nic", "mlx5_0", "--ranks", "8").stdout)
    assert told["node"]["home"] is None, "node 0's memory is not this cpuset's"
    assert [seat["home"] for seat in told["ranks"]] == [None] * 4 + [1] * 4
    assert "no such device or interface; there are mlx5_0" in run(*arguments, "--nic", "eth0").output
    assert run("--cores").exit_code == 0, "this machine"


def test_options_that_do_not_go_with_seats() -> None:
    assert "--cores" in run("--ranks", "2").output and "only" in run("--cores", "--strategy").output


@pytest.mark.parametrize("option", [("--service", "0.5"), ("--set", "reduce_roots=2")])
def test_a_service_or_settings_without_a_strategy_are_refused(option: tuple[str, str]) -> None:
    done = run(*option)
    assert done.exit_code == 2 and "--strategy" in done.output


def test_bytepss_variables_force_a_strategy(recorded_machine: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scipy", reason="scipy is not installed")
    root = str(recorded_machine("dgx1").root)
    monkeypatch.setenv("BYTEPS_REDUCE_ROOTS", "2,3")
    assert "But forced by reduce_roots = 2,3:" in run("--root", root, "--strategy").stdout
    told = json.loads(run("--root", root, "--strategy", "--json", "--set", "reduce_roots=0").stdout)["forced"]
    assert told["by"] == "reduce_roots = 0" and {each["root"] for each in told["ways"][0]["copied"]} == {"gpu0"}
    refused = run("--root", root, "--strategy", "--set", "reduce_roots=8")
    assert refused.exit_code == 2 and "BYTEPS_REDUCE_ROOTS" in refused.output and "no local rank 8" in refused.output


def test_gpudirect_is_shown_done_if_asked_and_refused_where_it_cannot_be(recorded_machine: Machines) -> None:
    pytest.importorskip("scipy", reason="scipy is not installed")
    hgx = str(recorded_machine("hgx_h100").root)
    assert "gpu_direct, off; never measured" in run("--root", hgx, "--strategy").stdout
    assert "directly to nic" in run("--root", hgx, "--strategy", "--set", "gpu_direct=1").stdout
    refused = run("--root", str(recorded_machine("pcie_2x4").root), "--strategy", "--set", "gpu_direct=1")
    assert refused.exit_code == 2 and "BPSFAST_GPU_DIRECT" in refused.output and "unset it" in refused.output


def test_a_machine_without_memory_has_no_strategy(tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    file.write_text(to_json(Topology("m", (Part("gpu0", PartKind.GPU),), ())))
    done = run("--read", str(file), "--strategy")
    assert done.exit_code != 0 and "machine m has no socket" in done.output


def test_this_machine_is_shown() -> None:
    done = run()
    assert done.exit_code == 0 and "socket0" in done.stdout


def test_a_machine_that_hangs_together_badly_is_shown_all_the_same(tmp_path: Path) -> None:
    parts = tuple(Part(name, kind) for name, kind in [
        ("gpu0", PartKind.GPU), ("gpu1", PartKind.GPU), ("a", PartKind.SWITCH), ("b", PartKind.SWITCH),
        ("c", PartKind.SWITCH)])
    links = tuple(Link(*ends, LinkKind.PCIE, 1e9) for ends in ("ab", "bc", "ca"))
    file = tmp_path / "m.json"
    file.write_text(to_json(Topology("m", parts, links)))
    done = run("--read", str(file))
    assert done.exit_code == 0 and done.stdout.startswith("m: 0 sockets, 3 PCIe switches, 2 GPUs, 0 network cards")
    assert [line.split()[0] for line in done.stdout.splitlines()[-6:]] == ["PART", "gpu0", "gpu1", "a", "b", "c"]


@pytest.mark.parametrize(("content", "words"), [
    ('{"name": "m", "parts": [], "links": [{"a": "x", "b": "y", "kind": "pcie", "rate_bytes": 1}]}',
     "no part is named x"),
    ("", "not JSON"), ('{"name": "m"}', "missing required field")])
def test_a_file_that_describes_no_machine_is_refused_before_anything_is_written(
        content: str, words: str, tmp_path: Path) -> None:
    file, picture = tmp_path / "m.json", tmp_path / "m.svg"
    file.write_text(content)
    done = run("--read", str(file), "--svg", str(picture), "--json")
    assert done.exit_code == 2 and not picture.exists()
    told = json.loads(done.stdout)["error"]["text"]
    assert words in told and told.startswith(f"--read {file}: ")


def test_a_file_that_is_not_there_and_two_machines_at_once(tmp_path: Path) -> None:
    missing = run("--read", str(tmp_path / "nothing.json"))
    assert missing.exit_code == 3 and "No such file" in missing.output
    both = run("--read", "a", "--root", "b")
    assert both.exit_code == 2 and "choose one" in both.output
    assert run("--root", str(tmp_path / "nothing")).exit_code == 2


@pytest.mark.parametrize("name", ["dgx1", "hgx_h100", "cpu_two_socket"])
def test_the_picture_names_every_part(name: str, recorded_machine: Machines, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    root, picture = str(recorded_machine(name).root), tmp_path / "m.svg"
    done = run("--root", root, "--svg", str(picture), "--json")
    assert done.exit_code == 0, done.output
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    drawn = picture.read_text()
    for part in json.loads(done.stdout)["parts"]:
        assert f"<!-- {part['name']}" in drawn, part


def test_any_name_and_no_part_at_all_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    file, picture = tmp_path / "m.json", tmp_path / "m.svg"
    for parts in ((Part("$\\x$", PartKind.GPU), Part("<b>&", PartKind.NIC)), ()):
        file.write_text(to_json(Topology("$m_$", parts, ())))
        done = run("--read", str(file), "--svg", str(picture))
        assert done.exit_code == 0 and ElementTree.parse(picture).getroot().tag.endswith("svg"), done.output
        picture.unlink()


def test_without_matplotlib_the_error_names_the_extra(recorded_machine: Machines, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = run("--root", str(recorded_machine("dgx1").root), "--svg", str(tmp_path / "m.svg"))
    assert done.exit_code == 3 and "pip install 'bpsfast[plot]'" in done.output and not (tmp_path / "m.svg").exists()
