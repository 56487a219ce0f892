"""The kernels against the NumPy reference, bit for bit, and what their Python calls refuse."""

from __future__ import annotations

import itertools
import threading

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from bpsfast import kernels
from bpsfast.base import dtypes, reference_sum
from bpsfast.orchestration.errors import MismatchError, UnsupportedError
from bpsfast.orchestration.placement.partition import BITWISE_OPS, OPS

SIZES = [0, 1, 2, 7, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1025]
names = st.sampled_from(dtypes.NAMES)


def _aligned(n_elements: int, name: str, offset: int = 0) -> np.ndarray:
    """Return an array that starts *offset* elements after a 64-byte boundary."""
    row = dtypes.lookup(name)
    raw = np.zeros((n_elements + offset) * row.itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64 + offset * row.itemsize
    return raw[start : start + n_elements * row.itemsize].view(row.numpy)


def _specials(name: str) -> np.ndarray:
    """Return the values where sums go wrong first."""
    row = dtypes.lookup(name)
    if not row.is_float:
        limits = np.iinfo(row.numpy)
        return np.array([0, 1, limits.max, limits.min, limits.max - 1, limits.max // 2 + 1], row.numpy)
    limits = ml_dtypes.finfo(row.numpy)
    positive = [0.0, 1.0, np.inf, np.nan, limits.max, limits.tiny, limits.smallest_subnormal, 1 + limits.eps]
    values = np.array([float(value) for value in positive], row.numpy)
    signalling = np.array([np.inf], row.numpy).view(f"u{row.itemsize}") + 1
    return np.concatenate([values, -values, signalling.view(row.numpy)])


def _draw_arrays(name: str, n_arrays: int, n_elements: int, seed: int, offset: int = 0) -> list[np.ndarray]:
    """Return arrays of random bits, random sums of moderate numbers, and special values, mixed."""
    rng = np.random.default_rng(seed)
    arrays = []
    for _ in range(n_arrays):
        array = _aligned(n_elements, name, offset)
        moderate = (rng.standard_normal(n_elements) * 50).astype(array.dtype if name != "uint8" else np.int8)
        array[:] = moderate.view(array.dtype)
        kind = rng.integers(0, 3, n_elements)
        random_bits = rng.integers(0, 256, array.nbytes, dtype=np.uint8).view(array.dtype)
        np.copyto(array, random_bits, where=kind == 1)
        np.copyto(array, rng.choice(_specials(name), n_elements), where=kind == 2)
        arrays.append(array)
    return arrays


def _differences(name: str, got: np.ndarray, want: np.ndarray) -> list[str]:
    bits = f"u{dtypes.lookup(name).itemsize}"
    wrong = np.flatnonzero(got.view(bits) != want.view(bits))
    return [f"[{i}] {got.view(bits)[i]:#x} not {want.view(bits)[i]:#x}" for i in wrong[:5]]


@pytest.mark.parametrize("name", dtypes.NAMES)
def test_every_way_through_the_loops_is_the_reference(name: str) -> None:
    """Few inputs have loops of their own: all of them, and what is one beyond."""
    n_elements = 1025
    counts = [each for each in itertools.product(range(6), repeat=3) if 0 < sum(each) <= 5]
    arrays = _draw_arrays(name, 6, n_elements, seed=1)
    for before, local, after in counts:
        dst, *inputs = arrays[: 1 + before + local + after]
        first, own, last = inputs[:before], inputs[before : before + local], inputs[before + local :]
        want = reference_sum.reduce([*([x] for x in first), own, *([x] for x in last)], False)
        kernels.fused_sum(dst, first, own, last)
        assert not _differences(name, dst, want), (before, local, after)


@settings(max_examples=300, deadline=None)
@given(
    name=names,
    counts=st.tuples(*[st.integers(0, 3)] * 3).filter(any),
    n_elements=st.sampled_from(SIZES),
    average=st.booleans(),
    nontemporal=st.sampled_from([None, False, True]),
    offset=st.sampled_from([0, 0, 1, 3]),
    seed=st.integers(0, 2**32),
)
def test_fused_sum_is_the_reference(name, counts, n_elements, average, nontemporal, offset, seed) -> None:
    n_before, n_local, _ = counts
    inputs = _draw_arrays(name, sum(counts), n_elements, seed, offset)
    before, local, after = inputs[:n_before], inputs[n_before : n_before + n_local], inputs[n_before + n_local :]
    kept = [array.copy() for array in inputs]
    dst = _aligned(n_elements, name, offset)
    kernels.fused_sum(dst, before, local, after, sum(counts) if average else 1, nontemporal)
    want = reference_sum.reduce([*([x] for x in before), local, *([x] for x in after)], average)
    assert not _differences(name, dst, want)
    assert all(array.tobytes() == copy.tobytes() for array, copy in zip(inputs, kept))


@settings(max_examples=200, deadline=None)
@given(
    name=names,
    ranks=st.lists(st.integers(0, 3), min_size=1, max_size=5).filter(any),
    owner=st.integers(0, 4),
    average=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_owner_makes_the_same_bits(name, ranks, owner, average, seed) -> None:
    """Partials by the nodes that do not own, then one fused pass by the owner, who may have no ranks."""
    owner %= len(ranks)
    arrays = iter(_draw_arrays(name, sum(ranks), 77, seed))
    groups = [[next(arrays) for _ in range(n)] for n in ranks]
    partials: list[list[np.ndarray]] = [[], []]
    for node, group in enumerate(groups):
        if node != owner and group:
            partial = _aligned(77, name)
            kernels.fused_sum(partial, [], group, [])
            partials[node > owner].append(partial)
    dst = _aligned(77, name)
    kernels.fused_sum(dst, partials[0], groups[owner], partials[1], sum(ranks) if average else 1)
    assert not _differences(name, dst, reference_sum.reduce(groups, average))


@settings(max_examples=200, deadline=None)
@given(name=names, n_elements=st.sampled_from(SIZES), offset=st.sampled_from([0, 1]), seed=st.integers(0, 2**32))
def test_add_into_is_the_reference(name, n_elements, offset, seed) -> None:
    dst, src = _draw_arrays(name, 2, n_elements, seed, offset)
    want = reference_sum.reduce([[dst], [src]], average=False)
    kernels.add_into(dst, src)
    assert not _differences(name, dst, want)
    want = reference_sum.reduce([[src], [src]], average=False)
    kernels.add_into(src, src)
    assert not _differences(name, src, want)


def _all_patterns(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return every 16-bit pattern beside each of 16 partners."""
    partners = np.resize(_specials(name), 16).copy()
    partners[12:] = np.array([1 / 3, -0.1, 1000.5, 2.0**-9], partners.dtype)
    patterns = np.arange(1 << 16, dtype=np.uint16).view(partners.dtype)
    return np.tile(patterns, 16), np.repeat(partners, 1 << 16)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_half_pattern_rounds_like_numpy(name: str) -> None:
    left, right = _all_patterns(name)
    got = left.copy()
    kernels.add_into(got, right)
    assert not _differences(name, got, reference_sum.reduce([[left], [right]], average=False))
    for divisor in (3, 4, 10):  # the quotient of one input, rounded to the wire dtype
        kernels.fused_sum(got, [], [left], [], divisor)
        with np.errstate(all="ignore"):
            want = (left.astype(np.float32) / np.float32(divisor)).astype(left.dtype)
        want[np.isnan(want)] = want.dtype.type(np.nan)
        assert not _differences(name, got, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_half_pattern_adds_like_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    left, right = _all_patterns(name)
    bits = left.view(np.int16).copy(), right.view(np.int16).copy()
    want = torch.from_numpy(bits[0]).view(getattr(torch, name)) + torch.from_numpy(bits[1]).view(getattr(torch, name))
    kernels.add_into(left, right)
    want_bits = want.view(torch.int16).numpy().view(np.uint16)
    is_nan = torch.isnan(want).numpy()
    assert np.array_equal(np.isnan(left), is_nan)
    assert np.array_equal(left.view(np.uint16)[~is_nan], want_bits[~is_nan])


@pytest.mark.parametrize("name", ["int8", "int16", "int32", "int64", "uint8"])
@pytest.mark.parametrize("divisor", [2, 3, 7, 127, 200, 65535])
def test_integer_average_is_floor_division(name: str, divisor: int) -> None:
    (source,) = _draw_arrays(name, 1, 4097, divisor)
    dst = _aligned(4097, name)
    kernels.fused_sum(dst, [], [source], [], divisor)
    assert np.array_equal(dst, (source.astype(np.int64) // divisor).astype(source.dtype))


def test_large_arrays_take_the_non_temporal_way() -> None:
    n_elements = kernels.NONTEMPORAL_NBYTES // 4 + 5
    inputs = _draw_arrays("float32", 4, n_elements, 1)
    dst = _aligned(n_elements, "float32")
    kernels.fused_sum(dst, inputs[:1], inputs[1:3], inputs[3:], 4)
    assert not _differences("float32", dst, reference_sum.reduce([inputs[:1], inputs[1:3], inputs[3:]], average=True))


def test_address_is_one_per_dtype_and_stays() -> None:
    kernels.warm()
    addresses = {name: kernels.address(name) for name in dtypes.NAMES}
    assert len(set(addresses.values())) == len(dtypes.NAMES)
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(kernels.address("float32"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == [addresses["float32"]] * 4


def _ones(n_elements: int = 4, dtype: type = np.float32) -> np.ndarray:
    return np.ones(n_elements, dtype)


def _read_only() -> np.ndarray:
    array = _ones()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("dst", "src", "error", "text"),
    [
        (_ones(), [1.0] * 4, UnsupportedError, "is a list"),
        (_ones(dtype=np.uint16), _ones(dtype=np.uint16), UnsupportedError, "uint16"),
        (_ones(), _ones(dtype=np.float64), MismatchError, "4 x float64, dst is 4 x float32"),
        (_ones(), _ones(5), MismatchError, "5 x float32, dst is 4 x float32"),
        (_ones(), _ones(8)[::2], UnsupportedError, "1-D contiguous"),
        (np.ones((2, 2), np.float32), np.ones((2, 2), np.float32), UnsupportedError, "1-D contiguous"),
        (_ones(), np.zeros(17, np.uint8)[1:].view(np.float32), UnsupportedError, "aligned"),
        (_read_only(), _ones(), UnsupportedError, "dst is read-only"),
    ],
)
def test_what_a_kernel_cannot_read_is_refused(dst, src, error, text) -> None:
    with pytest.raises(error, match=text):
        kernels.add_into(dst, src)
    with pytest.raises(error, match=text):
        kernels.fused_sum(dst, [], [src], [])


def test_overlaps_are_refused() -> None:
    array = _ones(8)
    with pytest.raises(UnsupportedError, match="another offset"):
        kernels.add_into(array[:4], array[1:5])
    with pytest.raises(UnsupportedError, match="input 1 overlaps dst"):
        kernels.fused_sum(array[:4], [_ones()], [array[3:7]], [])


def test_no_input_and_bad_divisors_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="no input"):
        kernels.fused_sum(_ones(), [], [], [])
    for divisor in (0, -1, 1 << 24):
        with pytest.raises(UnsupportedError, match=f"divide by {divisor}"):
            kernels.fused_sum(_ones(), [], [_ones()], [], divisor)
    with pytest.raises(UnsupportedError, match="unknown"):
        kernels.address("uint16")


OPERATIONS = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum, "band": np.bitwise_and,
              "bor": np.bitwise_or, "bxor": np.bitwise_xor}
PAIRS = [(name, op) for name in dtypes.NAMES for op in OPS
         if not (dtypes.lookup(name).is_float and op in BITWISE_OPS)]


def _combined(op: str, name: str, terms: list[np.ndarray]) -> np.ndarray:
    """Return *terms* combined by NumPy from the first on in the accumulator, rounded once to the wire dtype."""
    row = dtypes.lookup(name)
    with np.errstate(all="ignore"):
        total = terms[0].astype(row.accumulator)
        for term in terms[1:]:
            total = OPERATIONS[op](total, term.astype(row.accumulator)).astype(row.accumulator)
        result = total.astype(row.numpy)
    if row.is_float:
        result[np.isnan(result)] = row.numpy.type(np.nan)
    return result


def _check_same(op: str, name: str, got: np.ndarray, want: np.ndarray) -> None:
    if op in ("min", "max") and dtypes.lookup(name).is_float:  # of 0.0 and -0.0 NumPy takes now the one, now the other
        got, want = got + got.dtype.type(0), want + want.dtype.type(0)
    assert not _differences(name, got, want), (name, op)


@pytest.mark.parametrize(("name", "op"), PAIRS)
def test_every_op_is_numpys(name: str, op: str) -> None:
    """Every way through the loops, with values where each op goes wrong first."""
    n_elements = 517
    arrays = _draw_arrays(name, 7, n_elements, seed=2)
    for before, local, after in [(0, 1, 0), (0, 2, 0), (1, 0, 1), (1, 1, 1), (2, 2, 1), (0, 4, 0), (3, 3, 0), (0, 0, 3),
                                 (2, 0, 0), (1, 3, 2)]:
        dst, *inputs = arrays[: 1 + before + local + after]
        first, own, last = inputs[:before], inputs[before : before + local], inputs[before + local :]
        kernels.fused_sum(dst, first, own, last, op=op)
        partials = [*first, *([_combined(op, name, own)] if own else []), *last]
        _check_same(op, name, dst, _combined(op, name, partials))


@settings(max_examples=150, deadline=None)
@given(
    pair=st.sampled_from(PAIRS),
    counts=st.tuples(*[st.integers(0, 3)] * 3).filter(any),
    n_elements=st.sampled_from(SIZES),
    nontemporal=st.booleans(),
    offset=st.sampled_from([0, 1]),
    seed=st.integers(0, 2**32),
)
def test_any_inputs_by_any_op(pair, counts, n_elements, nontemporal, offset, seed) -> None:
    name, op = pair
    n_before, n_local, _ = counts
    inputs = _draw_arrays(name, sum(counts), n_elements, seed, offset)
    before, local, after = inputs[:n_before], inputs[n_before : n_before + n_local], inputs[n_before + n_local :]
    dst = _aligned(n_elements, name, offset)
    kernels.fused_sum(dst, before, local, after, nontemporal=nontemporal, op=op)
    _check_same(op, name, dst, _combined(op, name, [*before, *([_combined(op, name, local)] if local else []), *after]))


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_a_nan_anywhere_is_the_quiet_nan(name: str, op: str) -> None:
    row = dtypes.lookup(name)
    quiet = np.full(1, np.nan, row.numpy).tobytes()
    payload = (np.array([np.inf], row.numpy).view(f"u{row.itemsize}") + 1).view(row.numpy)
    for place in range(3):
        inputs = [np.full(130, value, row.numpy) for value in (1.0, -2.0, np.inf)]
        inputs[place][:] = payload
        for counts in ((0, 3, 0), (1, 1, 1), (3, 0, 0)):
            parts = iter(inputs)
            groups = [[next(parts) for _ in range(n)] for n in counts]
            dst = np.zeros(130, row.numpy)
            kernels.fused_sum(dst, *groups, op=op)
            assert dst.tobytes() == quiet * 130, (place, counts)


@pytest.mark.parametrize(("name", "op"), PAIRS)
def test_one_input_is_itself(name: str, op: str) -> None:
    """What changes nothing when combined really does so."""
    (array,) = _draw_arrays(name, 1, 300, seed=5)
    dst = np.zeros_like(array)
    kernels.fused_sum(dst, [], [array], [], op=op)
    assert not _differences(name, dst, _combined(op, name, [array]))


@pytest.mark.parametrize(("name", "op"), [("float32", "band"), ("bfloat16", "bxor"), ("int8", "avg"), ("uint8", "")])
def test_ops_that_no_kernel_has_are_refused(name: str, op: str) -> None:
    with pytest.raises(UnsupportedError, match=f"there is no kernel for the {op} of {name}; ops: sum, product"):
        kernels.address(name, op)
