"""Tests profile files: other bytes stay as they are, and undo restores the previous content exactly."""
from __future__ import annotations

import json
import os

import msgspec
import pytest
from hypothesis import given, strategies as st

from bpsfast.base import profile, settings
from bpsfast.orchestration.errors import ConfigError

TEXT = """# for the cluster in the cellar
partition_bytes = 1_000_000  # measured in May
transport = "rdma"

[]
""".replace("[]\n", "")


def test_other_keys_comments_and_mode_stay(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text(TEXT)
    file.chmod(0o640)
    change = profile.apply(str(file), {"partition_bytes": 2_000_000, "rdma_cores": "numa"}, "tune rdma")
    assert file.read_text() == TEXT.replace("1_000_000", "2000000") + 'rdma_cores = "numa"\n'
    assert file.stat().st_mode & 0o777 == 0o640
    assert settings.load_with_origins({"profile": str(file)}, {})[0].rdma_cores == "numa"
    assert (change.path, change.reason) == (str(file), "tune rdma") and change.date.startswith("20")


@pytest.mark.parametrize("content", [TEXT, TEXT.replace("\n", "\r\n"), "", "transport = 'tcp'", None])
def test_undo_restores_every_byte_one_apply_at_a_time(tmp_path, content):
    file = tmp_path / "job.toml"
    if content is not None:
        file.write_bytes(content.encode())
    profile.apply(str(file), {"rdma_mtu": 1024}, "first")
    between = file.read_bytes()
    profile.apply(str(file), {"rdma_mtu": 2048, "rdma_relaxed_ordering": True}, "second")
    assert profile.read(str(file))["rdma_relaxed_ordering"] is True
    assert profile.undo(str(file)).reason == "second" and file.read_bytes() == between
    change = profile.undo(str(file))
    assert change.reason == "first" and change.removed == (content is None)
    assert (file.read_bytes().decode() if file.exists() else None) == content
    assert sorted(os.listdir(tmp_path)) == (["job.toml"] if content is not None else [])
    with pytest.raises(ConfigError, match="nothing to undo"):
        profile.undo(str(file))


def test_undo_does_not_lose_what_somebody_wrote_since(tmp_path):
    file = tmp_path / "job.toml"
    profile.apply(str(file), {"rdma_mtu": 1024}, "tune rdma")
    file.write_text("rdma_mtu = 512\n")
    with pytest.raises(ConfigError, match=r"changed since 20.*`tune rdma`"):
        profile.undo(str(file))
    assert file.read_text() == "rdma_mtu = 512\n"


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real.toml").write_text(TEXT)
    (tmp_path / "link.toml").symlink_to(tmp_path / "real.toml")
    assert profile.apply(str(tmp_path / "link.toml"), {"rdma_mtu": 1024}, "x").path == str(tmp_path / "real.toml")
    assert (tmp_path / "link.toml").is_symlink() and "rdma_mtu = 1024" in (tmp_path / "real.toml").read_text()


def test_a_text_that_cannot_be_changed_by_lines_is_refused_and_stays(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text('node_id = """\nrdma_mtu = 5\n"""\n')
    with pytest.raises(ConfigError, match="yourself: rdma_mtu = 1024"):
        profile.apply(str(file), {"rdma_mtu": 1024}, "x")
    assert os.listdir(tmp_path) == ["job.toml"]


def test_a_broken_undo_file_and_a_place_that_cannot_be_written_are_told(tmp_path):
    file = tmp_path / "job.toml"
    (tmp_path / "job.toml.undo").write_text("{")
    with pytest.raises(ConfigError, match=r"job\.toml\.undo cannot be read"):
        profile.apply(str(file), {"rdma_mtu": 1024}, "x")
    with pytest.raises(ConfigError, match="not a writable folder"):
        profile.writable(str(tmp_path / "absent" / "job.toml"))
    with pytest.raises(ConfigError, match="Is a directory"):
        profile.writable(str(tmp_path))
    file.write_text("x = [")
    with pytest.raises(ConfigError, match="not TOML"):
        profile.writable(str(file))


@given(st.dictionaries(st.sampled_from(["rdma_mtu", "credit_bytes", "transport", "rdma_cores"]),
                       st.one_of(st.integers(0, 10**9), st.booleans(), st.text("ab\"'#\\ü \n", max_size=8))),
       st.dictionaries(st.sampled_from(["rdma_mtu", "transport", "node_id"]),
                       st.one_of(st.integers(0, 10**9), st.text("ab #=", max_size=8)), min_size=1))
def test_an_edit_sets_what_is_asked_for_and_nothing_else(before, values):
    text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in before.items())
    assert msgspec.toml.decode(profile.edited(text, values)) == before | values
