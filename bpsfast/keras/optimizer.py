"""DistributedOptimizer for Keras: the user's optimizer, which first averages its gradients over all ranks."""
from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import keras

from ..compression.choice import Choice
from ..orchestration.errors import ConfigError, MismatchError, UnsupportedError
from ..trainer import process
from .backend import gradient_set, tensor_backend
from .compression import Compression, CompressionLike, CompressorLike, NoneCompressor, parted
from .variables import path_of


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced: scaled by *prescale*, compressed, summed or averaged, scaled by *postscale*."""

    prefix: str | None = None
    average: bool = True
    compressor: CompressorLike = NoneCompressor
    choice: Choice | None = None
    prescale: float = 1.0
    postscale: float = 1.0

    def of(self, gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Callable[[], Any],
           condition: Any = None) -> list[Any]:
        """Return the *gradients* of *variables* reduced over all ranks; None stays None, the same ones on all ranks.

        *learning_rate* returns the step's learning rate, for error feedback. With a *condition* gradients are reduced
        where it is true, and returned unchanged where it is false.

        Raises MismatchError if gradients do not fit the variables, and UnsupportedError for an unsupported dtype and
        for variables that their gradients overwrite (float8); nothing is sent. Other errors: `bpsfast.push_pull`.
        """
        gradients, variables = list(gradients), list(variables)
        paths = [path_of(variable) for variable in variables]
        if len(gradients) != len(variables):
            raise MismatchError(f"{len(gradients)} gradients came for {len(variables)} variables, from "
                                f"{paths[0] if paths else 'none'!r} on")
        session = process.current()
        places = [place for place, gradient in enumerate(gradients) if gradient is not None]
        dense = {place: keras.ops.convert_to_tensor(gradients[place], sparse=False) for place in places}
        for place in places:
            _check(paths[place], dense[place], variables[place])
        places = [place for place in places if 0 not in dense[place].shape]
        if session.size == 1 or not places:
            factor = self.prescale * self.postscale
            for place in places if factor != 1.0 else ():
                gradients[place] = _scaled(dense[place], factor)
            return gradients
        small, contexts = [], []
        for place in places:
            tensor, context = self.compressor.compress(_scaled(dense[place], self.prescale))
            small.append(tensor)
            contexts.append(context)
        backend = tensor_backend()
        kinds = [(tuple(tensor.shape), _dtype(paths[place], tensor)) for place, tensor in zip(places, small)]
        chosen = gradient_set([paths[place] for place in places], kinds, self.prefix, self.average, self.choice)
        sums = backend.reduced(chosen, small, learning_rate, condition)
        for place, total, context in zip(places, sums, contexts):
            gradients[place] = _scaled(self.compressor.decompress(total, context), self.postscale)
        return gradients


def _check(name: str, gradient: Any, variable: Any) -> None:
    if tuple(gradient.shape) != tuple(variable.shape):
        raise MismatchError(f"the gradient of {name!r} has shape {tuple(gradient.shape)}, the variable "
                            f"{tuple(variable.shape)}")
    if getattr(variable, "overwrite_with_gradient", False):
        raise UnsupportedError(f"variable {name!r} is overwritten by its gradient, as scales of float8 are, and a mean "
                               "of scales is wrong. DistributedOptimizer does not train such models: use another dtype "
                               "policy, such as mixed_bfloat16")


def _dtype(name: str, tensor: Any) -> str:
    try:
        return tensor_backend().dtype_of(tensor)
    except UnsupportedError as exc:
        raise UnsupportedError(f"the gradient of {name!r}: {exc}") from None


def _scaled(tensor: Any, factor: float) -> Any:
    return tensor if factor == 1.0 else tensor * factor


_LossScaler = keras.optimizers.LossScaleOptimizer

if TYPE_CHECKING:
    _Optimizer = Any
else:
    _Optimizer = object


class Distributed(_Optimizer):
    """The first base of the class that `DistributedOptimizer` gives the user's optimizer."""

    _bpsfast_reduction: ClassVar[Reduction]
    _bpsfast_base: ClassVar[type]

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the user's optimizer: Keras saves it as that, and loads it without bpsfast."""
        return self._bpsfast_base

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        """Reduce *grads* over all ranks, then apply them as the optimizer does.

        With gradient_accumulation_steps they are reduced only when the sum of the passes is applied.
        """
        is_known = self.built or trainable_variables is not None  # else Keras raises
        if len(grads) and is_known and not self._bpsfast_accumulates():
            variables = self._trainable_variables if trainable_variables is None else trainable_variables
            grads = self._bpsfast_reduced(grads, variables)
        return super().apply(grads, trainable_variables)

    def stateless_apply(self, optimizer_variables: Any, grads: Sequence[Any], trainable_variables: Any) -> Any:
        """As `apply`, without side effects (JAX)."""
        # Loss scaling checks the gradients here, not in `apply`: all ranks must see the same ones.
        if isinstance(self, _LossScaler) and self.built:
            grads = self._bpsfast_reduced(grads, self._trainable_variables)
        return super().stateless_apply(optimizer_variables, grads, trainable_variables)

    def build(self, variables: Any) -> Any:
        """Create the optimizer's variables."""
        _refuse_loss_scaling_around(self)
        return super().build(variables)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loss_scale_factor":  # Keras sets it on an optimizer that it wraps for loss scaling
            _refuse_loss_scaling_around(self)
        super().__setattr__(name, value)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Give *var_list* its final values: with use_ema the moving averages."""
        super().finalize_variable_values(var_list)
        averages = (getattr(each, "use_ema", False) for each in (self, getattr(self, "inner_optimizer", None)))
        # On JAX a variable and its average share one buffer, which the next fit would donate twice.
        for variable in var_list if keras.backend.backend() == "jax" and any(averages) else ():
            variable.assign(keras.ops.copy(variable.value))

    def _bpsfast_accumulates(self) -> bool:
        """Return whether Keras accumulates gradients, and clips the mean of the passes by `_clip_gradients`."""
        is_keras_own = getattr(self._bpsfast_base, "apply", None) is keras.optimizers.Optimizer.apply
        return is_keras_own and bool(self.gradient_accumulation_steps)

    def _bpsfast_reduced(self, gradients: Sequence[Any], variables: Sequence[Any], condition: Any = None) -> list[Any]:
        return self._bpsfast_reduction.of(gradients, variables, self._bpsfast_learning_rate, condition)

    def _bpsfast_learning_rate(self) -> Any:
        """Return the step's learning rate; 0, which error feedback ignores, for several optimizers."""
        return 0.0 if hasattr(self, "optimizers") else self.learning_rate

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> Any:
        # setattr would make them variables of the optimizer.
        self.__dict__["_bpsfast_applied"] = list(trainable_variables)
        return super()._backend_apply_gradients(grads, trainable_variables)

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        """Clip the gradients that are applied. With accumulation the mean of the passes is reduced first."""
        if self._bpsfast_accumulates():
            is_last = (self._iterations + 1) % self.gradient_accumulation_steps == 0
            grads = self._bpsfast_reduced(grads, self.__dict__["_bpsfast_applied"], is_last)
        return super()._clip_gradients(grads)


