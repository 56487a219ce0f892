"""DistributedGradientTape and DistributedOptimizer (of Keras and TensorFlow 1): gradients averaged over all ranks."""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import tensorflow as tf

from ..orchestration.errors import ConfigError, MismatchError, UnsupportedError
from ..trainer.arguments import Average, averages, check_passes
from .compression import Compression, CompressionLike, parted
from .memory import without_rows
from .ops import reduced


class DistributedGradientTape:
    """A `tf.GradientTape` whose `gradient` averages (sums) over all ranks; the rest is *gradtape*'s.

    Parameters
    ----------
    device_dense, device_sparse
        BytePS's; ignored. Tensors of GPUs are copied to the host.
    compression
        A compressor, or a choice of codecs by names: `<prefix>.gradient.<number>.<name of the variable>`.
    sparse_as_dense
        Send `tf.IndexedSlices` as dense tensors instead of rows.
    op
        Average or Sum.
    scope
        The prefix of the names. None: it is made of the sources. Equal models that are trained at the same time need
        one for codecs with error feedback.

    Raises ConfigError if an argument is invalid.
    """

    def __init__(self, gradtape: Any, device_dense: str = "", device_sparse: str = "",
                 compression: CompressionLike = Compression.none, sparse_as_dense: bool = False, op: int = Average, *,
                 scope: str | None = None) -> None:
        if not isinstance(gradtape, tf.GradientTape):
            raise ConfigError(f"{gradtape!r} is not a tf.GradientTape")
        parted(compression)
        self._tape = gradtape
        self._compression, self._sparse_as_dense = compression, sparse_as_dense
        self._average, self._scope = averages(True, op), scope

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._tape.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def gradient(self, target: Any, sources: Any, *arguments: Any, learning_rate: Any = None, **keywords: Any) -> Any:
        """As `tf.GradientTape.gradient`, summed over all ranks; the same sources have the gradient None on all ranks.

        *learning_rate* is the step's, for error feedback. Raises as `ops.reduced`.
        """
        local = self._tape.gradient(target, sources, *arguments, **keywords)
        flat = tf.nest.flatten(local)
        if self._sparse_as_dense:
            flat = without_rows(flat)
        return tf.nest.pack_sequence_as(local, self._sums(tf.nest.flatten(sources), flat, learning_rate))

    def _sums(self, sources: Sequence[Any], gradients: list[Any], learning_rate: Any) -> list[Any]:
        names = names_of(sources, gradients, self._scope)
        return reduced(gradients, names, self._average, compression=self._compression,
                       sparse_as_dense=self._sparse_as_dense, learning_rate=learning_rate)


def names_of(sources: Sequence[Any], gradients: Sequence[Any], scope: str | None = None) -> list[str]:
    """Return names for the *gradients* of *sources*, the same on all ranks, in every run and every trace.

    Without *scope* the prefix is a digest of the sources' kinds and of which gradients are sparse or None, so that a
    name always stands for the same tensors.
    """
    names = [str(getattr(source, "path", None) or (source.name if isinstance(source, tf.Variable) else "tensor")
                 ).partition(":")[0] for source in sources]
    if scope is None:
        kinds = [(name, tf.as_dtype(source.dtype).name, tuple(source.shape), _form(gradient))
                 for name, source, gradient in zip(names, sources, gradients)]
        scope = hashlib.sha256(repr(kinds).encode()).hexdigest()[:8]
    return [f"{scope}.gradient.{place}.{name}" for place, name in enumerate(names)]


def _form(gradient: Any) -> str:
    return "none" if gradient is None else "rows" if isinstance(gradient, tf.IndexedSlices) else "dense"


