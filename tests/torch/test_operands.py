"""Operands: every tensor becomes contiguous memory of a dtype that is combined, and results are copied back."""
from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings, strategies as st

from bpsfast.base.dtypes import NAMES
from bpsfast.orchestration.errors import ConfigError, UnsupportedError
from bpsfast.torch.backend.operands import check_same, flat, operand, operands, reducible

OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
BITWISE = ("band", "bor", "bxor")


def raw(memory):
    """Return the bytes in *memory*."""
    return ctypes.string_at(memory.address, memory.nbytes) if memory.nbytes else b""


def bytes_of(tensor):
    flat_tensor = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat_tensor.view(torch.uint8).tolist()) if flat_tensor.numel() else b""


VIEWS = {
    "plain": lambda: torch.arange(6.0),
    "of a bfloat16": lambda: torch.arange(6.0).bfloat16(),
    "a matrix": lambda: torch.arange(6.0).reshape(2, 3),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "every second": lambda: torch.arange(12.0)[::2],
    "an offset": lambda: torch.arange(12.0)[3:9],
    "channels last": lambda: torch.arange(48.0).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last),
    "a scalar": lambda: torch.tensor(5, dtype=torch.int64),
    "empty": lambda: torch.zeros(0),
    "an empty matrix": lambda: torch.zeros(3, 0, 2),
    "complex": lambda: torch.tensor([1 + 2j, 3 - 4j]),
    "a conjugate view": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "a negative view": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "needs a gradient": lambda: torch.arange(4.0, requires_grad=True),
    "truth values": lambda: torch.tensor([True, False, True]),
    "float8": lambda: torch.arange(4.0).to(torch.float8_e4m3fn),
}
if hasattr(torch, "uint64"):  # from 2.3 on
    VIEWS["uint64"] = lambda: torch.tensor([2**64 - 1, 0], dtype=torch.uint64)


@pytest.mark.parametrize("view", VIEWS)
def test_memory_has_the_elements_in_order(view):
    tensor = VIEWS[view]()
    one = operand(tensor)
    assert one.tensor is tensor and one.dense.is_contiguous()
    assert not one.dense.is_conj() and not one.dense.is_neg()
    assert (one.memory.nbytes, raw(one.memory)) == (tensor.numel() * tensor.element_size(), bytes_of(tensor))


@pytest.mark.parametrize("view", [view for view in VIEWS if view not in ("float8", "uint64")])
def test_what_is_written_to_memory_reaches_the_tensor(view):
    tensor, other = VIEWS[view](), VIEWS[view]()
    wanted = other.detach() == other.detach().flip(0) if other.dtype == torch.bool else other.detach() * 2
    one = operand(tensor)
    with torch.no_grad():
        one.dense.copy_(wanted)
    one.take_back()
    assert torch.equal(tensor.detach().resolve_conj(), wanted.resolve_conj())


def test_contiguous_tensors_are_not_copied():
    for view in ("plain", "a matrix", "an offset", "a scalar", "complex", "needs a gradient", "truth values"):
        tensor = VIEWS[view]()
        assert operand(tensor).memory.address == tensor.data_ptr(), view


@pytest.mark.parametrize(("tensor", "words"), [
    ([1.0, 2.0], "expected a torch.Tensor, got list"),
    (torch.eye(3).to_sparse(), "not dense: use tensor.to_dense"),
    (torch.zeros(3, device="meta"), "is on meta: use tensor.cpu\\(\\), or a group of another backend"),
])
def test_what_is_no_memory_here_is_refused(tensor, words):
    with pytest.raises(UnsupportedError, match=words):
        operands([torch.zeros(1), tensor])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8,
                                   torch.int16, torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize("op", OPS)
def test_what_kernels_know_goes_as_it_is(dtype, op):
    tensor = torch.ones(5, dtype=dtype)
    if op in BITWISE and dtype.is_floating_point:
        with pytest.raises(UnsupportedError, match=f"Cannot use ReduceOp.{op.upper()} with {dtype}"):
            reducible(tensor, op)
        return
    memory, found = reducible(tensor, op)
    assert (memory.dtype, memory.nbytes, found) == (str(dtype).removeprefix("torch."), 5 * tensor.element_size(), op)
    assert memory.address == tensor.data_ptr()


