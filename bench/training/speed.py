"""The training speed of one rank, and of all of them."""
from __future__ import annotations

from typing import NamedTuple


class Speed(NamedTuple):
    """Steps of *step_s* seconds, in which each of *n_ranks* takes *batch* samples of *length* tokens (0: images)."""

    step_s: float
    batch: int
    n_ranks: int
    length: int = 0

    @property
    def unit(self) -> str:
        """What is counted."""
        return "tokens" if self.length else "images"

    @property
    def of_one(self) -> float:
        """Images or tokens a second of one rank."""
        return self.batch * (self.length or 1) / self.step_s

    @property
    def total(self) -> float:
        """Of all ranks: images/s of one x ranks, or steps/s x batch x max_seq_len x ranks."""
        return self.of_one * self.n_ranks

    def text(self) -> str:
        """Return both in a line."""
        one = (f"{1 / self.step_s:,.4g} steps/s, {self.of_one:,.4g} tokens/s" if self.length
               else f"{self.of_one:,.4g} images/s")
        return f"one rank: {one}; total of {self.n_ranks} ranks: {self.total:,.0f} {self.unit}/s"
