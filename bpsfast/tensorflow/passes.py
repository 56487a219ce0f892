"""Gradients of several backward passes, added up on this rank before they are summed over all."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ..orchestration.errors import MismatchError, UnsupportedError


class PassAccumulator:
    """Sums of *n* backward passes, in variables that are this rank's own: neither broadcast, nor saved.

    Eagerly, inside `tf.function`, and in a graph of TensorFlow 1, where they are local variables.

    Parameters
    ----------
    average
        Divide by *n*.
    """

    def __init__(self, n: int, average: bool) -> None:
        self._n, self._average = n, average
        self._sums: list[Any] = []
        self._count: Any = None

    def added(self, gradients: Sequence[Any], summed: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """Add *gradients* to those of the passes before. After the last pass return what *summed* makes of the sums.

        After others return zeros, which `applied` does not apply. None stays None.

        Raises
        ------
        UnsupportedError
            For `tf.IndexedSlices`, and gradients of unknown shape.
        MismatchError
            If there are others than in the first pass.
        """
        places = [place for place, gradient in enumerate(gradients) if gradient is not None]
        kept = [gradients[place] for place in places]
        for place, gradient in zip(places, kept):
            if isinstance(gradient, tf.IndexedSlices):
                raise UnsupportedError(f"backward_passes_per_step={self._n}, and gradient {place} has rows of its own "
                                       "(tf.IndexedSlices), which differ from pass to pass: use sparse_as_dense=True")
            if not gradient.shape.is_fully_defined():
                raise UnsupportedError(f"backward_passes_per_step={self._n}, and gradient {place} is of shape "
                                       f"{gradient.shape}: it must be known to add passes up")
        if self._count is None:
            self._make(kept)
        found, known = ([(tuple(each.shape), each.dtype.base_dtype.name) for each in these]
                        for these in (kept, self._sums))
        if found != known:
            raise MismatchError(f"the passes of a step have different gradients: {found[:8]} now, {known[:8]} before")
        added = [total.assign_add(gradient, read_value=False) for total, gradient in zip(self._sums, kept)]
        with tf.control_dependencies([each for each in added if each is not None]):
            count = self._count.assign((self._count + 1) % self._n)
        with tf.control_dependencies([count]):
            results = tf.cond(tf.equal(count, 0), lambda: self._over(summed), self._nothing)
        given: list[Any] = [None] * len(gradients)
        for place, result in zip(places, results):
            given[place] = result
        return given

    def applied(self, gradients: Sequence[Any], apply: Callable[[], Any], skip: Callable[[], Any]) -> Any:
        """Return an operation that does *apply* if *gradients*, which `added` has returned, are a step's, else *skip*.
        """
        with tf.control_dependencies([gradient for gradient in gradients if gradient is not None]):
            return tf.cond(tf.equal(self._count, 0), lambda: _done(apply()), lambda: _done(skip()))

    def _make(self, gradients: Sequence[Any]) -> None:
        local = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
        kinds = [(gradient.shape, gradient.dtype) for gradient in gradients]
        with tf.init_scope():
            self._sums = [tf.compat.v1.Variable(tf.zeros(shape, dtype), trainable=False, collections=local,
                                                use_resource=True) for shape, dtype in kinds]
            self._count = tf.compat.v1.Variable(0, trainable=False, collections=local, use_resource=True)

    def _over(self, summed: Callable[[list[Any]], list[Any]]) -> list[Any]:
        factor = 1 / self._n if self._average else 1.0
        totals = [total.read_value() if factor == 1.0 else total.read_value() * tf.cast(factor, total.dtype)
                  for total in self._sums]
        results = summed(totals)
        with tf.control_dependencies(results):
            cleared = [total.assign(tf.zeros_like(total), read_value=False) for total in self._sums]
        with tf.control_dependencies([each for each in cleared if each is not None]):
            return [tf.identity(result) for result in results]

    def _nothing(self) -> list[Any]:
        return [tf.zeros(total.shape, total.dtype) for total in self._sums]


def _done(operation: Any) -> Any:
    """Return a tensor that is there when *operation* has been done; eagerly it has."""
    with tf.control_dependencies([operation] if operation is not None else []):
        return tf.constant(True)
