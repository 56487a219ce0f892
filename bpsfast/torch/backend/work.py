"""One collective under way, as torch's `Work`: waited for, asked about, or followed by a future."""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...orchestration.errors import BpsError, StallError
from .device_calls import DeviceCall
from .torch_compat import LOSES_PYTHON_WORK, eager

#: Works without a waiter yet, by id. Without this reference (see `LOSES_PYTHON_WORK`) C++ would call torch's own
#: `wait`, which blocks for ever.
_kept: dict[int, Work] = {}
_keeping = threading.Lock()
#: Maximum number of works to keep. The oldest is dropped first, so that works without a wait do not leak their tensors.
_MAX_KEPT = 256


def _keep(work: Work) -> None:
    with _keeping:
        _kept[id(work)] = work
        if len(_kept) > _MAX_KEPT:
            del _kept[next(iter(_kept))]


def _release(work: Work) -> None:
    with _keeping:
        _kept.pop(id(work), None)


def torch_error(error: BaseException) -> BaseException:
    """Return *error* as torch's users expect it from a backend; the cause has bpsfast's own class."""
    if not isinstance(error, BpsError):
        return error
    late = " (the timeout of the call was reached)" if isinstance(error, StallError) else ""  # people grep for the word
    raised = dist.DistBackendError(f"{type(error).__name__}: {error}{late}")
    raised.__cause__ = error
    return raised


class Work(dist.Work):
    """A call whose results are *tensors*; *call* if they are on devices. `wait` and the rest from any thread, `finish`
    once.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], timeout_s: float, text: str,
                 call: DeviceCall | None = None) -> None:
        super().__init__()
        self._calls = [] if call is None else [call]
        self._tensors = list(tensors)
        self._timeout_s = timeout_s
        self._text = text
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._base: Any = None
        self._future: Any = None
        self._source = -1
        self._failed: Callable[[BaseException], None] | None = None
        if LOSES_PYTHON_WORK:
            _keep(self)

    def tell_failure(self, failed: Callable[[BaseException], None]) -> None:
        """Call ``failed(error)`` if the call fails, or has failed: before anybody who waits hears of it."""
        with self._lock:
            if not self._event.is_set():
                self._failed = failed
            elif self._error is not None:
                failed(self._error)

    def _note(self, error: BaseException) -> None:
        """Tell who wants to know that a wait has failed, though the call is not over."""
        with self._lock:
            if self._failed is not None:
                self._failed(error)

    def finish(self, error: BaseException | None, source: int = -1) -> None:
        """Enter how the call ended, and from which member it was received. The first end counts."""
        with self._lock:
            if self._event.is_set():
                return
            self._error = None if error is None else torch_error(error)
            self._source = source
            if self._error is not None and self._failed is not None:
                self._failed(self._error)
            self._failed = None  # who keeps a work need not keep its group
            self._event.set()
            base = self._base
        for call in self._calls:
            call.end()
        if base is not None:
            self._complete(base)

    @property
    def is_on_device(self) -> bool:
        """Whether results are on devices."""
        return bool(self._calls)

    def includes(self, works: Sequence[Work]) -> None:
        """Let whoever waits for this call find the results of *works*, too, which it waits for."""
        with self._lock:
            self._calls = [*self._calls, *(call for work in works for call in work._calls)]

    @eager
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the call is over; raises what it failed with. On a GPU the stream that is current then finds the
        results.

        The call itself gives up at its group's timeout, naming who is missing; a shorter *timeout* names the call only.
        """
        if LOSES_PYTHON_WORK:
            _release(self)
        given_s = timeout.total_seconds() if timeout is not None else 0.0
        # What carries the call out has the same deadline, and the better reason: it is given a little more.
        if not self._event.wait(given_s if given_s > 0 else None):
            raise torch_error(TimeoutError(f"{self._text} was not complete within {given_s:g} s"))
        if self._error is not None:
            raise self._error
        for call in self._calls:
            call.join()
        return True

    @eager
    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    @eager
    def is_completed(self) -> bool:
        """Whether the call is over, well or not."""
        return self._event.is_set()

    @eager
    def is_success(self) -> bool:
        """Whether the call is over, and went well."""
        return self._event.is_set() and self._error is None

    @eager
    def exception(self) -> BaseException | None:
        """What the call failed with, if it did."""
        return self._error

    @eager
    def result(self) -> list[torch.Tensor]:
        """The tensors that were written."""
        return self._tensors

    @eager
    def source_rank(self) -> int:
        """The member whose message was received."""
        return self._source

    _source_rank = source_rank

    @eager
    def get_future(self) -> Any:
        """Return a future of the tensors. A failure is one of the future's own: an exception stored as its value would
        be read as tensors by torch's reducer."""
        if LOSES_PYTHON_WORK:
            _release(self)
        with self._lock:
            if self._future is None:
                self._base = torch.futures.Future(devices=[device for call in self._calls for device in call.devices])
                self._future = self._base.then(self._value)
                is_over = self._event.is_set()
            else:
                is_over = False
        if is_over:
            self._complete(self._base)
        return self._future

    def _complete(self, base: Any) -> None:
        """Let what follows *base* run, where it finds the results."""
        with contextlib.ExitStack() as stack:
            if self._error is None:
                for call in self._calls:
                    stack.enter_context(call.found())
            base.set_result(None)

    def _value(self, _: Any) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors
