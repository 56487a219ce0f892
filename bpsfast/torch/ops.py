"""push_pull of torch tensors, with BytePS's signatures (`byteps.torch.ops`)."""
from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..base.dtypes import NAMES
from ..compression.choice import Choice, chosen
from ..gpu import arrays
from ..orchestration.errors import ConfigError, UnsupportedError
from ..pyx import direct
from ..trainer import handle, process
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

#: Device types (torch's names) that bpsfast can read and write. ROCm's are "cuda", too.
REACHED = ("cpu", "cuda")


def tensor_memory(tensor: torch.Tensor, reached: tuple[str, ...] = ("cpu",)) -> TensorInput:
    """Return the memory of *tensor*.

    Raises `UnsupportedError` if it is sparse, on a device other than those *reached*, not contiguous, or of a dtype
    that is not summed.
    """
    require_dense(tensor, "a torch.Tensor (bpsfast.push_pull takes others)",
                  "tensor.to_dense() (or sparse=False in the embedding)", "tensor.cpu()", reached)
    dtype = wire_dtype_name(tensor.dtype)
    if not tensor.is_contiguous() or tensor.is_neg():
        raise UnsupportedError(f"a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} is not "
                               "contiguous: use tensor.contiguous()")
    nbytes = tensor.numel() * tensor.element_size()
    return TensorInput(tensor.data_ptr(), tuple(tensor.shape), dtype, nbytes, True, tensor)


def device_tensor_memory(tensor: torch.Tensor) -> TensorInput:
    """As `tensor_memory`, but it may be on a GPU that CuPy finds: then as it is after torch's current stream."""
    memory = tensor_memory(tensor, REACHED)
    return replace(memory, location=arrays.of_torch(tensor)) if tensor.is_cuda else memory


def require_dense(tensor: object, wanted: str, if_sparse: str, if_elsewhere: str,
                  reached: tuple[str, ...] = ("cpu",)) -> None:
    """Raise `UnsupportedError` unless *tensor* is a dense tensor on one of the devices *reached*.

    The text says what is *wanted*, and to use *if_sparse* or *if_elsewhere*.
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
    """Fix when *name* is sent: pushes of priority 0 go out in the order in which their names were declared.

    All ranks must declare in one order. Names need not be declared. Returns 0.
    """
    process.current().tensors.note_order(name)
    return 0


def _arguments(tensor: torch.Tensor, average: bool, name: str | None, priority: int, choice: Choice | None,
               learning_rate: float | None = None, in_place: bool = False) -> tuple[Any, ...]:
    """Return the arguments of `handle.start` and `handle.run`, which sum *tensor* into itself or into a new tensor."""
    memory = device_tensor_memory(tensor)
    output = tensor if in_place else torch.empty_like(tensor, requires_grad=False)
    target = memory if in_place else device_tensor_memory(output)
    priority = process.current().tensors.noted_priority(name, priority)
    return memory, name, average, priority, target, output, choice, learning_rate


def push_pull_async(tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0,
                    priority: int = 0, *, compression: Choice | None = None,
                    learning_rate: float | None = None) -> Handle:
    """Begin to sum *tensor* over all ranks; `synchronize` of the handle returns a new tensor.

    *tensor* must not be written until then. *version* is BytePS's; rounds are counted here, so it changes nothing.
    *compression* is a codec or a choice of codecs, *learning_rate* for its error feedback: see `bpsfast.push_pull`.
    """
    return handle.start(*_arguments(tensor, average, name, priority, compression, learning_rate))


def push_pull_async_inplace(tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0,
                            priority: int = 0, *, compression: Choice | None = None,
                            learning_rate: float | None = None) -> Handle:
    """Begin to sum *tensor* over all ranks; the result replaces its contents by the time `synchronize` returns it."""
    return handle.start(*_arguments(tensor, average, name, priority, compression, learning_rate, in_place=True))


#: The size of a group of push_pulls, and the count of calls; taking the next number is atomic.
_group = sys.maxsize, itertools.count()


def byteps_torch_set_num_grads(num_grads_: int) -> int:
    """Let every *num_grads_* calls of `push_pull_group_sync_inplace` be a group, beginning with the next. Returns 0."""
    global _group
    if num_grads_ < 1:
        raise ConfigError(f"byteps_torch_set_num_grads({num_grads_}): a group has at least one gradient")
    _group = num_grads_, itertools.count()
    return 0


def push_pull_group_sync_inplace(tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0,
                                 priority: int = 0) -> tuple[Handle, int]:
    """As `push_pull_async_inplace`; return the handle and the number of this call in its group, from 1 on.

    A caller that gets the size of the group (`byteps_torch_set_num_grads`) has begun its last push_pull, and waits for
    all of them. There is one count in a process; `DistributedDataParallel` does not use it.
    """
    begun = push_pull_async_inplace(tensor, average, name, version, priority)
    size, calls = _group
    return begun, next(calls) % size + 1


#: Of calls that wait, whose priorities mean something else than those of `bpsfast.push_pull`.
_direct_pushes: handle.DirectPushes = {}


class _PushPull(torch.autograd.Function):
    """The sum is linear: its gradient is the sum (mean) of the ranks' gradients.

    The gradient travels under the same name, unless it is compressed: the residuals of the two must not be mixed.
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
        total: torch.Tensor = handle.run(*_arguments(tensor, average, name, priority, codec, learning_rate))
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total = handle.run(*_arguments(gradients[0].contiguous(), *ctx.arguments))
        return total, None, None, None, None, None


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
    is_plain = compression is Compression.none and learning_rate is None
    known = _direct_pushes.get(name) if is_plain and isinstance(name, str) else None
    if known is not None and type(tensor) is torch.Tensor and not tensor.requires_grad:
        out = torch.empty_like(tensor)
        if known.push_pull(tensor, out, average, priority) is not None:
            return out
    compressor, choice = parted(compression)
    compressed, context = compressor.compress(tensor)
    summed = _PushPull.apply(compressed, average, name, priority, choice, learning_rate)
    if is_plain and not tensor.requires_grad and process.current().sums_directly:
        handle.note_direct(_direct_pushes, tensor, device_tensor_memory(tensor), name, average, priority)
    return compressor.decompress(summed, context)


@direct.known_first_in_place(_direct_pushes)
def push_pull_inplace(tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0,
                      priority: int = 0, *, compression: Choice | None = None,
                      learning_rate: float | None = None) -> torch.Tensor:
    """Replace *tensor* by its sum (mean) over all ranks and return it; the arguments are those of `push_pull_async`."""
    is_plain = compression is None and learning_rate is None
    arguments = _arguments(tensor, average, name, priority, compression, learning_rate, in_place=True)
    total: torch.Tensor = handle.run(*arguments)
    if is_plain:
        handle.note_direct(_direct_pushes, tensor, arguments[0], name, average, priority)
    return total


def poll(handle: Handle) -> bool:
    """Return whether `synchronize` of *handle* will not block."""
    return handle.done()


def synchronize(handle: Handle) -> torch.Tensor:
    """Wait for *handle* and return its tensor."""
    return handle.wait()


#: Functions that `shutdown` calls, in this order, before this process leaves its job.
before_shutdown: list[Callable[[], None]] = []


def init(lazy: bool = True) -> None:
    """Join the job (`bpsfast.init`) now, so that errors show now; BytePS, if *lazy*, connects later."""
    process.init()


def shutdown() -> None:
    """Make the due updates (`cross_barrier`), then leave the job (`bpsfast.shutdown`)."""
    try:
        for call in before_shutdown:
            call()
    finally:
        process.shutdown()


def suspend() -> None:
    """Make the due updates, then leave the job until `resume`; raises as `process.suspend`."""
    process.suspend(shutdown)
