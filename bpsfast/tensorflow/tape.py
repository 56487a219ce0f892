"""A gradient tape whose gradients are averaged over all ranks."""
from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..orchestration.errors import ConfigError
from ..trainer.arguments import Average, averages
from .compression import Compression, CompressionLike, parted
from .tensor_sums import reduced


class DistributedGradientTape:
    """*gradtape*, whose `gradient` sums over all ranks; everything else is the tape's.

    Parameters
    ----------
    device_dense, device_sparse
        BytePS's; tensors of GPUs pass through the host.
    compression
        A compressor, or a choice of codecs by names (`gradient.<place>.<name of the variable>`, behind a prefix).
    sparse_as_dense
        `tf.IndexedSlices` travel as dense tensors, not by rows.
    op
        Average or Sum.
    scope
        What names begin with. None: it is made of what the sources are. Models that are alike, and are trained side by
        side, need one if a codec keeps errors.

    Raises
    ------
    ConfigError
        If an argument is not possible.
    """

    def __init__(self, gradtape: Any, device_dense: str = "", device_sparse: str = "",
                 compression: CompressionLike = Compression.none, sparse_as_dense: bool = False, op: int = Average, *,
                 scope: str | None = None) -> None:
        if not isinstance(gradtape, tf.GradientTape):
            raise ConfigError(f"{gradtape!r} is no tf.GradientTape")
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
        """As `tf.GradientTape.gradient`, summed over all ranks; sources without a gradient have None on all ranks.

        *learning_rate*: with which the gradients will be used, for error feedback. Raises as `exchange.reduced`.
        """
        local = self._tape.gradient(target, sources, *arguments, **keywords)
        flat = tf.nest.flatten(local)
        if self._sparse_as_dense:
            flat = [tf.convert_to_tensor(each) if isinstance(each, tf.IndexedSlices) else each for each in flat]
        return tf.nest.pack_sequence_as(local, self._sums(tf.nest.flatten(sources), flat, learning_rate))

    def _sums(self, sources: Sequence[Any], gradients: list[Any], learning_rate: Any) -> list[Any]:
        names = names_of(sources, gradients, self._scope)
        return reduced(gradients, names, self._average, compression=self._compression,
                       sparse_as_dense=self._sparse_as_dense, learning_rate=learning_rate)


def names_of(sources: Sequence[Any], gradients: Sequence[Any], scope: str | None = None) -> list[str]:
    """Return names for the *gradients* of *sources*: the same on all ranks, in every run and every trace.

    Without *scope* they say what the sources are, and which gradients are sparse or none: what travels together under
    a name is always the same.
    """
    names = [str(getattr(source, "path", None) or _name(source)).partition(":")[0] for source in sources]
    if scope is None:
        kinds = [(name, tf.as_dtype(source.dtype).name, tuple(source.shape), _form(gradient))
                 for name, source, gradient in zip(names, sources, gradients)]
        scope = hashlib.sha256(repr(kinds).encode()).hexdigest()[:8]
    return [f"{scope}.gradient.{place}.{name}" for place, name in enumerate(names)]


def _form(gradient: Any) -> str:
    return "none" if gradient is None else "rows" if isinstance(gradient, tf.IndexedSlices) else "dense"


def _name(source: Any) -> str:
    return source.name if isinstance(source, tf.Variable) else "tensor"
