"""Communication hooks for torch's DistributedDataParallel that sum its buckets by bpsfast, compressed between nodes.

    state = CompressionState(k=0.01)                  # error feedback is on by default
    state.follow(optimizer)
    model.register_comm_hook(state, topk_hook)

The process group of the model may be of any backend and serves for broadcasts and barriers. The sums of gradients go
through bpsfast's job: that of `bpsfast.torch.init`, or of the backend "bpsfast". A hook does not block: it returns a
future, which a thread of the state completes, maybe after later buckets have come. A hook that wraps one of these must
not wait for the future; it continues with ``then``.
"""
# torch checks the annotations of hooks and refuses strings, so this file does without `annotations` of __future__.
import torch
import torch.distributed as dist

from ..compression import formats
from ..orchestration.errors import ConfigError
from .compression_state import CompressionState as CompressionState


def onebit_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send signs and one scale a partition (`compression.onebit`), with `scaled` of *state*."""
    return _reduced(state, bucket, "onebit", "scaled")


def topk_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send the largest elements (`compression.topk`), with `k` of *state*."""
    return _reduced(state, bucket, "topk", "k")


def randomk_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send elements drawn at random (`compression.randomk`), with `k` and `seed` of *state*."""
    return _reduced(state, bucket, "randomk", "k", "seed")


def dithering_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send drawn levels (`compression.dithering`), with `levels`, `partition`, `normalize` and `seed` of *state*."""
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
    given = {option: getattr(state, option) for option in ("error_feedback", "momentum", *options)}
    return state.reduce(bucket, getattr(formats, kind)(**given))
