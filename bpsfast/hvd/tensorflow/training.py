"""DistributedGradientTape and DistributedOptimizer for TensorFlow, with all of Horovod's arguments."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ...orchestration.errors import ConfigError, UnsupportedError
from ...tensorflow import optimizer as plain
from ...tensorflow.compression import Compression, CompressionLike, parted
from ...tensorflow.optimizer import DistributedGradientTape as _Tape
from ...trainer import process
from ..reduce_op import Average, Sum, check_predivision, chosen
from ..runtime import ProcessSet, global_process_set
from .collective_ops import grouped_allreduce, is_global, scaled


class DistributedGradientTape(_Tape):
    """A `tf.GradientTape` whose `gradient` reduces over all ranks of *process_set*; the rest is *gradtape*'s.

    Parameters
    ----------
    device_dense, device_sparse, compression, sparse_as_dense, op, scope
        As of `bpsfast.tensorflow.DistributedGradientTape`. Process sets take no codecs; in them sparse gradients are
        sent as dense ones, in the same order on all of their ranks.
    gradient_predivide_factor
        Gradients are divided by it before they are averaged, and multiplied by it afterwards.
    num_groups, groups
        Horovod's; ignored, with the same results: gradients are sent by priority.
    process_set
        Ranks outside it get their own gradients.
    scale_local_gradients
        Divide gradients of `register_local_source` by the number of ranks, as averages.

    Raises ConfigError or UnsupportedError if an argument is invalid.
    """

    def __init__(self, gradtape: Any, device_dense: str = "", device_sparse: str = "",
                 compression: CompressionLike = Compression.none, sparse_as_dense: bool = False, op: int = Average,
                 gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Any = None,
                 process_set: ProcessSet = global_process_set, scale_local_gradients: bool = True, *,
                 scope: str | None = None) -> None:
        super().__init__(gradtape, device_dense, device_sparse, compression, sparse_as_dense, op, scope=scope)
        self._reduction = chosen(op)
        check_predivision(gradient_predivide_factor, self._reduction == Average)
        if not is_global(process_set) and parted(compression)[1] is not None:
            raise UnsupportedError(f"codecs compress what is summed over all ranks, not over {process_set}: give a "
                                   "compressor, such as Compression.fp16")
        self._factor, self._process_set = gradient_predivide_factor, process_set
        self._scales_local = scale_local_gradients
        self._local: dict[int, Any] = {}  # by id; holds the sources, so that no id is used again

    def register_local_source(self, source: Any) -> None:
        """Do not reduce the gradient of *source*, of which each rank has its own. All ranks of the set call this."""
        self._local[id(source)] = source

    def _sums(self, sources: Sequence[Any], gradients: list[Any], learning_rate: Any) -> list[Any]:
        is_added = self._process_set.process_set_id is not None  # else the operation raises
        if not is_global(self._process_set) and is_added and not self._process_set.included():
            return gradients
        are_local = [id(source) in self._local for source in sources]
        sent = [None if is_local else scaled(gradient, 1 / self._factor)
                for is_local, gradient in zip(are_local, gradients)]
        found = [scaled(total, self._factor) for total in self._reduced(sources, sent, learning_rate)]
        n_ranks = process.size() if is_global(self._process_set) else self._process_set.size()
        share = 1 / (n_ranks or 1) if self._scales_local else 1.0
        return [scaled(gradient, share) if is_local and gradient is not None else total
                for is_local, gradient, total in zip(are_local, gradients, found)]

    def _reduced(self, sources: Sequence[Any], gradients: list[Any], learning_rate: Any) -> list[Any]:
        if is_global(self._process_set):
            return super()._sums(sources, gradients, learning_rate)
        places = [place for place, gradient in enumerate(gradients) if gradient is not None]
        dense = [tf.convert_to_tensor(gradients[place]) for place in places]
        sums = grouped_allreduce(dense, compression=self._compression, op=self._reduction,
                                 process_set=self._process_set, name=self._scope) if dense else []
        for place, total in zip(places, sums):
            gradients[place] = total
        return gradients


def DistributedOptimizer(optimizer: Any, name: str | None = None, use_locking: bool = False, device_dense: str = "",
                         device_sparse: str = "", compression: CompressionLike = Compression.none,
                         sparse_as_dense: bool = False, backward_passes_per_step: int = 1, op: int = Average,
                         gradient_predivide_factor: float = 1.0, average_aggregated_gradients: bool = False,
                         num_groups: int = 0, groups: Any = None, process_set: ProcessSet = global_process_set,
                         scale_local_gradients: bool = True) -> Any:
    """Return *optimizer* for gradients that are averaged (summed) over all ranks first.

    As `bpsfast.tensorflow.DistributedOptimizer`. *num_groups* and *groups* are ignored, with the same results, as
    gradients are sent by priority; *scale_local_gradients*, too, as an optimizer here has no local variables.

    Raises
    ------
    ConfigError
        As there.
    UnsupportedError
        For a process set or a *gradient_predivide_factor*, which `DistributedGradientTape` takes.
    """
    if not is_global(process_set) or gradient_predivide_factor != 1.0:
        raise UnsupportedError(f"DistributedOptimizer(gradient_predivide_factor={gradient_predivide_factor!r}, "
                               f"process_set={process_set}): only DistributedGradientTape takes them; apply its "
                               "gradients by the optimizer as it is")
    if chosen(op) not in (Average, Sum):
        raise ConfigError(f"op={op!r}: gradients are reduced by Average or Sum")
    return plain.DistributedOptimizer(optimizer, name, use_locking, device_dense, device_sparse, compression,
                                      sparse_as_dense, backward_passes_per_step, op,
                                      average_aggregated_gradients=average_aggregated_gradients)
