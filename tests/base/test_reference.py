"""Tests the oracle of sums against sums written out by hand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from bpsfast.base import reference_sum

F32_BIG = 2.0**24


def _f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_one_array_is_a_copy_with_its_bits() -> None:
    source = _f32(-0.0, 1.5, -np.inf)
    result = reference_sum.reduce([[source]], average=True)
    assert result.tobytes() == source.tobytes()
    result[0] = 7
    assert source[0] == 0


def test_minus_zero_survives() -> None:
    assert np.signbit(reference_sum.reduce([[_f32(-0.0)], [_f32(-0.0), _f32(-0.0)]], average=True)[0])


def test_grouping_decides_and_empty_groups_do_not() -> None:
    big, one = _f32(F32_BIG), _f32(1)
    assert reference_sum.reduce([[big], [one], [one]], average=False)[0] == F32_BIG
    assert reference_sum.reduce([[big], [one, one]], average=False)[0] == F32_BIG + 2
    assert reference_sum.reduce([[], [big], [], [one, one], []], average=False)[0] == F32_BIG + 2


def test_partials_of_halves_are_rounded_once() -> None:
    one, tiny = np.array([1], ml_dtypes.bfloat16), np.array([2.0**-9], ml_dtypes.bfloat16)
    # in f32 1 + 2^-9 is exact; as a partial it is rounded to 1, so only the second tree keeps the small terms
    assert float(reference_sum.reduce([[one, tiny], [tiny], [tiny]], average=False)[0]) == 1.0
    assert float(reference_sum.reduce([[one], [tiny], [tiny], [tiny]], average=False)[0]) == 1.0 + 2.0**-7


def test_float16_partial_overflows_to_infinity() -> None:
    large = np.array([60000], np.float16)
    assert np.isinf(reference_sum.reduce([[large, large], [-large]], average=False)[0])
    assert reference_sum.reduce([[large], [large], [-large]], average=False)[0] == 60000


def test_average_is_one_true_division() -> None:
    assert reference_sum.reduce([[_f32(1)], [_f32(0), _f32(0)]], average=True)[0] == np.float32(1) / np.float32(3)


@pytest.mark.parametrize(("dtype", "values", "total", "average"), [
    (np.int8, (100, 100, 1), -55, -19),
    (np.uint8, (200, 100, 1), 45, 15),
    (np.int16, (-1, 0, 0), -1, -1),
    (np.int64, (2**62, 2**62, 0), -(2**63), -3074457345618258603),
])  # fmt: skip
def test_integers_wrap_and_average_by_floor(dtype: type, values: tuple[int, ...], total: int, average: int) -> None:
    groups = [[np.array([value], dtype)] for value in values]
    assert reference_sum.reduce(groups, average=False)[0] == total
    assert reference_sum.reduce(groups, average=True)[0] == average


def test_more_ranks_than_an_int8_can_hold() -> None:
    assert reference_sum.reduce([[np.array([1], np.int8)] * 200], average=True)[0] == -56 // 200


@pytest.mark.parametrize(
    ("dtype", "bits", "nan"),
    [(np.float32, np.uint32, 0x7FC00000), (np.float64, np.uint64, 0x7FF8000000000000),
     (np.float16, np.uint16, 0x7E00), (ml_dtypes.bfloat16, np.uint16, 0x7FC0)],
)  # fmt: skip
def test_nan_is_the_canonical_quiet_one(dtype: type, bits: type, nan: int) -> None:
    payload = np.array([nan + 1], bits).view(dtype)
    negative = -np.array([np.nan], dtype)
    for groups in ([[payload]], [[negative]], [[payload], [negative]], [[negative, payload]]):
        assert reference_sum.reduce(groups, average=True).view(bits)[0] == nan
    infinity = np.array([np.inf], dtype)
    assert reference_sum.reduce([[infinity, -infinity]], average=False).view(bits)[0] == nan


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_shape_is_kept(shape: tuple[int, ...]) -> None:
    for dtype in (np.float32, np.int8, ml_dtypes.bfloat16):
        result = reference_sum.reduce([[np.ones(shape, dtype)], [np.ones(shape, dtype)]], average=True)
        assert result.shape == shape
        assert result.dtype == dtype
        assert np.all(result == 1)
