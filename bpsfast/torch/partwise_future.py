"""A torch future of a tensor that is computed in parts: done with the last part, or with the first error."""
from __future__ import annotations

import threading
from collections.abc import Callable

import torch


class PartwiseFuture:
    """Completes `future` with *tensor* when *n_parts* parts are done, or with the first error. Any thread.

    *at_end* is called just before, with the error or None, and returns the error to complete the future with.
    """

    def __init__(self, tensor: torch.Tensor, n_parts: int,
                 at_end: Callable[[BaseException | None], BaseException | None] = lambda error: error) -> None:
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[tensor.device] if tensor.is_cuda else [])
        self.tensor = tensor
        self._n_left = n_parts
        self._at_end = at_end
        self._lock = threading.Lock()

    def part_done(self, error: BaseException | None) -> None:
        """Count one more part, or *error*; after the end of the future nothing counts."""
        with self._lock:
            if not self._n_left:
                return
            self._n_left = self._n_left - 1 if error is None else 0
            if self._n_left:
                return
        error = self._at_end(error)
        if error is None:
            self.future.set_result(self.tensor)
        else:
            self.future.set_exception(error)  # type: ignore[arg-type]  # torch's hint is wrong


def raising(future: torch.futures.Future[torch.Tensor]) -> torch.futures.Future[torch.Tensor]:
    """Return *future* for DistributedDataParallel's C++, which takes an error for a tensor unless a callback raises it.
    """
    return future.then(lambda done: done.value())
