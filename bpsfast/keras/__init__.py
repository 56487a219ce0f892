"""bpsfast for Keras 3, with the API of `byteps.keras`, on its backends TensorFlow, PyTorch and JAX.

    import bpsfast.keras as bps
    bps.init()
    model.compile(bps.DistributedOptimizer(keras.optimizers.Adam(1e-3)), loss="mse")
    model.fit(x, y, callbacks=[bps.callbacks.BroadcastGlobalVariablesCallback(0)])

Only these lines of a program change. KERAS_BACKEND, set before the first import of Keras, selects the backend.
"""
from __future__ import annotations

from ..trainer.stats import get_pushpull_speed
from . import callbacks
from .backend import barrier, init, local_rank, local_size, rank, shutdown, size
from .compression import Compression, Compressor
from .ops import broadcast, broadcast_global_variables, push_pull
from .optimizer import DistributedOptimizer, load_model

__all__ = [
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "get_pushpull_speed",
    "init",
    "load_model",
    "local_rank",
    "local_size",
    "push_pull",
    "rank",
    "shutdown",
    "size",
]
