"""The coverage report from given counts; only `make coverage` counts lines."""
from __future__ import annotations

import configparser
from pathlib import Path

from tests.support.covered import ROOT, settings, summary


def test_lines_are_summed_by_folder_and_files_with_few_are_named():
    counts = {"bpsfast/a.py": [10, 10], "bpsfast/b.py": [30, 10], "pyx/c.h": [60, 48], "bpsfast/__init__.py": [0, 0]}
    assert summary(counts).splitlines() == [
        "| folder | lines | run, % |", "|---|---|---|", "| all | 100 | 68.0 |", "| bpsfast | 40 | 50.0 |",
        "| pyx | 60 | 80.0 |", "", "Files below 80 %:", "", "| file | lines | run, % |", "|---|---|---|",
        "| bpsfast/b.py | 30 | 33.3 |"]


def test_settings_hold_in_whatever_folder_a_process_runs():
    read = configparser.ConfigParser()
    read.read_string(settings())
    folders = read["run"]["source"].split()
    assert len(folders) == 3 and all(Path(each).is_absolute() and Path(each).is_dir() for each in folders)
    assert Path(read["run"]["data_file"]).is_relative_to(ROOT / "out")
