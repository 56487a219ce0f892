"""Small files below a root: what is missing or refused reads as nothing."""
from __future__ import annotations

from pathlib import Path

import pytest

from bpsfast.hardware.sysfs import Tree, natural


def test_a_file_reads_without_its_line_feed(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("4: ACTIVE\n")
    tree = Tree(tmp_path)
    assert tree.text("state") == "4: ACTIVE" and tree.text("/state") == "4: ACTIVE" and tree.exists("state")


def test_what_is_missing_or_cannot_be_read_is_none(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    tree = Tree(tmp_path)
    assert tree.text("nothing") is None and tree.text("folder") is None and tree.number("nothing") is None
    assert tree.names("nothing") == [] and tree.target("folder") is None and not tree.exists("nothing")


@pytest.mark.parametrize(("text", "number"), [
    ("9000", 9000), ("0x2a", 42), ("-1", -1), ("16.0 GT/s", 16), ("", None), ("Unknown", None), ("0x", 0)])
def test_numbers(text: str, number: int | None, tmp_path: Path) -> None:
    (tmp_path / "n").write_text(text)
    assert Tree(tmp_path).number("n") == number


def test_links_and_folders(tmp_path: Path) -> None:
    for name in ("mlx5_10", "mlx5_2", "mlx5_0"):
        (tmp_path / name).mkdir()
    (tmp_path / "driver").symlink_to("../../bus/pci/drivers/mlx5_core")
    tree = Tree(tmp_path)
    assert tree.names() == ["driver", "mlx5_0", "mlx5_2", "mlx5_10"] and tree.target("driver") == "mlx5_core"


def test_why_a_device_file_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "uverbs0").write_text("")
    (tmp_path / "folder").mkdir()
    tree = Tree(tmp_path)
    assert tree.objection("uverbs0") is None
    assert tree.objection("uverbs1") == "No such file or directory" and tree.objection("folder") == "Is a directory"


def test_numbers_in_names_sort_as_numbers() -> None:
    assert sorted(["a10", "a9", "a", "10", "9b"], key=natural) == ["9b", "10", "a", "a9", "a10"]
