"""push_pull of TensorFlow's tensors, eagerly and inside `tf.function`, with BytePS's signature (`byteps.tensorflow`).

Inside `tf.function` one `tf.numpy_function` makes all sums of a call. TensorFlow treats it as stateful, so these
operations run in the order in which Python traced them, which is the same on all ranks.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf

from ..compression.choice import Choice, chosen_among
from ..orchestration.errors import ConfigError, UnsupportedError
from ..trainer import process
from ..trainer.arguments import checked_learning_rate, takes_mean
from ..trainer.bundle import Bundle, Leaf, specs_of
from ..trainer.session import Session
from ..trainer.sparse_table import table_of
from .compression import Compression, CompressionLike, parted
from .memory import Array, Kind, address_of, array_of, dense, empty, tensor_of, traced, wire_dtype


def reduced(tensors: Sequence[Any], names: Sequence[str], average: bool, *, compression: CompressionLike | None = None,
            sparse_as_dense: bool = True, learning_rate: Any = None, has_shapes_behind: bool = False) -> list[Any]:
    """Return the sums (means) of *tensors* over all ranks; all are sent before the first result is awaited.

    Eagerly and while tracing. All ranks make their calls in the same order. Earlier ones of *tensors* are sent first.

    Parameters
    ----------
    tensors
        `tf.Tensor`, `tf.Variable` (its value), `tf.IndexedSlices`, or None, which stays None; the same on all ranks.
        Shapes need not be known while tracing. Eager tensors on the CPU are not copied.
    names
        The names of *tensors* in the job. A name always has the same shape and dtype.
    average
        Divide by the number of ranks; integers are rounded down (floor).
    compression
        A compressor, or a choice of codecs (`bpsfast.tensorflow.compression`).
    sparse_as_dense
        `tf.IndexedSlices` are sent and returned as dense tensors. Otherwise their rows are sent, and `tf.IndexedSlices`
        are returned, with each index once; no codec applies to them.
    learning_rate
        The learning rate of the step, a number or a scalar tensor, for error feedback.
    has_shapes_behind
        Append the shapes, which may be unknown while tracing, to the names.

    Returns
    -------
    New tensors on the CPU, None where there was None.

    Raises
    ------
    UnsupportedError, ConfigError
        If something cannot be summed, or *compression* is invalid; nothing is sent.
    MismatchError, BusyError, ClosedError, StallError, PeerLostError
        As `bpsfast.push_pull`. Inside `tf.function` TensorFlow raises `tf.errors` with their class and text instead:
        InvalidArgumentError for MismatchError, else UnknownError.
    """
    process.current()
    compressor, choice = parted(compression)
    kept = [place for place, tensor in enumerate(tensors) if tensor is not None]
    if len(names) != len(tensors) or len({names[place] for place in kept}) < len(kept):
        raise ConfigError(f"{len(tensors)} tensors need as many different names, got {list(names)[:8]}")
    contexts: dict[int, Any] = {}
    whole: dict[int, Any] = {}
    sparse: dict[int, Any] = {}
    for place in kept:
        tensor = tensors[place]
        if isinstance(tensor, tf.IndexedSlices) and not sparse_as_dense:
            rows = _with_shape(tensor, names[place])
            values, contexts[place] = compressor.compress(rows.values)
            sparse[place] = {"indices": rows.indices, "values": values, "dense_shape": rows.dense_shape}
        else:
            whole[place], contexts[place] = compressor.compress(_dense(tensor, names[place]))
    given = [*whole.values(), *(part for rows in sparse.values() for part in rows.values())]
    for name, tensor in zip([names[place] for place in [*whole, *sparse]],
                            [*whole.values(), *(rows["values"] for rows in sparse.values())]):
        wire_dtype(tensor.dtype, repr(name))
    if not given:
        return [None] * len(tensors)
    call = _Call([names[place] for place in whole], [names[place] for place in sparse], bool(average),
                 [-place for place in whole], choice, has_shapes_behind)
    sums = call.made(given, learning_rate)
    found: list[Any] = [None] * len(tensors)
    for place, total in zip(whole, sums):
        found[place] = compressor.decompress(total, contexts[place])
    pairs = iter(sums[len(whole):])
    for place, rows in sparse.items():
        indices, values = next(pairs), next(pairs)
        values = compressor.decompress(values, contexts[place])
        found[place] = tf.IndexedSlices(values, tf.cast(indices, rows["indices"].dtype), rows["dense_shape"])
    return found


def _dense(tensor: Any, name: str) -> Any:
    """Return *tensor* as a dense tensor."""
    if isinstance(tensor, tf.IndexedSlices):
        return tf.convert_to_tensor(_with_shape(tensor, name))
    if isinstance(tensor, tf.Variable):
        return tensor.value()
    return tensor if isinstance(tensor, tf.Tensor) else dense(tensor, repr(name))


def _with_shape(tensor: Any, name: str) -> Any:
    """Return the rows *tensor*; raises `UnsupportedError` if the shape of their table is unknown."""
    if tensor.dense_shape is None:
        raise UnsupportedError(f"{name!r} are IndexedSlices without dense_shape, so their table's size is unknown: "
                               "give tf.IndexedSlices(values, indices, dense_shape)")
    return tensor


class _Call(NamedTuple):
    """One call of `reduced`. *names* are of dense tensors, *tables* of those whose rows are summed."""

    names: list[str]
    tables: list[str]
    average: bool
    priorities: list[int]
    choice: Choice | None
    has_shapes_behind: bool

    def made(self, tensors: Sequence[Any], rate: Any) -> list[Any]:
        """Return the sums of *tensors*: dense ones, then indices, values and shape of each table."""
        if rate is not None:
            tensors = [*tensors, tf.convert_to_tensor(rate)]
        run = partial(self.run, rate is not None)
        if all(hasattr(tensor, "backing_device") for tensor in tensors):
            return [tensor_of(array) for array in run(*[array_of(tensor) for tensor in tensors])]
        n = len(self.names)
        kinds: list[Kind] = [(tensor.dtype, tensor.shape) for tensor in tensors[:n]]
        for values in tensors[n + 1 : n + 3 * len(self.tables) : 3]:
            kinds += [(tf.int64, [None]), (values.dtype, [None, *values.shape[1:]])]
        return traced(run, tensors, kinds)

    def run(self, has_rate: bool, *arrays: Any) -> list[Array]:
        """Sum *arrays*, in the order of `made`; the last one is the learning rate if *has_rate*."""
        session = process.current()
        rate = checked_learning_rate(float(arrays[-1])) if has_rate else None
        n = len(self.names)
        pending = []
        for place, name in zip(range(n, n + 3 * len(self.tables), 3), self.tables):
            indices, values, shape = arrays[place : place + 3]
            size = tuple(int(k) for k in shape)
            table = table_of(session, f"{name}{size}" if self.has_shapes_behind else name, size, values.dtype,
                             self.average)
            table.push(indices, values)
            pending.append(table)
        kinds = tuple((array.shape, array.dtype.name) for array in arrays[:n])
        sums = empty(kinds)
        if n:
            _bundle_of(session, self, kinds).run([address_of(array) for array in arrays[:n]],
                                                [address_of(array) for array in sums], rate)
        for table in pending:
            sums += table.wait()
        return sums


_Kinds = tuple[tuple[tuple[int, ...], str], ...]
_bundles: dict[Any, Bundle] = {}


def _bundle_of(session: Session, call: _Call, kinds: _Kinds) -> Bundle:
    """Return the bundle for tensors of these *kinds* in *session*, made at the first call."""
    names = call.names
    if call.has_shapes_behind:
        names = [f"{name}{shape}" for name, (shape, _) in zip(names, kinds)]
    codecs = {} if call.choice is None else chosen_among(
        call.choice, dict(zip(names, kinds)), session.settings.min_compress_bytes, is_alone=len(names) == 1)
    key = tuple(names), kinds, call.average, tuple(call.priorities), tuple(codecs.items())
    bundle = _bundles.get(key)
    if bundle is None or bundle.session is not session:
        for old in [each for each, found in _bundles.items() if found.session.closed]:
            del _bundles[old]
        leaves = [Leaf(name, shape, dtype, codecs.get(name)) for name, (shape, dtype) in zip(names, kinds)]
        bundle = _bundles[key] = Bundle(session, specs_of(leaves, call.average, call.priorities))
    return bundle


def push_pull(tensor: Any, scope: str = "", average: bool | None = None, device_dense: str = "",
              device_sparse: str = "", compression: CompressionLike = Compression.none, op: int | None = None,
              enable_async: bool = False, *, name: str | None = None) -> Any:
    """Return the sum (mean) of *tensor* over all ranks as a new tensor. Differentiable: the gradient is summed, too.

    All ranks make their push_pulls in the same order: inside `tf.function` the order of the program. In a graph of
    TensorFlow 1 several push_pulls of one run need control dependencies.

    Parameters
    ----------
    tensor
        A dense tensor, a variable, a number, or `tf.IndexedSlices`, of which only the rows are sent.
    scope
        Put before the name.
    average
        BytePS's older name of *op*: True is Average (the default), False is Sum.
    device_dense, device_sparse
        BytePS's; ignored. Tensors of GPUs are copied to the host.
    compression
        A compressor, or a choice of codecs. Codecs with error feedback need a *name*.
    enable_async
        True raises UnsupportedError: use `bpsfast.AsyncWeights` for asynchronous training.
    name
        The tensor's name in the job. None: it is made of *scope*, dtype and shape, so all calls of a loop have the same
        name.

    Raises as `reduced` of `bpsfast.tensorflow.ops`, whose errors are those of `bpsfast.push_pull`.
    """
    mean = takes_mean(average, op)
    parted(compression)
    if enable_async:
        raise UnsupportedError("enable_async=True: use bpsfast.AsyncWeights for asynchronous training")
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
    """Return the default name of tensors of this kind; their shape is appended later."""
    kind = tf.as_dtype(tensor.dtype).name if hasattr(tensor, "dtype") else type(tensor).__name__
    form = "rows" if isinstance(tensor, tf.IndexedSlices) else "tensor"
    return f"BytePSPushPull_{scope}{kind}.{form}.{'mean' if mean else 'sum'}"
