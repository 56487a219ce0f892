"""DistributedOptimizer: Keras's optimizers, and those of TensorFlow 1, whose gradients are averaged over all ranks."""
from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..orchestration.errors import ConfigError
from ..trainer.arguments import Average, averages
from .compression import BF16Compressor, Compression, CompressionLike, FP16Compressor, parted
from .passes import PassAccumulator
from .tape import names_of
from .tensor_sums import reduced


def DistributedOptimizer(optimizer: Any, name: str | None = None, use_locking: bool = False, device_dense: str = "",
                         device_sparse: str = "", compression: CompressionLike = Compression.none,
                         sparse_as_dense: bool = False, backward_passes_per_step: int = 1, op: int = Average, *,
                         average_aggregated_gradients: bool = False) -> Any:
    """Return *optimizer* for gradients that are averaged (summed) over all ranks first.

    Optimizers of Keras are `bpsfast.keras.DistributedOptimizer`'s to wrap. Of those of TensorFlow 1
    (`tf.compat.v1.train`) ``compute_gradients`` returns averages. *use_locking* and devices are BytePS's.

    Parameters
    ----------
    backward_passes_per_step
        This rank adds up the gradients of so many passes first, and nothing is sent or applied in between. Keras's
        optimizers do it by their ``gradient_accumulation_steps``, and must not be built yet; for those of TensorFlow 1
        the sums are local variables (`tf.compat.v1.local_variables_initializer`), and shapes must be known.
    average_aggregated_gradients
        Divide the gradients of these passes by their number. Horovod's, as the sum without it.

    Raises
    ------
    ConfigError
        If *optimizer* is neither, or an argument is not possible.
    """
    mean = averages(True, op)
    parted(compression)
    n = backward_passes_per_step
    if not isinstance(n, int) or n < 1:
        raise ConfigError(f"backward_passes_per_step={n!r}: at least one pass makes a step")
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return _Summing(optimizer, name, use_locking, compression, sparse_as_dense, mean,
                        PassAccumulator(n, average_aggregated_gradients) if n > 1 else None)
    from .. import keras
    from ..keras.compression import parted as keras_parted
    from ..keras.optimizer import distribute
    from ..keras.reduction import Reduction

    own: dict[Any, Any] = {Compression.none: keras.Compression.none, FP16Compressor: keras.Compression.fp16,
                           BF16Compressor: keras.Compression.bf16}
    chosen: Any = own.get(compression, compression) if isinstance(compression, type) else compression
    reduction = Reduction(name, mean, *keras_parted(chosen), postscale=1 if average_aggregated_gradients else n)
    return distribute(optimizer, reduction, n)


class _Summing(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """An optimizer of TensorFlow 1, for averages."""

    def __init__(self, optimizer: Any, name: str | None, use_locking: bool, compression: CompressionLike,
                 sparse_as_dense: bool, average: bool, passes: PassAccumulator | None) -> None:
        if isinstance(optimizer, _Summing):
            raise ConfigError(f"{name or optimizer.get_name()} is a DistributedOptimizer already")
        super().__init__(name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking)
        self._optimizer, self._scope = optimizer, name
        self._compression, self._sparse_as_dense, self._average = compression, sparse_as_dense, average
        self._passes = passes

    def compute_gradients(self, *arguments: Any, **keywords: Any) -> list[tuple[Any, Any]]:
        """Return gradients that are averaged over all ranks, with their variables.

        Of several passes before the last one of a step: zeros.
        """
        pairs = self._optimizer.compute_gradients(*arguments, **keywords)
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        if self._sparse_as_dense:
            gradients = [tf.convert_to_tensor(each) if isinstance(each, tf.IndexedSlices) else each
                         for each in gradients]
        names = names_of(variables, gradients, self._scope)
        kept = [name for name, gradient in zip(names, gradients) if gradient is not None]

        def summed(these: list[Any], names: list[str] = kept) -> list[Any]:
            return reduced(these, names, self._average, compression=self._compression,
                           sparse_as_dense=self._sparse_as_dense)

        if self._passes is None:
            return list(zip(summed(gradients, names), variables))
        return list(zip(self._passes.added(gradients, summed), variables))

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """As the optimizer's; before the last pass of a step only *global_step*, which counts passes, is changed."""
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
