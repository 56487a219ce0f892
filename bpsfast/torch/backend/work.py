"""Work: the object that a collective call returns, to wait for the call or to get its future."""
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

#: References to works that nobody has waited for yet, by id. Without them (see `LOSES_PYTHON_WORK`) C++ would call
#: torch's own `wait`, which blocks for ever.
_references: dict[int, Work] = {}
_references_lock = threading.Lock()
#: Above this number the oldest reference is dropped, so that works without a wait do not leak their tensors.
_MAX_REFERENCES = 256


def _release(work: Work) -> None:
    with _references_lock:
        _references.pop(id(work), None)


def torch_error(error: BaseException) -> BaseException:
    """Return a DistBackendError for bpsfast's *error*, which becomes its cause; return other errors as they are."""
    if not isinstance(error, BpsError):
        return error
    late = " (the timeout of the call was reached)" if isinstance(error, StallError) else ""  # people search for it
    raised = dist.DistBackendError(f"{type(error).__name__}: {error}{late}")
    raised.__cause__ = error
    return raised


class Work(dist.Work):
    """A call whose results are *tensors*; *call* is set if they are on devices. Any thread; `finish` once."""

    def __init__(self, tensors: Sequence[torch.Tensor], timeout_s: float, text: str,
                 call: DeviceCall | None = None) -> None:
        super().__init__()
        self._calls = [] if call is None else [call]
        self._tensors = list(tensors) if call is None else call.originals(tensors)
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
            with _references_lock:
                _references[id(self)] = self
                if len(_references) > _MAX_REFERENCES:
                    del _references[next(iter(_references))]

    def tell_failure(self, failed: Callable[[BaseException], None]) -> None:
        """Call ``failed(error)`` if the call fails, or has failed, before `wait` raises the error."""
        with self._lock:
            if not self._event.is_set():
                self._failed = failed
            elif self._error is not None:
                failed(self._error)

    def _note(self, error: BaseException) -> None:
        """Report that a wait has failed, though the call is not over."""
        with self._lock:
            if self._failed is not None:
                self._failed(error)

    def finish(self, error: BaseException | None, source: int = -1) -> None:
        """Complete the call, with its *error* or the member *source* that sent the message. The first end counts."""
        with self._lock:
            if self._event.is_set():
                return
            self._error = None if error is None else torch_error(error)
            self._source = source
            if self._error is not None and self._failed is not None:
                self._failed(self._error)
            self._failed = None  # a reference to a work must not keep its group alive
            self._event.set()
            base = self._base
        for call in self._calls:
            call.end()
        if base is not None:
            self._complete(base)

    @property
    def is_on_device(self) -> bool:
        return bool(self._calls)

    def includes(self, works: Sequence[Work]) -> None:
        """Make `wait` and the future of this call, which waits for *works*, deliver their results on devices too."""
        with self._lock:
            self._calls = [*self._calls, *(call for work in works for call in work._calls)]

    @eager
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the call is over, or raise its error. On a GPU the current stream then finds the results.

        At its group's timeout the call itself fails and names the missing member; after a shorter *timeout* this raises
        TimeoutError, which names only the call.
        """
        if LOSES_PYTHON_WORK:
            _release(self)
        given_s = timeout.total_seconds() if timeout is not None else 0.0
        # Without *timeout* this has no deadline of its own: the call has one, and gives the better reason.
        if not self._event.wait(given_s if given_s > 0 else None):
            raise torch_error(TimeoutError(f"{self._text} was not complete within {given_s:g} s"))
        if self._error is not None:
            raise self._error
        for call in self._calls:
            call.join()
        return True

    @eager
    def synchronize(self) -> None:
        self.wait()

    @eager
    def is_completed(self) -> bool:
        return self._event.is_set()

    @eager
    def is_success(self) -> bool:
        return self._event.is_set() and self._error is None

    @eager
    def exception(self) -> BaseException | None:
        return self._error

    @eager
    def result(self) -> list[torch.Tensor]:
        return self._tensors

    @eager
    def source_rank(self) -> int:
        """Return the member whose message was received."""
        return self._source

    _source_rank = source_rank

    @eager
    def get_future(self) -> Any:
        """Return a future of the tensors. It raises the call's error: torch's reducer would read an exception that was
        stored as the value as tensors.
        """
        if LOSES_PYTHON_WORK:
            _release(self)
        is_over = False
        with self._lock:
            if self._future is None:
                self._base = torch.futures.Future(devices=[device for call in self._calls for device in call.devices])
                self._future = self._base.then(self._value)
                is_over = self._event.is_set()
        if is_over:
            self._complete(self._base)
        return self._future

    def _complete(self, base: Any) -> None:
        """Complete *base*, whose callbacks run on streams that find the results."""
        with contextlib.ExitStack() as stack:
            if self._error is None:
                for call in self._calls:
                    stack.enter_context(call.found())
            base.set_result(None)

    def _value(self, _: Any) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors
