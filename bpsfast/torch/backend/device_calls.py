"""Executes a process group's calls with GPU tensors on staging buffers in shared memory, in the order of GPU streams.

    when called    copies to the staging buffers are enqueued, after earlier work of the caller's stream
    in its turn    the call waits for the copies, and runs as with CPU tensors
    at its end     copies back are enqueued; `Work.wait` makes the current stream wait for them

So the caller waits for no copy, and its stream not for the host, unless the program waits for the result.
"""
from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from ...gpu import arrays
from ...gpu.device import Event
from ...gpu.host import host_device
from ...orchestration.errors import UnsupportedError
from ...trainer.gpu.staging_buffers import StagingBuffer
from ...trainer.session import Session


@dataclass(eq=False)
class _StagedTensor:
    """A tensor on a device, its staging buffer (None: it is empty), and a CPU tensor over that."""

    tensor: torch.Tensor
    staging_buffer: StagingBuffer | None
    staging_tensor: torch.Tensor
    is_read: bool = False
    is_written: bool = False


class DeviceCall:
    """One call of a group, until its results were copied back. One thread at a time."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pairs: dict[tuple[int, tuple[int, ...], torch.dtype], _StagedTensor] = {}
        self._done: list[tuple[StagingBuffer, Event]] = []
        self.is_under_way = False  # whether another thread executes and ends it

    def staging_tensor(self, tensor: torch.Tensor, is_read: bool, is_written: bool) -> torch.Tensor:
        """Return the CPU tensor to use instead of *tensor*; raises `UnsupportedError` if that is not contiguous."""
        key = tensor.data_ptr(), tuple(tensor.shape), tensor.dtype
        pair = self._pairs.get(key)
        if pair is None:
            if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
                raise UnsupportedError(f"a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} on "
                                       f"{tensor.device} is not contiguous: use tensor.contiguous()")
            pair = self._pairs[key] = self._pair(tensor)
        pair.is_read |= is_read
        pair.is_written |= is_written
        return pair.staging_tensor

    def _pair(self, tensor: torch.Tensor) -> _StagedTensor:
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes == 0:
            return _StagedTensor(tensor, None, torch.empty(tensor.shape, dtype=tensor.dtype))
        location = arrays.of_torch(tensor) if tensor.is_cuda else host_device().location()
        staging_buffer = StagingBuffer(self._session.devices.staging_buffers, location, tensor.data_ptr(), nbytes,
                                       tensor)
        flat = torch.from_numpy(staging_buffer.region.array[:nbytes])
        return _StagedTensor(tensor, staging_buffer, flat.view(tensor.dtype).view(tensor.shape))

    def begin(self) -> None:
        """Enqueue the copies of tensors that are read to their staging buffers."""
        for pair in self._pairs.values():
            if pair.staging_buffer is not None and pair.is_read:
                pair.staging_buffer.fetch()

    def arrive(self, timeout_s: float) -> None:
        """Wait for those copies, at most *timeout_s*. Raises as `StagingBuffer.wait`."""
        deadline = time.monotonic() + timeout_s
        for pair in self._pairs.values():
            if pair.staging_buffer is not None:
                pair.staging_buffer.wait(deadline)

    def leave(self) -> None:
        """Enqueue the copies of tensors that were written back to the device."""
        self._done = [(pair.staging_buffer, pair.staging_buffer.restore()) for pair in self._pairs.values()
                      if pair.staging_buffer is not None and pair.is_written]

    def originals(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that *tensors* stand for."""
        tensor_of = {id(pair.staging_tensor): pair.tensor for pair in self._pairs.values()}
        return [tensor_of.get(id(tensor), tensor) for tensor in tensors]

    def join(self) -> None:
        """Make the current streams wait for the results."""
        for staging_buffer, event in self._done:
            staging_buffer.location.caller().wait(event)

    @contextlib.contextmanager
    def found(self) -> Iterator[None]:
        """Inside the block the current streams are new ones that wait for the results."""
        with contextlib.ExitStack() as stack:
            for pair in self._pairs.values():
                if pair.tensor.is_cuda:
                    stack.enter_context(torch.cuda.stream(torch.cuda.Stream(pair.tensor.device)))
            self.join()
            yield

    @property
    def devices(self) -> list[torch.device]:
        """The GPUs of its tensors, as torch's futures need them."""
        return sorted({pair.tensor.device for pair in self._pairs.values() if pair.tensor.is_cuda}, key=str)

    def end(self) -> None:
        """Release the staging buffers. Once; the call is over."""
        for pair in self._pairs.values():
            staging_buffer, pair.staging_buffer = pair.staging_buffer, None
            if staging_buffer is not None:
                staging_buffer.release()


_current: ContextVar[DeviceCall | None] = ContextVar("bpsfast_call", default=None)
#: Returns this thread's present call if its tensors are on a device.
current = _current.get


def on_device(reads: tuple[int, ...], writes: tuple[int, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a method of a group accept tensors on devices: it reads arguments number *reads* and writes *writes*.

    These arguments are tensors or (nested) sequences of tensors.
    """
    both = sorted({*reads, *writes})

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def made(self: Any, *arguments: Any, **options: Any) -> Any:
            session: Session = self.session
            numbers = [number for number in both if number < len(arguments)]
            if _current.get() is not None or not any(_is_on_device(arguments[number], session) for number in numbers):
                return method(self, *arguments, **options)
            call = DeviceCall(session)
            staged = list(arguments)
            try:
                for number in numbers:
                    staged[number] = _replaced(arguments[number], call, number in reads, number in writes)
                token = _current.set(call)
                try:
                    call.begin()
                    return method(self, *staged, **options)
                finally:
                    _current.reset(token)
            except BaseException:
                if not call.is_under_way:
                    call.end()
                raise

        return made

    return decorate


def _is_on_device(value: Any, session: Session) -> bool:
    if isinstance(value, torch.Tensor):
        is_dense = value.layout == torch.strided
        return is_dense and (value.is_cuda or (session.settings.host_device and value.device.type == "cpu"))
    return isinstance(value, list | tuple) and any(_is_on_device(each, session) for each in value)


def _replaced(value: Any, call: DeviceCall, is_read: bool, is_written: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return call.staging_tensor(value, is_read, is_written)
    if isinstance(value, list | tuple):
        return [_replaced(each, call, is_read, is_written) for each in value]
    return value