def DistributedOptimizer(optimizer: Any, name: str | None = None, device_dense: str = "", device_sparse: str = "",
                         compression: CompressionLike = Compression.none, sparse_as_dense: bool = False, *,
                         average: bool = True) -> Any:
    """Make *optimizer* average its gradients over all ranks before it applies them; return it.

    It stays the same object, with its state and, for Keras, its class, under which it is saved.

    Parameters
    ----------
    optimizer
        An optimizer of Keras 3, also a `LossScaleOptimizer` around another: it then sees the same gradients on all
        ranks, which so skip the same steps.
    name
        The prefix of the names of the gradients in the job. None: it is made of the model's variables. Equal models
        that are trained at the same time need one for codecs with error feedback.
    device_dense, device_sparse
        BytePS's; ignored. Tensors stay on their devices.
    compression
        A compressor (`Compression.fp16`), or a choice of codecs by the paths of variables (`bpsfast.compression`).
    sparse_as_dense
        BytePS's; ignored. Sparse gradients are always sent as dense ones.
    average
        Divide sums by the number of ranks.

    Raises ConfigError if *optimizer* is not one of Keras 3, or distributed already; if *compression* is invalid.
    """
    return distribute(optimizer, Reduction(name, average, *parted(compression)))


def distribute(optimizer: Any, reduction: Reduction, n_passes: int = 1) -> Any:
    """Make *optimizer* reduce its gradients by *reduction* before it applies them; return it.

    With *n_passes* above 1 it first averages the gradients of so many backward passes, and reduces the mean. Raises
    ConfigError as `DistributedOptimizer`; also for several passes if *optimizer* is built, or accumulates by itself.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(f"{optimizer!r} is not an optimizer of Keras {keras.__version__}: give an object, such as "
                          "keras.optimizers.SGD(0.1); those of tf_keras (Keras 2) are not taken")
    inner = getattr(optimizer, "inner_optimizer", None)
    if is_distributed(optimizer):
        raise ConfigError(f"optimizer {optimizer.name!r} is a DistributedOptimizer already: gradients would be "
                          "reduced twice")
    if is_distributed(inner):
        raise _wrong_order(inner)
    if n_passes > 1 and (getattr(optimizer, "built", False) or getattr(optimizer, "gradient_accumulation_steps", None)):
        raise ConfigError(f"backward_passes_per_step={n_passes} for an optimizer that is built, or accumulates by "
                          f"itself: make it with gradient_accumulation_steps={n_passes}")
    base = type(optimizer)
    kind = type(base.__name__, (Distributed, base), {
        "__module__": base.__module__, "__doc__": base.__doc__, "_bpsfast_reduction": reduction,
        "_bpsfast_base": base})
    object.__setattr__(optimizer, "__class__", kind)
    if n_passes > 1:
        optimizer.gradient_accumulation_steps = n_passes
    return optimizer


def wrap_for_tensorflow(optimizer: Any, name: str | None, average: bool, compression: Any, n_passes: int,
                        averages_passes: bool) -> Any:
    """As `bpsfast.tensorflow.DistributedOptimizer`, whose compressors become Keras's; *averages_passes* divides the
    gradients of several passes by their number.
    """
    own = {"float16": Compression.fp16, "bfloat16": Compression.bf16}
    if isinstance(compression, type):
        compression = own.get(vars(compression).get("wire_name", ""), compression)
    return distribute(optimizer, Reduction(name, average, *parted(compression),
                                           postscale=1 if averages_passes else n_passes), n_passes)


def is_distributed(optimizer: Any) -> bool:
    """Return whether *optimizer* is a DistributedOptimizer."""
    return issubclass(type(optimizer), Distributed)


def _refuse_loss_scaling_around(optimizer: Any) -> None:
    """Raise `UnsupportedError` if the caller is a LossScaleOptimizer around *optimizer*."""
    frame = sys._getframe(2)
    outer = frame.f_locals.get("self")
    if isinstance(outer, _LossScaler) and outer is not optimizer:
        raise _wrong_order(optimizer)


def _wrong_order(optimizer: Any) -> UnsupportedError:
    return UnsupportedError(
        f"a LossScaleOptimizer around the DistributedOptimizer {optimizer.name!r}: each rank would skip the steps in "
        "which its own gradients are not finite, while the others wait for it. Wrap in the other order, "
        "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(...)). compile() with the policy mixed_float16 wraps "
        "by itself what is no LossScaleOptimizer, unless auto_scale_loss=False")


def load_model(filepath: Any, custom_optimizers: Sequence[type] | None = None,
               custom_objects: Mapping[str, Any] | None = None, compression: CompressionLike = Compression.none,
               **options: Any) -> Any:
    """Return the model of *filepath*, as `keras.models.load_model`, with its optimizer as a DistributedOptimizer.

    Each rank reads the file, which may have been saved with or without a DistributedOptimizer.

    Parameters
    ----------
    custom_optimizers
        Classes of optimizers that are not registered with Keras.
    custom_objects, options
        As of `keras.models.load_model`.
    compression
        As of `DistributedOptimizer`.

    Raises ConfigError if *custom_optimizers* are not classes of optimizers, or *compression* is invalid. Nothing is
    read.
    """
    reduction = Reduction(None, True, *parted(compression))
    return loaded(filepath, custom_optimizers, custom_objects, reduction, options)


def loaded(filepath: Any, custom_optimizers: Sequence[type] | None, custom_objects: Mapping[str, Any] | None,
           reduction: Reduction, options: Mapping[str, Any]) -> Any:
    """As `load_model`, for any *reduction*."""
    objects: dict[str, Any] = {}
    for kind in custom_optimizers or ():
        if not (isinstance(kind, type) and issubclass(kind, keras.optimizers.Optimizer)):
            raise ConfigError(f"custom_optimizers has {kind!r}, which is not a class of optimizers of Keras")
        objects[kind.__name__] = kind
    model = keras.models.load_model(filepath, custom_objects={**objects, **(custom_objects or {})}, **options)
    if getattr(model, "optimizer", None) is not None:
        distribute(model.optimizer, reduction)
    return model