#: What each op makes of truth values.
TRUTHS = {"sum": torch.logical_or, "product": torch.logical_and, "min": torch.logical_and, "max": torch.logical_or,
          "band": torch.logical_and, "bor": torch.logical_or, "bxor": torch.logical_xor}
BYTES = {"bor": torch.bitwise_or, "band": torch.bitwise_and, "bxor": torch.bitwise_xor}


@pytest.mark.parametrize("op", TRUTHS)
def test_truth_values_stay_truth_values(op):
    left, right = torch.tensor([False, False, True, True]), torch.tensor([False, True, False, True])
    memory, found = reducible(left, op)
    assert (memory.dtype, memory.nbytes, memory.address) == ("uint8", 4, left.data_ptr())
    combined = BYTES[found](left.view(torch.uint8), right.view(torch.uint8))
    assert torch.equal(combined.view(torch.bool), TRUTHS[op](left, right))


def test_truth_values_have_no_average():
    with pytest.raises(UnsupportedError, match="truth values have no average"):
        reducible(torch.ones(2, dtype=torch.bool), "avg")


@pytest.mark.parametrize(("dtype", "part"), [(torch.complex64, "float32"), (torch.complex128, "float64")])
@pytest.mark.parametrize("op", OPS)
def test_complex_numbers_are_two_real_ones_where_that_is_right(dtype, part, op):
    tensor = torch.ones(3, dtype=dtype)
    if op not in ("sum", "avg"):
        with pytest.raises(UnsupportedError, match=f"{dtype} is not combined by {op}"):
            reducible(tensor, op)
        return
    memory, found = reducible(tensor, op)
    assert (memory.dtype, memory.shape, memory.address, found) == (part, (6,), tensor.data_ptr(), op)


UNSIGNED = {getattr(torch, f"uint{width}"): (getattr(torch, f"int{width}"), width)
            for width in (16, 32, 64) if hasattr(torch, f"uint{width}")}


@pytest.mark.parametrize("dtype", UNSIGNED)
@pytest.mark.parametrize("op", OPS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_without_a_sign_the_same_bits_come_out_or_it_is_refused(dtype, op, data):
    signed, width = UNSIGNED[dtype]
    numbers = st.lists(st.integers(0, 2**width - 1), min_size=2, max_size=2)
    left, right = data.draw(numbers), data.draw(numbers)
    tensor = torch.tensor(left, dtype=dtype)
    if op in ("avg", "min", "max"):
        with pytest.raises(UnsupportedError, match=f"{dtype} is not combined by {op}: use a signed dtype"):
            reducible(tensor, op)
        return
    memory, found = reducible(tensor, op)
    assert (memory.dtype, memory.address, found) == (str(signed).removeprefix("torch."), tensor.data_ptr(), op)
    combine = {"sum": torch.add, "product": torch.mul, "band": torch.bitwise_and, "bor": torch.bitwise_or,
               "bxor": torch.bitwise_xor}[op]
    exact = {"sum": int.__add__, "product": int.__mul__, "band": int.__and__, "bor": int.__or__,
             "bxor": int.__xor__}[op]
    got = combine(tensor.view(signed), torch.tensor(right, dtype=dtype).view(signed)).view(dtype)
    assert got.tolist() == [exact(a, b) % 2**width for a, b in zip(left, right)]


def test_what_no_kernel_sums_is_refused_by_name():
    with pytest.raises(UnsupportedError, match=f"float8_e4m3fn cannot be summed; bpsfast sums {NAMES[0]}"):
        reducible(torch.zeros(2).to(torch.float8_e4m3fn), "sum")


def test_pieces_are_views():
    whole = torch.arange(10).reshape(2, 5)
    pieces = flat(whole, [3, 0, 7])
    assert [piece.tolist() for piece in pieces] == [[0, 1, 2], [], [3, 4, 5, 6, 7, 8, 9]]
    assert pieces[2].data_ptr() == whole.data_ptr() + 3 * 8


def test_tensors_that_must_be_alike():
    check_same([torch.zeros(2, 3), torch.zeros(6)], "gather")
    for other in (torch.zeros(7), torch.zeros(6, dtype=torch.int32)):
        with pytest.raises(ConfigError, match=r"gather: tensors must have one dtype and size, got \(6,\) of torch"):
            check_same([torch.zeros(6), other], "gather")
