"""Communication hooks for torch's DistributedDataParallel that sum its buckets by bpsfast, compressed between nodes.

    state = CompressionState(k=0.01)                  # error feedback is on unless told otherwise
    state.follow(optimizer)
    model.register_comm_hook(state, topk_hook)

The process group of the model may be of any backend: it does what else a model needs (broadcasts, barriers), the sums
of gradients go through bpsfast's job, which is that of `bpsfast.torch.init`, or the backend's own. A hook does not
wait: it gives back a future, which a thread of the state completes.
"""
# torch looks at the signatures of hooks, and takes no annotations that are text: no `annotations` of __future__ here.
from typing import Any

import torch
import torch.distributed as dist

from ..compression import formats
from ..orchestration.codec import CodecSpec
from .compression_state import CompressionState as CompressionState


def onebit_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send signs and one scale a partition (`compression.onebit`); `scaled` of *state* counts."""
    return state.reduce(bucket, _codec(state, "onebit", scaled=state.scaled))


def topk_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send the largest elements (`compression.topk`); `k` of *state* counts."""
    return state.reduce(bucket, _codec(state, "topk", k=state.k))


def randomk_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send elements drawn at random (`compression.randomk`); `k` and `seed` of *state* count."""
    return state.reduce(bucket, _codec(state, "randomk", k=state.k, seed=state.seed))


def dithering_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send drawn levels (`compression.dithering`); `levels`, `partition`, `normalize` and `seed` of *state* count."""
    return state.reduce(bucket, _codec(state, "dithering", levels=state.levels, partition=state.partition,
                                       normalize=state.normalize, seed=state.seed))


def int8_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send 8-bit integers with a scale for each 256 (`compression.int8`)."""
    return state.reduce(bucket, _codec(state, "int8"))


def _codec(state: CompressionState, kind: str, **options: Any) -> CodecSpec:
    made: CodecSpec = getattr(formats, kind)(error_feedback=state.error_feedback, momentum=state.momentum, **options)
    return made
