"""Communication hooks for torch's DistributedDataParallel that sum its buckets by bpsfast, compressed between nodes.

    state = CompressionState(k=0.01)                  # error feedback is on unless told otherwise
    state.follow(optimizer)
    model.register_comm_hook(state, topk_hook)

The process group of the model may be of any backend: it does what else a model needs (broadcasts, barriers), the sums
of gradients go through bpsfast's job, which is that of `bpsfast.torch.init`, or the backend's own. A hook does not
wait: it gives back a future, which a thread of the state completes, maybe after later buckets have come. So hooks round
these hang what they do on the future, with ``then``, and do not wait for it.
"""
# torch looks at the signatures of hooks, and takes no annotations that are text: no `annotations` of __future__ here.
from typing import Any

import torch
import torch.distributed as dist

from ..compression import formats
from ..orchestration.codec import CodecSpec
from ..orchestration.errors import ConfigError
from .compression_state import CompressionState as CompressionState


def onebit_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send signs and one scale a partition (`compression.onebit`); `scaled` of *state* counts."""
    return _reduced(state, bucket, "onebit", "scaled")


def topk_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send the largest elements (`compression.topk`); `k` of *state* counts."""
    return _reduced(state, bucket, "topk", "k")


def randomk_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send elements drawn at random (`compression.randomk`); `k` and `seed` of *state* count."""
    return _reduced(state, bucket, "randomk", "k", "seed")


def dithering_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send drawn levels (`compression.dithering`); `levels`, `partition`, `normalize` and `seed` of *state* count."""
    return _reduced(state, bucket, "dithering", "levels", "partition", "normalize", "seed")


def int8_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send 8-bit integers with a scale for each 256 (`compression.int8`)."""
    return _reduced(state, bucket, "int8")


def _reduced(state: CompressionState, bucket: dist.GradBucket, kind: str, *options: str
             ) -> torch.futures.Future[torch.Tensor]:
    """Begin to average *bucket*, compressed as *kind* with those *options* of *state*."""
    if not isinstance(state, CompressionState):  # torch's own hooks take None or a process group
        raise ConfigError(f"the state of {kind}_hook is {state!r}: give it one of bpsfast's, as in "
                          f"model.register_comm_hook(CompressionState(), {kind}_hook)")
    return state.reduce(bucket, _codec(state, kind, **{option: getattr(state, option) for option in options}))


def _codec(state: CompressionState, kind: str, **options: Any) -> CodecSpec:
    made: CodecSpec = getattr(formats, kind)(error_feedback=state.error_feedback, momentum=state.momentum, **options)
    return made
