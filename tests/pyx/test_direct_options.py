"""Options of calls of torch.distributed are read from their C++ objects as their attributes say."""
from __future__ import annotations

import random

import pytest

from bpsfast.pyx.direct import CallOptions

dist = pytest.importorskip("torch").distributed
_OPS = [dist.ReduceOp(op) for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN,
                                     dist.ReduceOp.MAX, dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)]
_WITH_OP = [dist.AllreduceOptions, dist.ReduceOptions, dist.ReduceScatterOptions]
_OTHERS = [dist.BroadcastOptions, dist.AllToAllOptions, dist.BarrierOptions]


def options(kind, has_op, is_async):
    opts = kind()
    opts.asyncOp = is_async
    op = random.choice(_OPS)
    if has_op:
        opts.reduceOp = op
    return opts, op


@pytest.mark.parametrize("kind", [*_WITH_OP, *_OTHERS])
def test_as_the_attributes_say(kind):
    has_op = kind in _WITH_OP
    if not hasattr(kind, "asyncOp"):
        pytest.skip("options of this version of torch do not say whether the caller waits")
    read = CallOptions(kind, _OPS if has_op else None)
    assert read.is_found == (True, has_op), "both are plain members of the C++ object"
    kept = []
    for i in range(500):
        opts, op = options(kind, has_op, i % 3 == 0)
        assert read.are_awaited(opts) is (i % 3 != 0)
        if has_op:
            assert read.ask_for_sum(opts) is (op == dist.ReduceOp.SUM)
        kept.append(opts)  # so that the next one lies elsewhere
        del kept[:random.randrange(2)]


def test_operations_with_a_factor_are_no_sums():
    opts = dist.AllreduceOptions()
    opts.reduceOp = dist._make_nccl_premul_sum(2.0)
    assert CallOptions(dist.AllreduceOptions, _OPS).ask_for_sum(opts) is False


def test_options_of_another_type_are_left_to_python():
    class Derived(dist.AllreduceOptions):
        pass

    read = CallOptions(dist.AllreduceOptions, _OPS)
    for each in (Derived(), dist.BroadcastOptions(), None, dist.AllreduceOptions.__new__(Derived)):
        assert read.are_awaited(each) is False
    assert CallOptions(Derived, _OPS).is_found == (False, False)


@pytest.mark.parametrize("is_async, op", [(False, 0), (True, 0), (False, 3)])
def test_objects_of_python_are_read_by_their_attributes(is_async, op):
    class Options:
        asyncOp, reduceOp = is_async, op

    read = CallOptions(Options, [0, 1, 2, 3])
    assert read.is_found == (False, False)
    assert read.are_awaited(Options()) is not is_async and read.ask_for_sum(Options()) is (op == 0)
