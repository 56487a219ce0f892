"""Ranks that ask for different things under one name: told in Horovod's words, and who they are."""
from __future__ import annotations

import pytest

from bpsfast.orchestration.priority.negotiation import Request, Spec, disagreement


def ask(rank, kind="allreduce", shapes=((2,),), dtype="float32", op="Sum", names=("a", "b"), **fields):
    specs = tuple(Spec(name, dtype, 4, shape) for name, shape in zip(names, shapes))
    return Request(rank=rank, name="x", kind=kind, specs=specs, op=op, **fields)


@pytest.mark.parametrize(("one", "another", "text"), [
    ({}, {"dtype": "float64"}, "Mismatched data types: One rank had type float32, but another rank had type float64."),
    ({}, {"kind": "broadcast"}, "Mismatched operations: One rank did an ALLREDUCE, but another rank did an BROADCAST."),
    ({}, {"shapes": [(3, 1)]}, "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [2], but another "
                               "rank sent a tensor of shape [3, 1]."),
    ({}, {"shapes": [(2,), (2,)]}, "Mismatched ALLREDUCE group sizes: One rank sent a group of 1 tensors"),
    ({"prescale": 0.5}, {}, "Mismatched prescale and/or postscale factors: One rank sent factors (0.5, 1), but another "
                            "rank sent factors (1, 1)."),
    ({}, {"op": "Max"}, "Mismatched reduction operation: One rank sent reduction op Sum, but another rank sent "
                        "reduction op Max."),
    ({"kind": "broadcast", "root": 0}, {"kind": "broadcast", "root": 1},
     "Mismatched BROADCAST root ranks: One rank specified root rank 0, but another rank specified root rank 1."),
    ({"kind": "broadcast", "shapes": [(1,), (2,)]}, {"kind": "broadcast", "shapes": [(1,), (3,)]},
     "Mismatched BROADCAST tensor shapes: One rank sent a tensor of shape [2], but another rank sent a tensor of shape "
     "[3]. Tensor b. (x: ranks 4 and 7)"),
    ({"kind": "allgather", "shapes": [(2, 3)]}, {"kind": "allgather", "shapes": [(2, 4)]},
     "Mismatched ALLGATHER tensor shapes: One rank sent a tensor with dimension 1 equal to 3, but another rank sent a "
     "tensor with dimension 1 equal to 4."),
    ({"kind": "alltoall", "shapes": [(2, 3)]}, {"kind": "alltoall"},
     "Mismatched ALLTOALL tensor shapes: One rank sent a tensor of rank 2, but another rank sent a tensor of rank 1."),
    ({"kind": "reducescatter"}, {"kind": "reducescatter", "shapes": [(4,)]}, "Mismatched REDUCESCATTER tensor shapes"),
    ({"kind": "allgather", "shapes": [()]}, {"kind": "allgather", "shapes": [()]},
     "Process-set rank zero tried to ALLGATHER a rank-zero tensor."),
    ({"kind": "add_process_set", "ranks": (0,)}, {"kind": "add_process_set", "ranks": (1,)},
     "Mismatched process sets: One rank named ranks [0], but another rank named ranks [1]."),
])
def test_differences_in_horovods_words(one, another, text):
    assert disagreement([ask(4, **one), ask(4, **one), ask(7, **another)]).startswith(text)
    assert not disagreement([ask(4, **one), ask(7, **one)]) or one.get("shapes") == [()]


def test_the_ranks_and_the_tensor_are_named():
    text = disagreement([ask(4, shapes=[(1,), (2,)]), ask(7, shapes=[(1,), (3,)])])
    assert text.endswith("Tensor b. (x: ranks 4 and 7)")
    assert "Mismatched ALLREDUCE tensor names: One rank sent a, but another rank sent c." in disagreement(
        [ask(0), ask(1, names=("c",))])
    assert "2 tensors. Only one of them sent b. (x: " in disagreement([ask(0), ask(1, shapes=[(2,), (2,)])])


def test_rows_may_differ_where_they_are_gathered_or_exchanged():
    for kind in ("allgather", "alltoall"):
        assert disagreement([ask(0, kind, [(2, 3)]), ask(1, kind, [(0, 3)])]) == ""


def test_only_the_root_knows_the_shape_of_an_object():
    assert disagreement([ask(0, "broadcast", [None], root=1), ask(1, "broadcast", [(9,)], root=1)]) == ""
