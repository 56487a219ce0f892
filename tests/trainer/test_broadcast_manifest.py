"""Lists of what a broadcast gives to all, compared: the first difference is named, with both sides."""
from __future__ import annotations

import pytest

from bpsfast.trainer.object_broadcast import difference

MINE = [("a", "float32", (2,)), ("b", "int64", (3, 4))]


@pytest.mark.parametrize(("theirs", "words"), [
    (MINE, ""),
    ([MINE[0], ("b", "int32", (3, 4))],
     "array 1 of the broadcast differs: rank 2 has b (int64, shape (3, 4)), rank 0 has b (int32, shape (3, 4))"),
    ([("c", "float32", (2,))], "array 0 of the broadcast differs: rank 2 has a (float32, shape (2,)), rank 0 has c "
                               "(float32, shape (2,))"),
    (MINE[:1], "the broadcast is of 1 arrays on rank 0, of 2 on rank 2"),
])
def test_the_first_difference_is_named(theirs, words) -> None:
    assert difference(MINE, theirs, "array", 2, 0) == words
