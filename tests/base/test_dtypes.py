"""Tests the table of wire dtypes: their names, and the errors for other dtypes."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from bpsfast.base import dtypes
from bpsfast.orchestration.errors import UnsupportedError


def test_table_holds_the_nine_names_of_the_contract() -> None:
    assert " ".join(dtypes.NAMES) == "float32 float64 float16 bfloat16 int8 int16 int32 int64 uint8"


@pytest.mark.parametrize("name", dtypes.NAMES)
def test_every_spelling_of_a_dtype_gives_its_name(name: str) -> None:
    row = dtypes.lookup(name)
    array = np.zeros(3, row.numpy)
    for spelling in (name, row.numpy, row.numpy.type, array.dtype, array, array[0]):
        assert dtypes.wire_name(spelling) == name
    assert row.itemsize == array.itemsize
    assert row.is_float == (name.endswith(("16", "32", "64")) and "float" in name)


def test_accumulators_are_those_of_the_association() -> None:
    wide = {row.name: row.accumulator.name for row in dtypes.TABLE.values() if row.accumulator != row.numpy}
    assert wide == {"float16": "float32", "bfloat16": "float32"}


@pytest.mark.parametrize(
    "refused",
    [
        np.uint16, np.uint32, np.uint64, bool, np.complex64, complex, object, "S3", "V4", "M8[s]", "f4,f4",
        np.longdouble, ml_dtypes.float8_e4m3fn, ">f4", ">i8", np.dtype(">f8"), np.zeros(2, ">i2"),
        None, 3, "bogus", "torch.float32", [1], {},
    ],
    ids=repr,
)  # fmt: skip
def test_anything_else_is_refused_with_the_list_of_what_is_known(refused: object) -> None:
    with pytest.raises(UnsupportedError, match=r"bpsfast sums float32, float64, .*uint8"):
        dtypes.wire_name(refused)


def test_plain_uint16_is_told_about_bfloat16() -> None:
    with pytest.raises(UnsupportedError, match=r"view\(ml_dtypes.bfloat16\)"):
        dtypes.wire_name(np.zeros(4, np.uint16))


def test_unknown_name_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="'uint16' is unknown"):
        dtypes.lookup("uint16")


@pytest.mark.slow
def test_importing_dtypes_and_kernels_imports_no_numba() -> None:
    code = ("import sys, bpsfast.base.dtypes, bpsfast.kernels; "
            "sys.exit('numba' in sys.modules or 'llvmlite' in sys.modules)")
    program = f"import sys; sys.path[:] = {sys.path!r}; {code}"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
