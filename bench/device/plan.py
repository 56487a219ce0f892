"""The options of a run of `bench device`."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: push_pull on a GPU reaches at least this share of the copies' bound.
LEAST_OF_BOUND = 0.85
#: With communication the stream takes at most this many times as long.
MOST_OF_ALONE = 1.05
#: Settings of every job: a rank that hangs ends with an error.
_SETTINGS = {"timeout_s": 60, "start_timeout_s": 120}


@dataclass(frozen=True)
class Plan:
    """*device*: "cuda" or "host"; *sizes* in bytes; *settings* of the jobs in addition to ours."""

    device: str
    n_ranks: int
    sizes: tuple[int, ...]
    n_rounds: int
    quick: bool
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_gpu(self) -> bool:
        """Whether times are measurements; the host device only shows that everything runs."""
        return self.device == "cuda"

    @property
    def job(self) -> dict[str, Any]:
        """The settings of every job."""
        return {**_SETTINGS, **self.settings}

    def n_arrays(self, nbytes: int) -> int:
        """Return how many arrays of *nbytes* make a stream that keeps both directions busy."""
        total = 256 << 20 if self.is_gpu else 16 << 20
        return max(4, min(64, total // nbytes))

    def n_samples(self, nbytes: int) -> int:
        """Return the number of operations in a turn, for *nbytes* in all of an operation."""
        total = 1 << 30 if self.is_gpu else 32 << 20
        return max(2, min(5 if self.quick else 40, total // nbytes))

    @property
    def backward(self) -> tuple[int, int, int]:
        """Return the number of layers, and each layer's bytes of gradient and products of matrices."""
        return (16, 16 << 20, 6) if self.is_gpu else (8, 1 << 20, 4)

    @property
    def step(self) -> tuple[int, int]:
        """Number of arrays, and bytes of each, of the step that is traced."""
        return (8, 32 << 20) if self.is_gpu else (8, 4 << 20)

    @property
    def n_training_steps(self) -> int:
        """Steps of the digits' training."""
        return 10 if self.quick else 60

    @property
    def footprint_nbytes(self) -> int:
        """Return the bytes of gradients whose memory is measured."""
        return 256 << 20 if self.is_gpu else 64 << 20