class PassAccumulator:
    """Adds the gradients of *n* backward passes in variables of this rank, which are neither broadcast nor saved.

    Works eagerly, inside `tf.function`, and in a graph of TensorFlow 1, where they are local variables. *average*:
    divide the sums by *n*.
    """

    def __init__(self, n: int, average: bool) -> None:
        self._n, self._average = n, average
        self._sums: list[Any] = []
        self._count: Any = None

    def added(self, gradients: Sequence[Any], summed: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """Add *gradients* to the sums. After the last pass return what *summed* returns for the sums.

        After other passes return zeros, which `applied` does not apply. None stays None. Raises UnsupportedError for
        `tf.IndexedSlices` and gradients of unknown shape, MismatchError if they differ from those of the first pass.
        """
        places = [place for place, gradient in enumerate(gradients) if gradient is not None]
        present = [gradients[place] for place in places]
        for place, gradient in zip(places, present):
            if isinstance(gradient, tf.IndexedSlices):
                raise UnsupportedError(f"backward_passes_per_step={self._n}, and gradient {place} has rows "
                                       "(tf.IndexedSlices), which differ from pass to pass: use sparse_as_dense=True")
            if not gradient.shape.is_fully_defined():
                raise UnsupportedError(f"backward_passes_per_step={self._n}, and gradient {place} is of shape "
                                       f"{gradient.shape}, which must be known to add passes")
        if self._count is None:
            self._make(present)
        found, known = ([(tuple(each.shape), each.dtype.base_dtype.name) for each in these]
                        for these in (present, self._sums))
        if found != known:
            raise MismatchError(f"the passes of a step have different gradients: {found[:8]} now, {known[:8]} before")
        added = [total.assign_add(gradient, read_value=False) for total, gradient in zip(self._sums, present)]
        with tf.control_dependencies([each for each in added if each is not None]):
            count = self._count.assign((self._count + 1) % self._n)
        with tf.control_dependencies([count]):
            results = tf.cond(tf.equal(count, 0), lambda: self._over(summed), self._nothing)
        given: list[Any] = [None] * len(gradients)
        for place, result in zip(places, results):
            given[place] = result
        return given

    def applied(self, gradients: Sequence[Any], apply: Callable[[], Any], skip: Callable[[], Any]) -> Any:
        """Return an operation that runs *apply* after a step's last pass, else *skip*. `added` returned *gradients*."""
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
    """Return a tensor that depends on *operation*, which is None if it was run eagerly."""
    with tf.control_dependencies([operation] if operation is not None else []):
        return tf.constant(True)


def DistributedOptimizer(optimizer: Any, name: str | None = None, use_locking: bool = False, device_dense: str = "",
                         device_sparse: str = "", compression: CompressionLike = Compression.none,
                         sparse_as_dense: bool = False, backward_passes_per_step: int = 1, op: int = Average, *,
                         average_aggregated_gradients: bool = False) -> Any:
    """Return *optimizer* as one that first averages (sums) its gradients over all ranks.

    An optimizer of Keras is wrapped by `bpsfast.keras.DistributedOptimizer`. For one of TensorFlow 1
    (`tf.compat.v1.train`) ``compute_gradients`` returns averages. *use_locking* and devices are BytePS's.

    Parameters
    ----------
    backward_passes_per_step
        The number of passes whose gradients this rank adds before they are sent and applied. Keras's optimizers do this
        by ``gradient_accumulation_steps``, and must not be built yet. For those of TensorFlow 1 the sums are local
        variables (`tf.compat.v1.local_variables_initializer`), and shapes must be known.
    average_aggregated_gradients
        Divide the sum of the passes by their number, as Horovod does.

    Raises ConfigError if *optimizer* is of neither kind, or an argument is invalid.
    """
    mean = averages(True, op)
    parted(compression)
    check_passes(n := backward_passes_per_step)
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return _Summing(optimizer, name, use_locking, compression, sparse_as_dense, mean,
                        PassAccumulator(n, average_aggregated_gradients) if n > 1 else None)
    of_keras = import_module("bpsfast.keras.optimizer")  # by name: it stands above this package, and imports Keras
    return of_keras.wrap_for_tensorflow(optimizer, name, mean, compression, n, average_aggregated_gradients)


class _Summing(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """An optimizer of TensorFlow 1 whose gradients are averaged (summed) over all ranks."""

    def __init__(self, optimizer: Any, name: str | None, use_locking: bool, compression: CompressionLike,
                 sparse_as_dense: bool, average: bool, passes: PassAccumulator | None) -> None:
        if isinstance(optimizer, _Summing):
            raise ConfigError(f"{name or optimizer.get_name()} is a DistributedOptimizer already")
        super().__init__(name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking)
        self._optimizer, self._scope = optimizer, name
        self._compression, self._sparse_as_dense, self._average = compression, sparse_as_dense, average
        self._passes = passes

    def compute_gradients(self, *arguments: Any, **keywords: Any) -> list[tuple[Any, Any]]:
        """Return gradients averaged over all ranks, and their variables; zeros before the last pass of a step."""
        pairs = self._optimizer.compute_gradients(*arguments, **keywords)
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        if self._sparse_as_dense:
            gradients = without_rows(gradients)
        names = names_of(variables, gradients, self._scope)
        present = [name for name, gradient in zip(names, gradients) if gradient is not None]

        def summed(these: list[Any], names: list[str] = present) -> list[Any]:
            return reduced(these, names, self._average, compression=self._compression,
                           sparse_as_dense=self._sparse_as_dense)

        if self._passes is None:
            return list(zip(summed(gradients, names), variables))
        return list(zip(self._passes.added(gradients, summed), variables))

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """As the optimizer's. Before the last pass of a step only *global_step* changes, which counts passes."""
        pairs = list(grads_and_vars)
        if self._passes is None:
            return self._optimizer.apply_gradients(pairs, global_step, name)
        return self._passes.applied(
            [gradient for gradient, _ in pairs], lambda: self._optimizer.apply_gradients(pairs, global_step, name),
            lambda: None if global_step is None else global_step.assign_add(1, read_value=False))

    def get_slot(self, *arguments: Any, **keywords: Any) -> Any:
        """As the optimizer's."""
        return self._optimizer.get_slot(*arguments, **keywords)

    def get_slot_names(self, *arguments: Any, **keywords: Any) -> Any:
        """As the optimizer's."""
        return self._optimizer.get_slot_names(*arguments, **keywords)

    def variables(self) -> Any:
        """As the optimizer's."""
        return self._optimizer.variables()
