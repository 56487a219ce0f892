"""push_pull of torch tensors, with BytePS's signatures (`byteps.torch.ops`)."""
from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..base.dtypes import NAMES
from ..compression.choice import Choice, chosen
from ..gpu import arrays
from ..orchestration.errors import ConfigError, UnsupportedError
from ..trainer import handle as operations, process
from ..trainer.arguments import flag
from ..trainer.handle import Handle
from ..trainer.process import (
    barrier as barrier,
    local_rank as local_rank,
    local_size as local_size,
    rank as rank,
    resume as resume,
    size as size,
)
from ..trainer.tensor_input import TensorInput
from .compression import Compression, CompressionLike, parted

#: Kinds of devices (torch's words) whose memory is reached. ROCm's are "cuda", too.
REACHED = ("cpu", "cuda")


def tensor_memory(tensor: torch.Tensor) -> TensorInput:
    """Return where the elements of *tensor* lie on the CPU.

    Raises
    ------
    UnsupportedError
        If it is sparse, not on the CPU, not contiguous, or of a dtype that is not summed.
    """
    return _memory(tensor, ("cpu",))


def device_tensor_memory(tensor: torch.Tensor) -> TensorInput:
    """As `tensor_memory`, but it may be on a GPU that CuPy finds: then as it is on torch's current stream."""
    memory = _memory(tensor, REACHED)
    return replace(memory, location=arrays.of_torch(tensor)) if tensor.is_cuda else memory


def _memory(tensor: torch.Tensor, reached: tuple[str, ...]) -> TensorInput:
    require_dense(tensor, "a torch.Tensor (bpsfast.push_pull takes others)",
                  "tensor.to_dense() (or sparse=False in the embedding)", "tensor.cpu()", reached)
    dtype = wire_dtype_name(tensor.dtype)
    if not tensor.is_contiguous() or tensor.is_neg():
        raise UnsupportedError(f"a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} is not "
                               "contiguous: use tensor.contiguous()")
    nbytes = tensor.numel() * tensor.element_size()
    return TensorInput(tensor.data_ptr(), tuple(tensor.shape), dtype, nbytes, True, tensor)


def require_dense(tensor: object, wanted: str, if_sparse: str, if_elsewhere: str,
                  reached: tuple[str, ...] = ("cpu",)) -> None:
    """Raise `UnsupportedError` unless *tensor* is a dense one on one of the devices *reached*; the text says what is
    *wanted*, and to use *if_sparse* or *if_elsewhere*.
    """
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedError(f"expected {wanted}, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise UnsupportedError(f"a {tensor.layout} tensor of shape {tuple(tensor.shape)} is not dense: use {if_sparse}")
    if tensor.device.type not in reached:
        raise UnsupportedError(f"a tensor of shape {tuple(tensor.shape)} is on {tensor.device}: use {if_elsewhere}")


def wire_dtype_name(dtype: torch.dtype) -> str:
    """Return the wire name of *dtype*; raises `UnsupportedError` if it is not summed."""
    name = str(dtype).removeprefix("torch.")
    if name not in NAMES:
        raise UnsupportedError(f"{dtype} cannot be summed; bpsfast sums {', '.join(NAMES)}")
    return name


def declare(name: str) -> int:
    """Fix the place of *name*: pushes of priority 0 go out in the order in which their names were declared. Returns 0.

    All ranks must declare in one order. Names need not be declared.
    """
    session = process.current()
    session.tensors.note_order(name)
    return 0


def push_pull_async(tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0,
                    priority: int = 0, *, compression: Choice | None = None,
                    learning_rate: float | None = None) -> Handle:
    """Begin to sum *tensor* over all ranks; `synchronize` of the handle returns a new tensor.

    *tensor* must not be written until then. *version* is BytePS's; rounds are counted here, so it changes nothing.
    *compression* is a codec, or what chooses one, and *learning_rate* for its error feedback: see `bpsfast.push_pull`.
    """
    memory = device_tensor_memory(tensor)
    output = torch.empty_like(tensor, requires_grad=False)
    return operations.start(memory, name, average, _priority(name, priority), device_tensor_memory(output), output,
                            compression, learning_rate)


def push_pull_async_inplace(tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0,
                            priority: int = 0, *, compression: Choice | None = None,
                            learning_rate: float | None = None) -> Handle:
    """Begin to sum *tensor* over all ranks; the result replaces its contents by the time `synchronize` returns it."""
    memory = device_tensor_memory(tensor)
    return operations.start(memory, name, average, _priority(name, priority), memory, tensor, compression,
                            learning_rate)


class _Group:
    """Counts the push_pulls of a group of *n_members*; 0: no end of it. Any thread."""

    def __init__(self, n_members: int = 0) -> None:
        self._n_members = n_members
        self._n_begun = 0
        self._lock = threading.Lock()

    def count(self) -> int:
        """Return the place of one more push_pull in its group, from 1 on."""
        with self._lock:
            self._n_begun += 1
            place = self._n_begun
            if place == self._n_members:
                self._n_begun = 0
            return place


_group = _Group()


def byteps_torch_set_num_grads(num_grads_: int) -> int:
    """Let every *num_grads_* calls of `push_pull_group_sync_inplace` be a group, beginning with the next. Returns 0."""
    global _group
    if num_grads_ < 1:
        raise ConfigError(f"byteps_torch_set_num_grads({num_grads_}): a group has at least one gradient")
    _group = _Group(num_grads_)
    return 0


def push_pull_group_sync_inplace(tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0,
                                 priority: int = 0) -> tuple[Handle, int]:
    """As `push_pull_async_inplace`; return the handle and the place of this call in its group, from 1 on.

    Whoever gets the size of the group (`byteps_torch_set_num_grads`) has begun the last one and waits for all. There is
    one count in a process; `DistributedDataParallel` does without it.
    """
    handle = push_pull_async_inplace(tensor, average, name, version, priority)
    return handle, _group.count()


def _push_pull(tensor: torch.Tensor, average: bool, name: str, priority: int, codec: Choice | None,
               learning_rate: float | None = None) -> torch.Tensor:
    """Sum *tensor* into a new one."""
    output = torch.empty_like(tensor, requires_grad=False)
    return operations.run(device_tensor_memory(tensor), name, average, _priority(name, priority),
                          device_tensor_memory(output), output, codec, learning_rate)


def _priority(name: str | None, priority: int) -> int:
    return process.current().tensors.noted_priority(name, priority)


class _PushPull(torch.autograd.Function):
    """The sum is linear: its gradient is the sum (mean) of the ranks' gradients.

    That travels under the same name, unless it is compressed: what was not sent of one must not be added to the other.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, average: bool, name: str | None, priority: int, choice: Choice | None,
                learning_rate: float | None) -> torch.Tensor:
        codec = None if choice is None else chosen(
            choice, name or "", tuple(tensor.shape), wire_dtype_name(tensor.dtype),
            process.current().settings.min_compress_bytes, is_alone=True)
        if name is None:  # backward needs the name, so it is chosen here; a call that fails must not take a number
            device_tensor_memory(tensor)
            average = flag(average)
            name = process.current().tensors.unnamed("auto")
        ctx.arguments = (average, name if codec is None else f"{name}.backward", priority, codec)
        return _push_pull(tensor, average, name, priority, codec, learning_rate)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _push_pull(gradients[0].contiguous(), *ctx.arguments), None, None, None, None, None


def push_pull(tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0,
              compression: CompressionLike = Compression.none, *, learning_rate: float | None = None) -> torch.Tensor:
    """Return the sum (mean) of *tensor* over all ranks as a new tensor. Differentiable: backward sums the gradients.

    *compression* is a compressor, or a choice of codecs (`bpsfast.torch.compression`); *learning_rate* is for error
    feedback, as of `bpsfast.push_pull`.

    Raises
    ------
    ConfigError, UnsupportedError, MismatchError, BusyError, ClosedError, StallError, PeerLostError
        As `bpsfast.push_pull`.
    """
    compressor, choice = parted(compression)
    compressed, context = compressor.compress(tensor)
    summed = _PushPull.apply(compressed, average, name, priority, choice, learning_rate)
    return compressor.decompress(summed, context)


def push_pull_inplace(tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0,
                      priority: int = 0, *, compression: Choice | None = None,
                      learning_rate: float | None = None) -> torch.Tensor:
    """Replace *tensor* by its sum (mean) over all ranks and return it; the rest as of `push_pull_async`."""
    memory = device_tensor_memory(tensor)
    return operations.run(memory, name, average, _priority(name, priority), memory, tensor, compression, learning_rate)


def poll(handle: Handle) -> bool:
    """Return whether `synchronize` of *handle* will not block."""
    return handle.done()


def synchronize(handle: Handle) -> torch.Tensor:
    """Wait for *handle* and return its tensor."""
    return handle.wait()


#: Called in this order before this process leaves its job.
before_shutdown: list[Callable[[], None]] = []


def init(lazy: bool = True) -> None:
    """Join the job (`bpsfast.init`). BytePS connects later if *lazy*; here it is always now, so errors show now."""
    process.init()


def shutdown() -> None:
    """Make the updates that are due (`cross_barrier`), then leave the job (`bpsfast.shutdown`)."""
    try:
        for call in before_shutdown:
            call()
    finally:
        process.shutdown()


def suspend() -> None:
    """Make the updates that are due, then leave the job until `resume`; raises as `process.suspend`."""
    process.suspend(shutdown)
