"""``bpsfast info``: what is here and why the rest is not, without importing any of it; settings with their origins."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from bpsfast import __version__
from bpsfast.base.settings import table
from bpsfast.cli import cli
from bpsfast.tools import inventory
from bpsfast.tools.commands.info import SettingRow
from bpsfast.tools.inventory import Inventory

ROOT = Path(__file__).resolve().parents[2]


def invoke(*arguments: str, **variables: str) -> Result:
    return CliRunner(env=variables).invoke(cli, ["info", *arguments])


def test_json_is_the_inventory_and_the_text_says_the_same() -> None:
    found = msgspec.json.decode(invoke("--json").stdout, type=Inventory)
    assert found.version == __version__ and found.is_whole and found.machine.n_cpus_allowed >= 1
    assert {part.name for part in found.transports} == {"shm", "tcp", "rdma", "encryption"}
    assert all(part.works or part.reason for part in (*found.transports, *found.frameworks, found.verbs, *found.gpus))
    text = invoke().stdout
    for part in (*found.transports, *found.frameworks):
        line = next(line for line in text.splitlines() if f"] {part.name} " in line)
        assert line.startswith("  [X] " if part.works else "  [ ] ") and part.reason in line and part.found in line


def test_frameworks_are_found_and_not_imported(tmp_path: Path) -> None:
    for name, version in (("jax", "9.8.7"), ("keras", "3.2"), ("torch", "2.99")):
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        (tmp_path / f"{name}.py").write_text("raise SystemExit('it was imported')")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from bpsfast.cli import cli; cli(['info', '--json'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    frameworks = {part.name: part for part in msgspec.json.decode(done.stdout, type=Inventory).frameworks}
    assert frameworks["torch"].works and frameworks["torch"].found == "2.99 by bpsfast.torch"
    assert frameworks["jax"].found.startswith("9.8.7") and frameworks["keras"].found.startswith("3.2")


def test_what_a_framework_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "installed", {"jax": "0.9", "jaxlib": "0.9", "keras": "3"}.get)
    jax = inventory._framework("jax", ("jax",), "bpsfast.jax", ("jaxlib", "optax"))
    assert not jax.works and jax.found == "0.9" and jax.reason.endswith("pip install optax")
    assert inventory._framework("keras", ("keras",), "bpsfast.nowhere", ()).reason.endswith("lacks bpsfast.nowhere")


def test_the_compiled_modules_are_those_of_pyx() -> None:
    assert sorted(inventory._MODULES) == sorted(path.stem for path in ROOT.glob("pyx/*.pyx"))


def test_a_module_that_does_not_load_is_named_and_exit_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "_MODULES", ("engine", "lost"))
    done = invoke()
    assert done.exit_code == 3
    assert "1 of 2 load" in done.output and "[ ] bpsfast.pyx.lost  No module named 'bpsfast.pyx.lost'" in done.output
    assert json.loads(invoke("--json").stdout)["modules"][1]["works"] is False


def test_effective_shows_every_setting_its_origin_and_no_key() -> None:
    variables = {"BPSFAST_JOB_KEY": "ab" * 16, "BYTEPS_PARTITION_BYTES": "8192", "BPSFAST_NODE_ID": "n7"}
    done = invoke("--effective", "--json", "--set", "tcp_streams=4", **variables)
    found = {each.name: each for each in msgspec.json.decode(done.stdout, type=list[SettingRow])}
    assert list(found) == [row.name for row in table()]
    assert {name: (found[name].value, found[name].origin) for name in ("tcp_streams", "partition_bytes", "node_id",
                                                                     "job_key", "cores")} == {
        "tcp_streams": (4, "command line"), "partition_bytes": (8192, "BYTEPS_PARTITION_BYTES (alias)"),
        "node_id": ("n7", "BPSFAST_NODE_ID"), "job_key": ("(set)", "BPSFAST_JOB_KEY"), "cores": (0, "default")}
    assert "abab" not in done.output + invoke("--effective", **variables).output
    assert invoke("--effective", **variables).output == CliRunner(env=variables).invoke(cli, ["env"]).output


@pytest.mark.parametrize(("arguments", "words"), [
    (("--set", "tcp_stream=4"), "did you mean tcp_streams?"), (("--effective", "--set", "cores=x"), "BPSFAST_CORES"),
    (("--verbs", "none"), "none"), (("nothing",), "nothing")])
def test_wrong_arguments_are_exit_code_2(arguments: tuple[str, ...], words: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2 and words in done.output
