"""push_pull of TensorFlow's tensors, with BytePS's signature (`byteps.tensorflow`), eagerly and in `tf.function`."""
from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..orchestration.errors import ConfigError, UnsupportedError
from ..trainer.arguments import averages
from .compression import Compression, CompressionLike, parted
from .tensor_sums import reduced


def chosen(average: bool | None, op: int | None) -> bool:
    """Return whether BytePS's *average* and *op*, of which at most one is given, mean a mean; that is the default.

    Raises
    ------
    ConfigError
        If both are given, or *op* is neither Average nor Sum.
    """
    if average is not None and op is not None:
        raise ConfigError("The op parameter supersedes average. Please provide only one of them.")
    return averages(True if average is None else average, op)


def push_pull(tensor: Any, scope: str = "", average: bool | None = None, device_dense: str = "",
              device_sparse: str = "", compression: CompressionLike = Compression.none, op: int | None = None,
              enable_async: bool = False, *, name: str | None = None) -> Any:
    """Return the sum (mean) of *tensor* over all ranks as a new tensor. Differentiable: the gradient is summed as well.

    Ranks make their push_pulls in one order. Inside `tf.function` that is the order of the program; in a graph of
    TensorFlow 1 several in one run need control dependencies.

    Parameters
    ----------
    tensor
        A dense tensor, a variable, a number, or `tf.IndexedSlices`, of which the rows travel.
    scope
        Put before the name, as a tensor of another kind than all before it has.
    average
        BytePS's older word for *op*, Average (the default) or Sum.
    device_dense, device_sparse
        BytePS's; tensors of GPUs pass through the host.
    compression
        A compressor, or a choice of codecs; then give a *name* if the codec keeps errors.
    enable_async
        True is refused: `bpsfast.AsyncWeights` trains without steps in common.
    name
        The tensor's name in the job. None: it is made of *scope*, dtype and shape, the same in every call, so that a
        loop makes no new ones.

    Raises
    ------
    ConfigError, UnsupportedError, MismatchError, BusyError, ClosedError, StallError, PeerLostError
        As `reduced` of `bpsfast.tensorflow.tensor_sums`.
    """
    mean = chosen(average, op)
    parted(compression)
    if enable_async:
        raise UnsupportedError("enable_async=True: use bpsfast.AsyncWeights for training without steps in common")
    is_sparse = isinstance(tensor, tf.IndexedSlices)
    tensor = tensor.value() if isinstance(tensor, tf.Variable) else tensor
    title = name or _name(scope, tensor, mean)
    return _summed(tensor, title, mean, compression, name is None, is_sparse)


def _summed(tensor: Any, title: str, mean: bool, compression: CompressionLike, has_shape_behind: bool,
            is_sparse: bool = False) -> Any:
    def run(x: Any) -> Any:
        return reduced([x], [title], mean, compression=compression, sparse_as_dense=False,
                       has_shapes_behind=has_shape_behind)[0]

    if is_sparse or not isinstance(tensor, tf.Tensor) or not tensor.dtype.is_floating:
        return run(tensor)

    @tf.custom_gradient
    def differentiable(x: Any) -> Any:
        return run(x), lambda dy: _summed(dy, f"{title}.backward", mean, compression, has_shape_behind)

    return differentiable(tensor)


def _name(scope: str, tensor: Any, mean: bool) -> str:
    """Return a name that all tensors of this kind have; their shape comes behind it."""
    kind = tf.as_dtype(tensor.dtype).name if hasattr(tensor, "dtype") else type(tensor).__name__
    form = "rows" if isinstance(tensor, tf.IndexedSlices) else "tensor"
    return f"BytePSPushPull_{scope}{kind}.{form}.{'mean' if mean else 'sum'}"
