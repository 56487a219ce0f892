"""Tests parsing of sizes such as 4M."""
import pytest

from bpsfast.base.value_formats import parse_size


@pytest.mark.parametrize(("text", "nbytes"), [
    ("0", 0), ("8192", 8192), ("12B", 12), ("4K", 4096), ("4kb", 4096), ("4KiB", 4096), (" 4 MiB ", 4 << 20),
    ("4m", 4 << 20), ("1GiB", 1 << 30), ("3G", 3 << 30),
])
def test_sizes(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "M", "4T", "-4", "4.5M", "4 M M", "0x10", "4iB", "1e6"])
def test_what_is_no_size(text):
    assert parse_size(text) is None
